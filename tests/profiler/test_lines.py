"""The recorder knows the line every thread is at, at any moment, to the nanosecond that the profiler's clock gives."""

import contextlib
import sys
import threading
import time
from pathlib import Path

import torch

from soloist.profiler import recording
from soloist.profiler.kineto import parse_trace
from soloist.profiler.lines import LineRecorder, short_path


def line_of(text: str) -> int:
    """The line of this file that ends in a comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(i + 1 for i, line in enumerate(lines) if line.endswith(f"# {text}"))


def leaf() -> int:
    return time.time_ns()  # in leaf


class Lazy:
    @property
    def value(self) -> int:
        return next(time.time_ns() for _ in range(1))  # in property


def test_every_moment_has_its_line_and_its_callers():
    with LineRecorder() as recorder:
        moments = [leaf()]  # call of leaf
        moments.append(Lazy().value)  # call of property
        moments += [(time.time_ns(), leaf())[0]]  # before leaf
    stacks = recorder.stacks_at(threading.get_native_id(), moments)
    places = [[(frame.line, frame.function.split(".")[-1]) for frame in stack[:3]] for stack in stacks]
    here = "test_every_moment_has_its_line_and_its_callers"
    assert places[0][:2] == [(line_of("in leaf"), "leaf"), (line_of("call of leaf"), here)]
    assert places[1][0][0] == line_of("in property")
    assert (line_of("call of property"), here) in places[1]
    assert places[2][0] == (line_of("before leaf"), here)
    assert stacks[0][0].file.endswith("test_lines.py") and stacks[0][0].text == "return time.time_ns()  # in leaf"
    assert stacks[0][0].is_exact


def test_exceptions_and_generators_leave_the_stack_as_it_was():
    def fail() -> None:
        raise ValueError

    def count():
        yield 1
        yield 2

    with LineRecorder() as recorder:
        with contextlib.suppress(ValueError):
            fail()
        numbers = count()
        next(numbers)
        moment = time.time_ns()  # behind it all
        next(numbers)
    (stack,) = recorder.stacks_at(threading.get_native_id(), [moment])
    assert stack[0].line == line_of("behind it all")


def test_nothing_is_known_outside_of_the_recording():
    before = time.time_ns()
    with LineRecorder() as recorder:
        pass
    num_records = recorder.num_records
    leaf()
    assert recorder.num_records == num_records
    assert recorder.stacks_at(threading.get_native_id(), [before, time.time_ns()]) == [(), ()]
    assert recorder.stacks_at(123456789, [before]) == [()]


def test_threads_that_start_meanwhile_are_recorded_and_end_with_it():
    moments, may_go = [], threading.Event()

    def work() -> None:
        moments.append((threading.get_native_id(), leaf()))
        may_go.wait()
        for _ in range(1000):
            leaf()

    with LineRecorder() as recorder:
        thread = threading.Thread(target=work)
        thread.start()
        while not moments:
            time.sleep(0.001)
    may_go.set()
    thread.join()
    ((thread_id, moment),) = moments
    (stack,) = recorder.stacks_at(thread_id, [moment])
    assert stack[0].line == line_of("in leaf")
    assert recorder.num_records < 1000


def test_the_trace_function_of_before_is_back_at_the_end():
    def mine(frame, event, arg):
        return None

    previous = sys.gettrace()
    sys.settrace(mine)
    try:
        with LineRecorder():
            pass
        assert sys.gettrace() is mine
    finally:
        sys.settrace(previous)


def test_paths_are_cut_to_what_tells():
    assert short_path(torch.__file__) == "torch/__init__.py"
    assert short_path("/nowhere/at/all/script.py") == "script.py"
    assert short_path("<string>") == "<string>"


def read_by_truth(x: torch.Tensor) -> bool:
    return True if x.sum() > 0 else False  # noqa: SIM210


def test_pytorchs_profiler_and_the_recorder_agree_on_time(monkeypatch):
    """On a CPU no call blocks; here reads count as calls, so that their lines must be found by time alone."""

    def with_reads(document, name):
        for event in document["traceEvents"]:
            if event.get("cat") == "cpu_op" and event["name"] in ("aten::item", "aten::nonzero"):
                event["cat"] = "cuda_runtime"
        return parse_trace(document, name)

    monkeypatch.setattr(recording, "parse_trace", with_reads)
    x = torch.rand(64)
    capture = recording.Capture()
    capture.start()
    for _ in range(20):
        read_by_truth(x)
        y = x[x > 0.5]  # by mask
        y.sum().item()  # by item
    capture.stop_lines()
    for _ in range(20):
        x.sum().item()
    trace = capture.stop("reads")
    lines = [call.stack[0].line for call in trace.calls if call.stack]
    expected = [line_of("noqa: SIM210"), line_of("by mask"), line_of("by item")] * 20
    assert lines == expected
    assert len(trace.calls) == 80 and not any(call.stack for call in trace.calls[60:])
    ((start_us, end_us),) = trace.named_us
    assert start_us <= trace.calls[0].start_us and trace.calls[59].end_us <= end_us < trace.calls[60].start_us
