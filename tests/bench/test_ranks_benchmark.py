"""The benchmark of several GPUs, on ranks of a CPU: every part runs and ranks stay in step."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from soloist.cli import main
from tests.bench.ranks_program import decode_tp_gpu
from tests.tiny_model import write_tiny_model


def read(folder: Path, case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "cpu" / f"miniature-tp2-{case}.json").read_text())
    return found


def test_two_ranks_measure_steps_answers_prompt_and_ladder(tmp_path: Path):
    command = [sys.executable, "-m", "tests.bench.ranks_program", str(tmp_path), "nodraft", "mtp", "ladder"]
    assert decode_tp_gpu.start_ranks(2, command) == 0

    plain, mtp, ladder = (read(tmp_path, case) for case in ("nodraft", "mtp", "ladder"))
    assert plain["tensor_parallel_size"] == 2 and plain["commit"] == "none"
    assert plain["tpot_ms_at"].keys() == {"1@1"} and plain["output_tok_per_s"] > 0
    assert plain["details"]["one_gpu"]["take"].startswith(("2 GPUs", "one GPU"))
    assert plain["details"]["prompt"]["launches"] == 2

    assert mtp["tpot_ms_at"].keys() == {"3.25@6"} and mtp["acceptance_simulated"]
    assert mtp["step_ms_by_width"].keys() == mtp["floor_step_ms_by_width"].keys() == {"6"}
    (row,) = mtp["details"]["rows"]
    # Steps are timed as drafts are verified; lots are of the answers.
    assert row["mean_width"] == 6 and row["acceptance_length"] < 2 < mtp["acceptance_length"]

    switches = [rung["case"] for rung in ladder["rungs"]]
    assert switches[1:] == ["--fused-moe", "--graph", "--run-ahead 2", "--pdl", "--draft dspark"]
    assert ladder["rungs"][-1]["width"] == 16


def test_a_rank_that_fails_ends_the_others(tmp_path: Path):
    assert decode_tp_gpu.start_ranks(
        2, [sys.executable, "-c", "import os, time; time.sleep(60 * int(os.environ['RANK'])); 1 / 0"]
    )


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
