"""Widths that pay: rules against plain loops, and texts that do not change, or keep their law, when widths do."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.errors import UsageError
from soloist.sampling_params import SamplingParams
from soloist.spec.costs import StepCosts, measure_costs
from soloist.spec.draft_model import DraftModel
from soloist.spec.switch import PROBE_STEPS, WINDOW_STEPS, DraftSwitch
from soloist.spec.verify import Rule
from soloist.spec.width import EarlyStop, WidthRule, best_width, stop_width
from tests.scripted import KnownAnswer, TableModel
from tests.spec.drafters import answer, make_engine
from tests.spec.test_ngram import NoHostReads

shares = st.floats(0, 1, width=32)
CPU = torch.device("cpu")


def i32(x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


def make_costs(step_ms: list[float], plain_ms: float = 1.0) -> StepCosts:
    return StepCosts(plain_ms=plain_ms, step_ms=tuple(step_ms))


# --- rules ---


@settings(deadline=None)
@given(st.lists(shares, min_size=1, max_size=15), st.data())
def test_the_rules_follow_plain_loops(acceptance: list[float], data: st.DataObject):
    costs = data.draw(
        st.lists(st.floats(0.125, 8, width=16), min_size=len(acceptance) + 1, max_size=len(acceptance) + 1)
    )
    survival = torch.tensor(acceptance).cumprod(0)
    expected = [1.0]
    for share in survival.tolist():
        expected.append(expected[-1] + share)
    rates = [tokens / cost for tokens, cost in zip(expected, costs, strict=True)]
    width = int(best_width(survival, torch.tensor(costs)))
    assert rates[width - 1] == pytest.approx(max(rates), rel=1e-5)
    stop = 1
    while stop < len(costs):
        gain, price = float(survival[stop - 1]) / expected[stop - 1], (costs[stop] - costs[stop - 1]) / costs[stop - 1]
        # Nearly equal: either is right.
        if math.isclose(gain, price, rel_tol=1e-4, abs_tol=1e-6):
            return
        if gain < price:
            break
        stop += 1
    assert int(stop_width(survival, torch.tensor(costs))) == stop


@given(st.lists(st.floats(0.125, 100, width=16), min_size=1, max_size=16))
def test_the_envelope_is_the_largest_convex_table_below(costs: list[float]):
    costs.sort()
    envelope = make_costs(costs).envelope_ms
    assert all(low <= high + 1e-9 for low, high in zip(envelope, costs, strict=True))
    rises = [b - a for a, b in itertools.pairwise(envelope)]
    assert all(first <= second + 1e-9 for first, second in itertools.pairwise(rises))
    assert (envelope[0], envelope[-1]) == (costs[0], costs[-1])
    # Every corner is a point of the table.
    for w in range(1, len(costs) - 1):
        assert envelope[w] == pytest.approx(costs[w]) or rises[w - 1] == pytest.approx(rises[w])


def test_a_dear_row_that_cheap_ones_follow_does_not_stop():
    rule = WidthRule(make_costs([1.0, 1.8, 1.9, 2.0]), has_confidences=True, device=CPU)
    assert rule.stop(torch.tensor([0.95, 0.95, 0.95])) == 4
    assert rule.stop(torch.tensor([0.05, 0.95, 0.95])) == 1
    # What is behind the stop is not looked at.
    assert rule.stop(torch.tensor([0.95, 0.05, 0.95])) == rule.stop(torch.tensor([0.95, 0.05, 0.05])) == 2


def test_nothing_of_a_rule_is_read_on_the_host():
    for has_confidences in (False, True):
        rule = WidthRule(make_costs([1.0, 1.2, 1.3]), has_confidences=has_confidences, device=CPU)
        width = i32(3)
        with NoHostReads():
            rule.limit(width)
            if has_confidences:
                width.copy_(rule.stop(torch.tensor([0.5, 0.9])))
            rule.record(width, i32(1))
        assert width.dtype is torch.int32


def test_counts_correct_confidences_and_fade():
    rule = WidthRule(make_costs([1.0, 1.1, 1.2]), has_confidences=True, device=CPU)
    confident = torch.tensor([0.95, 0.95])
    assert rule.stop(confident) == 3
    for _ in range(60):
        rule.stop(confident)
        rule.record(i32(3), i32(0))
    # The second draft was never reached, so only one draft a step counts.
    assert rule.acceptance()[9] < 0.1 and rule.reached[9] == pytest.approx(1 / 0.03, rel=0.2)
    assert rule.stop(confident) == 1
    for _ in range(200):
        rule.record(i32(1), i32(0))
    assert rule.acceptance()[9] > 0.9 and rule.stop(confident) == 3
    rule.begin()
    assert rule.reached.sum() == 0


def test_places_are_counted_only_where_they_are_reached():
    rule = WidthRule(make_costs([1.0, 1.1, 1.2, 1.3]), has_confidences=False, device=CPU)
    for width, num_accepted in ((4, 1), (2, 1), (4, 3), (1, 0)):
        rule.record(i32(width), i32(num_accepted))
    assert (rule.reached > 0).tolist() == [True] * 3 and rule.kept[1] < rule.kept[0]
    counts = (rule.reached / 0.97).round().tolist()
    assert counts[0] >= counts[1] >= counts[2] == 1


def test_width_follows_what_is_kept():
    rule = WidthRule(make_costs([1.0, 1.3, 1.6, 1.9]), has_confidences=False, device=CPU)
    for _ in range(80):
        rule.record(i32(4), i32(3))
    width = i32(4)
    rule.limit(width)
    assert width == 4
    for _ in range(80):
        rule.record(i32(4), i32(0))
    rule.limit(width)
    assert width == 1
    width.fill_(4)
    rule.begin()
    rule.cap.fill_(2)
    rule.limit(width)
    assert width == 2


def test_stopping_while_drafting_is_stopping_afterwards():
    rule = WidthRule(make_costs([1.0, 1.3, 1.7, 2.4, 3.5]), has_confidences=True, device=CPU)
    stop = EarlyStop(rule)
    assert stop.pays()
    stop.add(0.95)
    assert stop.pays()
    stop.add(0.05)
    assert not stop.pays()
    assert rule.cells[:2].tolist() == [9, 0]


# --- texts ---


def markov(N: int, seed: int, sharpness: float = 1.5) -> tuple[TableModel, torch.Tensor]:
    table = torch.randn(N, N, generator=torch.Generator().manual_seed(seed)) * sharpness
    return TableModel(N, lambda positions, ids: table[ids]), table


def filtered(table: torch.Tensor, temperature: float, top_k: int) -> torch.Tensor:
    probs = (table.double() / temperature).softmax(-1)
    probs = torch.where(probs >= probs.topk(top_k).values[:, -1:], probs, 0.0)
    return probs / probs.sum(-1, keepdim=True)


@pytest.mark.parametrize("is_adaptive", [False, True], ids=["fixed width", "adaptive width"])
@pytest.mark.parametrize(("rule", "is_fixed_shape"), [(Rule.CHAIN, False), (Rule.CHAIN, True), (Rule.BLOCK, True)])
def test_a_chain_of_drafts_leaves_the_targets_law(rule: Rule, is_fixed_shape: bool, is_adaptive: bool):
    N, num_requests = 5, 250
    (target, table), (draft, _) = markov(N, 7), markov(N, 8, sharpness=2.0)
    drafter = DraftModel(draft, max_context_len=400, num_tokens=N, max_drafts=2, is_fixed_shape=is_fixed_shape)
    engine = make_engine(target, drafter, rule=rule, is_fixed_shape=is_fixed_shape)
    if is_adaptive:
        # Costs at which some proposals stop after no, one and two drafts.
        engine.adapt_width(make_costs([1.0, 1.45, 1.9]))
    law = filtered(table, 0.9, 4)
    counts = torch.zeros(N, N, N, dtype=torch.float64)
    widths: set[int] = set()
    for seed in range(num_requests):
        generation = engine.generate([1], SamplingParams(max_tokens=3, temperature=0.9, top_k=4, seed=seed))
        a, b, c = (token for result in generation for token in result.token_ids)
        counts[a, b, c] += 1
        widths |= {j for j, steps in enumerate(generation.stats.drafted_histogram) if steps}
    assert not is_adaptive or widths == {0, 1, 2}
    joint = torch.einsum("a,ab,bc->abc", law[1], law, law)
    for got, want in ((counts.sum(2), joint.sum(2)), (counts.sum(0), joint.sum(0))):
        expected = want[want > 0] * num_requests
        assert got[want == 0].sum() == 0
        # Up to 19 degrees of freedom: beyond 44 once in a thousand.
        assert float(((got[want > 0] - expected) ** 2 / expected).sum()) < 44


class OnlyEven:
    """An answer of even tokens."""

    def num_legal(self, draft_tokens: list[int]) -> int:
        return next((i for i, token in enumerate(draft_tokens) if token % 2), len(draft_tokens))

    def allowed(self, draft_tokens: list[int]) -> torch.Tensor:
        return (torch.arange(5) % 2 == 0).expand(1 + len(draft_tokens), 5)

    def advance(self, token_ids: list[int]) -> None:
        assert not any(token % 2 for token in token_ids)


def test_drawn_drafts_leave_a_constrained_law():
    num_requests = 400
    (target, table), (draft, _) = markov(5, 7), markov(5, 8, sharpness=2.0)
    drafter = DraftModel(draft, max_context_len=400, num_tokens=5, max_drafts=2)
    engine = make_engine(target, drafter)
    law = table.double()[:, ::2].softmax(-1)[::2]
    counts = torch.zeros(3, 3, dtype=torch.float64)
    for seed in range(num_requests):
        params = SamplingParams(max_tokens=2, temperature=1.0, seed=seed)
        generation = engine.generate([2], params, constraint=OnlyEven())
        a, b = (token // 2 for result in generation for token in result.token_ids)
        counts[a, b] += 1
    expected = law[1][:, None] * law * num_requests
    # 8 degrees of freedom: beyond 26 once in a thousand.
    assert float(((counts - expected) ** 2 / expected).sum()) < 26


def known(prompt: list[int], *, max_drafts: int, offset: int = 0) -> KnownAnswer:
    answers = {tuple(prompt): [i % 5 for i in range(1, 400)]}
    return KnownAnswer(answers, max_drafts=max_drafts, vocab_size=9, offset=offset)


def counting_model() -> TableModel:
    return TableModel(9, lambda positions, ids: torch.nn.functional.one_hot((ids + 1) % 5, 9) * 9.0)


@pytest.mark.parametrize("seed", [1, None], ids=["table", "clock"])
def test_a_drafter_that_loses_turns_itself_off_and_says_so(seed: int | None):
    engine = make_engine(counting_model(), known([0], max_drafts=3, offset=1))
    # A table by which even a step without drafts costs more than plain decoding does; the clock finds out by itself.
    engine.adapt_width(make_costs([1.1, 1.1, 1.1, 1.1], plain_ms=1.0))
    if seed is None:
        assert engine.switch is not None
        engine.switch.note = slow_drafts(engine.switch)  # type: ignore[method-assign]
    generation = engine.generate([0], SamplingParams(max_tokens=120, seed=seed))
    assert [token for result in generation for token in result.token_ids] == [i % 5 for i in range(1, 121)]
    stats, num_probes = generation.stats, PROBE_STEPS if seed is None else 0
    assert stats.drafting_off_after == WINDOW_STEPS + num_probes
    assert stats.policy.startswith("adaptive width 1..4 by " + ("clock" if seed is None else "table "))
    assert not engine.drafter.is_following
    assert sum(stats.drafted_histogram) - stats.drafted_histogram[0] <= WINDOW_STEPS
    # The next request tries again.
    assert answer(engine, [0], max_tokens=5, seed=seed) == [1, 2, 3, 4, 0] and engine.drafter.is_following


def slow_drafts(switch: DraftSwitch):
    note = switch.note
    return lambda width, num_committed, elapsed_ms: note(width, num_committed, 1.0 if switch.is_probing else 2.0)


@pytest.mark.parametrize("seed", [1, None], ids=["table", "clock"])
def test_a_drafter_that_wins_stays_on(seed: int | None):
    engine = make_engine(counting_model(), known([0], max_drafts=3))
    engine.adapt_width(make_costs([1.0, 1.2, 1.3, 1.4]))
    generation = engine.generate([0], SamplingParams(max_tokens=300, seed=seed))
    if seed is None:
        assert engine.switch is not None
        engine.switch.note = slow_drafts(engine.switch)  # type: ignore[method-assign]
    assert [token for result in generation for token in result.token_ids] == [i % 5 for i in range(1, 301)]
    assert generation.stats.drafting_off_after is None and generation.stats.acceptance_length > 3


def test_the_same_seed_gives_the_same_text_whatever_steps_take():
    (target, _), (draft, _) = markov(7, 3), markov(7, 4)
    drafter = DraftModel(draft, max_context_len=400, num_tokens=7, max_drafts=3)
    engine = make_engine(target, drafter)
    engine.adapt_width(make_costs([1.0, 1.3, 1.6, 1.9]))
    params = {"max_tokens": 150, "temperature": 1.0, "seed": 7}
    first = answer(engine, [1, 2], **params)
    answer(engine, [3], max_tokens=80, temperature=1.3)
    assert engine.switch is not None
    engine.switch.note = slow_drafts(engine.switch)  # type: ignore[method-assign]
    assert answer(engine, [1, 2], **params) == first


def test_a_switch_decides_by_time_per_token():
    switch = DraftSwitch(make_costs([1.0, 1.5, 2.0]))
    switch.begin(has_clock=False)
    for _ in range(WINDOW_STEPS):
        switch.note(3, 2, 99.0)
    # 2 ms for two tokens is what they cost without drafts.
    assert switch.is_on
    for _ in range(WINDOW_STEPS):
        switch.note(3, 1, 0.0)
    assert not switch.is_on and switch.off_after == 3 * WINDOW_STEPS
    switch.begin(has_clock=True)
    assert switch.is_on and switch.is_probing
    for elapsed_ms in (1.0, 50.0, 1.0):
        switch.note(1, 1, elapsed_ms)
    assert not switch.is_probing
    for _ in range(WINDOW_STEPS):
        switch.note(3, 2, 2.5)
    assert not switch.is_on


# --- costs ---


def test_costs_are_measured_once_and_kept(tmp_path: Path):
    times = {1: 10.0, 2: 12.0, 3: 11.0, 4: 16.0, 6: 18.0, 7: 21.0}
    costs = measure_costs(7, lambda width: times[width], lambda: 9.0)
    # Never falling.
    assert costs.plain_ms == 9 and costs.step_ms == (10, 12, 12, 16, 17, 18, 21)
    path = tmp_path / "step-costs" / "a.json"
    assert StepCosts.load(path) is None
    costs.save(path)
    assert StepCosts.load(path) == costs and list(path.parent.iterdir()) == [path]
    for damaged in ("", "[]", '{"plain_ms": 1}', '{"plain_ms": 1, "step_ms": [0]}', '{"plain_ms": 1, "step_ms": 3}'):
        path.write_text(damaged)
        assert StepCosts.load(path) is None
    assert make_costs([1.0, 2.0]).digest != make_costs([1.0, 2.1]).digest


def test_widths_between_those_measured_lie_on_a_line():
    asked = []

    def time_step(width: int) -> float:
        asked.append(width)
        return float(width)

    assert measure_costs(16, time_step, lambda: 1.0).step_ms == tuple(map(float, range(1, 17)))
    assert 16 in asked and 7 not in asked


def test_costs_that_cannot_be_are_refused():
    for step_ms in ([], [0.0, 1.0], [-1.0]):
        with pytest.raises(UsageError, match="positive milliseconds"):
            make_costs(step_ms)
