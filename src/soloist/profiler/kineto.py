"""Chrome traces as PyTorch's profiler (Kineto) writes them: reading anyone's, writing ours.

A trace of ours is such a file too, with the Python stacks beside the events, under a key that viewers skip.
"""

import bisect
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from soloist.errors import UsageError
from soloist.profiler.trace import Frame, GpuWork, HostCall, Sample, Stack, Trace, resolve

# A marker that `watch(...).step()` leaves, and the one of `torch.profiler`'s own schedule.
STEP_MARK = "soloist.step"
_IS_STEP_MARK = re.compile(rf"^({re.escape(STEP_MARK)}|ProfilerStep#\d+)$")
_HOST_CATEGORIES = {"cuda_runtime", "cuda_driver"}
_GPU_CATEGORIES = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
# Versions of one entry point, as in cudaLaunchKernel_v7000 and cudaLaunchKernel_ptsz.
_VERSION = re.compile(r"(_v\d+|_ptsz|_ptds)+$")
_PYTHON_FUNCTION = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)$")
_BUILT_IN = re.compile(r"^<built-in (?:method|function) (?P<function>\w+)")
# Key of what Chrome traces have no place for.
_EXTRAS = "soloist"
# How well two records of one call agree.
_CLOCK_US = 1.0
# (start, end, name).
_Span = tuple[float, float, str]


def load_trace(path: Path) -> Trace:
    """Read a Chrome trace of PyTorch's profiler, plain or gzipped.

    Raises:
        UsageError: it cannot be read, is no Chrome trace, or holds no event of a GPU or of the CUDA runtime.
    """
    try:
        data = path.read_bytes()
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, EOFError) as error:
        raise UsageError(
            f"{path} is no Chrome trace ({error}); allowed: JSON of torch.profiler, plain or .gz"
        ) from None
    try:
        trace = parse_trace(document, path.name)
    # What a trace of PyTorch's profiler has in every event.
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} has an event that torch.profiler does not write ({type(error).__name__}: {error}): is it damaged?"
        ) from None
    if not trace.works and not trace.calls:
        raise UsageError(
            f"{path} holds no event of a GPU: record it with ProfilerActivity.CUDA among the activities, "
            "on a machine where torch.cuda.is_available()"
        )
    return trace


def parse_trace(document: Any, name: str) -> Trace:
    """Make a trace of the parsed JSON of a Chrome trace.

    Raises:
        UsageError: the document is no Chrome trace.
    """
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise UsageError(f"{name} has no list of traceEvents: it is no Chrome trace")
    head = document if isinstance(document, dict) else {}
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event and "ts" in event]
    zero_us = min((float(event["ts"]) for event in spans), default=0.0)
    base_ns = head.get("baseTimeNanoseconds")
    distributed = head.get("distributedInfo") or {}
    trace = Trace(
        name=name,
        calls=[],
        works=[],
        rank=distributed.get("rank"),
        num_ranks=distributed.get("world_size"),
        origin_ns=None if base_ns is None else int(base_ns) + round(zero_us * 1e3),
        device_names=tuple(properties.get("name", "") for properties in head.get("deviceProperties") or ()),
    )
    extras = head.get(_EXTRAS)
    stacks = [] if extras is None else [tuple(Frame(*fields) for fields in stack) for stack in extras["stacks"]]
    ops: dict[int, list[_Span]] = defaultdict(list)
    frames: dict[int, list[_Span]] = defaultdict(list)
    syncs = []
    for event in spans:
        category, args = event.get("cat"), event.get("args") or {}
        start_us = float(event["ts"]) - zero_us
        end_us = start_us + float(event["dur"])
        if category in _HOST_CATEGORIES:
            trace.calls.append(_call(event, args, start_us, end_us, stacks))
        elif category in _GPU_CATEGORIES:
            trace.works.append(_work(event, args, start_us, end_us))
        elif category == "cpu_op":
            ops[event["tid"]].append((start_us, end_us, event["name"]))
        elif category == "python_function":
            frames[event["tid"]].append((start_us, end_us, event["name"]))
        elif category == "cuda_sync":
            syncs.append((event["name"], start_us, end_us, int(args.get("correlation", 0))))
        elif category == "user_annotation" and _IS_STEP_MARK.match(event["name"]):
            trace.marks_us.append(start_us)
    trace.marks_us.sort()
    _add_unseen_waits(trace, syncs)
    trace.calls.sort(key=lambda call: call.start_us)
    trace.works.sort(key=lambda work: work.start_us)
    resolve(trace, lambda thread, times: _names_around(ops[thread], times), None)
    if extras is not None:
        _take_extras(trace, extras, stacks, zero_us)
    elif frames:
        resolve(trace, None, lambda thread, times: [_frames(names) for names in _names_around(frames[thread], times)])
    return trace


