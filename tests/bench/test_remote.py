"""Another engine gets the very same prompts; its tokens are those of its usage, never chunks."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from soloist.bench.remote import Server, ServerError, measure_remote
from soloist.bench.workloads import BenchPrompt, Workload
from soloist.errors import UsageError

GAP_S = 0.006


class FakeServer:
    """A server that answers with given events, a few milliseconds apart."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.status = self.list_status = 200
        self.refused_field = ""
        # Chunks of visible text, and what the usage says.
        self.chunks = ["one two", " three", " four five"]
        self.usage: dict[str, Any] | None = {"prompt_tokens": 17, "completion_tokens": 5}
        # What an answer in one piece is; None: there are none.
        self.whole: dict[str, Any] | None = None
        self.extra: list[str] = []
        self.models: list[dict[str, str]] = [{"id": "their-model"}]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            server_version, sys_version = "fake/1.0", ""

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._send(json.dumps({"data": outer.models}).encode(), outer.list_status)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append({"path": self.path} | body)
                outer.keys.append(self.headers.get("Authorization"))
                if outer.refused_field in body:
                    self._send(json.dumps({"detail": f"Unexpected fields: {outer.refused_field}"}).encode(), 422)
                    return
                if outer.status != 200:
                    self._send(b'{"error": {"message": "no such field"}}', outer.status)
                    return
                if not body.get("stream"):
                    self._send(json.dumps(outer.whole).encode())
                    return
                self.send_response(200)
                self.end_headers()
                for chunk in outer.chunks:
                    choice = {"text": chunk} if "prompt" in body else {"delta": {"content": chunk}}
                    self._event({"choices": [choice]})
                    time.sleep(GAP_S)
                for line in outer.extra:
                    self.wfile.write(line.encode())
                if outer.usage is not None:
                    self._event({"choices": [], "usage": outer.usage})
                self.wfile.write(b"data: [DONE]\n\n")

            def _event(self, event: dict[str, Any]) -> None:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()

            def _send(self, data: bytes, status: int = 200) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.http.shutdown()
    server.http.server_close()


TEXT = BenchPrompt(text="Once upon", is_chat=False)
CHAT = BenchPrompt(text="Why?", is_chat=True)


def workload(*prompts: BenchPrompt) -> Workload:
    return Workload(name="test", prompts=prompts, max_tokens=5, ignore_eos=True, run=123456)


def test_tokens_come_from_the_usage_and_gaps_from_chunks(fake: FakeServer):
    figures = Server(fake.url).run_request(TEXT, workload(TEXT))
    assert (figures.prompt_tokens, figures.completion_tokens, figures.cached_tokens) == (17, 5, None)
    # Three chunks: two gaps, four tokens behind the first.
    assert len(figures.chunk_gaps_s) == 2
    assert all(GAP_S * 0.9 < gap < GAP_S * 8 for gap in figures.chunk_gaps_s)
    assert figures.tpot_ms == pytest.approx(1e3 * sum(figures.chunk_gaps_s) / 4)


def test_the_same_prompts_go_over_in_the_same_order(fake: FakeServer):
    measured = measure_remote(Server(fake.url + "/v1/"), workload(TEXT, CHAT), repeats=2)
    assert [request["path"] for request in fake.requests] == [
        "/v1/completions",
        *["/v1/completions", "/v1/chat/completions"] * 2,
    ]
    sent = [r["prompt"] if "prompt" in r else r["messages"][0]["content"] for r in fake.requests]
    repeats = [*workload(TEXT).repeat(0), *workload(TEXT, CHAT).repeat(1), *workload(TEXT, CHAT).repeat(2)]
    assert sent == [prompt.text for prompt in repeats]
    assert sent[0] == "First 123456. Once upon" and sent[4] == "Third 123456. Why?"
    for request in fake.requests:
        assert request["model"] == "their-model" and request["temperature"] == 0 and request["max_tokens"] == 5
        assert request["stream_options"] == {"include_usage": True} and request["ignore_eos"]
    assert measured.server == "fake/1.0" and measured.warm.num_requests == 4
    assert measured.prompt_tokens == (17, 17)


def test_a_cache_on_the_other_side_is_seen(fake: FakeServer):
    fake.usage = {"prompt_tokens": 17, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 12}}
    assert measure_remote(Server(fake.url), workload(TEXT), repeats=1).warm.cached_share > 0


def test_thoughts_are_visible_and_comments_are_not(fake: FakeServer):
    fake.extra = [": keep-alive\n\n", 'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n']
    fake.extra += ['data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n']
    figures = Server(fake.url).run_request(CHAT, workload(CHAT))
    assert len(figures.chunk_gaps_s) == 3


