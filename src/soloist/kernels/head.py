"""The output head of a greedy step: the likeliest token without a row of logits in memory. Logits are `norm_linear`."""

import torch

from soloist.kernels.check import FLOATS, expect, use_reference
from soloist.kernels.launch import HAS_TRITON
from soloist.kernels.linear import PackedWeight, Weight, is_step_map, norm_linear

if HAS_TRITON:
    from soloist.kernels import linear_triton


def norm_argmax_ref(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: Weight, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute all logits in fp32 and take the first of the largest."""
    logits = norm_linear(x, norm_weight, eps, weight, out_dtype=torch.float32)[:, :vocab_size]  # (T, N)
    ids = logits.argmax(dim=-1)  # (T)
    return ids, logits.gather(1, ids[:, None])[:, 0]


def norm_argmax(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: Weight, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise each row and find its likeliest token.

    id = argmin {v < vocab_size : z_v = max z},  z = rms_norm(x) W^T

    Args:
        x: (T, D).
        norm_weight: (D) the dtype of `x`, or fp32.
        eps: of the norm.
        weight: (N, D) the dtype of `x`, or packed.
        vocab_size: rows of the weight that are tokens; those behind are padding and never win.

    Returns:
        (T) int64 ids, the lowest of equals, and (T) fp32 their logits; the sums are fp32.
    """
    dims: dict[str, int] = {}
    expect(x, "T D", FLOATS, dims, name="x")
    expect(norm_weight, "D", (x.dtype, torch.float32), dims, name="norm_weight")
    assert 0 < vocab_size <= weight.shape[0], (vocab_size, weight.shape)
    if use_reference(x) or isinstance(weight, PackedWeight):
        return norm_argmax_ref(x, norm_weight, eps, weight, vocab_size)
    expect(weight, "N D", x.dtype, dims, name="weight")
    if not is_step_map(x, weight):
        return norm_argmax_ref(x, norm_weight, eps, weight, vocab_size)
    settings = linear_triton.settings_for(*weight.shape)
    return linear_triton.argmax_step(x, norm_weight, eps, weight, vocab_size, settings)
