"""Copies a row of logits to the host."""

from gpu_work import Work, has_fault, steps

work = Work()
for _ in steps():
    work.step()
    row = work.hidden[0].cpu() if has_fault() else work.hidden[0].clone()  # fault
