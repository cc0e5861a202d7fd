"""Waits for an event in a property that looks like a plain value."""

import torch
from gpu_work import Work, has_fault, steps


class Lengths:
    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.host = torch.zeros((), dtype=torch.int64).pin_memory()

    def fill(self, token: torch.Tensor) -> None:
        self.host.copy_(token, non_blocking=True)
        self.event.record()

    @property
    def value(self) -> int:
        self.event.synchronize()  # fault
        return int(self.host)


work, lengths = Work(), Lengths()
for _ in steps():
    lengths.fill(work.step())
    assert not has_fault() or lengths.value >= 0
