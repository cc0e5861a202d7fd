"""Where Python was, at any moment: every line a thread executes, with its time.

PyTorch's own stack recorder knows where functions begin and which line called them. It does not know the line that
reads a tensor through `if x:`, `x[mask]` or a call into a shared library, and these are the lines that wait. Recording
costs about half a microsecond per line, so a capture does it for a part of its time only.
"""

import linecache
import os
import sys
import threading
import time
from array import array
from types import CodeType, FrameType, TracebackType
from typing import Any, Self

from soloist.profiler.trace import Frame, Stack

# What a program that is run as a command is called by; the frames below it are not the program's.
_RUNNER = "<frozen runpy>"
# Beside lines, which are positive (a line's number plus one: modules begin in line 0), and codes, which are negative.
_RETURN = 0
# Records of one thread after which recording ends by itself: some 100 MB.
MAX_RECORDS = 6_000_000


class LineRecorder:
    """While entered, records every line of the current thread, and of threads that are started meanwhile.

    Frames that are under way already are recorded too. Debuggers and coverage tools use the same hook of Python and see
    nothing meanwhile; what was set before is set again at the end.

    Args:
        frame: where the current thread is; its callers are followed as well. None: the caller.
    """

    def __init__(self, frame: FrameType | None = None) -> None:
        self._frame = frame or sys._getframe(1)
        self._threads: dict[int, _ThreadLines] = {}
        self._previous: Any = None
        self._previous_of_threads: Any = None
        # Unix time in nanoseconds.
        self.start_ns = 0
        self.end_ns = 0

    def __enter__(self) -> Self:
        self._previous, self._previous_of_threads = sys.gettrace(), threading.gettrace()
        lines = self._begin_thread()
        frames: list[FrameType] = []
        frame: FrameType | None = self._frame
        while frame is not None and frame.f_code.co_filename != _RUNNER:
            frames.append(frame)
            frame = frame.f_back
        for frame in reversed(frames):
            lines.push(frame)
            frame.f_trace = lines.on_event
        self._frames = frames
        threading.settrace(self._start_thread)
        self.start_ns = time.time_ns()
        sys.settrace(lines.on_call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self._previous)
        threading.settrace(self._previous_of_threads)
        self.end_ns = time.time_ns()
        for frame in self._frames:
            frame.f_trace = None
        for lines in self._threads.values():
            lines.is_on = False

    def stacks_at(self, thread: int, times_ns: list[int]) -> list[Stack]:
        """Give the stack of a thread at each of some ascending times; empty where nothing was recorded.

        Args:
            thread: as the operating system numbers it.
            times_ns: Unix times.
        """
        lines = self._threads.get(thread)
        if lines is None:
            return [()] * len(times_ns)
        inside = [self.start_ns <= time_ns <= self.end_ns for time_ns in times_ns]
        return [stack if is_in else () for stack, is_in in zip(lines.stacks_at(times_ns), inside, strict=True)]

    @property
    def num_records(self) -> int:
        """Lines, calls and returns recorded so far."""
        return sum(len(lines.times) for lines in self._threads.values())

    def _begin_thread(self) -> "_ThreadLines":
        return self._threads.setdefault(threading.get_native_id(), _ThreadLines())

    def _start_thread(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Be the first trace function of a new thread."""
        lines = self._begin_thread()
        sys.settrace(lines.on_call)
        return lines.on_call(frame, event, arg)


class _ThreadLines:
    """The records of one thread."""

    def __init__(self) -> None:
        # Beside each other: Unix time in ns, and a line, `_RETURN`, or minus one minus the index of a code.
        self.times = array("q")
        self.records = array("q")
        self._codes: list[CodeType] = []
        self._index_of: dict[CodeType, int] = {}
        self.is_on = True

    def push(self, frame: FrameType) -> None:
        """Record that a function was entered, and the line it is at."""
        code = frame.f_code
        index = self._index_of.get(code)
        if index is None:
            index = self._index_of[code] = len(self._codes)
            self._codes.append(code)
        now = time.time_ns()
        self.times.append(now)
        self.records.append(-1 - index)
        self.times.append(now)
        self.records.append((frame.f_lineno or 0) + 1)

    def on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Be called by Python for every new frame."""
        if not self.is_on or len(self.times) > MAX_RECORDS:
            sys.settrace(None)
            return None
        self.push(frame)
        return self.on_event

    def on_event(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Be called by Python for every line and return."""
        if not self.is_on:
            # Frames of other threads end by themselves.
            return None
        if event == "line":
            self.times.append(time.time_ns())
            self.records.append(frame.f_lineno + 1)
        elif event == "return":
            self.times.append(time.time_ns())
            self.records.append(_RETURN)
        return self.on_event

    def stacks_at(self, times_ns: list[int]) -> list[Stack]:
        """Replay the records and give the stack at each of some ascending times."""
        stacks: list[Stack] = []
        frames: list[list[Any]] = []
        known: dict[tuple[CodeType, int], Frame] = {}
        i = 0
        for time_ns in times_ns:
            while i < len(self.times) and self.times[i] <= time_ns:
                record = self.records[i]
                if record < 0:
                    frames.append([self._codes[-1 - record], 0])
                elif record == _RETURN:
                    if frames:
                        frames.pop()
                elif frames:
                    frames[-1][1] = record - 1
                i += 1
            stack = []
            for code, line in reversed(frames):
                if code.co_filename == _RUNNER:
                    break
                if (code, line) not in known:
                    known[code, line] = _frame(code, line)
                stack.append(known[code, line])
            stacks.append(tuple(stack))
        return stacks


def _frame(code: CodeType, line: int) -> Frame:
    text = linecache.getline(code.co_filename, line).strip()
    return Frame(file=short_path(code.co_filename), line=line, function=code.co_qualname, text=text)


def short_path(path: str) -> str:
    """Cut a source file's path to what tells: below a package folder, the working folder or a folder of modules."""
    if path.startswith("<"):
        return path
    path = os.path.abspath(path)
    for folder in sorted((entry for entry in (*sys.path, os.getcwd()) if entry), key=len, reverse=True):
        folder = os.path.abspath(folder)
        if path.startswith(folder + os.sep):
            return path[len(folder) + 1 :]
    return os.path.basename(path)
