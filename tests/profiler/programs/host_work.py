"""Does other work between steps, for which the GPU waits: no read is at fault, the line that computes is."""

import json

from gpu_work import Work, steps

PAGE = list(range(60_000))


def detokenize() -> int:
    return len(json.dumps(PAGE))  # busy


work = Work()
for _ in steps():
    detokenize()
    work.step()
