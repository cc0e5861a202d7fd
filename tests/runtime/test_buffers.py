"""The step's buffers: a request finds nothing of the one before, progress is counted on the device."""

import dataclasses

import pytest
import torch

from soloist.runtime.buffers import FinishCode, SamplingPlan, StepBuffers
from soloist.sampling_params import SamplingParams

N = 11


def begin(buffers: StepBuffers, prompt: list[int], *, max_tokens: int = 9, stop_ids=(), **params) -> SamplingPlan:
    return buffers.begin(prompt, SamplingParams(**params), seed=5, max_tokens=max_tokens, stop_ids=stop_ids)


def i32(x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


def advance(buffers: StepBuffers, tokens: list[int], num: int, plan: SamplingPlan, code=FinishCode.RUNNING) -> None:
    buffers.advance(torch.tensor(tokens), i32(num), i32(code), plan)


@pytest.mark.parametrize("max_width", [0, 17])
def test_a_step_has_one_to_sixteen_rows(max_width: int):
    with pytest.raises(AssertionError):
        StepBuffers.allocate(max_width=max_width, num_tokens=N)


def test_a_request_finds_nothing_of_the_one_before():
    everything = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "logit_bias": {1: 2.0},
        "min_tokens": 4,
    }
    used, fresh = (StepBuffers.allocate(max_width=4, num_tokens=N) for _ in range(2))
    plan = begin(used, [1, 2, 3], stop_ids=[7, 8], max_tokens=5, **everything)
    used.input_ids[1:] = torch.tensor([4, 5, 6])
    used.width.fill_(4)
    used.is_stop_requested.fill_(True)
    advance(used, [4, 5, 6, 7], 4, plan, FinishCode.STOP)
    for params in ({}, everything | {"logit_bias": {2: 1.0}}):
        for buffers in (used, fresh):
            begin(buffers, [9, 10], stop_ids=[6], **params)
        for field in dataclasses.fields(StepBuffers):
            # Without bias and penalties theirs are not read, and need not be written.
            if field.name in ("logit_bias", "prompt_mask", "output_counts") and not params:
                continue
            got, want = getattr(used, field.name), getattr(fresh, field.name)
            assert (got is None and want is None) or torch.equal(got, want), field.name


def test_a_request_is_written_down_as_it_was_asked_for():
    buffers = StepBuffers.allocate(max_width=3, num_tokens=N)
    plan = begin(buffers, [1, 2, 2], stop_ids=[7], temperature=0.5, top_k=4, min_tokens=2, presence_penalty=1)
    assert buffers.input_ids.tolist() == [2, 0, 0] and int(buffers.width) == 3
    assert buffers.stop_mask.nonzero().flatten().tolist() == [7]
    assert buffers.prompt_mask.nonzero().flatten().tolist() == [1, 2]
    assert [float(x) for x in (buffers.temperature, buffers.top_k, buffers.seed)] == [0.5, 4, 5]
    assert [int(x) for x in (buffers.num_left, buffers.num_unstoppable, buffers.finish_code)] == [9, 2, 0]
    assert plan == SamplingPlan(
        is_greedy=False,
        has_logit_bias=False,
        has_penalties=True,
        has_min_tokens=True,
        has_logprobs=False,
        has_filters=True,
        has_constraint=False,
    )
    # A greedy request draws nothing that could be cut.
    assert not SamplingPlan.of(SamplingParams(top_k=4)).has_filters
    assert not SamplingPlan.of(SamplingParams(temperature=0.5)).has_filters
    for cut in ({"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert SamplingPlan.of(SamplingParams(temperature=0.5, **cut)).has_filters


def test_a_least_length_beyond_any_answer_is_the_longest_answer():
    buffers = StepBuffers.allocate(max_width=4, num_tokens=N)
    begin(buffers, [1], max_tokens=7, min_tokens=2**40)
    assert int(buffers.num_unstoppable) == 7


def test_a_filter_that_keeps_all_is_the_vocabularys_size():
    buffers = StepBuffers.allocate(max_width=1, num_tokens=N)
    begin(buffers, [1])
    assert int(buffers.top_k) == N
    begin(buffers, [1], top_k=500)
    assert int(buffers.top_k) == N


def test_the_last_committed_token_is_the_next_pending_one():
    buffers = StepBuffers.allocate(max_width=4, num_tokens=N)
    plan = begin(buffers, [1], frequency_penalty=1.0, min_tokens=5)
    advance(buffers, [4, 4, 6, 9], 3, plan)
    assert int(buffers.input_ids[0]) == 6
    assert [int(x) for x in (buffers.num_left, buffers.num_unstoppable)] == [6, 2]
    assert buffers.output_counts.tolist() == [0, 0, 0, 0, 2, 0, 1, 0, 0, 0, 0]
    # A narrower step.
    advance(buffers, [4], 1, plan)
    assert int(buffers.input_ids[0]) == 4 and int(buffers.output_counts[4]) == 3 and int(buffers.num_left) == 5


def test_a_step_that_commits_nothing_keeps_the_pending_token():
    buffers = StepBuffers.allocate(max_width=2, num_tokens=N)
    plan = begin(buffers, [3], frequency_penalty=1.0)
    advance(buffers, [4, 5], 0, plan)
    assert int(buffers.input_ids[0]) == 3 and int(buffers.num_left) == 9 and int(buffers.output_counts.sum()) == 0


@pytest.mark.parametrize("code", [FinishCode.STOP, FinishCode.NOT_FINITE])
def test_nothing_is_left_once_the_answer_has_ended(code: FinishCode):
    buffers = StepBuffers.allocate(max_width=2, num_tokens=N)
    advance(buffers, [4, 5], 1, begin(buffers, [3]), code)
    assert int(buffers.num_left) == 0 and int(buffers.finish_code) == code
