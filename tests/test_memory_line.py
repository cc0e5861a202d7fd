"""What of a GPU's memory is taken, in one line; on a machine without a GPU, whose figures are made up."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from soloist.cli.answer import memory_line
from soloist.kernels.allreduce import TensorParallel
from soloist.llm import LLM
from soloist.models import load_model
from soloist.runtime.runner import ModelRunner
from tests.miniature import miniature_config
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


def test_the_line_of_a_rank_says_what_this_rank_holds(monkeypatch: pytest.MonkeyPatch):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64, "vocab_size": 256}
    config = miniature_config("llama", max_position_embeddings=2**16, **sizes)
    group = TensorParallel(rank=0, size=4)
    model = load_model(config, dtype=torch.float32, weights="random", group=group)
    runner = ModelRunner(model, max_context_len=50_000)
    held = sum(t.numel() * t.element_size() for t in (runner.cache.kv.k, runner.cache.kv.v))
    assert held > 10**7
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: model.report.weight_bytes + held)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    line = memory_line(SimpleNamespace(engine=SimpleNamespace(runner=runner)))
    assert f"{held / 1e9:.2f} GB cache and state" in line and " 0.00 GB steps and drafts" in line
