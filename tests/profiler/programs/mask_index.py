"""Takes elements by a mask, whose size the host must know."""

from gpu_work import Work, has_fault, steps

work = Work()
for _ in steps():
    token = work.step()
    row = work.hidden[0]
    mask = row > 0
    positive = row[mask] if has_fault() else row * mask  # fault
