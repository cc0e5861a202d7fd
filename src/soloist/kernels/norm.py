"""RMS norms. Owns the plain and the gated form; norms fused with a linear map are in `linear.py`."""

import torch
import torch.nn.functional as F

from soloist.kernels.check import FLOATS, expect, use_reference
from soloist.kernels.launch import HAS_TRITON

if HAS_TRITON:
    from soloist.kernels import norm_triton


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the RMS norm over the last axis in fp32, rounded once to `x`'s dtype."""
    wide = x.float()
    if x.numel() == weight.numel() and x.is_cpu:
        # One row: with the scale as a number on the host the norm is half the calls.
        norm = torch.linalg.vector_norm(wide).item()
        return (wide * weight).mul_((norm * norm / x.numel() + eps) ** -0.5).to(x.dtype)
    return F.rms_norm(wide, weight.shape, weight.float(), eps).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each row by its root mean square.

    y = x / sqrt(mean(x^2) + eps) * weight

    Args:
        x: (T, D).
        weight: (D), the dtype of `x` or fp32.
        eps: added to the mean square.

    Returns:
        (T, D), the dtype of `x`: fp32 inside, one rounding.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4.
    """
    dims: dict[str, int] = {}
    expect(x, "T D", FLOATS, dims, name="x")
    expect(weight, "D", (x.dtype, torch.float32), dims, name="weight")
    if use_reference(x):
        return rms_norm_ref(x, weight, eps)
    return norm_triton.rms_norm_rows(x, weight, eps)


def gated_rms_norm_ref(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the RMS norm of each head times a sigmoid gate in fp32, rounded once to `x`'s dtype."""
    normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed * torch.sigmoid(gate.float())).to(x.dtype)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each head by its root mean square and gate it.

    y = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate), the mean over V

    Args:
        x: (T, H, V).
        gate: (T, H, V), before the sigmoid; the dtype of `x` or fp32.
        weight: (V), shared by the heads; the dtype of `x` or fp32.
        eps: added to the mean square.

    Returns:
        (T, H, V), the dtype of `x`: fp32 inside, one rounding.

    Source: FusedRMSNormGated of flash-linear-attention (MIT), activation sigmoid.
    """
    dims: dict[str, int] = {}
    expect(x, "T H V", FLOATS, dims, name="x")
    expect(gate, "T H V", (x.dtype, torch.float32), dims, name="gate")
    expect(weight, "V", (x.dtype, torch.float32), dims, name="weight")
    if use_reference(x):
        return gated_rms_norm_ref(x, gate, weight, eps)
    return norm_triton.gated_rms_norm_rows(x, gate, weight, eps)
