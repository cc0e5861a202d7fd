"""Finding the steps of a program in its trace: from markers if it left any, else from what repeats.

A program that decodes calls the same sequence of launches for every token. The rarest launch that comes back at even
distances marks the step: what comes back more often is a layer within it.
"""

import bisect
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from soloist.profiler.trace import HostCall, Trace

# Fewer repetitions prove nothing.
MIN_REPEATS = 4
# Distances between repetitions, in launches, may differ from their median by this factor.
_EVENNESS = 1.34
# Slices that share less of their launches than this are parts of a longer period: layers, and what comes behind them.
_MIN_LIKENESS = 0.97
# A run is a program's steady state only if it lasts this share of the longest one.
_MIN_SHARE = 0.5


class Origin(Enum):
    """How steps were found."""

    MARKER = "marker"
    REPETITION = "repetition"
    # There are none: the whole trace counts as one.
    NONE = "none"


class Recording(Enum):
    """What was recorded during a step."""

    # Python lines too, which slows the host.
    NAMED = "named"
    PLAIN = "plain"
    # The switch from one to the other fell into it.
    MIXED = "mixed"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps in a row: step i lies between edges i and i + 1."""

    origin: Origin
    # On the host's timeline, where they are enqueued; and on the GPU's, where they run. Ascending, as many of each.
    host_us: tuple[float, ...]
    gpu_us: tuple[float, ...]
    recordings: tuple[Recording, ...]

    def __len__(self) -> int:
        return len(self.recordings)

    def take(self, first: int, last: int) -> "Steps":
        """Give the steps from `first` up to, not including, `last`."""
        return replace(
            self,
            host_us=self.host_us[first : last + 1],
            gpu_us=self.gpu_us[first : last + 1],
            recordings=self.recordings[first:last],
        )

    def last(self, num_steps: int) -> "Steps":
        """Give at most the last `num_steps`."""
        return self.take(max(0, len(self) - num_steps), len(self))

    def longest(self, recording: Recording) -> "Steps | None":
        """Give the longest row of steps with this recording; None if it is shorter than `MIN_REPEATS`."""
        best = (0, 0)
        first = 0
        for kind, group in itertools.groupby(self.recordings):
            last = first + len(list(group))
            if kind is recording and last - first > best[1] - best[0]:
                best = (first, last)
            first = last
        return self.take(*best) if best[1] - best[0] >= MIN_REPEATS else None


def find_steps(trace: Trace) -> Steps:
    """Find the steps of a trace that has at least one piece of GPU work."""
    launches = _launches(trace)
    edges = [(mark, gpu) for mark in trace.marks_us if (gpu := _gpu_start_behind(launches, mark)) is not None]
    origin = Origin.MARKER
    # Marks of a program that used the GPU only behind them all stand at one moment of the GPU.
    if len(edges) <= MIN_REPEATS or edges[0][1] == edges[-1][1]:
        origin, edges = Origin.REPETITION, [(call.start_us, gpu_us) for call, _, gpu_us in _repetition(launches)]
    if len(edges) <= MIN_REPEATS:
        first_us = min([call.start_us for call in trace.calls] + [work.start_us for work in trace.works])
        last_us = max([call.end_us for call in trace.calls] + [work.end_us for work in trace.works])
        origin, edges = Origin.NONE, [(first_us, first_us), (last_us, last_us)]
    host_us = [edge[0] for edge in edges]
    # Work may start out of order on several streams; edges must not.
    gpu_us = itertools.accumulate((edge[1] for edge in edges), max)
    return Steps(
        origin=origin,
        host_us=tuple(host_us),
        gpu_us=tuple(gpu_us),
        recordings=tuple(_recording(trace, *edge) for edge in itertools.pairwise(host_us)),
    )


def _recording(trace: Trace, start_us: float, end_us: float) -> Recording:
    for named_start_us, named_end_us in trace.named_us:
        if named_start_us <= start_us and end_us <= named_end_us:
            return Recording.NAMED
        if start_us < named_end_us and end_us > named_start_us:
            return Recording.MIXED
    return Recording.PLAIN


# A call that started GPU work, what it is known by, and when the work began.
_Launch = tuple[HostCall, str, float]


def _launches(trace: Trace) -> list[_Launch]:
    """List the launches of the thread that launches most, in order."""
    works_of = trace.works_of()
    by_thread: dict[int, list[_Launch]] = defaultdict(list)
    for call in trace.calls:
        if works := works_of.get(call.correlation):
            by_thread[call.thread].append((call, f"{call.name}|{works[0].name}", works[0].start_us))
    return max(by_thread.values(), key=len, default=[])


def _gpu_start_behind(launches: list[_Launch], host_us: float) -> float | None:
    """Give when the first work that was launched from `host_us` on began."""
    i = bisect.bisect_left(launches, host_us, key=lambda launch: launch[0].start_us)
    return launches[i][2] if i < len(launches) else None


def _repetition(launches: list[_Launch]) -> list[_Launch]:
    """Give the launches that begin a step; empty if nothing repeats."""
    keys = [launch[1] for launch in launches]
    positions: dict[str, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        positions[key].append(i)
    runs = [_longest_run(launches, places) for places in positions.values() if len(places) > MIN_REPEATS]
    runs = [run for run in runs if len(run) > MIN_REPEATS and _has_kernel(keys, run)]
    if not runs:
        return []
    longest_us = max(_duration_us(launches, run) for run in runs)
    runs = [run for run in runs if _duration_us(launches, run) >= _MIN_SHARE * longest_us]
    # Start-up repeats too, once per weight; the steady state is what the trace ends with.
    last = max(run[-1] for run in runs)
    runs = [run for run in runs if run[-1] >= last - 2 * (run[-1] - run[0]) / len(run)]
    runs.sort(key=lambda run: (len(run), run[0]))
    best = runs[0]
    for run in runs:
        if len(run) > len(best) and _likeness(keys, run) >= _MIN_LIKENESS:
            best = run
    # The first period may begin with the last launch of something else.
    return [launches[i] for i in (best[1:] if len(best) > MIN_REPEATS + 2 else best)]


def _longest_run(launches: list[_Launch], places: list[int]) -> list[int]:
    """Give those of ascending places that follow each other at even distances for the longest time."""
    best = (0, 0)
    first = 0
    distances: list[int] = []
    for i, (place, following) in enumerate(itertools.pairwise(places)):
        distance = following - place
        typical = statistics.median(distances[-15:]) if distances else distance
        if not typical / _EVENNESS <= distance <= typical * _EVENNESS:
            first, distances = i, []
        distances.append(distance)
        if _duration_us(launches, (places[first], following)) > _duration_us(
            launches, (places[best[0]], places[best[1]])
        ):
            best = (first, i + 1)
    return places[best[0] : best[1] + 1]


def _duration_us(launches: list[_Launch], run: Sequence[int]) -> float:
    return launches[run[-1]][0].start_us - launches[run[0]][0].start_us if run else 0.0


def _has_kernel(keys: list[str], run: list[int]) -> bool:
    """Say whether a period holds more than copies and fills: loading weights repeats as well."""
    return any("|Memcpy" not in key and "|Memset" not in key for key in keys[run[-2] : run[-1]])


def _likeness(keys: list[str], run: list[int]) -> float:
    """Give the share of launches that the least typical tenth of a run's periods shares with the typical one."""
    periods = [Counter(keys[first:last]) for first, last in itertools.pairwise(run)]
    typical = Counter(dict(Counter(frozenset(p.items()) for p in periods).most_common(1)[0][0]))
    shares = sorted((typical & period).total() / (typical | period).total() for period in periods)
    return statistics.fmean(shares[: max(1, len(shares) // 10)])
