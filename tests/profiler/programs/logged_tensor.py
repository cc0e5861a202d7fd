"""Writes a loss into a log line."""

from gpu_work import Work, steps

work = Work()
log = []
for i in steps():
    token = work.step()
    log.append(f"step {i}: token {token}")  # fault
