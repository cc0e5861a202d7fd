"""Ling-3.0: its config keys, tensor names, schedule, clamps and MTP layer."""

import json
import math
from importlib import resources
from typing import Any

import pytest
import torch

from soloist.errors import CheckpointError, UnsupportedError
from soloist.kernels.rotary import YarnScaling
from soloist.models.bailing_moe_v3 import BailingMoeV3Config, BailingMoeV3ForCausalLM, BailingMoeV3MTP
from soloist.models.cache import StepKind
from soloist.models.loader import Placement, SafetensorsSource, check_tensors
from soloist.models.safetensors import SafetensorsFolder
from soloist.models.weights import RecordingSource
from tests.miniature import draw_tensors, tensor_shapes
from tests.models import hybrid_oracle
from tests.models.hybrid_models import config_of, load, make_cache, random_ids

TOLERANCE = 1e-4


def read_config(name: str) -> dict[str, Any]:
    return json.loads((resources.files("soloist") / "configs" / f"{name}.json").read_text())


def count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


# Name: tensors and parameters of the decoder, then of decoder and MTP layer together.
PUBLISHED = {
    "ling-3.0-flash": (62_230, 124_414_211_552, 63_783, 127_486_405_600),
    "ling-3.0-tiny": (9_283, 7_893_392_800, 9_283, 7_893_392_800),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_models_have_exactly_their_tensors(name):
    config_json = read_config(name)
    config = BailingMoeV3Config.from_dict(config_json)
    source = RecordingSource()
    model = BailingMoeV3ForCausalLM(config, source)
    num_tensors, num_parameters, num_tensors_mtp, num_parameters_mtp = PUBLISHED[name]
    assert (len(source.shapes), count(source.shapes)) == (num_tensors, num_parameters)
    if config.num_nextn_predict_layers:
        BailingMoeV3MTP(model, source)
    assert (len(source.shapes), count(source.shapes)) == (num_tensors_mtp, num_parameters_mtp)
    assert source.shapes == tensor_shapes(config_json)
    fp32 = {name.rsplit(".", 1)[1] for name, dtype in source.dtypes.items() if dtype is torch.float32}
    assert fp32 == {"A_log", "dt_bias", "expert_bias"}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.word_embeddings.weight", (157184, 2560)),
        ("lm_head.weight", (157184, 2560)),
        ("model.layers.0.attention.q_proj.weight", (4096, 2560)),
        ("model.layers.5.attention.q_proj.weight", (6144, 2560)),
        ("model.layers.0.attention.g_proj.weight", (4096, 2560)),
        ("model.layers.5.attention.g_proj.weight", (32, 2560)),
        ("model.layers.1.attention.b_proj.weight", (32, 2560)),
        ("model.layers.1.attention.k_conv1d.weight", (4096, 1, 4)),
        ("model.layers.1.attention.A_log", (32,)),
        ("model.layers.1.attention.dt_bias", (4096,)),
        ("model.layers.1.attention.o_norm.weight", (128,)),
        ("model.layers.41.attention.kv_a_proj_with_mqa.weight", (576, 2560)),
        ("model.layers.41.attention.kv_b_proj.weight", (8192, 512)),
        ("model.layers.41.attention.dense.weight", (2560, 4096)),
        ("model.layers.1.mlp.up_proj.weight", (6144, 2560)),
        ("model.layers.2.mlp.gate.weight", (512, 2560)),
        ("model.layers.2.mlp.gate.expert_bias", (512,)),
        ("model.layers.2.mlp.experts.511.down_proj.weight", (2560, 768)),
        ("model.layers.41.mlp.shared_experts.gate_proj.weight", (768, 2560)),
        ("model.layers.42.eh_proj.weight", (2560, 5120)),
        ("model.layers.42.mlp.experts.0.gate_proj.weight", (768, 2560)),
    ],
)
def test_flash_has_the_tensors_of_its_index(name, shape):
    # The list is the published one; `tensor_shapes` and the model are both held to it.
    assert tensor_shapes(read_config("ling-3.0-flash"))[name] == shape


def test_the_published_models_have_their_schedule():
    flash = BailingMoeV3Config.from_dict(read_config("ling-3.0-flash"))
    tiny = BailingMoeV3Config.from_dict(read_config("ling-3.0-tiny"))
    assert flash.mla_layers == (5, 11, 17, 23, 29, 35, 41)
    assert tiny.mla_layers == (3, 7, 11, 15, 19, 23)
    assert BailingMoeV3Config.from_dict(config_of("ling")).mla_layers == (2, 5, 6)
    assert flash.mla.scale == tiny.mla.scale == pytest.approx(0.0721688, rel=1e-6)
    assert flash.eos_token_ids == (156895, 156892)


