"""Linear maps, alone and with the norm before or the residual behind them, dense or packed.

Owns `PackedWeight`, the form in which PyTorch's CPU kernels read weights of 4, 8 and 16 bits. Knows nothing of files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from soloist.errors import UnsupportedError
from soloist.kernels.check import FLOATS, expect, use_reference, use_reference_everywhere
from soloist.kernels.launch import HAS_TRITON
from soloist.kernels.norm import rms_norm, rms_norm_ref

if HAS_TRITON:
    from soloist.kernels import linear_cuda, linear_triton

# On a GPU from this many outputs on, such as an output head's, cuBLAS is faster for more than this many rows: on one
# H200 199 against 241 us for 9 rows of Ling's head, 119 against 137 us for Qwen2.5's.
MIN_OUTPUTS_OF_WIDE_MAPS = 65536
MAX_ROWS_OF_WIDE_MAPS = 2

# With the gated map on tensor cores a step of Qwen2.5-1.5B takes 1.344 ms instead of 1.367 for 4 rows, but 1.82 instead
# of 1.73 for 9.
MAX_ROWS_OF_LARGE_GATED_MAPS = 8

PackedKind = Literal["int4", "int8", "fp16"]
# Inputs that share one scale and one zero in an int4 weight.
INT4_GROUP = 32
# The int4 kernel takes outputs in multiples of this.
INT4_ROWS = 16
# The int8 kernel reads inputs in multiples of this (AVX2: of 8), behind the end of others.
INT8_INPUTS = 16
# Rows of a tile of packed int4 codes, four vectors of fp32, on the CPUs that the kernel is vectorised for.
INT4_TILES = {"AVX512": 64, "AVX2": 32}
# From this many tokens on, dequantising once is cheaper than the kernel, which does it for each few rows
# (measured on Zen 3, one thread, 3072 x 576).
MIN_TOKENS_TO_DEQUANTISE = {"int4": 128, "int8": 64}
# Values of a weight that are held in fp32 at a time: a buffer of 1 MiB stays in the cache.
BLOCK_VALUES = 2**18
# Rows that are quantised at a time, to bound the memory of loading. A multiple of every int4 tile.
PACK_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A linear map's weight (O, I) as PyTorch's CPU kernels read it. CPU only.

    int4: w = (code - 8) * scale + zero, codes 0..15, one scale and zero per 32 inputs.
    int8: w = code * scale, codes -127..127, one scale per output.
    fp16: w itself.

    int4 and int8 take inputs of the scales' dtype, which ought to be bf16: in fp32 and fp16 the kernels are not
    vectorised, and ten times slower. Sums are fp32, results are rounded to that dtype. A row's result is the same, bit
    by bit, in every step of 1..16 tokens.
    fp16 takes inputs of any dtype and computes in fp32; an fp32 result (logits) is never rounded.
    """

    kind: PackedKind
    # (O, I).
    shape: tuple[int, int]
    # int4: uint8 (O, I/2) in the layout of this machine's kernel. int8: (O, I) int8. fp16: FBGEMM's own matrix, which
    # its kernels multiply by fp32 inputs; where PyTorch comes without FBGEMM, (O, I) fp16.
    codes: torch.Tensor | torch.ScriptObject
    # int4: (I/32, O, 2), scale and zero. int8: (O). fp16: none.
    scales: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes read to apply the weight to one token."""
        num_values = self.shape[0] * self.shape[1]
        codes = {"int4": num_values // 2, "int8": num_values, "fp16": 2 * num_values}[self.kind]
        return codes + (0 if self.scales is None else self.scales.numel() * self.scales.element_size())

    def dequantise(self) -> torch.Tensor:
        """Compute the weight that is really applied, (O, I) fp32."""
        weight = torch.empty(self.shape)
        for rows, block in _fp32_blocks(self):
            weight[rows] = block
        return weight


Weight = torch.Tensor | PackedWeight


def can_pack(kind: PackedKind, num_outputs: int, num_inputs: int) -> bool:
    """Say whether this machine has a kernel for a weight of this kind and shape; int4 is the choosy one."""
    if kind == "fp16":
        return True
    if kind == "int8":
        return num_inputs % INT8_INPUTS == 0
    is_vectorised = torch.backends.cpu.get_cpu_capability() in INT4_TILES
    return is_vectorised and num_outputs % INT4_ROWS == 0 and num_inputs % INT4_GROUP == 0


def pack_int4(
    codes: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor, *, activation_dtype: torch.dtype = torch.bfloat16
) -> PackedWeight:
    """Pack a weight that is already quantised: w = code * scale + min.

    The codes are kept. Scales, and the zeros min + 8 * scale, are rounded to `activation_dtype`.

    Args:
        codes: (O, I) uint8, 0..15; O a multiple of 16, I of 32.
        scales: (O, I/32). Of Q4_0 and Q4_1: d.
        mins: (O, I/32). Of Q4_0: -8 * d; of Q4_1: m.
        activation_dtype: dtype of the inputs.

    Raises:
        UnsupportedError: this machine has no kernel for the shape.
    """
    dims: dict[str, int] = {}
    expect(codes, "O I", torch.uint8, dims, name="codes")
    shape = (dims["O"], dims["I"])
    _refuse_unless_packable("int4", shape)
    dims["B"] = dims["I"] // INT4_GROUP
    expect(scales, "O B", FLOATS, dims, name="scales")
    expect(mins, "O B", FLOATS, dims, name="mins")
    zeros = mins.float() + 8 * scales.float()
    scale_and_zero = torch.stack((scales.float(), zeros), dim=-1).transpose(0, 1).contiguous()  # (I/32, O, 2)
    packed = torch.cat([_tile_int4(rows) for rows in codes.split(PACK_ROWS)])  # (O, I/2)
    return PackedWeight(kind="int4", shape=shape, codes=packed, scales=scale_and_zero.to(activation_dtype))


def pack_weight(
    weight: torch.Tensor, kind: PackedKind, *, activation_dtype: torch.dtype = torch.bfloat16
) -> PackedWeight:
    """Quantise and pack a dense weight: each code is the nearest, given the rounded scales.

    Args:
        weight: (O, I) float.
        kind: int4 needs O a multiple of 16 and I of 32.
        activation_dtype: dtype of the inputs that int4 and int8 will be applied to; an fp16 weight takes any.

    Raises:
        UnsupportedError: this machine has no kernel for the shape.
    """
    expect(weight, "O I", FLOATS, {}, name="weight")
    shape = (weight.shape[0], weight.shape[1])
    _refuse_unless_packable(kind, shape)
    if kind == "fp16":
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            return PackedWeight(kind=kind, shape=shape, codes=weight.half().contiguous())
        return PackedWeight(kind=kind, shape=shape, codes=torch.ops.quantized.linear_prepack_fp16(weight.float(), None))
    quantise = _quantise_int4 if kind == "int4" else _quantise_int8
    codes, scales = zip(*(quantise(rows.float(), activation_dtype) for rows in weight.split(PACK_ROWS)), strict=True)
    # Rows are the first axis of int8's scales and the second of int4's.
    axis = 1 if kind == "int4" else 0
    return PackedWeight(kind=kind, shape=shape, codes=torch.cat(codes), scales=torch.cat(scales, dim=axis).contiguous())


def packing_error(packed: PackedWeight, weight: torch.Tensor) -> float:
    """Compute the relative RMS error of a packed weight against the weight (O, I) it stands for."""
    dense = weight.float()
    return ((packed.dequantise() - dense).norm() / dense.norm()).item()


def _refuse_unless_packable(kind: PackedKind, shape: tuple[int, int]) -> None:
    """Refuse what no kernel of this machine takes."""
    if kind == "int8" and not can_pack(kind, *shape):
        raise UnsupportedError(
            f"an int8 weight of {shape[1]} inputs: they come in {INT8_INPUTS}s; keep this weight in fp16 or dense"
        )
    if not can_pack(kind, *shape):
        capability = torch.backends.cpu.get_cpu_capability()
        raise UnsupportedError(
            f"an int4 weight of {shape[0]} outputs and {shape[1]} inputs on a CPU with {capability}: outputs come in"
            f" {INT4_ROWS}s, inputs in {INT4_GROUP}s, the CPU must have {' or '.join(INT4_TILES)};"
            " keep this weight in int8, fp16 or dense"
        )


def _quantise_int8(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows (O, I) fp32 to int8 codes and scales (O) of `dtype`."""
    # The floor keeps a row of zeros from dividing by zero, in fp16 too.
    scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-7).to(dtype)  # (O)
    codes = (weight / scales.float()[:, None]).round().clamp(-127, 127)  # (O, I)
    return codes.to(torch.int8), scales


