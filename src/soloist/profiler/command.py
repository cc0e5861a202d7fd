"""Running somebody's Python program in this process while recording it, without a change to its code.

The program runs in the main thread, as under `python`. Another thread watches the clock and asks the main thread, by a
signal that Python handles between two instructions, to begin and to end recordings.
"""

import _thread
import os
import runpy
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from soloist.errors import UsageError
from soloist.profiler.recording import Capture
from soloist.profiler.steps import Origin, find_steps
from soloist.profiler.trace import Trace

# Of recording with Python lines, and then without.
NAMING_S = 1.0
PLAIN_S = 1.0
# Asks the main thread to call the handler; nothing else in common use takes it.
_SIGNAL = signal.SIGPROF
_POLL_S = 0.005
# A main thread that waits in C for another thread needs a real signal to wake up.
_NUDGE_S = 0.2
# A recording passes in slices, of which those count in which the main thread was not stuck in C: ranks of a group wait
# for each other while one of them begins to record, and would have few steps in it. A program whose steps are long
# looks stuck as well, so there are no more than so many.
_SLICES, _MAX_SLICES = 4, 16
EXIT_INTERRUPTED = 130


class _How(Enum):
    SCRIPT = "script"
    MODULE = "module"
    CODE = "code"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A Python program."""

    how: _How
    # Path, module name, or code.
    what: str
    args: tuple[str, ...]

    @property
    def name(self) -> str:
        """What a report calls it."""
        return Path(self.what).name if self.how is _How.SCRIPT else self.what if self.how is _How.MODULE else "-c"


def find_program(words: Sequence[str]) -> Program:
    """Understand a command: `python script.py ...`, `python -m module ...`, `script.py ...` or a console script.

    `python` is the interpreter that runs this, whatever the shell would take for it.

    Raises:
        UsageError: it is none of these, or not there, or names another environment's interpreter.
    """
    rest = list(words)
    is_python = bool(rest) and Path(rest[0]).name.rstrip("0123456789.") in ("python", "pypy")
    if is_python:
        if os.sep in rest[0] and not _is_own(Path(rest[0])):
            raise UsageError(
                f"{rest[0]} is the Python of another environment, and profiling happens in process, with"
                f" {sys.executable}: say python, or install soloist there"
            )
        rest = rest[1:]
    if not rest:
        raise UsageError("no program: give one behind --, as in soloist profile -- python decode.py --tokens 100")
    if rest[0] in ("-m", "-c") and len(rest) > 1:
        return Program(how=_How.MODULE if rest[0] == "-m" else _How.CODE, what=rest[1], args=tuple(rest[2:]))
    if rest[0].startswith("-"):
        raise UsageError(f"option {rest[0]} of Python is not understood here; allowed: -m MODULE, -c CODE, or a script")
    path = Path(rest[0])
    if is_python and not path.is_file():
        raise UsageError(f"{path} is no file: Python would not find it either")
    if path.is_file() and not (is_python or path.suffix == ".py" or _is_python_script(path)):
        raise UsageError(
            f"{path} is no Python program: profiling happens in process, so its name must end in .py, its first line"
            " must call Python, or python must stand before it"
        )
    if not path.is_file():
        # Commands of this environment are there even if it was not activated.
        found = shutil.which(rest[0]) or shutil.which(rest[0], path=str(Path(sys.executable).parent))
        if found is None or not _is_python_script(Path(found)):
            raise UsageError(
                f"{rest[0]} is no Python program: profiling happens in process, so give a script, -m MODULE, or a"
                " command that is a Python script"
            )
        path = Path(found)
    return Program(how=_How.SCRIPT, what=str(path), args=tuple(rest[1:]))


def _is_python_script(path: Path) -> bool:
    with path.open("rb") as file:
        first, second = file.readline(200), file.readline(1000)
    # Where the path of Python is too long for a first line, a shell reads the second and Python skips it.
    is_handed_on = first.startswith(b"#!/bin/sh") and b"exec" in second and b"python" in second
    return first.startswith(b"#!") and (b"python" in first or is_handed_on)


def _is_own(python: Path) -> bool:
    """Say whether an interpreter is of this environment: all of them may be links to the same file."""
    return python.parent.resolve() == Path(sys.executable).parent.resolve()


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of running a program."""

    exit_code: int
    # None: there is no recording with work of a GPU.
    trace: Trace | None
    # In words, if there is none.
    why_none: str


