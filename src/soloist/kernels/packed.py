"""Weights of 4, 8 and 16 bits as a processor's kernels read them: quantised, packed, and taken apart again.

Owns `PackedWeight`. Products are `linear`'s. Knows nothing of files.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from soloist.errors import UnsupportedError
from soloist.kernels import step_cpu
from soloist.kernels.check import FLOATS, expect

PackedKind = Literal["int4", "int8", "fp16"]
# Inputs that share one scale and one minimum in an int4 weight, and one scale in an int8 weight of tiles.
INT4_GROUP = step_cpu.GROUP
# int4 takes outputs in multiples of this.
INT4_ROWS = step_cpu.TILE
# PyTorch's int8 kernel reads inputs in multiples of this (AVX2: of 8), behind the end of others.
INT8_INPUTS = 16
# Rows of a tile of PyTorch's packed int4 codes, four vectors of fp32, on the CPUs that its kernel is vectorised for.
INT4_TILES = {"AVX512": 64, "AVX2": 32}
# Bytes of 16 outputs of a group, codes and fp16 numbers.
TILE_BYTES = {"int4": 256 + 2 * 32, "int8": 512 + 32}
# Values of a weight that are held in fp32 at a time: a buffer of 1 MiB stays in the cache.
BLOCK_VALUES = 2**18
# Rows that are quantised at a time, to bound the memory of loading. A multiple of every int4 tile.
PACK_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A linear map's weight (O, I) as kernels of a CPU read it. CPU only.

    fp16 is w itself. It takes inputs of any dtype and computes in fp32; an fp32 result (logits) is never rounded.

    int4 and int8 are tiles where `step_cpu` has kernels and inputs are bf16:
        int4: w = code * scale + minimum, codes 0..15, fp16 numbers for 32 inputs of an output.
        int8: w = code * scale, codes -127..127, an fp16 scale for 32 inputs of an output.
    and otherwise what PyTorch's kernels read:
        int4: w = (code - 8) * scale + zero, numbers of the inputs' dtype for 32 inputs of an output.
        int8: w = code * scale, a scale of the inputs' dtype for an output.
    PyTorch's take inputs of the scales' dtype, which ought to be bf16: in fp32 and fp16 they are not vectorised, and
    ten times slower. Their results are rounded to that dtype, those of tiles not. Tiles round inputs, see
    `step_cpu.Tiles`. A row's result is the same, bit by bit, in every step of 1..16 tokens.
    """

    kind: PackedKind
    # (O, I).
    shape: tuple[int, int]
    # None: tiles. int4: uint8 (O, I/2) in the layout of this machine's kernel. int8: (O, I) int8. fp16: FBGEMM's own
    # matrix, which its kernels multiply by fp32 inputs; where PyTorch comes without FBGEMM, (O, I) fp16.
    codes: torch.Tensor | torch.ScriptObject | None = None
    # Of PyTorch's forms. int4: (I/32, O, 2), scale and zero. int8: (O).
    scales: torch.Tensor | None = None
    # Codes and numbers, in the layout of step.c.
    tiles: step_cpu.Tiles | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes read to apply the weight to one token."""
        if self.tiles is not None:
            return self.tiles.codes.numel()
        num_values = self.shape[0] * self.shape[1]
        codes = {"int4": num_values // 2, "int8": num_values, "fp16": 2 * num_values}[self.kind]
        return codes + (0 if self.scales is None else self.scales.numel() * self.scales.element_size())

    @property
    def input_dtype(self) -> torch.dtype:
        """What inputs come in: the only dtype that int4 and int8 take, and for fp16 that in which it computes."""
        if self.tiles is not None:
            return torch.bfloat16
        return torch.float32 if self.scales is None else self.scales.dtype

    def place_in(self, pages: step_cpu.LargePages) -> "PackedWeight":
        """Give the weight with its tiles in large pages; others are as they are."""
        if self.tiles is None:
            return self
        return replace(self, tiles=replace(self.tiles, codes=pages.place(self.tiles.codes)))

    def dequantise(self) -> torch.Tensor:
        """Compute the weight that is really applied, (O, I) fp32."""
        weight = torch.empty(self.shape)
        for rows, block in fp32_blocks(self):
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


def can_tile(shape: tuple[int, int], activation_dtype: torch.dtype = torch.bfloat16) -> bool:
    """Say whether int4 and int8 weights of this shape become tiles."""
    return activation_dtype is torch.bfloat16 and step_cpu.can_map(*shape)


def pack_int4(
    codes: torch.Tensor,
    scales: torch.Tensor,
    mins: torch.Tensor,
    *,
    activation_dtype: torch.dtype = torch.bfloat16,
    has_fine_inputs: bool = True,
) -> PackedWeight:
    """Pack a weight that is already quantised: w = code * scale + min.

    The codes are kept. In tiles scales and minima are rounded to fp16, which is what files have; for PyTorch's kernel
    scales, and the zeros min + 8 * scale, are rounded to `activation_dtype`.

    Args:
        codes: (O, I) uint8, 0..15; O a multiple of 16, I of 32.
        scales: (O, I/32). Of Q4_0 and Q4_1: d.
        mins: (O, I/32). Of Q4_0: -8 * d; of Q4_1: m.
        activation_dtype: dtype of the inputs.
        has_fine_inputs: of tiles, how inputs are rounded.

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
    if can_tile(shape, activation_dtype):
        pieces = (x.split(PACK_ROWS) for x in (codes, scales, mins))
        tiles = [_make_tiles("int4", c, s.half(), m.half()) for c, s, m in zip(*pieces, strict=True)]
        held = step_cpu.Tiles(torch.cat(tiles), shape, is_int4=True, has_fine_inputs=has_fine_inputs)
        return PackedWeight(kind="int4", shape=shape, tiles=held)
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
    if can_tile(shape, activation_dtype):
        quantise_groups = _quantise_int4_groups if kind == "int4" else _quantise_int8_groups
        tiles = [_make_tiles(kind, *quantise_groups(rows.float(), torch.float16)) for rows in weight.split(PACK_ROWS)]
        # Rounded to 4 bits a weight loses ten times what coarse inputs do.
        held = step_cpu.Tiles(torch.cat(tiles), shape, is_int4=kind == "int4", has_fine_inputs=kind != "int4")
        return PackedWeight(kind=kind, shape=shape, tiles=held)
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