def _call(event: dict[str, Any], args: dict[str, Any], start_us: float, end_us: float, stacks: list[Stack]) -> HostCall:
    return HostCall(
        name=_plain_name(event["name"]),
        start_us=start_us,
        end_us=end_us,
        thread=event["tid"],
        correlation=int(args.get("correlation", 0)),
        stack=stacks[args["stack"]] if stacks else (),
    )


def _work(event: dict[str, Any], args: dict[str, Any], start_us: float, end_us: float) -> GpuWork:
    num_bytes = args.get("bytes")
    return GpuWork(
        name=event["name"],
        kind=_GPU_CATEGORIES[event["cat"]],
        start_us=start_us,
        end_us=end_us,
        device=int(args.get("device", args.get("inDevice", 0))),
        stream=int(args.get("stream", 0)),
        correlation=int(args.get("correlation", 0)),
        num_bytes=None if num_bytes is None else int(num_bytes),
    )


def _names_around(spans: list[_Span], times: Sequence[float]) -> list[tuple[str, ...]]:
    """Name the nested spans around each of some ascending times, outermost first."""
    spans = sorted(spans, key=lambda span: (span[0], -span[1]))
    found, open_spans, i = [], list[_Span](), 0
    for time in times:
        while i < len(spans) and spans[i][0] <= time:
            while open_spans and open_spans[-1][1] <= spans[i][0]:
                open_spans.pop()
            open_spans.append(spans[i])
            i += 1
        while open_spans and open_spans[-1][1] < time:
            open_spans.pop()
        found.append(tuple(span[2] for span in open_spans))
    return found


def _frames(names: Iterable[str]) -> Stack:
    """Read the frames that PyTorch's own stack recorder writes: it knows where functions begin, not where they are."""
    stack = []
    for name in names:
        if match := _PYTHON_FUNCTION.match(name):
            file = _short_file(match["file"])
            stack.append(Frame(file=file, line=int(match["line"]), function=match["function"], is_exact=False))
        elif match := _BUILT_IN.match(name):
            stack.append(Frame(file="", line=0, function=match["function"]))
    return tuple(reversed(stack))


def _short_file(file: str) -> str:
    """Cut what stands before a package folder; a trace may leave the machine it was made on."""
    return re.split(r"(?:site|dist)-packages/|lib/python[\d.]+/", file)[-1].removeprefix("./")


def _plain_name(name: str) -> str:
    """Give an entry point's name without its version; HIP's names are CUDA's with another prefix."""
    name = _VERSION.sub("", name)
    return "cuda" + name[3:] if name.startswith("hip") else name


# How the profiler's synchronisation records are called, and what a program would have called.
_SYNC_CALLS = {
    "Stream Sync": "cuStreamSynchronize",
    "Event Sync": "cuEventSynchronize",
    "Context Sync": "cuCtxSynchronize",
}


def _add_unseen_waits(trace: Trace, syncs: list[tuple[str, float, float, int]]) -> None:
    """Add waits through the driver, whose calls are not recorded themselves, to the thread that launches most."""
    num_calls: dict[int, int] = defaultdict(int)
    for call in trace.calls:
        num_calls[call.thread] += 1
    known = {call.correlation for call in trace.calls}
    calls = sorted(trace.calls, key=lambda call: call.start_us)
    for name, start_us, end_us, correlation in syncs:
        if name not in _SYNC_CALLS or correlation in known or not calls:
            continue
        # The record of a call that is there lies within it.
        i = bisect.bisect_right(calls, start_us + _CLOCK_US, key=lambda call: call.start_us)
        if any(call.end_us + _CLOCK_US >= end_us for call in calls[max(0, i - 8) : i]):
            continue
        thread = max(num_calls, key=lambda thread: num_calls[thread])
        trace.calls.append(
            HostCall(name=_SYNC_CALLS[name], start_us=start_us, end_us=end_us, thread=thread, correlation=0)
        )


