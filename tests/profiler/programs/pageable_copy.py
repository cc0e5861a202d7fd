"""Copies with non_blocking=True to memory that is not pinned, which blocks all the same."""

import torch
from gpu_work import Work, has_fault, steps

work = Work()
host = torch.empty(3072, dtype=torch.bfloat16, pin_memory=not has_fault())
for _ in steps():
    work.step()
    host.copy_(work.hidden[0], non_blocking=True)  # fault
