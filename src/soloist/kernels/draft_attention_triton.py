"""Triton kernels of a draft's attention; equations and reference are in `kernels/draft_attention.py`.

`append_kernel` stores context rows of all layers in one launch. A block is two launches. `split_kernel`: the context is
cut into SPLITS runs whose length is computed on the device; a program takes one run for one key/value head and a tile
of (token, query head) rows, and one more program per tile takes the block itself, and stores it. `combine_kernel` adds
the runs up in a fixed order.

Heads are handled as two halves of K / 2, because the rotation pairs element i with element i + K / 2.
"""

import math

import torch
import triton
import triton.language as tl

from soloist.kernels.check import check_head_size
from soloist.kernels.launch import IS_INTERPRETED, let_consumers_start, pdl_options, wait_for_producers

# Smallest tile of a tensor-core product.
MIN_TILE = 16
# Context rows a program takes at once, and programs that shall be there to read them: two for each of 132 processors.
# Not tuned yet.
BLOCK_S = 64
NUM_PROGRAMS = 256
MAX_SPLITS = 64


@triton.jit
def _load_rotated(ptr, norm_ptr, eps, cos_ptr, sin_ptr, i_pos, mask, K: tl.constexpr):
    """Load heads (rows, K), normalise and rotate them in fp32: two halves (rows, K / 2), rounded to their dtype."""
    HALF: tl.constexpr = K // 2
    i_k = tl.arange(0, HALF)[None, :]
    dtype = ptr.dtype.element_ty
    b_lo = tl.load(ptr + i_k, mask=mask[:, None], other=0.0).to(tl.float32)
    b_hi = tl.load(ptr + HALF + i_k, mask=mask[:, None], other=0.0).to(tl.float32)
    b_scale = 1.0 / tl.sqrt((tl.sum(b_lo * b_lo, axis=1) + tl.sum(b_hi * b_hi, axis=1)) / K + eps)[:, None]
    b_lo = b_lo * b_scale * tl.load(norm_ptr + i_k).to(tl.float32)
    b_hi = b_hi * b_scale * tl.load(norm_ptr + HALF + i_k).to(tl.float32)
    o_angle = i_pos.to(tl.int64)[:, None] * HALF + i_k
    b_cos = tl.load(cos_ptr + o_angle, mask=mask[:, None], other=0.0)
    b_sin = tl.load(sin_ptr + o_angle, mask=mask[:, None], other=0.0)
    return (b_lo * b_cos - b_hi * b_sin).to(dtype), (b_hi * b_cos + b_lo * b_sin).to(dtype)


@triton.jit
def _store_rows(k_cache_ptr, v_cache_ptr, b_k_lo, b_k_hi, b_v, o_row, mask, K: tl.constexpr):
    """Write keys in two halves (rows, K / 2) and values (rows, K) at element offsets `o_row`."""
    HALF: tl.constexpr = K // 2
    p_k = k_cache_ptr + o_row[:, None] + tl.arange(0, HALF)[None, :]
    tl.store(p_k, b_k_lo, mask=mask[:, None])
    tl.store(p_k + HALF, b_k_hi, mask=mask[:, None])
    tl.store(v_cache_ptr + o_row[:, None] + tl.arange(0, K)[None, :], b_v, mask=mask[:, None])


