"""Writes a loss into a log line."""

from gpu_work import Work, has_fault, steps

work = Work()
log = []
for i in steps():
    token = work.step()
    log.append(f"step {i}: token {token if has_fault() else i}")  # fault
