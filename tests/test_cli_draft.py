"""Drafts on the command line: what was drafted is said, simulation is marked, `draft check` writes its report."""

import json
from pathlib import Path

import pytest

from soloist.cli import draft as draft_commands
from soloist.cli import main
from soloist.hub import BUILT_IN_DRAFTS, find_model
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> str:
    return str(write_tiny_model(folder / "tiny"))


@pytest.fixture(scope="module")
def draft(folder: Path) -> Path:
    return write_tiny_model(folder / "draft", "qwen3")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def run(capsys: pytest.CaptureFixture[str], tiny: str, *words: str) -> tuple[str, str]:
    assert main(["run", "-m", tiny, "one two one two one", "-n", "24", "--ignore-eos", "-t", "1", *words]) == 0
    return capsys.readouterr()


def test_json_says_what_was_drafted(tiny: str, draft: Path, capsys):
    plain = json.loads(run(capsys, tiny, "--json", "--dtype", "float32")[0])
    words = ("--dtype", "float32", "--json", "--draft", str(draft), "--draft-width", "4")
    answer = json.loads(run(capsys, tiny, *words)[0])
    assert answer["token_ids"] == plain["token_ids"]
    assert (answer["drafter"], answer["policy"], answer["simulated"]) == ("model draft", "fixed width 4", False)
    assert sum(answer["drafted_histogram"]) == sum(answer["accepted_histogram"]) == answer["forwards"]
    assert answer["acceptance_length"] == pytest.approx(24 / answer["forwards"])
    assert answer["acceptance_rate"] == pytest.approx(answer["accepted"] / answer["drafted"])
    assert len(answer["acceptance_by_position"]) <= 3 and answer["drafting_off_after"] is None
    assert plain["acceptance_rate"] is None and plain["drafted"] == 0


def test_the_speed_line_says_how_many_tokens_a_step_committed(tiny: str, draft: Path, capsys):
    _, line = run(capsys, tiny, "--draft", str(draft), "--draft-width", "3")
    assert " tokens per step" in line and "SIMULATED" not in line


def test_simulation_is_marked_in_every_output(tiny: str, capsys):
    words = ("--draft", "ngram", "--simulate-acceptance", "2.5")
    assert "SIMULATED acceptance, the text is not the model's" in run(capsys, tiny, *words)[1]
    assert json.loads(run(capsys, tiny, *words, "--json")[0])["simulated"] is True


@pytest.mark.parametrize("words", [("--draft-width", "1"), ("--draft-width", "17"), ("--simulate-acceptance", "9")])
def test_bad_values_are_refused_in_one_line(tiny: str, words: tuple[str, str], capsys):
    assert main(["run", "-m", tiny, "x", "--draft", "ngram", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1


CHECK = ("--prompts", "3", "--tokens", "24", "--dtype", "float32", "-t", "1")


def test_a_checked_draft_has_its_report_beside_it(tiny: str, draft: Path, capsys):
    assert main(["draft", "check", "-m", tiny, "--draft", str(draft), *CHECK]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [
        ["ok", name] for name in ("greedy", "sampling", "logprobs", "state")
    ]
    report = json.loads((draft / "draft-check.json").read_text())
    assert report["passed"] and (report["model"], report["drafter"]) == ("tiny", "model draft")
    assert str(draft / "draft-check.json") in err


def test_a_draft_without_a_checkpoint_writes_where_it_is_told(tiny: str, tmp_path: Path, capsys):
    words = ["draft", "check", "-m", tiny, "--draft", "ngram", *CHECK]
    assert main([*words, "--json", "--out", str(tmp_path / "report.json")]) == 0
    out, _ = capsys.readouterr()
    assert json.loads(out) == json.loads((tmp_path / "report.json").read_text())
    assert main([*words, "--out", str(tmp_path / "no" / "folder.json")]) == 2
    out, err = capsys.readouterr()
    # Its work is not lost.
    assert "greedy" in out and "give --out" in err


@pytest.mark.parametrize("name", BUILT_IN_DRAFTS)
def test_the_package_is_no_place_for_reports(name: str):
    assert find_model(name).path is not None and draft_commands._beside(name) is None


def test_a_draft_that_changes_an_answer_gives_exit_code_1(tiny: str, capsys, monkeypatch):
    monkeypatch.setattr("soloist.draft_check._MIN_P_VALUE", 1.1)
    assert main(["draft", "check", "-m", tiny, "--draft", "ngram", *CHECK]) == 1
    assert "FAIL  sampling" in capsys.readouterr()[0]


def test_a_check_needs_a_draft(tiny: str, capsys):
    assert main(["draft", "check", "-m", tiny]) == 2
    assert "--draft says which" in capsys.readouterr()[1]


BENCH = ("--workload", "looping", "--input-tokens", "12", "--output-tokens", "10", "--repeats", "1", "-t", "1")


def test_the_benchmark_climbs_from_plain_decoding_to_adaptive_width(tiny: str, draft: Path, capsys):
    words = ["bench", "-m", tiny, *BENCH, "--draft", str(draft), "--draft-width", "3", "--adaptive-width", "--json"]
    assert main(words) == 0
    result = json.loads(capsys.readouterr()[0])
    assert [rung["case"] for rung in result["rungs"]] == ["plain decoding", f"--draft {draft}", "--adaptive-width"]
    assert not result["acceptance_simulated"]


def test_the_benchmark_marks_simulation(tiny: str, draft: Path, capsys):
    words = ["bench", "-m", tiny, *BENCH, "--draft", str(draft), "--simulate-acceptance", "2", "--json"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["acceptance_simulated"] and "SIMULATED" in err
    assert main(["bench", "-m", tiny, *BENCH, "--simulate-acceptance", "2"]) == 2
