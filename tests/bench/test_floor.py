"""Prices of models without weights: the published byte tables and floors, within 2 %."""

import json
from pathlib import Path

import pytest

from soloist.bench.floor import RATES, FloorSettings, acceptance_length, as_json, in_words, price, read_distinct_experts
from soloist.cli import main
from soloist.doctor import cpu_name
from soloist.errors import UsageError
from soloist.hub import built_in_config
from soloist.models import find_model_class
from soloist.models.footprint import model_footprint


@pytest.fixture(scope="module")
def flash():
    config = built_in_config("ling-3.0-flash")
    model_class = find_model_class(config)
    return model_footprint(model_class, model_class.config_class.from_dict(config))


def settings(**changed) -> FloorSettings:
    fields = {"num_gpus": 1, "bandwidth_gb_per_s": 4300.0, "measured_on": None, "context_len": 8192}
    return FloorSettings(**(fields | changed))


# Part: GB read per token, of the public checkpoint in bfloat16.
READ_GB = {
    ("lm_head",): 0.805,
    ("kda.q_proj", "kda.k_proj", "kda.v_proj"): 2.202,
    ("kda.f_proj",): 0.734,
    ("kda.g_proj",): 0.734,
    ("kda.o_proj",): 0.734,
    ("mla.q_proj",): 0.220,
    ("mla.kv_a_proj_with_mqa", "mla.kv_a_layernorm"): 0.021,
    ("mla.kv_b_proj",): 0.059,
    ("mla.g_proj", "mla.dense"): 0.148,
    ("mlp",): 0.189,
    ("router",): 0.105,
    ("routed_experts",): 3.775,
    ("shared_experts",): 0.472,
}


def test_parts_read_the_published_bytes_per_token(flash):
    table = price("flash", flash, settings(context_len=0))
    read = {name: gb for name, _, gb in table.parts}
    for names, expected in READ_GB.items():
        assert sum(read[name] for name in names) == pytest.approx(expected, rel=0.02), names
    assert sum(read.values()) == pytest.approx(10.207, rel=0.02)
    assert table.widths[0].state_gb == pytest.approx(0.147 + 0.005, rel=0.02)
    assert table.parameters == 124_414_211_552


# Width: GB per GPU and floor in ms at 4300 GB/s, for 1, 2 and 4 GPUs, 8192 tokens.
FLOORS = {
    1: ((10.42, 2.42), (5.31, 1.23), (2.75, 0.64)),
    4: ((21.39, 4.98), (10.79, 2.51), (5.49, 1.28)),
    8: ((35.24, 8.20), (17.72, 4.12), (8.95, 2.08)),
    10: ((41.85, 9.73), (21.02, 4.89), (10.61, 2.47)),
    16: ((60.46, 14.06), (30.32, 7.05), (15.26, 3.55)),
}


@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_floors_are_the_published_ones(flash, num_gpus: int):
    table = price("flash", flash, settings(num_gpus=num_gpus))
    floors = {floor.width: (floor.gb_per_gpu, floor.step_ms) for floor in table.widths}
    for width, expected in FLOORS.items():
        assert floors[width] == pytest.approx(expected[(1, 2, 4).index(num_gpus)], rel=0.02)
    assert table.num_all_reduces == (0 if num_gpus == 1 else 86)


def test_exchanges_and_drafting_come_on_top(flash):
    plain = price("flash", flash, settings(num_gpus=4)).widths
    table = price("flash", flash, settings(num_gpus=4, all_reduce_us=2.5, draft_bytes=4.3e9)).widths
    assert table[0].step_ms == pytest.approx(plain[0].step_ms + 86 * 2.5e-3)
    # A width of one drafts nothing.
    assert table[3].step_ms == pytest.approx(plain[3].step_ms + 86 * 2.5e-3 + 1.0)


def test_the_published_floor_of_plain_decoding_with_exchanges(flash):
    floors = [price("f", flash, settings(num_gpus=n, all_reduce_us=2.5)).widths[0].step_ms for n in (1, 2, 4)]
    assert floors == pytest.approx([2.42, 1.45, 0.85], rel=0.02)


def test_the_best_width_grows_with_the_chance_that_a_draft_is_kept(flash):
    table = price("flash", flash, settings(num_gpus=4))
    assert list(table.best_widths) == sorted(table.best_widths)
    assert table.best_widths[0] < table.best_widths[-1]
    for i, rate in enumerate(RATES):
        tpots = {floor.width: floor.step_ms / acceptance_length(floor.width, rate) for floor in table.widths}
        assert table.best_widths[i] == min(tpots, key=tpots.get)
        assert table.widths[-1].tpot_ms[i] == pytest.approx(tpots[16])


def test_acceptance_length_is_a_geometric_sum():
    assert acceptance_length(4, 0.5) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert acceptance_length(9, 1.0) == 9.0 and acceptance_length(9, 0.0) == 1.0


