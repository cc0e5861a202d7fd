"""The benchmark of full-size models, on a miniature and a CPU with a made-up clock: what it writes, and how often."""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import decode_gpu
import model_bench
import startup_gpu
from soloist.bench import prefill, steps
from soloist.bench.results import Result, at_bandwidth
from tests.miniature import miniature_config


def stamp(times: torch.Tensor, num_steps: torch.Tensor, *, is_end: bool) -> None:
    times[int(num_steps) % len(times), int(is_end)] = time.perf_counter_ns()
    num_steps += is_end


@pytest.fixture
def _miniature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(steps, "stamp", stamp)
    monkeypatch.setattr(steps, "_trace", lambda meter: (0.0, 1))
    monkeypatch.setattr(steps, "_TOKENS", 20)
    monkeypatch.setattr(steps, "_FEWEST_STEPS", 12)
    monkeypatch.setattr(prefill, "stamp", stamp)
    events = [(0, 1, "stamp_kernel"), (1, 2_000_000, "grouped_down_kernel")]
    monkeypatch.setattr(prefill, "trace_gpu", lambda run: run() or events)
    monkeypatch.setattr(model_bench, "measure_bandwidth", lambda device: 100.0)
    monkeypatch.setattr(model_bench, "load_model", partial(model_bench.load_model, dtype=torch.float32))
    monkeypatch.setattr(decode_gpu, "measure_prompt", partial(prefill.measure_prompt, meet=lambda: None))
    monkeypatch.setattr(decode_gpu, "ANSWER_TOKENS", 8)
    monkeypatch.setattr(decode_gpu, "NUM_STEPS", 14)


@pytest.mark.usefixtures("_miniature")
def test_cases_are_written_with_steps_prompts_and_answers_behind_each_context(tmp_path: Path):
    config = miniature_config("bailing_moe_v3")
    named = {
        "one-row": decode_gpu.Case(model="miniature", config=config, widths=(1,), context_lens=(30, 60)),
        "verify": decode_gpu.Case(model="miniature", config=config, widths=(2, 5), weights="shard", context_lens=(30,)),
        "widths": decode_gpu.Case(model="miniature", config=config, widths=(1, 4), context_lens=(30,)),
    }
    decode_gpu.run(list(named.items()), tmp_path, "none", "cpu", room=300)
    one_row, verify, widths = (json.loads((tmp_path / f"{name}.json").read_text()) for name in named)
    for result in (one_row, verify):
        assert result["commit"] == "none" and result["model"] == "miniature" and result["share_of_floor"] > 0
        assert result["details"]["prompt"]["kernel_ms"] == {"experts": 2.0}
    assert one_row["context_len"] == 60 and one_row["weights"] == "random"
    assert list(one_row["details"]["tpot_ms_by_context_len"]) == ["30", "60"]
    assert one_row["tpot_ms_median"] == one_row["details"]["tpot_ms_by_context_len"]["60"] > 0
    # Of requests, as the median is, and not of the gaps between their tokens.
    assert one_row["tpot_ms_p10"] <= one_row["tpot_ms_median"] <= one_row["tpot_ms_p90"]
    assert one_row["tpot_ms_p10"] <= one_row["tpot_ms_mean"] <= one_row["tpot_ms_p90"]
    assert [row["width"] for row in verify["details"]["rows"]] == [2, 5] and verify["weights"] == "shard"
    assert list(verify["step_ms_by_width"]) == list(verify["distinct_experts_by_width"]) == ["2", "5"]
    assert [row["mean_width"] for row in verify["details"]["rows"]] == [2, 5]
    assert "tpot_ms_median" not in verify and verify["width"] == 5
    experts = verify["distinct_experts_by_width"]
    assert experts["5"] > experts["2"] > 1
    # Steps of one row beside the answers that are made of them, and nothing of the other widths but by width.
    plain, wide = widths["details"]["rows"]
    assert widths["width"] == 1 and widths["details"]["mean_width"] == 1 and widths["tpot_ms_median"] > 0
    assert widths["step_ms_median"] == widths["step_ms_by_width"]["1"] == plain["step_ms"]["median"]
    for name in ("floor_step_ms", "share_of_floor", "host_us_per_step", "launches_per_step"):
        assert widths[name] == plain[name]
    assert widths["floor_step_ms_by_width"] == {"1": plain["floor_step_ms"], "4": wide["floor_step_ms"]}


