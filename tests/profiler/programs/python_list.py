"""Makes a small tensor from a Python list on the GPU, as page tables often are."""

import torch
from gpu_work import Work, steps

work = Work()
for i in steps():
    work.step()
    table = torch.tensor([i, i + 1, i + 2], device="cuda")  # fault
