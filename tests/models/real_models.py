"""Where the real models of the tests are, if they are there."""

import os
from pathlib import Path

import pytest

from soloist.config import model_dirs

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN_05B = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
QWEN_15B = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"


def find_real_model(filename: str) -> Path:
    """Give a model file from `SOLOIST_TEST_MODELS` or the folders that Soloist searches; skip the test without one."""
    named = os.environ.get("SOLOIST_TEST_MODELS")
    for folder in (Path(named),) if named else model_dirs():
        if (folder / filename).is_file():
            return folder / filename
    pytest.skip(f"{filename} is not here")
