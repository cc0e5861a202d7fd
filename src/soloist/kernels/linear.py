"""Linear maps, alone and with the norm before or the residual behind them, dense or packed (`packed.py`)."""

import torch
import torch.nn.functional as F

from soloist.kernels import step_cpu
from soloist.kernels.check import FLOATS, expect, use_reference, use_reference_everywhere
from soloist.kernels.launch import HAS_TRITON
from soloist.kernels.norm import rms_norm, rms_norm_ref
from soloist.kernels.packed import INT4_GROUP, PackedWeight, Weight, fp32_blocks

if HAS_TRITON:
    from soloist.kernels import linear_cuda, linear_triton

# On a GPU from this many outputs on, such as an output head's, cuBLAS is faster for more than this many rows: on one
# H200 199 against 241 us for 9 rows of Ling's head, 119 against 137 us for Qwen2.5's.
MIN_OUTPUTS_OF_WIDE_MAPS = 65536
MAX_ROWS_OF_WIDE_MAPS = 2

# With the gated map on tensor cores a step of Qwen2.5-1.5B takes 1.344 ms instead of 1.367 for 4 rows, but 1.82 instead
# of 1.73 for 9.
MAX_ROWS_OF_LARGE_GATED_MAPS = 8

# From this many tokens on, dequantising once is cheaper than PyTorch's kernel, which does it for each few rows
# (measured on Zen 3, one thread, 3072 x 576).
MIN_TOKENS_TO_DEQUANTISE = {"int4": 128, "int8": 64}


