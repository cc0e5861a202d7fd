"""Qwen2 against transformers; its real checkpoints in GGUF."""

from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from soloist.errors import UnsupportedError
from soloist.models.qwen2 import Qwen2Config as SoloistConfig
from tests.miniature import miniature_config
from tests.models.dense_oracle import check_against_oracle

TINY = {
    "vocab_size": 137,
    "hidden_size": 48,
    "intermediate_size": 60,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 24}


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(tmp_path: Path, tied: bool) -> None:
    model = check_against_oracle(tmp_path, Qwen2ForCausalLM, Qwen2Config(**TINY, tie_word_embeddings=tied))
    assert model.config.head_dim == 8


def test_logits_with_yarn_equal_transformers(tmp_path: Path) -> None:
    check_against_oracle(tmp_path, Qwen2ForCausalLM, Qwen2Config(**TINY | {"rope_parameters": YARN}))


def test_yarn_extends_the_context_that_the_config_names() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = SoloistConfig.from_dict(miniature_config("qwen2", rope_scaling=scaling))
    assert config.max_position_embeddings == 4096


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 512}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"use_mrope": True}, "use_mrope"),
        ({"attention_bias": False}, "attention_bias"),
    ],
)
def test_a_config_that_would_compute_something_else_is_refused_by_name(overrides: dict, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        SoloistConfig.from_dict(miniature_config("qwen2", **overrides))


def test_inert_window_keys_are_accepted() -> None:
    overrides = {"sliding_window": 4096, "max_window_layers": 2, "layer_types": ["full_attention"] * 3}
    assert SoloistConfig.from_dict(miniature_config("qwen2", **overrides)) == SoloistConfig.from_dict(
        miniature_config("qwen2")
    )
