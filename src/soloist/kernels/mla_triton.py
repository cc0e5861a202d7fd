"""Triton kernels of multi-head latent attention; the equations, references and the launcher are in `kernels/mla.py`.

Three launches for a step of T <= 16 rows, all reading the context length from device memory:

1. `prepare_kernel`: absorbed query q_nope W_uk, rotated q_rope; one more program per row normalises the latent,
   rotates the shared key and writes the cache row.
2. `attention_kernel`: the T x H query rows share one key/value head, so they fold into the tile; the cached positions
   are split over programs, each of which leaves a partial result and its running maximum and sum.
3. `combine_kernel`: merges the splits of one head in order, applies W_uv and the head's gate.

A prompt is `kernels/mla_prompt.py`.

Source: DeepSeek-V2 (arXiv 2405.04434), absorbed form; FlashDecoding split over keys.
"""

import torch
import triton
import triton.language as tl

from soloist.errors import UnsupportedError
from soloist.kernels.launch import (
    IS_INTERPRETED,
    arrival_counters,
    is_last_arriver,
    let_consumers_start,
    pdl_options,
    wait_for_producers,
)
from soloist.kernels.mla_inputs import MlaRows, MlaWeights
from soloist.kernels.read_ahead import prefetch
from soloist.kernels.rotary import RotaryTable

# Most rows of a step; more is a prompt.
MAX_STEP_ROWS = 16
# Latents of a program that absorbs.
_PREPARE_BLOCK_R = 128
# How many programs attend at most: one on each multiprocessor.
_NUM_PROGRAMS = 132
# Cached positions a program takes at once, for one token and for more.
_BLOCK_S = {1: 32, MAX_STEP_ROWS: 64}
# How many of them come into the L2 while a step's query is not there yet.
_PREFETCHED_BLOCKS = {1: 2, MAX_STEP_ROWS: 3}


@triton.jit
def _rotate_pairs(even, odd, cos, sin):
    """Interleaved rotary: the pair (2j, 2j+1) turned by its angle."""
    return even * cos - odd * sin, odd * cos + even * sin


