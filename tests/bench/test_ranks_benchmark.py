"""The benchmark of several GPUs, on ranks of a CPU: every part runs and ranks stay in step."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import decode_tp_gpu
import product_tp_gpu
from soloist.cli import main
from tests.tiny_model import write_tiny_model


def read(folder: Path, case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "cpu" / f"miniature-tp2-{case}.json").read_text())
    return found


@pytest.mark.timeout(300)
def test_two_ranks_measure_steps_answers_prompt_and_ladder(tmp_path: Path):
    command = [sys.executable, "-m", "tests.bench.ranks_program", str(tmp_path), "nodraft", "mtp", "ladder"]
    assert decode_tp_gpu.start_ranks(2, command, limit_s=280) == 0

    plain, mtp, ladder = (read(tmp_path, case) for case in ("nodraft", "mtp", "ladder"))
    replicated = read(tmp_path, "mtp-replicated")
    assert plain["tensor_parallel_size"] == 2 and plain["commit"] == "none"
    assert plain["tpot_ms_at"].keys() == {"1@1"} and plain["output_tok_per_s"] > 0
    assert plain["details"]["one_gpu"]["take"].startswith(("2 GPUs", "one GPU"))
    assert plain["details"]["prompt"]["launches"] == 2
    assert plain["tpot_ms_p10"] <= plain["tpot_ms_median"] <= plain["tpot_ms_p90"]
    sampled = plain["details"]["sampled"]
    assert (sampled["temperature"], sampled["top_p"]) == (0.8, 0.95) and sampled["step_ms_median"] > 0
    assert sampled["gather_us_by_width"].keys() == {"1", "16"} and min(sampled["gather_us_by_width"].values()) > 0

    assert mtp["tpot_ms_at"].keys() == {"3.25@6"} and mtp["acceptance_simulated"]
    assert mtp["step_ms_by_width"].keys() == mtp["floor_step_ms_by_width"].keys() == {"6"}
    (row,) = mtp["details"]["rows"]
    # Steps are timed as drafts are verified; lots are of the answers.
    assert row["mean_width"] == 6 and row["acceptance_length"] < 2 < mtp["acceptance_length"]

    assert mtp["details"]["draft_layers"] == "sharded" and replicated["details"]["draft_layers"] == "replicated"
    # A whole layer is read instead of half of one.
    assert replicated["details"]["rows"][0]["floor_step_ms"] > row["floor_step_ms"]

    switches = [rung["case"] for rung in ladder["rungs"]]
    assert switches[1:] == ["--fused-moe", "--graph", "--run-ahead 2", "--pdl", "--draft dspark"]
    assert ladder["rungs"][-1]["width"] == 16


@pytest.mark.parametrize(
    ("program", "limit_s"),
    [("time.sleep(60 * rank); 1 / 0", 60.0), ("time.sleep(60 * rank)", 2.0)],
    ids=["one fails", "one ends and the other hangs"],
)
def test_ranks_end_together(program: str, limit_s: float, capfd: pytest.CaptureFixture[str]):
    started_s = time.monotonic()
    command = [sys.executable, "-c", f"import os, time; rank = int(os.environ['RANK']); {program}"]
    assert decode_tp_gpu.start_ranks(2, command, limit_s=limit_s) != 0
    assert time.monotonic() - started_s < 20
    assert ("not done after 2 s" in capfd.readouterr().err) == (limit_s == 2.0)


def test_the_product_is_measured_beside_the_steps_of_ranks(tmp_path: Path):
    model = write_tiny_model(tmp_path / "tiny")
    steps = {"commit": "none", "step_ms_median": 0.5, "tpot_ms_mean": 0.75}
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "tiny-tp2-nodraft.json").write_text(json.dumps(steps))
    sizes = ["--context", "256", "--threads", "1"]
    asked = product_tp_gpu.Asked(
        model=str(model), num_ranks=2, device="cpu", input_tokens=40, output_tokens=12, repeats=2, more=sizes
    )
    path = product_tp_gpu.measure(asked, tmp_path, "none", limit_s=100)
    assert path == tmp_path / "cpu" / "tiny-tp2-product.json"
    result = json.loads(path.read_text())
    assert result["case"] == "tiny-tp2-product" and result["commit"] == "none" and result["weights"] == "random"
    assert result["tensor_parallel_size"] == 2 and result["details"]["cold"]["ttft_ms"] > 0
    beside = result["details"]["nodraft"]
    assert beside["step_ms_median"] == 0.5 and beside["commit"] == "none"
    assert beside["tpot_over_step_ms"] == pytest.approx(result["tpot_ms_median"] - 0.5, abs=1e-3)


def test_the_command_says_where_one_is_faster_than_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_tiny_model(tmp_path)
    sizes = ["--input-tokens", "40", "--output-tokens", "12", "--repeats", "1", "-t", "1", "-c", "256", "--json"]
    assert main(["bench", "-m", str(tmp_path), "--tensor-parallel-size", "2", *sizes]) == 0
    said = capsys.readouterr()
    rungs = json.loads(said.out)["rungs"]
    assert [rung["tensor_parallel_size"] for rung in rungs] == [1, 2]
    assert "times the speed of one alone" in said.err
    is_slower = rungs[1]["tpot_ms_mean"] > rungs[0]["tpot_ms_mean"]
    assert ("leave --tensor-parallel-size out" in said.err) == is_slower
