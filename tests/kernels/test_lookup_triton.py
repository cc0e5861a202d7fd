"""Prompt lookup in one launch proposes what `find_continuation` does, and a record is the history's own."""

import random

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import lookup_triton
from soloist.kernels.launch import IS_INTERPRETED, arrival_counters
from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.sampling_params import SamplingParams
from soloist.spec import history, ngram
from soloist.spec.history import PADDING, TokenHistory
from soloist.spec.ngram import MAX_MATCH, MIN_MATCH, PromptLookup
from tests.kernels.device import DEVICE, launch_kernels, nan_in_fresh_memory

PLAN = SamplingPlan.of(SamplingParams())
NUM_CASES = 60 if IS_INTERPRETED else 500


@pytest.fixture(autouse=True)
def _memory_of_nan():
    with nan_in_fresh_memory():
        yield


def propose(ids: list[int], max_drafts: int, room: int, device: torch.device) -> tuple[list[int], int, int]:
    drafter = PromptLookup(max_context_len=room, max_drafts=max_drafts, device=device, is_fixed_shape=True)
    # What an earlier, longer request left behind must not be found.
    drafter.begin(torch.tensor([ids[-1]] * room, device=device), PLAN)
    drafter.begin(torch.tensor(ids, device=device), PLAN)
    buffers = StepBuffers.allocate(max_width=1 + max_drafts, num_tokens=9, device=device)
    buffers.input_ids[0] = ids[-1]
    width = random.Random(len(ids)).randint(0, 1 + max_drafts)
    buffers.width.fill_(width)
    context_len = torch.tensor(len(ids) - 1, dtype=torch.int32, device=device)
    drafter.propose(buffers, context_len)
    return buffers.input_ids.tolist(), int(buffers.width), int(drafter.context_len)


@pytest.mark.parametrize("room", [40, 2500])
def test_a_proposal_is_the_references(room: int, monkeypatch: pytest.MonkeyPatch):
    cases = []
    for seed in range(NUM_CASES if room < 100 else NUM_CASES // 10):
        draw = random.Random(seed)
        length = draw.choice([1, 2, 4, 5, draw.randint(1, room), room])
        # Few ids give long matches and many of them.
        ids = [draw.randrange(draw.choice([2, 3, 9])) for _ in range(length)]
        cases.append((ids, draw.choice([1, 3, 15])))
    want = [propose(ids, drafts, room, torch.device("cpu")) for ids, drafts in cases]
    launch_kernels(monkeypatch, ngram, history)
    got = [propose(ids, drafts, room, DEVICE) for ids, drafts in cases]
    assert got == want
    assert {width > 1 for _, width, _ in want} == {True, False}
    assert int(arrival_counters(DEVICE).sum()) == 0


def test_a_step_is_written_behind_its_pending_token(monkeypatch: pytest.MonkeyPatch):
    launch_kernels(monkeypatch, history)
    ids = TokenHistory.allocate(20, 4, DEVICE)
    ids.begin(torch.arange(20, device=DEVICE))
    ids.record(torch.tensor([91, 92, 93], device=DEVICE), torch.tensor(5, dtype=torch.int32, device=DEVICE))
    assert ids.ids[:20].tolist() == [*range(6), 91, 92, 93, *range(9, 20)]


def test_a_match_far_behind_is_found_from_another_program(monkeypatch: pytest.MonkeyPatch):
    ids = [1, 2, 3, 4, 5, 6, *([7] * 2000), 8, 2, 3, 4]
    launch_kernels(monkeypatch, ngram, history)
    tokens, width, _ = propose(ids, 3, 2500, DEVICE)
    assert tokens == [4, 5, 6, 7] and width <= 4
    assert MIN_MATCH <= 3 <= MAX_MATCH <= PADDING and lookup_triton._BLOCK < 2000