def run_program(program: Program, *, after_s: float = 0.0, naming_s: float = NAMING_S, plain_s: float = PLAIN_S) -> Run:
    """Run a program to its end and record its steps; a recording that shows none is repeated.

    Args:
        program: to run.
        after_s: time to let pass from its first use of the GPU.
        naming_s: time to record with Python lines.
        plain_s: time to record without them, behind that.
    """
    recorder = _Recorder(program.name, after_s, naming_s, plain_s)
    saved_argv, saved_path = sys.argv[:], sys.path[:]
    try:
        with recorder:
            exit_code = _run(program)
    finally:
        sys.argv[:], sys.path[:] = saved_argv, saved_path
    trace = recorder.trace if recorder.trace is not None and recorder.trace.works else None
    return Run(exit_code=exit_code, trace=trace, why_none="" if trace else recorder.why_none)


def _run(program: Program) -> int:
    sys.argv[:] = [program.what, *program.args]
    try:
        if program.how is _How.SCRIPT:
            sys.path.insert(0, str(Path(program.what).resolve().parent))
            runpy.run_path(program.what, run_name="__main__")
        elif program.how is _How.MODULE:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program.what, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.getcwd())
            exec(compile(program.what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    # As the interpreter does with what a program does not catch.
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        return 1
    return 0


class _Recorder:
    """While entered, records the main thread's GPU steps as soon as there are any."""

    def __init__(self, name: str, after_s: float, naming_s: float, plain_s: float) -> None:
        self._name, self._after_s = name, after_s
        self._naming_s, self._plain_s = naming_s, plain_s
        self.trace: Trace | None = None
        self._capture: Capture | None = None
        self._wanted: Callable[[FrameType | None], None] | None = None
        self._is_done = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch_clock, name="soloist-profiler", daemon=True)
        self._previous: Any = None
        self._is_in_the_way = False

    @property
    def why_none(self) -> str:
        """Say why no work of a GPU was recorded."""
        if self._is_in_the_way:
            return "the program ran PyTorch's profiler itself, of which there can be one only"
        if not torch.cuda.is_initialized():
            return "the program used no GPU in this process, and processes that it starts are not recorded"
        return "the program ended before a recording showed work of a GPU"

    def __enter__(self) -> None:
        self._previous = signal.signal(_SIGNAL, self._on_signal)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        # What the clock had asked for last is not done any more.
        self._wanted = None
        if self._capture is not None:
            self._stop(None)
        signal.signal(_SIGNAL, self._previous)

    def _watch_clock(self) -> None:
        """Ask for recordings, one after the other, until one shows steps."""
        while not torch.cuda.is_initialized():
            if self._is_over.wait(_POLL_S):
                return
        pause_s = self._after_s
        while not self._is_over.wait(pause_s):
            actions = ((self._start, self._naming_s), (self._stop_lines, self._plain_s), (self._stop, 0.0))
            for action, seconds in actions:
                if not self._ask(action) or not self._let_run(seconds):
                    return
            if self.trace is not None and self.trace.works and find_steps(self.trace).origin is not Origin.NONE:
                return
            # Still starting up; looking on costs time.
            pause_s = max(1.0, 2 * pause_s)

    def _let_run(self, seconds: float) -> bool:
        """Let some time pass in which the main thread runs; False: the program is over."""
        slice_s, num_left = seconds / _SLICES, _SLICES
        for _ in range(_MAX_SLICES if seconds else 0):
            if self._is_over.wait(slice_s):
                return False
            asked_s = time.monotonic()
            if not self._ask(lambda frame: None):
                return False
            num_left -= time.monotonic() - asked_s < slice_s
            if num_left == 0:
                break
        return True

    def _ask(self, action: Callable[[FrameType | None], None]) -> bool:
        """Have the main thread do something; False: the program is over."""
        self._is_done.clear()
        self._wanted = action
        nudge_s = time.monotonic() + _NUDGE_S
        while not self._is_done.is_set():
            if self._is_over.is_set():
                return False
            if self._wanted is not None:
                _thread.interrupt_main(_SIGNAL)
                if time.monotonic() > nudge_s:
                    nudge_s += _NUDGE_S
                    signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
            self._is_done.wait(_POLL_S)
        return True

    def _on_signal(self, _signal_number: int, frame: FrameType | None) -> None:
        # The capture of a graph forbids what starting and stopping do; the clock asks again.
        if self._wanted is None or torch.cuda.is_current_stream_capturing():
            return
        # A second profiler would leave the program's own one empty.
        if self._wanted == self._start and torch._C._autograd._profiler_enabled():
            self._is_in_the_way = True
            return
        action, self._wanted = self._wanted, None
        action(frame)
        self._is_done.set()

    def _start(self, frame: FrameType | None) -> None:
        self._capture = Capture()
        self._capture.start(frame)

    def _stop_lines(self, frame: FrameType | None) -> None:
        assert self._capture is not None
        self._capture.stop_lines()

    def _stop(self, frame: FrameType | None) -> None:
        assert self._capture is not None
        capture, self._capture = self._capture, None
        trace = capture.stop(self._name)
        if trace.works or self.trace is None:
            self.trace = trace
