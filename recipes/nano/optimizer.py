"""Muon for matrices, AdamW for everything else.

    M = momentum M + G        the step is -lr 0.2 sqrt(max(rows, columns)) orthogonal(G + momentum M)

`orthogonal` brings all singular values near 1 by five Newton-Schulz steps; the factor gives an update the size that an
AdamW step of the same rate has. Matrices of one shape are handled together.

Source: Muon is Scalable for LLM Training, arXiv 2502.16982, section 2; coefficients of Jordan's original.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
MOMENTUM = 0.95


def orthogonal(matrices: Tensor) -> Tensor:
    """Give U V^T, roughly, of each matrix U S V^T in (n, rows, columns), in bf16."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon:
    """Updates matrices (rows, columns) and stacks of them (n, rows, columns)."""

    def __init__(self, tensors: Iterable[Tensor], weight_decay: float) -> None:
        self.weight_decay = weight_decay
        groups: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            groups[tensor.shape[-2:]].append(tensor)
        self.groups = list(groups.values())
        self.momentum = [[torch.zeros_like(tensor) for tensor in group] for group in self.groups]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move the tensors along their gradients."""
        for group, momentum in zip(self.groups, self.momentum, strict=True):
            grads = [tensor.grad for tensor in group]
            torch._foreach_mul_(momentum, MOMENTUM)
            torch._foreach_add_(momentum, grads)
            ahead = torch._foreach_add(grads, momentum, alpha=MOMENTUM)
            rows, columns = group[0].shape[-2:]
            flat = [update.reshape(-1, rows, columns) for update in ahead]
            updates = orthogonal(torch.cat(flat)).float() * (-0.2 * lr * max(rows, columns) ** 0.5)
            pieces = updates.split([len(part) for part in flat])
            torch._foreach_mul_(group, 1 - lr * self.weight_decay)
            torch._foreach_add_(group, [p.view_as(t) for p, t in zip(pieces, group, strict=True)])


class Optimizer:
    """Both optimisers, with one learning rate.

    Args:
        parameters: by path, as `TrainableSource.parameters` gives them.
        lr: at full rate.
        weight_decay: of matrices.
    """

    # Read token by token, or chosen by: their rows are not a map of one space to another.
    ADAM_NAMES = ("embed_tokens", "lm_head", "router", "conv")

    def __init__(self, parameters: dict[str, Tensor], lr: float, weight_decay: float) -> None:
        def is_matrix(name: str, tensor: Tensor) -> bool:
            return tensor.dim() >= 2 and not name.endswith(self.ADAM_NAMES)

        self.lr = lr
        self.all = list(parameters.values())
        self.muon = Muon((t for name, t in parameters.items() if is_matrix(name, t)), weight_decay)
        others = [t for name, t in parameters.items() if not is_matrix(name, t)]
        is_cuda = others[0].is_cuda
        self.adam = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=is_cuda)

    def step(self, share: float) -> Tensor:
        """Clip, update at `share` of the full rate, clear the gradients; gives the gradients' norm, on the device."""
        norm = torch.nn.utils.clip_grad_norm_(self.all, 1.0, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = self.lr * share
        self.adam.step()
        self.muon.step(self.lr * share)
        self.adam.zero_grad(set_to_none=True)
        for tensor in self.all:
            tensor.grad = None
        return norm
