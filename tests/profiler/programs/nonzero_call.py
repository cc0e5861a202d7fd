"""Asks for the places of non-zero elements inside of a helper."""

import torch
from gpu_work import Work, steps


def places(row: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(row > 0)  # fault


work = Work()
for _ in steps():
    work.step()
    found = places(work.hidden[0])
