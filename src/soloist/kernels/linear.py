"""Linear maps, alone and with the norm before or the residual behind them. Owns `PackedWeight`, the CPU's packed weights."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from soloist.kernels.check import expect, use_reference
from soloist.kernels.norm import rms_norm_ref

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

PackedKind = Literal["int4", "int8", "fp16"]
# Inputs that share one scale and one zero in an int4 weight.
INT4_GROUP = 32


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A linear map's weight (O, I) in a form that PyTorch's CPU kernels read directly. CPU only.

    int4: w = (q - 8) * scale + zero, q in 0..15, one scale and zero per 32 inputs.
    int8: w = q * scale, q in -127..127, one scale per output.
    fp16: w itself.
    """

    kind: PackedKind
    # O, I.
    shape: tuple[int, int]
    # int4: uint8 (O, I/2) in the layout of this machine's kernel; int8: (O, I) int8; fp16: (O, I) fp16.
    codes: torch.Tensor
    # int4: (I/32, O, 2) [scale, zero]; int8: (O); fp16: none. In `activation_dtype`.
    scales: torch.Tensor | None

    @property
    def activation_dtype(self) -> torch.dtype:
        """The dtype the inputs must have."""
        return torch.float16 if self.scales is None else self.scales.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes read to apply the weight once."""
        scales = 0 if self.scales is None else self.scales.numel() * self.scales.element_size()
        return self.codes.numel() * self.codes.element_size() + scales

    def dequantise(self) -> torch.Tensor:
        """Compute the weight that is really applied, (O, I) fp32."""
        return linear_packed_cpu(torch.eye(self.shape[1], dtype=self.activation_dtype), self).float().t().contiguous()


Weight = torch.Tensor | PackedWeight


def pack_int4(
    codes: torch.Tensor,
    scales: torch.Tensor,
    mins: torch.Tensor,
    *,
    activation_dtype: torch.dtype = torch.bfloat16,
) -> PackedWeight:
    """Pack a weight that is already quantised: w = code * scale + min.

    Args:
        codes: (O, I) uint8, 0..15; O a multiple of 16, I of 32.
        scales: (O, I/32) any float dtype.
        mins: (O, I/32) any float dtype. For Q4_0 this is -8 * scale, for Q4_1 the stored minimum.
        activation_dtype: dtype of the inputs, and so of the scales.
    """
    dims: dict[str, int] = {}
    expect(codes, "O I", torch.uint8, dims, name="codes")
    dims["B"] = dims["I"] // INT4_GROUP
    expect(scales, "O B", FLOATS, dims, name="scales")
    expect(mins, "O B", FLOATS, dims, name="mins")
    zeros = mins.float() + 8 * scales.float()
    scale_and_zero = torch.stack((scales.float(), zeros), dim=-1).transpose(0, 1).contiguous()  # (I/32, O, 2)
    return PackedWeight(
        kind="int4",
        shape=(codes.shape[0], codes.shape[1]),
        codes=torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1),
        scales=scale_and_zero.to(activation_dtype),
    )


def pack_weight(weight: torch.Tensor, kind: PackedKind, *, activation_dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
    """Quantise and pack a dense weight.

    Args:
        weight: (O, I) float.
        kind: the form; int4 needs O a multiple of 16 and I of 32.
        activation_dtype: dtype of the inputs; fp16 weights take fp16 inputs whatever is asked.
    """
    expect(weight, "O I", FLOATS, {}, name="weight")
    shape = (weight.shape[0], weight.shape[1])
    if kind == "fp16":
        return PackedWeight(kind=kind, shape=shape, codes=weight.half().contiguous(), scales=None)
    dense = weight.float()
    if kind == "int8":
        scales = dense.abs().amax(dim=1).clamp(min=1e-10) / 127  # (O)
        codes = (dense / scales[:, None]).round().to(torch.int8)  # (O, I)
        return PackedWeight(kind=kind, shape=shape, codes=codes, scales=scales.to(activation_dtype))
    groups = dense.view(shape[0], -1, INT4_GROUP)  # (O, I/32, 32)
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)  # (O, I/32)
    scales = ((high - low) / 15).clamp(min=1e-10)
    codes = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, 15).to(torch.uint8)
    return pack_int4(codes.view(shape), scales, low, activation_dtype=activation_dtype)


def packing_error(packed: PackedWeight, weight: torch.Tensor) -> float:
    """Compute the relative RMS error of a packed weight against the dense one (O, I)."""
    dense = weight.float()
    return ((packed.dequantise() - dense).norm() / dense.norm()).item()


def linear_packed_cpu(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Apply a packed weight to (T, I) inputs of its activation dtype; the sum is fp32, the result has the inputs' dtype."""
    if weight.kind == "int4":
        y = torch._weight_int4pack_mm_for_cpu(x, weight.codes, INT4_GROUP, weight.scales)
    elif weight.kind == "int8":
        y = torch._weight_int8pack_mm(x, weight.codes, weight.scales)
    else:
        return F.linear(x, weight.codes, bias)
    return y if bias is None else y + bias


