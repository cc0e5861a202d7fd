"""Kimi-Linear: its config keys, tensor names and schedule. What it computes is held to its formulas in test_hybrid."""

import json
import math
from importlib import resources
from typing import Any

import pytest
import torch

from soloist.errors import CheckpointError, UnsupportedError
from soloist.models.kimi_linear import KimiLinearConfig, KimiLinearForCausalLM
from soloist.models.loader import check_tensors
from soloist.models.mixers import KimiDeltaAttention, LatentAttention
from soloist.models.weights import RecordingSource
from tests.miniature import draw_tensors, tensor_shapes
from tests.models import hybrid_oracle
from tests.models.hybrid_models import config_of


def read_config() -> dict[str, Any]:
    return json.loads((resources.files("soloist") / "configs" / "kimi-linear-48b-a3b.json").read_text())


def test_the_published_model_has_exactly_its_tensors():
    config_json = read_config()
    source = RecordingSource()
    KimiLinearForCausalLM(KimiLinearConfig.from_dict(config_json), source)
    assert sum(math.prod(shape) for shape in source.shapes.values()) == 49_122_681_728
    assert source.shapes == tensor_shapes(config_json)
    fp32 = {name.rsplit(".", 1)[1] for name, dtype in source.dtypes.items() if dtype is torch.float32}
    assert fp32 == {"A_log", "dt_bias", "e_score_correction_bias"}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (163840, 2304)),
        ("model.layers.0.self_attn.q_proj.weight", (4096, 2304)),
        ("model.layers.3.self_attn.q_proj.weight", (6144, 2304)),
        ("model.layers.0.self_attn.f_a_proj.weight", (128, 2304)),
        ("model.layers.0.self_attn.g_b_proj.weight", (4096, 128)),
        ("model.layers.0.self_attn.A_log", (1, 1, 32, 1)),
        ("model.layers.0.self_attn.o_proj.weight", (2304, 4096)),
        ("model.layers.26.self_attn.kv_b_proj.weight", (8192, 512)),
        ("model.layers.26.self_attn.o_proj.weight", (2304, 4096)),
        ("model.layers.0.mlp.down_proj.weight", (2304, 9216)),
        ("model.layers.1.block_sparse_moe.gate.e_score_correction_bias", (256,)),
        ("model.layers.1.block_sparse_moe.experts.255.w2.weight", (2304, 1024)),
        ("model.layers.1.block_sparse_moe.experts.255.w3.weight", (1024, 2304)),
        ("model.layers.1.block_sparse_moe.shared_experts.up_proj.weight", (1024, 2304)),
    ],
)
def test_the_published_model_has_the_tensors_of_its_index(name, shape):
    assert tensor_shapes(read_config())[name] == shape


def test_the_published_model_has_its_schedule():
    config = KimiLinearConfig.from_dict(read_config())
    assert config.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert config.max_position_embeddings == 1048576
    model = KimiLinearForCausalLM(config, RecordingSource())
    assert sum(isinstance(mixer, KimiDeltaAttention) for mixer in model.mixers) == 20
    assert isinstance(model.mixers[26], LatentAttention)
    assert model.rotary is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mla_use_nope", False),
        ("moe_layer_freq", 2),
        ("moe_renormalize", False),
        ("moe_router_activation_func", "softmax"),
        ("use_grouped_topk", False),
        ("num_nextn_predict_layers", 1),
        ("hidden_act", "situ"),
        ("tie_word_embeddings", True),
        ("num_key_value_heads", 1),
        ("num_expert_group", 3),
        ("quantization_config", {"bits": 4}),
        ("mla_use_output_gate", True),
    ],
)
def test_a_key_that_would_change_the_numerics_is_refused_by_name(key, value):
    with pytest.raises(UnsupportedError, match=key):
        KimiLinearConfig.from_dict(config_of("kimi") | {key: value})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kda_layers": [1, 2]}, r"kda_layers and full_attn_layers .*1\.\.5"),
        ({"kda_layers": [1, 2, 4, 5]}, "kda_layers and full_attn_layers"),
        ({"short_conv_kernel_size": 3}, "short_conv_kernel_size is 3"),
        ({"gate_lower_bound": -5.0}, "gate_lower_bound"),
    ],
)
def test_a_linear_attn_config_that_is_not_implemented_is_refused(change, complaint):
    config_json = config_of("kimi")
    config_json["linear_attn_config"] |= change
    with pytest.raises(UnsupportedError, match=complaint):
        KimiLinearConfig.from_dict(config_json)


def test_unread_keys_do_not_matter():
    config_json = config_of("kimi")
    expected = KimiLinearConfig.from_dict(config_json)
    assert (
        KimiLinearConfig.from_dict(config_json | {"head_dim": 99, "rope_theta": 5.0, "rope_scaling": None}) == expected
    )


def test_a_checkpoint_with_tensors_of_another_shape_is_refused(tmp_path):
    config = KimiLinearConfig.from_dict(config_of("kimi"))
    asked = RecordingSource()
    KimiLinearForCausalLM(config, asked)
    found = tensor_shapes(config_of("kimi")) | {"model.layers.0.self_attn.A_log": (3,)}
    with pytest.raises(CheckpointError, match=r"A_log is \[3\], expected \[1, 1, 3, 1\]"):
        check_tensors(KimiLinearForCausalLM, config, asked, found, tmp_path)


def test_experts_are_weighted_by_their_unbiased_scores():
    # The oracle's router, on which the comparison of logits rests: the bias selects and does nothing else.
    logits, bias = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([9.0, 8.0, 0.0, 0.0])
    weights = hybrid_oracle.route(logits, bias, 2, 1, 1, 2.446)
    assert list(weights) == [0, 1]
    scores = torch.sigmoid(logits)
    assert weights[0] == pytest.approx(2.446 * (scores[0] / (scores[0] + scores[1])).item(), rel=1e-6)
    drawn = draw_tensors(config_of("kimi"), seed=3)["model.layers.1.block_sparse_moe.gate.e_score_correction_bias"]
    assert drawn.min() < 0 < drawn.max()
