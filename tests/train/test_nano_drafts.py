"""The recipe of soloist-nano's drafts, on a tiny model: prompts begin at lines, drafts share their texts."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_model import write_tiny_model

RECIPE = Path(__file__).parents[2] / "recipes" / "nano"
sys.path.insert(0, str(RECIPE))
import train_drafts  # noqa: E402


def test_prompts_begin_behind_lines_and_hold_no_end():
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 30, 4000).astype(np.uint16)
    ends_line = np.arange(30) == 7
    prompts = train_drafts.cut_prompts(tokens, 3, ends_line, 50)
    before = {bytes(tokens[i + 1 : i + 17]) for i in np.flatnonzero((tokens == 7) | (tokens == 3))}
    assert len(prompts) == 50
    for prompt in prompts:
        assert train_drafts.MIN_PROMPT <= len(prompt) <= train_drafts.MAX_PROMPT
        assert 3 not in prompt
        assert bytes(np.array(prompt[:16], dtype=np.uint16)) in before


def test_both_drafts_are_trained_on_the_same_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = write_tiny_model(tmp_path / "model", "bailing_moe_v3")
    tokens = np.random.default_rng(0).integers(0, 100, 3000).astype(np.uint16)
    end = json.loads((model / "config.json").read_text())["eos_token_id"]
    tokens[::500] = end
    np.save(tmp_path / "train.npy", tokens)
    words = ["--model", str(model), "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--device", "cpu"]
    words += ["--blocks", "3", "15", "--prompts", "8", "--tokens", "6", "--steps", "2", "--texts-per-step", "3"]
    monkeypatch.setattr(sys, "argv", ["train_drafts.py", *words, "--layers", "1", "--markov-rank", "4"])
    monkeypatch.setattr(train_drafts, "MIN_PROMPT", 4)
    train_drafts.main()
    for name, block in (("nano-dspark3", 3), ("nano-dspark16", 15)):
        folder = tmp_path / "out" / name
        assert json.loads((folder / "config.json").read_text())["block_size"] == block
        assert not (folder / "training" / "texts.jsonl").exists()
        record = json.loads((folder / "training.json").read_text())
        assert record["num_texts"] == 8 and record["settings"]["num_steps"] == 2
    assert len((tmp_path / "out" / "texts.jsonl").read_text().splitlines()) == 8
