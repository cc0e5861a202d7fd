"""Triton kernels of grouped-query attention; equation and reference are in `kernels/attention.py`.

A step of T <= 16 tokens is two launches. `split_kernel`: the cached positions are cut into SPLITS runs whose length is
computed on the device from the device's length, so the host plans nothing. A program takes one run for one key/value
head and for all tokens and query heads that read it. Each of its warps owns one block of 16 (token, head) rows and one
of SHARES shares of the positions, and goes through them alone: keys, values and queries are loaded as the fragments of
tensor-core products (see `linear_triton`), so warps neither exchange anything nor wait for each other. One more program
per head writes the new rows of the cache and attends to them. `combine_kernel` adds all parts up in a fixed order.

A prompt is `append_kernel`, which writes the new keys and values, and `prefill_kernel`, flash attention over the cache.

Heads are handled as two halves of K / 2, because the rotation pairs element i with element i + K / 2. Rows of the cache
before `context_len` were written in an earlier step and are read before the wait, as are `context_len` itself and the
rotary table. Row t of a step may round differently with T: where the runs are cut depends on the length.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from soloist.kernels.launch import IS_INTERPRETED, let_consumers_start, pdl_options, wait_for_producers
from soloist.kernels.linear_triton import prefetch

# Most tokens of a step; more is a prompt.
MAX_STEP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """How the cached positions are cut into programs."""

    # Runs that the positions of one key/value head are cut into, a power of two.
    splits: int
    # Warps of a program, at least; more if there are more blocks of rows.
    warps: int
    # Blocks of 16 positions that a warp loads at once.
    ahead: int


@triton.jit
def _norm_and_rotate(b_lo, b_hi, norm_ptr, eps, cos_ptr, sin_ptr, i_pos, m_pos, K: tl.constexpr):
    """Optional RMS norm, then the half-split rotation, of heads in two halves (rows, K / 2), rounded after each."""
    HALF: tl.constexpr = K // 2
    dtype = b_lo.dtype
    i_k = tl.arange(0, HALF)[None, :]
    b_lo, b_hi = b_lo.to(tl.float32), b_hi.to(tl.float32)
    if norm_ptr is not None:
        b_rms = tl.sqrt((tl.sum(b_lo * b_lo, axis=1) + tl.sum(b_hi * b_hi, axis=1)) / K + eps)[:, None]
        b_lo = (b_lo / b_rms * tl.load(norm_ptr + i_k).to(tl.float32)).to(dtype).to(tl.float32)
        b_hi = (b_hi / b_rms * tl.load(norm_ptr + HALF + i_k).to(tl.float32)).to(dtype).to(tl.float32)
    o_angle = i_pos.to(tl.int64)[:, None] * HALF + i_k
    b_cos = tl.load(cos_ptr + o_angle, mask=m_pos[:, None], other=0.0)
    b_sin = tl.load(sin_ptr + o_angle, mask=m_pos[:, None], other=0.0)
    return (b_lo * b_cos - b_hi * b_sin).to(dtype), (b_hi * b_cos + b_lo * b_sin).to(dtype)


@triton.jit
def _append_rows(
    qkv_ptr, qkv_stride_t, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, norm_ptr, eps, i_t, m_t, context_len, i_g, S,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write keys and values of tokens `i_t` of one key/value head to cache rows context_len + i_t, and give them back.

    Keys as two halves (tokens, K / 2), values (tokens, K).
    """
    HALF: tl.constexpr = K // 2
    i_half = tl.arange(0, HALF)[None, :]
    i_k = tl.arange(0, K)[None, :]
    mask = m_t[:, None]
    p_k = qkv_ptr + i_t.to(tl.int64)[:, None] * qkv_stride_t + (H + i_g) * K
    b_k_lo = tl.load(p_k + i_half, mask=mask, other=0.0)
    b_k_hi = tl.load(p_k + HALF + i_half, mask=mask, other=0.0)
    b_v = tl.load(p_k + G * K + i_k, mask=mask, other=0.0)
    i_pos = context_len + i_t
    b_k_lo, b_k_hi = _norm_and_rotate(b_k_lo, b_k_hi, norm_ptr, eps, cos_ptr, sin_ptr, i_pos, m_t, K)
    o_row = (i_g.to(tl.int64) * S + i_pos)[:, None] * K
    tl.store(k_cache_ptr + o_row + i_half, b_k_lo, mask=mask)
    tl.store(k_cache_ptr + o_row + HALF + i_half, b_k_hi, mask=mask)
    tl.store(v_cache_ptr + o_row + i_k, b_v, mask=mask)
    return b_k_lo, b_k_hi, b_v


