"""An analysis in plain words and as JSON."""

import dataclasses
import re
from collections.abc import Sequence
from enum import Enum
from typing import Any

from soloist.profiler.analysis import Analysis, Place
from soloist.profiler.gaps import GapKind
from soloist.profiler.ranks import RanksReport
from soloist.profiler.steps import Origin

_MAX_LINES = 8
_MAX_STACK = 6
# Words of a kernel's name before its template arguments.
_KERNEL_NAME = re.compile(r"^(?:void )?(?P<name>[\w:~. ()-]+?)(?:<.*)?(?:\(.*)?$")


def in_words(analysis: Analysis, *, is_alone: bool = True) -> str:
    """Say what an analysis found, for a terminal.

    Args:
        analysis: of one process.
        is_alone: the other ranks of its group, if there are any, were not looked at.
    """
    lines = [_headline(analysis), *_notes(analysis, is_alone), ""]
    lines += _waits(analysis)
    lines += _gaps(analysis)
    lines += _lead(analysis)
    lines += _kernels(analysis)
    lines += _overhead(analysis)
    return "\n".join(lines)


def _headline(analysis: Analysis) -> str:
    a = analysis
    steps = "the whole trace as one step" if a.origin is Origin.NONE else f"{a.num_steps} steps of {a.step_ms:.2f} ms"
    text = f"{a.device_name}, {steps}: GPU idle {a.idle_share:.0%} of the step"
    if not a.gaps_per_step:
        return text
    text += f": {_plural(a.gaps_per_step, 'gap')}"
    idle_ms = a.idle_share * a.step_ms
    causes = [(wait.idle_ms, f"behind {_where(wait.place)} {_brief(wait.what)}") for wait in a.waits]
    causes += [
        (gap.idle_ms, f"while the host was busy at {_where(gap.place)}") for gap in a.gaps if gap.kind is GapKind.HOST
    ]
    first_ms, cause = max(causes, default=(0.0, ""))
    if first_ms > 0.05 * idle_ms:
        text += f", {min(1.0, first_ms / idle_ms):.0%} of it {cause}"
    return text


def _notes(analysis: Analysis, is_alone: bool) -> list[str]:
    notes = []
    if is_alone and (analysis.num_ranks or 1) > 1:
        notes.append(
            f"This is rank {analysis.rank} of {analysis.num_ranks} alone: who is late to the collectives, only the"
            " traces of all ranks can tell (--save in each, then --trace with all files)."
        )
    if analysis.origin is Origin.NONE:
        notes.append("Nothing repeats: figures are of the whole trace. Mark steps with watch(...).step().")
    if analysis.hidden_replays:
        notes.append(
            f"{_count(analysis.hidden_replays)} graph replays per step are recorded without their kernels: the GPU may"
            " be busier than it looks. Record with a profiler that traces graph nodes, as torch.profiler does."
        )
    if len(analysis.idle_share_by_device) > 1:
        shares = ", ".join(f"GPU {i} {share:.0%}" for i, share in sorted(analysis.idle_share_by_device.items()))
        notes.append(f"Idle by device: {shares}.")
    return notes


def _waits(analysis: Analysis) -> list[str]:
    if not analysis.waits:
        return ["No blocking wait: the host never stands still for the GPU.", ""]
    low_ms, high_ms = analysis.loss_range_ms
    lines = [
        f"{_plural(analysis.syncs_per_step, 'blocking wait')} per step, {analysis.blocked_ms:.3f} ms blocked;"
        f" without them a step would be shorter by about {analysis.loss_ms:.3f} ms ({low_ms:.3f} to {high_ms:.3f}):"
    ]
    for wait in analysis.waits[:_MAX_LINES]:
        after = f"the GPU then idles {wait.idle_ms:.3f} ms"
        if wait.idle_ms < 0.001:
            after = f"harmless: the GPU still had {wait.queued_us / 1e3:.3f} ms of work"
            if wait.queued_us < 1:
                # Behind another wait, or in another thread than the one that enqueues.
                after = "the GPU had nothing left to run, but what it then idles has another cause"
        lines.append(f"  {_where(wait.place)}  {wait.what}")
        # Of one line alone it is that of all.
        alone = (
            f"; by itself it costs {wait.loss_ms:.3f} ms"
            if wait.loss_ms is not None and len(analysis.waits) > 1
            else ""
        )
        lines.append(f"      {_count(wait.count)} per step, {wait.blocked_ms:.3f} ms blocked, {after}{alone}")
        lines += _source(wait.place)
    lines += [f"  and {len(analysis.waits) - _MAX_LINES} more lines"] if len(analysis.waits) > _MAX_LINES else []
    return [*lines, ""]


def _gaps(analysis: Analysis) -> list[str]:
    others = [gap for gap in analysis.gaps if gap.kind is not GapKind.WAIT]
    if not others:
        return []
    lines = ["Other gaps:"]
    for gap in others[:_MAX_LINES]:
        figures = f"{_count(gap.count)} per step, {gap.idle_ms:.3f} ms idle"
        if gap.kind is GapKind.HOST:
            doing = f", in {gap.what}" if gap.what else ""
            lines.append(f"  the host was busy at {_where(gap.place)}{doing}: {figures}")
            lines += _source(gap.place)
        elif gap.kind is GapKind.QUEUED:
            lines.append(f"  before {short_name(gap.what)}, which had been enqueued in time: {figures}")
        else:
            lines.append(f"  before {short_name(gap.what)}, whose launch was not recorded: {figures}")
    lines += [f"  and {len(others) - _MAX_LINES} more causes"] if len(others) > _MAX_LINES else []
    return [*lines, ""]