def test_flash_clamps_its_late_layers_and_not_the_mtp_layer():
    config = BailingMoeV3Config.from_dict(read_config("ling-3.0-flash"))
    clamped = {layer: config.swiglu_limits(layer) for layer in range(43)}
    assert all(clamped[layer] == (None, None) for layer in (*range(34), 42))
    assert clamped[34] == (None, 5.0)
    assert all(clamped[layer] == (4.0, 5.0) for layer in range(35, 40))
    assert clamped[40] == clamped[41] == (4.0, 7.0)


def test_the_clamps_reach_the_experts():
    model_class = BailingMoeV3ForCausalLM
    model = model_class(BailingMoeV3Config.from_dict(read_config("ling-3.0-flash")), RecordingSource())
    assert [(f.limit, f.shared_limit) for f in model.feed_forwards[33:36]] == [(None, None), (None, 5.0), (4.0, 5.0)]
    mtp = BailingMoeV3MTP(model, RecordingSource())
    assert (mtp.feed_forward.limit, mtp.feed_forward.shared_limit) == (None, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_nGPT", True),
        ("value_norm", True),
        ("up_proj_norm", True),
        ("scale_router_input", True),
        ("gated_attention_proj_granularity_type", "element_wise"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("hidden_act", "gelu"),
        ("score_function", "softmax"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("moe_router_enable_expert_bias", False),
        ("router_dtype", "bf16"),
        ("rope_interleave", False),
        ("kda_safe_gate", False),
        ("kda_lower_bound", -6.0),
        ("kda_lower_bound", 0),
        ("short_conv_kernel_size", 3),
        ("mtp_use_kda", True),
        ("num_nextn_predict_layers", 2),
        ("num_key_value_heads", 1),
        ("rotary_dim", 4),
        ("qk_head_dim", 16),
        ("use_kda_lora", True),
        ("use_qkv_bias", True),
        ("tie_word_embeddings", True),
        ("layer_group_size", [1, 1, 0]),
        ("expert_swiglu_limit_list", [-1]),
        ("n_group", 3),
        ("pregate_enabled", True),
    ],
)
def test_a_key_that_would_change_the_numerics_is_refused_by_name(key, value):
    with pytest.raises(UnsupportedError, match=key):
        BailingMoeV3Config.from_dict(config_of("ling") | {key: value})


def test_a_missing_key_is_named():
    config_json = config_of("ling")
    del config_json["kv_lora_rank"]
    with pytest.raises(UnsupportedError, match="kv_lora_rank is missing"):
        BailingMoeV3Config.from_dict(config_json)


def test_another_architecture_of_the_same_model_type_is_refused():
    with pytest.raises(UnsupportedError, match="BailingMoeV2_5ForCausalLM"):
        BailingMoeV3Config.from_dict(config_of("ling") | {"architectures": ["BailingMoeV2_5ForCausalLM"]})


def test_keys_about_training_are_accepted():
    extra = {"seq_aux": True, "output_router_logits": False, "mtp_loss_scaling_factor": 0, "embedding_dropout": 0.0}
    extra |= {"group_norm_size": 1, "linear_silu": True, "use_qk_norm": True, "max_window_layers": 20}
    extra |= {"num_kv_heads_for_linear_attn": 0, "auto_map": {}, "transformers_version": "5.8.1"}
    assert BailingMoeV3Config.from_dict(config_of("ling") | extra) == BailingMoeV3Config.from_dict(config_of("ling"))


def test_both_forms_of_the_rotary_base_are_read_and_the_partial_factor_is_ignored():
    config_json = config_of("ling")
    expected = BailingMoeV3Config.from_dict(config_json)
    parameters = {"rope_theta": 10000, "rope_type": "default", "partial_rotary_factor": 0.5}
    both = config_json | {"rope_parameters": parameters}
    new = {key: value for key, value in both.items() if key not in ("rope_theta", "rope_scaling")}
    assert BailingMoeV3Config.from_dict(both) == BailingMoeV3Config.from_dict(new) == expected
    assert BailingMoeV3ForCausalLM(expected, RecordingSource()).rotary.cos.shape == (1024, 4)
    with pytest.raises(UnsupportedError, match="rope_theta"):
        BailingMoeV3Config.from_dict(both | {"rope_theta": 10001})


def test_yarn_lengthens_the_context_and_corrects_the_softmax():
    scaling = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}
    plain = BailingMoeV3Config.from_dict(config_of("ling") | {"rope_scaling": scaling})
    assert plain.rope_scaling == YarnScaling(factor=2.0, original_max_position_embeddings=1024)
    assert plain.max_position_embeddings == 2048
    assert plain.mla.scale == pytest.approx(24**-0.5)
    corrected = BailingMoeV3Config.from_dict(config_of("ling") | {"rope_scaling": scaling | {"mscale_all_dim": 1.0}})
    assert corrected.mla.scale == pytest.approx(24**-0.5 * (0.1 * math.log(2) + 1) ** 2)
    with pytest.raises(UnsupportedError, match="finetuned"):
        BailingMoeV3Config.from_dict(config_of("ling") | {"rope_scaling": scaling | {"finetuned": True}})
    with pytest.raises(UnsupportedError, match="dynamic"):
        BailingMoeV3Config.from_dict(config_of("ling") | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})