@triton.jit
def _load_cache(k_cache_ptr, v_cache_ptr, i_g, i_s, end, S, K: tl.constexpr):
    """Cache rows `i_s` before `end` of one head: keys as two halves (rows, K / 2), values (rows, K)."""
    HALF: tl.constexpr = K // 2
    o_row = (i_g.to(tl.int64) * S + i_s)[:, None] * K
    mask = (i_s < end)[:, None]
    p_k = k_cache_ptr + o_row + tl.arange(0, HALF)[None, :]
    b_k_lo = tl.load(p_k, mask=mask, other=0.0)
    b_k_hi = tl.load(p_k + HALF, mask=mask, other=0.0)
    b_v = tl.load(v_cache_ptr + o_row + tl.arange(0, K)[None, :], mask=mask, other=0.0)
    return b_k_lo, b_k_hi, b_v


@triton.jit
def _attend(b_acc, b_max, b_sum, b_q_lo, b_q_hi, b_k_lo, b_k_hi, b_v, m_s, scale_log2, INTERPRETED: tl.constexpr):
    """One tile of the online softmax: accumulator (rows, K), running maximum and sum (rows), base 2."""
    if INTERPRETED:
        b_q_lo, b_q_hi, b_v = b_q_lo.to(tl.float32), b_q_hi.to(tl.float32), b_v.to(tl.float32)
        b_k_lo, b_k_hi = b_k_lo.to(tl.float32), b_k_hi.to(tl.float32)
    b_s = tl.dot(b_q_lo, tl.trans(b_k_lo))
    b_s = tl.dot(b_q_hi, tl.trans(b_k_hi), b_s)
    b_s = tl.where(m_s, b_s * scale_log2, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
    # A row that sees nothing yet has maximum -inf; its differences must not become NaN.
    b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_p = tl.exp2(b_s - b_base[:, None])
    b_scale = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_scale + tl.sum(b_p, axis=1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_scale[:, None])
    return b_acc, b_new_max, b_sum


@triton.jit
def _rows_per_split(context_len, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """Cached rows, a multiple of BLOCK_S, that each of SPLITS programs takes."""
    return tl.cdiv(tl.cdiv(context_len, BLOCK_S), SPLITS) * BLOCK_S


@triton.jit
def _fragment_rows(BLOCKS: tl.constexpr, SHARES: tl.constexpr):
    """Row in 8, block and share of a query or key tile, each where it broadcasts.

    The tile's axes are row in 8, block, share, piece of 32, half of 16 rows, element in the piece. In this order Triton
    gives 8 lanes the rows, every warp its block and share, and 4 lanes a piece.
    """
    i_row = tl.arange(0, 8)[:, None, None, None, None, None]
    i_block = tl.arange(0, BLOCKS)[None, :, None, None, None, None]
    i_share = tl.arange(0, SHARES)[None, None, :, None, None, None]
    return i_row, i_block, i_share


@triton.jit
def _load_halves(ptr, o_row, m_row, PIECES: tl.constexpr):
    """Halves of heads, each (8, BLOCKS, SHARES, PIECES, 2, 32), from rows at offsets (8, BLOCKS, SHARES, 1, 2, 1)."""
    i_piece = tl.arange(0, PIECES)[None, None, None, :, None, None]
    i_in = tl.arange(0, 32)[None, None, None, None, None, :]
    p_lo = ptr + o_row + i_piece * 32 + i_in
    b_lo = tl.load(p_lo, mask=m_row, other=0.0)
    b_hi = tl.load(p_lo + PIECES * 32, mask=m_row, other=0.0)
    return b_lo, b_hi


@triton.jit
def _rotate_halves(b_lo, b_hi, norm_ptr, eps, b_cos, b_sin, PIECES: tl.constexpr):
    """As `_norm_and_rotate`, for tiles of `_load_halves`; no lane needs another warp's numbers."""
    dtype = b_lo.dtype
    b_lo, b_hi = b_lo.to(tl.float32), b_hi.to(tl.float32)
    if norm_ptr is not None:
        b_sum = tl.sum(tl.sum(b_lo * b_lo + b_hi * b_hi, axis=5), axis=3)
        b_rms = tl.sqrt(b_sum / (PIECES * 64) + eps)[:, :, :, None, :, None]
        o_norm = tl.zeros(b_lo.shape, dtype=tl.int32)
        b_norm_lo, b_norm_hi = _load_halves(norm_ptr, o_norm, True, PIECES)
        b_lo = (b_lo / b_rms * b_norm_lo.to(tl.float32)).to(dtype).to(tl.float32)
        b_hi = (b_hi / b_rms * b_norm_hi.to(tl.float32)).to(dtype).to(tl.float32)
    return (b_lo * b_cos - b_hi * b_sin).to(dtype), (b_hi * b_cos + b_lo * b_sin).to(dtype)


@triton.jit
def _as_rows(b_x, BLOCKS: tl.constexpr, SHARES: tl.constexpr, PIECES: tl.constexpr):
    """Half of a query tile to the left operand (SHARES * BLOCKS, 16, 32 * PIECES)."""
    b_x = tl.reshape(b_x, (8, BLOCKS, SHARES, PIECES, 2, 4, 2, 2, 2))
    return tl.reshape(tl.permute(b_x, (2, 1, 4, 0, 3, 6, 7, 5, 8)), (SHARES * BLOCKS, 16, 32 * PIECES))


@triton.jit
def _as_columns(b_x, BLOCKS: tl.constexpr, SHARES: tl.constexpr, PIECES: tl.constexpr):
    """Half of a key tile to the right operand (SHARES * BLOCKS, 32 * PIECES, 16)."""
    b_x = tl.reshape(b_x, (8, BLOCKS, SHARES, PIECES, 2, 4, 2, 2, 2))
    return tl.reshape(tl.permute(b_x, (2, 1, 3, 6, 7, 5, 8, 4, 0)), (SHARES * BLOCKS, 32 * PIECES, 16))


@triton.jit
def _value_rows(BLOCKS: tl.constexpr, SHARES: tl.constexpr):
    """Position in 16, block and share of a value tile, each where it broadcasts.

    The tile's axes are pair of positions, run of 8 elements, block, share, half of 16 positions, position in the pair,
    piece of 64 elements, element in the run: 4 lanes the pairs, 8 lanes the runs, every warp its block and share.
    """
    i_pair = tl.arange(0, 4)[:, None, None, None, None, None, None, None]
    i_block = tl.arange(0, BLOCKS)[None, None, :, None, None, None, None, None]
    i_share = tl.arange(0, SHARES)[None, None, None, :, None, None, None, None]
    i_half = tl.arange(0, 2)[None, None, None, None, :, None, None, None]
    i_odd = tl.arange(0, 2)[None, None, None, None, None, :, None, None]
    return i_half * 8 + i_pair * 2 + i_odd, i_block, i_share


@triton.jit
def _load_values(ptr, o_row, m_row, PIECES: tl.constexpr):
    """Values (4, 8, BLOCKS, SHARES, 2, 2, PIECES, 8) from rows at offsets (4, 1, BLOCKS, SHARES, 2, 2, 1, 1)."""
    i_run = tl.arange(0, 8)[None, :, None, None, None, None, None, None]
    i_piece = tl.arange(0, PIECES)[None, None, None, None, None, None, :, None]
    i_in = tl.arange(0, 8)[None, None, None, None, None, None, None, :]
    return tl.load(ptr + o_row + i_piece * 64 + i_run * 8 + i_in, mask=m_row, other=0.0)


@triton.jit
def _load_run(
    k_cache_ptr, v_cache_ptr, head_row, start, end,
    BLOCKS: tl.constexpr, SHARES: tl.constexpr, PIECES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """AHEAD tiles of 16 * SHARES cached rows from `start` on, zero from `end` on: key halves, and values."""
    i_row, i_block, i_share = _fragment_rows(BLOCKS, SHARES)
    i_16 = tl.arange(0, 2)[None, None, None, None, :, None] * 8 + i_row
    i_value, i_value_block, i_value_share = _value_rows(BLOCKS, SHARES)
    keys = ()
    values = ()
    for c in tl.static_range(AHEAD):
        i_s = start + (c * SHARES + i_share) * 16 + i_16 + 0 * i_block
        keys = keys + (_load_halves(k_cache_ptr, (head_row + i_s) * PIECES * 64, i_s < end, PIECES),)  # type: ignore
        i_v = start + (c * SHARES + i_value_share) * 16 + i_value + 0 * i_value_block
        b_v = _load_values(v_cache_ptr, (head_row + i_v) * PIECES * 64, i_v < end, PIECES)
        values = values + (b_v,)  # type: ignore
    return keys, values


@triton.jit
def _attend_fragments(
    b_acc, b_max, b_sum, b_q_lo, b_q_hi, b_k_lo, b_k_hi, b_v, m_s, scale_log2,
    BLOCKS: tl.constexpr, SHARES: tl.constexpr, PIECES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """As `_attend`, for 16 positions of each share. The accumulator's columns: piece of 64, element in the run, run."""
    b_k_lo = _as_columns(b_k_lo, BLOCKS, SHARES, PIECES)
    b_k_hi = _as_columns(b_k_hi, BLOCKS, SHARES, PIECES)
    b_v = tl.reshape(tl.permute(b_v, (3, 2, 4, 0, 5, 6, 7, 1)), (SHARES * BLOCKS, 16, 64 * PIECES))
    if INTERPRETED:
        b_q_lo, b_q_hi, b_v = b_q_lo.to(tl.float32), b_q_hi.to(tl.float32), b_v.to(tl.float32)
        b_k_lo, b_k_hi = b_k_lo.to(tl.float32), b_k_hi.to(tl.float32)
    b_s = tl.dot(b_q_lo, b_k_lo)
    b_s = tl.dot(b_q_hi, b_k_hi, b_s)
    b_s = tl.where(m_s, b_s * scale_log2, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, axis=2))
    # A row that sees nothing yet has maximum -inf; its differences must not become NaN.
    b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_p = tl.exp2(b_s - b_base[:, :, None])
    b_scale = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_scale + tl.sum(b_p, axis=2)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_scale[:, :, None])
    return b_acc, b_new_max, b_sum


@triton.jit(do_not_specialize=["T"])
def split_kernel(
    qkv_ptr, qkv_stride_t, k_cache_ptr, v_cache_ptr, context_len_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    acc_ptr, lse_ptr, T, S, scale_log2,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    SPLITS: tl.constexpr, BLOCKS: tl.constexpr, SHARES: tl.constexpr, AHEAD: tl.constexpr,
    INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of 16 * BLOCKS (token, head) rows over one run of positions. Grid: (SPLITS + 1, G, T * H / G / rows).

    The last program of a head takes the new rows, and writes them to the caches. Writes acc (parts, T * H, K), each
    part normalised, and lse (parts, T * H), the base 2 logarithm of its sum, fp32; part = split * SHARES + share.
    """
    split = tl.program_id(0)
    i_g = tl.program_id(1)
    GROUP: tl.constexpr = H // G
    PIECES: tl.constexpr = K // 64
    BLOCK_S: tl.constexpr = SHARES * 16
    context_len = tl.load(context_len_ptr)
    per_split = _rows_per_split(context_len, SPLITS, BLOCK_S * AHEAD)
    first = split * per_split
    end = tl.minimum(first + per_split, context_len)
    is_new = split == SPLITS
    if (first >= end) & (split < SPLITS):
        return
    i_row, i_block, i_share = _fragment_rows(BLOCKS, SHARES)
    i_value, i_value_block, i_value_share = _value_rows(BLOCKS, SHARES)
    # Rows of keys and queries in 16, by half and row in 8.
    i_16 = tl.arange(0, 2)[None, None, None, None, :, None] * 8 + i_row
    i_m = tl.program_id(2) * (16 * BLOCKS) + i_block * 16 + i_16
    i_t = i_m // GROUP + 0 * i_share
    m_t = i_t < T
    half_row = (context_len + i_t).to(tl.int64) * (K // 2)
    i_angle = (
        tl.arange(0, PIECES)[None, None, None, :, None, None] * 32 + tl.arange(0, 32)[None, None, None, None, None, :]
    )
    head_row = i_g.to(tl.int64) * S

    # The program of the new rows has an empty run.
    keys, values = _load_run(k_cache_ptr, v_cache_ptr, head_row, first, end, BLOCKS, SHARES, PIECES, AHEAD)

    # The rest of the run, and the angles.
    rest = first + BLOCK_S * AHEAD
    rest_bytes = (end - rest) * (K * k_cache_ptr.dtype.element_ty.primitive_bitwidth // 8)
    prefetch(k_cache_ptr + (head_row + rest) * K, rest_bytes, INTERPRETED)
    prefetch(v_cache_ptr + (head_row + rest) * K, rest_bytes, INTERPRETED)
    prefetch(cos_ptr + context_len.to(tl.int64) * (K // 2), T * K * 2, INTERPRETED)
    prefetch(sin_ptr + context_len.to(tl.int64) * (K // 2), T * K * 2, INTERPRETED)

    wait_for_producers(PDL)
    let_consumers_start(PDL)
    o_q = i_t.to(tl.int64) * qkv_stride_t + (i_g * GROUP + i_m % GROUP) * K
    b_q_lo, b_q_hi = _load_halves(qkv_ptr, o_q, m_t, PIECES)
    b_cos = tl.load(cos_ptr + half_row + i_angle, mask=m_t, other=0.0)
    b_sin = tl.load(sin_ptr + half_row + i_angle, mask=m_t, other=0.0)
    b_q_lo, b_q_hi = _rotate_halves(b_q_lo, b_q_hi, q_norm_ptr, eps, b_cos, b_sin, PIECES)
    b_q_lo, b_q_hi = _as_rows(b_q_lo, BLOCKS, SHARES, PIECES), _as_rows(b_q_hi, BLOCKS, SHARES, PIECES)

    b_acc = tl.zeros((SHARES * BLOCKS, 16, K), dtype=tl.float32)
    b_max = tl.full((SHARES * BLOCKS, 16), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((SHARES * BLOCKS, 16), dtype=tl.float32)
    # Position in a block of BLOCK_S, and token of a row, as the scores have them.
    i_warp = tl.arange(0, SHARES * BLOCKS)
    i_column = (i_warp // BLOCKS * 16)[:, None, None] + tl.arange(0, 16)[None, None, :]
    i_score_m = tl.program_id(2) * (16 * BLOCKS) + (i_warp % BLOCKS * 16)[:, None] + tl.arange(0, 16)[None, :]
    if is_new:
        # The tokens stand where 16 positions of the first share would.
        i_new = i_16 + i_share * 16 + 0 * i_block
        m_new = i_new < T
        new_half_row = (context_len + i_new).to(tl.int64) * (K // 2)
        b_new_cos = tl.load(cos_ptr + new_half_row + i_angle, mask=m_new, other=0.0)
        b_new_sin = tl.load(sin_ptr + new_half_row + i_angle, mask=m_new, other=0.0)
        p_k = qkv_ptr + (H + i_g) * K
        b_new_lo, b_new_hi = _load_halves(p_k, i_new.to(tl.int64) * qkv_stride_t, m_new, PIECES)
        i_new_v = i_value + i_value_share * 16 + 0 * i_value_block
        m_new_v = i_new_v < T
        b_new_v = _load_values(p_k + G * K, i_new_v.to(tl.int64) * qkv_stride_t, m_new_v, PIECES)
        b_new_lo, b_new_hi = _rotate_halves(b_new_lo, b_new_hi, k_norm_ptr, eps, b_new_cos, b_new_sin, PIECES)
        m_write = m_new & (i_block == 0) & (tl.program_id(2) == 0)
        p_new = k_cache_ptr + (head_row + context_len + i_new) * K + i_angle
        tl.store(p_new, b_new_lo, mask=m_write)
        tl.store(p_new + K // 2, b_new_hi, mask=m_write)
        i_run = tl.arange(0, 8)[None, :, None, None, None, None, None, None] * 8
        i_run += tl.arange(0, PIECES)[None, None, None, None, None, None, :, None] * 64
        p_new_v = v_cache_ptr + (head_row + context_len + i_new_v) * K + i_run
        p_new_v += tl.arange(0, 8)[None, None, None, None, None, None, None, :]
        tl.store(p_new_v, b_new_v, mask=m_new_v & (i_value_block == 0) & (tl.program_id(2) == 0))
        m_s = (i_column <= (i_score_m // GROUP)[:, :, None]) & (i_column < T)
        b_acc, b_max, b_sum = _attend_fragments(
            b_acc, b_max, b_sum, b_q_lo, b_q_hi, b_new_lo, b_new_hi, b_new_v, m_s, scale_log2,
            BLOCKS, SHARES, PIECES, INTERPRETED,
        )  # fmt: skip
    else:
        for c in tl.static_range(AHEAD):
            b_acc, b_max, b_sum = _attend_fragments(
                b_acc, b_max, b_sum, b_q_lo, b_q_hi, keys[c][0], keys[c][1], values[c],
                first + c * BLOCK_S + i_column < end, scale_log2, BLOCKS, SHARES, PIECES, INTERPRETED,
            )  # fmt: skip
        for start in tl.range(first + BLOCK_S * AHEAD, end, BLOCK_S * AHEAD, num_stages=1):
            more_keys, more_values = _load_run(
                k_cache_ptr, v_cache_ptr, head_row, start, end, BLOCKS, SHARES, PIECES, AHEAD
            )
            for c in tl.static_range(AHEAD):
                b_acc, b_max, b_sum = _attend_fragments(
                    b_acc, b_max, b_sum, b_q_lo, b_q_hi, more_keys[c][0], more_keys[c][1], more_values[c],
                    start + c * BLOCK_S + i_column < end, scale_log2, BLOCKS, SHARES, PIECES, INTERPRETED,
                )  # fmt: skip

    # What a lane holds of the accumulator is two runs of 8 neighbouring elements; the axes say so, and nothing moves.
    b_acc = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, :, None]
    b_acc = tl.reshape(b_acc, (SHARES, BLOCKS, 2, 8, PIECES, 2, 4, 4, 2))
    b_acc = tl.permute(b_acc, (7, 3, 1, 0, 2, 8, 4, 5, 6))
    i_m = (
        tl.program_id(2) * (16 * BLOCKS)
        + tl.arange(0, BLOCKS)[None, None, :, None, None, None, None, None, None] * 16
        + tl.arange(0, 2)[None, None, None, None, :, None, None, None, None] * 8
        + tl.arange(0, 8)[None, :, None, None, None, None, None, None, None]
    )
    i_k = (
        tl.arange(0, PIECES)[None, None, None, None, None, None, :, None, None] * 64
        + tl.arange(0, 4)[:, None, None, None, None, None, None, None, None] * 16
        + tl.arange(0, 2)[None, None, None, None, None, :, None, None, None] * 8
        + tl.arange(0, 2)[None, None, None, None, None, None, None, :, None] * 4
        + tl.arange(0, 4)[None, None, None, None, None, None, None, None, :]
    )
    part = split * SHARES + tl.arange(0, SHARES)[None, None, None, :, None, None, None, None, None]
    i_th = i_m // GROUP * H + i_g * GROUP + i_m % GROUP
    tl.store(acc_ptr + (part * (T * H) + i_th).to(tl.int64) * K + i_k, b_acc, mask=i_m // GROUP < T)
    i_score_th = i_score_m // GROUP * H + i_g * GROUP + i_score_m % GROUP
    o_lse = (split * SHARES + i_warp // BLOCKS)[:, None] * (T * H) + i_score_th
    tl.store(lse_ptr + o_lse, b_max + tl.log2(b_sum), mask=i_score_m // GROUP < T)


@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    acc_ptr, lse_ptr, context_len_ptr, out_ptr, T,
    H: tl.constexpr, K: tl.constexpr,
    SPLITS: tl.constexpr, SHARES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (T * H, K) from the parts of all runs and of the new rows. Grid: (T * H, K / BLOCK_K).

    Of the new rows the first share alone has any.
    """
    i_row = tl.program_id(0)
    i_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    i_part = tl.arange(0, SPLITS * SHARES)
    context_len = tl.load(context_len_ptr)
    m_part = i_part // SHARES * _rows_per_split(context_len, SPLITS, BLOCK_S) < context_len
    o_row = i_part * T * H + i_row
    o_new = SPLITS * SHARES * T * H + i_row
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    b_lse = tl.load(lse_ptr + o_row, mask=m_part, other=float("-inf"))
    new_lse = tl.load(lse_ptr + o_new)
    b_acc = tl.load(acc_ptr + o_row.to(tl.int64)[:, None] * K + i_k[None, :], mask=m_part[:, None], other=0.0)
    b_new = tl.load(acc_ptr + o_new.to(tl.int64) * K + i_k)
    top = tl.maximum(tl.max(b_lse, axis=0), new_lse)
    b_weight = tl.exp2(b_lse - top)
    new_weight = tl.exp2(new_lse - top)
    b_out = tl.sum(b_acc * b_weight[:, None], axis=0) + b_new * new_weight
    b_out = b_out / (tl.sum(b_weight, axis=0) + new_weight)
    tl.store(out_ptr + i_row * K + i_k, b_out.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["T"])
def append_kernel(
    qkv_ptr, qkv_stride_t, k_cache_ptr, v_cache_ptr, context_len_ptr, cos_ptr, sin_ptr, k_norm_ptr, eps, T, S,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write keys and values of BLOCK_T tokens of one head. Grid: (T / BLOCK_T, G)."""
    i_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    i_g = tl.program_id(1)
    context_len = tl.load(context_len_ptr)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    _append_rows(
        qkv_ptr, qkv_stride_t, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, k_norm_ptr, eps, i_t, i_t < T,
        context_len, i_g, S, H, G, K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def prefill_kernel(
    qkv_ptr, qkv_stride_t, k_cache_ptr, v_cache_ptr, context_len_ptr, cos_ptr, sin_ptr, q_norm_ptr, eps, out_ptr,
    T, S, scale_log2,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Flash attention of BLOCK_T tokens of one query head over the cache. Grid: (T / BLOCK_T, H)."""
    # Late tokens see most positions: they go first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h = tl.program_id(1)
    i_g = i_h // (H // G)
    HALF: tl.constexpr = K // 2
    i_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = i_t < T
    context_len = tl.load(context_len_ptr)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    p_q = qkv_ptr + (i_t.to(tl.int64) * qkv_stride_t + i_h * K)[:, None] + tl.arange(0, HALF)[None, :]
    b_q_lo = tl.load(p_q, mask=m_t[:, None], other=0.0)
    b_q_hi = tl.load(p_q + HALF, mask=m_t[:, None], other=0.0)
    i_pos = context_len + i_t
    b_q_lo, b_q_hi = _norm_and_rotate(b_q_lo, b_q_hi, q_norm_ptr, eps, cos_ptr, sin_ptr, i_pos, m_t, K)

    b_acc = tl.zeros((BLOCK_T, K), dtype=tl.float32)
    b_max = tl.full((BLOCK_T,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_T,), dtype=tl.float32)
    i_s = tl.arange(0, BLOCK_S)
    # Positions that every token of the block sees need no mask.
    seen = (context_len + block * BLOCK_T) // BLOCK_S * BLOCK_S
    end = tl.minimum(context_len + block * BLOCK_T + BLOCK_T, context_len + T)
    for start in tl.range(0, seen, BLOCK_S):
        b_k_lo, b_k_hi, b_v = _load_cache(k_cache_ptr, v_cache_ptr, i_g, start + i_s, end, S, K)
        b_acc, b_max, b_sum = _attend(
            b_acc, b_max, b_sum, b_q_lo, b_q_hi, b_k_lo, b_k_hi, b_v, True, scale_log2, INTERPRETED
        )
    for start in tl.range(seen, end, BLOCK_S):
        b_k_lo, b_k_hi, b_v = _load_cache(k_cache_ptr, v_cache_ptr, i_g, start + i_s, end, S, K)
        m_s = ((start + i_s)[None, :] <= i_pos[:, None]) & ((start + i_s) < end)[None, :]
        b_acc, b_max, b_sum = _attend(
            b_acc, b_max, b_sum, b_q_lo, b_q_hi, b_k_lo, b_k_hi, b_v, m_s, scale_log2, INTERPRETED
        )
    o_out = (i_t.to(tl.int64) * H + i_h)[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(out_ptr + o_out, (b_acc / b_sum[:, None]).to(out_ptr.dtype.element_ty), mask=m_t[:, None])


def _shared_arguments(qkv: torch.Tensor, k_cache: torch.Tensor, num_heads: int) -> dict[str, Any]:
    """Compile-time arguments that the kernels share."""
    return {"H": num_heads, "G": k_cache.shape[0], "K": k_cache.shape[2], **pdl_options()}


def attend_step(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    settings: SplitSettings,
) -> torch.Tensor:
    """Run `attention` for T <= 16 tokens: two launches."""
    T, (G, S, K), splits = qkv.shape[0], k_cache.shape, settings.splits
    rows = T * num_heads
    blocks = min(triton.next_power_of_2(triton.cdiv(rows // G, 16)), 8)
    shares = max(settings.warps // blocks, 1)
    acc = torch.empty(((splits + 1) * shares, rows, K), dtype=torch.float32, device=qkv.device)
    lse = torch.empty(((splits + 1) * shares, rows), dtype=torch.float32, device=qkv.device)
    out = torch.empty((T, num_heads * K), dtype=qkv.dtype, device=qkv.device)
    shared = _shared_arguments(qkv, k_cache, num_heads) | {"SPLITS": splits, "SHARES": shares}
    split_kernel[splits + 1, G, triton.cdiv(rows // G, 16 * blocks)](
        qkv, qkv.stride(0), k_cache, v_cache, context_len, cos, sin, q_norm, k_norm, eps, acc, lse,
        T, S, K**-0.5 * math.log2(math.e), **shared,
        BLOCKS=blocks, AHEAD=settings.ahead, INTERPRETED=IS_INTERPRETED, num_warps=blocks * shares,
    )  # fmt: skip
    del shared["G"]
    block_k = min(K, 32)
    combine_kernel[rows, K // block_k](
        acc, lse, context_len, out, T, **shared,
        BLOCK_S=16 * shares * settings.ahead, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return out


def attend_prompt(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    *,
    block_t: int = 128,
    block_s: int = 64,
) -> torch.Tensor:
    """Run `attention` for any number of tokens: keys and values first, then flash attention."""
    T, (G, S, K) = qkv.shape[0], k_cache.shape
    out = torch.empty((T, num_heads * K), dtype=qkv.dtype, device=qkv.device)
    shared = _shared_arguments(qkv, k_cache, num_heads)
    append_kernel[triton.cdiv(T, 16), G](
        qkv, qkv.stride(0), k_cache, v_cache, context_len, cos, sin, k_norm, eps, T, S, BLOCK_T=16, **shared
    )
    prefill_kernel[triton.cdiv(T, block_t), num_heads](
        qkv, qkv.stride(0), k_cache, v_cache, context_len, cos, sin, q_norm, eps, out,
        T, S, K**-0.5 * math.log2(math.e), **shared,
        BLOCK_T=block_t, BLOCK_S=block_s, INTERPRETED=IS_INTERPRETED, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out
