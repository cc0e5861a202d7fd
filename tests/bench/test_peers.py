"""Peers of the same run: the plain eager one is among them, and each says what it is and what a token took."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import peers_gpu
from peers import run_torch_gpu
from tests.miniature import miniature_config


def test_plain_eager_pytorch_is_a_peer_of_few_tokens(tmp_path: Path):
    words = {name: words for name, _, words in peers_gpu.RUNS}
    assert set(words) == {"repeat", "sdpa", "transformers", "eager", "flex"}
    assert words["eager"] == ("eager", "8192", str(peers_gpu.EAGER_TOKENS)) and peers_gpu.EAGER_TOKENS <= 32
    config = tmp_path / "config.json"
    config.write_text(json.dumps(miniature_config("qwen2")))
    command = [sys.executable, str(peers_gpu.PEERS / "run_torch_gpu.py"), str(config), "eager", "40", "12", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    peer = json.loads(done.stdout.splitlines()[-1])
    assert peer["name"] == "PyTorch, eager" and peer["version"] and peer["tpot_ms_median"] > 0


def test_heads_are_copied_in_one_form_and_not_in_the_other_and_both_give_the_same(monkeypatch: pytest.MonkeyPatch):
    config, seen = miniature_config("qwen2"), []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        seen.append(k.shape[1])
        return sdpa(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    tokens, caches = [], []
    for form in ("sdpa", "repeat"):
        torch.manual_seed(1)
        model = run_torch_gpu.Model(config, 128, form).eval()
        ids, chosen = torch.zeros(1, 1, dtype=torch.int64), []
        for position in range(4):
            ids = model(ids, torch.tensor([position]))
            chosen.append(int(ids))
        tokens.append(chosen)
        caches.append(torch.stack([layer.attention.v_cache for layer in model.layers]))
    assert tokens[0] == tokens[1]
    torch.testing.assert_close(caches[0], caches[1])
    half = len(seen) // 2
    assert set(seen[:half]) == {config["num_key_value_heads"]} != {config["num_attention_heads"]} == set(seen[half:])
