"""A draft that is right by design is seen to be right; read wrongly, the self-test says what is wrong."""

from dataclasses import replace

import pytest
import torch

from soloist.errors import UsageError
from soloist.sampling_params import SamplingParams
from soloist.spec.drafter import Drafter
from soloist.spec.dspark import DSpark
from soloist.spec.dspark_config import DSparkConfig
from soloist.spec.dspark_selftest import Reading, measure_agreement
from tests.scripted import make_engine
from tests.spec.dspark_right import (
    BLOCK,
    DISTANCE,
    MASK,
    NUM_MEMBERS,
    PLANNING,
    PlanningTarget,
    make_text,
    right_config,
    right_model,
    right_tensors,
)

TEXT = make_text(280)
MARKOV = {"markov_head_type": "vanilla", "markov_rank": NUM_MEMBERS}


def check(config: DSparkConfig, *, lead: int = 1, num_anchors: int = 30, **weights):
    target = PlanningTarget(TEXT, lead)
    model = right_model(target, config, right_tensors(lead=lead, **weights))
    with torch.inference_mode():
        return measure_agreement(model, target, TEXT[:120], num_prompt=20, num_anchors=num_anchors)


@pytest.mark.parametrize("has_markov", [False, True])
def test_a_right_draft_is_found_right(has_markov: bool):
    agreement = check(right_config(**(MARKOV if has_markov else {})), has_markov=has_markov)
    assert agreement.by_slot[agreement.declared] == (1.0,) * BLOCK
    assert agreement.best == agreement.declared == Reading(slot0_predicts=True)
    assert agreement.fault is None
    assert agreement.num_anchors == 30 and len(agreement.by_slot) == 3 * 3 * 2
    others = [agreement.mean(reading) for reading in agreement.by_slot if reading != agreement.declared]
    assert has_markov or max(others) < 0.6


def test_a_right_draft_in_place_is_found_right():
    agreement = check(right_config(slot0_predicts=False), lead=0)
    assert agreement.by_slot[agreement.declared] == (1.0,) * (BLOCK - 1)
    assert agreement.fault is None


@pytest.mark.parametrize("offset", [-1, 1])
def test_layers_that_are_one_off_are_named(offset: int):
    wrong = tuple(layer + offset for layer in PLANNING)
    fault = check(right_config(target_layer_ids=wrong)).fault
    assert fault is not None
    assert f"target_layer_ids ought to be [2, 4], not {list(wrong)}: the draft then agrees with 1.00" in fault


@pytest.mark.parametrize(("plan_distance", "side"), [(DISTANCE + 1, "later"), (DISTANCE - 1, "earlier")])
def test_a_block_that_is_one_position_off_is_named(plan_distance: int, side: str):
    # A draft whose trainer set the block elsewhere finds the plan at another distance.
    fault = check(right_config(), plan_distance=plan_distance).fault
    assert fault is not None
    assert f"the block ought to stand one position {side}: the draft then agrees with 1.00" in fault


@pytest.mark.parametrize(("lead", "word"), [(1, "ought to predict"), (0, "ought not to predict")])
def test_the_other_slot_convention_is_named(lead: int, word: str):
    agreement = check(right_config(slot0_predicts=lead == 0), lead=lead)
    assert agreement.fault is not None
    assert f"slot 0 {word} (sample_from_anchor): the draft then agrees with 1.00" in agreement.fault


def test_two_faults_are_both_named():
    wrong = right_config(slot0_predicts=False, target_layer_ids=tuple(layer + 1 for layer in PLANNING))
    fault = check(wrong).fault
    assert fault is not None and "target_layer_ids ought to be [2, 4]" in fault and "slot 0 ought to predict" in fault


def test_a_wrong_mask_token_shows_behind_the_anchor():
    agreement = check(replace(right_config(), mask_token_id=3))
    assert agreement.best == agreement.declared
    first, *behind = agreement.by_slot[agreement.declared]
    assert first == 1.0 and min(behind) < 0.6


def test_a_draft_for_other_features_is_right_in_no_reading():
    fault = check(right_config(target_layer_ids=(0, 6))).fault
    assert fault is not None
    assert "no reading of the draft agrees with the text" in fault
    assert "hardly trained" in fault and "mask token" in fault


def test_the_text_must_hold_a_block_and_fit_the_context():
    target = PlanningTarget(TEXT)
    model = right_model(target, right_config(), right_tensors(), max_positions=64)
    for num_tokens in (24, 61):
        with pytest.raises(UsageError, match=f"a text of {num_tokens} tokens, 20 of them prompt.*at most 60"):
            measure_agreement(model, target, TEXT[:num_tokens], num_prompt=20)


# --- and in the loop ---


def make_drafter(has_markov: bool) -> tuple[PlanningTarget, Drafter]:
    target = PlanningTarget(TEXT)
    config = right_config(**(MARKOV if has_markov else {}))
    return target, DSpark(right_model(target, config, right_tensors(has_markov=has_markov)))


@pytest.mark.parametrize("has_markov", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 64])
@pytest.mark.parametrize("num_prompt", [8, 9, 14])
def test_every_draft_of_a_right_draft_is_kept(has_markov: bool, chunk_tokens: int, num_prompt: int):
    # So prompt chunks, verified rows and positions all are where the draft expects them.
    target, drafter = make_drafter(has_markov)
    engine = make_engine(target, drafter, max_context_len=200, chunk_tokens=chunk_tokens)
    generation = engine.generate(TEXT[:num_prompt], SamplingParams(max_tokens=50))
    assert [token for result in generation for token in result.token_ids] == TEXT[num_prompt : num_prompt + 50]
    assert generation.stats.forwards == 10 and generation.stats.acceptance_length == 1 + BLOCK


def test_a_right_draft_finds_its_plan_as_soon_as_there_is_one():
    target, drafter = make_drafter(has_markov=False)
    engine = make_engine(target, drafter, max_context_len=200)
    generation = engine.generate(TEXT[:1], SamplingParams(max_tokens=60))
    assert [token for result in generation for token in result.token_ids] == TEXT[1:61]
    assert generation.stats.forwards <= 12 + DISTANCE


def test_rejected_rows_leave_no_trace():
    # A draft that is cut at random by another's mistakes goes on being right.
    target, drafter = make_drafter(has_markov=True)
    assert isinstance(drafter, DSpark)
    generator = torch.Generator().manual_seed(3)
    propose = drafter.propose
    num_right: list[int] = []

    def spoil(buffers, context_len):
        propose(buffers, context_len)
        at = int(torch.randint(0, BLOCK + 1, (), generator=generator))
        num_right.append(at)
        if at < BLOCK:
            buffers.input_ids[1 + at] = (buffers.input_ids[1 + at] + 1) % MASK

    update, accepted = drafter.update, []

    def note(buffers, verdict, hidden, captured):
        accepted.append(int(verdict.num_accepted))
        update(buffers, verdict, hidden, captured)

    drafter.propose, drafter.update = spoil, note  # type: ignore[method-assign]
    engine = make_engine(target, drafter, max_context_len=240, chunk_tokens=4)
    assert [t for r in engine.generate(TEXT[:12], SamplingParams(max_tokens=200)) for t in r.token_ids] == TEXT[12:212]
    # The last step may be cut by the end of the answer.
    assert accepted[:-1] == num_right[: len(accepted) - 1] and len(set(accepted)) == BLOCK + 1
