"""Triton kernels of grouped-query attention; equation and reference are in `kernels/attention.py`.

A step of T <= 16 tokens is two launches. `split_kernel`: the cached positions are cut into SPLITS runs whose length is
computed on the device from the device's length, so the host plans nothing. A program takes one run for one key/value
head and for all tokens and query heads that read it, folded into the rows of one tile; it normalises and rotates the
queries itself. One more program per head writes the new rows of the cache and attends to them. `combine_kernel` adds
the parts up in a fixed order.

A prompt is `append_kernel`, which writes the new keys and values, and `prefill_kernel`, flash attention over the cache.

Heads are handled as two halves of K / 2, because the rotation pairs element i with element i + K / 2. Rows of the cache
before `context_len` were written in an earlier step and are read before the wait, as is `context_len` itself.
Row t of a step may round differently with T: where the runs are cut depends on the length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from soloist.kernels.launch import IS_INTERPRETED, let_consumers_start, pdl_options, wait_for_producers
from soloist.kernels.read_ahead import read_ahead, shares

# Most tokens of a step; more is a prompt.
MAX_STEP_TOKENS = 16
# Bytes of the next launches' weights that a step's attention asks for, measured on one H200, `docs/log.md`.
READ_AHEAD_BYTES = 12 << 20


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """How the cached positions are cut into programs."""

    # Runs that the positions of one key/value head are cut into, a power of two.
    splits: int
    # Cached positions a program takes at once.
    block_s: int
    # Warps of a program.
    warps: int
    # Tiles of cached positions on their way at once, behind the first.
    stages: int = 3


def settings_for(num_kv_heads: int) -> SplitSettings:
    """Choose how a cache is cut: about one program to a multiprocessor, measured on one H200, `docs/log.md`."""
    splits = triton.next_power_of_2(max(128 // num_kv_heads, 1))
    return SplitSettings(splits=min(splits, 64), block_s=64, warps=4)


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


@triton.jit(do_not_specialize=["T"])
def split_kernel(
    qkv_ptr, qkv_stride_t, k_cache_ptr, v_cache_ptr, context_len_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    acc_ptr, lse_ptr, T, S, scale_log2, upcoming,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of BLOCK_M (token, head) rows over one run. Grid: (SPLITS + 1, G, T * H / G / BLOCK_M).

    The last program of a head takes the new rows, and writes them to the caches. Writes acc (SPLITS + 1, T * H, K),
    each part normalised, and lse (SPLITS + 1, T * H), the base 2 logarithm of its sum, fp32.
    """
    split = tl.program_id(0)
    i_g = tl.program_id(1)
    GROUP: tl.constexpr = H // G
    HALF: tl.constexpr = K // 2
    context_len = tl.load(context_len_ptr)
    per_split = _rows_per_split(context_len, SPLITS, BLOCK_S)
    first = split * per_split
    end = tl.minimum(first + per_split, context_len)
    program = split + tl.num_programs(0) * (i_g + tl.num_programs(1) * tl.program_id(2))
    if (first >= end) & (split < SPLITS):
        read_ahead(upcoming, program, INTERPRETED)
        return
    # Used last: what the loop needs is on its way by then.
    i_s = tl.arange(0, BLOCK_S)
    b_k_lo, b_k_hi, b_v = _load_cache(k_cache_ptr, v_cache_ptr, i_g, first + i_s, end, S, K)

    wait_for_producers(PDL)
    let_consumers_start(PDL)
    i_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    i_t = i_m // GROUP
    i_h = i_g * GROUP + i_m % GROUP
    m_m = i_t < T
    p_q = qkv_ptr + (i_t.to(tl.int64) * qkv_stride_t + i_h * K)[:, None] + tl.arange(0, HALF)[None, :]
    b_q_lo = tl.load(p_q, mask=m_m[:, None], other=0.0)
    b_q_hi = tl.load(p_q + HALF, mask=m_m[:, None], other=0.0)
    b_q_lo, b_q_hi = _norm_and_rotate(b_q_lo, b_q_hi, q_norm_ptr, eps, cos_ptr, sin_ptr, context_len + i_t, m_m, K)

    b_acc = tl.zeros((BLOCK_M, K), dtype=tl.float32)
    b_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if split == SPLITS:
        i_new = tl.arange(0, 16)
        b_new_lo, b_new_hi, b_new_v = _append_rows(
            qkv_ptr, qkv_stride_t, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, k_norm_ptr, eps, i_new, i_new < T,
            context_len, i_g, S, H, G, K,
        )  # fmt: skip
        m_new = (i_new[None, :] <= i_t[:, None]) & (i_new < T)[None, :]
        b_acc, b_max, b_sum = _attend(
            b_acc, b_max, b_sum, b_q_lo, b_q_hi, b_new_lo, b_new_hi, b_new_v, m_new, scale_log2, INTERPRETED
        )
    else:
        for start in tl.range(first + BLOCK_S, end, BLOCK_S):
            b_lo, b_hi, b_value = _load_cache(k_cache_ptr, v_cache_ptr, i_g, start + i_s, end, S, K)
            m_seen = (start + i_s < end)[None, :]
            b_acc, b_max, b_sum = _attend(
                b_acc, b_max, b_sum, b_q_lo, b_q_hi, b_lo, b_hi, b_value, m_seen, scale_log2, INTERPRETED
            )
        m_first = (first + i_s < end)[None, :]
        b_acc, b_max, b_sum = _attend(
            b_acc, b_max, b_sum, b_q_lo, b_q_hi, b_k_lo, b_k_hi, b_v, m_first, scale_log2, INTERPRETED
        )

    # Behind this program's own reads: what is left of the attention leaves the memory idle.
    read_ahead(upcoming, program, INTERPRETED)
    o_row = (split * T + i_t) * H + i_h
    p_acc = acc_ptr + o_row.to(tl.int64)[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(p_acc, b_acc / b_sum[:, None], mask=m_m[:, None])
    tl.store(lse_ptr + o_row, b_max + tl.log2(b_sum), mask=m_m)


@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    acc_ptr, lse_ptr, context_len_ptr, out_ptr, T,
    H: tl.constexpr, K: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (T * H, K) from the parts of all runs and of the new rows. Grid: (T * H, K / BLOCK_K)."""
    i_row = tl.program_id(0)
    i_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    i_split = tl.arange(0, SPLITS)
    context_len = tl.load(context_len_ptr)
    m_split = i_split * _rows_per_split(context_len, SPLITS, BLOCK_S) < context_len
    o_row = i_split * T * H + i_row
    o_new = SPLITS * T * H + i_row
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    b_lse = tl.load(lse_ptr + o_row, mask=m_split, other=float("-inf"))
    new_lse = tl.load(lse_ptr + o_new)
    p_acc = acc_ptr + o_row.to(tl.int64)[:, None] * K + i_k[None, :]
    b_acc = tl.load(p_acc, mask=m_split[:, None], other=0.0)
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
    upcoming: Sequence[object] = (),
) -> torch.Tensor:
    """Run `attention` for T <= 16 tokens: two launches."""
    T, (G, S, K), splits = qkv.shape[0], k_cache.shape, settings.splits
    rows = T * num_heads
    block_m = min(max(triton.next_power_of_2(rows // G), 16), 128)
    acc = torch.empty((splits + 1, rows, K), dtype=torch.float32, device=qkv.device)
    lse = torch.empty((splits + 1, rows), dtype=torch.float32, device=qkv.device)
    out = torch.empty((T, num_heads * K), dtype=qkv.dtype, device=qkv.device)
    shared = _shared_arguments(qkv, k_cache, num_heads) | {"SPLITS": splits, "BLOCK_S": settings.block_s}
    grid = (splits + 1, G, triton.cdiv(rows // G, block_m))
    ahead = shares(upcoming, READ_AHEAD_BYTES, math.prod(grid))
    split_kernel[grid](
        qkv, qkv.stride(0), k_cache, v_cache, context_len, cos, sin, q_norm, k_norm, eps, acc, lse,
        T, S, K**-0.5 * math.log2(math.e), ahead, **shared,
        BLOCK_M=block_m, INTERPRETED=IS_INTERPRETED,
        # Four warps would not hold the accumulator of the widest tile.
        num_warps=max(settings.warps, block_m // 16), num_stages=settings.stages,
    )  # fmt: skip
    del shared["G"]
    block_k = min(K, 32)
    combine_kernel[rows, K // block_k](acc, lse, context_len, out, T, **shared, BLOCK_K=block_k, num_warps=4)
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
    block_s: int = 128,
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
        BLOCK_T=block_t, BLOCK_S=block_s, INTERPRETED=IS_INTERPRETED, num_warps=8, num_stages=2,
    )  # fmt: skip
    return out