@pytest.mark.usefixtures("_miniature")
def test_floors_are_of_the_largest_bandwidth_of_a_run_also_in_files_written_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = miniature_config("bailing_moe_v3")
    cases = [
        (name, decode_gpu.Case(model="miniature", config=config, widths=widths, context_lens=(30,)))
        for name, widths in (("first", (1, 3)), ("second", (2,)))
    ]
    written: dict[str, list[float]] = {"first": [], "second": []}
    write = model_bench.write_result

    def note(result: Result, *args: Any) -> None:
        written[result.case].append(result.bandwidth_gb_per_s)
        write(result, *args)

    monkeypatch.setattr(model_bench, "write_result", note)
    # The first is disturbed; the best comes while the second case is measured, and one behind it is worse again.
    found = iter([50.0, *[80.0] * 5, 100.0, *[90.0] * 9])
    monkeypatch.setattr(model_bench, "measure_bandwidth", lambda device: next(found))
    decode_gpu.run(cases, tmp_path, "none", "cpu", room=300)
    assert written == {"first": [80.0, 80.0, 80.0, 100.0], "second": [100.0, 100.0]}
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name, _ in cases)
    assert first["bandwidth_gb_per_s"] == second["bandwidth_gb_per_s"] == 100.0
    # Two rows read more than one: priced alike, and the same bytes as in the file that was written once.
    assert first["floor_step_ms_by_width"]["3"] > second["floor_step_ms"] > first["floor_step_ms"]
    for result in (first, second):
        for row in result["details"]["rows"]:
            assert row["share_of_floor"] == pytest.approx(row["floor_step_ms"] / row["step_ms"]["median"])
            assert row["floor_step_ms"] == pytest.approx(result["floor_step_ms_by_width"][str(row["width"])])
    assert first["share_of_floor"] == pytest.approx(first["floor_step_ms"] / first["step_ms_median"])


def test_a_result_at_a_larger_bandwidth_has_smaller_floors_wherever_they_stand():
    fields = {"model": "m", "device": "d", "command": "c", "weights": "random", "dtype": "bfloat16"}
    figures = {"floor_step_ms": 1.0, "share_of_floor": 0.5, "bandwidth_gb_per_s": 40.0, "step_ms_median": 2.0}
    details = {
        "rows": [{"floor_step_ms": 1.0, "width": 3}],
        "ngram": {"floor_step_ms": {"4": 2.0}, "step_ms": {"4": 3.0}},
    }
    rung = Result(case="rung", **fields, **figures)
    result = Result(
        case="ladder", **fields, **figures, rungs=(rung,), floor_step_ms_by_width={"1": 1.0}, details=details
    )
    priced = at_bandwidth(result, 50.0)
    assert (priced.bandwidth_gb_per_s, priced.floor_step_ms, priced.share_of_floor) == (50.0, 0.8, 0.4)
    assert priced.step_ms_median == 2.0 and priced.floor_step_ms_by_width == {"1": 0.8}
    assert priced.details["rows"] == [{"floor_step_ms": 0.8, "width": 3}]
    assert priced.details["ngram"] == {"floor_step_ms": {"4": 1.6}, "step_ms": {"4": 3.0}}
    assert (priced.rungs[0].bandwidth_gb_per_s, priced.rungs[0].floor_step_ms) == (50.0, 0.8)
    assert at_bandwidth(result, 30.0) is result and details["rows"][0]["floor_step_ms"] == 1.0


def test_the_first_start_is_told_from_the_median_of_the_others():
    starts = [{"first_token_s": s, "end_s": 9.0} for s in (9.6, 5.5, 5.1, 5.3)]
    summary = startup_gpu.summarise(starts)
    assert (summary["cold_first_token_s"], summary["warm_first_token_s_median"]) == (9.6, 5.3)
    assert summary["warm_first_token_s_range"] == (5.1, 5.5) and summary["starts"] == starts
    assert startup_gpu.WARM_STARTS >= 3
