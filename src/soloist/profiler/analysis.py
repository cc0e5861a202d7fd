"""What a step costs and why: waits, bubbles, launch lead and kernels of a trace, each tied to a line of Python.

Figures are per step, of steps in which no Python line was recorded where there are any; names come from those in which
lines were.
"""

import bisect
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from soloist.errors import UsageError
from soloist.profiler.gaps import Gap, GapKind, Lead, busy_spans, busy_us, find_gaps, find_leads
from soloist.profiler.replay import Loss, Replay, price_waits
from soloist.profiler.steps import Origin, Recording, Steps, find_steps
from soloist.profiler.trace import Stack, Trace
from soloist.profiler.waits import Wait, WaitKind, blame, find_waits, lend_stacks

DEFAULT_STEPS = 64
# Lines of which each is priced alone, those that block longest.
_PRICED_LINES = 6
# A launch that reaches the GPU sooner than this found it idle: about what an empty GPU takes to begin.
NO_LEAD_US = 20.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in the program something happens."""

    # As in "sampler.py:212"; empty: no Python code is known.
    where: str
    function: str
    # Source of the line.
    text: str
    # The whole stack, innermost first, in the form of `where`.
    stack: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WaitLine:
    """All waits of one line, per step."""

    place: Place
    kind: WaitKind
    # In plain words, as in ".item()".
    what: str
    count: float
    blocked_ms: float
    # GPU idle time behind these waits, until the host enqueued again or turned to other work for long.
    idle_ms: float
    # What a step would be shorter by without these waits, the others left as they are; None: too many lines to tell.
    loss_ms: float | None
    # Work the GPU still had when the host went on, median; 0: it had run dry.
    queued_us: float


@dataclass(frozen=True, kw_only=True)
class GapLine:
    """All bubbles with one cause, per step."""

    place: Place
    kind: GapKind
    # What the host was doing, or what the GPU ran next.
    what: str
    count: float
    idle_ms: float


@dataclass(frozen=True, kw_only=True)
class KernelLine:
    """All work of one name, per step."""

    name: str
    kind: str
    count: float
    busy_us: float
    # Of all work's time.
    share: float
    # Bytes copied or filled, per step; None for kernels.
    num_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class LeadFigures:
    """How far the host runs ahead of the GPU: from the end of a launch to the start of its work."""

    median_us: float
    min_us: float
    # Share of launches that found the GPU idle.
    share_without: float


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What profiling itself costs: median time per step. None: not measured."""

    # With Python lines recorded.
    named_step_ms: float | None
    # With PyTorch's profiler alone.
    plain_step_ms: float | None
    # Without any.
    unprofiled_step_ms: float | None
    # What PyTorch's profiler adds to a launch.
    launch_us: float | None


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What one process's trace shows."""

    name: str
    rank: int | None
    num_ranks: int | None
    device: int
    device_name: str
    origin: Origin
    num_steps: int
    step_ms: float
    # Share of the time in which the device runs nothing, and of it that in pauses too short to be bubbles.
    idle_share: float
    gap_share: float
    # The same for every device of the process.
    idle_share_by_device: dict[int, float]
    # Bubbles before work that came too late; one with two causes counts once.
    gaps_per_step: float
    busy_ms: float
    syncs_per_step: float
    blocked_ms: float
    # What a step would be shorter by if the host never waited, and nobody recorded; and between what that lies.
    loss_ms: float
    loss_range_ms: tuple[float, float]
    waits: tuple[WaitLine, ...]
    gaps: tuple[GapLine, ...]
    kernels: tuple[KernelLine, ...]
    # None: no launch of the steps' work was recorded.
    lead: LeadFigures | None
    overhead: Overhead
    # Graph replays per step whose kernels the trace does not have: idle time cannot be told then.
    hidden_replays: float
    steps: Steps


