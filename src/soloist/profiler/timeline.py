"""One self-contained HTML page with the timeline of some steps: what each GPU stream ran, what the host called."""

import html
import itertools
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from soloist.profiler.analysis import Analysis
from soloist.profiler.gaps import busy_spans
from soloist.profiler.report import in_words, short_name
from soloist.profiler.trace import HostCall, Stack, Trace
from soloist.profiler.waits import Wait, find_waits

# More boxes make a page slow; steps are alike, so the last ones will do.
MAX_ITEMS = 20_000
_MAX_STEPS = 8


def as_html(trace: Trace, analysis: Analysis) -> str:
    """Draw the last steps that an analysis looked at.

    Args:
        trace: that was analysed.
        analysis: of it.
    """
    waits = find_waits(trace)
    first = max(0, len(analysis.steps) - _MAX_STEPS)
    while True:
        # The host enqueues before the GPU runs, so the page begins with the earlier of the two.
        start_us = min(analysis.steps.host_us[first], analysis.steps.gpu_us[first])
        end_us = max(analysis.steps.host_us[-1], analysis.steps.gpu_us[-1])
        rows = _rows(trace, waits, start_us, end_us)
        if sum(len(row["items"]) for row in rows) <= MAX_ITEMS or first >= len(analysis.steps) - 1:
            break
        first += 1
    data = {"start": start_us, "end": end_us, "steps": analysis.steps.gpu_us[first:], "rows": rows}
    page = (files("soloist.profiler") / "timeline.html").read_text(encoding="utf-8")
    # Within a script element only its end tag has a meaning.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    parts = {"__TITLE__": html.escape(analysis.name), "__REPORT__": html.escape(in_words(analysis)), "__DATA__": text}
    for mark, part in parts.items():
        page = page.replace(mark, part)
    return page


def _rows(trace: Trace, waits: Sequence[Wait], start_us: float, end_us: float) -> list[dict[str, Any]]:
    """Lay out what overlaps a span of time: per GPU its streams and its bubbles, then the host's threads."""
    works = [work for work in trace.works if work.end_us > start_us and work.start_us < end_us]
    calls = [call for call in trace.calls if call.end_us > start_us and call.start_us < end_us]
    rows = []
    for device in sorted({work.device for work in works}):
        own = [work for work in works if work.device == device]
        for stream in sorted({work.stream for work in own}):
            items = [
                _item(short_name(work.name), work.start_us, work.end_us, work.name)
                for work in own
                if work.stream == stream
            ]
            rows.append({"name": f"GPU {device}, stream {stream}", "items": items})
        spans = busy_spans(own)
        gaps = [_item("idle", a[1], b[0], "", "gap") for a, b in itertools.pairwise(spans)]
        rows.append({"name": f"GPU {device} idle", "items": gaps})
    for i, thread in enumerate(dict.fromkeys(call.thread for call in calls)):
        items = [_call_item(call) for call in calls if call.thread == thread]
        items += [
            _item(wait.what, wait.start_us, wait.end_us, _stack_text(wait.stack), "wait")
            for wait in waits
            if wait.thread == thread and wait.end_us > start_us and wait.start_us < end_us
        ]
        rows.append({"name": f"host thread {i + 1}", "items": items})
    return rows


def _call_item(call: HostCall) -> dict[str, Any]:
    ops = " > ".join(call.ops)
    return _item(call.name, call.start_us, call.end_us, "\n".join(filter(None, (ops, _stack_text(call.stack)))), "call")


def _item(name: str, start_us: float, end_us: float, text: str, kind: str = "") -> dict[str, Any]:
    item = {"n": name, "s": round(start_us, 2), "e": round(end_us, 2), "t": text}
    return item | ({"c": kind} if kind else {})


def _stack_text(stack: Stack) -> str:
    return "\n".join(f"{frame}  {frame.text}".rstrip() for frame in stack[:6])
