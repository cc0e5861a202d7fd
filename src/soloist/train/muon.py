"""Muon: matrices move along the momentum of their gradients, made orthogonal.

    M = momentum M + G        the step is -lr 0.2 sqrt(max(rows, columns)) orthogonal(G + momentum M)

`orthogonal` brings all singular values near 1 by five Newton-Schulz steps; the factor gives an update the size that an
AdamW step of the same rate has. Matrices of one shape are handled together, and a rate may be a tensor, which a CUDA
graph reads anew: torch's own takes matrices one by one, and a number.

Source: Muon is Scalable for LLM Training, arXiv 2502.16982, section 2; coefficients of Jordan's original.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
MOMENTUM = 0.95


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Give U V^T, roughly, of each matrix U S V^T in (n, rows, columns); on a GPU in bf16, which a CPU is slow at."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Updates matrices (rows, columns) and stacks of them (n, rows, columns).

    Args:
        tensors: to be updated.
        lr: the rate, a number or () on the tensors' device.
        weight_decay: share of a tensor that a step at rate 1 would take away.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], lr: float | torch.Tensor, weight_decay: float) -> None:
        super().__init__(tensors, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move the tensors along their gradients."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
            for tensor in group["params"]:
                by_shape[tensor.shape[-2:]].append(tensor)
            for (rows, columns), tensors in by_shape.items():
                for tensor in tensors:
                    if "momentum_buffer" not in self.state[tensor]:
                        self.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)
                momentum = [self.state[tensor]["momentum_buffer"] for tensor in tensors]
                grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
                assert len(grads) == len(tensors)
                torch._foreach_mul_(momentum, MOMENTUM)
                torch._foreach_add_(momentum, grads)
                ahead = torch._foreach_add(grads, momentum, alpha=MOMENTUM)
                flat = [update.reshape(-1, rows, columns) for update in ahead]
                updates = orthogonal(torch.cat(flat)).float() * (-0.2 * max(rows, columns) ** 0.5 * group["lr"])
                pieces = updates.split([len(part) for part in flat])
                if group["weight_decay"]:
                    torch._foreach_mul_(tensors, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(tensors, [p.view_as(t) for p, t in zip(pieces, tensors, strict=True)])
