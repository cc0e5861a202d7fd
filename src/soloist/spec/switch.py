"""Turns drafting off where it loses: the host's part of adaptive width, between steps.

Owns the comparison of the time a token takes with and without drafting, over windows of steps. By the clock, a request
begins with a few steps without drafts, to know what those take now; by the table of costs it needs none, and decides
the same every time.
"""

import statistics

from soloist.spec.costs import StepCosts

# Steps without drafts at the begin of a request that is judged by the clock.
PROBE_STEPS = 3
# Drafting steps between two decisions.
WINDOW_STEPS = 32
# Drafting must be this much slower to be turned off.
MARGIN = 1.02


class DraftSwitch:
    """Judges one request after the other.

    Args:
        costs: of steps on this machine.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self.begin(has_clock=False)

    def begin(self, *, has_clock: bool) -> None:
        """Take a new request, for which drafting is on.

        Args:
            has_clock: whether durations of steps are judged, or the table's.
        """
        self.has_clock = has_clock
        self.is_on = True
        # Tokens of the answer after which drafting was turned off; None: it was not.
        self.off_after: int | None = None
        self._num_tokens = 0
        self._probes_ms: list[float] = []
        self._window_ms, self._window_tokens, self._window_steps = 0.0, 0, 0

    @property
    def is_probing(self) -> bool:
        """Whether the next step shall have no drafts, to be timed."""
        return self.has_clock and len(self._probes_ms) < PROBE_STEPS

    @property
    def policy(self) -> str:
        """What is judged by, in a word for the stats."""
        return "clock" if self.has_clock else f"table {self._costs.digest}"

    def note(self, width: int, num_committed: int, elapsed_ms: float) -> None:
        """Take what a step did, and decide at the end of a window.

        Args:
            width: rows of the step, at least 1.
            num_committed: tokens it committed.
            elapsed_ms: how long it took; not looked at without a clock.
        """
        self._num_tokens += num_committed
        if not self.is_on:
            return
        if self.is_probing:
            self._probes_ms.append(elapsed_ms)
            return
        self._window_ms += elapsed_ms if self.has_clock else self._costs.step_ms[width - 1]
        self._window_tokens += num_committed
        self._window_steps += 1
        if self._window_steps == WINDOW_STEPS:
            plain_ms = statistics.median(self._probes_ms) if self.has_clock else self._costs.plain_ms
            if self._window_ms > MARGIN * plain_ms * self._window_tokens:
                self.is_on, self.off_after = False, self._num_tokens
            self._window_ms, self._window_tokens, self._window_steps = 0.0, 0, 0
