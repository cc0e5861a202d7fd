"""Two GPUs that share a model: held to one GPU, and their captured steps to eager ones."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_are_held_to_one(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launcher, "-m", "tests.runtime.tp_gpu_program", str(tmp_path)], check=True, timeout=600)
