"""Prometheus metrics, under the names that dashboards know from other servers, with our prefix.

Buckets resolve half a millisecond to fifty: one fast stream makes a token every few milliseconds.
"""

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from soloist.request_stats import RequestStats

if TYPE_CHECKING:
    from soloist.server.reply import Gaps
    from soloist.server.service import Service

_TOKEN_BUCKETS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.1, 0.25, 1.0,
)  # fmt: skip
_WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self, service: "Service") -> None:
        self.registry = CollectorRegistry()
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token", _WAIT_BUCKETS
        )
        self._itl = self._histogram("inter_token_latency_seconds", "Mean time between tokens", _TOKEN_BUCKETS)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Time per token behind the first", _TOKEN_BUCKETS
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From the request to its end", _WAIT_BUCKETS)
        self._queue = self._histogram("request_queue_time_seconds", "Waiting in line", _WAIT_BUCKETS)
        self._prefill = self._histogram("request_prefill_time_seconds", "Reading the prompt", _WAIT_BUCKETS)
        self._decode = self._histogram("request_decode_time_seconds", "From first token to last", _WAIT_BUCKETS)
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self._generation = self._counter("generation_tokens", "Tokens of answers")
        self._cached = self._counter("prompt_tokens_cached", "Tokens of prompts that were not read again")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up among what is kept")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found there")
        self._drafts = self._counter("spec_decode_num_drafts", "Steps that verified a draft")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens kept")
        self._accepted_per_pos = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens kept, by their place", "position"
        )
        self._success = self._counter("request_success", "Requests that ended, by how", "finished_reason")
        self._gauges(service)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"soloist_{name}", words, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(f"soloist_{name}", words, labels, registry=self.registry)

    def _gauges(self, service: "Service") -> None:
        queue, cache = service.queue, service.llm.engine.runner.cache
        gauges = {
            "num_requests_running": ("Requests that are worked on", lambda: queue.num_running),
            "num_requests_waiting": ("Requests in line", lambda: queue.num_waiting),
            "kv_cache_usage_perc": (
                "Share of the context that the last request filled",
                lambda: service.num_context_tokens / cache.max_context_len,
            ),
        }
        for name, (words, read) in gauges.items():
            Gauge(f"soloist_{name}", words, registry=self.registry).set_function(read)

    def note(
        self, stats: RequestStats, finish_reason: str, waited_s: float, ttft_ms: float | None, gaps: "Gaps"
    ) -> None:
        """Count a request that is over."""
        self._queue.observe(waited_s)
        self._prefill.observe(stats.prefill_s)
        if ttft_ms is not None:
            self._ttft.observe(ttft_ms / 1000)
            self._e2e.observe(ttft_ms / 1000 + stats.decode_s)
        if stats.tpot_ms is not None:
            self._decode.observe(stats.decode_s)
            self._tpot.observe(stats.tpot_ms / 1000)
            self._itl.observe(stats.tpot_ms / 1000)
        self._prompt.inc(stats.prompt_tokens)
        self._generation.inc(stats.completion_tokens)
        self._cached.inc(stats.cached_tokens)
        self._queries.inc(stats.prompt_tokens)
        self._hits.inc(stats.cached_tokens)
        self._drafts.inc(sum(stats.drafted_histogram[1:]))
        self._draft_tokens.inc(stats.drafted)
        self._accepted.inc(stats.accepted)
        for position in range(1, len(stats.accepted_histogram)):
            kept = sum(stats.accepted_histogram[position:])
            if kept:
                self._accepted_per_pos.labels(position - 1).inc(kept)
        self._success.labels(finish_reason).inc()

    def text(self) -> bytes:
        """Give everything in Prometheus' text form."""
        return generate_latest(self.registry)
