"""From logits to the target's will: the order of the parameters, and independence of how rows are grouped."""

import math

import pytest
import torch

from soloist.kernels.sampling import target_probs, target_probs_sorted
from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.runtime.sampler import make_target
from soloist.sampling_params import SamplingParams

N = 13


def i32(x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


def ready(T: int, *, stop_ids=(), prompt=(1,), **params) -> tuple[StepBuffers, SamplingPlan]:
    buffers = StepBuffers.allocate(max_width=T, num_tokens=N, has_draft_probs=True)
    plan = buffers.begin(list(prompt), SamplingParams(**params), seed=3, max_tokens=99, stop_ids=stop_ids)
    buffers.width.fill_(T)
    return buffers, plan


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9}, {"temperature": 0.9, "top_p": 0.7}])
def test_tokens_do_not_depend_on_how_rows_are_grouped(params: dict):
    logits = torch.randn(6, N) * 2
    buffers, plan = ready(6, **params)
    together = make_target(logits, buffers, i32(40), plan, has_draft_law=False).tokens
    buffers, plan = ready(1, **params)
    single = [make_target(logits[t : t + 1], buffers, i32(40 + t), plan, has_draft_law=False).tokens for t in range(6)]
    assert torch.equal(together, torch.cat(single))


def test_a_greedy_target_has_tokens_even_if_the_drafter_has_a_law():
    buffers, plan = ready(2)
    target = make_target(torch.randn(2, N), buffers, i32(0), plan, has_draft_law=True)
    assert target.probs is None and target.tokens is not None


def test_a_sampled_target_has_its_law_where_drafts_have_one():
    buffers, plan = ready(2, temperature=0.5, top_k=4)
    logits = torch.randn(2, N)
    target = make_target(logits, buffers, i32(0), plan, has_draft_law=True)
    assert target.tokens is None
    kept = logits.topk(4).indices
    want = torch.zeros(2, N).scatter(1, kept, (logits.gather(1, kept) / 0.5).softmax(-1))
    torch.testing.assert_close(target.probs, want)


def test_bias_comes_before_penalties_and_the_ban_last():
    buffers, plan = ready(
        2, prompt=[4, 5], stop_ids=[6], logit_bias={4: 3.0, 6: 50.0}, repetition_penalty=2.0, min_tokens=1
    )
    logits = torch.zeros(2, N)
    logits[:, 9] = 1.0
    # Row 0: token 4 has (0 + 3) / 2 = 1.5 and wins, as the stop token is banned. Row 1 may stop.
    assert make_target(logits, buffers, i32(0), plan, has_draft_law=False).tokens.tolist() == [4, 6]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_shows_in_its_highest_logit(params: dict, bad: float):
    logits = torch.randn(3, N)
    logits[2, 7] = bad
    buffers, plan = ready(3, **params)
    target = make_target(logits, buffers, i32(0), plan, has_draft_law=False)
    assert target.highest.isfinite().tolist() == [True, True, False]
    assert target.tokens.max() < N


def test_a_law_that_nothing_cuts_is_the_same_without_looking_for_cuts():
    logits = torch.randn(3, N) * 4
    neutral = (torch.tensor(0.7), i32(N), torch.tensor(1.0), torch.tensor(0.0))
    plain = target_probs(logits, *neutral, has_filters=False)
    torch.testing.assert_close(plain, (logits / 0.7).softmax(-1))
    # As a captured step looks, and as a CPU does.
    torch.testing.assert_close(plain, target_probs_sorted(logits, *neutral))
    assert torch.equal(plain, target_probs(logits, *neutral))
