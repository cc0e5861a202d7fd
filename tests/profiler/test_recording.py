"""`watch`: a block of code, recorded with lines, then without, then only timed."""

import time

import pytest
import torch

from soloist.errors import UsageError
from soloist.profiler import watch


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
