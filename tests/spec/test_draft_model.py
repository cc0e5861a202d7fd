"""A draft model's proposals are its own greedy continuation of what was committed, whatever was kept before."""

from pathlib import Path

import pytest
import torch

from soloist.errors import ContextLengthError, UnsupportedError
from soloist.models.cache import StepKind
from soloist.models.causal_lm import CausalLM
from soloist.runtime.buffers import SamplingPlan
from soloist.sampling_params import SamplingParams
from soloist.spec import make_drafter
from soloist.spec.costs import StepCosts
from soloist.spec.draft_model import DraftModel
from soloist.spec.setup import DrafterSetup
from tests.spec.drafters import answer, load_small, make_engine, prompt_of, tamper, write_small

FAMILIES = ("llama", "kimi_linear")
SHAPES = pytest.mark.parametrize("is_fixed_shape", [False, True], ids=["any shape", "fixed shape"])


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CausalLM]:
    folder = tmp_path_factory.mktemp("models")
    return {family: load_small(folder / family, family) for family in FAMILIES}


def make_twin(target: CausalLM, *, is_fixed_shape: bool = False, max_drafts: int = 3, **kwargs) -> DraftModel:
    N = target.config.vocab_size
    kwargs = {"max_context_len": 400, "num_tokens": N} | kwargs
    return DraftModel(target, max_drafts=max_drafts, is_fixed_shape=is_fixed_shape, **kwargs)


def one_pass(model: CausalLM, token_ids: list[int]):
    """Read a sequence at once and give the cache."""
    cache = model.make_cache(len(token_ids))
    model.forward(torch.tensor(token_ids), cache, StepKind.PREFILL)
    cache.commit(len(token_ids), StepKind.PREFILL)
    return cache


@SHAPES
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_prompt", [1, 2, 8])
def test_every_proposal_is_the_drafts_own_continuation(targets, family: str, num_prompt: int, is_fixed_shape: bool):
    target = targets[family]
    N, prompt = target.config.vocab_size, prompt_of(num_prompt, target.config.vocab_size)
    wanted = answer(make_engine(target), prompt, max_tokens=30)
    drafter = make_twin(target, is_fixed_shape=is_fixed_shape)
    # Every count of kept drafts follows every other one.
    counts = [0, 0, 1, 1, 2, 2, 3, 3, 0, 2, 0, 3, 1, 3, 2, 1, 0]
    proposals = tamper(drafter, wanted, num_prompt, counts, N)
    generation = make_engine(target, drafter, is_fixed_shape=is_fixed_shape).generate(
        prompt, SamplingParams(max_tokens=30)
    )
    at = 0
    for step, result in enumerate(generation):
        proposal = proposals[step]
        assert len(proposal) == min(3, 30 - at - 1) or is_fixed_shape
        assert proposal[: 30 - at] == wanted[at : at + len(proposal)], step
        assert result.token_ids == wanted[at : at + len(result.token_ids)]
        at += len(result.token_ids)
    assert at == 30 and generation.stats.accepted > 8


@SHAPES
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_after_many_drafts_is_that_of_reading_the_text(targets, family: str, is_fixed_shape: bool):
    target = targets[family]
    N, prompt = target.config.vocab_size, prompt_of(5, target.config.vocab_size)
    wanted = answer(make_engine(target), prompt, max_tokens=80)
    drafter = make_twin(target, is_fixed_shape=is_fixed_shape)
    tamper(drafter, wanted, 5, [0, 3, 1, 2, 3, 3, 0], N)
    assert answer(make_engine(target, drafter, is_fixed_shape=is_fixed_shape), prompt, max_tokens=80) == wanted
    held = int(drafter.cache.context_len)
    # All but the last step's, of which a recurrent state has the pending token, attention all rows that were read.
    assert 5 + 80 - 5 <= held <= 5 + 80 - 1
    reference = one_pass(target, (prompt + wanted)[:held])
    got, want = drafter.cache.snapshot().tensors, reference.snapshot().tensors
    assert got.keys() == want.keys()
    for name in got:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5, msg=name)


@SHAPES
def test_a_draft_with_the_targets_law_is_always_kept(targets, is_fixed_shape: bool):
    target = targets["llama"]
    engine = make_engine(target, make_twin(target, is_fixed_shape=is_fixed_shape), is_fixed_shape=is_fixed_shape)
    params = SamplingParams(max_tokens=41, temperature=0.8, top_k=20, top_p=0.9, seed=5)
    generation = engine.generate(prompt_of(4, 67), params)
    list(generation)
    # One token comes alone, as 41 = 10 * 4 + 1.
    assert (generation.stats.forwards, generation.stats.accepted) == (11, 30)