def analyse(trace: Trace, *, max_steps: int = DEFAULT_STEPS) -> Analysis:
    """Find what the steps of a trace wait for.

    Args:
        trace: of one process. Calls of steps without Python lines get the stacks of steps that have them.
        max_steps: look at the last so many steps; names come from any step.

    Raises:
        UsageError: the trace has no work of a GPU, or spans no time.
    """
    if not trace.works:
        raise UsageError(f"{trace.name} has no work of a GPU: there is nothing to wait for")
    all_steps = find_steps(trace)
    steps = all_steps.longest(Recording.PLAIN) or all_steps.longest(Recording.NAMED) or all_steps
    steps = steps.last(max_steps)
    # The steps with names may lie far before those that are looked at.
    lend_stacks(trace, all_steps, steps)
    device = trace.devices[0]
    works = [work for work in trace.works if work.device == device]
    spans = busy_spans(works)
    window_us = steps.gpu_us[-1] - steps.gpu_us[0]
    if window_us <= 0:
        raise UsageError(f"{trace.name} spans no time: there is nothing to tell shares of")
    busy_ms = busy_us(spans, steps.gpu_us[0], steps.gpu_us[-1]) / 1e3
    waits = find_waits(trace)
    inside = [wait for wait in waits if steps.host_us[0] <= wait.start_us < steps.host_us[-1]]
    gaps = _within(find_gaps(trace, device, waits), steps)
    small_us = window_us - 1e3 * busy_ms - sum(gap.duration_us for gap in gaps)
    step_ms = _median_step_ms(steps)
    blocked_ms = sum(wait.blocked_us for wait in inside) / 1e3 / len(steps)
    loss, replay = Loss(ms=0.0, low_ms=0.0, high_ms=0.0), None
    if inside:
        loss, replay = price_waits(trace, steps, waits), Replay(trace, steps, waits)
    return Analysis(
        name=trace.name,
        rank=trace.rank,
        num_ranks=trace.num_ranks,
        device=device,
        device_name=trace.device_names[device] if device < len(trace.device_names) else f"GPU {device}",
        origin=steps.origin,
        num_steps=len(steps),
        step_ms=step_ms,
        idle_share=1 - 1e3 * busy_ms / window_us,
        gap_share=small_us / window_us,
        idle_share_by_device={i: _idle_share(trace, i, steps) for i in trace.devices},
        gaps_per_step=sum(gap.kind is not GapKind.QUEUED and not gap.is_continued for gap in gaps) / len(steps),
        busy_ms=busy_ms / len(steps),
        syncs_per_step=len(inside) / len(steps),
        blocked_ms=blocked_ms,
        loss_ms=loss.ms,
        loss_range_ms=(loss.low_ms, loss.high_ms),
        waits=_wait_lines(inside, gaps, spans, len(steps), replay),
        gaps=_gap_lines(gaps, len(steps)),
        kernels=_kernel_lines(trace, device, steps),
        lead=_lead_figures(find_leads(trace, device), steps),
        overhead=_overhead(trace, all_steps, max_steps),
        hidden_replays=_hidden_replays(trace, steps),
        steps=steps,
    )


def _within(gaps: Sequence[Gap], steps: Steps) -> list[Gap]:
    return [gap for gap in gaps if steps.gpu_us[0] <= gap.start_us < steps.gpu_us[-1]]


def _median_step_ms(steps: Steps) -> float:
    durations = [end - start for start, end in zip(steps.gpu_us, steps.gpu_us[1:], strict=False)]
    return statistics.median(durations) / 1e3


def _idle_share(trace: Trace, device: int, steps: Steps) -> float:
    spans = busy_spans([work for work in trace.works if work.device == device])
    return 1 - busy_us(spans, steps.gpu_us[0], steps.gpu_us[-1]) / (steps.gpu_us[-1] - steps.gpu_us[0])


def place_of(stack: Stack) -> Place:
    """Say where a stack is."""
    frame = blame(stack)
    return Place(
        where=str(frame) if frame else "",
        function=frame.function if frame else "",
        text=frame.text if frame else "",
        stack=tuple(str(frame) for frame in stack),
    )


