"""What replicas are made of, without a cluster: whose conversation a request is, one replica, answers put together."""

import asyncio
import json
import time
from typing import Any

import pytest

from soloist.server.failures import Failure
from soloist.server.replicas.conversation import conversation_of
from soloist.server.replicas.fleet import _health, _metrics, _props
from soloist.server.replicas.replica import Replica
from soloist.server.settings import ServerSettings
from tests.server.client import scripted_llm

USER = {"role": "user", "content": "hi"}
LATER = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def key(path: str, **fields: Any) -> str | None:
    return conversation_of(path, json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("path", "first", "later"),
    [
        (CHAT, {"messages": [USER]}, {"messages": [USER, *LATER]}),
        (CHAT, {"messages": [USER]}, {"messages": [USER, *LATER], "temperature": 1, "stream": True}),
        (CHAT, {"session_id": "s", "messages": [USER]}, {"session_id": "s", "messages": LATER}),
        (MESSAGES, {"system": "x", "messages": [USER]}, {"system": "x", "messages": [USER, *LATER]}),
        (
            MESSAGES,
            {"system": [{"text": "x-anthropic-billing-header: cch=1;"}, {"text": "x"}], "messages": [USER]},
            {"system": [{"text": "x-anthropic-billing-header: cch=2;"}, {"text": "x"}], "messages": [USER]},
        ),
        (RESPONSES, {"instructions": "x", "input": [USER]}, {"instructions": "x", "input": [USER, *LATER]}),
        (RESPONSES, {"prompt_cache_key": "k", "input": "a"}, {"prompt_cache_key": "k", "input": "b"}),
        ("/v1/completions", {"prompt": "a" * 2000}, {"prompt": "a" * 2000 + "more"}),
        ("/infill", {"id_slot": 0, "input_prefix": "a"}, {"id_slot": 0, "input_prefix": "b"}),
    ],
)  # fmt: skip
def test_a_later_turn_is_of_the_same_conversation(path: str, first: dict, later: dict):
    assert key(path, **first) == key(path, **later) is not None


def test_conversations_differ_by_their_beginning():
    other = {"role": "user", "content": "hello"}
    keys = [
        key(CHAT, messages=[USER]),
        key(CHAT, messages=[other]),
        key(CHAT, messages=[{"role": "system", "content": "x"}, USER]),
        key(MESSAGES, messages=[USER]),
        key(MESSAGES, system="x", messages=[USER]),
        key(CHAT, session_id="s", messages=[USER]),
        key("/v1/completions", prompt=[1, 2, 3]),
        key("/v1/completions", prompt=[1, 2, 4]),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"messages": 3}', b'{"prompt": ""}', b"\xff"])
def test_a_request_that_says_nothing_may_go_anywhere(body: bytes):
    assert conversation_of(CHAT, body) is None


def scope(path: str, method: str = "POST") -> dict[str, Any]:
    headers = [(b"content-type", b"application/json")]
    return {"type": "http", "method": method, "path": path, "query_string": b"", "root_path": "", "headers": headers}


def test_a_replica_answers_and_stops_when_nobody_reads(tokenizer, monkeypatch: pytest.MonkeyPatch):
    llm = scripted_llm(tokenizer, ["a"] * 300)
    real = llm.engine.runner.model.forward
    monkeypatch.setattr(
        llm.engine.runner.model, "forward", lambda *args, **kwargs: (time.sleep(0.002), real(*args, **kwargs))[1]
    )

    async def use() -> None:
        replica = object.__new__(Replica)
        await replica.__init__(lambda: llm, ServerSettings(model_name="", stuck_after_s=0.2))
        await replica.check_health()
        status, content = await replica.fetch("GET", "/v1/models")
        # The model's own name stands where none is given.
        assert status == 200 and json.loads(content)["data"][0]["id"] == "scripted"
        body = json.dumps({"messages": [USER], "stream": True}).encode()
        messages = replica.call(scope(CHAT), body)
        begun = [await anext(messages) for _ in range(4)]
        assert begun[0]["status"] == 200 and begun[1]["body"].startswith(b"data: ")
        await messages.aclose()
        end_s = time.monotonic() + 5
        while json.loads((await replica.fetch("GET", "/health"))[1])["running"]:
            assert time.monotonic() < end_s
        props = json.loads((await replica.fetch("GET", "/props"))[1])
        assert props["receipts"][-1]["finish_reason"] == "cancelled"
        monkeypatch.setattr(
            llm.engine.runner.model, "forward", lambda *args, **kwargs: (time.sleep(0.5), real(*args, **kwargs))[1]
        )
        messages = replica.call(scope(CHAT), body)
        reading = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0.35)
        # A cluster replaces a replica whose health check fails.
        with pytest.raises(RuntimeError, match="stuck"):
            await replica.check_health()
        await reading
        await messages.aclose()
        replica._service.close()

    asyncio.run(use())


def test_what_replicas_say_is_put_together():
    def health(status: str, **counts: int) -> bytes:
        return json.dumps({"status": status, "running": 0, "waiting": 0, **counts}).encode()

    both = _health([(200, health("ok", running=1)), (503, health("stuck", running=1, waiting=2))])
    told = json.loads(both.body)
    assert both.status_code == 200 and (told["status"], told["running"], told["waiting"]) == ("ok", 2, 2)
    assert _health([(503, health("stuck"))]).status_code == _health([]).status_code == 503
    text = '# HELP soloist_x_total X\n# TYPE soloist_x_total counter\nsoloist_x_total{a="b"} %d\n'
    lines = _metrics([(200, (text % 1).encode()), (200, (text % 2).encode()), (503, b"")]).decode().splitlines()
    assert lines.count("# TYPE soloist_x_total counter") == 1
    assert 'soloist_x_total{a="b",replica="0"} 1.0' in lines and 'soloist_x_total{a="b",replica="1"} 2.0' in lines

    def props(created: int) -> tuple[int, bytes]:
        content = {"receipts": [{"created": created}], "total_slots": 1, "running": 0, "waiting": 0, "version": "1"}
        return 200, json.dumps(content).encode()

    told = json.loads(_props([props(5), props(3)]).body)
    assert [r["created"] for r in told["receipts"]] == [3, 5] and told["total_slots"] == told["num_replicas"] == 2
    assert _props([]).status_code == 503


@pytest.mark.parametrize(
    ("path", "end"),
    [
        (CHAT, b"data: [DONE]\n\n"), ("/v1/completions", b"data: [DONE]\n\n"), (MESSAGES, b"event: error\n"),
        (RESPONSES, b"event: error\n"), ("/infill", b'"stop":true'), ("/completion", b'"stop":true'),
    ],
)  # fmt: skip
def test_a_stream_that_breaks_off_ends_as_its_protocol_says(path: str, end: bytes):
    told = Failure(status=503, message="lost", code="replica_lost").events(path)
    assert end in told and b"lost" in told and told.endswith(b"\n\n")