def _source(place: Place) -> list[str]:
    lines = [f"      > {place.text}"] if place.text else []
    if place.where not in place.stack:
        return lines
    at = place.stack.index(place.where)
    # Below the line: what it called, of PyTorch or Python. Above it: who called its function.
    inner, callers = place.stack[:at], place.stack[at + 1 :][:_MAX_STACK]
    lines += [f"      in {' < '.join(inner[:_MAX_STACK])}"] if inner else []
    return [*lines, f"      from {' < '.join(callers)}"] if callers else lines


def _lead(analysis: Analysis) -> list[str]:
    if analysis.lead is None:
        return []
    lead = analysis.lead
    text = f"Launch lead (enqueued to started): median {_us(lead.median_us)}, least {_us(lead.min_us)}"
    if lead.share_without:
        text += f"; {lead.share_without:.0%} of the launches found the GPU idle"
        culprits = [wait for wait in analysis.waits if wait.idle_ms > 0]
        text += f", first behind {_where(culprits[0].place)}" if culprits else ""
    return [text + ".", ""]


def _kernels(analysis: Analysis) -> list[str]:
    lines = [f"{'us per step':>12}  {'share':>6}  {'count':>7}  work"]
    for kernel in analysis.kernels[: 2 * _MAX_LINES]:
        moved = f", {kernel.num_bytes / 1e3:.1f} kB" if kernel.num_bytes else ""
        name = short_name(kernel.name) + moved
        lines.append(f"{kernel.busy_us:>12.1f}  {kernel.share:>6.1%}  {_count(kernel.count):>7}  {name}")
    rest = analysis.kernels[2 * _MAX_LINES :]
    if rest:
        busy_us, share, count = (
            sum(values) for values in zip(*((k.busy_us, k.share, k.count) for k in rest), strict=True)
        )
        lines.append(f"{busy_us:>12.1f}  {share:>6.1%}  {_count(count):>7}  {len(rest)} others")
    return [*lines, ""]


def _overhead(analysis: Analysis) -> list[str]:
    o = analysis.overhead
    figures = {
        "with Python lines": o.named_step_ms,
        "with PyTorch's profiler alone": o.plain_step_ms,
        "unprofiled": o.unprofiled_step_ms,
    }
    known = [f"{step_ms:.2f} ms {how}" for how, step_ms in figures.items() if step_ms is not None]
    if not known:
        return []
    rest = (
        "" if o.unprofiled_step_ms is not None else "; unprofiled: not measured, which takes marks of watch(...).step()"
    )
    launch = "" if o.launch_us is None else f" PyTorch's profiler adds {o.launch_us:.1f} us to a launch."
    return [f"A step takes {', '.join(known)}{rest}.{launch}"]


def _where(place: Place) -> str:
    return place.where or "(no Python line known)"


def _brief(what: str) -> str:
    """Put code in backquotes, in the headline."""
    return f"`{what}`" if what.endswith(")") and " " not in what else f"({what})"


def _count(number: float) -> str:
    return f"{number:.0f}" if abs(number - round(number)) < 0.005 else f"{number:.2f}"


def _plural(number: float, noun: str) -> str:
    text = _count(number)
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"


def _us(us: float) -> str:
    return f"{us:.0f} us" if us < 1000 else f"{us / 1e3:.2f} ms"


def short_name(name: str) -> str:
    """Cut a kernel's name before its template arguments."""
    match = _KERNEL_NAME.match(name)
    short = match["name"].strip() if match else name
    return short if len(short) <= 70 else short[:67] + "..."


def ranks_in_words(report: RanksReport, analyses: Sequence[Analysis]) -> str:
    """Say which rank comes late to the collectives, and what it does instead."""
    lines = [f"{len(report.ranks)} ranks, {report.num_collectives} collectives in common:"]
    for figures in sorted(report.ranks, key=lambda figures: figures.rank):
        clock = f", clock moved by {figures.clock_offset_us:.1f} us" if figures.clock_offset_us else ""
        lines.append(
            f"  rank {figures.rank}: last in {figures.late_share:.0%} of them, waits {figures.waiting_us:.1f} us in"
            f" each for the others{clock}"
        )
    if report.late_rank is None:
        return "\n".join([*lines, "The ranks arrive together: what a collective takes is its own time."])
    lines.append(f"Rank {report.late_rank} is late: the others wait {report.waited_us:.1f} us for it each time.")
    late = next(a for a, figures in zip(analyses, report.ranks, strict=True) if figures.rank == report.late_rank)
    causes = [gap for gap in late.gaps if gap.kind in (GapKind.WAIT, GapKind.HOST)]
    if causes:
        lines.append(
            f"Its largest gap: {causes[0].idle_ms:.3f} ms per step at {_where(causes[0].place)} {causes[0].what}"
        )
    return "\n".join(lines)


# --- JSON


def as_json(analyses: Sequence[Analysis], ranks: RanksReport | None = None) -> dict[str, Any]:
    """Give everything as one JSON object; docs/profile.md describes it."""
    return {
        "schema": 1,
        "processes": [_plain(analysis) for analysis in analyses],
        "ranks": None if ranks is None else _plain(ranks),
    }


def _plain(value: Any) -> Any:
    """Turn dataclasses and enums into what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name != "steps"
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
