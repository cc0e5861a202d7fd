"""GPU bubbles: spans in which a GPU runs nothing, and what the host was doing instead of feeding it."""

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from soloist.profiler.trace import Frame, GpuWork, HostCall, Sample, Stack, Trace, between
from soloist.profiler.waits import Wait, blame

# Shorter ones are the GPU's own pauses between kernels; they count as idle and are not looked into.
MIN_GAP_US = 5.0
# Behind a wait a host needs some time to enqueue again: 20 to 140 us in PyTorch's programs. What it takes longer than
# this is no part of the wait.
RESUME_US = 200.0


class GapKind(Enum):
    """Why the GPU had nothing to run."""

    # The host had waited for the GPU, and had to start enqueueing afresh.
    WAIT = "wait"
    # The host was busy with something else.
    HOST = "host"
    # The work was enqueued in time: dependencies, other streams, or the GPU's own launch latency.
    QUEUED = "queued"
    # What started the next work was not recorded.
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Gap:
    """One bubble, or the part of one that has a cause of its own."""

    kind: GapKind
    start_us: float
    end_us: float
    # For `GapKind.WAIT`: the wait before the late launch.
    wait: Wait | None = None
    # Of what the host was doing.
    stack: Stack = ()
    ops: tuple[str, ...] = ()
    # The work that ended it.
    next_work: str = ""
    # Another part of the same bubble follows.
    is_continued: bool = False

    @property
    def duration_us(self) -> float:
        """How long nothing ran."""
        return self.end_us - self.start_us


def busy_spans(works: Sequence[GpuWork]) -> list[tuple[float, float]]:
    """Join the spans of work, in the order of their starts, that touch or overlap."""
    spans: list[tuple[float, float]] = []
    for work in works:
        if spans and work.start_us <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], work.end_us))
        else:
            spans.append((work.start_us, work.end_us))
    return spans


def busy_us(spans: Sequence[tuple[float, float]], start_us: float, end_us: float) -> float:
    """Sum up the time within a window in which something ran."""
    return sum(max(0.0, min(end, end_us) - max(start, start_us)) for start, end in spans)


def find_gaps(trace: Trace, device: int, waits: Sequence[Wait]) -> list[Gap]:
    """List the bubbles of one device, with their causes.

    Args:
        trace: with stacks, as far as they are known.
        device: one of `trace.devices`.
        waits: of the whole trace, in the order of their starts.
    """
    works = [work for work in trace.works if work.device == device]
    by_start: dict[float, GpuWork] = {}
    for work in works:
        by_start.setdefault(work.start_us, work)
    call_of = trace.call_of()
    calls_of: dict[int, list[HostCall]] = {}
    for call in trace.calls:
        calls_of.setdefault(call.thread, []).append(call)
    launching = {work.correlation for work in trace.works}
    launches_of = {thread: [c for c in calls if c.correlation in launching] for thread, calls in calls_of.items()}
    waits_of: dict[int, list[Wait]] = {}
    for wait in waits:
        waits_of.setdefault(wait.thread, []).append(wait)
    gaps = []
    for (_, start_us), (end_us, _) in itertools.pairwise(busy_spans(works)):
        if end_us - start_us < MIN_GAP_US:
            continue
        work = by_start[end_us]
        launch = call_of.get(work.correlation)
        if launch is None:
            gaps.append(Gap(kind=GapKind.UNKNOWN, start_us=start_us, end_us=end_us, next_work=work.name))
            continue
        previous = _last_before(launches_of[launch.thread], launch.start_us)
        thread_waits, samples = waits_of.get(launch.thread, []), trace.samples.get(launch.thread, [])
        gaps += _explain(start_us, work, launch, previous, thread_waits, samples)
    return gaps


def _last_before(calls: list[HostCall], time_us: float) -> HostCall | None:
    i = bisect.bisect_left(calls, time_us, key=lambda call: call.start_us)
    return calls[i - 1] if i else None


