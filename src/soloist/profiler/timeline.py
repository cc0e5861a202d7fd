"""One self-contained HTML page with the timeline of some steps: what each GPU stream ran, what the host called."""

import html
import itertools
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from soloist.profiler.analysis import Analysis
from soloist.profiler.gaps import busy_spans
from soloist.profiler.ranks import RanksReport
from soloist.profiler.report import in_words, ranks_in_words, short_name
from soloist.profiler.trace import HostCall, Stack, Trace
from soloist.profiler.waits import Wait, find_waits

# More boxes make a page slow; steps are alike, so the last ones will do.
MAX_ITEMS = 20_000
_MAX_STEPS = 8


def as_html(traces: Sequence[Trace], analyses: Sequence[Analysis], ranks: RanksReport | None = None) -> str:
    """Draw the last steps that an analysis looked at.

    Args:
        traces: that were analysed; several are ranks of one run and are drawn below each other, on the first's clock.
        analyses: of them.
        ranks: of several.
    """
    # Of several ranks, the steps of the late one are those to look at.
    late = max(range(len(traces)), key=lambda i: ranks is not None and ranks.ranks[i].rank == ranks.late_rank)
    shifts_us = [0.0] if ranks is None else [figures.shift_us for figures in ranks.ranks]
    names = [""] if ranks is None else [f"rank {figures.rank}: " for figures in ranks.ranks]
    waits = [find_waits(trace) for trace in traces]
    steps, shift_us = analyses[late].steps, shifts_us[late]
    first = max(0, len(steps) - _MAX_STEPS)
    while True:
        # The host enqueues before the GPU runs, so the page begins with the earlier of the two.
        start_us = min(steps.host_us[first], steps.gpu_us[first]) + shift_us
        end_us = max(steps.host_us[-1], steps.gpu_us[-1]) + shift_us
        rows = [
            row
            for i, trace in enumerate(traces)
            for row in _rows(trace, waits[i], start_us, end_us, shifts_us[i], names[i])
        ]
        if sum(len(row["items"]) for row in rows) <= MAX_ITEMS or first >= len(steps) - 1:
            break
        first += 1
    marks_us = [time_us + shift_us for time_us in steps.gpu_us[first:]]
    data = {"start": start_us, "end": end_us, "steps": marks_us, "rows": rows}
    page = (files("soloist.profiler") / "timeline.html").read_text(encoding="utf-8")
    # Within a script element only its end tag has a meaning.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    words = [f"{analysis.name}: {in_words(analysis, is_alone=ranks is None)}" for analysis in analyses]
    words += [] if ranks is None else [ranks_in_words(ranks, analyses)]
    title = ", ".join(analysis.name for analysis in analyses)
    parts = {"__TITLE__": html.escape(title), "__REPORT__": html.escape("\n\n".join(words)), "__DATA__": text}
    for mark, part in parts.items():
        page = page.replace(mark, part)
    return page


def _rows(
    trace: Trace, waits: Sequence[Wait], start_us: float, end_us: float, shift_us: float, owner: str
) -> list[dict[str, Any]]:
    """Lay out what overlaps a span of time: per GPU its streams and its bubbles, then the host's threads.

    Args:
        trace: of one process.
        waits: of it.
        start_us: of the span, on the clock of the page.
        end_us: of the span.
        shift_us: what to add to a time of the trace for that clock's.
        owner: what the names of the rows begin with.
    """
    start_us, end_us = start_us - shift_us, end_us - shift_us
    works = [work for work in trace.works if work.end_us > start_us and work.start_us < end_us]
    calls = [call for call in trace.calls if call.end_us > start_us and call.start_us < end_us]
    rows: list[dict[str, Any]] = []
    for device in sorted({work.device for work in works}):
        own = [work for work in works if work.device == device]
        for stream in sorted({work.stream for work in own}):
            items = [
                _item(short_name(work.name), work.start_us, work.end_us, work.name)
                for work in own
                if work.stream == stream
            ]
            rows.append({"name": f"{owner}GPU {device}, stream {stream}", "items": items})
        spans = busy_spans(own)
        gaps = [_item("idle", a[1], b[0], "", "gap") for a, b in itertools.pairwise(spans)]
        rows.append({"name": f"{owner}GPU {device} idle", "items": gaps})
    for i, thread in enumerate(dict.fromkeys(call.thread for call in calls)):
        items = [_call_item(call) for call in calls if call.thread == thread]
        items += [
            _item(wait.what, wait.start_us, wait.end_us, _stack_text(wait.stack), "wait")
            for wait in waits
            if wait.thread == thread and wait.end_us > start_us and wait.start_us < end_us
        ]
        rows.append({"name": f"{owner}host thread {i + 1}", "items": items})
    for row in rows:
        for item in row["items"]:
            item["s"], item["e"] = round(item["s"] + shift_us, 2), round(item["e"] + shift_us, 2)
    return rows


def _call_item(call: HostCall) -> dict[str, Any]:
    ops = " > ".join(call.ops)
    return _item(call.name, call.start_us, call.end_us, "\n".join(filter(None, (ops, _stack_text(call.stack)))), "call")


def _item(name: str, start_us: float, end_us: float, text: str, kind: str = "") -> dict[str, Any]:
    item: dict[str, Any] = {"n": name, "s": start_us, "e": end_us, "t": text}
    return item | ({"c": kind} if kind else {})


def _stack_text(stack: Stack) -> str:
    return "\n".join(f"{frame}  {frame.text}".rstrip() for frame in stack[:6])
