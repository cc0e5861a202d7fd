"""Where tests of Triton kernels run, a GPU or the interpreter, and what memory holds before a kernel writes it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

from soloist.kernels.launch import IS_INTERPRETED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter truncates to bf16 where hardware rounds to nearest, so there everything is fp32.
DTYPE = torch.float32 if IS_INTERPRETED else torch.bfloat16


@contextmanager
def nan_in_fresh_memory() -> Iterator[None]:
    """Let `torch.empty` give NaN, or the largest integers, inside the block."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def launch_kernels(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let the launchers of modules take their kernels on the CPU too, in the interpreter."""
    for module in modules:
        monkeypatch.setattr(module, "use_reference", lambda x: False)


def rand(*shape: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """Draw a normal tensor on the device."""
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def split_rows(T: int, sizes: list[int], *, scales: tuple[float, ...] = (), dtype: torch.dtype = DTYPE):
    """Draw T rows of several projections as slices of one packed buffer; beside and below them it is noise."""
    buffer = torch.full((T + 2, sum(sizes) + 16), 1e30, device=DEVICE).to(dtype)
    parts = buffer[:T, : sum(sizes)].split(sizes, dim=1)
    for part, scale in zip(parts, scales or (1.0,) * len(sizes), strict=True):
        part.copy_(torch.randn(part.shape, device=DEVICE) * scale)
    return parts
