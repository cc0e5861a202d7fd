"""`soloist draft train` and `draft eval` on a tiny model: from prompts to a draft with its card."""

import json
from pathlib import Path

import pytest

from soloist.cli import main
from tests.tiny_model import write_tiny_model

WORDS = ("one two three", "def f(x):", "the sea is", "one, two,", "a b c a b c")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "bailing_moe_v3"))


def write_data(path: Path) -> Path:
    lines = [{"prompt": f"{i} {WORDS[i % 5]}"} for i in range(8)]
    lines += [{"messages": [{"role": "user", "content": f"{i}?"}]} for i in range(4)]
    lines += [{"conversations": [{"from": "human", "value": f"{i}!"}, {"from": "gpt", "value": "x"}]} for i in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


TRAIN = ("-n", "12", "--steps", "6", "--texts-per-step", "4", "--anchors", "5", "--block", "4", "--layers", "1")
SMALL = ("--markov-rank", "6", "-t", "1")


def test_from_prompts_to_a_checked_draft_with_its_card(tiny: str, tmp_path: Path, capsys):
    data, out = write_data(tmp_path / "prompts.jsonl"), tmp_path / "draft"
    words = ["draft", "train", "-m", tiny, "--data", str(data), "--out", str(out), *TRAIN, *SMALL]
    assert main([*words, "--no-heads", "--json"]) == 0
    printed, said = capsys.readouterr()
    result = json.loads(printed)
    assert result["num_texts"] == 16
    assert 1 <= result["held_out"]["acceptance_length"] <= 5
    assert "training in 6 steps takes about" in said and "what to expect" in said
    record = json.loads((out / "training.json").read_text())
    assert sorted(record["texts_by_temperature"]) == ["0", "0.7", "1"]
    assert record["settings"]["num_steps"] == 6

    # A finished run is not run again, and gives the same draft.
    weights = (out / "model.safetensors").read_bytes()
    assert main([*words, "--no-heads", "--json"]) == 0
    capsys.readouterr()
    assert (out / "model.safetensors").read_bytes() == weights
    assert main([*words, "--no-heads", "--steps", "7"]) != 0
    assert "other settings (num_steps)" in capsys.readouterr()[1]

    evaluate = ["draft", "eval", "-m", tiny, "--draft", str(out), "-n", "16", "-t", "1", "--temperatures", "0,1"]
    assert main([*evaluate, "--calibrate", "--json"]) == 0
    printed, said = capsys.readouterr()
    found = json.loads(printed)
    assert [t["temperature"] for t in found["temperatures"]] == [0.0, 1.0]
    assert found == json.loads((out / "evaluation.json").read_text())
    assert "no model card" in said and not (out / "README.md").exists()
    temperatures = json.loads((out / "config.json").read_text())["confidence_temperatures"]
    assert len(temperatures) == 4 == len(found["calibration"]["error_after"])

    # Whatever the check finds, only one that passed lets a card be written.
    (out / "draft-check.json").write_text('{"passed": false}')
    assert main(evaluate) == 0
    assert not (out / "README.md").exists()
    (out / "draft-check.json").write_text('{"passed": true}')
    assert main([*evaluate, "--licence", "mit", "--data", str(data), "--draft-width", "3"]) == 0
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n") and "16 prompts from prompts.jsonl" in card
    assert "shape.block_size: 4" in card
    assert " -n 16 --temperatures 0,1 --seed 0 --data prompts.jsonl --draft-width 3\n" in card


def test_a_run_by_the_clock_keeps_its_steps_when_it_goes_on(tiny: str, tmp_path: Path, capsys):
    data, out = write_data(tmp_path / "prompts.jsonl"), tmp_path / "draft"
    words = ["draft", "train", "-m", tiny, "--data", str(data), "--out", str(out), *SMALL, "-n", "12"]
    words += ["--texts-per-step", "4", "--anchors", "5", "--block", "4", "--layers", "1"]
    assert main([*words, "--seconds", "2", "--save-every", "5"]) == 0
    num_steps = json.loads((out / "training.json").read_text())["settings"]["num_steps"]
    weights = (out / "model.safetensors").read_bytes()
    assert num_steps > 6
    assert main([*words, "--seconds", "1", "--save-every", "5"]) == 0
    assert json.loads((out / "training.json").read_text())["settings"]["num_steps"] == num_steps
    assert (out / "model.safetensors").read_bytes() == weights
    capsys.readouterr()


def test_a_dry_run_drafts_within_its_time_and_is_said_to_be_worth_nothing(tiny: str, tmp_path: Path, capsys):
    source = tmp_path / "code"
    source.mkdir()
    for i in range(3):
        (source / f"part_{i}.py").write_text("def f(x):\n    return x + 1\n" * 40)
    words = ["draft", "train", "-m", tiny, "--data", str(source), "--out", str(tmp_path / "draft"), "--dry-run"]
    assert main([*words, *SMALL]) == 0
    printed, _ = capsys.readouterr()
    assert "worth nothing" in printed


def test_a_dry_run_leaves_nothing_in_the_way_of_the_run(tiny: str, tmp_path: Path, capsys):
    data, out = write_data(tmp_path / "prompts.jsonl"), tmp_path / "draft"
    words = ["draft", "train", "-m", tiny, "--data", str(data), "--out", str(out), *TRAIN, *SMALL]
    assert main([*words, "--dry-run"]) == 0 and list(out.iterdir()) == []
    # What is there already is left alone.
    assert main(words) == 0
    record = (out / "training.json").read_text()
    assert main([*words, "--dry-run", "--block", "3"]) == 0
    assert (out / "training.json").read_text() == record and not (out / "dry-run").exists()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--data", "no.jsonl"), "--out where the draft goes"),
        (("--data", "no.jsonl", "--out", "x"), "there is no such file"),
        (("--data", "pyproject.toml", "--out", "x"), "give a .jsonl file or a folder"),
        (("--data", "no.jsonl", "--out", "x", "--temperatures", "warm"), "numbers of at least 0"),
        (("--data", "no.jsonl", "--out", "x", "--temperatures", "0,nan"), "numbers of at least 0"),
        (("--data", "no.jsonl", "--out", "x", "--temperatures", "inf"), "numbers of at least 0"),
        (("--data", "no.jsonl", "--out", "x", "--length-weight", "nan"), "weights of the loss"),
        (("--data", "no.jsonl", "--out", "x", "--url-model", "there"), "--url, which is not given"),
        (("--data", "no.jsonl", "--out", "x", "--url", "http://x", "--source", "transformers"), "give one"),
        (("--data", "no.jsonl", "--out", "x", "--dry-run", "--seconds", "9"), "--dry-run"),
        (("--data", "no.jsonl", "--out", "x", "--block", "16"), "block_size is 16"),
        (("--data", "no.jsonl", "--out", "x", "--lr", "-1"), "learning_rate is -1"),
        (("--data", "no.jsonl", "--out", "x", "--steps", "9", "--seconds", "9"), "give one"),
    ],
)
def test_wrong_words_are_refused_in_one_line(tiny: str, words: tuple[str, ...], complaint: str, capsys):
    assert main(["draft", "train", "-m", tiny, *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and complaint in err


def test_a_draft_without_held_out_prompts_needs_data(tiny: str, capsys):
    assert main(["draft", "eval", "-m", tiny, "--draft", "ngram", "-t", "1"]) == 2
    assert "--data says what to answer" in capsys.readouterr()[1]
    assert main(["draft", "eval", "-m", tiny]) == 2
