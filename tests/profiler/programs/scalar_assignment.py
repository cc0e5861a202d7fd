"""Writes one number from the host into a tensor on the GPU."""

import torch
from gpu_work import Work, has_fault, steps

work = Work()
lengths = torch.zeros(8, device="cuda")
for i in steps():
    work.step()
    lengths[0] = torch.tensor(float(i)) if has_fault() else torch.full((), float(i), device="cuda")  # fault
