"""Results have the same fields whoever measured; two of them can be compared; a ladder can be drawn."""

import json
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from soloist.bench.chart import Bar, ladder_svg
from soloist.bench.report import bars_of, compare_in_words, compared, read_result
from soloist.bench.results import Peer, Result, commit, machine_folder, write_result
from soloist.cli import main
from soloist.errors import UsageError
from tests.bench.test_remote import FakeServer, fake  # noqa: F401
from tests.models.real_models import SMOLLM2, find_real_model
from tests.tiny_model import write_tiny_model


def result(**changed) -> Result:
    fields = {"case": "ling3-tiny-nodraft", "model": "ling-3.0-tiny", "device": "NVIDIA H200", "command": "bench"}
    return Result(**(fields | {"weights": "random", "dtype": "bfloat16"} | changed))


def test_a_result_file_holds_what_was_measured_and_where(tmp_path: Path):
    path = write_result(result(tpot_ms_median=0.9, step_ms_by_width={"4": 1.5}), tmp_path / "new")
    assert path == tmp_path / "new" / "ling3-tiny-nodraft.json"
    held = json.loads(path.read_text())
    assert held["tpot_ms_median"] == 0.9 and held["step_ms_by_width"] == {"4": 1.5}
    assert {"case", "date", "commit", "command", "device", "torch", "model", "weights", "dtype"} <= set(held)
    # What was not measured is left out, not written as nothing.
    assert "idle_share" not in held and "rungs" not in held
    assert held["acceptance_simulated"] is False
    # The newest run takes the place of the last.
    write_result(result(tpot_ms_median=0.8), tmp_path / "new", "0123abc")
    held = json.loads(path.read_text())
    assert held["tpot_ms_median"] == 0.8 and held["commit"] == "0123abc"


def test_results_of_another_machine_do_not_take_the_place_of_this_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for device, size in (("NVIDIA H200", 1), ("NVIDIA A100-SXM4-80GB", 1), ("NVIDIA H200", 2)):
        write_result(result(device=device, tensor_parallel_size=size))
    folders = [path.parent for path in sorted(Path("benchmarks/results").rglob("*.json"))]
    assert [folder.name for folder in folders] == ["a100", "h200", "h200x2"]


def test_rungs_and_peers_are_results_too(tmp_path: Path):
    peer = Peer(name="vllm", version="0.33", tpot_ms_median=2.0, ratio=2.5)
    ladder = result(rungs=(result(case="plain"), result(case="--graph", tpot_ms_mean=1.0)), peers=(peer,))
    held = json.loads(write_result(ladder, tmp_path).read_text())
    assert [rung["case"] for rung in held["rungs"]] == ["plain", "--graph"]
    assert held["rungs"][1]["tpot_ms_mean"] == 1.0 and "date" not in held["rungs"][0]
    assert held["peers"][0]["ratio"] == 2.5


@pytest.mark.parametrize(
    ("device", "num_gpus", "folder"),
    [
        ("NVIDIA H200", 1, "h200"),
        ("NVIDIA H200", 4, "h200x4"),
        ("NVIDIA H100 80GB HBM3", 1, "h100"),
        ("NVIDIA A100-SXM4-80GB", 1, "a100"),
        ("NVIDIA GeForce RTX 4090", 1, "rtx4090"),
        ("AMD EPYC 9654 96-Core Processor", 1, "cpu"),
        ("Intel(R) Xeon(R)", 1, "cpu"),
    ],
)
def test_folders_are_named_for_the_machine(device: str, num_gpus: int, folder: str):
    assert machine_folder(device, num_gpus) == folder


def test_the_commit_is_that_of_the_source_tree():
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    if head.returncode:
        pytest.skip("not a git checkout")
    given = commit()
    assert given is not None and head.stdout.startswith(given.removesuffix("+"))


def test_comparing_says_by_how_much_the_second_is_better():
    rows = compared({"tpot_ms_mean": 2.0, "decode_tok_per_s": 10.0}, {"tpot_ms_mean": 1.0, "decode_tok_per_s": 30.0})
    assert rows == {"tpot_ms_mean": [2.0, 1.0, 2.0], "decode_tok_per_s": [10.0, 30.0, 3.0]}
    with pytest.raises(UsageError, match="no figure in common"):
        compared({"tpot_ms_mean": 2.0}, {"ttft_ms": 1.0})


def test_what_two_results_do_not_share_is_said():
    one = {"model": "m", "width": 1, "tpot_ms_mean": 2.0, "details": {"workload": "looping", "weights_dtype": None}}
    other = {"model": "m", "width": 9, "tpot_ms_mean": 1.0, "details": {"workload": "chat", "weights_dtype": "int4"}}
    text = compare_in_words(one, other | {"acceptance_simulated": True})
    notes = [line for line in text.splitlines() if line.startswith("note")]
    assert notes == [
        "note: width differs: 1 and 9",
        "note: acceptance_simulated differs: None and True",
        "note: workload differs: looping and chat",
        "note: weights_dtype differs: None and int4",
    ]


@pytest.mark.parametrize("content", [{"case": "kernels", "rows": []}, {"case": "x", "schema": 2}, {"schema": 1}, []])
def test_a_file_of_another_form_is_no_result(tmp_path: Path, content):
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="is no result of schema 1"):
        read_result(path)


def test_a_result_without_a_time_per_token_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_result(result(tpot_ms_median=0.9), tmp_path)
    with pytest.raises(UsageError, match="has no tpot_ms_mean"):
        bars_of(read_result(path))
    chart = tmp_path / "x.svg"
    assert main(["bench", "--compare", str(path), str(path), "--chart", str(chart)]) == 2
    assert "cannot be drawn" in capsys.readouterr().err and not chart.exists()


