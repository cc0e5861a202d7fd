"""Enqueues and never looks."""

from gpu_work import Work, steps

work = Work()
for _ in steps():
    work.step()
