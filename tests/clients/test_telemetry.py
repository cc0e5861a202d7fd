"""Spans as a collector gets them. Run by `make test-clients`."""

import gzip
import http.server
import threading
import time
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.server.client import make_tokenizer, scripted_llm


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch):
    """A collector of this process: the spans it got."""
    spans: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                names = {a.key: a.value.string_value for a in resource.resource.attributes}
                spans.extend((names["service.name"], span) for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield spans
    server.shutdown()
    server.server_close()


def test_a_request_becomes_a_span_without_its_text(collector, serve, tmp_path):
    client = serve(scripted_llm(make_tokenizer(tmp_path), ["secret", " answer"]), sends_traces=True)
    begin_ns = time.time_ns()
    answer = client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "secret question"}]}).json
    client.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "temperature": 0.5, "seed": 4})
    client.close()
    (service, chat), (_, completion) = collector
    assert service == "soloist" and chat.name == "chat tiny" and completion.name == "text_completion tiny"
    values = {a.key: a.value for a in chat.attributes}
    assert values["gen_ai.usage.input_tokens"].int_value == answer["usage"]["prompt_tokens"]
    assert values["gen_ai.usage.output_tokens"].int_value == answer["usage"]["completion_tokens"]
    assert values["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "stop"
    assert values["gen_ai.response.id"].string_value in answer["id"]
    assert begin_ns <= chat.start_time_unix_nano <= chat.events[0].time_unix_nano <= chat.end_time_unix_nano
    assert {a.key: a.value for a in completion.attributes}["gen_ai.request.seed"].int_value == 4
    assert b"secret" not in chat.SerializeToString()
