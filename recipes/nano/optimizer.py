"""Muon for matrices, AdamW for everything else."""

import torch
from torch import Tensor

from soloist.train.muon import Muon


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
        self.muon = Muon((t for name, t in parameters.items() if is_matrix(name, t)), lr, weight_decay)
        others = [t for name, t in parameters.items() if not is_matrix(name, t)]
        is_cuda = others[0].is_cuda
        self.adam = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=is_cuda)

    def step(self, share: float) -> Tensor:
        """Clip, update at `share` of the full rate, clear the gradients; gives the gradients' norm, on the device."""
        norm = torch.nn.utils.clip_grad_norm_(self.all, 1.0, foreach=True)
        for optimizer in (self.adam, self.muon):
            for group in optimizer.param_groups:
                group["lr"] = self.lr * share
            optimizer.step()
            optimizer.zero_grad()
        return norm