def _quantise_int4_groups(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise rows (O, I) fp32 to codes 0..15, scales and minima (O, I/32) of `dtype`."""
    groups = weight.view(weight.shape[0], -1, INT4_GROUP)  # (O, I/32, 32)
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)  # (O, I/32)
    # The floor keeps a constant group from dividing by zero, in fp16 too.
    scales, mins = ((high - low) / 15).clamp(min=1e-7).to(dtype), low.to(dtype)
    codes = ((groups - mins.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 15)
    return codes.view(weight.shape).to(torch.uint8), scales, mins


def _quantise_int8_groups(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows (O, I) fp32 to codes 1..255, of which 128 is zero, and scales (O, I/32) of `dtype`."""
    groups = weight.view(weight.shape[0], -1, INT4_GROUP)  # (O, I/32, 32)
    scales = (groups.abs().amax(dim=-1) / 127).clamp(min=1e-7).to(dtype)  # (O, I/32)
    codes = (groups / scales.float()[..., None]).round().clamp(-127, 127) + 128
    return codes.view(weight.shape).to(torch.uint8), scales


def _make_tiles(kind: PackedKind, codes: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
    """Bring codes (O, I) uint8 and fp16 numbers (O, I/32) into the layout of step.c: (O/16, I/32, bytes) uint8."""
    num_tiles, num_groups = codes.shape[0] // step_cpu.TILE, codes.shape[1] // step_cpu.GROUP
    tiles = torch.empty(num_tiles, num_groups, TILE_BYTES[kind], dtype=torch.uint8)
    groups = codes.view(num_tiles, step_cpu.TILE, num_groups, step_cpu.GROUP)
    if kind == "int4":
        groups = groups[..., :16] | groups[..., 16:] << 4  # (O/16, 16, I/32, 16)
    # A vector holds four inputs of each output.
    vectors = groups.unflatten(-1, (-1, 4)).permute(0, 2, 3, 1, 4)  # (O/16, I/32, 4 or 8, 16, 4)
    end = vectors[0, 0].numel()
    tiles[..., :end].view(vectors.shape).copy_(vectors)
    for i, x in enumerate(numbers):
        place = tiles[..., end + 32 * i : end + 32 * (i + 1)].view(torch.float16)  # (O/16, I/32, 16)
        place.copy_(x.view(num_tiles, step_cpu.TILE, num_groups).transpose(1, 2))
    return tiles


def _open_tiles(is_int4: bool, tiles: torch.Tensor, values: torch.Tensor) -> None:
    """Dequantise tiles (O/16, I/32, bytes) into `values` (O, I) fp32, written in place."""
    num_tiles, num_groups = tiles.shape[:2]
    end = 256 if is_int4 else 512
    vectors = tiles[..., :end].unflatten(-1, (-1, step_cpu.TILE, 4)).permute(0, 3, 1, 2, 4)  # (O/16, 16, I/32, .., 4)
    numbers = tiles[..., end:].view(torch.float16).unflatten(-1, (-1, step_cpu.TILE))  # (O/16, I/32, 1 or 2, 16)
    numbers = numbers.float().permute(2, 0, 3, 1)[..., None]  # (1 or 2, O/16, 16, I/32, 1)
    groups = values.view(num_tiles, step_cpu.TILE, num_groups, step_cpu.GROUP)
    places = groups.unflatten(-1, (-1, 4))  # (O/16, 16, I/32, 8, 4)
    if is_int4:
        places[..., :4, :].copy_(vectors & 15)
        places[..., 4:, :].copy_(vectors >> 4)
        groups.mul_(numbers[0]).add_(numbers[1])
    else:
        places.copy_(vectors)
        groups.sub_(128).mul_(numbers[0])


def _quantise_int8(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows (O, I) fp32 to int8 codes and scales (O) of `dtype`, for PyTorch's kernel."""
    # The floor keeps a row of zeros from dividing by zero, in fp16 too.
    scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-7).to(dtype)  # (O)
    codes = (weight / scales.float()[:, None]).round().clamp(-127, 127)  # (O, I)
    return codes.to(torch.int8), scales


def _quantise_int4(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows (O, I) fp32 to packed codes and scales and zeros (I/32, O, 2) of `dtype`, for PyTorch's kernel."""
    groups = weight.view(weight.shape[0], -1, INT4_GROUP)  # (O, I/32, 32)
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)  # (O, I/32)
    scales = ((high - low) / 15).clamp(min=1e-7).to(dtype)
    zeros = (low + 8 * scales.float()).to(dtype)
    codes = ((groups - zeros.float()[..., None]) / scales.float()[..., None] + 8).round().clamp(0, 15)
    scale_and_zero = torch.stack((scales, zeros), dim=-1).transpose(0, 1)  # (I/32, O, 2)
    return _tile_int4(codes.view(weight.shape)), scale_and_zero


def _tile_int4(codes: torch.Tensor) -> torch.Tensor:
    """Bring codes (O, I), 0..15, into the layout of PyTorch's int4 kernel: (O, I/2) uint8."""
    packed = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    # PyTorch does not promise this layout, and a wrong guess of it would only show as bad answers to long prompts.
    assert torch.equal(_untile_int4(packed).t(), codes), "PyTorch's layout of int4 weights has changed"
    return packed


def _untile_int4(packed: torch.Tensor) -> torch.Tensor:
    """Read codes back from the layout of PyTorch's int4 kernel: (O, I/2) uint8 to (I, O) uint8.

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


def fp32_blocks(weight: Weight) -> Iterator[tuple[slice, torch.Tensor]]:
    """Give a weight's rows block by block in fp32: which rows, and (rows, I). The next block overwrites the last."""
    codes: Weight | torch.ScriptObject | None = weight
    scales, tiles = None, None
    if isinstance(weight, PackedWeight):
        codes, scales, tiles = weight.codes, weight.scales, weight.tiles
    if tiles is not None:
        codes = tiles.codes
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
        block = values.view(-1, num_inputs)
        if tiles is not None:
            _open_tiles(tiles.is_int4, codes[start // step_cpu.TILE : rows.stop // step_cpu.TILE], block)
        elif scales is None:
            block.copy_(codes[rows])
        elif scales.dim() == 1:
            block.copy_(codes[rows]).mul_(scales[rows, None].float())
        else:
            scale, zero = scales[:, rows].float().permute(2, 0, 1).contiguous()[:, :, None]  # (I/32, 1, rows) each
            values.view(num_inputs, -1).copy_(_untile_int4(codes[rows]))
            values.view(-1, INT4_GROUP, rows.stop - start).sub_(8).mul_(scale).add_(zero)
            block = values.view(num_inputs, -1).t()
        yield rows, block
