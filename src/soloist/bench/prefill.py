"""Reading a prompt on a GPU: what its kernels take by kind, what only exchanges, and how long nothing ran."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from soloist.bench.steps import STAMP, trace_gpu
from soloist.kernels.clock import stamp
from soloist.runtime.runner import ChunkHook, ModelRunner

EXCHANGE = "exchange"
# Kinds of kernels by what their names hold, the first that does.
_KINDS = {
    EXCHANGE: ("nccl",),
    "experts": ("grouped_", "sum_choices", "route_kernel"),
    "KDA": ("prepare_kernel", "scan_kernel", "finish_kernel"),
    "attention": ("flash", "fmha", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "gemv", "splitK"),
}
_OTHER = "other"
# Kernels that are named, the longest in all first.
_NUM_NAMED = 12


@dataclass(frozen=True, kw_only=True)
class PromptFigures:
    """Passes over one prompt, and one more under a trace."""

    prefill_ms_median: float
    prefill_ms_range: tuple[float, float]
    # Until the host has enqueued everything, median; near the whole, the host sets the pace.
    enqueue_ms: float
    # Kernels and copies.
    launches: int
    # By kind: the sum of its kernels' times.
    kernel_ms: dict[str, float]
    # An exchange ran and nothing else.
    exposed_exchange_ms: float
    # Nothing ran: what is left of the median.
    idle_ms: float
    # (name, launches, ms in all).
    longest: tuple[tuple[str, int, float], ...]


def kind_of(name: str) -> str:
    """Give the kind of a kernel."""
    return next((kind for kind, parts in _KINDS.items() if any(part in name for part in parts)), _OTHER)


def union_ns(events: Sequence[tuple[int, int, str]]) -> int:
    """Sum up the time in which any of (begin ns, duration ns, name) ran."""
    total = end = 0
    for begin, duration, _ in sorted(events):
        total += max(0, begin + duration - max(begin, end))
        end = max(end, begin + duration)
    return total


@torch.inference_mode()
def measure_prompt(
    runner: ModelRunner,
    prompt: torch.Tensor,
    *,
    on_chunk: ChunkHook = lambda *_: None,
    meet: Callable[[], None] = torch.cuda.synchronize,
    repeats: int = 3,
) -> PromptFigures:
    """Read a prompt into the empty cache, again and again.

    Args:
        runner: on a GPU, between requests; the sequence is forgotten.
        prompt: (n,) int64 on the model's device.
        on_chunk: what else reads each chunk, such as a drafter.
        meet: lets all ranks, with empty queues, begin together.
        repeats: at least 1; one pass before them does not count.
    """
    wall_ms, enqueue_ms = [], []
    times = torch.zeros(1, 2, dtype=torch.int64, device=prompt.device)
    num_passes = torch.zeros((), dtype=torch.int64, device=prompt.device)

    def read() -> None:
        runner.cache.reset()
        meet()
        # Where a trace of the pass begins: what comes before it only brings the ranks together.
        stamp(times, num_passes, is_end=False)
        started_s = time.perf_counter()
        runner.prefill(prompt, on_chunk=on_chunk)
        enqueue_ms.append(1e3 * (time.perf_counter() - started_s))
        torch.cuda.synchronize()
        wall_ms.append(1e3 * (time.perf_counter() - started_s))

    for _ in range(1 + repeats):
        read()
    wall_ms, enqueue_ms = wall_ms[1:], enqueue_ms[1:]
    median = statistics.median(wall_ms)
    wall_range, enqueued = (min(wall_ms), max(wall_ms)), statistics.median(enqueue_ms)
    return summarise(behind_stamp(trace_gpu(read)), median, wall_range, enqueued)


def behind_stamp(events: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Keep what began behind the one stamp of a trace; before it ranks wait for each other's profilers."""
    (stamped_ns,) = (begin + duration for begin, duration, name in events if STAMP in name)
    return [event for event in events if event[0] >= stamped_ns]


def summarise(
    events: Sequence[tuple[int, int, str]], median_ms: float, range_ms: tuple[float, float], enqueue_ms: float
) -> PromptFigures:
    """Sort what ran in the traced pass by kind; the times are those of the other passes."""
    by_kind: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for _, duration, name in events:
        by_kind[kind_of(name)] += duration
        by_name[name] += duration
        launches[name] += 1
    busy = union_ns(events)
    computing = union_ns([event for event in events if kind_of(event[2]) != EXCHANGE])
    return PromptFigures(
        prefill_ms_median=round(median_ms, 2),
        prefill_ms_range=(round(range_ms[0], 2), round(range_ms[1], 2)),
        enqueue_ms=round(enqueue_ms, 2),
        launches=len(events),
        kernel_ms={kind: round(ns / 1e6, 2) for kind, ns in by_kind.most_common()},
        exposed_exchange_ms=round((busy - computing) / 1e6, 2),
        idle_ms=round(max(0.0, median_ms - busy / 1e6), 2),
        longest=tuple((name[:80], launches[name], round(ns / 1e6, 2)) for name, ns in by_name.most_common(_NUM_NAMED)),
    )