@triton.jit(do_not_specialize=["T"])
def append_kernel(
    kv_ptr, kv_stride_t, k_norm_ptr, eps, k_cache_ptr, v_cache_ptr, context_len_ptr, cos_ptr, sin_ptr, T, S,
    G: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store BLOCK_T tokens of one head of one layer. Grid: (T / BLOCK_T, L * G)."""
    i_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    i_lg = tl.program_id(1)
    layer = i_lg // G
    m_t = i_t < T
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    i_pos = tl.load(context_len_ptr) + i_t
    # Rows are [k v] of each layer.
    p_k = kv_ptr + i_t.to(tl.int64)[:, None] * kv_stride_t + (layer * 2 * G + i_lg % G) * K
    b_k_lo, b_k_hi = _load_rotated(p_k, k_norm_ptr + layer * K, eps, cos_ptr, sin_ptr, i_pos, m_t, K)
    b_v = tl.load(p_k + G * K + tl.arange(0, K)[None, :], mask=m_t[:, None], other=0.0)
    o_row = (i_lg.to(tl.int64) * S + i_pos) * K
    _store_rows(k_cache_ptr, v_cache_ptr, b_k_lo, b_k_hi, b_v, o_row, m_t, K)


@triton.jit
def _attend(
    b_acc, b_max, b_sum, b_q_lo, b_q_hi, b_k_lo, b_k_hi, b_v, m_s, scale_log2, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """One tile of the online softmax: accumulator (rows, K), running maximum and sum (rows), base 2."""
    if DOT_FP32:
        b_q_lo, b_q_hi, b_v = b_q_lo.to(tl.float32), b_q_hi.to(tl.float32), b_v.to(tl.float32)
        b_k_lo, b_k_hi = b_k_lo.to(tl.float32), b_k_hi.to(tl.float32)
    b_s = tl.dot(b_q_lo, tl.trans(b_k_lo), input_precision="ieee")
    b_s = tl.dot(b_q_hi, tl.trans(b_k_hi), b_s, input_precision="ieee")
    b_s = tl.where(m_s, b_s * scale_log2, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
    # A row that sees nothing yet has maximum -inf; its differences must not become NaN.
    b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_p = tl.exp2(b_s - b_base[:, None])
    b_scale = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_scale + tl.sum(b_p, axis=1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_scale[:, None], input_precision="ieee")
    return b_acc, b_new_max, b_sum


@triton.jit
def _is_near(i_row, i_pos, WINDOW: tl.constexpr):
    """Say which rows a query sees through its window; 0: there is none. (queries, rows)."""
    distance = i_row[None, :] - i_pos[:, None]
    if WINDOW > 0:
        return tl.abs(distance) < WINDOW
    return distance == distance


@triton.jit(do_not_specialize=["T"])
def split_kernel(
    qkv_ptr, qkv_stride_t, k_cache_ptr, v_cache_ptr, context_len_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    acc_ptr, max_ptr, sum_ptr, T, S, scale_log2,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
    DOT_FP32: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of BLOCK_M (token, head) rows over one run of the context, or over the block.

    Grid: (SPLITS + 1, G, T * H / G / BLOCK_M). Writes fp32 acc (SPLITS + 1, T * H, K), max and sum (SPLITS + 1, T * H).
    """
    split = tl.program_id(0)
    i_g = tl.program_id(1)
    GROUP: tl.constexpr = H // G
    HALF: tl.constexpr = K // 2
    i_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    i_t = i_m // GROUP
    i_h = i_g * GROUP + i_m % GROUP
    m_m = i_t < T
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    context_len = tl.load(context_len_ptr)
    i_pos = context_len + i_t
    p_q = qkv_ptr + (i_t.to(tl.int64) * qkv_stride_t + i_h * K)[:, None]
    b_q_lo, b_q_hi = _load_rotated(p_q, q_norm_ptr, eps, cos_ptr, sin_ptr, i_pos, m_m, K)
    b_acc = tl.zeros((BLOCK_M, K), dtype=tl.float32)
    b_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if split == SPLITS:
        i_new = tl.arange(0, BLOCK_T)
        m_new = i_new < T
        i_row = context_len + i_new
        p_k = qkv_ptr + i_new.to(tl.int64)[:, None] * qkv_stride_t + (H + i_g) * K
        b_lo, b_hi = _load_rotated(p_k, k_norm_ptr, eps, cos_ptr, sin_ptr, i_row, m_new, K)
        b_v = tl.load(p_k + G * K + tl.arange(0, K)[None, :], mask=m_new[:, None], other=0.0)
        if tl.program_id(2) == 0:
            o_row = (i_g.to(tl.int64) * S + i_row) * K
            _store_rows(k_cache_ptr, v_cache_ptr, b_lo, b_hi, b_v, o_row, m_new, K)
        m_s = m_new[None, :] & _is_near(i_row, i_pos, WINDOW)
        if IS_CAUSAL:
            m_s = m_s & (i_row[None, :] <= i_pos[:, None])
        b_acc, b_max, b_sum = _attend(b_acc, b_max, b_sum, b_q_lo, b_q_hi, b_lo, b_hi, b_v, m_s, scale_log2, DOT_FP32)
    else:
        # The first query's window begins first.
        begin = tl.maximum(context_len - WINDOW + 1, 0) if WINDOW > 0 else 0
        per_split = tl.cdiv(tl.cdiv(context_len - begin, BLOCK_S), SPLITS) * BLOCK_S
        first = begin + split * per_split
        end = tl.minimum(first + per_split, context_len)
        for start in tl.range(first, end, BLOCK_S):
            i_row = start + tl.arange(0, BLOCK_S)
            m_row = i_row < end
            o_row = (i_g.to(tl.int64) * S + i_row)[:, None] * K
            p_k = k_cache_ptr + o_row + tl.arange(0, HALF)[None, :]
            b_lo = tl.load(p_k, mask=m_row[:, None], other=0.0)
            b_hi = tl.load(p_k + HALF, mask=m_row[:, None], other=0.0)
            b_v = tl.load(v_cache_ptr + o_row + tl.arange(0, K)[None, :], mask=m_row[:, None], other=0.0)
            m_s = m_row[None, :] & _is_near(i_row, i_pos, WINDOW)
            b_acc, b_max, b_sum = _attend(
                b_acc, b_max, b_sum, b_q_lo, b_q_hi, b_lo, b_hi, b_v, m_s, scale_log2, DOT_FP32
            )
    o_row = (split * T + i_t) * H + i_h
    # A run that nobody sees is left out by its sum.
    p_acc = acc_ptr + o_row.to(tl.int64)[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(p_acc, b_acc, mask=(m_m & (b_sum > 0))[:, None])
    tl.store(max_ptr + o_row, b_max, mask=m_m)
    tl.store(sum_ptr + o_row, b_sum, mask=m_m)


@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    acc_ptr, max_ptr, sum_ptr, out_ptr, T,
    H: tl.constexpr, K: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (T * H, K) from the parts' accumulators. Grid: (T * H,)."""
    i_row = tl.program_id(0)
    i_k = tl.arange(0, K)
    i_part = tl.arange(0, BLOCK_P)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    o_row = i_part * T * H + i_row
    b_sum = tl.load(sum_ptr + o_row, mask=i_part < NUM_PARTS, other=0.0)
    m_part = b_sum > 0
    b_max = tl.load(max_ptr + o_row, mask=m_part, other=float("-inf"))
    p_acc = acc_ptr + o_row.to(tl.int64)[:, None] * K + i_k[None, :]
    b_acc = tl.load(p_acc, mask=m_part[:, None], other=0.0)
    b_weight = tl.exp2(b_max - tl.max(b_max, axis=0))
    b_out = tl.sum(b_acc * b_weight[:, None], axis=0) / tl.sum(b_sum * b_weight, axis=0)
    tl.store(out_ptr + i_row.to(tl.int64) * K + i_k, b_out.to(out_ptr.dtype.element_ty))


def store_context(
    kv: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Run `append_context`: one launch."""
    T, (L, G, S, K) = kv.shape[0], k_cache.shape
    check_head_size(K)
    append_kernel[triton.cdiv(T, MIN_TILE), L * G](
        kv, kv.stride(0), k_norm, eps, k_cache, v_cache, context_len, cos, sin, T, S,
        G=G, K=K, BLOCK_T=MIN_TILE, num_warps=4, **pdl_options(),
    )  # fmt: skip


def attend_block(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    window: int | None,
    is_causal: bool,
) -> torch.Tensor:
    """Run `draft_attention`: two launches."""
    T, H, (G, S, K) = qkv.shape[0], num_heads, k_cache.shape
    check_head_size(K)
    splits = min(max(triton.next_power_of_2(NUM_PROGRAMS // G), 1), MAX_SPLITS)
    num_rows, num_parts = T * H, splits + 1
    block_m = min(max(triton.next_power_of_2(num_rows // G), MIN_TILE), 64)
    acc = torch.empty((num_parts, num_rows, K), dtype=torch.float32, device=qkv.device)
    maxima, sums = torch.empty((2, num_parts, num_rows), dtype=torch.float32, device=qkv.device)
    out = torch.empty((T, H * K), dtype=qkv.dtype, device=qkv.device)
    split_kernel[num_parts, G, triton.cdiv(num_rows // G, block_m)](
        qkv, qkv.stride(0), k_cache, v_cache, context_len, cos, sin, q_norm, k_norm, eps, acc, maxima, sums,
        T, S, K**-0.5 * math.log2(math.e),
        H=H, G=G, K=K, WINDOW=window or 0, IS_CAUSAL=is_causal,
        SPLITS=splits, BLOCK_M=block_m, BLOCK_S=BLOCK_S, BLOCK_T=max(triton.next_power_of_2(T), MIN_TILE),
        DOT_FP32=IS_INTERPRETED, num_warps=4, **pdl_options(),
    )  # fmt: skip
    combine_kernel[num_rows,](
        acc, maxima, sums, out, T,
        H=H, K=K, NUM_PARTS=num_parts, BLOCK_P=triton.next_power_of_2(num_parts), num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out
