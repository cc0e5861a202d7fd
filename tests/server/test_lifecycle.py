"""One engine, one stream: the line, cancelling, clients that go, errors in the middle, silence."""

import asyncio
import random
import threading
import time

import pytest

from soloist.generation import Generation
from soloist.server.failures import BusyError
from soloist.server.queue import NeverBegun, WorkQueue
from tests.server.client import Client, Response, scripted_llm

ASK = {"messages": [{"role": "user", "content": "hi"}]}
PATHS = {
    "/v1/chat/completions": ASK,
    "/v1/completions": {"prompt": "hi", "max_tokens": 400},
}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch):
    """Let every step take a while."""

    def set_pace(step_s: float) -> None:
        real = Generation._take_record

        def take(self, record):
            time.sleep(step_s)
            return real(self, record)

        monkeypatch.setattr(Generation, "_take_record", take)

    return set_pace


def idle(client: Client) -> bool:
    """Wait until nothing runs; says whether that happened."""
    end_s = time.monotonic() + 5
    while time.monotonic() < end_s:
        if not client.service.queue.num_running and not client.service.queue.num_waiting:
            return True
        time.sleep(0.002)
    return False


def num_steps(client: Client) -> int:
    return client.service.llm.engine.runner.model.num_forwards


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_socket_ends_the_work_within_a_step(say, slow, path: str, stream: bool):
    slow(0.01)
    client = say(*["a"] * 300)

    async def leave() -> Response:
        gone = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, gone.set)
        return await client.call("POST", path, PATHS[path] | {"stream": stream}, gone=gone)

    response = client.run(leave())
    assert not response.is_complete
    assert idle(client)
    steps = num_steps(client)
    assert 3 < steps < 60
    time.sleep(0.05)
    assert num_steps(client) == steps
    (receipt,) = client.service.receipts
    assert receipt["finish_reason"] == "cancelled"
    assert client.post(path, PATHS[path] | {"max_tokens": 2}).status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_socket_ends_the_reading_of_a_prompt(tokenizer, serve, monkeypatch, stream: bool):
    llm = scripted_llm(tokenizer, ["a"])
    llm.engine.runner.chunk_tokens = 1
    client = serve(llm)
    real = llm.engine.runner.model.forward
    monkeypatch.setattr(
        llm.engine.runner.model, "forward", lambda *args, **kwargs: (time.sleep(0.01), real(*args, **kwargs))[1]
    )

    async def leave() -> None:
        gone = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, gone.set)
        await client.call("POST", "/v1/completions", {"prompt": "the " * 100, "stream": stream}, gone=gone)

    client.run(leave())
    assert idle(client)
    assert num_steps(client) < 60
    assert client.service.receipts[-1]["finish_reason"] == "cancelled"


def test_twenty_disconnects_at_random_moments_leave_a_working_server(say, slow):
    # Field report 112.
    slow(0.001)
    client = say(*["a"] * 40)
    moments = random.Random(3)
    for _ in range(20):
        num_chunks = moments.randrange(0, 30)
        work = client.call(
            "POST",
            "/v1/chat/completions",
            ASK | {"stream": True},
            is_gone=lambda response, n=num_chunks: len(response.chunks) >= n,
        )
        assert not client.run(work).is_complete
    assert idle(client)
    assert client.post("/v1/chat/completions", ASK).json["choices"][0]["message"]["content"] == "a" * 40
    assert threading.active_count() < 20
    health = client.get("/health").json
    assert health["status"] == "ok" and health["last_token_age_s"] < 5


def test_requests_are_answered_in_order_of_arrival(say, slow):
    slow(0.002)
    client = say(*["a"] * 10)
    order = []

    async def ask(i: int) -> None:
        await client.call("POST", "/v1/completions", {"prompt": "x"}, headers={})
        order.append(i)

    async def all_of_them() -> None:
        tasks = []
        for i in range(5):
            tasks.append(asyncio.ensure_future(ask(i)))
            await asyncio.sleep(0.002)
        await asyncio.gather(*tasks)

    client.run(all_of_them())
    assert order == [0, 1, 2, 3, 4]
    waits = [receipt["queue_ms"] for receipt in client.service.receipts]
    assert waits == sorted(waits) and waits[-1] > 10


def test_a_newer_request_of_a_session_replaces_the_one_under_way(say, slow):
    slow(0.005)
    client = say(*["a"] * 100)

    async def type_quickly() -> list[Response]:
        fields = {"prompt": "x", "max_tokens": 101, "session_id": "editor"}
        tasks = []
        for _ in range(4):
            tasks.append(asyncio.ensure_future(client.call("POST", "/v1/completions", fields)))
            await asyncio.sleep(0.03)
        return list(await asyncio.gather(*tasks))

    responses = client.run(type_quickly())
    reasons = [response.json["choices"][0]["finish_reason"] for response in responses]
    assert reasons == ["abort", "abort", "abort", "stop"]
    assert len(client.service.receipts) == 4


def test_a_replaced_request_that_still_waits_is_answered_at_once(say, slow):
    slow(0.005)
    client = say(*["a"] * 60)

    async def run() -> Response:
        first = asyncio.ensure_future(client.call("POST", "/v1/completions", {"prompt": "x", "max_tokens": 60}))
        await asyncio.sleep(0.02)
        fields = {"prompt": "x", "max_tokens": 60, "session_id": "s"}
        waiting = asyncio.ensure_future(client.call("POST", "/v1/completions", fields))
        await asyncio.sleep(0.02)
        newer = asyncio.ensure_future(client.call("POST", "/v1/completions", fields))
        response = await waiting
        assert not first.done()
        await asyncio.gather(first, newer)
        return response

    (choice,) = client.run(run()).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "abort")


