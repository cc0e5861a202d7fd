"""Reads the token back in every step."""

import sys

from gpu_work import Work, steps

work, tokens = Work(), []
for _ in steps():
    token = work.step()
    if sys.argv[2:] != ["without"]:
        tokens.append(token.item())  # fault
