"""Repeats elements without saying how many that will be."""

import torch
from gpu_work import Work, has_fault, steps

work = Work()
repeats = torch.tensor([3, 1, 2], device="cuda")
for _ in steps():
    work.step()
    rows = torch.repeat_interleave(work.hidden[:3, 0], repeats, output_size=None if has_fault() else 6)  # fault
