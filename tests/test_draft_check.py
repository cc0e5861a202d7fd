"""The check of a draft passes what changes nothing and fails what changes anything."""

import dataclasses
from pathlib import Path

import pytest
import torch

from soloist import draft_check, engine
from soloist.draft_check import check_draft, chi_square_p_value, measure_logit_error, near_tie, uniform_if_right
from soloist.errors import UsageError
from soloist.kernels.sampling import target_probs
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.spec.draft_model import DraftModel
from soloist.spec.dspark import DSpark
from soloist.spec.verify import accept
from tests.miniature import write_checkpoint
from tests.spec.drafters import load_small, make_engine, prompt_of
from tests.spec.dspark_right import PLANNING, PlanningTarget, make_text, right_config, right_model, right_tensors

PROMPTS = [prompt_of(n, 53, seed=n) for n in (3, 5, 9, 12)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load_small(tmp_path_factory.mktemp("model"), "kimi_linear")


def make_checked(target: CausalLM, **kwargs):
    drafter = DraftModel(target, max_context_len=300, num_tokens=53, max_drafts=3)
    return make_engine(target, drafter, **kwargs)


def no_reference() -> CausalLM:
    raise AssertionError("the reference was loaded")


def run(engine, max_tokens: int = 40):
    report = check_draft(engine, PROMPTS, model="tiny", max_tokens=max_tokens, load_reference=no_reference)
    return report, {check.name: check for check in report.checks}


def test_a_draft_that_changes_nothing_passes(target):
    seen = []
    report = check_draft(
        make_checked(target),
        PROMPTS,
        model="tiny",
        max_tokens=40,
        load_reference=no_reference,
        on_progress=lambda *at: seen.append(at),
    )
    assert report.passed, report
    assert [check.name for check in report.checks] == ["greedy", "sampling", "logprobs", "state"]
    assert seen == [(done, 12) for done in range(1, 13)]
    assert report.acceptance_length > 2 and report.width == 4
    found = report.to_json()
    assert found["passed"] is True and found["checks"][0]["details"]["num_equal"] == 4
    assert found["checks"][3]["details"]["num_compared"] == 4


def test_drafts_that_are_kept_unseen_fail(target, monkeypatch):
    # A draft of another model, kept whatever the target says.
    checked = make_checked(target)
    propose = checked.drafter.propose

    def propose_otherwise(buffers, context_len):
        propose(buffers, context_len)
        buffers.input_ids[1:].add_(1).remainder_(53)

    def accept_all(target, buffers, context_len, rule):
        if target.tokens is not None:
            tokens = torch.cat([buffers.input_ids[1 : target.tokens.shape[0]], target.tokens[-1:]])
            target = dataclasses.replace(target, tokens=tokens)
        else:
            buffers.draft_probs.fill_(1e-9)
        return accept(target, buffers, context_len, rule)

    monkeypatch.setattr(checked.drafter, "propose", propose_otherwise)
    monkeypatch.setattr(engine, "accept", accept_all)
    _, checks = run(checked, max_tokens=130)
    assert not checks["greedy"].passed and not checks["sampling"].passed


def test_a_state_that_keeps_a_trace_fails(target, monkeypatch):
    checked = make_checked(target)
    commit = checked.runner.commit

    def commit_with_a_trace(num_committed, num_rows):
        commit(num_committed, num_rows)
        checked.runner.cache.recurrent.state[..., 0] *= 1 + 1e-4

    monkeypatch.setattr(checked.runner, "commit", commit_with_a_trace)
    report, checks = run(checked)
    assert not checks["state"].passed and not report.passed


def test_logprobs_of_other_rows_fail(target, monkeypatch):
    checked = make_checked(target)
    top_logprobs = engine.top_logprobs
    monkeypatch.setattr(engine, "top_logprobs", lambda logits, tokens: top_logprobs(logits.roll(1, 0), tokens))
    _, checks = run(checked)
    assert not checks["logprobs"].passed and checks["greedy"].passed


def test_what_cannot_be_checked_is_refused(target):
    with pytest.raises(UsageError, match="no draft to check"):
        run(make_engine(target))
    with pytest.raises(UsageError, match="nothing to check"):
        run(make_checked(target, simulated_acceptance=2.0))


def test_a_near_tie_is_told_from_a_difference(tmp_path: Path):
    # Sizes that the kernel of packed weights takes.
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 256}
    path = write_checkpoint(tmp_path, "llama", seed=3, **sizes)
    reference = load_model(path, dtype=torch.float32)
    rounded = load_model(path, dtype=torch.bfloat16, weights_dtype="int8")
    prompts = [prompt_of(12, 256, seed=i) for i in range(8)]
    found = [near_tie(rounded, reference, prompt, 256) for prompt in prompts]
    for one in found:
        assert one["is_near_tie"] == (one["top_two_gap"] < 2 * one["logit_error"]) and one["logit_error"] < 0.2
    assert not all(one["is_near_tie"] for one in found)
    # The largest error of them all.
    largest = max(one["logit_error"] for one in found)
    assert measure_logit_error(rounded, reference, prompts, 256) == pytest.approx(largest)
    assert near_tie(rounded, reference, prompts[0], 256, largest)["logit_error"] == largest
    # A model that is right has no near-ties.
    assert measure_logit_error(reference, reference, prompts, 256) == 0
    assert not any(near_tie(reference, reference, prompt, 256)["is_near_tie"] for prompt in prompts)


