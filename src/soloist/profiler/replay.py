"""What waits cost: the steps of a trace played again as host and GPU go about them, with their waits and without.

A launch costs the host what it cost, and its work begins when it has arrived and its stream is free. A wait ends behind
the work that had ended when it did. What recording itself adds to every launch is taken off, so that the figures are
those of the program alone.
"""

import bisect
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from soloist.profiler.steps import MIN_REPEATS, Steps
from soloist.profiler.trace import GpuWork, Trace
from soloist.profiler.waits import Wait

# The steps are played so often in a row; the last time tells, because by then a host that runs ahead is ahead.
_ROUNDS = 4
# No launch is cheaper, however much recording it costs.
_MIN_CALL_US = 3.0
# What recording adds to a launch is measured at one kind of launch; others may have this share of it.
_OVERHEAD_SHARES = (0.5, 1.5)
# Where a trace shows no idle GPU, or no queued work: from a launch to its work, and between two pieces of work.
_LATENCY_US, _PAUSE_US = 8.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What a step would be shorter by if the host never waited, and nobody recorded."""

    ms: float
    # Least and most, by what is not known well: what recording costs, and whether steps are alike.
    low_ms: float
    high_ms: float


# Streams of several GPUs have the same numbers.
_Stream = tuple[int, int]


def _stream(work: GpuWork) -> _Stream:
    return work.device, work.stream


def price_waits(trace: Trace, steps: Steps, waits: Sequence[Wait]) -> Loss:
    """Play the steps of a trace again and give what their waits cost. For arguments see `Replay`."""
    overhead_us = trace.launch_overhead_us or 0.0
    ms = Replay(trace, steps, waits).loss_ms
    others = [
        Replay(trace, steps, waits, overhead_us=share * overhead_us).loss_ms
        for share in _OVERHEAD_SHARES
        if overhead_us
    ]
    half = len(steps) // 2
    if half >= MIN_REPEATS:
        others += [Replay(trace, part, waits).loss_ms for part in (steps.take(0, half), steps.last(len(steps) - half))]
    return Loss(ms=ms, low_ms=min([ms, *others]), high_ms=max([ms, *others]))


class Replay:
    """The steps of a trace, ready to be played again.

    Args:
        trace: of one process.
        steps: at least one; only the thread that launches most is played.
        waits: of the whole trace.
        overhead_us: what recording added to a launch. None: what was measured.
    """

    def __init__(self, trace: Trace, steps: Steps, waits: Sequence[Wait], *, overhead_us: float | None = None) -> None:
        self._works_of = trace.works_of()
        inside = [call for call in trace.calls if steps.host_us[0] <= call.start_us < steps.host_us[-1]]
        launches = Counter(call.thread for call in inside if call.correlation in self._works_of)
        thread = launches.most_common(1)[0][0] if launches else None
        self._calls = [call for call in inside if call.thread == thread]
        self._num_steps = len(steps)
        # From the end of the last call to the first one of the step that would follow.
        self._rest_us = max(0.0, steps.host_us[-1] - max((call.end_us for call in self._calls), default=0.0))
        self._overhead_us = (trace.launch_overhead_us or 0.0) if overhead_us is None else overhead_us
        # By `id` of a waiting call: the last work that had ended when it returned, and `id` of the wait it is part of.
        self._awaited: dict[int, GpuWork | None] = {}
        self._wait_of: dict[int, int] = {}
        by_end = sorted(trace.works, key=lambda work: work.end_us)
        own_waits = [wait for wait in waits if wait.thread == thread]
        for call in trace.calls:
            i = bisect.bisect_right(own_waits, call.start_us, key=lambda wait: wait.start_us) - 1
            if call.thread == thread and i >= 0 and call.start_us < own_waits[i].end_us:
                last = bisect.bisect_right(by_end, call.end_us, key=lambda work: work.end_us) - 1
                self._awaited[id(call)] = by_end[last] if last >= 0 else None
                self._wait_of[id(call)] = id(own_waits[i])
        self._find_delays(trace)

    def _find_delays(self, trace: Trace) -> None:
        """Note what lay before each work: the way from its launch if its stream was idle, else a pause."""
        call_of = trace.call_of()
        # By `id` of a work.
        self._latency_us: dict[int, float] = {}
        self._pause_us: dict[int, float] = {}
        ends: dict[_Stream, float] = defaultdict(float)
        for work in trace.works:
            call, end_us = call_of.get(work.correlation), ends[_stream(work)]
            ends[_stream(work)] = max(end_us, work.end_us)
            if call is None or not end_us:
                continue
            # A call that waits has sent its work long before it returns.
            if (call.start_us if id(call) in self._awaited else call.end_us) > end_us:
                self._latency_us[id(work)] = max(0.0, work.start_us - call.start_us)
            else:
                self._pause_us[id(work)] = max(0.0, work.start_us - end_us)
        self._usual_latency_us = statistics.median(self._latency_us.values()) if self._latency_us else _LATENCY_US
        self._usual_pause_us = statistics.median(self._pause_us.values()) if self._pause_us else _PAUSE_US

    @property
    def loss_ms(self) -> float:
        """What a step would be shorter by without its waits."""
        return max(0.0, self.step_ms() - self.step_ms(without=set(self._wait_of.values())))

    def loss_ms_of(self, waits: Iterable[Wait]) -> float:
        """Give what a step would be shorter by without some of its waits, the others left as they are."""
        return max(0.0, self.step_ms() - self.step_ms(without={id(wait) for wait in waits}))

    def step_ms(self, *, without: Collection[int] = ()) -> float:
        """Play the steps and give the time of one, without what recording costs.

        Args:
            without: `id` of waits that are left out.
        """
        host_us = 0.0
        free_us: dict[_Stream, float] = defaultdict(float)
        # By `id` of a work: when it ended.
        ended_us: dict[int, float] = {}
        marks_us = [0.0]
        for _ in range(_ROUNDS):
            previous_us = self._calls[0].start_us if self._calls else 0.0
            for call in self._calls:
                pause_us = max(0.0, call.start_us - previous_us)
                previous_us = max(previous_us, call.end_us)
                is_waiting = id(call) in self._awaited
                host_us += pause_us
                if call.correlation in self._works_of:
                    host_us -= self._saved_us(pause_us if is_waiting else pause_us + call.duration_us)
                called_us = host_us
                if not is_waiting:
                    host_us += call.duration_us
                for work in self._works_of.get(call.correlation, ()):
                    arrived_us = called_us + self._latency_us.get(id(work), self._usual_latency_us)
                    idle_us = free_us[_stream(work)] + self._pause_us.get(id(work), self._usual_pause_us)
                    ended_us[id(work)] = free_us[_stream(work)] = max(arrived_us, idle_us) + work.duration_us
                if is_waiting and self._wait_of[id(call)] not in without:
                    awaited = self._awaited[id(call)]
                    done_us = ended_us.get(id(awaited), 0.0)
                    # What the call takes by itself, the way back from the GPU included.
                    own_us = call.end_us - max(call.start_us, awaited.end_us if awaited else 0.0)
                    host_us = max(host_us, done_us) + own_us
                elif is_waiting and call.correlation in self._works_of:
                    host_us += min(call.duration_us, _MIN_CALL_US)
            host_us += self._rest_us
            marks_us.append(max(free_us.values(), default=host_us))
        return (marks_us[-1] - marks_us[-2]) / self._num_steps / 1e3

    def _saved_us(self, host_us: float) -> float:
        """Give the part of the host's time for a launch, and for what led to it, that is recording's."""
        return min(self._overhead_us, max(0.0, host_us - _MIN_CALL_US))
