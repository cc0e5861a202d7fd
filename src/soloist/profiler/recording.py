"""Recording: PyTorch's profiler around a part of a program, with the lines of Python beside it for a part of that."""

import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import torch

from soloist.errors import UsageError
from soloist.profiler.analysis import DEFAULT_STEPS, Analysis, analyse
from soloist.profiler.kineto import STEP_MARK, parse_trace
from soloist.profiler.lines import LineRecorder
from soloist.profiler.steps import MIN_REPEATS
from soloist.profiler.trace import Trace, resolve

# Launches that are timed to see what recording adds to one.
_TIMED_LAUNCHES = 100


def _launch_us() -> float | None:
    """Time a small launch on the host; None in a program that has not used a GPU yet."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    scratch, times_s = torch.zeros(1, device="cuda"), []
    torch.cuda.synchronize()
    for _ in range(_TIMED_LAUNCHES):
        start_s = time.perf_counter()
        scratch.add_(1)
        times_s.append(time.perf_counter() - start_s)
    torch.cuda.synchronize()
    # Whatever else the machine does only adds.
    return 1e6 * sorted(times_s)[_TIMED_LAUNCHES // 4]


class Capture:
    """One recording of this process: `start`, then perhaps `stop_lines`, then `stop`; all from one thread.

    Starting and stopping wait for the GPU; neither may fall into the capture of a CUDA graph.
    """

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # Waits through the driver are recorded nowhere else.
        config = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
        self._profiler = torch.profiler.profile(activities=activities, experimental_config=config)
        self._lines: LineRecorder | None = None
        self._is_naming = False
        self._launch_overhead_us: float | None = None

    def start(self, frame: FrameType | None = None) -> None:
        """Begin to record everything.

        Args:
            frame: where this thread is. None: the caller.
        """
        self._lines = LineRecorder(frame or sys._getframe(1))
        plain_us = _launch_us()
        self._profiler.start()
        recorded_us = _launch_us()
        if plain_us is not None and recorded_us is not None:
            self._launch_overhead_us = max(0.0, recorded_us - plain_us)
        self._is_naming = True
        self._lines.__enter__()

    def stop_lines(self) -> None:
        """Go on without recording Python lines; does nothing the second time."""
        if self._is_naming and self._lines is not None:
            self._is_naming = False
            self._lines.__exit__(None, None, None)

    def stop(self, name: str) -> Trace:
        """End the recording and give it, under a name."""
        assert self._lines is not None, "a capture was stopped that had not been started"
        self.stop_lines()
        lines = self._lines
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            trace = parse_trace(json.loads(path.read_bytes()), name)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            trace.rank, trace.num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        origin_ns = trace.origin_ns or 0
        resolve(
            trace,
            None,
            lambda thread, times: lines.stacks_at(thread, [origin_ns + round(time_us * 1e3) for time_us in times]),
        )
        trace.launch_overhead_us = self._launch_overhead_us
        # What was launched to find that out is none of the program's.
        trace.drop_before((lines.start_ns - origin_ns) / 1e3)
        trace.named_us = [((lines.start_ns - origin_ns) / 1e3, (lines.end_ns - origin_ns) / 1e3)]
        return trace


class Watch:
    """A recording of a block of code; made by `watch`.

    Its results are there when the block has ended.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._capture: Capture | None = Capture()
        self._trace: Trace | None = None
        self._analysis: Analysis | None = None
        self._num_marks = 0
        # When each step began that ran without the profiler.
        self._unprofiled_s: list[float] = []

    def __enter__(self) -> Self:
        assert self._capture is not None
        self._capture.start(sys._getframe(1))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if self._trace is not None and len(self._unprofiled_s) > MIN_REPEATS:
            # The first ones only fill the queue that stopping has emptied.
            later = self._unprofiled_s[len(self._unprofiled_s) // 4 :]
            durations = [end - start for start, end in itertools.pairwise(later)]
            self._trace.unprofiled_step_ms = 1e3 * statistics.median(durations)

    def step(self) -> None:
        """Mark where one step ends and the next begins; call it once per step.

        The first steps are recorded with their Python lines, as many again without, and the rest is only timed.
        """
        self._num_marks += 1
        if self._capture is None:
            self._unprofiled_s.append(time.perf_counter())
            return
        with torch.profiler.record_function(STEP_MARK):
            pass
        if self._num_marks == self._num_steps + 1:
            self._capture.stop_lines()
        elif self._num_marks == 2 * self._num_steps + 2:
            self._stop()

    def _stop(self) -> None:
        if self._capture is not None:
            self._trace = self._capture.stop("this process")
            self._capture = None

    @property
    def trace(self) -> Trace:
        """What was recorded."""
        if self._trace is None:
            raise UsageError("the recording is still going on: its results are there when the `with` block has ended")
        return self._trace

    @property
    def analysis(self) -> Analysis:
        """What it shows.

        Raises:
            UsageError: the block has not ended, or used no GPU.
        """
        if self._analysis is None:
            self._analysis = analyse(self.trace, max_steps=self._num_steps)
        return self._analysis


def watch(*, num_steps: int = DEFAULT_STEPS) -> Watch:
    """Record a block of code of any PyTorch program.

    `with watch() as watched: ...`, then `watched.analysis`. Without calls of `watched.step()` all of the block is
    recorded with its Python lines, and steps are found by what repeats.

    Args:
        num_steps: steps to record with Python lines, and steps to record without; at least 5.
    """
    if num_steps <= MIN_REPEATS:
        raise UsageError(f"num_steps is {num_steps}; allowed: at least {MIN_REPEATS + 1}, for steps that repeat")
    return Watch(num_steps)
