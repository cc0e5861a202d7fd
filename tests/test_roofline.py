"""The byte arithmetic against the published tables, and against weights that are really there."""

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch

from soloist import roofline
from soloist.models import MODELS, load_model
from soloist.models.bailing_moe_v3 import BailingMoeV3ForCausalLM, BailingMoeV3MTP
from soloist.models.footprint import CountingSource, model_footprint
from soloist.models.loader import Placement, RandomSource
from soloist.models.weights import RecordingSource
from soloist.roofline import Footprint, Reads, expected_distinct_experts, floor_ms, measure_bandwidth
from tests.miniature import FAMILIES, miniature_config

NAMES = sorted(path.stem for path in (resources.files("soloist") / "configs").iterdir() if path.suffix == ".json")


def read_config(name: str) -> dict:
    return json.loads((resources.files("soloist") / "configs" / f"{name}.json").read_text())


def footprint_of(config_json: dict, dtype: torch.dtype = torch.bfloat16) -> Footprint:
    model_class = MODELS[config_json["architectures"][0]]
    return model_footprint(model_class, model_class.config_class.from_dict(config_json), dtype=dtype)


@pytest.fixture(scope="module")
def flash():
    return footprint_of(read_config("ling-3.0-flash"))


@pytest.fixture(scope="module")
def tiny():
    return footprint_of(read_config("ling-3.0-tiny"))


# Parameters by part, as published for flash.
FLASH_PARTS = {
    ("embedding",): 402_391_040,
    ("lm_head",): 402_391_040,
    ("kda.q_proj", "kda.k_proj", "kda.v_proj"): 1_101_004_800,
    ("kda.f_proj",): 367_001_600,
    ("kda.g_proj",): 367_001_600,
    ("kda.o_proj",): 367_001_600,
    (
        "kda.b_proj",
        "kda.q_conv1d",
        "kda.k_conv1d",
        "kda.v_conv1d",
        "kda.A_log",
        "kda.dt_bias",
        "kda.o_norm",
    ): 4_736_480,
    ("mla.q_proj",): 110_100_480,
    ("mla.kv_a_proj_with_mqa", "mla.kv_a_layernorm"): 10_325_504,
    ("mla.kv_b_proj",): 29_360_128,
    ("mla.g_proj", "mla.dense"): 73_973_760,
    ("mlp",): 94_371_840,
    ("router",): 52_449_280,
    ("routed_experts",): 120_795_955_200,
    ("shared_experts",): 235_929_600,
    ("norms",): 217_600,
}


def test_flash_has_the_published_parts(flash):
    parts = {part.name: part for part in flash.parts}
    assert set(parts) == {name for names in FLASH_PARTS for name in names}
    assert {names: sum(parts[name].parameters for name in names) for names in FLASH_PARTS} == FLASH_PARTS
    # bf16, but for A_log, dt_bias and expert_bias.
    num_fp32 = 35 * (32 + 4096) + 40 * 512
    assert flash.weight_bytes == 2 * 124_414_211_552 + 2 * num_fp32


def test_bytes_per_token_are_the_published_ones(flash, tiny):
    kimi = footprint_of(read_config("kimi-linear-48b-a3b"))
    assert flash.bytes_per_token == pytest.approx(10.207e9, rel=1e-3)
    assert tiny.bytes_per_token == pytest.approx(2.281e9, rel=1e-3)
    assert kimi.bytes_per_token == pytest.approx(6.21e9, rel=2e-3)
    assert (flash.parameters, tiny.parameters, kimi.parameters) == (124_414_211_552, 7_893_392_800, 49_122_681_728)


def test_state_and_cache_are_the_published_ones(flash, tiny):
    assert (flash.state_bytes, flash.conv_state_bytes, flash.kv_bytes_per_position) == (73_400_320, 2_580_480, 8_064)
    assert (tiny.state_bytes, tiny.conv_state_bytes, tiny.kv_bytes_per_position) == (18_874_368, 663_552, 6_912)
    step = flash.step_bytes(context_len=131_072)
    assert step.state == 2 * (73_400_320 + 2_580_480)
    assert step.kv == pytest.approx(1.06e9, rel=5e-3)


@pytest.mark.parametrize(
    ("width", "of_512", "of_128"),
    [(1, 8, 8), (2, 15.9, 15.5), (4, 31.3, 29.1), (6, 46.2, 41.1), (9, 67.7, 56.4), (16, 114, 82.4)],
)
def test_distinct_experts_under_uniform_routing_are_the_published_ones(flash, tiny, width, of_512, of_128):
    assert flash.distinct_experts(width) == pytest.approx(of_512, abs=0.06)
    assert tiny.distinct_experts(width) == pytest.approx(of_128, abs=0.06)


