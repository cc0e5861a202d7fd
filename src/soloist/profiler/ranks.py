"""Traces of several ranks beside each other: which of them comes late to the collectives, and what it does instead.

The duration of a collective is no cost: a rank that arrives early waits inside of it. Only traces on one clock say who
was late.
"""

import bisect
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from soloist.errors import UsageError
from soloist.profiler.analysis import Analysis
from soloist.profiler.trace import GpuWork, Trace

_COLLECTIVE = re.compile(r"nccl|all_?reduce|all_?gather|reduce_?scatter|cross_device|one_shot|two_shot", re.IGNORECASE)
# By how many collectives the clocks may be wrong about which belong together.
_MAX_SHIFT = 64
# Clocks of one time are not further apart: what lies between two traces then is no error of a clock.
_MAX_APART_US = 1e6
# A rank that is behind the others by less is not late.
_LATE_US = 2.0
# So many of a rank's longest delays don't count, unless nobody has more: a recorder stalls its program when it begins,
# when it stops naming lines, and when it ends. A share of all delays would be too much: of the hundreds of collectives
# of a step, a rank may be late at one.
_NUM_STALLS = 3


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """One rank beside the others."""

    rank: int
    name: str
    # What was added to this rank's clock, so that collectives end together.
    clock_offset_us: float
    # What to add to a time of this trace for the time of the same moment in the first one.
    shift_us: float
    # Share of the collectives to which it came last, by more than `_LATE_US`.
    late_share: float
    # Inside a collective until the last rank arrived, mean.
    waiting_us: float


@dataclass(frozen=True, kw_only=True)
class RanksReport:
    """All ranks."""

    ranks: tuple[RankFigures, ...]
    num_collectives: int
    # The rank that costs the others most, a few stalls apart; None: they arrive together.
    late_rank: int | None
    # How long the others wait for it in one collective, mean over those to which it came last, stalls apart.
    waited_us: float


def compare_ranks(traces: Sequence[Trace], analyses: Sequence[Analysis]) -> RanksReport:
    """Put traces on one clock and see who is late.

    Args:
        traces: of one run, one per rank.
        analyses: of the same, in the same order.

    Raises:
        UsageError: two traces have the same rank, or they have no collectives in common, by what or by when they are.
    """
    ranks = [trace.rank if trace.rank is not None else i for i, trace in enumerate(traces)]
    if len(set(ranks)) < len(ranks):
        raise UsageError(f"the traces are of ranks {ranks}; give one trace per rank")
    collectives = [[work for work in trace.works if _COLLECTIVE.search(work.name)] for trace in traces]
    if min(map(len, collectives)) == 0:
        missing = [trace.name for trace, found in zip(traces, collectives, strict=True) if not found]
        raise UsageError(f"{', '.join(missing)} has no collective: nothing ties its clock to the others'")
    origins = [trace.origin_ns or 0 for trace in traces]
    clocks_us = [(origin - origins[0]) / 1e3 if all(origins) else 0.0 for origin in origins]
    if all(origins):
        _expect_one_time(traces, collectives, clocks_us)
    aligned = [_Aligned(shift=0, offset_us=0.0)]
    for i in range(1, len(traces)):
        aligned.append(_align(collectives[0], collectives[i], clocks_us[i], has_clock=all(origins)))
    first = max(0, *(-a.shift for a in aligned))
    last = min(len(found) - a.shift for found, a in zip(collectives, aligned, strict=True))
    shifts_us = [clock_us + a.offset_us for clock_us, a in zip(clocks_us, aligned, strict=True)]
    starts = [
        [collectives[i][j + aligned[i].shift].start_us + shifts_us[i] for i in range(len(traces))]
        for j in range(first, last)
    ]
    return _judge(ranks, [analysis.name for analysis in analyses], aligned, shifts_us, starts)


