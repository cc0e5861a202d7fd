"""What drafting did over all requests of an engine."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class DraftTotals:
    """Sums over the requests that have ended."""

    requests: int = 0
    # Tokens that clients were given.
    completion_tokens: int = 0
    # Element j: steps that verified, and that kept, j draft tokens.
    drafted_histogram: Counter[int] = field(default_factory=Counter)
    accepted_histogram: Counter[int] = field(default_factory=Counter)

    def add(
        self,
        *,
        completion_tokens: int,
        drafted_histogram: Sequence[int],
        accepted_histogram: Sequence[int],
        weight: int = 1,
    ) -> None:
        """Count a request; with weight -1 take one back that was counted as it is now."""
        self.requests += weight
        self.completion_tokens += weight * completion_tokens
        for j, steps in enumerate(drafted_histogram):
            self.drafted_histogram[j] += weight * steps
        for j, steps in enumerate(accepted_histogram):
            self.accepted_histogram[j] += weight * steps

    @property
    def forwards(self) -> int:
        """Passes of the target after prefill, those without a draft included."""
        return self.drafted_histogram.total()

    @property
    def drafted(self) -> int:
        """Draft tokens that were verified."""
        return sum(j * steps for j, steps in self.drafted_histogram.items())

    @property
    def accepted(self) -> int:
        """Of them, those that were kept."""
        return sum(j * steps for j, steps in self.accepted_histogram.items())

    @property
    def acceptance_length(self) -> float:
        """Tokens per forward pass; 0 without a pass."""
        return self.completion_tokens / self.forwards if self.forwards else 0.0
