"""What of a GPU's memory is taken, in one line; on a machine without a GPU, whose figures are made up."""

from pathlib import Path

import pytest
import torch

from soloist.cli.answer import memory_line
from soloist.llm import LLM
from tests.tiny_model import write_tiny_model


def test_the_line_adds_up_to_what_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    llm = LLM(str(write_tiny_model(tmp_path / "tiny")), max_context_len=500, num_threads=1)
    model, cache = llm.engine.runner.model, llm.engine.runner.cache
    weights = model.report.weight_bytes
    held = sum(t.numel() * t.element_size() for t in (cache.kv.k, cache.kv.v))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: weights + held + 250_000_000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100_000_000_000, 150_000_000_000))
    line = memory_line(llm)
    assert f"{weights / 1e9:.2f} GB weights, {held / 1e9:.2f} GB cache and state for 500 tokens" in line
    assert "0.25 GB steps and drafts; 100.0 of 150.0 GB free" in line