def linear_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Compute x W^T + b with fp32 sums."""
    return F.linear(x, weight, bias).to(out_dtype or x.dtype)


def linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Apply a linear map.

    y = x W^T + b

    Args:
        x: (T, I).
        weight: (O, I), or packed.
        bias: (O).
        out_dtype: dtype of the result; None: that of `x`.

    Returns:
        (T, O), fp32 sums.
    """
    dims: dict[str, int] = {}
    expect(x, "T I", FLOATS, dims, name="x")
    if isinstance(weight, PackedWeight):
        return linear_packed_cpu(x, weight, bias).to(out_dtype or x.dtype)
    expect(weight, "O I", x.dtype, dims, name="weight")
    if bias is not None:
        expect(bias, "O", x.dtype, dims, name="bias")
    if use_reference(x):
        return linear_ref(x, weight, bias, out_dtype=out_dtype)
    raise NotImplementedError("linear has no CUDA kernel yet: set SOLOIST_REFERENCE=1")


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Normalise each row, then apply a linear map.

    y = rms_norm(x) W^T + b

    Args:
        x: (T, D).
        norm_weight: (D).
        eps: of the norm.
        weight: (O, D), or packed.
        bias: (O).
        out_dtype: dtype of the result; None: that of `x`.

    Returns:
        (T, O), fp32 sums.
    """
    return linear(rms_norm_ref(x, norm_weight, eps), weight, bias, out_dtype=out_dtype)


def norm_swiglu(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_up: Weight, limit: float | None = None
) -> torch.Tensor:
    """Normalise each row, then apply the first half of a SwiGLU block.

    g, u = rms_norm(x) W^T;  y = silu(g) * u;  with a limit: min(silu(g), limit) * clamp(u, -limit, limit)

    Args:
        x: (T, D).
        norm_weight: (D).
        eps: of the norm.
        gate_up: (2F, D), gate rows then up rows, or packed.
        limit: bound on both factors, applied after the SiLU; None: no bound.

    Returns:
        (T, F), the dtype of `x`.
    """
    gate, up = norm_linear(x, norm_weight, eps, gate_up).chunk(2, dim=-1)  # (T, F) each
    gate = F.silu(gate.float())
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.float().clamp(-limit, limit)
    return (gate * up).to(x.dtype)


def linear_residual(x: torch.Tensor, weight: Weight, residual: torch.Tensor) -> torch.Tensor:
    """Apply a linear map and add it to the residual stream.

    y = residual + x W^T

    Args:
        x: (T, I).
        weight: (D, I), or packed.
        residual: (T, D), the dtype of `x`.

    Returns:
        (T, D), the dtype of `x`.
    """
    return residual + linear(x, weight)
