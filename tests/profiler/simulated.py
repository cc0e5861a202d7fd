"""A simulated host with one GPU that writes what PyTorch's profiler would: every figure is known beforehand."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BASE_NS = 1_790_000_000_000_000_000
# Kineto's times are microseconds since a base that is far away.
START_US = 5_000_000_000.0


class Machine:
    """The host calls, the GPU follows; times are in microseconds.

    Args:
        call_us: what a launch costs the host.
        latency_us: from a launch to the start of its kernel on an idle GPU, and from the end of work to the host's
            return from a wait.
        rank: of several.
        clock_us: how much this machine's clock is ahead.
    """

    def __init__(
        self, *, call_us: float = 4.0, latency_us: float = 3.0, rank: int | None = None, clock_us: float = 0.0
    ) -> None:
        self.call_us, self.latency_us, self.rank = call_us, latency_us, rank
        self.clock_us = clock_us
        self.now_us = START_US
        # When each stream has run everything.
        self.free_us: dict[int, float] = {}
        self.events: list[dict[str, Any]] = []
        self._num_calls = 0

    def _span(self, category: str, name: str, start: float, end: float, tid: int, **args: Any) -> dict[str, Any]:
        event = {"ph": "X", "cat": category, "name": name, "pid": 77, "tid": tid, "ts": start + self.clock_us}
        event |= {"dur": end - start, "args": args}
        self.events.append(event)
        return event

    @contextmanager
    def inside(self, name: str, *, category: str = "cpu_op") -> Iterator[None]:
        """An operator of PyTorch around what is called inside."""
        event = self._span(category, name, self.now_us, self.now_us, 77)
        self.now_us += 0.5
        yield
        self.now_us += 0.5
        event["dur"] = self.now_us + self.clock_us - event["ts"]

    def at(self, frame: str) -> Any:
        """A Python function, as in "sampler.py(200): sample", around what is called inside."""
        return self.inside(frame, category="python_function")

    def busy(self, us: float) -> None:
        """Let the host do something else."""
        self.now_us += us

    def call(self, name: str, us: float | None = None, category: str = "cuda_runtime") -> int:
        """Call the runtime; gives the correlation."""
        self._num_calls += 1
        us = self.call_us if us is None else us
        self._span(category, name, self.now_us, self.now_us + us, 77, correlation=self._num_calls, cbid=211)
        self.now_us += us
        return self._num_calls

    def launch(self, kernel: str, us: float, *, stream: int = 7) -> None:
        """Launch a kernel."""
        self._run("kernel", kernel, us, self.call("cudaLaunchKernel"), stream)

    def graph(self, kernels: list[tuple[str, float]], *, stream: int = 7, is_visible: bool = True) -> None:
        """Replay a graph."""
        correlation = self.call("cudaGraphLaunch", 8.0)
        for kernel, us in kernels:
            self._run("kernel", kernel, us, correlation if is_visible else 0, stream)
        if not is_visible:
            del self.events[-len(kernels) :]

    def copy(self, kind: str, us: float, *, num_bytes: int = 8, stream: int = 7, name: str = "cudaMemcpyAsync") -> None:
        """Copy without waiting."""
        self._run("gpu_memcpy", f"Memcpy {kind}", us, self.call(name), stream, bytes=num_bytes)

    def read(self, us: float = 1.0, *, stream: int = 7) -> None:
        """Read a value: a copy to pageable memory, which waits, and a synchronisation, which then need not."""
        self.pageable_copy(us, stream=stream)
        self.call("cudaStreamSynchronize", 2.0)

    def pageable_copy(self, us: float = 1.0, *, stream: int = 7, name: str = "cudaMemcpyAsync") -> None:
        """Copy to memory that is not pinned: the call returns when the bytes are there."""
        self._num_calls += 1
        start = self.now_us
        end = self._run(
            "gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", us, self._num_calls, stream, issued=start + 2, bytes=8
        )
        self.now_us = end + self.latency_us
        category = "cuda_runtime" if name.startswith("cuda") else "cuda_driver"
        self._span(category, name, start, self.now_us, 77, correlation=self._num_calls)

    def synchronize(self, name: str = "cudaStreamSynchronize", *, category: str = "cuda_runtime") -> None:
        """Wait for all streams."""
        done = max(self.free_us.values(), default=self.now_us) + self.latency_us
        self.call(name, max(2.0, done - self.now_us), category)

    def unseen_wait(self) -> None:
        """Wait through the driver: no call is recorded, only the synchronisation itself."""
        end = max(self.now_us, max(self.free_us.values()) + self.latency_us)
        self._span("cuda_sync", "Context Sync", self.now_us, end, 4294967295, correlation=999_999, device=0)
        self.now_us = end

    def mark(self) -> None:
        """Mark a step."""
        self._span("user_annotation", "soloist.step", self.now_us, self.now_us + 1, 77)
        self.now_us += 1

    def _run(
        self,
        category: str,
        name: str,
        us: float,
        correlation: int,
        stream: int,
        issued: float | None = None,
        **args: Any,
    ) -> float:
        issued = self.now_us if issued is None else issued
        start = max(issued + self.latency_us, self.free_us.get(stream, 0.0))
        args = {"device": 0, "stream": stream, "correlation": correlation} | args
        self._span(category, name, start, start + us, stream, **args)
        self.free_us[stream] = start + us
        return start + us

    def document(self) -> dict[str, Any]:
        """Give the trace, in no order."""
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
            "distributedInfo": {} if self.rank is None else {"rank": self.rank, "world_size": 2},
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": [{"ph": "M", "name": "process_name", "pid": 77, "args": {}}, *reversed(self.events)],
        }