def linear_ref(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Compute x W^T + b in fp32, dequantising a packed weight, rounded once to `out_dtype`."""
    out_dtype = out_dtype or x.dtype
    if isinstance(weight, torch.Tensor) and x.dtype == weight.dtype == torch.float32:
        return F.linear(x, weight, bias).to(out_dtype)
    rows_of_x = x.float()
    y = torch.empty(x.shape[0], weight.shape[0], device=x.device)  # (T, O)
    for rows, block in fp32_blocks(weight):
        torch.mm(rows_of_x, block.t(), out=y[:, rows])
    return (y if bias is None else y.add_(bias)).to(out_dtype)


def linear_packed_cpu(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Apply a packed weight by the kernel of its kind: (T, I) to (T, O). See `PackedWeight` for dtypes and rounding."""
    if weight.tiles is not None:
        return step_cpu.linear(x, weight.tiles, bias=bias, out_dtype=out_dtype or x.dtype)
    codes, scales = weight.codes, weight.scales
    if not isinstance(codes, torch.Tensor):
        y = torch.ops.quantized.linear_dynamic_fp16(x.float(), codes)
    elif scales is None:
        y = F.linear(x.half(), codes)
    elif x.shape[0] >= MIN_TOKENS_TO_DEQUANTISE[weight.kind]:
        return linear_ref(x, weight, bias, out_dtype=out_dtype)
    elif weight.kind == "int4":
        y = torch._weight_int4pack_mm_for_cpu(x, codes, INT4_GROUP, scales)
    else:
        y = torch._weight_int8pack_mm(x, codes, scales)
    return (y if bias is None else y.add_(bias)).to(out_dtype or x.dtype)


def _tiles(weight: Weight) -> step_cpu.Tiles | None:
    """Give a weight's tiles, if it has them and their kernel shall run: it takes norm, gate and residual along."""
    return weight.tiles if isinstance(weight, PackedWeight) and not use_reference_everywhere() else None


def linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Apply a linear map.

    y = x W^T + b

    Args:
        x: (T, I).
        weight: (O, I) the dtype of `x`, contiguous or the transpose of what is, or packed.
        bias: (O) the dtype of `x`.
        out_dtype: dtype of the result; None: that of `x`.

    Returns:
        (T, O): fp32 sums, one rounding.
    """
    if bias is not None:
        expect(bias, "O", x.dtype, {"O": weight.shape[0]}, name="bias")
    if isinstance(weight, PackedWeight):
        # The packed kernels check `x` themselves, at every token.
        form = linear_ref if use_reference_everywhere() else linear_packed_cpu
        return form(x, weight, bias, out_dtype=out_dtype)
    dims: dict[str, int] = {}
    expect(x, "T I", FLOATS, dims, name="x")
    expect(weight, "O I", x.dtype, dims, name="weight")
    if use_reference(x):
        return linear_ref(x, weight, bias, out_dtype=out_dtype)
    if is_step_map(x, weight):
        settings = linear_triton.settings_for(*weight.shape)
        return linear_triton.linear_step(x, None, 0.0, weight, bias, None, out_dtype or x.dtype, settings)
    return _matrix_product(x, weight, bias, out_dtype)


def is_step_map(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether a GPU's step kernel takes the product; cuBLAS has more rows, other dtypes or strides, wide heads."""
    T, O = x.shape[0], weight.shape[0]
    is_wide = T > MAX_ROWS_OF_WIDE_MAPS and O >= MIN_OUTPUTS_OF_WIDE_MAPS
    is_step = T <= linear_triton.MAX_STEP_TOKENS and x.element_size() == 2
    return is_step and weight.is_contiguous() and not is_wide


def _matrix_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """A GPU's dense product, by cuBLAS: sums in fp32, the result in `out_dtype`."""
    if out_dtype in (None, x.dtype):
        return F.linear(x, weight, bias)
    assert out_dtype is torch.float32
    y = torch.mm(x, weight.t(), out_dtype=out_dtype)
    return y if bias is None else y + bias


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
        norm_weight: (D) the dtype of `x`, or fp32.
        eps: of the norm.
        weight: (O, D) the dtype of `x`, or packed.
        bias: (O) the dtype of `x`.
        out_dtype: dtype of the result; None: that of `x`.

    Returns:
        (T, O): fp32 sums. The normalised row is rounded to the dtype of `x`, for tiles once and more finely; on a GPU
        x * norm_weight is, and the norm's scale is applied to the sum.
    """
    if (tiles := _tiles(weight)) is not None:
        return step_cpu.linear(x, tiles, norm=norm_weight, eps=eps, bias=bias, out_dtype=out_dtype or x.dtype)
    expect(norm_weight, "D", (x.dtype, torch.float32), {"D": x.shape[1]}, name="norm_weight")
    if use_reference(x):
        return linear(rms_norm_ref(x, norm_weight, eps), weight, bias, out_dtype=out_dtype)
    assert isinstance(weight, torch.Tensor), "packed weights are for the CPU"
    if is_step_map(x, weight):
        expect(weight, "O D", x.dtype, {"D": x.shape[1]}, name="weight")
        if linear_cuda.can_run(x, weight):
            return linear_cuda.run(x, norm_weight, eps, weight, bias, out_dtype=out_dtype or x.dtype)
        settings = linear_triton.settings_for(*weight.shape)
        return linear_triton.linear_step(x, norm_weight, eps, weight, bias, None, out_dtype or x.dtype, settings)
    return linear(rms_norm(x, norm_weight, eps), weight, bias, out_dtype=out_dtype)


def norm_swiglu(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_up: Weight, limit: float | None = None
) -> torch.Tensor:
    """Normalise each row, then compute the inside of a SwiGLU block.

    [g, u] = rms_norm(x) W^T;  y = silu(g) * u;  with a limit: min(silu(g), limit) * clamp(u, -limit, limit)

    Args:
        x: (T, D).
        norm_weight: (D) the dtype of `x`, or fp32.
        eps: of the norm.
        gate_up: (2F, D) the dtype of `x`, gate rows then up rows, or packed.
        limit: positive bound on both factors; the gate's is applied after the SiLU and from above only. None: no bound.

    Returns:
        (T, F), the dtype of `x`. Gate and up are rounded to that dtype, but not with tiles; the product is fp32.

    Source: Shazeer 2020 (arXiv 2002.05202), equation 6; the limit as Ling-3.0 was trained with.
    """
    if (tiles := _tiles(gate_up)) is not None and tiles.shape[0] % (2 * step_cpu.TILE) == 0:
        return step_cpu.linear(x, tiles, norm=norm_weight, eps=eps, has_gate=True, limit=limit)
    if not use_reference(x) and isinstance(gate_up, torch.Tensor) and is_step_map(x, gate_up):
        if linear_cuda.can_run(x, gate_up) and x.shape[0] <= MAX_ROWS_OF_LARGE_GATED_MAPS:
            return linear_cuda.run(x, norm_weight, eps, gate_up, has_gate=True, limit=limit)
        settings = linear_triton.settings_for(*gate_up.shape, has_gate=True)
        return linear_triton.swiglu_step(x, norm_weight, eps, gate_up, limit, settings)
    gate, up = norm_linear(x, norm_weight, eps, gate_up).float().chunk(2, dim=-1)  # (T, F) each
    gate = F.silu(gate)
    if limit is not None:
        gate, up = gate.clamp_(max=limit), up.clamp(-limit, limit)
    return gate.mul_(up).to(x.dtype)


def linear_residual(x: torch.Tensor, weight: Weight, residual: torch.Tensor) -> torch.Tensor:
    """Apply a linear map and add it to the residual stream.

    y = residual + x W^T

    Args:
        x: (T, I).
        weight: (D, I) the dtype of `x`, or packed.
        residual: (T, D), the dtype of `x`.

    Returns:
        (T, D), the dtype of `x`. The product is rounded to that dtype before it is added, but not in a GPU's step nor
        with tiles.
    """
    if (tiles := _tiles(weight)) is not None:
        return step_cpu.linear(x, tiles, residual=residual)
    expect(residual, "T D", x.dtype, {"T": x.shape[0], "D": weight.shape[0]}, name="residual")
    if not use_reference(x) and isinstance(weight, torch.Tensor) and is_step_map(x, weight):
        settings = linear_triton.settings_for(*weight.shape)
        return linear_triton.linear_step(x, None, 0.0, weight, None, residual, x.dtype, settings)
    return residual + linear(x, weight)
