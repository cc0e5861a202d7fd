"""Decoding the quantised blocks of GGUF tensors: every type is small integers with a scale and a minimum per group.

    w = scale * q + minimum          one scale and one minimum per group of 32 (Q6_K: 16) values of a row

Written here because the decoders of the `gguf` package run at 40-50 million values a second on one core, half a minute
for a model of 1.5 billion parameters; the tests hold both equal, bit for bit. Layouts: ggml `ggml-common.h`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Groups(NamedTuple):
    """One tensor as integers with a scale and a minimum per group of a row; B = number of groups, M = group size."""

    # (B, M) uint8 or int8.
    q: torch.Tensor
    # (B) fp32.
    scale: torch.Tensor
    # (B) fp32.
    minimum: torch.Tensor


def _half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Read one fp16 number of each block: (B, block bytes) uint8 to (B) fp32."""
    return blocks[:, offset : offset + 2].view(torch.float16)[:, 0].float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack the low halves of all bytes, then the high halves: (..., n) to (..., 2n)."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Spread the 32 bits of each row over 32 values, worth 16 each: (B, 4) uint8 to (B, 32) uint8."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts & 1) << 4).flatten(1)


def _q4_0(blocks: torch.Tensor) -> Groups:
    scale = _half(blocks, 0)
    return Groups(_nibbles(blocks[:, 2:]), scale, -8 * scale)


def _q4_1(blocks: torch.Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> Groups:
    scale = _half(blocks, 0)
    return Groups(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale)


def _q5_1(blocks: torch.Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> Groups:
    scale = _half(blocks, 0)
    return Groups(blocks[:, 2:].view(torch.int8), scale, torch.zeros_like(scale))


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode the eight scales and minima of each Q4_K or Q5_K block: twice (8 B) fp32."""
    # 12 bytes: low six bits of scales 0-3, of minima 0-3, then four bits each of scales and minima 4-7, whose upper two
    # bits sit on top of the first eight bytes.
    scales, minima, rest = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat([scales & 63, rest & 15 | scales >> 2 & 48], dim=1)  # (B, 8)
    minima = torch.cat([minima & 63, rest >> 4 | minima >> 2 & 48], dim=1)  # (B, 8)
    scale = _half(blocks, 0)[:, None] * scales
    minimum = _half(blocks, 2)[:, None] * minima
    return scale.flatten(), -minimum.flatten()


def _q4_k(blocks: torch.Tensor) -> Groups:
    q = _nibbles(blocks[:, 16:].unflatten(1, (4, 32)))  # (B, 4, 64): groups 2i and 2i+1 share 32 bytes
    return Groups(q.view(-1, 32), *_k_scales(blocks))


def _q5_k(blocks: torch.Tensor) -> Groups:
    q = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)  # (B, 8, 32)
    fifth_bits = blocks[:, 16:48].contiguous()
    for i in range(8):
        # Bit i of byte j belongs to value j of group i.
        q[:, i] |= (fifth_bits >> i & 1) << 4
    return Groups(q.view(-1, 32), *_k_scales(blocks))


def _q6_k(blocks: torch.Tensor) -> Groups:
    q = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).view(-1, 2, 4, 32)  # (B, 2, 4, 32)
    high_bits = blocks[:, 128:192].contiguous().view(-1, 2, 32)
    for i in range(4):
        q[:, :, i] |= (high_bits >> 2 * i & 3) << 4
    scale = (_half(blocks, 208)[:, None] * blocks[:, 192:208].view(torch.int8)).flatten()
    return Groups(q.view(-1, 16), scale, -32 * scale)


_DECODERS: dict[str, Callable[[torch.Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Types that are 4-bit integers in groups of 32: they need no requantising to become packed int4.
FOUR_BIT_TYPES = ("Q4_0", "Q4_1", "Q4_K")


def decode_groups(rows: torch.Tensor, type_name: str, block_bytes: int) -> Groups:
    """Decode a quantised tensor's rows to integers, scales and minima.

    Args:
        rows: (rows, bytes per row) uint8.
        type_name: a quantised type.
        block_bytes: bytes of one of its blocks.

    Returns:
        groups in row-major order.
    """
    return _DECODERS[type_name](rows.view(-1, block_bytes))


def decode(rows: torch.Tensor, type_name: str, block_bytes: int) -> torch.Tensor:
    """Decode any tensor's rows to (rows, values per row): fp32, or the file's own dtype if it holds plain floats."""
    if type_name in FLOAT_TYPES:
        return rows.view(FLOAT_TYPES[type_name])
    groups = decode_groups(rows, type_name, block_bytes)
    values = groups.q * groups.scale[:, None]
    values += groups.minimum[:, None]
    return values.view(len(rows), -1)