def test_a_binding_clamp_changes_the_logits():
    config_json = config_of("ling")
    open_json = config_json | {"expert_swiglu_limit_list": None}
    tensors, input_ids = draw_tensors(config_json, seed=3), torch.arange(9)
    clamped, unclamped = (hybrid_oracle.run(c, tensors, input_ids)["logits"] for c in (config_json, open_json))
    # Otherwise comparing the model with the formulas would not show a clamp that is left out.
    assert (clamped - unclamped).abs().max() > 100 * TOLERANCE


@pytest.fixture(scope="module", params=["ling", "ling-query-rank"])
def with_mtp(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = load(folder, request.param)
    assert isinstance(model, BailingMoeV3ForCausalLM)
    placement = Placement(device=torch.device("cpu"), dtype=torch.float32)
    return request.param, model, BailingMoeV3MTP(model, SafetensorsSource(SafetensorsFolder(folder), placement))


def test_the_mtp_layer_follows_its_formulas_in_any_chunks(with_mtp):
    variant, model, mtp = with_mtp
    config_json, input_ids = config_of(variant), random_ids(model, 14, seed=20)
    tensors = draw_tensors(config_json, seed=3)
    target = hybrid_oracle.run(config_json, tensors, input_ids)
    expected = hybrid_oracle.run_mtp(config_json, tensors, target["hidden"][:13], input_ids[1:])
    hidden = model.final_norm(model.forward(input_ids, make_cache(model, 20), StepKind.PREFILL))
    for sizes in ([13], [1] * 13, [6, 1, 4, 2]):
        cache, rows = make_cache(mtp, 20), []
        for h, next_ids in zip(hidden[:13].split(sizes), input_ids[1:].split(sizes), strict=True):
            rows.append(mtp.forward(h, next_ids, cache))
            cache.commit(len(next_ids), StepKind.PREFILL)
        actual = torch.cat(rows)
        torch.testing.assert_close(actual.double(), expected["hidden"], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(mtp.compute_logits(actual).double(), expected["logits"], rtol=0, atol=TOLERANCE)


def test_a_draft_chain_rolls_back_to_the_context_it_started_from(with_mtp):
    _, model, mtp = with_mtp
    cache, hidden = make_cache(mtp, 20), torch.randn(6, 40, generator=torch.Generator().manual_seed(21))
    token_ids = random_ids(model, 6, seed=22)
    mtp.forward(hidden[:4], token_ids[:4], cache)
    cache.commit(4, StepKind.PREFILL)
    expected = mtp.forward(hidden[4:5], token_ids[4:5], cache)
    chained = expected
    for token in token_ids[:3].split(1):
        cache.commit(1, StepKind.DECODE)
        chained = mtp.forward(chained, token, cache)
    assert chained.isfinite().all()
    cache.rollback(4)
    assert torch.equal(mtp.forward(hidden[4:5], token_ids[4:5], cache), expected)


def test_asking_a_model_for_an_mtp_layer_it_does_not_have_is_refused():
    config = BailingMoeV3Config.from_dict(config_of("ling") | {"num_nextn_predict_layers": 0})
    with pytest.raises(UnsupportedError, match="num_nextn_predict_layers"):
        BailingMoeV3MTP(BailingMoeV3ForCausalLM(config, RecordingSource()), RecordingSource())


def test_a_checkpoint_is_valid_with_and_without_its_mtp_layer(tmp_path):
    config_json = config_of("ling")
    config = BailingMoeV3Config.from_dict(config_json)
    found = tensor_shapes(config_json)
    mtp_names = [name for name in found if name.startswith("model.layers.7.")]
    assert len(mtp_names) == 2 + 3 + 1 + 6 + 2 + 3 * 16 + 3
    asked = RecordingSource()
    BailingMoeV3ForCausalLM(config, asked)
    check_tensors(BailingMoeV3ForCausalLM, config, asked, found, tmp_path)
    without = {name: shape for name, shape in found.items() if name not in mtp_names}
    check_tensors(BailingMoeV3ForCausalLM, config, asked, without, tmp_path)
    odd = found | {"model.layers.6.image_gate.weight": (4, 40)}
    with pytest.raises(CheckpointError, match=r"model\.layers\.6\.image_gate"):
        check_tensors(BailingMoeV3ForCausalLM, config, asked, odd, tmp_path)
