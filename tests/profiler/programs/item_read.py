"""Reads the token back in every step."""

from gpu_work import Work, has_fault, steps

work = Work()
# Of all steps.
tokens = []
for _ in steps():
    token = work.step()
    if has_fault():
        tokens.append(token.item())  # fault
