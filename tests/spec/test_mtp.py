"""The MTP layer drafts from the target's hidden states of the committed text, and from nothing else."""

from pathlib import Path

import pytest
import torch

from soloist.errors import CheckpointError, UnsupportedError
from soloist.models import load_model, mixers
from soloist.models.bailing_moe_v3 import BailingMoeV3ForCausalLM
from soloist.models.cache import StepKind
from soloist.runtime.buffers import SamplingPlan
from soloist.sampling_params import SamplingParams
from soloist.spec import make_drafter
from soloist.spec.mtp import MTPDrafter, load_mtp
from soloist.spec.setup import DrafterSetup
from tests.miniature import miniature_config
from tests.spec.drafters import answer, load_small, make_engine, prompt_of, tamper

N = 71
SHAPES = pytest.mark.parametrize("is_fixed_shape", [False, True], ids=["any shape", "fixed shape"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "bailing"


@pytest.fixture(scope="module")
def target(folder: Path) -> BailingMoeV3ForCausalLM:
    model = load_small(folder, "bailing_moe_v3")
    assert isinstance(model, BailingMoeV3ForCausalLM)
    return model


def make(target, folder: Path | None, *, is_fixed_shape: bool = False, max_width: int | None = 4) -> MTPDrafter:
    setup = DrafterSetup(target=target, target_path=folder, max_context_len=300, num_tokens=N, max_width=max_width)
    drafter = load_mtp(setup)
    drafter.is_fixed_shape = is_fixed_shape
    return drafter


def rows_by_hand(drafter: MTPDrafter, token_ids: list[int]):
    """Run target and layer over a text at once: the cache of all positions but the last, and the last output."""
    target, ids = drafter.mtp.target, torch.tensor(token_ids)
    hidden = target.forward(ids[:-1], target.make_cache(len(ids)), StepKind.PREFILL)
    cache = drafter.mtp.make_cache(len(ids) + 8)
    out = drafter.mtp.forward(target.final_norm(hidden), ids[1:], cache)
    cache.commit(len(ids) - 1, StepKind.PREFILL)
    return cache, out[-1:]


def drafts_by_hand(drafter: MTPDrafter, token_ids: list[int], num_drafts: int) -> list[int]:
    """Draft behind the last token of a text, from nothing that was kept."""
    cache, hidden = rows_by_hand(drafter, token_ids)
    drafts = []
    for _ in range(num_drafts):
        token = drafter.mtp.compute_logits(hidden).argmax(-1)
        drafts.append(int(token))
        hidden = drafter.mtp.forward(hidden, token, cache)
        cache.commit(1, StepKind.DECODE)
    return drafts


@SHAPES
@pytest.mark.parametrize("num_prompt", [1, 2, 3, 8])
def test_every_proposal_comes_from_the_committed_text(target, folder, num_prompt: int, is_fixed_shape: bool):
    prompt = prompt_of(num_prompt, N)
    wanted = answer(make_engine(target), prompt, max_tokens=24)
    drafter = make(target, folder, is_fixed_shape=is_fixed_shape)
    proposals = tamper(drafter, wanted, num_prompt, [0, 3, 1, 2, 0, 3, 3], N)
    engine = make_engine(target, drafter, is_fixed_shape=is_fixed_shape)
    at = 0
    for step, result in enumerate(engine.generate(prompt, SamplingParams(max_tokens=24))):
        text = prompt + wanted[:at]
        if len(text) == 1:
            # There is no hidden state yet.
            assert proposals[step] == [] and len(result.token_ids) == 1
        elif proposals[step]:
            assert proposals[step] == drafts_by_hand(drafter, text, len(proposals[step])), step
        at += len(result.token_ids)
        assert wanted[:at][-len(result.token_ids) :] == result.token_ids
    assert at == 24 and len(proposals) < 20


@SHAPES
def test_the_cache_after_many_drafts_is_that_of_reading_the_text(target, folder, is_fixed_shape: bool):
    prompt = prompt_of(7, N)
    wanted = answer(make_engine(target), prompt, max_tokens=60)
    drafter = make(target, folder, is_fixed_shape=is_fixed_shape)
    tamper(drafter, wanted, 7, [0, 3, 1, 2, 3, 0], N)
    assert answer(make_engine(target, drafter, is_fixed_shape=is_fixed_shape), prompt, max_tokens=60) == wanted
    cache, hidden = rows_by_hand(drafter, prompt + wanted)
    assert int(drafter.cache.context_len) == int(cache.context_len) == 66
    for got, want in (
        (drafter.cache.latent.latent[:, :66], cache.latent.latent[:, :66]),
        (drafter.last_hidden, hidden),
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_restored_state_drafts_as_before(target, folder):
    prompt, plan = prompt_of(9, N), SamplingPlan.of(SamplingParams())
    drafter = make(target, folder)
    engine = make_engine(target, drafter)
    answer(engine, prompt, max_tokens=1)
    snapshot = drafter.snapshot()
    answer(engine, prompt_of(20, N, seed=4), max_tokens=6)
    with torch.inference_mode():
        drafter.begin(torch.tensor(prompt), plan)
        drafter.restore(snapshot)
    cache, _ = rows_by_hand(drafter, prompt)
    assert int(drafter.cache.context_len) == 9
    torch.testing.assert_close(drafter.cache.latent.latent[:, :8], cache.latent.latent[:, :8], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(drafter.last_hidden, snapshot[1])


def test_the_layer_is_read_from_the_targets_checkpoint(target, folder):
    drafter = make_drafter("mtp", DrafterSetup(target=target, target_path=folder, max_context_len=90, num_tokens=N))
    assert isinstance(drafter, MTPDrafter)
    # Five chained drafts unless asked otherwise.
    assert (drafter.name, drafter.max_drafts) == ("mtp", 5)


def test_random_weights_have_a_random_layer():
    target = load_model(miniature_config("bailing_moe_v3"), weights="random", dtype=torch.float32)
    setup = DrafterSetup(target=target, max_context_len=60, num_tokens=131, seed=7)
    assert len(answer(make_engine(target, load_mtp(setup)), [1, 2, 3], max_tokens=12)) == 12


def test_a_target_without_the_layer_is_refused_by_name(tmp_path: Path):
    llama = load_small(tmp_path / "llama", "llama")
    with pytest.raises(UnsupportedError, match="a LlamaForCausalLM has no MTP layer; `ngram` drafts for every model"):
        load_mtp(DrafterSetup(target=llama, max_context_len=60, num_tokens=67))
    tiny = load_small(tmp_path / "tiny", "bailing_moe_v3", num_nextn_predict_layers=0)
    with pytest.raises(UnsupportedError, match="num_nextn_predict_layers is 0"):
        load_mtp(DrafterSetup(target=tiny, target_path=tmp_path / "tiny", max_context_len=60, num_tokens=N))


def test_a_checkpoint_that_lacks_the_layer_says_what_is_missing(target, tmp_path: Path):
    load_small(tmp_path, "bailing_moe_v3", num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"lacks \d+ of \d+ tensors of its MTP layer, such as model.layers.3"):
        load_mtp(DrafterSetup(target=target, target_path=tmp_path, max_context_len=60, num_tokens=N))


def test_a_prompt_is_read_without_asking_the_device_where_it_stands(target, folder: Path, monkeypatch):
    told = []
    attend = mixers.mla_attention

    def note(rows, weights, latent, context_len, rotary, *, host_len=None):
        told.append((host_len, int(context_len)))
        return attend(rows, weights, latent, context_len, rotary, host_len=host_len)

    monkeypatch.setattr(mixers, "mla_attention", note)
    drafter, prompt = make(target, folder), torch.tensor(prompt_of(30, N))
    drafter.begin(prompt, SamplingPlan.of(SamplingParams()))
    for start in (0, 17):
        chunk = prompt[start:29][:17]
        drafter.prefill_chunk(chunk, torch.randn(len(chunk), target.config.hidden_size), None)
    assert told == [(0, 0), (17, 17)]
