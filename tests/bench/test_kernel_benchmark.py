"""The benchmark of kernels on its way: every part on the CPU with a made-up clock, and what is written of it."""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

pytest.importorskip("triton")

import chains
import dense_maps
import kernel_rows
import kernels
import kernels_dense
import kernels_hybrid
import kernels_small
from kernel_rows import WIDTHS, KernelRows
from soloist.kernels.launch import IS_INTERPRETED

CPU = torch.device("cpu")
# Parts whose sizes are not those of `Sizes`.
DENSE = ("linear", "attention")
SMALL = kernels_small.Sizes(D=64, H=2, K=32, E=16, N=300, L=2, S=40)


@pytest.fixture
def bandwidths(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the next measurements of the bandwidth find; without any it is 4300."""
    found: list[float] = []
    monkeypatch.setattr(kernel_rows, "measure_bandwidth", lambda device: found.pop(0) if found else 4300.4)
    return found


def make_rows(folder: Path | None) -> KernelRows:
    return KernelRows(CPU, folder, "0123abc")


@pytest.mark.usefixtures("bandwidths")
def test_rows_are_written_with_all_that_says_where_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_rows, "RESULTS", tmp_path)
    monkeypatch.setattr(kernel_rows, "device_name", lambda device: "NVIDIA H200")
    rows = make_rows(None)
    rows.add("flash-tp1", "mla", 9, (20.0, 0.5), 43.004e6, cublas_us=3.5)
    path = rows.write()
    assert path == tmp_path / "h200" / "kernels.json"
    written = json.loads(path.read_text())
    for name in ("date", "command", "torch", "triton", "soloist", "python", "device", "driver"):
        assert name in written
    assert make_rows(tmp_path / "own").write() == tmp_path / "own/kernels.json"
    assert written["case"] == "kernels" and written["commit"] == "0123abc" and written["bandwidth_gb_per_s"] == 4300
    (row,) = written["rows"]
    assert row["floor_us"] == 10.0 and row["share_of_floor"] == 0.5 and row["shape"] == "flash-tp1"
    assert row["width"] == 9 and row["kernel_us"] == 20.0 and row["cublas_us"] == 3.5
    assert "not_measured" not in written


def test_floors_are_of_the_largest_bandwidth_of_the_run(tmp_path: Path, bandwidths: list[float]):
    bandwidths += [1000.0, 2000.0, 1500.0]
    rows = make_rows(tmp_path)
    rows.add("x", "y", 1, (20.0, 0.5), 20e6)
    assert json.loads(rows.write().read_text())["rows"][0]["floor_us"] == 20.0
    for _ in range(2):
        rows.measure_bandwidth()
    written = json.loads(rows.write().read_text())
    assert written["bandwidth_gb_per_s"] == 2000 and written["rows"][0]["floor_us"] == 10.0


@pytest.mark.usefixtures("bandwidths")
def test_what_does_not_equal_its_reference_is_not_timed(tmp_path: Path):
    rows = make_rows(tmp_path)
    rows.check("fine", 1, 1e-2, 1e-5)
    for errors in ((3e-2, 0.0), (0.0, 1e-3), (float("nan"), 0.0)):
        with pytest.raises(AssertionError, match="wrong"):
            rows.check("wrong", 1, *errors)


@pytest.fixture
def _made_up_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_once(calls: list[Callable[[], object]], replays: int = 7) -> tuple[float, float]:
        for call in calls:
            call()
        return 2.0, 0.1

    monkeypatch.setattr(chains, "DEVICE", "cpu")
    for module in (kernels_dense, kernels_small):
        monkeypatch.setattr(module, "time_chain", run_once)
    monkeypatch.setattr(kernels_small, "NUM_CALLS", 2)
    monkeypatch.setattr(kernels_small, "COLD_BYTES", 1)
    monkeypatch.setattr(dense_maps, "COLD_BYTES", 1)
    maps = (("qwen qkv", "norm"), ("qwen o", "residual"), ("ling gate_up", "swiglu"), ("ling head", "argmax"))
    problems = [dense_maps.make_problem(name, kind, 128, 64) for name, kind in maps]
    monkeypatch.setattr(kernels_dense, "PROBLEMS", problems)
    for name, value in {"NUM_HEADS": 4, "HEAD_DIM": 16, "NUM_LAYERS": 2, "CONTEXT_LEN": 40}.items():
        monkeypatch.setattr(kernels_dense, name, value)
    small = {name: partial(part, sizes=SMALL) for name, part in kernels.PARTS.items() if name not in DENSE}
    monkeypatch.setattr(kernels, "PARTS", kernels.PARTS | small)


@pytest.mark.skipif(not IS_INTERPRETED, reason="where there is a GPU its kernels take nothing from the CPU")
@pytest.mark.usefixtures("_made_up_clock", "bandwidths")
def test_every_operator_is_written_by_width_into_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done: list[tuple[str, str]] = []

    def of_shape(name: str) -> Callable[[kernels_hybrid.Shape, KernelRows], None]:
        def part(shape: kernels_hybrid.Shape, rows: KernelRows) -> None:
            # What the parts before it found is there already.
            assert len(json.loads((tmp_path / "kernels.json").read_text())["rows"]) > 40
            done.append((name, shape.name))
            rows.add(shape.name, name, 1, (5.0, 0.1), 1e6)

        return part

    # These take kernels of a GPU.
    monkeypatch.setattr(kernels, "PARTS_BY_SHAPE", {name: of_shape(name) for name in kernels.PARTS_BY_SHAPE})
    monkeypatch.setattr(kernels_hybrid, "HAS_FLA", True)
    shapes = [shape for shape in kernels_hybrid.SHAPES if shape.name in ("flash-tp2", "tiny")]
    kernels.measure(make_rows(tmp_path), [*kernels.PARTS, *kernels.PARTS_BY_SHAPE], shapes)
    # Two shapes with as many heads are one to the peer.
    assert done == [
        *((name, shape) for name in ("moe", "kda", "mla") for shape in ("flash-tp2", "tiny")),
        ("fla", "flash-tp2"),
    ]
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    widths: dict[str, list[int]] = {}
    for row in rows:
        assert row["kernel_us"] > 0 and row["floor_us"] >= 0 and row["bytes"] > 0
        widths.setdefault(row["operator"], []).append(row["width"])
    every, of_drafts = list(WIDTHS), list(WIDTHS[1:])
    for operator in ("linear qkv", "linear o", "linear gate_up", "head", "attention", "norm", "gated norm", "router"):
        assert widths.pop(operator) == every, operator
    for operator in ("likeliest token", "draw from all", "draw from top-k and top-p", "accept and publish"):
        assert widths.pop(operator) == every, operator
    for operator in ("draft attention", "draft context", "embedding, of two ranks"):
        assert widths.pop(operator) == every, operator
    for operator in ("lookup", "lookup, history", "adaptive width"):
        assert widths.pop(operator) == of_drafts, operator
    assert widths.pop("attention of a prompt") == [40]
    assert set(widths) == {"moe", "kda", "mla", "fla"}
    head = next(row for row in rows if row["operator"] == "head")
    assert head["shape"] == "flash-tp1" and head["bytes"] == 2 * 128 * 64 and head["cublas_us"] == 2.0


@pytest.mark.usefixtures("bandwidths")
def test_what_was_asked_for_and_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels_hybrid, "HAS_FLA", False)
    monkeypatch.setattr(kernels, "PARTS", {"norm": lambda rows: rows.add("x", "norm", 1, (1.0, 0.0), 1.0)})
    kernels.measure(make_rows(tmp_path), ["norm", "fla"], [])
    not_measured = json.loads((tmp_path / "kernels.json").read_text())["not_measured"]
    assert not_measured == {"fla": "fla-core is not installed: nothing to compare KDA with"}


def test_a_name_that_is_not_known_is_refused():
    names = kernels.names_of("moe", "kda")
    assert names("kda,moe") == ["kda", "moe"]
    with pytest.raises(argparse.ArgumentTypeError, match="mao; known are moe, kda"):
        names("moe,mao")