def test_a_chart_that_cannot_be_written_costs_no_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "folder.svg").mkdir()
    for chart in (tmp_path / "none" / "x.svg", tmp_path / "folder.svg"):
        assert main(["bench", "-m", "no-such-model", "--chart", str(chart)]) == 2
        assert "cannot be written: give a file in a folder that is there" in capsys.readouterr().err


def test_a_chart_is_no_other_picture_than_its_name_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "-m", "no-such-model", "--chart", str(tmp_path / "x.png")]) == 2
    assert "must end in .svg" in capsys.readouterr().err


def test_the_chart_is_valid_and_to_scale():
    bars = [Bar(name="eager <x>", tpot_ms=4.0, floor_tpot_ms=0.5), Bar(name="--graph", tpot_ms=1.0, floor_tpot_ms=None)]
    root = ElementTree.fromstring(ladder_svg("a & b", bars))
    space = "{http://www.w3.org/2000/svg}"
    rects = [float(rect.get("width")) for rect in root.iter(f"{space}rect")][1:]
    assert rects[0] == pytest.approx(4 * rects[1])
    assert len(list(root.iter(f"{space}line"))) == 1
    texts = [text.text for text in root.iter(f"{space}text")]
    assert "eager <x>" in texts and "a & b" in texts and "1 ms, 4.00 x" in texts


def test_a_result_without_rungs_is_one_bar():
    assert bars_of({"case": "c", "tpot_ms_mean": 2.0, "floor_step_ms": 3.0, "acceptance_length": 2.0}) == [
        Bar(name="c", tpot_ms=2.0, floor_tpot_ms=1.5)
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_gpu: None) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("soloist.bench.local.measure_bandwidth", lambda device: 20.0)


def test_a_run_says_what_it_measured(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["bench", "-m", str(tiny), "--input-tokens", "60", "--output-tokens", "8", "--repeats", "2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    for word in ("cold ", "warm ", "TPOT ", "p10-p90", "chunk gap", "floor ", "what a person feels", "5,000 tokens"):
        assert word in out
    assert main([*words, "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    assert run["details"]["input_tokens"] == pytest.approx(60, abs=6)
    assert run["details"]["output_tokens"] == 8 and run["details"]["num_requests"] == 2
    assert run["details"]["cached_share"] == 0 and run["command"].startswith("soloist")
    assert run["tpot_ms_p10"] <= run["tpot_ms_median"] <= run["tpot_ms_p90"]
    assert run["decode_tok_per_s"] == pytest.approx(1e3 / run["tpot_ms_mean"], rel=0.05)
    assert run["share_of_floor"] == pytest.approx(run["floor_step_ms"] / run["step_ms_median"])


def test_a_draft_is_a_second_rung_above_plain_decoding(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    chart, saved = tmp_path / "ladder.svg", tmp_path / "run.json"
    words = ["bench", "-m", str(tiny), "--workload", "edit", "--output-tokens", "24", "--repeats", "1"]
    assert main([*words, "--draft", "ngram", "--chart", str(chart), "--json"]) == 0
    out, err = capsys.readouterr()
    saved.write_text(out)
    run = json.loads(out)
    assert [rung["case"] for rung in run["rungs"]] == ["plain decoding", "--draft ngram"]
    assert run["rungs"][0]["acceptance_length"] == 1.0 and run["rungs"][1]["width"] >= 1
    assert "times the speed of plain decoding" in err
    assert "--draft ngram" in chart.read_text()
    # Results that are there can be compared and drawn again.
    again = tmp_path / "again.svg"
    assert main(["bench", "--compare", str(saved), str(saved), "--chart", str(again)]) == 0
    assert "tpot_ms_mean" in (text := capsys.readouterr().out) and "1.000" in text and "differs" not in text
    assert main(["bench", "--compare", str(saved), str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ttft_ms"][2] == 1.0
    assert re.findall(r"<text[^>]*>([^<]*)</text>", again.read_text())[1] == "plain decoding"
    assert main(["bench", "--compare", str(saved), str(tmp_path / "none.json")]) == 2


def test_another_engine_gets_a_ratio(tiny: Path, fake: FakeServer, capsys: pytest.CaptureFixture[str]):  # noqa: F811
    fake.usage = {"prompt_tokens": 999, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
    words = ["bench", "-m", str(tiny), "--workload", "chat", "--output-tokens", "5", "--repeats", "1"]
    assert main([*words, "--against", fake.url, "--json"]) == 0
    out, err = capsys.readouterr()
    run = json.loads(out)
    (peer,) = run["peers"]
    assert peer["ratio"] == pytest.approx(peer["tpot_ms_median"] / run["tpot_ms_median"])
    assert peer["version"] == "fake/1.0" and "their-model" in peer["name"]
    for note in ("the server counts 999 prompt tokens", "the server is warm", "chunk gap median"):
        assert note in err
    assert len(fake.requests) == 4


def test_a_server_that_is_not_there_costs_no_measurement(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "--against", "http://127.0.0.1:9"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "is the server running" in line


@pytest.fixture(scope="module")
def smollm2() -> Path:
    # Before a test hides the user's cache.
    return find_real_model(SMOLLM2)


@pytest.mark.real
def test_the_default_model_is_measured(smollm2: Path, capsys: pytest.CaptureFixture[str]):
    words = ["bench", "-m", str(smollm2), "--input-tokens", "24", "--output-tokens", "6"]
    assert main([*words, "--repeats", "1", "-c", "64", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    assert run["weights"] == "real" and run["weight_bytes"] > 9e7
    assert 0 < run["share_of_floor"] < 1.2
