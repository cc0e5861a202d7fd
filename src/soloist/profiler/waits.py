"""Blocking waits: calls in which the host stands still until the GPU has caught up.

At batch 1 they are what to look for first: behind each of them the GPU runs dry until the host has enqueued again.
"""

import bisect
import difflib
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from soloist.profiler.steps import Recording, Steps
from soloist.profiler.trace import Frame, GpuWork, HostCall, Sample, Stack, Trace, between

_SYNCHRONIZE = {
    "cudaStreamSynchronize": "stream.synchronize()",
    "cudaEventSynchronize": "event.synchronize()",
    "cudaDeviceSynchronize": "torch.cuda.synchronize()",
    "cudaThreadSynchronize": "torch.cuda.synchronize()",
    "cuStreamSynchronize": "a wait for a stream, through the driver",
    "cuEventSynchronize": "a wait for an event, through the driver",
    "cuCtxSynchronize": "a wait for the device, through the driver",
}
# Return when the bytes have arrived, whatever memory they come from; from GPU to GPU they return at once.
_BLOCKING_COPIES = {
    "cudaMemcpy",
    "cudaMemcpy2D",
    "cudaMemcpy3D",
    "cudaMemcpyFromSymbol",
    "cudaMemcpyToSymbol",
    "cuMemcpy",
    "cuMemcpy2D",
    "cuMemcpy3D",
    "cuMemcpyDtoH",
    "cuMemcpyHtoD",
}
_ASYNC_COPIES = {
    "cudaMemcpyAsync",
    "cudaMemcpy2DAsync",
    "cudaMemcpy3DAsync",
    "cudaMemcpyFromSymbolAsync",
    "cudaMemcpyToSymbolAsync",
    "cuMemcpyAsync",
    "cuMemcpy2DAsync",
    "cuMemcpy3DAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
}
# May wait until the device is idle, and do so when the allocator gives memory back.
_ALLOCATION = {
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaMallocHost",
    "cudaFreeHost",
    "cudaHostRegister",
    "cudaHostUnregister",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemAllocHost",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    # Segments that grow.
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
}
# A copy to the GPU from pageable memory is staged at once if the GPU has time; it waited if it took longer than this.
_STAGING_US = 20.0
# How an operator is written in Python, where that is not its name.
_SPELLED = {
    "aten::item": ".item()",
    "aten::_local_scalar_dense": ".item()",
    "aten::is_nonzero": "truth value of a tensor",
    "aten::index": "indexing with a mask",
    "aten::index_put_": "assignment through a mask",
    "aten::_index_put_impl_": "assignment through a mask",
    "aten::_unique2": "unique()",
    "aten::lift_fresh": "a tensor made of Python values",
    "aten::detach_": "a tensor made of Python values",
}
_COPY_OPS = {"aten::to", "aten::_to_copy", "aten::copy_", "aten::contiguous", "aten::clone"}


# What a program calls but did not write: PyTorch, this profiler, and what of Python itself may take or pass time.
_NOT_THE_PROGRAMS = (
    "torch/",
    "soloist/profiler/",
    "<frozen ",
    *(f"{name}/" for name in ("asyncio", "collections", "concurrent", "ctypes", "email", "encodings", "html", "http")),
    *(f"{name}/" for name in ("importlib", "json", "logging", "multiprocessing", "re", "urllib", "xml")),
    *(f"{name}.py" for name in ("contextlib", "copy", "pickle", "queue", "selectors", "socket", "subprocess")),
    "threading.py",
)


class WaitKind(Enum):
    """Why the host stood still."""

    SYNCHRONIZE = "synchronize"
    COPY = "copy"
    # A copy that asks not to block, and does, because the host's memory is not pinned.
    PAGEABLE_COPY = "pageable copy"
    ALLOCATION = "allocation"


@dataclass(frozen=True, kw_only=True)
class Wait:
    """One wait, of one or two calls: a read is a copy and a synchronisation."""

    kind: WaitKind
    # In plain words, as in ".item()".
    what: str
    start_us: float
    end_us: float
    thread: int
    blocked_us: float
    stack: Stack
    ops: tuple[str, ...]


def blame(stack: Stack) -> Frame | None:
    """Choose the frame to name: the innermost that is not PyTorch's or Python's own; None: no Python code is known."""
    with_source = [frame for frame in stack if frame.file]
    for frame in with_source:
        if not frame.file.startswith(_NOT_THE_PROGRAMS):
            return frame
    return with_source[0] if with_source else None


def find_waits(trace: Trace) -> list[Wait]:
    """List all waits of a trace in the order of their starts."""
    works_of = trace.works_of()
    found: list[tuple[WaitKind, list[HostCall]]] = []
    # By thread: the last copy, and where in `found` it is if it waited itself.
    copies: dict[int, tuple[HostCall, int | None]] = {}
    for call in trace.calls:
        works = works_of.get(call.correlation, [])
        kind = _kind(call, works)
        copy, i = copies.get(call.thread, (None, None))
        if (
            call.name in ("cudaStreamSynchronize", "cuStreamSynchronize")
            and copy is not None
            and _is_same_place(copy, call)
        ):
            # The second half of a read.
            if i is None:
                found.append((WaitKind.COPY, [copy, call]))
            else:
                found[i] = (WaitKind.COPY, [copy, call])
        elif kind is not None:
            found.append((kind, [call]))
        if call.name in _ASYNC_COPIES:
            copies[call.thread] = (call, None if kind is None else len(found) - 1)
        elif works or kind is not None:
            copies.pop(call.thread, None)
    waits = [_make_wait(kind, calls, works_of.get(calls[0].correlation, [])) for kind, calls in found]
    return sorted(waits, key=lambda wait: wait.start_us)


