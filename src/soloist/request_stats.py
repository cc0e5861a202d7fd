"""What a request took: tokens, seconds, drafts. Counts nothing itself."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RequestStats:
    """What a request took. Tokens are those the client was given."""

    prompt_tokens: int
    # Of them, those whose state was kept from earlier requests.
    cached_tokens: int
    completion_tokens: int
    # Of the random numbers; None for a greedy request, which draws none.
    seed: int | None
    # Name of the drafter and how widths are chosen; with the seed, what a sampled text depends on.
    drafter: str
    policy: str
    # Tokens of the answer after which drafting was turned off, because it lost; None: it was not.
    drafting_off_after: int | None
    # Whether drafts were kept by lot: the text is then not the model's.
    simulated: bool
    # Reading the prompt, without its last token.
    prefill_s: float
    # From the request to its first token; None: there was none.
    ttft_s: float | None
    # From the first token to the last.
    decode_s: float
    # Passes of the target after prefill, those without a draft included.
    forwards: int
    # Draft tokens that were verified, and of them those that were kept.
    drafted: int
    accepted: int
    # Element j: steps that verified, and that kept, j draft tokens.
    drafted_histogram: tuple[int, ...]
    accepted_histogram: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens of the answer per forward pass; 0 without a pass."""
        return self.completion_tokens / self.forwards if self.forwards else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the verified draft tokens that was kept; None without any."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Element k: of the steps that verified a draft at place k, the share that kept it."""
        deepest = max((j for j, steps in enumerate(self.drafted_histogram) if steps), default=0)
        return tuple(
            sum(self.accepted_histogram[k + 1 :]) / sum(self.drafted_histogram[k + 1 :]) for k in range(deepest)
        )

    @property
    def tpot_ms(self) -> float | None:
        """Time per token behind the first; None for fewer than two tokens."""
        return 1000 * self.decode_s / (self.completion_tokens - 1) if self.completion_tokens > 1 else None

    @property
    def decode_tok_per_s(self) -> float | None:
        """Tokens behind the first per second; None for fewer than two tokens."""
        return (self.completion_tokens - 1) / self.decode_s if self.completion_tokens > 1 and self.decode_s else None
