"""Every family as a miniature on the GPU."""

from pathlib import Path

import pytest
import torch

from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from tests.miniature import FAMILIES, write_checkpoint
from tests.runtime.gpu_models import GPU_SIZES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, folder: Path) -> CausalLM:
    family = request.param
    path = folder / family
    if not path.exists():
        write_checkpoint(path, family, seed=3, **GPU_SIZES[family])
    return load_model(path, dtype=torch.bfloat16, device="cuda")
