"""Llama against transformers, in every form of its config; what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from soloist.errors import CheckpointError, UnsupportedError
from soloist.kernels.rotary import Llama3Scaling
from soloist.models import load_model
from soloist.models.cache import StepKind
from soloist.models.llama import LlamaConfig as SoloistConfig
from tests.miniature import miniature_config
from tests.models.dense_oracle import (
    check_against_oracle,
    make_noisy_cache,
    oracle_logits,
    prefill,
    random_ids,
    run,
    save_oracle,
)

TINY = {
    "vocab_size": 131,
    "hidden_size": 42,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(tmp_path: Path, tied: bool) -> None:
    check_against_oracle(tmp_path, LlamaForCausalLM, LlamaConfig(**TINY, tie_word_embeddings=tied))


def test_logits_with_llama3_scaling_equal_transformers(tmp_path: Path) -> None:
    model = check_against_oracle(tmp_path, LlamaForCausalLM, LlamaConfig(**TINY, rope_parameters=LLAMA3))
    assert isinstance(model.config.rope_scaling, Llama3Scaling)


def test_the_published_form_of_rope_scaling_means_the_same() -> None:
    config = miniature_config("llama")
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    published = SoloistConfig.from_dict(config | {"rope_theta": 500.0, "rope_scaling": scaling})
    del config["rope_theta"]
    saved = SoloistConfig.from_dict(config | {"rope_parameters": LLAMA3})
    assert published == saved and published.rope_theta == 500.0


def test_prefill_equals_any_chunks_equals_token_by_token(tmp_path: Path) -> None:
    save_oracle(tmp_path, LlamaForCausalLM, LlamaConfig(**TINY))
    model = load_model(tmp_path, dtype=torch.float32)
    ids = random_ids(model, 33)
    expected = prefill(model, make_noisy_cache(model, 33), ids, [33])
    for sizes in ([1] * 33, [16, 17], [32, 1], [1, 32], [5, 7, 11, 10]):
        torch.testing.assert_close(prefill(model, make_noisy_cache(model, 33), ids, sizes), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("accepted", [0, 1, 4])
def test_verify_and_commit_equal_plain_decode(tmp_path: Path, accepted: int) -> None:
    save_oracle(tmp_path, LlamaForCausalLM, LlamaConfig(**TINY))
    model = load_model(tmp_path, dtype=torch.float32)
    ids = random_ids(model, 24)
    plain = make_noisy_cache(model, 40)
    expected = prefill(model, plain, ids, [24])
    cache = make_noisy_cache(model, 40)
    prefill(model, cache, ids[:13], [13])
    # Row 0 is the pending token; the drafts that are not accepted are wrong.
    width = 5
    draft = ids[13 : 13 + width].clone()
    draft[accepted + 1 :] = (draft[accepted + 1 :] + 1) % model.config.vocab_size
    verified = run(model, cache, draft, StepKind.VERIFY, num_rows=accepted + 1)
    torch.testing.assert_close(verified[: accepted + 1], expected[13 : 14 + accepted], atol=1e-5, rtol=0)
    assert int(cache.context_len) == 14 + accepted
    rest = torch.cat([run(model, cache, ids[i : i + 1], StepKind.DECODE) for i in range(14 + accepted, 24)])
    torch.testing.assert_close(rest, expected[14 + accepted :], atol=1e-5, rtol=0)


def test_bf16_stays_near_fp32(tmp_path: Path) -> None:
    oracle = save_oracle(tmp_path, LlamaForCausalLM, LlamaConfig(**TINY))
    model = load_model(tmp_path, dtype=torch.bfloat16, weights_dtype="bf16")
    ids = random_ids(model, 19)
    logits = prefill(model, make_noisy_cache(model, 19), ids, [19])
    expected = oracle_logits(oracle, ids)
    assert logits.dtype == torch.float32
    assert ((logits - expected).norm() / expected.norm()).item() < 0.03


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention_bias", True, "attention_bias"),
        ("mlp_bias", True, "mlp_bias"),
        ("pretraining_tp", 2, "pretraining_tp"),
        ("hidden_act", "gelu", "hidden_act"),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ("logit_scale", 0.5, "logit_scale"),
        ("num_key_value_heads", 4, "num_key_value_heads"),
        ("architectures", ["Qwen3ForCausalLM"], "Qwen3ForCausalLM"),
    ],
)
def test_a_config_that_would_compute_something_else_is_refused_by_name(key: str, value: object, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        SoloistConfig.from_dict(miniature_config("llama") | {key: value})


def test_a_missing_theta_is_llama_2s() -> None:
    config = miniature_config("llama")
    del config["rope_theta"]
    assert SoloistConfig.from_dict(config).rope_theta == 10000.0


def test_the_tied_head_may_be_stored_and_is_not_used(tmp_path: Path) -> None:
    oracle = save_oracle(tmp_path, LlamaForCausalLM, LlamaConfig(**TINY, tie_word_embeddings=True))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    # As some exporters do: another copy under the head's name (here a wrong one, which shows that nobody reads it).
    save_file(tensors | {"lm_head.weight": torch.zeros(131, 42)}, file)
    model = load_model(tmp_path, dtype=torch.float32)
    ids = random_ids(model, 5)
    logits = prefill(model, make_noisy_cache(model, 5), ids, [5])
    torch.testing.assert_close(logits, oracle_logits(oracle, ids), atol=1e-4, rtol=0)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match=r"9 unknown: model\.layers\.2"):
        load_model(tmp_path, dtype=torch.float32)
