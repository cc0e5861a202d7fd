"""What the programs of this folder share: work for a GPU that takes longer than enqueueing it, and a clock."""

import sys
import time
from collections.abc import Iterator

import torch

# Words behind a program's name: a number of steps; then "without" for the same work without the fault.
DEFAULT_STEPS = 400
# Of the program that ran last.
step_ms = 0.0


def has_fault() -> bool:
    """Say whether to do what is at fault, not what mends it; the GPU gets the same work."""
    return sys.argv[2:] != ["without"]


def steps() -> Iterator[int]:
    """Count steps; notes what one took."""
    global step_ms
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_STEPS
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    yield from range(num_steps)
    torch.cuda.synchronize()
    step_ms = (time.perf_counter() - start_s) / num_steps * 1e3


class Work:
    """A step of a model: some products, some small kernels, a token at the end."""

    def __init__(self) -> None:
        generator = torch.Generator(device="cuda").manual_seed(0)
        self.weight = torch.randn(3072, 3072, device="cuda", dtype=torch.bfloat16, generator=generator)
        self.hidden = torch.randn(3072, 3072, device="cuda", dtype=torch.bfloat16, generator=generator)

    def step(self) -> torch.Tensor:
        """Enqueue a step; gives a token id on the GPU."""
        hidden = self.hidden
        for _ in range(6):
            hidden = hidden @ self.weight
            hidden = hidden / 64
        logits = hidden[0].float()
        return logits.argmax()
