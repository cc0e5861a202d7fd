"""Figures of an evaluation and of a calibration, on made-up answers whose truth is known."""

import pytest
import torch

from soloist.train.calibration import calibration_error, fit
from soloist.train.evaluate import Evaluation, _Answer, _summarise, distinct_ratio, model_card, table


def make_answer(*accepted: int, drafted: int = 3) -> _Answer:
    """Steps that each verified `drafted` and kept so many."""
    histogram = tuple(sum(a == j for a in accepted) for j in range(drafted + 1))
    return _Answer(
        completion_tokens=sum(accepted) + len(accepted),
        forwards=len(accepted),
        drafted=(0,) * drafted + (len(accepted),),
        accepted=histogram,
        decode_s=0.01 * (len(accepted) - 1),
    )


def test_lengths_and_positions_are_counted_over_steps_not_answers():
    answers = [make_answer(3, 3, 3, 3, 0), make_answer(0)]
    found = _summarise(answers, 0.7, 4, seed=0)
    assert found.acceptance_length == pytest.approx(18 / 6)
    assert found.acceptance_by_position == pytest.approx((4 / 6,) * 3)
    assert found.excluded_share == 0.5
    # Of the answer of five steps and 17 tokens; the other has no step behind its first.
    assert found.step_ms == pytest.approx(10) and found.tpot_ms == pytest.approx(40 / 16)
    assert (found.num_prompts, found.completion_tokens, found.forwards) == (2, 18, 6)
    # Resamples have only the one answer, only the other, or both.
    assert found.interval == pytest.approx((1.0, 17 / 5))
    low, high = found.intervals_by_position[0]
    assert low == 0 and high == pytest.approx(4 / 5)


def test_answers_that_are_alike_leave_no_doubt():
    found = _summarise([make_answer(1, 2)] * 9, 0.0, 9, seed=0)
    assert found.interval == (2.5, 2.5)
    assert found.acceptance_by_position == (1.0, 0.5, 0.0)


def test_loops_have_few_distinct_runs():
    assert distinct_ratio(list(range(50))) == 1.0
    assert distinct_ratio([1, 2, 3] * 20) == pytest.approx(3 / 57)
    assert distinct_ratio([1, 2]) == 1.0


def test_a_card_says_what_was_measured_and_how():
    figures = tuple(_summarise([make_answer(1, 2)] * 2, t, 2, seed=0) for t in (0.0, 0.7))
    evaluation = Evaluation(
        model="m",
        draft="d",
        drafter="dspark",
        dtype="bfloat16",
        device="cpu",
        width=4,
        max_tokens=9,
        min_distinct_ratio=0.6,
        temperatures=figures,
    )
    assert "| 0.7 | 2.50 (2.50-2.50) | 2 | 10 | 1.00 | 0.50 | 0.00 |" in table(evaluation)
    card = model_card(evaluation, licence="mit", data="texts", mix={"0": 3}, training={"a": {"b": 1}}, command="run me")
    for part in ("license: mit", "base_model: m", "at most 4", "texts", "3 at 0", "- a.b: 1", "    run me", "60%"):
        assert part in card


def test_temperatures_that_were_planted_are_found():
    generator = torch.Generator().manual_seed(0)
    n, planted = 20000, (2.0, 1.0, 0.5)
    truth = torch.randn(n, 3, generator=generator) * 1.5 + 1
    is_kept = torch.rand(n, 3, generator=generator) < truth.sigmoid()
    accepted = is_kept.long().cumprod(dim=1).sum(dim=1)
    found = fit(truth * torch.tensor(planted), accepted)
    assert found.temperatures == pytest.approx(planted, rel=0.15)
    assert all(after <= before + 1e-6 for before, after in zip(found.error_before, found.error_after, strict=True))
    assert found.error_before[0] > 0.02 > found.error_after[0]
    assert found.num_blocks == n


def test_the_calibration_error_is_the_mean_gap():
    predicted = torch.tensor([0.05, 0.05, 0.95, 0.95])
    assert calibration_error(predicted, torch.tensor([0.0, 0.0, 1.0, 1.0])) == pytest.approx(0.05)
    assert calibration_error(predicted, torch.tensor([1.0, 0.0, 1.0, 1.0])) == pytest.approx((0.9 + 0.1) / 4)
