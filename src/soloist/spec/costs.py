"""What a step costs by its width, measured once for a machine, a model and a drafter, and kept in the user's cache.

Requests with a seed decide by this table alone, so that the same seed gives the same text.
"""

import hashlib
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from soloist.errors import UsageError

# Runs of a step that a median is taken of.
NUM_RUNS = 3
# Widths that are measured; those between lie on a line.
MEASURED_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Durations of one step.

    Raises:
        UsageError: a duration is not positive.
    """

    plain_ms: float
    """A step without drafting."""
    step_ms: tuple[float, ...]
    """A step of width 1, 2, .. T, with all that drafting costs. Never falls."""

    def __post_init__(self) -> None:
        if not self.step_ms or min(self.plain_ms, *self.step_ms) <= 0:
            raise UsageError(f"costs of steps are {self.plain_ms} and {self.step_ms}; allowed: positive milliseconds")

    @property
    def digest(self) -> str:
        """A few characters that tell one table from another: a sampled text may depend on it."""
        return hashlib.blake2b(repr((self.plain_ms, self.step_ms)).encode(), digest_size=4).hexdigest()

    @property
    def envelope_ms(self) -> tuple[float, ...]:
        """The largest convex table below `step_ms`: each row costs at least as much as the one before.

        A rule that looks one row ahead would stop at a dear row that cheap ones follow.
        """
        hull: list[int] = []
        for w, cost in enumerate(self.step_ms):
            while len(hull) > 1:
                a, b = hull[-2:]
                if (self.step_ms[b] - self.step_ms[a]) * (w - b) <= (cost - self.step_ms[b]) * (b - a):
                    break
                hull.pop()
            hull.append(w)
        return tuple(_interpolate({w: self.step_ms[w] for w in hull}, w) for w in range(len(self.step_ms)))

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Read a table; None: there is none, or none that can be read, and it is measured again."""
        try:
            stored = json.loads(path.read_text())
            return cls(plain_ms=float(stored["plain_ms"]), step_ms=tuple(map(float, stored["step_ms"])))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, path: Path) -> None:
        """Write the table, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1))
        part.replace(path)


def measure_costs(
    max_width: int, time_step_ms: Callable[[int], float], time_plain_ms: Callable[[], float]
) -> StepCosts:
    """Measure a table, after a run of each width to warm up; steps without drafting come last.

    Args:
        max_width: T.
        time_step_ms: runs a step of the given width and gives its duration.
        time_plain_ms: runs a step without drafting and gives its duration.
    """
    widths = sorted({w for w in MEASURED_WIDTHS if w < max_width} | {max_width})
    medians = {}
    for width in widths:
        time_step_ms(width)
        medians[width - 1] = statistics.median(time_step_ms(width) for _ in range(NUM_RUNS))
    time_plain_ms()
    plain_ms = statistics.median(time_plain_ms() for _ in range(NUM_RUNS))
    step_ms: list[float] = []
    for w in range(max_width):
        step_ms.append(max(_interpolate(medians, w), *step_ms[-1:], 1e-6))
    return StepCosts(plain_ms=max(plain_ms, 1e-6), step_ms=tuple(step_ms))


def _interpolate(known: dict[int, float], at: int) -> float:
    """Give the value at a place between known ones."""
    below = max(w for w in known if w <= at)
    above = min(w for w in known if w >= at)
    share = (at - below) / (above - below) if above > below else 0.0
    return known[below] + share * (known[above] - known[below])
