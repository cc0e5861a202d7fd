"""Steps on their way to the device: captured once, replayed, and enqueued ahead of what the host has read.

Owns the CUDA graph of a step and the queue of steps in flight. What a step is, it is given as a callable; what a record
means, nobody here knows.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch

from soloist.errors import UsageError
from soloist.kernels.allreduce import without_exchanges
from soloist.kernels.compile_ahead import OnCompiled, compiling_ahead
from soloist.kernels.launch import fused_experts, programmatic_launch
from soloist.runtime.ring import StepRecord, TokenRing

# How long the host sleeps at least between two looks at the ring, and after how many seconds it asks the device what is
# wrong.
_POLL_S = 50e-6
_DOUBT_S = 1.0
# Shares of the last wait: what the next one sleeps through without a look, and what lies between two looks behind that.
# A sleep costs the host about 10 us, and steps are ahead, so that only the token's way to its reader is longer.
_SURE_SHARE, _LOOK_SHARE = 0.85, 0.05


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the steps of a request are run. The parts are the rungs of the benchmark's ladder."""

    # Replay a captured CUDA graph; False: launch every kernel of every step from Python.
    is_captured: bool
    # Steps enqueued before the host has read the oldest one's tokens; 0 waits for each.
    run_ahead: int
    # Launch kernels so that each prepares while the one before it ends.
    has_pdl: bool
    # Let the device begin the next step by itself, many a launch.
    has_device_loop: bool = False
    # Run a step's experts in its own few launches; False: as a prompt's.
    has_fused_moe: bool = True
    # Hold the output head as the model is held; False: a copy in fp32, and all logits.
    has_bf16_head: bool = True

    def __post_init__(self) -> None:
        if self.run_ahead < 0:
            raise UsageError(f"run_ahead is {self.run_ahead}; allowed: 0 and more")
        if not self.is_captured and (self.run_ahead or self.has_pdl or self.has_device_loop):
            raise UsageError("run-ahead, PDL and the device loop need captured steps: add --graph, or leave them out")
        if self.has_device_loop and self.run_ahead:
            raise UsageError("a device loop has no need of run-ahead: leave --run-ahead out, or --device-loop")

    def check_num_ranks(self, num_ranks: int) -> None:
        """Refuse what ranks that share a model cannot do.

        Raises:
            UsageError: steps are not decided between them, or the head is a copy.
        """
        if num_ranks > 1 and (self.has_device_loop or not self.has_bf16_head):
            raise UsageError("ranks that share a model decide between steps: no device loop, and no head in fp32")

    @contextmanager
    def switches(self) -> Iterator[None]:
        """Launch the kernels of a step as the switches say."""
        with programmatic_launch(self.has_pdl), fused_experts(self.has_fused_moe):
            yield

    @classmethod
    def best_for(cls, device: torch.device) -> Self:
        """What is fastest on a device: everything on a GPU, plain calls on a CPU."""
        is_gpu = device.type == "cuda"
        return cls(is_captured=is_gpu, run_ahead=2 if is_gpu else 0, has_pdl=is_gpu)