def _quantise_int4(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows (O, I) fp32 to tiled codes and scales and zeros (I/32, O, 2) of `dtype`."""
    groups = weight.view(weight.shape[0], -1, INT4_GROUP)  # (O, I/32, 32)
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)  # (O, I/32)
    scales = ((high - low) / 15).clamp(min=1e-7).to(dtype)
    zeros = (low + 8 * scales.float()).to(dtype)
    codes = ((groups - zeros.float()[..., None]) / scales.float()[..., None] + 8).round().clamp(0, 15)
    scale_and_zero = torch.stack((scales, zeros), dim=-1).transpose(0, 1)  # (I/32, O, 2)
    return _tile_int4(codes.view(weight.shape)), scale_and_zero


def _tile_int4(codes: torch.Tensor) -> torch.Tensor:
    """Bring codes (O, I), 0..15, into the layout of the int4 kernel: (O, I/2) uint8."""
    packed = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    # PyTorch does not promise this layout, and a wrong guess of it would only show as bad answers to long prompts.
    assert torch.equal(_untile_int4(packed).t(), codes), "PyTorch's layout of int4 weights has changed"
    return packed


def _untile_int4(packed: torch.Tensor) -> torch.Tensor:
    """Read codes back from the layout of the int4 kernel: (O, I/2) uint8 to (I, O) uint8.

    A tile holds, for each input, a byte for each pair of its rows: row j and row j + half the tile. Rows that fill no
    tile stand behind, rows 2j and 2j + 1 together.
    """
    num_rows, num_inputs = packed.shape[0], 2 * packed.shape[1]
    tile = INT4_TILES[torch.backends.cpu.get_cpu_capability()]
    num_tiled = num_rows - num_rows % tile
    codes = torch.empty(num_inputs, num_rows, dtype=torch.uint8)  # (I, O)
    pairs = packed[:num_tiled].view(-1, num_inputs, tile // 2).transpose(0, 1)  # (I, tiles, tile/2)
    halves = codes[:, :num_tiled].unflatten(1, (-1, 2, tile // 2))  # (I, tiles, 2, tile/2)
    torch.bitwise_and(pairs, 15, out=halves[:, :, 0])
    torch.bitwise_right_shift(pairs, 4, out=halves[:, :, 1])
    rest = packed[num_tiled:].view(num_inputs, -1)  # (I, rest/2)
    codes[:, num_tiled::2], codes[:, num_tiled + 1 :: 2] = rest & 15, rest >> 4
    return codes


def _fp32_blocks(weight: Weight) -> Iterator[tuple[slice, torch.Tensor]]:
    """Give a weight's rows block by block in fp32: which rows, and (rows, I). The next block overwrites the last."""
    codes, scales = (weight.codes, weight.scales) if isinstance(weight, PackedWeight) else (weight, None)
    if not isinstance(codes, torch.Tensor):
        yield slice(None), torch.ops.quantized.linear_unpack_fp16(codes)[0]
        return
    num_rows, num_inputs = weight.shape
    # Whole tiles of int4.
    step = max(64, BLOCK_VALUES // num_inputs // 64 * 64)
    buffer = torch.empty(min(step, num_rows) * num_inputs, device=codes.device)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        values = buffer[: (rows.stop - start) * num_inputs]
        if scales is None:
            block = values.view(-1, num_inputs).copy_(codes[rows])
        elif scales.dim() == 1:
            block = values.view(-1, num_inputs).copy_(codes[rows]).mul_(scales[rows, None].float())
        else:
            scale, zero = scales[:, rows].float().permute(2, 0, 1).contiguous()[:, :, None]  # (I/32, 1, rows) each
            values.view(num_inputs, -1).copy_(_untile_int4(codes[rows]))
            values.view(-1, INT4_GROUP, rows.stop - start).sub_(8).mul_(scale).add_(zero)
            block = values.view(num_inputs, -1).t()
        yield rows, block


def linear_ref(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Compute x W^T + b in fp32, dequantising a packed weight, rounded once to `out_dtype`."""
    out_dtype = out_dtype or x.dtype
    if isinstance(weight, torch.Tensor) and x.dtype == weight.dtype == torch.float32:
        return F.linear(x, weight, bias).to(out_dtype)
    rows_of_x = x.float()
    y = torch.empty(x.shape[0], weight.shape[0], device=x.device)  # (T, O)
    for rows, block in _fp32_blocks(weight):
        torch.mm(rows_of_x, block.t(), out=y[:, rows])
    return (y if bias is None else y.add_(bias)).to(out_dtype)


def linear_packed_cpu(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Apply a packed weight by the kernel of its kind: (T, I) to (T, O). See `PackedWeight` for dtypes and rounding."""
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


def linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Apply a linear map.

    y = x W^T + b

    Args:
        x: (T, I).
        weight: (O, I) the dtype of `x`, or packed.
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
    """Say whether a GPU's step kernel takes the product; more rows, other dtypes, wide heads go to cuBLAS."""
    T, O = x.shape[0], weight.shape[0]
    is_wide = T > MAX_ROWS_OF_WIDE_MAPS and O >= MIN_OUTPUTS_OF_WIDE_MAPS
    return T <= linear_triton.MAX_STEP_TOKENS and x.element_size() == 2 and not is_wide


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
        (T, O): fp32 sums. The normalised row is rounded to the dtype of `x`; on a GPU x * norm_weight is, and the
        norm's scale is applied to the sum.
    """
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
        (T, F), the dtype of `x`. Gate and up are rounded to that dtype, the product is computed in fp32.

    Source: Shazeer 2020 (arXiv 2002.05202), equation 6; the limit as Ling-3.0 was trained with.
    """
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
        (T, D), the dtype of `x`. The product is rounded to that dtype before it is added, but not in a GPU's step.
    """
    expect(residual, "T D", x.dtype, {"T": x.shape[0], "D": weight.shape[0]}, name="residual")
    if not use_reference(x) and isinstance(weight, torch.Tensor) and is_step_map(x, weight):
        settings = linear_triton.settings_for(*weight.shape)
        return linear_triton.linear_step(x, None, 0.0, weight, None, residual, x.dtype, settings)
    return residual + linear(x, weight)
