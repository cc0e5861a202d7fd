"""Prompt lookup: the latest of the longest matches, read on; in any shape the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.sampling_params import SamplingParams
from soloist.spec.ngram import MAX_MATCH, MIN_MATCH, PromptLookup
from soloist.spec.verify import Verdict
from tests.scripted import TableModel
from tests.spec.drafters import answer, make_engine

PLAN = SamplingPlan.of(SamplingParams())


class NoHostReads(TorchDispatchMode):
    """Fails where a device value, or a shape that depends on one, would reach the host."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "item", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert name not in self.FORBIDDEN, f"{name} reads on the host"
        return func(*args, **(kwargs or {}))


def lookup_by_hand(sequence: list[int], num_drafts: int) -> list[int]:
    """Say the same in plain loops."""
    last = len(sequence) - 1
    for length in range(MAX_MATCH, MIN_MATCH - 1, -1):
        for p in range(last - 1, length - 2, -1):
            if sequence[p - length + 1 : p + 1] == sequence[last - length + 1 :]:
                cycle = sequence[p + 1 :]
                return [cycle[i % len(cycle)] for i in range(num_drafts)]
    return []


def propose(sequence: list[int], num_drafts: int, *, is_fixed_shape: bool, width: int | None = None) -> list[int]:
    drafter = PromptLookup(
        max_context_len=40, max_drafts=num_drafts, device=torch.device("cpu"), is_fixed_shape=is_fixed_shape
    )
    # What an earlier, longer request left behind must not be found.
    drafter.begin(torch.tensor([sequence[-1]] * 40), PLAN)
    drafter.begin(torch.tensor(sequence), PLAN)
    buffers = StepBuffers.allocate(max_width=1 + num_drafts, num_tokens=99)
    buffers.input_ids.fill_(-7)
    buffers.input_ids[0] = sequence[-1]
    buffers.width.fill_(width or 1 + num_drafts)
    context_len = torch.tensor(len(sequence) - 1, dtype=torch.int32)
    if is_fixed_shape:
        with NoHostReads():
            drafter.propose(buffers, context_len)
    else:
        drafter.propose(buffers, context_len)
    assert buffers.width.dtype is torch.int32
    drafts = buffers.input_ids[1 : buffers.width].tolist()
    assert not is_fixed_shape or bool(((buffers.input_ids >= 0) & (buffers.input_ids < 99)).all())
    return drafts


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 15), st.booleans())
def test_the_latest_of_the_longest_matches_is_read_on(sequence: list[int], num_drafts: int, is_fixed_shape: bool):
    assert propose(sequence, num_drafts, is_fixed_shape=is_fixed_shape) == lookup_by_hand(sequence, num_drafts)


@pytest.mark.parametrize(
    ("sequence", "drafts"),
    [
        # The longer match wins over the later one.
        ([1, 2, 3, 4, 7, 9, 2, 3, 4, 8, 1, 2, 3, 4], [7, 9, 2, 3]),
        # Of equals the latest.
        ([2, 3, 4, 7, 9, 2, 3, 4, 8, 5, 2, 3, 4], [8, 5, 2, 3]),
        # A text that repeats itself goes on in its cycle.
        ([4, 5, 6, 4, 5, 6], [4, 5, 6, 4]),
        ([4, 4, 4, 4], [4, 4, 4, 4]),
        # Two common tokens are not enough; nor is a sequence of one.
        ([1, 2, 3, 1, 2], []),
        ([5], []),
    ],
)
@pytest.mark.parametrize("is_fixed_shape", [False, True])
def test_examples(sequence: list[int], drafts: list[int], is_fixed_shape: bool):
    assert propose(sequence, 4, is_fixed_shape=is_fixed_shape) == drafts


@pytest.mark.parametrize("is_fixed_shape", [False, True])
def test_a_narrow_step_gets_a_short_proposal(is_fixed_shape: bool):
    assert propose([1, 2, 3, 4, 1, 2, 3], 4, is_fixed_shape=is_fixed_shape, width=3) == [4, 1]


def test_committed_tokens_are_found_and_rejected_ones_are_not():
    drafter = PromptLookup(max_context_len=40, max_drafts=3, device=torch.device("cpu"))
    drafter.begin(torch.tensor([7, 1, 2, 3]), PLAN)
    buffers = StepBuffers.allocate(max_width=4, num_tokens=99)
    buffers.input_ids[0] = 3
    drafter.propose(buffers, torch.tensor(3, dtype=torch.int32))
    verdict = Verdict(
        committed_tokens=torch.tensor([7, 1, 2, 9]),
        num_committed=torch.tensor(3, dtype=torch.int32),
        num_accepted=torch.tensor(2, dtype=torch.int32),
        finish_code=torch.tensor(0, dtype=torch.int32),
    )
    drafter.update(buffers, verdict, torch.zeros(4, 1), None)
    # 7 1 2 3 7 1 2: the 9 behind it is not there.
    buffers.width.fill_(4)
    drafter.propose(buffers, torch.tensor(6, dtype=torch.int32))
    assert buffers.input_ids[1 : buffers.width].tolist() == [3, 7, 1]


def test_a_repetitive_answer_takes_few_steps():
    # A model that counts round and round is a text that repeats itself.
    model = TableModel(9, lambda positions, ids: torch.nn.functional.one_hot((ids + 1) % 5, 9) * 9.0)
    drafter = PromptLookup(max_context_len=496, max_drafts=7, device=torch.device("cpu"))
    engine = make_engine(model, drafter)
    want = [i % 5 for i in range(1, 61)]
    assert answer(engine, [0], max_tokens=60) == want
    # Seven tokens until three recur, then eight a step.
    assert model.num_forwards <= 7 + 8
