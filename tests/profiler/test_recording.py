"""`watch`: a block of code, recorded with lines, then without, then only timed."""

import time

import pytest
import torch

from soloist.errors import UsageError
from soloist.profiler import recording, watch
from soloist.profiler.kineto import parse_trace, to_chrome
from tests.profiler.decoding import decode, trace_of


def test_a_block_without_a_gpu_has_no_analysis_but_its_marks():
    with watch(num_steps=6) as watched:
        for _ in range(40):
            watched.step()
            torch.ones(4).sum()
            time.sleep(0.001)
    trace = watched.trace
    # Six steps with lines and six without have seven edges each; behind that steps are only timed.
    assert len(trace.marks_us) == 14
    ((_, end_us),) = trace.named_us
    assert sum(mark < end_us for mark in trace.marks_us) == 7
    assert trace.unprofiled_step_ms is not None and 1.0 < trace.unprofiled_step_ms < 4.0
    with pytest.raises(UsageError, match="no work of a GPU"):
        _ = watched.analysis


def test_results_are_there_when_the_block_has_ended():
    with watch() as watched, pytest.raises(UsageError, match="block has ended"):
        _ = watched.trace
    assert watched.trace.marks_us == [] and watched.trace.unprofiled_step_ms is None


def test_too_few_steps_are_refused():
    with pytest.raises(UsageError, match="num_steps is 3"):
        watch(num_steps=3)


def test_what_recording_adds_to_a_launch_is_noted_and_kept(monkeypatch: pytest.MonkeyPatch):
    times_us = iter([5.0, 12.0])
    monkeypatch.setattr(recording, "_launch_us", lambda: next(times_us))
    capture = recording.Capture()
    capture.start()
    trace = capture.stop("a program")
    assert trace.launch_overhead_us == 7.0
    assert parse_trace(to_chrome(trace), "again").launch_overhead_us == 7.0


def test_calls_before_a_moment_are_dropped_with_the_work_they_started():
    trace = trace_of(decode())
    middle_us = trace.calls[len(trace.calls) // 2].start_us
    before = {call.correlation for call in trace.calls if call.start_us < middle_us}
    num_works = len(trace.works)
    trace.drop_before(middle_us)
    assert trace.calls[0].start_us == middle_us
    assert 0 < len(trace.works) < num_works and not before & {work.correlation for work in trace.works}