def _expect_one_time(traces: Sequence[Trace], collectives: Sequence[list[GpuWork]], clocks_us: Sequence[float]) -> None:
    """Raise `UsageError` unless all traces have collectives of one time: pairs of others would match by chance."""
    begins = [found[0].start_us + clock_us for found, clock_us in zip(collectives, clocks_us, strict=True)]
    ends = [found[-1].end_us + clock_us for found, clock_us in zip(collectives, clocks_us, strict=True)]
    late, early = max(range(len(begins)), key=lambda i: begins[i]), min(range(len(ends)), key=lambda i: ends[i])
    apart_us = begins[late] - ends[early]
    if apart_us > _MAX_APART_US:
        raise UsageError(
            f"{traces[late].name} begins {apart_us / 1e6:.3g} s after {traces[early].name} has ended, by their clocks:"
            " record the ranks at the same time"
        )


@dataclass(frozen=True, kw_only=True)
class _Aligned:
    # Its collective j + shift is the first rank's collective j.
    shift: int
    offset_us: float


def _align(first: list[GpuWork], other: list[GpuWork], clock_us: float, *, has_clock: bool) -> _Aligned:
    """Find which collective of another rank is which of the first rank's, and by how much its clock is wrong."""
    guess, reach = (_guess_shift(first, other, clock_us), _MAX_SHIFT) if has_clock else (0, 0)
    best, best_error = _Aligned(shift=guess, offset_us=0.0), float("inf")
    candidates = [
        (shift, [(first[j], other[j + shift]) for j in range(max(0, -shift), min(len(first), len(other) - shift))])
        for shift in range(guess - reach, guess + reach + 1)
    ]
    most = max(len(pairs) for _, pairs in candidates)
    for shift, pairs in candidates:
        # A few may agree by chance.
        if len(pairs) < max(1, most / 2):
            continue
        # They end together: none ends before the last rank has come.
        errors = [one.end_us - two.end_us - clock_us for one, two in pairs]
        offset_us = statistics.median(errors)
        error = statistics.median(abs(error - offset_us) for error in errors) + 0.001 * abs(offset_us)
        if error < best_error:
            best, best_error = _Aligned(shift=shift, offset_us=offset_us), error
    return best


def _guess_shift(first: list[GpuWork], other: list[GpuWork], clock_us: float) -> int:
    """Compare two rows of collectives by the clock, in the middle of what they have in common."""
    ends_us = [work.end_us + clock_us for work in other]
    middle_us = (max(first[0].end_us, ends_us[0]) + min(first[-1].end_us, ends_us[-1])) / 2
    at = bisect.bisect(first, middle_us, key=lambda work: work.end_us)
    return bisect.bisect(ends_us, middle_us) - at


def _judge(
    ranks: Sequence[int],
    names: Sequence[str],
    aligned: Sequence[_Aligned],
    shifts_us: Sequence[float],
    starts: list[list[float]],
) -> RanksReport:
    late: list[list[float]] = [[] for _ in ranks]
    waiting = [0.0] * len(ranks)
    for row in starts:
        last_us = max(row)
        for i, start_us in enumerate(row):
            waiting[i] += last_us - start_us
        others = sorted(row)[:-1]
        if last_us - others[-1] > _LATE_US:
            late[row.index(last_us)].append(last_us - statistics.fmean(others))
    usual = [sorted(delays)[:-_NUM_STALLS] for delays in late]
    worst = max(range(len(ranks)), key=lambda i: (sum(usual[i]), sum(late[i])))
    return RanksReport(
        ranks=tuple(
            RankFigures(
                rank=ranks[i],
                name=names[i],
                clock_offset_us=aligned[i].offset_us,
                shift_us=shifts_us[i],
                late_share=len(late[i]) / len(starts),
                waiting_us=waiting[i] / len(starts),
            )
            for i in range(len(ranks))
        ),
        num_collectives=len(starts),
        late_rank=ranks[worst] if late[worst] else None,
        waited_us=statistics.fmean(usual[worst] or late[worst] or [0.0]),
    )