def _wait_lines(
    waits: Sequence[Wait],
    gaps: Sequence[Gap],
    spans: list[tuple[float, float]],
    num_steps: int,
    replay: Replay | None,
) -> tuple[WaitLine, ...]:
    groups: dict[tuple[str, str], list[Wait]] = defaultdict(list)
    for wait in waits:
        groups[place_of(wait.stack).where, wait.what].append(wait)
    idle_us: dict[tuple[str, str], float] = defaultdict(float)
    for gap in gaps:
        if gap.wait is not None:
            idle_us[place_of(gap.wait.stack).where, gap.wait.what] += gap.duration_us
    blocked_us = {key: sum(wait.blocked_us for wait in group) for key, group in groups.items()}
    priced = sorted(groups, key=lambda key: -blocked_us[key])[:_PRICED_LINES]
    lines = [
        WaitLine(
            place=place_of(group[0].stack),
            kind=group[0].kind,
            what=group[0].what,
            count=len(group) / num_steps,
            blocked_ms=blocked_us[key] / 1e3 / num_steps,
            idle_ms=idle_us[key] / 1e3 / num_steps,
            loss_ms=replay.loss_ms_of(group) if replay is not None and key in priced else None,
            queued_us=statistics.median(_queued_us(spans, wait.end_us) for wait in group),
        )
        for key, group in groups.items()
    ]
    return tuple(sorted(lines, key=lambda line: (-line.idle_ms, -line.blocked_ms)))


def _queued_us(spans: list[tuple[float, float]], time_us: float) -> float:
    """Give how long the GPU goes on without a bubble from `time_us`."""
    i = bisect.bisect_right(spans, time_us, key=lambda span: span[0]) - 1
    return max(0.0, spans[i][1] - time_us) if i >= 0 else 0.0


def _gap_lines(gaps: Sequence[Gap], num_steps: int) -> tuple[GapLine, ...]:
    groups: dict[tuple[GapKind, str, str], list[Gap]] = defaultdict(list)
    for gap in gaps:
        groups[gap.kind, place_of(gap.stack).where, _doing(gap)].append(gap)
    lines = [
        GapLine(
            place=place_of(group[0].stack),
            kind=kind,
            what=what,
            count=len(group) / num_steps,
            idle_ms=sum(gap.duration_us for gap in group) / 1e3 / num_steps,
        )
        for (kind, _, what), group in groups.items()
    ]
    return tuple(sorted(lines, key=lambda line: -line.idle_ms))


def _doing(gap: Gap) -> str:
    if gap.wait is not None:
        return gap.wait.what
    if gap.kind is GapKind.HOST:
        return gap.ops[0] if gap.ops else ""
    return gap.next_work


def _kernel_lines(trace: Trace, device: int, steps: Steps) -> tuple[KernelLine, ...]:
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    num_bytes: dict[str, int] = defaultdict(int)
    for work in trace.works:
        if work.device == device and steps.gpu_us[0] <= work.start_us < steps.gpu_us[-1]:
            durations[work.name, work.kind].append(work.duration_us)
            num_bytes[work.name] += work.num_bytes or 0
    total_us = sum(sum(group) for group in durations.values()) or 1.0
    lines = [
        KernelLine(
            name=name,
            kind=kind,
            count=len(group) / len(steps),
            busy_us=sum(group) / len(steps),
            share=sum(group) / total_us,
            num_bytes=None if kind == "kernel" else num_bytes[name] / len(steps),
        )
        for (name, kind), group in durations.items()
    ]
    return tuple(sorted(lines, key=lambda line: -line.busy_us))


def _lead_figures(leads: Sequence[Lead], steps: Steps) -> LeadFigures | None:
    inside = [lead.lead_us for lead in leads if steps.gpu_us[0] <= lead.work_start_us < steps.gpu_us[-1]]
    if not inside:
        return None
    return LeadFigures(
        median_us=statistics.median(inside),
        min_us=min(inside),
        share_without=sum(lead_us < NO_LEAD_US for lead_us in inside) / len(inside),
    )


def _overhead(trace: Trace, steps: Steps, max_steps: int) -> Overhead:
    figures: dict[Recording, float | None] = {}
    for recording in (Recording.NAMED, Recording.PLAIN):
        row = steps.longest(recording)
        figures[recording] = _median_step_ms(row.last(max_steps)) if row and row.origin is not Origin.NONE else None
    return Overhead(
        named_step_ms=figures[Recording.NAMED],
        plain_step_ms=figures[Recording.PLAIN],
        unprofiled_step_ms=trace.unprofiled_step_ms,
        launch_us=trace.launch_overhead_us,
    )


def _hidden_replays(trace: Trace, steps: Steps) -> float:
    works_of = trace.works_of()
    hidden = [
        call
        for call in trace.calls
        if call.name in ("cudaGraphLaunch", "cuGraphLaunch")
        and steps.host_us[0] <= call.start_us < steps.host_us[-1]
        and not works_of.get(call.correlation)
    ]
    return len(hidden) / len(steps)
