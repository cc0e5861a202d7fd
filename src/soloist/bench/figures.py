"""Figures of requests: what was counted and timed, and statistics over them. Measures nothing itself.

One definition each, wherever the numbers come from: TTFT is from the request to the first visible token; TPOT is
(end - first token) / (tokens - 1), tokens as the engine counts them; a chunk is what came together, and gaps between
chunks say how evenly an answer flows, not how fast a token is made.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from soloist.errors import UsageError

# A long answer of a reasoning model: what a person feels of all the milliseconds.
FELT_TOKENS = 5000


@dataclass(frozen=True, kw_only=True)
class RequestFigures:
    """One request. Tokens are those that the engine, or the server's usage, counted."""

    prompt_tokens: int
    # Of them, those that were not read anew; None: the server does not say.
    cached_tokens: int | None
    completion_tokens: int
    ttft_s: float
    # To the last token.
    e2e_s: float
    # Between chunks that brought tokens: one fewer than chunks.
    chunk_gaps_s: tuple[float, ...]
    # Passes of the target, draft tokens verified and kept; None: the server does not say.
    forwards: int | None = None
    drafted: int | None = None
    accepted: int | None = None

    @property
    def tpot_ms(self) -> float | None:
        """Time per token behind the first; None for fewer than two tokens."""
        if self.completion_tokens < 2:
            return None
        return 1e3 * (self.e2e_s - self.ttft_s) / (self.completion_tokens - 1)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median with the tenths of the values below and above."""

    mean: float
    median: float
    p10: float
    p90: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Statistics over the requests of some repeats."""

    num_requests: int
    # Of them, those with an answer of one token, which has no time per token; their TTFT counts.
    num_short: int
    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float
    tpot_ms: Spread
    chunk_gap_ms: Spread
    decode_tok_per_s: float
    # Slowest and fastest repeat.
    decode_tok_per_s_range: tuple[float, float]
    # Prefill included.
    output_tok_per_s: float
    # Tokens per pass of the target; None: not known.
    acceptance_length: float | None
    # Kept / verified draft tokens; None: none was verified, or it is not known.
    acceptance_rate: float | None
    # Rows of a step, mean; None: not known.
    mean_width: float | None
    # Of the tokens of all prompts, those that came out of a cache and were not read; 0: none, or it is not known.
    cached_share: float

    @property
    def felt_s(self) -> float:
        """Seconds for an answer of `FELT_TOKENS` tokens."""
        return (self.ttft_ms + (FELT_TOKENS - 1) * self.tpot_ms.mean) / 1e3


def spread(values: Sequence[float]) -> Spread:
    """Summarise values; tenths are interpolated."""
    if len(values) == 1:
        return Spread(mean=values[0], median=values[0], p10=values[0], p90=values[0])
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(mean=statistics.fmean(values), median=statistics.median(values), p10=tenths[0], p90=tenths[-1])


def summarise(repeats: Sequence[Sequence[RequestFigures]]) -> Summary:
    """Summarise repeats of the same requests.

    Raises:
        UsageError: no answer of some repeat has a second token.
    """
    requests = [request for repeat in repeats for request in repeat]
    tpots = [request.tpot_ms for request in requests if request.tpot_ms is not None]
    if any(all(request.tpot_ms is None for request in repeat) for repeat in repeats):
        raise UsageError("all answers are of one token, and a time per token needs two: choose another workload")
    gaps = [1e3 * gap for request in requests for gap in request.chunk_gaps_s]
    rates = [_decode_tok_per_s(repeat) for repeat in repeats]
    forwards = _total([request.forwards for request in requests])
    drafted = _total([request.drafted for request in requests])
    accepted = _total([request.accepted for request in requests])
    num_tokens = sum(request.completion_tokens for request in requests)
    return Summary(
        num_requests=len(requests),
        num_short=len(requests) - len(tpots),
        prompt_tokens=round(statistics.fmean(request.prompt_tokens for request in requests)),
        completion_tokens=round(num_tokens / len(requests)),
        ttft_ms=1e3 * statistics.median(request.ttft_s for request in requests),
        tpot_ms=spread(tpots),
        # An answer that came in one piece has no gaps.
        chunk_gap_ms=spread(gaps or [0.0]),
        decode_tok_per_s=_decode_tok_per_s(requests),
        decode_tok_per_s_range=(min(rates), max(rates)),
        output_tok_per_s=num_tokens / sum(request.e2e_s for request in requests),
        acceptance_length=num_tokens / forwards if forwards else None,
        acceptance_rate=accepted / drafted if drafted and accepted is not None else None,
        mean_width=1 + drafted / forwards if forwards and drafted is not None else None,
        cached_share=sum(request.cached_tokens or 0 for request in requests)
        / sum(request.prompt_tokens for request in requests),
    )


def _decode_tok_per_s(requests: Sequence[RequestFigures]) -> float:
    timed = [request for request in requests if request.tpot_ms is not None]
    return sum(request.completion_tokens - 1 for request in timed) / sum(r.e2e_s - r.ttft_s for r in timed)


def _total(values: Sequence[int | None]) -> int | None:
    """Sum up; None if any is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