def test_measured_experts_replace_the_expected_ones(flash, tmp_path: Path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"model": "m", "distinct_experts_by_width": {"1": 8.0, "4": 20.0, "7": 30.0}}))
    experts_of, distinct_experts = read_distinct_experts(path)
    table = price("flash", flash, settings(distinct_experts=distinct_experts, experts_of=experts_of))
    # A width that was not measured is not priced, and one that is no width of the table neither.
    assert [(floor.width, floor.distinct_experts) for floor in table.widths] == [(1, 8.0), (4, 20.0)]
    uniform = {floor.width: floor.experts_gb for floor in price("flash", flash, settings()).widths}
    assert table.widths[1].experts_gb == pytest.approx(uniform[4] * 20.0 / 31.3, rel=0.01)
    with pytest.raises(UsageError, match="are none of"):
        price("flash", flash, settings(distinct_experts={7: 30.0}))
    # Another model's.
    with pytest.raises(UsageError, match=r"600 experts in a step, and flash has 512 in a layer"):
        price("flash", flash, settings(distinct_experts={16: 600.0}))
    assert "experts of a layer as measured with m\n" in in_words(table)
    assert "experts chosen uniformly" in in_words(price("flash", flash, settings()))
    path.write_text("{}")
    with pytest.raises(UsageError, match="has no distinct_experts_by_width"):
        read_distinct_experts(path)


def test_the_command_prices_a_config_in_words_and_as_json(capsys: pytest.CaptureFixture[str]):
    words = ["bench", "--floor", "-m", "ling-3.0-flash", "--gpus", "4", "--bandwidth", "4300"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "best width" in text and "86 all-reduces per step" in text and "8192 tokens of context" in text
    assert main([*words, "--context", "0", "--all-reduce-us", "4.5", "--draft-gb", "0.5", "--json"]) == 0
    priced = json.loads(capsys.readouterr().out)
    assert priced["context_len"] == 0 and priced["kv_gb"] == 0
    assert priced["floor_step_ms_by_width"]["1"] == pytest.approx(0.62 + 86 * 4.5e-3, rel=0.02)
    assert priced["best_width_by_rate"]["0.5"] >= 1
    assert set(priced["floor_tpot_ms_by_rate"]["0.9"]) == set(priced["floor_step_ms_by_width"])
    assert priced["refusal"] is None


@pytest.mark.parametrize(("gpus", "why"), [("3", "allowed are 1, 2, 4, 8"), ("8", "allowed are 1, 2, 4")])
def test_a_number_of_gpus_that_the_engine_refuses_is_priced_and_said(gpus: str, why: str, capsys):
    model = "ling-3.0-flash" if gpus == "3" else "qwen2.5-coder-1.5b-instruct"
    assert main(["bench", "--floor", "-m", model, "--gpus", gpus, "--bandwidth", "4300"]) == 0
    out = capsys.readouterr().out
    assert f"on {gpus} GPUs" in out and "this engine refuses it" in out and why in out


def test_what_cannot_be_priced_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    floor = ["bench", "--floor", "-m", "qwen2.5-coder-0.5b-instruct"]
    assert main([*floor, "--bandwidth", "20", "--context", "-5"]) == 2
    assert "--context is -5; allowed: 0 and more" in capsys.readouterr().err
    assert main([*floor, "--bandwidth", "inf"]) == 2
    assert "--bandwidth is inf; allowed: a finite number" in capsys.readouterr().err
    assert main([*floor, "--bandwidth", "20", "--all-reduce-us", "3"]) == 2
    assert "add --gpus" in capsys.readouterr().err
    experts = tmp_path / "experts.json"
    experts.write_text('{"distinct_experts_by_width": {"4": 31.3}}')
    assert main([*floor, "--bandwidth", "20", "--experts", str(experts)]) == 2
    assert "has none: it was measured with another model" in capsys.readouterr().err
    # As many as this model could have.
    experts.write_text('{"model": "ling-3.0-tiny", "distinct_experts_by_width": {"4": 29.1}}')
    flash = ["bench", "--floor", "-m", "ling-3.0-flash", "--bandwidth", "20", "--experts", str(experts)]
    assert main(flash) == 2
    assert "--experts was measured with ling-3.0-tiny, and this is ling-3.0-flash" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main([*floor, "--device", "cuda"]) == 2
    assert "PyTorch sees 0 CUDA devices" in capsys.readouterr().err
    assert main([*floor, "--device", "cpu", "--bandwidth", "20"]) == 2
    assert "leave it out" in capsys.readouterr().err


def test_a_dense_model_is_priced_without_experts(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "--floor", "-m", "qwen2.5-coder-0.5b-instruct", "--bandwidth", "20", "--json"]) == 0
    priced = json.loads(capsys.readouterr().out)
    assert priced["distinct_experts_by_width"] == {} and priced["num_all_reduces"] == 0
    # Width costs a dense model nothing but a row of the embedding.
    assert priced["step_gb_by_width"]["16"] == pytest.approx(priced["step_gb_by_width"]["1"], rel=1e-3)


def test_a_measured_bandwidth_says_whose_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("soloist.roofline.measure_bandwidth", lambda device: 21.0)
    assert main(["bench", "--floor", "-m", "qwen2.5-coder-0.5b-instruct"]) == 0
    assert f"21 GB/s (measured on {cpu_name()})" in capsys.readouterr().out


def test_words_and_json_agree(flash):
    table = price("flash", flash, settings())
    assert f"{as_json(table)['floor_step_ms_by_width']['9']:.3f}" in in_words(table)


@pytest.mark.parametrize(
    "words",
    [["--gpus", "2"], ["--bandwidth", "100"], ["--draft-gb", "1"], ["--floor", "--against", "http://x"]],
)
def test_options_of_the_other_mode_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "-m", "ling-3.0-flash", *words]) == 2
    assert "--floor" in capsys.readouterr().err
