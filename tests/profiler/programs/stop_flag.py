"""Decodes as generation loops do: whether to go on is read from the GPU in every step, before the text is shown."""

import json

import torch
from gpu_work import Work, has_fault, steps

# Of no token.
EOS = 4_000_000
PAGE = list(range(15_000))


def decode() -> None:
    work = Work()
    unfinished = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in steps():
        unfinished = unfinished & (work.step() != EOS)
        if has_fault() and not unfinished:  # fault
            break
        json.dumps(PAGE)  # busy


decode()
