"""Triton kernels of the RMS norms; equations and references are in `kernels/norm.py`. One program takes one row."""

import torch
import triton
import triton.language as tl

from soloist.kernels.launch import let_consumers_start, pdl_options, wait_for_producers


@triton.jit
def rms_norm_kernel(x_ptr, x_stride_t, weight_ptr, eps, y_ptr, D, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y = x / sqrt(mean(x^2) + eps) * weight. Grid: (T,)."""
    i_t = tl.program_id(0).to(tl.int64)
    i_d = tl.arange(0, BLOCK)
    m_d = i_d < D
    b_weight = tl.load(weight_ptr + i_d, mask=m_d, other=0.0).to(tl.float32)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    b_x = tl.load(x_ptr + i_t * x_stride_t + i_d, mask=m_d, other=0.0).to(tl.float32)
    b_y = b_x * (1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=0) / D + eps)) * b_weight
    tl.store(y_ptr + i_t * D + i_d, b_y.to(y_ptr.dtype.element_ty), mask=m_d)


@triton.jit
def gated_rms_norm_kernel(
    x_ptr, x_stride_t, x_stride_h, gate_ptr, gate_stride_t, gate_stride_h, weight_ptr, eps, y_ptr, H, V,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate), the mean over V. Grid: (T, H)."""
    i_t = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    i_v = tl.arange(0, BLOCK)
    m_v = i_v < V
    b_weight = tl.load(weight_ptr + i_v, mask=m_v, other=0.0).to(tl.float32)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    b_x = tl.load(x_ptr + i_t * x_stride_t + i_h * x_stride_h + i_v, mask=m_v, other=0.0).to(tl.float32)
    p_gate = gate_ptr + i_t * gate_stride_t + i_h * gate_stride_h + i_v
    b_gate = tl.sigmoid(tl.load(p_gate, mask=m_v, other=0.0).to(tl.float32))
    b_y = b_x * (1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=0) / V + eps)) * b_weight * b_gate
    tl.store(y_ptr + (i_t * H + i_h) * V + i_v, b_y.to(y_ptr.dtype.element_ty), mask=m_v)


def rms_norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Run `rms_norm`."""
    T, D = x.shape
    y = torch.empty((T, D), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(D)
    warps = min(max(block // 512, 1), 16)
    rms_norm_kernel[T,](x, x.stride(0), weight, eps, y, D, BLOCK=block, num_warps=warps, **pdl_options())
    return y


def gated_rms_norm_rows(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Run `gated_rms_norm`."""
    T, H, V = x.shape
    y = torch.empty((T, H, V), dtype=x.dtype, device=x.device)
    gated_rms_norm_kernel[T, H](
        x, x.stride(0), x.stride(1), gate, gate.stride(0), gate.stride(1), weight, eps, y, H, V,
        BLOCK=triton.next_power_of_2(V), num_warps=1, **pdl_options(),
    )  # fmt: skip
    return y
