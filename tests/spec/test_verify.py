"""Lossless acceptance: laws by exact enumeration, counts against plain loops, ends against one token at a time."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from soloist.runtime.buffers import FinishCode, SamplingPlan, StepBuffers
from soloist.runtime.sampler import Target
from soloist.sampling_params import SamplingParams
from soloist.spec.verify import (
    Rule,
    accept,
    block_passing,
    bonus_law,
    chain_passing,
    conclude,
    count_block,
    count_chain,
    count_matching,
)


def i32(x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


class Markov:
    """A law over sequences of N tokens that looks back one token; fp64."""

    def __init__(self, N: int, seed: int, sharpness: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Row N is the law behind the pending token.
        self.rows = (torch.randn(N + 1, N, generator=generator, dtype=torch.float64) * sharpness).softmax(-1)
        self.N = N

    def after(self, prefix: tuple[int, ...]) -> torch.Tensor:
        return self.rows[prefix[-1] if prefix else self.N]

    def of(self, tokens: tuple[int, ...], start: int = 0) -> float:
        return math.prod(float(self.after(tokens[:t])[tokens[t]]) for t in range(start, len(tokens)))


def outcomes(target: Markov, draft: Markov, num_drafts: int, width: int, rule: Rule):
    """Yield (probability, number accepted, emitted tokens) of every way a step can end."""
    for drafted in itertools.product(range(target.N), repeat=num_drafts):
        target_probs = torch.stack([target.after(drafted[:t]) for t in range(num_drafts + 1)])
        draft_probs = torch.stack([draft.after(drafted[:t]) for t in range(num_drafts)])
        tokens = torch.tensor(drafted)
        if rule is Rule.CHAIN:
            passing = chain_passing(target_probs, tokens, draft_probs)[: width - 1].tolist()
            lengths = [math.prod(passing[:a]) * (1 - passing[a] if a < width - 1 else 1) for a in range(width)]
            scales = torch.ones(width, dtype=torch.float64)
        else:
            h, scales = block_passing(target_probs, tokens, draft_probs, i32(width))
            passing = [1.0, *h.tolist()]
            lengths = [passing[a] * math.prod(1 - h for h in passing[a + 1 :]) for a in range(width)]
        for a, probability in enumerate(lengths):
            law = bonus_law(target_probs, draft_probs, i32(a), i32(width), scales[a])[0]
            law = law / law.sum()
            for bonus in range(target.N):
                yield draft.of(drafted) * probability * float(law[bonus]), a, (*drafted[:a], bonus)


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize(
    ("N", "num_drafts", "width"), [(3, 2, 3), (3, 2, 2), (3, 3, 4), (2, 4, 5), (2, 4, 3), (4, 1, 2)]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_law_of_what_a_step_emits_is_the_targets(rule: Rule, N: int, num_drafts: int, width: int, seed: int):
    target, draft = Markov(N, seed), Markov(N, seed + 100)
    # What follows the step is the target's, so the law of the first `width` tokens tells everything.
    law = dict.fromkeys(itertools.product(range(N), repeat=width), 0.0)
    total = 0.0
    for probability, _, emitted in outcomes(target, draft, num_drafts, width, rule):
        total += probability
        for rest in itertools.product(range(N), repeat=width - len(emitted)):
            tokens = (*emitted, *rest)
            law[tokens] += probability * target.of(tokens, len(emitted))
    assert total == pytest.approx(1, abs=1e-12)
    assert max(abs(probability - target.of(tokens)) for tokens, probability in law.items()) < 1e-9


def expected_accepted(target: Markov, draft: Markov, num_drafts: int, rule: Rule) -> float:
    return sum(p * a for p, a, _ in outcomes(target, draft, num_drafts, num_drafts + 1, rule))


@pytest.mark.parametrize("seed", range(6))
def test_a_block_keeps_at_least_as_much_as_the_chain(seed: int):
    target, draft = Markov(3, seed), Markov(3, seed + 50)
    chain, block = (expected_accepted(target, draft, 3, rule) for rule in (Rule.CHAIN, Rule.BLOCK))
    assert block >= chain - 1e-12


def test_the_block_papers_example_gives_the_papers_numbers():
    # Sun et al., section 3: target (1/3, 2/3), draft (2/3, 1/3), two drafts.
    target, draft = Markov(2, 0), Markov(2, 0)
    target.rows = torch.tensor([[1 / 3, 2 / 3]], dtype=torch.float64).expand(3, 2)
    draft.rows = torch.tensor([[2 / 3, 1 / 3]], dtype=torch.float64).expand(3, 2)
    assert expected_accepted(target, draft, 2, Rule.CHAIN) == pytest.approx(10 / 9)
    assert expected_accepted(target, draft, 2, Rule.BLOCK) == pytest.approx(11 / 9)


@pytest.mark.parametrize("rule", Rule)
def test_a_draft_with_the_targets_law_is_kept_whole(rule: Rule):
    target = Markov(3, 5)
    kept = sum(p for p, a, _ in outcomes(target, target, 3, 4, rule) if a == 3)
    assert kept == pytest.approx(1, abs=1e-12)


def test_the_chain_accepts_with_the_overlap_of_the_laws():
    target, draft = Markov(5, 8), Markov(5, 9)
    overlap = float(torch.minimum(target.after(()), draft.after(())).sum())
    assert expected_accepted(target, draft, 1, Rule.CHAIN) == pytest.approx(overlap)


probabilities = st.floats(0, 1, width=32)


@given(passing=st.lists(probabilities, min_size=1, max_size=15), data=st.data())
def test_counts_follow_plain_loops(passing: list[float], data: st.DataObject):
    uniforms = data.draw(st.lists(probabilities, min_size=len(passing), max_size=len(passing)))
    width = data.draw(st.integers(1, len(passing) + 1))
    first_failure = next((i for i in range(len(passing)) if uniforms[i] >= passing[i]), len(passing))
    assert count_chain(torch.tensor(passing), torch.tensor(uniforms), i32(width)) == min(first_failure, width - 1)
    # A later prefix may pass although an earlier one did not.
    longest = max([i + 1 for i in range(len(passing)) if uniforms[i] < passing[i]], default=0)
    assert count_block(torch.tensor(passing), torch.tensor(uniforms)) == longest


def test_a_block_passes_nothing_behind_its_width():
    target, draft = torch.rand(5, 7).softmax(-1), torch.rand(4, 7).softmax(-1)
    passing, _ = block_passing(target, torch.tensor([1, 2, 3, 4]), draft, i32(3))
    assert (passing[:2] > 0).all() and (passing[2:] == 0).all()


@given(st.lists(st.integers(0, 2), min_size=1, max_size=16), st.data())
def test_matching_counts_the_common_beginning(wanted: list[int], data: st.DataObject):
    T = len(wanted)
    drafted = data.draw(st.lists(st.integers(0, 2), min_size=T - 1, max_size=T - 1))
    width = data.draw(st.integers(1, T))
    common = next((i for i in range(T - 1) if wanted[i] != drafted[i]), T - 1)
    got = count_matching(torch.tensor(wanted), torch.tensor(drafted, dtype=torch.int64), i32(width))
    assert got == min(common, width - 1) and got.dtype is torch.int32


def make_buffers(N: int, T: int, *, has_draft_probs: bool = False, **params) -> StepBuffers:
    buffers = StepBuffers.allocate(max_width=T, num_tokens=N, has_draft_probs=has_draft_probs)
    stop_ids = params.pop("stop_ids", ())
    max_tokens = params.pop("max_tokens", 10**6)
    seed = params.pop("seed", 0)
    buffers.begin([0], SamplingParams(**params), seed=seed, max_tokens=max_tokens, stop_ids=stop_ids)
    return buffers


@given(st.data())
def test_an_answer_ends_where_one_token_at_a_time_would_end_it(data: st.DataObject):
    N = 6
    T = data.draw(st.integers(1, 16))
    num_left = data.draw(st.integers(1, 20))
    stop_ids = data.draw(st.sets(st.integers(0, N - 1), max_size=2))
    drafts = data.draw(st.lists(st.integers(0, N - 1), min_size=T - 1, max_size=T - 1))
    bonus, num_accepted = data.draw(st.integers(0, N - 1)), data.draw(st.integers(0, T - 1))
    emitted, code = [], FinishCode.RUNNING
    for token in (*drafts[:num_accepted], bonus):
        emitted.append(token)
        if token in stop_ids:
            code = FinishCode.STOP
        elif len(emitted) == num_left:
            code = FinishCode.LENGTH
        if code is not FinishCode.RUNNING:
            break
    buffers = make_buffers(N, 16, stop_ids=stop_ids, max_tokens=num_left)
    draft_tokens = torch.tensor(drafts, dtype=torch.int64)
    verdict = conclude(buffers, draft_tokens, i32(num_accepted), torch.tensor([bonus]), torch.tensor(True))
    assert verdict.committed_tokens[: verdict.num_committed].tolist() == emitted
    assert verdict.finish_code == code
    assert verdict.num_accepted == min(num_accepted, len(emitted))
    assert {verdict.num_committed.dtype, verdict.num_accepted.dtype, verdict.finish_code.dtype} == {torch.int32}


@pytest.mark.parametrize("code", [FinishCode.STOP, FinishCode.LENGTH, FinishCode.NOT_FINITE])
def test_a_step_behind_the_end_changes_nothing(code: FinishCode):
    buffers = make_buffers(5, 3, stop_ids=[1])
    buffers.advance(torch.tensor([4]), i32(1), i32(code), SamplingPlan.of(SamplingParams()))
    assert buffers.num_left == 0
    verdict = conclude(buffers, torch.tensor([1, 2]), i32(2), torch.tensor([3]), torch.zeros(3))
    assert (verdict.num_committed, verdict.num_accepted, verdict.finish_code) == (0, 0, code)


def test_a_requested_stop_ends_the_answer_behind_the_step_under_way():
    """Its forward pass may have moved a recurrent state on: what it commits must count."""
    buffers, plan = make_buffers(5, 3), SamplingPlan.of(SamplingParams())
    for num_committed in (3, 0, 0):
        buffers.is_stop_requested.fill_(True)
        verdict = conclude(buffers, torch.tensor([1, 2]), i32(2), torch.tensor([3]), torch.zeros(3))
        assert verdict.num_committed == num_committed
        buffers.advance(verdict.committed_tokens, verdict.num_committed, verdict.finish_code, plan)
        assert (buffers.num_left, buffers.width) == (0, 0)


def test_logits_that_are_not_finite_commit_nothing_and_end_the_answer():
    buffers = make_buffers(5, 3, stop_ids=[1])
    verdict = conclude(buffers, torch.tensor([1, 2]), i32(2), torch.tensor([3]), torch.tensor([float("nan"), 0.0, 0.0]))
    assert (verdict.num_committed, verdict.num_accepted, verdict.finish_code) == (0, 0, FinishCode.NOT_FINITE)
    # A padding row may hold anything.
    buffers.width.fill_(2)
    verdict = conclude(buffers, torch.tensor([2, 4]), i32(1), torch.tensor([3]), torch.tensor([0.0, 0.0, float("inf")]))
    assert (verdict.num_committed, verdict.finish_code) == (2, FinishCode.RUNNING)


@pytest.mark.parametrize("rule", Rule)
def test_accepted_and_bonus_tokens_of_many_steps_follow_the_target(rule: Rule):
    target, draft = Markov(3, 21), Markov(3, 22)
    num_drafts, num_steps = 2, 1500
    buffers = make_buffers(3, 3, has_draft_probs=True, temperature=1.0, seed=4)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(3, 3)
    for step in range(num_steps):
        drafted: tuple[int, ...] = ()
        for t in range(num_drafts):
            law = draft.after(drafted)
            buffers.draft_probs[t] = law
            drafted = (*drafted, int(torch.multinomial(law, 1, generator=generator)))
        buffers.input_ids[1:] = torch.tensor(drafted)
        buffers.width.fill_(3)
        probs = torch.stack([target.after(drafted[:t]) for t in range(3)]).float()
        target_rows = Target(tokens=None, probs=probs, highest=torch.zeros(3))
        verdict = accept(target_rows, buffers, i32(20 * step), rule)
        emitted = verdict.committed_tokens[: verdict.num_committed].tolist()
        # A second token that the step did not reach is the target's own.
        if len(emitted) == 1:
            emitted.append(int(torch.multinomial(target.after((emitted[0],)), 1, generator=generator)))
        counts[emitted[0], emitted[1]] += 1
    expected = torch.tensor([[target.of((a, b)) for b in range(3)] for a in range(3)]) * num_steps
    statistic = float(((counts - expected) ** 2 / expected).sum())
    # 8 degrees of freedom: beyond 26 once in a thousand.
    assert statistic < 26


@pytest.mark.parametrize("rule", Rule)
def test_a_step_behind_the_end_of_an_answer_keeps_no_draft(rule: Rule):
    """Captured steps run there with all their rows and a width of 0."""
    N, T = 7, 4
    buffers = StepBuffers.allocate(max_width=T, num_tokens=N, has_draft_probs=True)
    buffers.begin([1], SamplingParams(temperature=1.0), seed=3, max_tokens=9, stop_ids=())
    buffers.end()
    assert buffers.draft_probs is not None
    buffers.draft_probs.fill_(1 / N)
    target = Target(tokens=None, probs=torch.full((T, N), 1 / N), highest=torch.zeros(T))
    verdict = accept(target, buffers, i32(5), rule)
    assert int(verdict.num_committed) == int(verdict.num_accepted) == 0
