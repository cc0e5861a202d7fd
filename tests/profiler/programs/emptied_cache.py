"""Gives memory back to the driver in every step, and so has to ask for it again."""

import torch
from gpu_work import Work, has_fault, steps

work = Work()
weight, hidden, product = work.weight, work.hidden, torch.empty_like(work.hidden)
token = torch.zeros((), dtype=torch.int64, device="cuda")
for _ in steps():
    for _ in range(6):
        torch.matmul(hidden, weight, out=product)
        torch.div(product, 64, out=hidden)
    torch.argmax(hidden[0], dim=0, out=token)
    scratch = torch.empty(1 << 26, device="cuda")  # allowed
    del scratch
    if has_fault():
        torch.cuda.empty_cache()  # fault
