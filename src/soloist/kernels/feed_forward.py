"""The dense SwiGLU block between two places of the residual stream.

    h      = rms_norm(x)
    [g, u] = gate_up h
    out    = x + down (silu(g) * u)

Rounding: h and silu(g) * u to the model's dtype, as inputs of products. One token on a GPU is one launch where the
sizes allow it; several are two, and so are ranks, which sum in between.
"""

import torch

from soloist.kernels.allreduce import TensorParallel, linear_all_reduce
from soloist.kernels.check import use_reference
from soloist.kernels.launch import HAS_TRITON
from soloist.kernels.linear import norm_swiglu
from soloist.kernels.packed import Weight

if HAS_TRITON:
    from soloist.kernels import feed_forward_cuda


def feed_forward(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_up: Weight, down: Weight, group: TensorParallel
) -> torch.Tensor:
    """Add the block to the residual stream. The module's docstring has the equations.

    Args:
        x: (T, D) residual stream.
        norm_weight: (D) the dtype of `x`, or fp32.
        eps: of the norm.
        gate_up: (2F, D) the dtype of `x`, gate rows then up rows, or packed: this rank's rows of each.
        down: (D, F) likewise: this rank's columns.
        group: the ranks.

    Returns:
        (T, D), the dtype of `x`.

    Source: Shazeer 2020 (arXiv 2002.05202), equation 6.
    """
    is_one_launch = HAS_TRITON and group.size == 1 and not use_reference(x) and norm_weight.dtype == x.dtype
    if is_one_launch and feed_forward_cuda.can_run(x, gate_up, down):
        assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
        return feed_forward_cuda.run(x, norm_weight, eps, gate_up, down)
    return linear_all_reduce(norm_swiglu(x, norm_weight, eps, gate_up), down, x, group)
