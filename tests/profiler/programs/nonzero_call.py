"""Asks for the places of non-zero elements inside of a helper."""

import torch
from gpu_work import Work, has_fault, steps


def places(row: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(row > 0) if has_fault() else torch.nonzero_static(row > 0, size=3072)  # fault


work = Work()
for _ in steps():
    work.step()
    found = places(work.hidden[0])
