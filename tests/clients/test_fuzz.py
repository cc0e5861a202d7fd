"""Whatever a client sends, the server answers with less than 500 and lives on. Run by `make fuzz`."""

import contextlib
import gc
import http.client
import json
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from soloist.server.app import App
from tests.clients.served import served
from tests.server.client import TOOLS_TEMPLATE, make_tokenizer, scripted_llm

schemathesis = pytest.importorskip("schemathesis")
NUM_CASES = int(os.environ.get("FUZZ_CASES", "2000"))
NUM_BODIES = int(os.environ.get("FUZZ_BODIES", "10000"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), TOOLS_TEMPLATE)
    with served(scripted_llm(tokenizer, ["ab", "cd"]), keep_alive_s=1.0) as (url, app):
        yield url, app


def test_no_case_of_the_schema_makes_the_server_fail(server):
    url, app = server
    schema = schemathesis.openapi.from_dict(app.api.openapi())
    operations = [result.ok() for result in schema.get_all_operations()]
    seen = {"cases": 0}
    # A route without parameters has one case only.
    num_open = sum(operation.method == "post" for operation in operations)
    for operation in operations:

        @settings(
            max_examples=1 + NUM_CASES // num_open,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def run(case) -> None:
            seen["cases"] += 1
            response = case.call(base_url=url, timeout=20)
            assert response.status_code < 500, (response.status_code, response.text, case)

        run()
    assert seen["cases"] >= 0.8 * NUM_CASES
    assert not app.service.queue.num_waiting


def test_malformed_bodies_leave_the_server_alive(server):
    url, _app = server
    host = url.removeprefix("http://")
    chance = random.Random(1)
    good = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stop": ["x"]},
        "/v1/completions": {"prompt": "hi", "max_tokens": 2, "logit_bias": {"1": 2}},
        "/v1/messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 2},
        "/v1/responses": {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 2},
        "/completion": {"prompt": ["hi", 3], "n_predict": 2},
    }
    connection = http.client.HTTPConnection(host, timeout=20)
    for i in range(NUM_BODIES):
        path = list(good)[i % len(good)]
        body = bytearray(json.dumps(good[path]).encode())
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(body))
            if chance.random() < 0.3:
                del body[at]
            else:
                body[at] = chance.randrange(256)
        connection.request("POST", path, bytes(body), {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        assert response.status < 500, (path, bytes(body), text)


def come_and_go(address: tuple[str, int], chance: random.Random, num_connections: int) -> None:
    """Connect, send a request or a part of it, read for a moment or not, and leave."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address[0]}\r\ncontent-type: application/json\r\n"
    whole = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    for _ in range(num_connections):
        with socket.create_connection(address, timeout=5) as connection:
            connection.sendall(whole[: chance.randrange(len(whole) + 1)] if chance.random() < 0.4 else whole)
            if chance.random() < 0.5:
                connection.settimeout(chance.random() * 0.01 + 0.001)
                with contextlib.suppress(TimeoutError):
                    connection.recv(chance.randrange(1, 2000))


def rest(address: tuple[str, int], app: App) -> int:
    """Wait until nothing runs, and count the objects that are left."""
    connection = http.client.HTTPConnection(*address, timeout=20)
    connection.request("POST", "/v1/completions", b'{"prompt": "x"}', {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    response.read()
    connection.close()
    end_s = time.monotonic() + 10
    while app.service.queue.num_running or app.service.queue.num_waiting:
        assert time.monotonic() < end_s, "work goes on that nobody waits for"
        time.sleep(0.01)
    time.sleep(0.5)
    gc.collect()
    return len(gc.get_objects())


def test_connections_that_come_and_go_leave_nothing_running_and_nothing_behind(server):
    url, app = server
    name, port = url.removeprefix("http://").split(":")
    address, chance = (name, int(port)), random.Random(2)
    # What is made once is made now; the receipts of the last requests are full.
    come_and_go(address, chance, 200)
    num_objects, num_threads = rest(address, app), threading.active_count()
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    for _ in range(5):
        come_and_go(address, chance, 200)
        num_left = rest(address, app)
    # One object left behind by each connection would be 1000.
    assert num_left - num_objects < 500
    assert threading.active_count() <= num_threads
    grown = (int(Path("/proc/self/statm").read_text().split()[1]) - resident) * os.sysconf("SC_PAGE_SIZE")
    assert grown < 8 << 20
