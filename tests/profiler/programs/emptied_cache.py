"""Gives memory back to the driver in every step, and so has to ask for it again."""

import torch
from gpu_work import Work, steps

work = Work()
for _ in steps():
    work.step()
    scratch = torch.empty(1 << 26, device="cuda")  # allowed
    del scratch
    torch.cuda.empty_cache()  # fault
