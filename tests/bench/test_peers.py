"""Peers of the same run: the plain eager one is among them, and each says what it is and what a token took."""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import peers_gpu
from tests.miniature import miniature_config


def test_plain_eager_pytorch_is_a_peer_of_few_tokens(tmp_path: Path):
    words = {name: words for name, _, words in peers_gpu.RUNS}
    assert set(words) == {"sdpa", "transformers", "eager", "flex"}
    assert words["eager"] == ("eager", "8192", str(peers_gpu.EAGER_TOKENS)) and peers_gpu.EAGER_TOKENS <= 32
    config = tmp_path / "config.json"
    config.write_text(json.dumps(miniature_config("qwen2")))
    command = [sys.executable, str(peers_gpu.PEERS / "run_torch_gpu.py"), str(config), "eager", "40", "12", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    peer = json.loads(done.stdout.splitlines()[-1])
    assert peer["name"] == "PyTorch, eager" and peer["version"] and peer["tpot_ms_median"] > 0
