"""The benchmark of kernels on its way: what it writes says when, where, by what command and of what version."""

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
