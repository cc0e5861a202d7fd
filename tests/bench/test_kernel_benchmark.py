"""The benchmark of kernels on its way: what it writes says when, where, by what command and of what version."""

import argparse
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

pytest.importorskip("triton")

import kernels_hybrid


def test_rows_are_written_with_all_that_says_where_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shape, rows = kernels_hybrid.SHAPES[0], []
    kernels_hybrid.record(rows, shape, "mla", 9, (20.0, 0.5), 43e6, 4300.0)
    monkeypatch.setattr(kernels_hybrid, "RESULTS", tmp_path)
    path = kernels_hybrid.write_rows(None, "NVIDIA H200", "0123abc", 4300.4, rows)
    assert path == tmp_path / "h200" / "kernels.json"
    written = json.loads(path.read_text())
    for name in ("date", "command", "torch", "triton", "soloist", "python", "device", "driver"):
        assert name in written
    assert kernels_hybrid.write_rows(tmp_path / "own", "NVIDIA H200", "a", 1.0, rows) == tmp_path / "own/kernels.json"
    assert written["case"] == "kernels" and written["commit"] == "0123abc" and written["bandwidth_gb_per_s"] == 4300
    (row,) = written["rows"]
    assert row["floor_us"] == 10.0 and row["share_of_floor"] == 0.5 and row["shape"] == "flash-tp1"
    assert "not_measured" not in written


def test_what_was_asked_for_and_is_not_there_is_said(tmp_path: Path):
    path = kernels_hybrid.write_rows(tmp_path, "NVIDIA H200", "a", 1.0, [], {"fla": "fla-core is not installed"})
    assert json.loads(path.read_text())["not_measured"] == {"fla": "fla-core is not installed"}


def test_a_name_that_is_not_known_is_refused():
    names = kernels_hybrid.names_of("moe", "kda")
    assert names("kda,moe") == ["kda", "moe"]
    with pytest.raises(argparse.ArgumentTypeError, match="mao; known are moe, kda"):
        names("moe,mao")
