"""Qwen3 against transformers; what it refuses."""

from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from soloist.errors import UnsupportedError
from soloist.models.qwen3 import Qwen3Config as SoloistConfig
from tests.miniature import miniature_config
from tests.models.dense_oracle import check_against_oracle

TINY = {
    "vocab_size": 127,
    "hidden_size": 44,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # H * K is not D.
    "head_dim": 14,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(tmp_path: Path, tied: bool) -> None:
    check_against_oracle(tmp_path, Qwen3ForCausalLM, Qwen3Config(**TINY, tie_word_embeddings=tied))


def test_a_config_without_head_dim_has_qwen3s() -> None:
    config = miniature_config("qwen3")
    del config["head_dim"]
    assert SoloistConfig.from_dict(config).head_dim == Qwen3Config().head_dim == 128


@pytest.mark.parametrize(("key", "value"), [("attention_bias", True), ("use_sliding_window", True), ("num_experts", 8)])
def test_a_config_that_would_compute_something_else_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=key):
        SoloistConfig.from_dict(miniature_config("qwen3") | {key: value})