def test_the_expectation_of_distinct_experts_is_that_of_a_simulation():
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(3000, 5, 24, generator=generator).argsort(dim=-1)[..., :3]
    mean = torch.tensor([len(d.unique()) for d in draws], dtype=torch.float64).mean().item()
    assert expected_distinct_experts(24, 3, 5) == pytest.approx(mean, rel=0.01)


# Width: GB a GPU moves at TP 1, 2, 4, context 8192.
STEP_GB = {
    1: (10.42, 5.31, 2.75),
    4: (21.39, 10.79, 5.49),
    8: (35.24, 17.72, 8.95),
    10: (41.85, 21.02, 10.61),
    16: (60.46, 30.32, 15.26),
}


@pytest.mark.parametrize("width", STEP_GB)
def test_a_steps_bytes_are_the_published_ones_at_every_width_and_tensor_parallel_size(flash, width):
    sizes = [flash.step_bytes(width, 8192, tensor_parallel_size=tp).total / 1e9 for tp in (1, 2, 4)]
    assert sizes == pytest.approx(STEP_GB[width], rel=2e-3)


@pytest.mark.parametrize(
    ("width", "tensor_parallel_size", "expected_ms"),
    [(10, 4, 2.87), (16, 4, 3.96), (10, 2, 5.46), (16, 2, 7.62), (10, 1, 10.38), (16, 1, 14.71)],
)
def test_the_floor_of_a_step_with_a_draft_is_the_published_one(flash, width, tensor_parallel_size, expected_ms):
    # A draft of 2 GB that reads the output head once, five layers, 2.5 us per exchange; one GPU exchanges nothing.
    floor = flash.step_floor_ms(
        width,
        8192,
        bandwidth_gb_per_s=4300,
        tensor_parallel_size=tensor_parallel_size,
        draft_bytes=2.805e9 / tensor_parallel_size,
        all_reduce_us=2.5,
    )
    draft_ms = 12 * 2.5e-3 if tensor_parallel_size > 1 else 0
    assert floor + draft_ms == pytest.approx(expected_ms, rel=0.01)


def test_the_floor_of_plain_decoding_is_the_published_one(flash):
    floors = [
        flash.step_floor_ms(1, 8192, bandwidth_gb_per_s=4300, tensor_parallel_size=tp, all_reduce_us=2.5)
        for tp in (1, 2, 4)
    ]
    assert floors == pytest.approx([2.42, 1.45, 0.85], rel=0.01)
    assert (flash.num_all_reduces(1), flash.num_all_reduces(2)) == (0, 86)


def test_the_mtp_layer_reads_the_published_bytes():
    model_class = BailingMoeV3ForCausalLM
    target = model_class(model_class.config_class.from_dict(read_config("ling-3.0-flash")), RecordingSource())
    counted = CountingSource(RecordingSource())
    mtp = BailingMoeV3MTP(target, counted)
    footprint = counted.footprint(mtp.make_cache(1), target.config, num_layers=1)
    assert footprint.parameters == 3_072_194_048
    assert footprint.bytes_per_token == pytest.approx(0.199e9, rel=5e-3)
    assert footprint.kv_bytes_per_position == 1152


