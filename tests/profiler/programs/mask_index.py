"""Takes elements by a mask, whose size the host must know."""

import torch
from gpu_work import Work, has_fault, steps

work = Work()
for _ in steps():
    token = work.step()
    row, mask = work.hidden[0], work.hidden[0] > 0
    positive = row[mask] if has_fault() else row[torch.nonzero_static(mask, size=3072, fill_value=0)[:, 0]]  # fault