class StepGraph:
    """One step as a CUDA graph.

    Args:
        step: launches one step on the current stream; its shapes and addresses never change. It is run twice here, so
            the caller sees to it that the step changes nothing (`num_left` is 0).
        pool: handle of the memory pool that graphs of one engine share, since no two of them run at once.
    """

    def __init__(self, step: Callable[[], None], *, pool: Any = None) -> None:
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Compiles what is not compiled yet.
            step()
            self._stream.synchronize()
            capture = torch.cuda.graph(self._graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
            with without_collection(), capture:
                step()
        self._graph.instantiate()
        torch.cuda.current_stream().wait_stream(self._stream)

    def replay(self) -> None:
        """Enqueue the step on the current stream; waits for nothing."""
        self._graph.replay()

    @property
    def raw_graph(self) -> int:
        """The `cudaGraph_t`, for counting nodes and edges."""
        return self._graph.raw_cuda_graph()


class StepQueue:
    """The steps of one request: enqueues ahead, hands out records in order.

    Args:
        launch: enqueues `steps_per_launch` steps.
        ring: where steps publish.
        run_ahead: steps beyond the one that is waited for.
        num_top: alternatives that `TokenRing.poll` reads.
        steps_per_launch: above 1, of a device loop: fewer run where the answer ends.
    """

    def __init__(
        self,
        launch: Callable[[], None],
        ring: TokenRing,
        *,
        run_ahead: int,
        num_top: int | None,
        steps_per_launch: int = 1,
    ) -> None:
        assert ring.num_slots > run_ahead + steps_per_launch, "a record may not be overwritten before it is read"
        self._launch, self._ring, self._run_ahead, self._num_top = launch, ring, run_ahead, num_top
        self._steps_per_launch = steps_per_launch
        self._num_in_flight = 0
        # Whether a record was taken, and what the last wait for one took; 0: not known, or it overslept.
        self._has_begun, self._waited_s = False, 0.0

    def next(self) -> StepRecord:
        """Take the next step's record; enqueues as many steps as may be ahead."""
        while self._num_in_flight <= self._run_ahead:
            self._launch()
            self._num_in_flight += self._steps_per_launch
        return self._take()

    def drain(self) -> list[StepRecord]:
        """Take what is in flight; steps behind an answer's end commit nothing."""
        if self._steps_per_launch == 1:
            return [self._take() for _ in range(self._num_in_flight)]
        # How many steps a loop has run is known when it has ended.
        records: list[StepRecord] = []
        is_over = self._num_in_flight == 0
        while not is_over:
            is_over = torch.cuda.current_stream().query()
            while (record := self._ring.poll(self._num_top)) is not None:
                records.append(record)
            time.sleep(0 if is_over else _POLL_S)
        self._num_in_flight = 0
        return records

    def _take(self) -> StepRecord:
        record = self._ring.poll(self._num_top) or self._wait()
        self._num_in_flight -= 1
        if not self._has_begun:
            # Behind a prompt that the device was still reading.
            self._has_begun, self._waited_s = True, 0.0
        return record

    def _wait(self) -> StepRecord:
        """Sleep and look until the next record is there."""
        begin_s = started_s = time.perf_counter()
        # A step takes about what the last one took, and every look costs the host something.
        time.sleep(_SURE_SHARE * self._waited_s)
        record = self._ring.poll(self._num_top)
        if record is not None:
            # Slept too long, which must not be the measure of the next sleep.
            self._waited_s = 0.0
            return record
        pause_s = max(_POLL_S, _LOOK_SHARE * self._waited_s)
        while record is None:
            time.sleep(pause_s)
            if time.perf_counter() - started_s > _DOUBT_S:
                # Raises what went wrong on the device; without an error the step is just long.
                is_idle = torch.cuda.current_stream().query()
                started_s = time.perf_counter()
                record = self._ring.poll(self._num_top)
                assert record is not None or not is_idle, "a step ended and published nothing"
            else:
                record = self._ring.poll(self._num_top)
        self._waited_s = time.perf_counter() - begin_s
        return record


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep the collector from running by itself inside the block, the capture of a graph.

    The garbage of an engine that is gone may hold its graphs, and with a PyTorch that does not guard against it,
    destroying one breaks off the capture.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_garbage() -> None:
    """Take what is alive now, the model above all, out of the collector's sight: a full collection stalls the loop.

    For a process that keeps its model: what is part of a cycle now is never freed, unless `gc.unfreeze` is called.
    """
    gc.collect()
    gc.freeze()


def compile_ahead(passes: Sequence[Callable[[], None]], on_compiled: OnCompiled | None = None) -> None:
    """Compile the kernels of some passes side by side. Nothing of a pass runs: it is captured and thrown away.

    Ranks exchange nothing here, so each compiles in its own time.

    Args:
        passes: each launches on the current stream, as a step does.
        on_compiled: called with (kernels compiled, kernels to compile).
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # The library of matrix products sets itself up at its first, which is no part of a capture.
        square = torch.zeros(16, 16, dtype=torch.bfloat16, device="cuda")
        torch.mm(square, square)
    num_threads = max(2, min(16, len(os.sched_getaffinity(0))))
    # Relaxed: nor is loading a module, which other kernels do when they are first launched.
    capture = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="relaxed")
    compiling = compiling_ahead(num_threads, on_compiled, device=torch.cuda.current_device())
    with compiling, without_exchanges(), capture:
        for launch in passes:
            launch()


def count_nodes(raw_graph: int) -> tuple[int, int]:
    """Count the nodes of a captured step, and the edges over which a kernel starts before the one before it ends."""
    from cuda.bindings import runtime

    status, _, num_nodes = runtime.cudaGraphGetNodes(raw_graph)
    assert int(status) == 0, status
    status, *_, num_edges = runtime.cudaGraphGetEdges(raw_graph)
    assert int(status) == 0, status
    status, _, _, edges, _ = runtime.cudaGraphGetEdges(raw_graph, num_edges)
    assert int(status) == 0, status
    programmatic = runtime.cudaGraphDependencyType.cudaGraphDependencyTypeProgrammatic
    return num_nodes, sum(edge.type == programmatic for edge in edges)
