"""Simulated acceptance: the mean that was asked for, the same every time, and marked wherever it shows."""

import pytest
import torch

from soloist.errors import UsageError
from soloist.sampling_params import SamplingParams
from soloist.spec.simulate import solve_acceptance
from tests.scripted import RandomDrafter, TableModel
from tests.spec.drafters import make_engine

# Acceptance length and width, as the design quotes them.
POINTS = [(2, 4), (3.25, 6), (4.7, 9), (6.4, 9), (9.95, 16), (1, 5), (5, 5)]


def make_model() -> TableModel:
    return TableModel(9, lambda positions, ids: torch.nn.functional.one_hot((ids + 1) % 5, 9) * 9.0)


@pytest.mark.parametrize(("acceptance_length", "width"), POINTS)
def test_the_probability_gives_the_length(acceptance_length: float, width: int):
    p = solve_acceptance(acceptance_length, width)
    assert 0 <= p <= 1
    assert sum(p**j for j in range(width)) == pytest.approx(acceptance_length, abs=1e-9)


@pytest.mark.parametrize(("acceptance_length", "width"), [(0.9, 4), (4.1, 4), (float("nan"), 4)])
def test_a_length_that_no_step_reaches_is_refused(acceptance_length: float, width: int):
    with pytest.raises(UsageError, match="a step commits 1 to 4 tokens"):
        solve_acceptance(acceptance_length, width)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("is_fixed_shape", [False, True])
def test_steps_commit_the_length_on_average(is_fixed_shape: bool, temperature: float):
    # Drafts that the model would never keep, from a law that is not looked at.
    drafter = RandomDrafter(max_drafts=5, vocab_size=9, has_draft_law=True)
    engine = make_engine(make_model(), drafter, is_fixed_shape=is_fixed_shape, simulated_acceptance=3.25)
    params = SamplingParams(max_tokens=480, seed=2, temperature=temperature)
    texts = []
    for _ in range(2):
        generation = engine.generate([0], params)
        texts.append([token for result in generation for token in result.token_ids])
        # 150 steps with a deviation of 1.9 tokens.
        assert generation.stats.acceptance_length == pytest.approx(3.25, abs=0.45)
        assert generation.stats.simulated
    assert texts[0] == texts[1] and texts[0] != [i % 5 for i in range(1, 481)]
    by_position = generation.stats.acceptance_by_position
    p = solve_acceptance(3.25, 6)
    # Of all steps, the share that kept a draft at each place falls by the same factor.
    assert by_position[0] == pytest.approx(p, abs=0.12) and by_position[2] == pytest.approx(p**3, abs=0.15)


def test_without_simulation_nothing_says_so():
    generation = make_engine(make_model()).generate([0], SamplingParams(max_tokens=3))
    list(generation)
    assert not generation.stats.simulated and generation.stats.policy == "fixed width 1"


def test_what_simulation_cannot_mean_is_refused():
    with pytest.raises(UsageError, match="needs a drafter"):
        make_engine(make_model(), simulated_acceptance=2.0)
