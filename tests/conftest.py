"""What holds for every test: one seed, one thread, and Triton's interpreter where there is no GPU."""

import os

import pytest
import torch

# Triton reads this when it is imported, so it is set before any test module is.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide GPUs from commands that say nothing of a device, and from the processes that a test starts."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def pytest_configure() -> None:
    # Tests run beside each other; a second thread makes small operators slower, not faster.
    torch.set_num_threads(1)