def test_a_full_line_turns_requests_away(say, slow):
    slow(0.01)
    client = say(*["a"] * 30, max_waiting=2)

    async def crowd() -> list[int]:
        calls = [client.call("POST", "/v1/completions", {"prompt": "x", "max_tokens": 30}) for _ in range(6)]
        return sorted(response.status for response in await asyncio.gather(*calls))

    statuses = client.run(crowd())
    assert set(statuses) == {200, 503} and statuses.count(200) in (2, 3)


def test_silence_is_broken_by_the_wall_clock(tokenizer, serve, monkeypatch):
    # Field report 118: one slow chunk of the prompt.
    llm = scripted_llm(tokenizer, ["a", "b"])
    real = llm.engine.runner.model.forward
    monkeypatch.setattr(
        llm.engine.runner.model, "forward", lambda *args, **kwargs: (time.sleep(0.2), real(*args, **kwargs))[1]
    )
    client = serve(llm, keep_alive_s=0.05)
    for fields in ({}, {"return_progress": True}):
        response = client.post("/v1/chat/completions", ASK | {"stream": True} | fields)
        assert response.num_keep_alives >= 4
        assert response.events[-1] == "[DONE]"


@pytest.mark.parametrize("path", PATHS)
def test_an_error_after_the_first_byte_is_an_event_and_an_end(say, monkeypatch, path: str):
    # Field reports 31 and 121.
    client = say(*["a"] * 30)
    real = Generation._take_record

    def fail(self, record):
        if len(self.token_ids) >= 10:
            raise RuntimeError("secret details in /home/me")
        return real(self, record)

    monkeypatch.setattr(Generation, "_take_record", fail)
    response = client.post(path, PATHS[path] | {"stream": True})
    *_, error, done = response.events
    assert done == "[DONE]" and len(response.events) == 12
    assert error["error"]["code"] == "internal_error" and "secret" not in response.body.decode()
    assert client.post(path, PATHS[path]).status == 500
    monkeypatch.setattr(Generation, "_take_record", real)
    assert client.post(path, PATHS[path]).status == 200


def test_running_out_of_memory_costs_one_request(say, monkeypatch):
    # Field report 109.
    client = say("ab")

    def fail(*_args, **_kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(client.service.llm.engine.runner.model, "forward", fail)
        response = client.post("/v1/chat/completions", ASK)
        assert response.status == 503 and response.json["error"]["code"] == "out_of_memory"
    assert client.post("/v1/chat/completions", ASK).status == 200


def test_logits_that_are_not_finite_are_an_error_never_text(serve, tokenizer, monkeypatch):
    # Field report 94.
    llm = scripted_llm(tokenizer, ["ab"])
    model = llm.engine.runner.model
    real = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda hidden: real(hidden) * float("nan"))
    response = serve(llm).post("/v1/chat/completions", ASK)
    assert response.status == 500 and response.json["error"]["code"] == "not_finite"


def test_a_server_is_ready_once_it_has_made_a_token(say):
    client = say("ab")
    assert client.get("/ready").status == 503
    client.run(client.service.warm_up())
    assert client.get("/ready").status == 200
    assert client.post("/v1/chat/completions", ASK).json["choices"][0]["message"]["content"] == "ab"


def test_health_notices_a_step_that_hangs(tokenizer, serve, monkeypatch):
    # Field report 112: the routes answer, but no token is made.
    llm = scripted_llm(tokenizer, ["ab", "cd"])
    client = serve(llm, stuck_after_s=0.2)
    hangs, real = threading.Event(), llm.engine.runner.model.forward
    monkeypatch.setattr(
        llm.engine.runner.model, "forward", lambda *args, **kwargs: (hangs.wait(10), real(*args, **kwargs))[1]
    )

    async def probe() -> list[Response]:
        task = asyncio.ensure_future(client.call("POST", "/v1/chat/completions", ASK))
        await asyncio.sleep(0.05)
        early = await client.call("GET", "/health")
        await asyncio.sleep(0.3)
        late = [await client.call("GET", path) for path in ("/health", "/ready")]
        hangs.set()
        return [early, *late, await task, await client.call("GET", "/health")]

    early, late, ready, answer, after = client.run(probe())
    assert early.status == 200 and early.json["running"] == 1
    assert late.status == 503 and late.json["status"] == "stuck" and late.json["silent_s"] > 0.2
    assert ready.status == 503
    assert answer.status == after.status == 200 and after.json["silent_s"] < 0.2


def test_the_line_survives_work_that_fails():
    queue = WorkQueue(max_waiting=3)

    async def use() -> None:
        def fail():
            yield 1
            raise ValueError("no")

        job = queue.submit(fail)
        items = job.items()
        assert await anext(items) == 1
        with pytest.raises(ValueError, match="no"):
            await anext(items)
        assert [item async for item in queue.submit(lambda: iter([2, 3])).items()] == [2, 3]
        # The thread leaves a job a moment after its last item.
        while queue.num_running:
            await asyncio.sleep(0.001)
        block = threading.Event()
        blocked = [queue.submit(lambda: (block.wait(), iter([]))[1]) for _ in range(4)]
        await asyncio.sleep(0.01)
        with pytest.raises(BusyError):
            queue.submit(lambda: iter([]))
        blocked[-1].cancel()
        with pytest.raises(NeverBegun):
            await anext(blocked[-1].items())
        block.set()
        for job in blocked[:-1]:
            assert [item async for item in job.items()] == []

    asyncio.run(use())
    queue.close()
    assert not queue.is_alive
