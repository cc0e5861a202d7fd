"""Makes a small tensor from a Python list on the GPU, as page tables often are."""

import torch
from gpu_work import Work, has_fault, steps

work = Work()
for i in steps():
    work.step()
    table = torch.tensor([i, i + 1], device="cuda") if has_fault() else torch.arange(i, i + 2, device="cuda")  # fault