def test_a_greedy_difference_outside_fp32_needs_the_reference(tmp_path: Path, monkeypatch):
    path = write_checkpoint(tmp_path, "llama", seed=3)
    rounded = load_model(path, dtype=torch.bfloat16)
    drafter = DraftModel(rounded, max_context_len=300, num_tokens=257, max_drafts=3)
    checked = make_engine(rounded, drafter)
    answers = []
    answering = draft_check._answer

    def answer_otherwise(*args):
        answer = answering(*args)
        answers.append(answer)
        # The drafted answer to the second prompt.
        return answer if len(answers) != 4 else dataclasses.replace(answer, tokens=[*answer.tokens[:-1], 0])

    monkeypatch.setattr(draft_check, "_answer", answer_otherwise)
    loaded = []
    report = check_draft(
        checked,
        PROMPTS,
        model="tiny",
        max_tokens=6,
        load_reference=lambda: loaded.append(1) or load_model(path, dtype=torch.float32),
    )
    (difference,) = report.checks[0].details["differences"]
    assert (difference["prompt"], difference["at"], len(loaded)) == (1, 5, 1)
    assert report.checks[0].passed == difference["is_near_tie"]


def test_tokens_of_the_law_are_uniform_and_others_are_not():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2000, 30, generator=generator) * 2
    filters = torch.tensor(1.0), torch.tensor(20, dtype=torch.int32), torch.tensor(1.0), torch.tensor(0.0)
    tokens = target_probs(logits, *filters).multinomial(1, generator=generator)[:, 0].tolist()
    values = uniform_if_right(logits, tokens, generator)
    counts = (values * 10).long().bincount(minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 28
    greedy = uniform_if_right(logits, logits.argmax(-1).tolist(), generator)
    counts = (greedy * 10).long().bincount(minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() > 100


def test_p_values_are_those_of_tables():
    assert chi_square_p_value(27.877, 9) == pytest.approx(0.001, rel=1e-3)
    assert chi_square_p_value(8.343, 9) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("weights_dtype", ["int8", "int4"])
def test_a_packed_target_answers_the_same_at_every_width(tmp_path: Path, weights_dtype):
    # Field report 46: one row and several may take another kernel, here of attention.
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 256}
    path = write_checkpoint(tmp_path, "llama", seed=3, **sizes)
    target = load_model(path, dtype=torch.bfloat16, weights_dtype=weights_dtype)
    assert weights_dtype in target.report.bytes_by_format
    for max_drafts in range(1, 8):
        drafter = DraftModel(target, max_context_len=300, num_tokens=256, max_drafts=max_drafts)
        report = check_draft(
            make_engine(target, drafter),
            [prompt_of(9, 256)],
            model="tiny",
            max_tokens=30,
            load_reference=lambda: load_model(path, dtype=torch.float32),
        )
        assert report.checks[0].passed, (max_drafts, report.checks[0])


def check_reading(config, *, num_answer: int = 100):
    text = make_text(120)
    target = PlanningTarget(text)
    drafter = DSpark(right_model(target, config, right_tensors()))
    answers = [draft_check._Answer(tokens=text[20 : 20 + num_answer], logprobs=[], state={})] * 2
    return draft_check._check_reading(drafter, target, [text[:20]] * 2, answers)


def test_a_dspark_draft_is_read_as_its_config_says():
    check = check_reading(right_config())
    assert check.passed and check.details["agreement"] == 1.0
    assert check.details["num_anchors"] == 192


def test_a_draft_that_is_read_wrongly_changes_nothing_and_fails_by_name():
    wrong = right_config(target_layer_ids=tuple(layer + 1 for layer in PLANNING))
    check = check_reading(wrong)
    assert not check.passed and "target_layer_ids ought to be" in check.summary


def test_answers_that_are_too_short_to_tell_do_not_pass():
    check = check_reading(right_config(), num_answer=3)
    assert not check.passed and "--tokens" in check.summary
