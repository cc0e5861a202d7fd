"""Two replicas of a tiny model on a Ray cluster of this machine. Run by `make test-replicas`."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from soloist.cli.serve import load_to_serve
from soloist.server.settings import ServerSettings
from tests.clients.served import serving
from tests.tiny_model import write_tiny_model

pytest.importorskip("ray")
from soloist.server.replicas.fleet import Fleet

LOADING = {
    "context": 1000, "threads": 1, "device": "cpu", "weights": "file", "weights_dtype": None, "dtype": "float32",
    "draft": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Fleet]]:
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    make_llm = partial(load_to_serve, str(folder), prefix_bytes=1 << 28, prefix_device_bytes=0, **LOADING)
    fleet = Fleet(make_llm, ServerSettings(model_name="tiny", api_key="k"), num_replicas=2)
    with serving(fleet) as url:
        yield url, fleet


def call(url: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    headers = {"content-type": "application/json", "x-api-key": "k"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    content = response.read()
    return response.status, json.loads(content) if content[:1] in b"{[" else content.decode()


def say(url: str, messages: list[dict], **fields) -> dict:
    body = {"messages": messages, "max_tokens": 8, "ignore_eos": True} | fields
    status, answer = call(url, "POST", "/v1/chat/completions", body)
    assert status == 200, answer
    return answer


def replicas(url: str) -> list[dict]:
    return call(url, "GET", "/health")[1].get("replicas", [])


def wait_until(holds, seconds: float = 60) -> bool:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            if holds():
                return True
        time.sleep(0.1)
    return False


@contextlib.contextmanager
def stream(url: str, path: str, body: dict) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    headers = {"content-type": "application/json", "x-api-key": "k"}
    connection.request("POST", path, json.dumps(body | {"stream": True}), headers)
    yield connection.getresponse()
    connection.close()


def busy_pid(url: str, fleet: Fleet) -> int:
    """Give the process of the replica that works."""

    async def ask() -> list[int]:
        return [p["pid"] for _, content in await fleet._all("GET", "/props") if (p := json.loads(content))["running"]]

    (pid,) = asyncio.run(ask())
    return pid


def test_conversations_stay_with_a_replica_and_spread_over_both(fleet):
    url, _ = fleet
    for i in range(8):
        messages = [{"role": "system", "content": "the lazy dog " * 30}, {"role": "user", "content": f"question {i}"}]
        first = say(url, messages)
        messages += [first["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        second = say(url, messages)
        kept = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert kept > 0.8 * first["usage"]["prompt_tokens"]
    text = call(url, "GET", "/metrics")[1]
    counts = [
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("soloist_request_success_total") and 'finished_reason="length"' in line
    ]
    assert len(counts) == 2 and sum(counts) == 16 and min(counts) >= 2
    props = call(url, "GET", "/props")[1]
    assert props["num_replicas"] == props["total_slots"] == 2 and len(props["receipts"]) == 16


def test_the_same_routes_and_refusals_as_one_server(fleet):
    url, _ = fleet
    assert call(url, "GET", "/v1/models")[1]["data"][0]["id"] == "tiny"
    assert call(url, "POST", "/tokenize", {"content": "abc"})[1]["count"] > 0
    assert call(url, "GET", "/")[1].startswith("<!")
    status, answer = call(url, "POST", "/v1/chat/completions", {"messages": [], "nonsense": 1})
    assert status == 400 and answer["error"]["code"] == "unknown_field"
    assert call(url, "POST", "/v1/chat/completions", [1])[0] == 400
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 401
    assert call(url, "POST", "/reset_prefix_cache")[0] == 200
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request(
        "POST", "/v1/completions", iter([b"x" * (1 << 20)] * 40), {"x-api-key": "k"}, encode_chunked=True
    )
    assert connection.getresponse().status == 413


def test_a_closed_socket_ends_the_work_of_its_replica(fleet):
    url, _ = fleet
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nx-api-key: k\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert b"data:" in connection.recv(4096) + connection.recv(4096)
        assert sum(r["running"] for r in replicas(url)) == 1
    assert wait_until(lambda: sum(r["running"] for r in replicas(url)) == 0, 5)
    assert "cancelled" in {receipt["finish_reason"] for receipt in call(url, "GET", "/props")[1]["receipts"]}


def test_an_answer_in_one_piece_is_made_again_where_its_replica_is_lost(fleet, caplog: pytest.LogCaptureFixture):
    url, front = fleet
    assert wait_until(lambda: len(replicas(url)) == 2)
    answers: list[dict] = []
    messages = [{"role": "user", "content": "tell me all of it"}]
    thread = threading.Thread(target=lambda: answers.append(say(url, messages, max_tokens=900)))
    thread.start()
    assert wait_until(lambda: sum(r["running"] for r in replicas(url)) == 1, 10)
    os.kill(busy_pid(url, front), signal.SIGKILL)
    thread.join(60)
    assert answers[0]["usage"]["completion_tokens"] == 900
    assert "a replica was lost during /v1/chat/completions" in caplog.text


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", {"max_tokens": 900, "ignore_eos": True}, b"data: [DONE]\n\n"),
        ("/v1/messages", {"max_tokens": 900}, b"event: error\n"),
    ],
)
def test_a_replica_that_is_killed_during_a_stream_costs_only_that_stream(fleet, path: str, body: dict, end: bytes):
    url, front = fleet
    assert wait_until(lambda: len(replicas(url)) == 2)
    body = body | {"messages": [{"role": "user", "content": "go on"}]}
    with stream(url, path, body) as response:
        begun = response.read(200)
        pid = busy_pid(url, front)
        os.kill(pid, signal.SIGKILL)
        rest = response.read()
    assert begun and end in rest and b"replica" in rest.split(end)[0][-300:] + rest[-300:]
    # The conversation goes on at once, on the replica that is left.
    begin_s = time.monotonic()
    say(url, body["messages"])
    assert time.monotonic() - begin_s < 20
    assert wait_until(lambda: len(replicas(url)) == 2)
    assert call(url, "GET", "/health")[0] == 200
