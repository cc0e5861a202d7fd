"""The output head of a greedy step: the likeliest token without a row of logits in memory. Logits are `norm_linear`.

Of ranks that share a vocabulary each finds the likeliest of its own tokens, which begin at `first_id`.
"""

import torch

from soloist.kernels.check import FLOATS, expect, use_reference
from soloist.kernels.launch import HAS_TRITON
from soloist.kernels.linear import is_step_map, linear, norm_linear
from soloist.kernels.packed import PackedWeight, Weight
from soloist.kernels.sampling import likeliest

if HAS_TRITON:
    from soloist.kernels import linear_triton


def norm_argmax(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: Weight, vocab_size: int, *, first_id: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise each row and find its likeliest token.

    id = first_id + argmin {v < vocab_size : z_v = max z},  z = rms_norm(x) W^T

    Args:
        x: (T, D).
        norm_weight: (D) the dtype of `x`, or fp32.
        eps: of the norm.
        weight: (N, D) the dtype of `x`, or packed.
        vocab_size: rows of the weight that are tokens; those behind are padding and never win.
        first_id: what the weight's first row stands for.

    Returns:
        (T) int64 ids, the lowest of equals, and (T) fp32 their logits; the sums are fp32.
    """
    dims: dict[str, int] = {}
    expect(x, "T D", FLOATS, dims, name="x")
    expect(norm_weight, "D", (x.dtype, torch.float32), dims, name="norm_weight")
    assert 0 < vocab_size <= weight.shape[0], (vocab_size, weight.shape)
    if use_reference(x) or isinstance(weight, PackedWeight) or not is_step_map(x, weight):
        logits = norm_linear(x, norm_weight, eps, weight, out_dtype=torch.float32)  # (T, N)
        return likeliest(logits[:, :vocab_size], first_id=first_id)
    expect(weight, "N D", x.dtype, dims, name="weight")
    settings = linear_triton.argmax_settings_for(x.shape[0], *weight.shape)
    return linear_triton.argmax_step(x, norm_weight, eps, weight, vocab_size, settings, first_id=first_id)


def linear_argmax(
    x: torch.Tensor, weight: Weight, addend: torch.Tensor | None, vocab_size: int, *, first_id: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find each row's likeliest token from rows that are normalised already, or a bias to logits that there are.

    id = first_id + argmin {v < vocab_size : z_v = max z},  z = addend + x W^T

    Args:
        x: (T, I).
        weight: (N, I) the dtype of `x`, or packed.
        addend: (T, N) fp32, or None.
        vocab_size: as in `norm_argmax`, as is what comes back.
        first_id: as there.
    """
    dims: dict[str, int] = {}
    expect(x, "T I", FLOATS, dims, name="x")
    if addend is not None:
        expect(addend, "T N", torch.float32, dims | {"N": weight.shape[0]}, name="addend")
    assert 0 < vocab_size <= weight.shape[0], (vocab_size, weight.shape)
    if use_reference(x) or isinstance(weight, PackedWeight) or not is_step_map(x, weight):
        logits = linear(x, weight, out_dtype=torch.float32)  # (T, N)
        logits = logits if addend is None else addend + logits
        return likeliest(logits[:, :vocab_size], first_id=first_id)
    expect(weight, "N I", x.dtype, dims, name="weight")
    settings = linear_triton.argmax_settings_for(x.shape[0], *weight.shape)
    return linear_triton.argmax_step(x, None, 0.0, weight, vocab_size, settings, addend=addend, first_id=first_id)
