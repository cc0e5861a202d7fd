"""A span for every request, for an OpenTelemetry collector. Optional; what is sent where is set by `OTEL_*` variables.

Names are those of OpenTelemetry's conventions for generative models. No text of prompts or answers is sent.
"""

import time
from typing import TYPE_CHECKING, Any

from soloist.errors import UnsupportedError

if TYPE_CHECKING:
    from soloist.server.reply import Reply

# Operations by route; the others continue a text.
_CHATS = frozenset({"/v1/chat/completions", "/v1/messages", "/v1/responses"})


class Tracer:
    """Sends spans in the background; `close` it.

    Args:
        model_name: what the model is called.

    Raises:
        UnsupportedError: OpenTelemetry is not installed.
    """

    def __init__(self, model_name: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise UnsupportedError(f"traces need {error.name}: pip install 'soloist[server,telemetry]'") from None
        self._model_name = model_name
        self._kind, self._status = trace.SpanKind.SERVER, trace.Status(trace.StatusCode.ERROR)
        # A name given by OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES wins.
        resource = Resource({"service.name": "soloist"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("soloist")

    def note(self, reply: "Reply", receipt: dict[str, Any]) -> None:
        """Send what a request that is over took."""
        operation = "chat" if reply.ask.route in _CHATS else "text_completion"
        params, end_ns = reply.ask.params, time.time_ns()
        start_ns = end_ns - round(1e9 * reply.age_s)
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "soloist",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": receipt["id"],
            "gen_ai.response.finish_reasons": [receipt["finish_reason"]],
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.seed": receipt["seed"],
            "gen_ai.usage.input_tokens": receipt["prompt_tokens"],
            "gen_ai.usage.output_tokens": receipt["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": receipt["cached_tokens"],
            "http.route": reply.ask.route,
            "soloist.queue_ms": receipt["queue_ms"],
            "soloist.tokens_per_step": receipt["tokens_per_step"],
        }
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            kind=self._kind,
            start_time=start_ns,
            attributes={name: value for name, value in attributes.items() if value is not None},
        )
        if receipt["ttft_ms"] is not None:
            span.add_event("gen_ai.first_token", timestamp=start_ns + round(1e6 * receipt["ttft_ms"]))
        if receipt["finish_reason"] == "error":
            span.set_status(self._status)
        span.end(end_ns)

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()
