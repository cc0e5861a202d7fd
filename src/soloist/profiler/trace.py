"""A trace: what the host called, what the GPU ran, where Python was, and when.

Owns the types; `kineto` reads and writes them, `steps`, `waits` and `gaps` judge them. Times are microseconds since the
first event of the trace.
"""

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Host pauses longer than this are looked into: where was Python meanwhile?
PAUSE_US = 20.0
SAMPLES_PER_PAUSE = 3


@dataclass(frozen=True)
class Frame:
    """One level of a Python stack."""

    # As short as it stays clear: below the working folder or a package folder. Empty: a function without Python source.
    file: str
    # The line being executed or, if not `is_exact`, the first line of the function.
    line: int
    function: str
    # Source of the line; empty where it could not be read.
    text: str = ""
    is_exact: bool = True

    def __str__(self) -> str:
        if not self.file:
            return self.function
        return f"{self.file}:{self.line}" if self.is_exact else f"{self.function}() of {self.file}:{self.line}"


# Innermost first.
Stack = tuple[Frame, ...]


@dataclass(slots=True, kw_only=True)
class HostCall:
    """A call of the CUDA runtime or driver."""

    name: str
    start_us: float
    end_us: float
    thread: int
    # Ties the call to the GPU work it started.
    correlation: int
    # Names of the PyTorch operators around it, outermost first.
    ops: tuple[str, ...] = ()
    stack: Stack = ()

    @property
    def duration_us(self) -> float:
        """How long the host was inside."""
        return self.end_us - self.start_us


@dataclass(slots=True, kw_only=True)
class GpuWork:
    """A kernel, a copy or a fill."""

    name: str
    # "kernel", "memcpy" or "memset".
    kind: str
    start_us: float
    end_us: float
    device: int
    stream: int
    # Of the call that started it: all kernels of a graph replay have that of the launch. 0: not recorded.
    correlation: int
    # Moved; None for kernels, whose bytes no profiler counts.
    num_bytes: int | None = None

    @property
    def duration_us(self) -> float:
        """How long it ran."""
        return self.end_us - self.start_us


@dataclass(slots=True, kw_only=True)
class Sample:
    """Where a thread was at one moment between two calls."""

    time_us: float
    stack: Stack
    # Operators around that moment, outermost first.
    ops: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Trace:
    """One process's events, each list in the order of their starts."""

    name: str
    calls: list[HostCall]
    works: list[GpuWork]
    # Starts of the steps, if the program marked them.
    marks_us: list[float] = field(default_factory=list)
    # By thread: what Python did in the pauses between calls.
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    # Rank within a tensor-parallel or data-parallel group; None: a process alone.
    rank: int | None = None
    # Of that group; None: not known.
    num_ranks: int | None = None
    # Unix time of the trace's zero, in nanoseconds; None: the trace does not say.
    origin_ns: int | None = None
    device_names: tuple[str, ...] = ()
    # Spans in which Python lines were recorded, which slows the host. Outside of them only PyTorch's profiler ran.
    named_us: list[tuple[float, float]] = field(default_factory=list)
    # Time per marked step after the profiler had stopped; None: not measured.
    unprofiled_step_ms: float | None = None
    # What recording adds to a launch; None: not measured.
    launch_overhead_us: float | None = None

    def call_of(self) -> dict[int, HostCall]:
        """Map correlation to call."""
        return {call.correlation: call for call in self.calls if call.correlation}

    def works_of(self) -> dict[int, list[GpuWork]]:
        """Map correlation to the work it started."""
        works: dict[int, list[GpuWork]] = defaultdict(list)
        for work in self.works:
            if work.correlation:
                works[work.correlation].append(work)
        return works

    def drop_before(self, start_us: float) -> None:
        """Forget the calls before a moment, and the work they started."""
        dropped = {call.correlation for call in self.calls if call.start_us < start_us} - {0}
        self.calls = [call for call in self.calls if call.start_us >= start_us]
        self.works = [work for work in self.works if work.correlation not in dropped]

    @property
    def devices(self) -> list[int]:
        """Devices that did something, the busiest first."""
        busy: dict[int, float] = defaultdict(float)
        for work in self.works:
            busy[work.device] += work.duration_us
        return sorted(busy, key=lambda device: -busy[device])


OpsAt = Callable[[int, list[float]], list[tuple[str, ...]]]
StacksAt = Callable[[int, list[float]], list[Stack]]


def resolve(trace: Trace, ops_at: OpsAt | None, stacks_at: StacksAt | None) -> None:
    """Fill in where the host was during every call, and in the pauses between calls.

    Args:
        trace: changed in place; `ops` or `stack` of its calls and samples.
        ops_at: gives the operators around each of some ascending times of a thread. None: they stay as they are.
        stacks_at: gives the Python stack at each of some ascending times of a thread. None: they stay as they are.
    """
    by_thread: dict[int, list[HostCall]] = defaultdict(list)
    for call in trace.calls:
        by_thread[call.thread].append(call)
    for thread, calls in by_thread.items():
        if thread not in trace.samples:
            trace.samples[thread] = [Sample(time_us=time, stack=()) for time in _pause_times(calls)]
        # A blocked thread executes no line, so any moment of the call will do; the middle forgives errors of clocks.
        places: list[tuple[float, HostCall | Sample]] = [((c.start_us + c.end_us) / 2, c) for c in calls]
        places += [(sample.time_us, sample) for sample in trace.samples[thread]]
        places.sort(key=lambda place: place[0])
        times = [time for time, _ in places]
        if ops_at is not None:
            for (_, place), names in zip(places, ops_at(thread, times), strict=True):
                place.ops = names
        if stacks_at is not None:
            for (_, place), stack in zip(places, stacks_at(thread, times), strict=True):
                place.stack = stack


def _pause_times(calls: list[HostCall]) -> list[float]:
    """Choose moments within the longer pauses between a thread's calls."""
    times = []
    last_us = calls[0].end_us
    for call in calls[1:]:
        pause_us = call.start_us - last_us
        if pause_us > PAUSE_US:
            times += [last_us + pause_us * (i + 0.5) / SAMPLES_PER_PAUSE for i in range(SAMPLES_PER_PAUSE)]
        last_us = max(last_us, call.end_us)
    return times


def between(samples: Sequence[Sample], start_us: float, end_us: float) -> Sequence[Sample]:
    """Give the samples of a span of time, out of samples in the order of their times."""
    first = bisect.bisect_left(samples, start_us, key=lambda sample: sample.time_us)
    last = bisect.bisect_right(samples, end_us, key=lambda sample: sample.time_us)
    return samples[first:last]