def _explain(
    start_us: float,
    work: GpuWork,
    call: HostCall,
    previous: HostCall | None,
    waits: Sequence[Wait],
    samples: Sequence[Sample],
) -> list[Gap]:
    """Say why the GPU was idle from `start_us` until `work`, which `call` started.

    Args:
        start_us: when the GPU ran dry.
        work: what it ran next.
        call: of the host, that enqueued `work`.
        previous: the call before that one which also enqueued something; the copy of a read is one.
        waits: of the calling thread.
        samples: of the calling thread.

    Returns:
        The bubble, in two parts if the host was busy for long behind a wait.
    """
    end_us = work.start_us
    if call.start_us <= start_us:
        return [_gap(GapKind.QUEUED, start_us, end_us, work, call.stack, call.ops)]
    previous_start_us, previous_end_us = (previous.start_us, previous.end_us) if previous else (start_us, start_us)
    first = bisect.bisect_right(waits, previous_start_us, key=lambda wait: wait.end_us)
    last = bisect.bisect_left(waits, call.start_us, key=lambda wait: wait.start_us)
    if first == last:
        meanwhile = between(samples, max(previous_end_us, start_us), call.start_us)
        stack, ops = _busiest(meanwhile or between(samples, previous_end_us, call.start_us), call)
        return [_gap(GapKind.HOST, start_us, end_us, work, stack, ops)]
    wait = max(waits[first:last], key=lambda wait: wait.blocked_us)
    resumed_us = min(max(wait.end_us, start_us), end_us)
    meanwhile = between(samples, resumed_us, call.start_us)
    if call.start_us - resumed_us < RESUME_US or not meanwhile:
        return [_gap(GapKind.WAIT, start_us, end_us, work, wait.stack, wait.ops, wait)]
    stack, ops = _busiest(meanwhile, call)
    parts = [
        replace(_gap(GapKind.WAIT, start_us, resumed_us, work, wait.stack, wait.ops, wait), is_continued=True),
        _gap(GapKind.HOST, resumed_us, end_us, work, stack, ops),
    ]
    # The host may have gone on before the GPU ran dry.
    return [part for part in parts if part.duration_us > 0]


def _gap(
    kind: GapKind,
    start_us: float,
    end_us: float,
    work: GpuWork,
    stack: Stack,
    ops: tuple[str, ...],
    wait: Wait | None = None,
) -> Gap:
    return Gap(kind=kind, start_us=start_us, end_us=end_us, wait=wait, stack=stack, ops=ops, next_work=work.name)


def _busiest(samples: Sequence[Sample], call: HostCall) -> tuple[Stack, tuple[str, ...]]:
    """Give the place in which most of a pause before a call was spent; without samples, that of the call."""
    times_us = [-math.inf, *(sample.time_us for sample in samples), math.inf]
    spent_us: dict[tuple[Frame | None, tuple[str, ...]], float] = defaultdict(float)
    for i, sample in enumerate(samples):
        # A sample stands for as much time as its neighbours are away; those of a long pause are far from each other.
        nearest_us = min(sample.time_us - times_us[i], times_us[i + 2] - sample.time_us, call.start_us)
        spent_us[blame(sample.stack), sample.ops[:1]] += nearest_us
    if not spent_us:
        return call.stack, call.ops
    place = max(spent_us, key=lambda place: spent_us[place])
    chosen = next(sample for sample in samples if (blame(sample.stack), sample.ops[:1]) == place)
    # Not a line of the one and an operator of the other.
    return (chosen.stack, chosen.ops) if chosen.stack or not call.stack else (call.stack, call.ops)


@dataclass(frozen=True, kw_only=True)
class Lead:
    """How far the host was ahead at one launch."""

    call: HostCall
    # From the end of the call to the start of its work.
    lead_us: float
    work_start_us: float


def find_leads(trace: Trace, device: int) -> list[Lead]:
    """Give the lead of every launch onto a device, in the order in which the works began."""
    call_of = trace.call_of()
    leads, seen = [], set()
    for work in trace.works:
        call = call_of.get(work.correlation)
        if work.device == device and call is not None and work.correlation not in seen:
            # Of a graph replay, the first kernel counts.
            seen.add(work.correlation)
            lead_us = max(0.0, work.start_us - call.end_us)
            leads.append(Lead(call=call, lead_us=lead_us, work_start_us=work.start_us))
    return leads