def test_counting_a_model_does_not_wait_for_the_compiler():
    # On the meta device some operators import torch._dynamo, which takes seconds; every load counts its model first.
    script = """
import sys
from soloist.models import MODELS
from soloist.models.footprint import model_footprint
from tests.miniature import FAMILIES, miniature_config
for config_json in map(miniature_config, FAMILIES):
    model_class = MODELS[config_json["architectures"][0]]
    model_footprint(model_class, model_class.config_class.from_dict(config_json))
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1])


def test_a_measured_number_of_experts_replaces_the_expected_one(flash):
    uniform, measured = flash.step_bytes(9), flash.step_bytes(9, distinct_experts=50.0)
    assert measured.weights == uniform.weights
    assert measured.routed_experts == pytest.approx(40 * 50 * 11.796e6, rel=1e-3)
    assert measured.routed_experts < uniform.routed_experts


@pytest.mark.parametrize("family", FAMILIES)
def test_the_count_of_a_config_is_that_of_the_model_it_describes(family, tmp_path):
    config_json = miniature_config(family)
    footprint = footprint_of(config_json, torch.float32)
    model = load_model(config_json, dtype=torch.float32, weights="random")
    assert footprint.weight_bytes == model.report.weight_bytes
    assert footprint == model.footprint
    cache = model.make_cache(11)
    rows = [t for t in ((cache.kv.k, cache.kv.v) if cache.kv else ()) if t is not None]
    rows += [cache.latent.latent] if cache.latent else []
    assert 11 * footprint.kv_bytes_per_position == sum(4 * t.numel() for t in rows)


@pytest.mark.parametrize("packing", ["int4", "int8", "fp16"])
def test_counting_around_a_real_source_gives_the_bytes_it_holds(packing):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "tie_word_embeddings": True}
    config_json = miniature_config("llama", vocab_size=256, **sizes)
    source = RandomSource(0, Placement(device=torch.device("cpu"), dtype=torch.bfloat16, packing=packing))
    counted = CountingSource(source)
    model_class = MODELS["LlamaForCausalLM"]
    model = model_class(model_class.config_class.from_dict(config_json), counted)
    footprint = counted.footprint(model.make_cache(1), model.config, num_layers=3)
    assert footprint.weight_bytes == source.report().weight_bytes
    assert footprint.parameters == footprint_of(config_json).parameters
    # Everything but the table is read once, and one row of that.
    assert footprint.bytes_per_token == footprint.weight_bytes - 2 * 256 * 64 + 2 * 64


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_output_head_is_read_whole_whether_it_is_tied_or_not(family):
    config_json = miniature_config(family)
    tied, untied = (footprint_of(config_json | {"tie_word_embeddings": tie}) for tie in (True, False))
    assert tied.bytes_per_token == untied.bytes_per_token
    head_bytes = 2 * config_json["vocab_size"] * config_json["hidden_size"]
    assert untied.weight_bytes - tied.weight_bytes == head_bytes
    assert untied.parameters - tied.parameters == head_bytes // 2


def test_keys_and_values_are_shared_by_no_more_gpus_than_there_are_heads():
    footprint = footprint_of(read_config("qwen2.5-coder-0.5b-instruct"))
    position = 24 * 2 * 2 * 64 * 2
    kv = [footprint.step_bytes(context_len=100, tensor_parallel_size=tp).kv for tp in (1, 2, 4)]
    assert kv == [100 * position, 50 * position, 50 * position]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m-instruct", 134_515_008),
        ("qwen2.5-coder-0.5b-instruct", 494_032_768),
        ("qwen2.5-coder-1.5b-instruct", 1_543_714_304),
        ("qwen3-4b", 4_022_468_096),
    ],
)
def test_the_small_models_have_their_published_parameters(name, parameters):
    assert footprint_of(read_config(name)).parameters == parameters


@pytest.mark.parametrize("name", NAMES)
def test_every_built_in_config_is_described(name):
    described = json.loads(json.dumps(footprint_of(read_config(name)).describe()))
    weight_bytes = described["weight_bytes"]
    assert weight_bytes["total"] == sum(size for part, size in weight_bytes.items() if part != "total")
    # A tied table is read whole as the head, and one row of it as the embedding.
    row_bytes = 2 * read_config(name)["hidden_size"]
    assert 0 < described["bytes_per_token"] <= weight_bytes["total"] + row_bytes
    assert described["bytes_by_width"]["16"] > described["bytes_by_width"]["1"] > 0
    assert (described["state_bytes"] > 0) == (
        MODELS[read_config(name)["architectures"][0]].__module__.endswith(("bailing_moe_v3", "kimi_linear"))
    )


def test_an_embedding_is_read_by_the_row():
    footprint = footprint_of(miniature_config("llama"))
    (embedding,) = (part for part in footprint.parts if part.reads is Reads.ROW)
    assert embedding.name == "embedding"
    extra = footprint.step_bytes(6).weights - footprint.step_bytes(1).weights
    assert extra == pytest.approx(5 * 60 * 2)


def test_a_floor_is_bytes_over_bandwidth():
    assert floor_ms(4.5e9, 4500) == pytest.approx(1.0)


def test_bandwidth_is_measured_on_what_is_read(monkeypatch):
    ticks = iter([0.0, 0.5, 1.0, 1.25, 2.0, 2.5])
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: next(ticks))
    # The best of three: 2^20 bytes in a quarter of a second.
    assert measure_bandwidth("cpu", num_bytes=2**20, repeats=3) == pytest.approx(2**20 / 0.25 / 1e9)
    monkeypatch.undo()
    assert 0.1 < measure_bandwidth("cpu", num_bytes=2**24, repeats=3) < 5000