def test_a_server_that_refuses_to_go_on_behind_the_end_is_asked_without(fake: FakeServer):
    fake.refused_field = "ignore_eos"
    measured = measure_remote(Server(fake.url), workload(TEXT), repeats=2)
    assert not measured.knows_ignore_eos
    # Refused once, then never asked again.
    assert ["ignore_eos" in request for request in fake.requests] == [True, False, False, False]
    fake.refused_field = "stream_options"
    with pytest.raises(ServerError, match="answered 422"):
        Server(fake.url).run_request(TEXT, workload(TEXT))


@pytest.mark.parametrize("prompt", [TEXT, CHAT], ids=["text", "chat"])
def test_a_server_without_usage_in_its_stream_is_asked_for_the_answer_in_one_piece(
    fake: FakeServer, prompt: BenchPrompt
):
    usage, fake.usage = fake.usage, None
    text = "".join(fake.chunks)
    choice = {"message": {"content": text}} if prompt.is_chat else {"text": text}
    fake.whole = {"choices": [choice], "usage": usage}
    measured = measure_remote(Server(fake.url), workload(prompt), repeats=1)
    assert not measured.has_usage_in_stream and measured.warm.completion_tokens == 5
    streamed, whole = fake.requests[2:]
    assert whole == {key: value for key, value in streamed.items() if key not in ("stream", "stream_options")}
    fake.whole["choices"] = [{"text": "another"}]
    with pytest.raises(ServerError, match="another answer without one"):
        Server(fake.url).run_request(prompt, workload(prompt))
    fake.whole = {"choices": [choice]}
    with pytest.raises(ServerError, match="sent no usage"):
        Server(fake.url).run_request(prompt, workload(prompt))


def test_a_key_is_sent_if_there_is_one(fake: FakeServer):
    Server(fake.url, model="named", api_key="secret").run_request(TEXT, workload(TEXT))
    Server(fake.url).run_request(TEXT, workload(TEXT))
    assert fake.keys == ["Bearer secret", None]
    assert fake.requests[0]["model"] == "named"


def test_a_server_that_cannot_be_measured_is_told_so(fake: FakeServer):
    server = Server(fake.url)
    fake.status = 400
    with pytest.raises(ServerError, match=r"answered 400: .*no such field"):
        server.run_request(TEXT, workload(TEXT))
    fake.status, usage, fake.usage = 200, fake.usage, None
    with pytest.raises(ServerError, match="sent no usage"):
        server.run_request(TEXT, workload(TEXT))
    fake.usage, fake.chunks = usage, ["all at once"]
    with pytest.raises(ServerError, match="5 tokens in 1 pieces"):
        server.run_request(TEXT, workload(TEXT))
    fake.chunks, fake.extra = ["a", "b"], ['data: {"error": {"message": "out of memory"}}\n\n']
    with pytest.raises(ServerError, match="out of memory"):
        server.run_request(TEXT, workload(TEXT))
    fake.extra = ["data: {broken\n\n"]
    with pytest.raises(ServerError, match="not JSON"):
        server.run_request(TEXT, workload(TEXT))
    fake.extra, fake.usage = [], {"total_tokens": 5}
    with pytest.raises(ServerError, match="sent no usage with prompt_tokens and completion_tokens"):
        server.run_request(TEXT, workload(TEXT))
    fake.models = []
    with pytest.raises(ServerError, match="--against-model"):
        Server(fake.url)
    fake.list_status = 401
    with pytest.raises(ServerError, match="answered 401: give its key with --against-key"):
        Server(fake.url)
    with pytest.raises(ServerError, match="answered 401: it refuses this key"):
        Server(fake.url, api_key="secret")
    fake.list_status = 404
    with pytest.raises(ServerError, match=r"lists no model \(it answered 404\); name one"):
        Server(fake.url)


def test_an_error_that_is_none_is_overlooked(fake: FakeServer):
    fake.extra = ['data: {"error": null, "choices": []}\n\n']
    assert Server(fake.url).run_request(TEXT, workload(TEXT)).completion_tokens == 5


def test_an_answer_of_the_end_token_alone_has_a_time_to_it(fake: FakeServer):
    fake.chunks, fake.usage = [], {"prompt_tokens": 17, "completion_tokens": 1}
    figures = Server(fake.url).run_request(TEXT, workload(TEXT))
    assert figures.ttft_s > 0 and figures.tpot_ms is None and figures.chunk_gaps_s == ()


def test_a_url_that_leads_nowhere_is_refused():
    for model in (None, "named"):
        with pytest.raises(ServerError, match="is the server running"):
            Server("127.0.0.1:9", model=model)
    with pytest.raises(UsageError, match="wants the URL"):
        Server("ftp://x")
