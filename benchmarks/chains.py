"""Chains of calls on a GPU: one captured graph, replayed, so that only the GPU's own time counts."""

import statistics
from collections.abc import Callable

import torch

REPLAYS = 7
DEVICE = "cuda"


def time_chain(calls: list[Callable[[], object]], replays: int = REPLAYS) -> tuple[float, float]:
    """Median and spread of the time per call in us, from replays of one captured chain."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    times = []
    graph.replay()
    torch.cuda.synchronize()
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times), max(times) - min(times)


def rand(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Draw a tensor of normal numbers."""
    return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(std=scale)