# --- our own traces: the same format, with the stacks beside the events


def to_chrome(trace: Trace) -> dict[str, Any]:
    """Write a trace as a Chrome trace that `parse_trace` and every viewer reads.

    It holds no host name and no path beyond what `Frame.file` has; threads are numbered anew.
    """
    threads = {thread: i + 1 for i, thread in enumerate(dict.fromkeys(call.thread for call in trace.calls))}
    stacks: dict[Stack, int] = {}
    events: list[dict[str, Any]] = []

    def span(category: str, name: str, start_us: float, end_us: float, tid: int, **args: Any) -> None:
        # Starts are kept to the nanosecond and ends are not moved by rounding.
        start = round(start_us, 3)
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": start}
            | {"dur": round(round(end_us, 3) - start, 3), "args": args}
        )

    for call in trace.calls:
        category = "cuda_runtime" if call.name.startswith("cuda") else "cuda_driver"
        index = stacks.setdefault(call.stack, len(stacks))
        thread = threads[call.thread]
        span(category, call.name, call.start_us, call.end_us, thread, correlation=call.correlation, stack=index)
        for depth, op in enumerate(call.ops):
            # Just around the call, so that nesting survives.
            edge_us = 0.001 * (len(call.ops) - depth)
            span("cpu_op", op, call.start_us - edge_us, call.end_us + edge_us, thread)
    for work in trace.works:
        category = next(key for key, kind in _GPU_CATEGORIES.items() if kind == work.kind)
        args: dict[str, Any] = {"device": work.device, "stream": work.stream, "correlation": work.correlation}
        args |= {} if work.num_bytes is None else {"bytes": work.num_bytes}
        span(category, work.name, work.start_us, work.end_us, 1000 + work.stream, **args)
    for mark_us in trace.marks_us:
        span("user_annotation", STEP_MARK, mark_us, mark_us, 0)
    samples = [
        [threads[thread], round(sample.time_us, 3), stacks.setdefault(sample.stack, len(stacks)), list(sample.ops)]
        for thread, thread_samples in trace.samples.items()
        for sample in thread_samples
    ]
    return {
        "schemaVersion": 1,
        "distributedInfo": {} if trace.rank is None else {"rank": trace.rank, "world_size": trace.num_ranks},
        "deviceProperties": [{"id": i, "name": name} for i, name in enumerate(trace.device_names)],
        **({} if trace.origin_ns is None else {"baseTimeNanoseconds": trace.origin_ns}),
        "traceEvents": events,
        _EXTRAS: {
            "stacks": [[[f.file, f.line, f.function, f.text, f.is_exact] for f in stack] for stack in stacks],
            "samples": samples,
            "named_us": trace.named_us,
            "unprofiled_step_ms": trace.unprofiled_step_ms,
            "launch_overhead_us": trace.launch_overhead_us,
        },
    }


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace to a file, gzipped if its name ends in .gz."""
    data = json.dumps(to_chrome(trace), separators=(",", ":")).encode()
    # A trace of minutes is hundreds of megabytes: the last tenth of its size is not worth a minute more.
    path.write_bytes(gzip.compress(data, compresslevel=3, mtime=0) if path.suffix == ".gz" else data)


def _take_extras(trace: Trace, extras: dict[str, Any], stacks: list[Stack], zero_us: float) -> None:
    trace.samples = {}
    for thread, time_us, stack, ops in extras["samples"]:
        sample = Sample(time_us=time_us - zero_us, stack=stacks[stack], ops=tuple(ops))
        trace.samples.setdefault(thread, []).append(sample)
    trace.named_us = [(start - zero_us, end - zero_us) for start, end in extras["named_us"]]
    trace.unprofiled_step_ms = extras["unprofiled_step_ms"]
    trace.launch_overhead_us = extras.get("launch_overhead_us")