@triton.jit
def _write_row(
    kv_ptr,
    kv_norm_ptr,
    cos_ptr,
    sin_ptr,
    latent_cache_ptr,
    context_len_ptr,
    t,
    kv_stride_t,
    eps,
    R: tl.constexpr,
    P: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
    PDL: tl.constexpr,
):
    i_r = tl.arange(0, R)
    i_pair = tl.arange(0, P // 2)
    position = tl.load(context_len_ptr).to(tl.int64) + t
    b_norm = tl.load(kv_norm_ptr + i_r).to(tl.float32)
    if HAS_ROTARY:
        cos = tl.load(cos_ptr + position * (P // 2) + i_pair)
        sin = tl.load(sin_ptr + position * (P // 2) + i_pair)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    p_row = kv_ptr + t.to(tl.int64) * kv_stride_t
    b_c = tl.load(p_row + i_r).to(tl.float32)
    b_c = b_c / tl.sqrt(tl.sum(b_c * b_c, axis=0) / R + eps) * b_norm
    even = tl.load(p_row + R + 2 * i_pair).to(tl.float32)
    odd = tl.load(p_row + R + 2 * i_pair + 1).to(tl.float32)
    if HAS_ROTARY:
        even, odd = _rotate_pairs(even, odd, cos, sin)
    p_cache = latent_cache_ptr + position * (R + P)
    dtype = latent_cache_ptr.dtype.element_ty
    tl.store(p_cache + i_r, b_c.to(dtype))
    tl.store(p_cache + R + 2 * i_pair, even.to(dtype))
    tl.store(p_cache + R + 2 * i_pair + 1, odd.to(dtype))


@triton.jit(do_not_specialize=["T"])
def prepare_kernel(
    q_ptr,
    kv_ptr,
    kv_norm_ptr,
    w_kv_b_ptr,
    cos_ptr,
    sin_ptr,
    latent_cache_ptr,
    context_len_ptr,
    query_ptr,
    T,
    q_stride_t,
    kv_stride_t,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
    TP: tl.constexpr,
    BR: tl.constexpr,
    PDL: tl.constexpr,
    IS_FP32_DOT: tl.constexpr,
):
    """query (T, H, R+P) = [q_nope W_uk, rotary(q_rope)]; cache rows written. Grid: (H + T, R / BR).

    w_kv_b (H, K+V, R): K rows of W_uk, then V rows of W_uv, for each head.
    The context length was written by the step before; what depends on it and on weights alone is read before the wait.
    """
    pid = tl.program_id(0)
    i_t = tl.arange(0, TP)
    m_t = i_t < T
    is_first = tl.program_id(1) == 0
    if pid < H:
        i_k = tl.arange(0, K)
        i_r = tl.program_id(1) * BR + tl.arange(0, BR)
        i_pair = tl.arange(0, P // 2)
        m_pair = m_t[:, None] & is_first
        w_uk = tl.load(w_kv_b_ptr + (pid * (K + V) + i_k)[:, None] * R + i_r[None, :])  # (K, BR)
        if HAS_ROTARY:
            position = tl.load(context_len_ptr).to(tl.int64) + i_t
            o_angle = position[:, None] * (P // 2) + i_pair[None, :]
            cos = tl.load(cos_ptr + o_angle, mask=m_pair, other=0.0)
            sin = tl.load(sin_ptr + o_angle, mask=m_pair, other=0.0)
        wait_for_producers(PDL)
        let_consumers_start(PDL)
        p_q = q_ptr + i_t.to(tl.int64)[:, None] * q_stride_t + pid * (K + P)
        b_q = tl.load(p_q + i_k[None, :], mask=m_t[:, None], other=0.0)  # (TP, K)
        even = tl.load(p_q + K + 2 * i_pair[None, :], mask=m_pair, other=0.0).to(tl.float32)
        odd = tl.load(p_q + K + 2 * i_pair[None, :] + 1, mask=m_pair, other=0.0).to(tl.float32)
        if HAS_ROTARY:
            even, odd = _rotate_pairs(even, odd, cos, sin)
        dtype = query_ptr.dtype.element_ty
        p_query = query_ptr + (i_t.to(tl.int64)[:, None] * H + pid) * (R + P)
        tl.store(p_query + R + 2 * i_pair[None, :], even.to(dtype), mask=m_pair)
        tl.store(p_query + R + 2 * i_pair[None, :] + 1, odd.to(dtype), mask=m_pair)
        if IS_FP32_DOT:
            b_query = tl.dot(b_q.to(tl.float32), w_uk.to(tl.float32), input_precision="ieee")
        else:
            b_query = tl.dot(b_q, w_uk)
        tl.store(p_query + i_r[None, :], b_query.to(dtype), mask=m_t[:, None])
    elif is_first:
        _write_row(
            kv_ptr,
            kv_norm_ptr,
            cos_ptr,
            sin_ptr,
            latent_cache_ptr,
            context_len_ptr,
            pid - H,
            kv_stride_t,
            eps,
            R,
            P,
            HAS_ROTARY,
            PDL,
        )


@triton.jit(do_not_specialize=["num_query_rows"])
def attention_kernel(
    query_ptr,
    latent_cache_ptr,
    context_len_ptr,
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    num_query_rows,
    softmax_scale,
    H: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
    PREFETCHED_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
    IS_FP32_DOT: tl.constexpr,
):
    """Attention of BM folded rows (row m = t * H + h) over one split of the positions. Grid: (row tiles, NUM_SPLITS).

    partial (NUM_SPLITS, T*H, R) fp32, sums of the latents by the weights that partial_sum adds up; partial_max,
    partial_sum (NUM_SPLITS, T*H) fp32, in base 2. An empty split leaves zeros and a maximum of -inf.
    """
    i_m = tl.program_id(0) * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    m_m = i_m < num_query_rows
    i_r = tl.arange(0, R)
    i_p = tl.arange(0, P)

    # Written by the step before this one, as the rows up to it: complete long before this kernel starts.
    context_len = tl.load(context_len_ptr)
    # Row t sees the positions up to context_len + t; the tile needs those of its last row.
    last_row = tl.minimum(tl.program_id(0) * BM + BM, num_query_rows) - 1
    num_positions = context_len + last_row // H + 1
    num_blocks = tl.cdiv(num_positions, BS)
    first = split * num_blocks // NUM_SPLITS
    last = (split + 1) * num_blocks // NUM_SPLITS
    if tl.program_id(0) == 0:
        num_old = tl.minimum(tl.minimum(last, first + PREFETCHED_BLOCKS) * BS, context_len) - first * BS
        p_first = latent_cache_ptr + first.to(tl.int64) * BS * (R + P)
        row_bytes: tl.constexpr = (R + P) * latent_cache_ptr.dtype.element_ty.primitive_bitwidth // 8
        prefetch(p_first, num_old * row_bytes, IS_FP32_DOT)

    wait_for_producers(PDL)
    let_consumers_start(PDL)
    p_query = query_ptr + i_m.to(tl.int64)[:, None] * (R + P)
    b_query = tl.load(p_query + i_r[None, :], mask=m_m[:, None], other=0.0)
    b_query_rope = tl.load(p_query + R + i_p[None, :], mask=m_m[:, None], other=0.0)
    i_limit = context_len + i_m // H  # last position a row sees
    b_max = tl.full((BM,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BM,), dtype=tl.float32)
    b_out = tl.zeros((BM, R), dtype=tl.float32)
    scale_log2 = softmax_scale * 1.4426950408889634
    for block in range(first, last):
        i_s = block * BS + tl.arange(0, BS)
        m_s = i_s < num_positions
        p_row = latent_cache_ptr + i_s.to(tl.int64)[:, None] * (R + P)
        b_c = tl.load(p_row + i_r[None, :], mask=m_s[:, None], other=0.0)  # (BS, R)
        b_rope = tl.load(p_row + R + i_p[None, :], mask=m_s[:, None], other=0.0)  # (BS, P)
        if IS_FP32_DOT:
            b_score = tl.dot(b_query.to(tl.float32), tl.trans(b_c.to(tl.float32)), input_precision="ieee")
            b_score += tl.dot(b_query_rope.to(tl.float32), tl.trans(b_rope.to(tl.float32)), input_precision="ieee")
        else:
            b_score = tl.dot(b_query, tl.trans(b_c))
            b_score = tl.dot(b_query_rope, tl.trans(b_rope), b_score)
        b_score = tl.where(i_s[None, :] <= i_limit[:, None], b_score * scale_log2, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_score, axis=1))
        # A row that has seen nothing yet keeps -inf; exp2(-inf - 0) is zero.
        b_safe_max = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_prob = tl.exp2(b_score - b_safe_max[:, None])
        b_shrink = tl.exp2(b_max - b_safe_max)
        b_sum = b_sum * b_shrink + tl.sum(b_prob, axis=1)
        if IS_FP32_DOT:
            b_out = b_out * b_shrink[:, None] + tl.dot(b_prob, b_c.to(tl.float32), input_precision="ieee")
        else:
            b_out = b_out * b_shrink[:, None] + tl.dot(b_prob.to(b_c.dtype), b_c)
        b_max = b_new_max

    o_row = split.to(tl.int64) * num_query_rows + i_m
    tl.store(partial_ptr + o_row[:, None] * R + i_r[None, :], b_out.to(partial_ptr.dtype.element_ty), mask=m_m[:, None])
    tl.store(partial_max_ptr + o_row, b_max, mask=m_m)
    tl.store(partial_sum_ptr + o_row, b_sum, mask=m_m)


@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    w_kv_b_ptr,
    gate_ptr,
    product_ptr,
    counter_ptr,
    out_ptr,
    T,
    gate_stride_t,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BR: tl.constexpr,
    PDL: tl.constexpr,
    IS_FP32_DOT: tl.constexpr,
):
    """out (T, H*V) = sigmoid(gate) * W_uv z, z the merged splits. Grid: (H, R / BR, T).

    A program merges BR latents of one row and multiplies them by its part of W_uv; the last one of a head and row adds
    the parts. product (R / BR, T, H, V) fp32.
    """
    head = tl.program_id(0)
    part = tl.program_id(1)
    t = tl.program_id(2)
    row = t * H + head
    i_v = tl.arange(0, V)
    i_r = part * BR + tl.arange(0, BR)
    i_s = tl.arange(0, SPLITS_PADDED)
    m_s = (i_s < NUM_SPLITS)[:, None]
    w_uv = tl.load(w_kv_b_ptr + (head * (K + V) + K + i_v)[:, None] * R + i_r[None, :])  # (V, BR)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    # All loads stand before the first sum, which threads wait for together.
    o_rows = i_s.to(tl.int64)[:, None] * (T * H) + row  # (splits, 1)
    b_max = tl.load(partial_max_ptr + o_rows, mask=m_s, other=float("-inf"))
    b_sum = tl.load(partial_sum_ptr + o_rows, mask=m_s, other=0.0)
    b_part = tl.load(partial_ptr + o_rows * R + i_r[None, :], mask=m_s, other=0.0)  # (splits, BR)
    if HAS_GATE:
        b_gate = tl.load(gate_ptr + t.to(tl.int64) * gate_stride_t + head).to(tl.float32)
    b_weight = tl.exp2(b_max - tl.max(b_max, axis=0)[None, :])
    b_weight = b_weight / tl.sum(b_weight * b_sum, axis=0)[None, :]
    b_z = tl.sum(b_part * b_weight, axis=0)[None, :].to(w_kv_b_ptr.dtype.element_ty)  # (1, BR)
    if IS_FP32_DOT:
        b_product = tl.dot(b_z.to(tl.float32), tl.trans(w_uv.to(tl.float32)), input_precision="ieee")
    else:
        b_product = tl.dot(b_z, tl.trans(w_uv))
    o_head = row * V + i_v[None, :]
    tl.store(product_ptr + part * (T * H * V) + o_head, b_product)
    if is_last_arriver(counter_ptr + row, R // BR):
        i_part = tl.arange(0, R // BR)[:, None]
        b_out = tl.sum(tl.load(product_ptr + i_part * (T * H * V) + o_head, cache_modifier=".cg"), axis=0)
        if HAS_GATE:
            b_out *= tl.sigmoid(b_gate)
        tl.store(out_ptr + row * V + i_v, b_out.to(out_ptr.dtype.element_ty))


def _prepare(
    rows: MlaRows,
    weights: MlaWeights,
    latent_cache: torch.Tensor,
    context_len: torch.Tensor,
    rotary: RotaryTable | None,
) -> torch.Tensor:
    """Write this step's rows of the cache, and give the absorbed query (T, H, R+P)."""
    q, kv, _ = rows
    kv_norm, eps, w_kv_b, H, V, _ = weights
    T, R = q.shape[0], weights.latent_rank
    P = kv.shape[1] - R
    query = torch.empty((T, H, R + P), dtype=q.dtype, device=q.device)
    # Without rotary the tables are never read; any pointer does.
    table = (kv_norm, kv_norm) if rotary is None else (rotary.cos, rotary.sin)
    block_r = min(R, _PREPARE_BLOCK_R)
    prepare_kernel[(H + T, R // block_r)](
        q,
        kv,
        kv_norm,
        w_kv_b,
        *table,
        latent_cache,
        context_len,
        query,
        T,
        q.stride(0),
        kv.stride(0),
        eps,
        H=H,
        K=q.shape[1] // H - P,
        V=V,
        R=R,
        P=P,
        HAS_ROTARY=rotary is not None,
        TP=MAX_STEP_ROWS,
        BR=block_r,
        IS_FP32_DOT=IS_INTERPRETED or q.dtype == torch.float32,
        num_warps=4,
        **pdl_options(),
    )
    return query


def _attend_splits(
    query: torch.Tensor, latent_cache: torch.Tensor, context_len: torch.Tensor, R: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give what each split of the positions has found: partial results (splits, T*H, R), their maxima and sums."""
    T, H, X = query.shape
    block_m = 16 if T * H <= 16 else 32 if T * H <= 32 else 64
    num_row_tiles = triton.cdiv(T * H, block_m)
    num_splits = max(1, _NUM_PROGRAMS // num_row_tiles)
    width = 1 if T == 1 else MAX_STEP_ROWS
    partial = torch.empty((num_splits, T * H, R), dtype=torch.float32, device=query.device)
    partial_max, partial_sum = torch.empty((2, num_splits, T * H), dtype=torch.float32, device=query.device)
    splits = (partial, partial_max, partial_sum)
    attention_kernel[(num_row_tiles, num_splits)](
        query,
        latent_cache,
        context_len,
        *splits,
        T * H,
        scale,
        H=H,
        R=R,
        P=X - R,
        NUM_SPLITS=num_splits,
        BM=block_m,
        BS=_BLOCK_S[width],
        PREFETCHED_BLOCKS=_PREFETCHED_BLOCKS[width],
        IS_FP32_DOT=IS_INTERPRETED or query.dtype == torch.float32,
        num_warps=8 if block_m == 64 else 4,
        num_stages=2,
        **pdl_options(),
    )
    return splits


def _combine(
    splits: tuple[torch.Tensor, torch.Tensor, torch.Tensor], gate: torch.Tensor | None, weights: MlaWeights
) -> torch.Tensor:
    """Give (T, H*V), gated, of what the splits have found."""
    _, _, w_kv_b, H, V, _ = weights
    num_splits, num_rows, R = splits[0].shape
    T = num_rows // H
    # Few rows make few programs: more of them, of fewer latents each.
    block_r = min(R, 64 if num_rows <= 16 else 128)
    out = torch.empty((T, H * V), dtype=w_kv_b.dtype, device=w_kv_b.device)
    product = torch.empty((R // block_r, T, H, V), dtype=torch.float32, device=w_kv_b.device)
    combine_kernel[(H, R // block_r, T)](
        *splits,
        w_kv_b,
        w_kv_b if gate is None else gate,
        product,
        arrival_counters(w_kv_b.device),
        out,
        T,
        0 if gate is None else gate.stride(0),
        H=H,
        K=w_kv_b.shape[0] // H - V,
        V=V,
        R=R,
        NUM_SPLITS=num_splits,
        SPLITS_PADDED=triton.next_power_of_2(num_splits),
        HAS_GATE=gate is not None,
        BR=block_r,
        IS_FP32_DOT=IS_INTERPRETED or w_kv_b.dtype == torch.float32,
        num_warps=4,
        **pdl_options(),
    )
    return out


def _check_sizes(rows: MlaRows, weights: MlaWeights) -> None:
    R, V = weights.latent_rank, weights.v_head_dim
    P = rows.kv.shape[1] - R
    K = rows.q.shape[1] // weights.num_heads - P
    if any(size < 16 or size & (size - 1) for size in (R, P, K, V)):
        raise UnsupportedError(
            f"latent attention of rank {R} with {K} + {P} keys and {V} values a head has no GPU kernel; it takes powers"
            " of two from 16 on, a CPU any number"
        )


def attend(
    rows: MlaRows,
    weights: MlaWeights,
    latent_cache: torch.Tensor,
    context_len: torch.Tensor,
    rotary: RotaryTable | None,
) -> torch.Tensor:
    """Launch `mla_attention` for a step of T <= 16 rows; arguments as there."""
    _check_sizes(rows, weights)
    query = _prepare(rows, weights, latent_cache, context_len, rotary)
    splits = _attend_splits(query, latent_cache, context_len, weights.latent_rank, weights.scale)
    return _combine(splits, rows.gate, weights)