def _is_same_place(first: HostCall, second: HostCall) -> bool:
    return first.stack == second.stack and first.ops[:1] == second.ops[:1]


def _make_wait(kind: WaitKind, calls: list[HostCall], works: Sequence[GpuWork]) -> Wait:
    first, last = calls[0], calls[-1]
    return Wait(
        kind=kind,
        what=_spell(first, kind, works),
        start_us=first.start_us,
        end_us=last.end_us,
        thread=first.thread,
        blocked_us=sum(call.duration_us for call in calls),
        stack=first.stack,
        ops=first.ops,
    )


def _kind(call: HostCall, works: Sequence[GpuWork]) -> WaitKind | None:
    if call.name in _SYNCHRONIZE:
        return WaitKind.SYNCHRONIZE
    if call.name in _BLOCKING_COPIES:
        return None if works and "DtoD" in works[0].name else WaitKind.COPY
    if call.name in _ALLOCATION:
        return WaitKind.ALLOCATION if call.duration_us > _STAGING_US else None
    if call.name in _ASYNC_COPIES and works and "Pageable" in works[0].name:
        work = works[0]
        if "DtoH" in work.name:
            # To pageable memory it never returns before the bytes are there.
            return WaitKind.PAGEABLE_COPY if call.end_us >= work.start_us else None
        has_waited = call.end_us >= work.start_us and work.start_us - call.start_us > _STAGING_US
        return WaitKind.PAGEABLE_COPY if has_waited else None
    return None


def _spell(call: HostCall, kind: WaitKind, works: Sequence[GpuWork]) -> str:
    """Say in plain words what the program asked for."""
    direction = works[0].name if works else ""
    way = "to the host" if "DtoH" in direction else "to the GPU" if "HtoD" in direction else "of memory"
    if kind is WaitKind.ALLOCATION:
        return f"memory taken from the driver or given back to it ({call.name})"
    if kind is WaitKind.PAGEABLE_COPY:
        return f"a copy {way} that cannot be asynchronous: the host's memory is not pinned"
    if call.ops:
        op = call.ops[0]
        if op in _SPELLED:
            return _SPELLED[op]
        if op in _COPY_OPS:
            return f"a copy {way}"
        return f"{op.removeprefix('aten::')}()"
    return _SYNCHRONIZE.get(call.name, f"a copy {way} ({call.name})")


# --- names for steps in which no Python line was recorded


def lend_stacks(trace: Trace, all_steps: Steps, steps: Steps) -> None:
    """Give the calls of steps without Python lines the stacks of the same calls in steps that have them.

    Steps repeat: the n-th call of one step is made by the line that makes the n-th call of another.

    Args:
        trace: changed in place.
        all_steps: any of them lends.
        steps: these borrow.
    """
    lenders = [i for i, recording in enumerate(all_steps.recordings) if recording is Recording.NAMED]
    if not lenders:
        return
    by_thread: dict[int, list[HostCall]] = defaultdict(list)
    for call in trace.calls:
        by_thread[call.thread].append(call)
    for thread, calls in by_thread.items():
        samples = trace.samples.get(thread, [])
        spans = _spans(calls, all_steps)
        # The last step of each sequence of calls; one that no lender made takes what it can from the commonest.
        lender_of = {_names(calls, spans[i]): spans[i] for i in lenders}
        typical = Counter(_names(calls, spans[i]) for i in lenders).most_common(1)[0][0]
        pairs_of: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for recording, borrower in zip(steps.recordings, _spans(calls, steps), strict=True):
            if recording is not Recording.NAMED:
                names = _names(calls, borrower)
                lent = names if names in lender_of else typical
                if names not in pairs_of:
                    pairs_of[names] = _pairs(lent, names)
                for i, j in pairs_of[names]:
                    _lend(calls, lender_of[lent].start + i, borrower.start + j, samples)
                # The last bubble of a step ends with a launch of the next.
                if max(lender_of[lent].stop, borrower.stop) < len(calls):
                    _lend(calls, lender_of[lent].stop, borrower.stop, samples)


def _names(calls: Sequence[HostCall], span: range) -> tuple[str, ...]:
    return tuple(calls[i].name for i in span)


def _spans(calls: list[HostCall], steps: Steps) -> list[range]:
    """Say which of a thread's calls each step has, by their starts."""
    edges = [bisect.bisect_left(calls, host_us, key=lambda call: call.start_us) for host_us in steps.host_us]
    return [range(first, last) for first, last in itertools.pairwise(edges)]


def _pairs(typical: tuple[str, ...], names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Pair the places of two sequences of calls."""
    if typical == names:
        return [(i, i) for i in range(len(names))]
    blocks = difflib.SequenceMatcher(None, typical, names, autojunk=False).get_matching_blocks()
    return [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]


def _lend(calls: Sequence[HostCall], lender: int, borrower: int, samples: Sequence[Sample]) -> None:
    """Give a call the stack of another, and what was sampled in the pause before it that of the other's pause."""
    if calls[lender].name != calls[borrower].name:
        return
    if not calls[borrower].stack:
        calls[borrower].stack = calls[lender].stack
    # The pause before a step's first call lies behind the last one of the step before.
    if not min(lender, borrower) or calls[lender - 1].name != calls[borrower - 1].name:
        return
    lent = [s for s in between(samples, calls[lender - 1].end_us, calls[lender].start_us) if s.stack]
    own = [s for s in between(samples, calls[borrower - 1].end_us, calls[borrower].start_us) if not s.stack]
    for i, sample in enumerate(own):
        if lent:
            # Of the same part of the pause. Its operators go with its line: another's would contradict it.
            like = lent[i * len(lent) // len(own)]
            sample.stack, sample.ops = like.stack, like.ops