def test_nothing_is_drafted_that_cannot_be_drawn(targets):
    target = targets["llama"]
    # Of 67 rows of the head 40 are tokens.
    drafter = make_twin(target, num_tokens=40)
    engine = make_engine(target, drafter, num_tokens=40)
    for params in ({}, {"temperature": 3.0, "seed": 1}):
        generation = engine.generate(prompt_of(4, 40), SamplingParams(max_tokens=60, **params))
        assert all(token < 40 for result in generation for token in result.token_ids)
        assert generation.stats.accepted == 45


def test_a_draft_that_knows_fewer_tokens_is_refused(targets):
    with pytest.raises(UnsupportedError, match="the draft model has 67 tokens, the target 68"):
        make_twin(targets["llama"], num_tokens=68)


@pytest.mark.parametrize("num_known", [0, 3, 9])
@SHAPES
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_target_skips_of_a_prompt_the_draft_reads_itself(
    targets, family: str, is_fixed_shape: bool, num_known: int
):
    target = targets[family]
    N = target.config.vocab_size
    first, second = prompt_of(12, N, seed=1), prompt_of(12, N, seed=2)
    second[:num_known] = first[:num_known]
    drafter, plan = make_twin(target, is_fixed_shape=is_fixed_shape), SamplingPlan.of(SamplingParams())
    with torch.inference_mode():
        drafter.begin(torch.tensor(first), plan)
        drafter.prefill_chunk(torch.tensor(first[:11]), torch.zeros(11, 1), None)
        drafter.begin(torch.tensor(second), plan)
        drafter.skip(9)
        assert int(drafter.cache.context_len) == 9
        drafter.prefill_chunk(torch.tensor(second[9:11]), torch.zeros(2, 1), None)
    got, want = drafter.cache.snapshot().tensors, one_pass(target, second[:11]).snapshot().tensors
    for name in got:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_draft_with_a_short_context_says_so(targets, tmp_path: Path):
    short = load_small(tmp_path, "llama", max_position_embeddings=100)
    drafter = make_twin(short, max_context_len=1000)
    assert drafter.max_context_len == 97


@SHAPES
def test_a_context_may_be_filled_to_the_last_token(tmp_path: Path, is_fixed_shape: bool):
    target = load_small(tmp_path, "llama", max_position_embeddings=64)
    engine = make_engine(target, make_twin(target, is_fixed_shape=is_fixed_shape), is_fixed_shape=is_fixed_shape)
    prompt = prompt_of(5, 67)
    assert answer(engine, prompt) == answer(make_engine(target, max_context_len=61), prompt)


def test_a_draft_stops_where_more_would_not_pay(targets):
    target = targets["llama"]
    prompt = prompt_of(4, 67)
    wanted = answer(make_engine(target), prompt, max_tokens=40)
    lengths = {}
    for step_ms in (0.0001, 0.5, 50.0):
        engine = make_engine(target, make_twin(target))
        engine.adapt_width(StepCosts(plain_ms=1.0, step_ms=tuple(1 + step_ms * w for w in range(4))))
        generation = engine.generate(prompt, SamplingParams(max_tokens=40, seed=1))
        assert [token for result in generation for token in result.token_ids] == wanted
        lengths[step_ms] = generation.stats.drafted / generation.stats.forwards
    assert lengths[0.0001] > 2.5 and 0 < lengths[0.5] < lengths[0.0001] and lengths[50.0] == 0


def test_a_draft_model_is_loaded_from_its_checkpoint(targets, tmp_path: Path):
    path = write_small(tmp_path, "qwen3", vocab_size=67)
    setup = DrafterSetup(target=targets["llama"], draft_path=path, max_context_len=50, num_tokens=67, max_width=3)
    drafter = make_drafter("little", setup)
    assert isinstance(drafter, DraftModel)
    assert (drafter.name, drafter.max_drafts, drafter.model.dtype) == ("model little", 2, torch.float32)


def test_a_longer_request_than_the_draft_holds_is_refused(targets):
    drafter = make_twin(targets["llama"], max_context_len=50)
    with pytest.raises(ContextLengthError, match="the draft can follow 50 tokens, the context has room for 51"):
        make_engine(targets["llama"], drafter, max_context_len=51)
