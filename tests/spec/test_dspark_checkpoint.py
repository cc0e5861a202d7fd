"""Drafts in every public layout: written in miniature, loaded, and equal; what is not implemented refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from soloist.errors import CheckpointError, SoloistError, UnsupportedError, UsageError
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.spec import make_drafter
from soloist.spec.dspark import DSpark
from soloist.spec.dspark_checkpoint import is_dspark, load_dspark
from soloist.spec.dspark_config import DSparkConfig
from soloist.spec.dspark_layout import read_draft_config
from soloist.spec.setup import DrafterSetup
from tests.miniature import write_checkpoint
from tests.spec.dspark_drafts import (
    Draft,
    deepspec_json,
    dflash_json,
    draft_for,
    heads_of,
    ling_json,
    reference_of,
    specforge_json,
    speculators_json,
    write_draft,
)

N = 67
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = write_checkpoint(tmp_path_factory.mktemp("target") / "model", "llama", 3, vocab_size=N)
    return load_model(folder, dtype=torch.float32)


@pytest.fixture
def draft(target: CausalLM) -> Draft:
    return draft_for(target, theta=500.0)


def load(path: Path, target: CausalLM, **wishes: Any) -> DSpark:
    return load_dspark(DrafterSetup(target=target, draft_path=path, max_context_len=40, num_tokens=N, **wishes))


def hidden_of(drafter: DSpark, features: torch.Tensor, pending: int) -> torch.Tensor:
    """Run the block behind some hidden states: (B, D)."""
    model, own = drafter.model, drafter.buffers
    zero = torch.zeros((), dtype=torch.int32)
    model.read_context(features, own.context, zero)
    ids = own.block_ids.clone()
    ids[0] = pending
    return model.run_block(ids, own.context, zero + features.shape[0])


def features_for(draft: Draft, n: int = 9) -> torch.Tensor:
    return torch.randn(n, len(draft.target_layer_ids), draft.hidden_size, generator=torch.Generator().manual_seed(2))


LAYOUTS: dict[str, Callable[[Draft], dict[str, Any]]] = {
    "DeepSpec": deepspec_json,
    "SpecForge": specforge_json,
    "SpecForge, as DFlash": lambda draft: specforge_json(draft, "DFlashDraftModel"),
    "speculators": speculators_json,
    "Ling": ling_json,
}


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_draft(tmp_path: Path, target, draft, layout: str, prefix: str):
    tensors = draft.draw(11)
    drafter = load(write_draft(tmp_path, LAYOUTS[layout](draft), tensors, prefix), target)
    assert drafter.capture_layers == draft.target_layer_ids
    assert drafter.max_drafts == draft.block_size
    features = features_for(draft)
    want = reference_of(draft, tensors, target).block(features, 4)
    assert (hidden_of(drafter, features, 4).double() - want).abs().max() < 1e-5
    # Only the depth of the target is told by no speculators draft, and its end tokens by no other.
    config, want_config = drafter.model.config, read_draft_config(deepspec_json(draft))
    if layout == "speculators":
        want_config = replace(
            want_config, num_target_layers=None, transformer=replace(want_config.transformer, eos_token_ids=())
        )
    assert config == want_config


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("confidence", ["hidden", "hidden_and_markov", None])
@pytest.mark.parametrize("layout", ["DeepSpec", "SpecForge", "speculators"])
def test_every_head_is_read(tmp_path: Path, target, layout: str, markov: str, confidence: str | None):
    draft = draft_for(target, markov=markov, confidence=confidence)
    drafter = load(write_draft(tmp_path, LAYOUTS[layout](draft), draft.draw(1)), target)
    assert drafter.model.config.markov_head_type == markov
    assert drafter.model.config.confidence_input == confidence == (confidence if drafter.has_confidences else None)


def test_confidences_are_divided_by_their_slots_temperatures(tmp_path: Path, target):
    draft = draft_for(target, confidence="hidden_and_markov")
    plain = load(write_draft(tmp_path / "plain", deepspec_json(draft), draft.draw(1)), target).model.confidence
    temperatures = [0.5, 1.0, 2.0, 4.0, 8.0]
    config = deepspec_json(draft) | {"confidence_temperatures": temperatures}
    drafter = load(write_draft(tmp_path / "calibrated", config, draft.draw(1)), target)
    hidden, embedded = torch.randn(3, draft.hidden_size), torch.randn(3, draft.rank)
    want = (plain(hidden, embedded).logit() / torch.tensor(temperatures[:3])).sigmoid()
    assert (drafter.model.confidence(hidden, embedded) - want).abs().max() < 1e-5


@pytest.mark.parametrize("config", [dflash_json, lambda d: speculators_json(d, kind="dflash", slot0_predicts=None)])
def test_dflash_predicts_in_place_and_borrows_its_heads(tmp_path: Path, target, config):
    draft = draft_for(target, markov=None, confidence=None)
    tensors = draft.draw(5)
    drafter = load(write_draft(tmp_path, config(draft), tensors), target)
    assert drafter.max_drafts == draft.block_size - 1
    assert not drafter.model.config.slot0_predicts
    assert drafter.model.lm_head is target.lm_head and drafter.model.embed_tokens is target.embed_tokens


def test_deepspecs_dflash_baselines_predict_from_the_anchor(target):
    draft = draft_for(target, markov=None, confidence=None)
    config = read_draft_config(deepspec_json(draft) | {"markov_rank": 0, "enable_confidence_head": False})
    assert config.slot0_predicts and config.num_drafts == draft.block_size and config.markov_rank == 0


# --- the descriptor ---


def test_layer_ids_of_speculators_are_one_higher(draft):
    config = speculators_json(draft)
    assert config["aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert read_draft_config(config).target_layer_ids == (-1, 0, 1)


@pytest.mark.parametrize(
    ("declared", "num_drafts", "want"),
    [(True, None, True), (False, None, False), (None, 5, True), (None, 4, False), (None, 3, True), (False, 5, False)],
)
def test_the_slot_convention_of_speculators(draft, declared: bool | None, num_drafts: int | None, want: bool):
    config = speculators_json(draft, slot0_predicts=declared)
    config["speculators_config"]["proposal_methods"] = (
        [{"proposal_type": "greedy", "speculative_tokens": num_drafts}] if num_drafts else []
    )
    assert read_draft_config(config).slot0_predicts is want


def with_windows(draft: Draft) -> Draft:
    return replace(draft, windows=(None, 6), causal=(False, True))


@pytest.mark.parametrize("layout", [deepspec_json, specforge_json, speculators_json])
def test_layers_with_a_window_are_causal_in_the_block(draft, layout):
    config = read_draft_config(layout(with_windows(draft)))
    assert config.layer_windows == (None, 6) and config.layer_is_causal == (False, True)


def test_unless_the_checkpoint_says_otherwise(draft):
    open_block = replace(with_windows(draft), causal=(False, False))
    assert read_draft_config(speculators_json(open_block)).layer_is_causal == (False, False)
    assert read_draft_config(dflash_json(draft) | {"is_causal": True}).layer_is_causal == (True, True)
    nested = specforge_json(with_windows(draft))
    nested["dflash_config"]["causal"] = False
    assert read_draft_config(nested).layer_is_causal == (False, False)
    with pytest.raises(UnsupportedError, match="is_causal and causal contradict"):
        read_draft_config(nested | {"is_causal": True})


def test_the_first_dflash_drafts_leave_the_layers_to_a_formula(draft):
    config = dflash_json(draft) | {"num_target_layers": 36, "num_hidden_layers": 5, "layer_types": None}
    del config["dflash_config"]["target_layer_ids"]
    assert read_draft_config(config).target_layer_ids == (1, 9, 17, 25, 33)


@pytest.mark.parametrize("key", ["sample_from_anchor", "query_zero_predicts_next", "shift_label"])
def test_every_word_for_the_slot_convention_counts(draft, key: str):
    config = dflash_json(draft)
    config["dflash_config"][key] = True
    assert read_draft_config(config).slot0_predicts


def test_rotary_angles_in_both_forms_and_with_a_scaling(draft):
    plain = read_draft_config(deepspec_json(draft)).transformer
    assert plain.rope_theta == 500.0 and plain.rope_scaling is None
    assert read_draft_config(specforge_json(draft)).transformer.rope_theta == 500.0
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    scaled = read_draft_config(deepspec_json(draft) | {"rope_scaling": yarn}).transformer
    assert scaled.rope_scaling is not None and scaled.rope_scaling.factor == 4.0


def ling_published() -> DSparkConfig:
    layers = {"num_hidden_layers": 5, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 12}
    return read_draft_config(
        {
            "architectures": ["DSparkDraftModel"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
            "block_size": 8,
            "bos_token_id": None,
            "dflash_config": {
                "attention_mode": "mha",
                "confidence_head_alpha": 1.0,
                "confidence_head_with_markov": True,
                "enable_confidence_head": True,
                "markov_head_type": "vanilla",
                "markov_rank": 256,
                "mask_token_id": 156892,
                "projector_type": "dspark",
                "target_layer_ids": [1, 6, 13, 17, 20],
            },
            "dtype": "bfloat16",
            "eos_token_id": 156895,
            "head_dim": 128,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "intermediate_size": 4608,
            "layer_types": ["full_attention"] * 5,
            "max_position_embeddings": 131072,
            "max_window_layers": 5,
            "model_type": "qwen3",
            "num_target_layers": 24,
            "pad_token_id": 156892,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_theta": 6000000.0, "rope_type": "default"},
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 157184,
        }
        | layers
    )


def test_a_published_config_is_read_whole():
    # The keys and values that SpecForge trains Ling-3.0-tiny's draft with.
    config = ling_published()
    assert config.target_layer_ids == (1, 6, 13, 17, 20) and config.num_target_layers == 24
    assert config.mask_token_id == 156892 and config.block_size == config.num_drafts == 8
    assert config.markov_rank == 256 and config.confidence_input == "hidden_and_markov"
    assert config.transformer.rope_theta == 6e6 and config.transformer.rms_norm_eps == 1e-6


def change(config: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return config | keys


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda d: change(deepspec_json(d), architectures=["Gemma4DSparkModel"]), "Gemma4DSparkModel.*not implemented"),
        (lambda d: change(dflash_json(d), architectures=["DFlash2DraftModel"]), "DFlash2DraftModel.*another algorithm"),
        (
            lambda d: change(deepspec_json(d), architectures=["LlamaForCausalLM"]),
            "drafts that work are Qwen3DSparkModel",
        ),
        (
            lambda d: change(deepspec_json(d), logit_multiplier=3.0),
            "unknown keys for Qwen3DSparkModel: logit_multiplier",
        ),
        (lambda d: change(deepspec_json(d), attention_bias=True), "attention_bias is True"),
        (lambda d: change(deepspec_json(d), final_logit_softcapping=30.0), "final_logit_softcapping is 30.0"),
        (lambda d: change(deepspec_json(d), input_embedding_scale=8.0), "input_embedding_scale is 8.0"),
        (lambda d: change(deepspec_json(d), mask_token_id=N), f"mask_token_id is {N}; the embedding has rows 0 to 66"),
        (lambda d: change(deepspec_json(d), mask_token_id=-1), "mask_token_id is -1"),
        (lambda d: change(deepspec_json(d), target_layer_ids=[1, 0]), r"target_layer_ids is \[1, 0\]"),
        (lambda d: change(deepspec_json(d), target_layer_ids=[-2, 0]), r"target_layer_ids is \[-2, 0\]"),
        (lambda d: change(deepspec_json(d), target_layer_ids=[]) | {"num_target_layers": None}, "target_layer_ids is"),
        (
            lambda d: change(deepspec_json(d), markov_head_type="lstm"),
            "markov_head_type is 'lstm'; what works: vanilla",
        ),
        (
            lambda d: change(deepspec_json(d), markov_rank=0),
            "confidence_head_with_markov is true, but there is no Markov",
        ),
        (
            lambda d: change(deepspec_json(d), draft_vocab_size=99),
            "draft_vocab_size is 99; allowed: 1 to vocab_size, 67",
        ),
        (
            lambda d: change(deepspec_json(d), confidence_temperatures=[1.0, 2.0]),
            r"confidence_temperatures is \[1.0, 2.0\]; allowed with a confidence head: 5 numbers above 0",
        ),
        (lambda d: change(deepspec_json(d), confidence_temperatures=[1.0] * 4 + [0.0]), "5 numbers above 0"),
        (lambda d: change(deepspec_json(d), block_size=0), "block_size is 0, which leaves nothing to draft"),
        (lambda d: change(dflash_json(d), block_size=1), "block_size is 1, which leaves nothing to draft"),
        (lambda d: change(deepspec_json(d), layer_types=["full_attention"]), "layer_types has 1 entries for 2 layers"),
        (lambda d: change(deepspec_json(d), layer_types=["linear_attention"] * 2), "layer_types is"),
        (lambda d: change(deepspec_json(d), layer_types=["sliding_attention"] * 2), "there is no sliding_window"),
        (lambda d: change(deepspec_json(d), target_hidden_size=61), "target_hidden_size is 61, hidden_size 60"),
        (lambda d: change(deepspec_json(d), quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (lambda d: change(deepspec_json(d), rope_theta=None), "rope_theta is missing"),
        (
            lambda d: change(specforge_json(d), block_size=9, dspark_block_size=8),
            "block_size is given twice, as 9 and as",
        ),
        (lambda d: change(specforge_json(d), dflash_config={"projector_type": "domino"}), "projector_type is 'domino'"),
        (lambda d: change(speculators_json(d), speculators_model_type="eagle3"), "speculators_model_type is 'eagle3'"),
        (lambda d: change(speculators_json(d), transformer_layer_config=None), "transformer_layer_config is missing"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(draft, config, message: str):
    with pytest.raises(UnsupportedError, match=message):
        read_draft_config(config(draft))


# --- tensors ---


def test_heads_with_the_targets_values_are_the_targets(tmp_path: Path, target, draft):
    drafter = load(write_draft(tmp_path, deepspec_json(draft), draft.draw(1) | heads_of(target)), target)
    assert drafter.model.embed_tokens is target.embed_tokens and drafter.model.lm_head is target.lm_head


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_heads_of_its_own_are_kept(tmp_path: Path, target, draft, name: str):
    heads = heads_of(target)
    # Near the end, so that no glance at the first rows is enough.
    heads[name][-1, -1] += 0.5
    tensors = draft.draw(1) | heads
    drafter = load(write_draft(tmp_path, deepspec_json(draft), tensors), target)
    own = drafter.model.embed_tokens if name.startswith("embed") else drafter.model.lm_head
    assert torch.equal(own, heads[name])
    shared = drafter.model.lm_head if name.startswith("embed") else drafter.model.embed_tokens
    assert shared is (target.lm_head if name.startswith("embed") else target.embed_tokens)
    features = features_for(draft)
    want = reference_of(draft, tensors, target).block(features, N - 1)
    assert (hidden_of(drafter, features, N - 1).double() - want).abs().max() < 1e-5


@pytest.mark.parametrize("weights_dtype", ["bf16", "fp16", "int8"])
def test_a_packed_head_is_recognised_by_what_it_does(tmp_path: Path, weights_dtype: str):
    path = write_checkpoint(tmp_path / "target", "llama", 3, vocab_size=96, hidden_size=64, num_attention_heads=4)
    packed = load_model(path, dtype=torch.bfloat16, weights_dtype=weights_dtype)
    stored = load_model(path, dtype=torch.float32)
    draft = draft_for(packed)
    tensors = draft.draw(1) | heads_of(stored)
    same = load(write_draft(tmp_path / "same", deepspec_json(draft), tensors), packed)
    assert same.model.lm_head is packed.lm_head and same.model.embed_tokens is packed.embed_tokens
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)
    other = load(write_draft(tmp_path / "other", deepspec_json(draft), tensors), packed)
    assert other.model.lm_head is not packed.lm_head


def test_fused_projections_are_taken_apart(tmp_path: Path, target, draft):
    tensors = draft.draw(1)
    fused = dict(tensors)
    for i in range(draft.num_layers):
        parts = [fused.pop(f"layers.{i}.self_attn.{name}_proj.weight") for name in "qkv"]
        fused[f"layers.{i}.self_attn.qkv_proj.weight"] = torch.cat(parts)
    features = features_for(draft)
    got = hidden_of(load(write_draft(tmp_path, deepspec_json(draft), fused), target), features, 4)
    assert (got.double() - reference_of(draft, tensors, target).block(features, 4)).abs().max() < 1e-5


def reduced(target: CausalLM) -> tuple[Draft, Tensors, torch.Tensor]:
    """A draft that knows every third token."""
    kept = torch.arange(1, N, 3)
    draft = draft_for(target, draft_vocab_size=len(kept))
    tensors = draft.draw(6) | {"lm_head.weight": torch.randn(len(kept), draft.hidden_size)}
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(N, dtype=torch.bool).index_fill(0, kept, True)
    return draft, tensors, kept


@pytest.mark.parametrize("layout", ["speculators", "SpecForge"])
def test_a_reduced_vocabulary_is_spread_over_the_targets(tmp_path: Path, target, layout: str):
    draft, tensors, kept = reduced(target)
    drafter = load(write_draft(tmp_path, LAYOUTS[layout](draft), tensors), target)
    logits = torch.randn(2, len(kept))
    spread = drafter.model.over_target_ids(logits)
    assert torch.equal(spread[:, kept], logits)
    left_out = [token for token in range(N) if token not in kept.tolist()]
    assert (spread[:, left_out] == -torch.inf).all()


def test_a_pruned_head_without_its_map_is_refused(tmp_path: Path, target):
    # Field report 64.
    draft, tensors, _ = reduced(target)
    del tensors["d2t"]
    with pytest.raises(UnsupportedError, match=r"knows 22 of 67 tokens.*no tensor d2t.*inside the safetensors"):
        load(write_draft(tmp_path, speculators_json(draft), tensors), target)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t | {"d2t": t["d2t"][:-1].clone()}, r"d2t is torch.int64 \[21\], expected int64 \[22\]"),
        (lambda t: t | {"d2t": t["d2t"].float()}, "d2t is torch.float32"),
        (lambda t: t | {"d2t": t["d2t"].flip(0).contiguous()}, "does not name rising tokens of the 67"),
        (lambda t: t | {"d2t": t["d2t"] + 9}, "does not name rising tokens of the 67"),
        (lambda t: {name: x for name, x in t.items() if name != "lm_head.weight"}, "1 missing: lm_head.weight"),
    ],
)
def test_a_wrong_map_is_refused(tmp_path: Path, target, damage, message: str):
    draft, tensors, _ = reduced(target)
    with pytest.raises(CheckpointError, match=message):
        load(write_draft(tmp_path, speculators_json(draft), damage(tensors)), target)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: {name: x for name, x in t.items() if name != "fc.weight"}, r"1 missing: fc.weight \[60, 180\]"),
        (lambda t: t | {"layers.0.self_attn.g_proj.weight": torch.ones(3, 60)}, "1 unknown: layers.0.self_attn.g_proj"),
        (lambda t: t | {"fc.weight": torch.ones(60, 120)}, r"fc.weight is \[60, 120\], expected \[60, 180\]"),
        (lambda t: t | {"fc.weight": torch.ones(60, 180, dtype=torch.int64)}, "fc.weight holds torch.int64"),
        (lambda t: t | {"embed_tokens.weight": torch.ones(N, 61)}, r"embed_tokens.weight is \[67, 61\]"),
        (lambda t: t | {"model.norm.weight": torch.ones(60)}, "norm.weight is there twice"),
        (
            lambda t: t | {"embed_tokens.weight": torch.full((N, 60), torch.nan)},
            "embedding of the mask token, 65, is not",
        ),
    ],
)
def test_damaged_tensors_are_refused(tmp_path: Path, target, draft, damage, message: str):
    with pytest.raises(CheckpointError, match=message):
        load(write_draft(tmp_path, deepspec_json(draft), damage(draft.draw(1))), target)


def test_harmless_extras_are_left_out(tmp_path: Path, target, draft):
    extras = {
        "rotary_emb.inv_freq": torch.ones(7),
        "verifier_lm_head.weight": torch.ones(N, 60),
        "verifier_norm.weight": torch.ones(60),
        "t2d": torch.ones(N, dtype=torch.bool),
        "d2t": torch.zeros(N, dtype=torch.int64),
    }
    drafter = load(write_draft(tmp_path, speculators_json(draft), draft.draw(1) | extras), target)
    assert drafter.model.target_ids is None


@pytest.mark.parametrize(("change", "message"), [({"num_target_layers": 5}, "num_target_layers is 5, the target's 3")])
def test_a_draft_for_another_target_is_refused(tmp_path: Path, target, draft, change: dict[str, Any], message: str):
    with pytest.raises(UnsupportedError, match=message):
        load(write_draft(tmp_path, deepspec_json(draft) | change, draft.draw(1)), target)


# --- by name ---


def test_a_path_is_recognised_as_a_draft(tmp_path: Path, target, draft):
    path = write_draft(tmp_path / "draft", deepspec_json(draft), draft.draw(1))
    setup = DrafterSetup(target=target, draft_path=path, max_context_len=40, num_tokens=N, max_width=4)
    drafter = make_drafter("mine", setup)
    assert isinstance(drafter, DSpark) and drafter.max_drafts == 3 and drafter.name == "dspark mine"
    assert is_dspark(path) and not is_dspark(tmp_path) and not is_dspark(path / "model.safetensors")
    assert not is_dspark(write_checkpoint(tmp_path / "model", "llama", 3))
    with pytest.raises(UsageError, match="max_drafts is 7; a block of this draft gives 1 to 5"):
        make_drafter("mine", replace(setup, max_width=8))


def test_random_weights_are_for_random_targets(tmp_path: Path, target):
    setup = DrafterSetup(target=target, max_context_len=40, num_tokens=N)
    assert isinstance(make_drafter("dspark", setup), DSpark)
    with pytest.raises(UnsupportedError, match=r"random weights.*give the path"):
        make_drafter("dspark", replace(setup, target_path=tmp_path))


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json"])
def test_an_incomplete_folder_is_named(tmp_path: Path, target, draft, missing: str):
    path = write_draft(tmp_path, deepspec_json(draft), draft.draw(1))
    (path / missing).unlink()
    with pytest.raises(SoloistError, match=r"config\.json|no weights"):
        load(path, target)


def test_the_weights_are_stored_as_they_were_drawn(tmp_path: Path, draft):
    # The oracle of this file reads the same tensors that the checkpoint holds.
    tensors = draft.draw(1)
    stored = load_file(write_draft(tmp_path, deepspec_json(draft), tensors) / "model.safetensors")
    assert stored.keys() == tensors.keys() and all(torch.equal(stored[name], tensors[name]) for name in stored)
