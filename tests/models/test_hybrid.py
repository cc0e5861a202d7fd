"""What holds for every model of KDA and MLA layers: the formulas, and that its state forgets how it was reached."""

import pytest
import torch

from soloist.errors import ContextLengthError, UnsupportedError
from soloist.models import load_model
from soloist.models.cache import StepKind
from soloist.models.causal_lm import HiddenCapture
from tests.miniature import draw_tensors, miniature_config
from tests.models import hybrid_oracle
from tests.models.hybrid_models import (
    VARIANTS,
    assert_same_state,
    config_of,
    decode,
    load,
    make_cache,
    prefill,
    random_ids,
)

# Largest difference between two ways to the same fp32 number; logits are about 1, states up to 3.
TOLERANCE = 1e-4
# Variants that are run for long; what the others change has nothing to do with length.
LONG = ("ling", "kimi")


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def model(variant, tmp_path_factory):
    return load(tmp_path_factory.mktemp(variant), variant)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    return load(tmp_path_factory.mktemp("kimi"), "kimi")


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("bailing_moe_v3", {"topk_group": 1, "num_experts_per_tok": 5}), ("kimi_linear", {"num_experts_per_token": 15})],
)
def test_a_token_that_takes_more_experts_than_its_groups_have_is_refused(family: str, sizes: dict[str, int]):
    with pytest.raises(UnsupportedError, match=r"a token takes (5 experts of 4|15 experts of 14), those of 1 of"):
        load_model(miniature_config(family, **sizes), weights="random")


def test_logits_and_residual_streams_are_those_of_the_formulas(model, variant):
    config = config_of(variant)
    input_ids = random_ids(model, 19, seed=1)
    expected = hybrid_oracle.run(config, draw_tensors(config, seed=3), input_ids)
    layers = (-1, 0, 2, config["num_hidden_layers"] - 1)
    kept = torch.full((21, len(layers), config["hidden_size"]), torch.nan)
    hidden = model.forward(
        input_ids, make_cache(model, 30), StepKind.PREFILL, capture=HiddenCapture(layers=layers, hidden=kept)
    )
    torch.testing.assert_close(model.compute_logits(hidden).double(), expected["logits"], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(model.final_norm(hidden).double(), expected["hidden"], rtol=0, atol=TOLERANCE)
    residuals = expected["residuals"][[layer + 1 for layer in layers]].transpose(0, 1)
    torch.testing.assert_close(kept[:19].double(), residuals, rtol=0, atol=TOLERANCE)
    assert kept[19:].isnan().all()


@pytest.fixture(scope="module")
def decoded(model, variant):
    """Tokens one by one: ids, logits, cache. As one chunk, 165 are several of KDA's, and MLA expands its keys."""
    input_ids, cache = random_ids(model, 165 if variant in LONG else 70, seed=2), make_cache(model, 170)
    return input_ids, decode(model, cache, input_ids), cache


@pytest.mark.parametrize("cuts", [[], [1, 2, 3], [64, 66, 67], [7]])
def test_prefill_in_any_chunks_is_decode(model, decoded, cuts):
    input_ids, expected, by_token = decoded
    by_chunk = make_cache(model, 167)
    actual = prefill(model, by_chunk, input_ids.tensor_split(cuts))
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
    assert_same_state(by_chunk, by_token, TOLERANCE)


def test_verifying_and_committing_is_prefill_and_decode_for_hundreds_of_steps(model, variant):
    generator = torch.Generator().manual_seed(4)
    num_steps, max_width = (200 if variant in LONG else 30), 7
    verified, plain = make_cache(model, 1000, max_width), make_cache(model, 1000, max_width)
    committed = [random_ids(model, 5, seed=5)]
    logits = [prefill(model, verified, committed)]
    for step in range(num_steps):
        width = int(torch.randint(1, max_width + 1, (), generator=generator))
        num_rows = int(torch.randint(1, width + 1, (), generator=generator))
        input_ids = random_ids(model, width, seed=1000 + step)
        hidden = model.forward(input_ids, verified, StepKind.VERIFY)
        verified.commit(torch.tensor(num_rows, dtype=torch.int32), StepKind.VERIFY)
        logits.append(model.compute_logits(hidden[:num_rows]))
        committed.append(input_ids[:num_rows])
    text = torch.cat(committed)
    assert len(text) > 2 * num_steps
    expected = torch.cat([prefill(model, plain, [text[:-20]]), decode(model, plain, text[-20:])])
    torch.testing.assert_close(torch.cat(logits), expected, rtol=0, atol=TOLERANCE)
    assert_same_state(verified, plain, TOLERANCE)


def test_verifying_alone_moves_no_state(model):
    cache = make_cache(model, 40)
    prefill(model, cache, [random_ids(model, 9, seed=6)])
    before = cache.snapshot()
    model.forward(random_ids(model, 4, seed=7), cache, StepKind.VERIFY)
    after = cache.snapshot()
    assert after.context_len == before.context_len == 9
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in before.tensors.items())


def test_a_restored_snapshot_continues_as_if_nothing_had_happened(model):
    cache, other = make_cache(model, 60), make_cache(model, 50)
    prompt, answer = random_ids(model, 11, seed=8), random_ids(model, 6, seed=9)
    prefill(model, cache, [prompt])
    snapshot = cache.snapshot()
    expected = decode(model, cache, answer)
    decode(model, cache, random_ids(model, 20, seed=10))
    for restored in (cache, other):
        restored.restore(snapshot)
        assert torch.equal(decode(model, restored, answer), expected)


def test_a_reset_cache_is_a_new_one(model):
    cache = make_cache(model, 40)
    input_ids = random_ids(model, 6, seed=11)
    expected = decode(model, cache, input_ids)
    cache.reset()
    assert torch.equal(decode(model, cache, input_ids), expected)


def test_rows_at_or_past_the_width_change_nothing(model):
    cache = make_cache(model, 40)
    prefill(model, cache, [random_ids(model, 9, seed=12)])
    input_ids = random_ids(model, 5, seed=13)
    expected = model.forward(input_ids[:3], cache, StepKind.VERIFY)
    padded = model.forward(input_ids, cache, StepKind.VERIFY, width=torch.tensor(3, dtype=torch.int32))
    torch.testing.assert_close(padded[:3], expected, rtol=0, atol=TOLERANCE)


def test_bf16_differs_from_fp32_by_rounding_only(variant, model, tmp_path):
    half = load(tmp_path, variant, torch.bfloat16)
    input_ids = random_ids(model, 30, seed=14)
    expected = prefill(model, make_cache(model, 40), [input_ids])
    cache = make_cache(half, 40)
    actual = torch.cat([prefill(half, cache, [input_ids[:25]]), decode(half, cache, input_ids[25:])])
    assert actual.dtype is torch.float32 and cache.latent.latent.dtype is torch.bfloat16
    # A near-tie may send a row to another expert, so rows are judged by their median.
    error = (actual - expected).pow(2).mean(1).sqrt() / expected.pow(2).mean(1).sqrt()
    assert 1e-4 < error.median() < 0.05


def test_a_recurrent_cache_refuses_to_roll_back(kimi):
    cache = kimi.make_cache(20)
    assert not cache.can_rollback
    with pytest.raises(UnsupportedError, match="snapshot"):
        cache.rollback(0)


def test_a_context_longer_than_the_model_allows_is_refused(kimi):
    with pytest.raises(ContextLengthError, match=r"1025 .* 1024"):
        kimi.make_cache(1025)
