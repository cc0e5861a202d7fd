"""Triton kernels of a prompt's Kimi Delta Attention; equations and references are in `kernels/kda.py`.

Only the state passes from block to block of 16 rows, so `prepare_kernel` forms everything else for all blocks at once,
and `scan_kernel` is left with four products per block: N = M V - W S, O = Q S + P N, S = S diag(exp(G)) + N^T K.

Source: Kimi Linear (arXiv 2510.26692), section 3, the chunkwise form.
"""

import torch
import triton
import triton.language as tl

from soloist.errors import UnsupportedError
from soloist.kernels.kda_inputs import KdaCache, KdaRows, KdaWeights
from soloist.kernels.launch import IS_INTERPRETED

# Rows of one WY block.
_ROWS = 16
# Three passes of bf16 give a product 17 bits, at two thirds of the time of TF32's three.
_DOT_PRECISION = "ieee" if IS_INTERPRETED else "bf16x3"
# Value channels of a head that one program of the scan owns, at most.
_BLOCK_V = 32


@triton.jit
def _log_decay(f, a_log, dt_bias, LOWER_BOUND: tl.constexpr):
    """g, the log decay: bounded below (Ling) or not (Kimi, LOWER_BOUND None)."""
    drive = f + dt_bias
    if LOWER_BOUND is None:
        # softplus, linear past 20 as torch's; the quotient gives log(1 + x) the digits of a small x back.
        x = tl.exp(tl.minimum(drive, 20.0))
        above = 1.0 + x
        soft = tl.where(above == 1.0, x, tl.log(above) * (x / (above - 1.0)))
        g = -tl.exp(a_log) * tl.where(drive > 20.0, drive, soft)
    else:
        g = LOWER_BOUND * tl.sigmoid(tl.exp(a_log) * drive)
    return g


@triton.jit
def _window_rows(x_ptr, conv_ptr, i_row, i_c, T, stride_t, C: tl.constexpr):
    """Raw convolution inputs at rows `i_row` of this pass; rows -3..-1 are the cache's, rows >= T are zero."""
    m_new = (i_row >= 0) & (i_row < T)
    m_old = (i_row < 0) & (i_row >= -3)
    new = tl.load(x_ptr + i_row.to(tl.int64)[:, None] * stride_t + i_c[None, :], mask=m_new[:, None], other=0.0)
    old = tl.load(conv_ptr + (i_row + 3)[:, None] * C + i_c[None, :], mask=m_old[:, None], other=0.0)
    return tl.where(m_old[:, None], old, new)


@triton.jit
def _shift_window(x_ptr, conv_ptr, num_rows, i_c, stride_t, C: tl.constexpr):
    """Make the last three raw rows of (window, the first `num_rows` rows of x) the new window, for channels `i_c`."""
    i_tail = tl.arange(0, 4)
    b_tail = _window_rows(x_ptr, conv_ptr, num_rows - 3 + i_tail, i_c, num_rows, stride_t, C)
    tl.debug_barrier()
    tl.store(conv_ptr + i_tail[:, None] * C + i_c[None, :], b_tail, mask=(i_tail < 3)[:, None])


@triton.jit
def _short_conv(x_ptr, conv_ptr, conv_w_ptr, i_row, i_c, T, stride_t, C: tl.constexpr):
    """silu of the width-4 depthwise convolution, rounded to the model's dtype: (rows, channels) fp32."""
    b_y = tl.zeros((i_row.shape[0], i_c.shape[0]), dtype=tl.float32)
    for tap in tl.static_range(4):
        b_x = _window_rows(x_ptr, conv_ptr, i_row + (tap - 3), i_c, T, stride_t, C).to(tl.float32)
        b_y += b_x * tl.load(conv_w_ptr + i_c * 4 + tap).to(tl.float32)[None, :]
    b_y = b_y * tl.sigmoid(b_y)
    return b_y.to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _pair_products(b_q, b_k, b_g, i_r, ROWS: tl.constexpr, IS_BOUNDED: tl.constexpr, DOT_PRECISION: tl.constexpr):
    """sum_d k_i exp(G_i - G_j) k_j and the same with q_i, for all pairs of rows, of which only i >= j mean anything; G.

    With a bounded gate (at least -5 a row) exp(G_i - G_j) splits at the middle row: neither factor passes exp(40). An
    unbounded one is summed pair by pair: no exponent is ever positive, and none is a difference of large sums.
    """
    if IS_BOUNDED:
        b_cum = tl.cumsum(b_g, axis=0)  # (ROWS, K)
        b_middle = tl.sum(tl.where((i_r == ROWS // 2 - 1)[:, None], b_cum, 0.0), axis=0)
        b_up = tl.exp(b_cum - b_middle[None, :])
        b_down_t = tl.trans(b_k * tl.exp(b_middle[None, :] - b_cum))  # (K, ROWS)
        b_kk = tl.dot(b_k * b_up, b_down_t, input_precision=DOT_PRECISION)
        b_qk = tl.dot(b_q * b_up, b_down_t, input_precision=DOT_PRECISION)
    else:
        b_kk = tl.zeros((ROWS, ROWS), dtype=tl.float32)
        b_qk = tl.zeros((ROWS, ROWS), dtype=tl.float32)
        # g_{j+1} + ... + g_i, from the last j to the first; in the end the whole sum.
        b_cum = tl.zeros_like(b_g)
        for back in range(ROWS):
            j = ROWS - 1 - back
            m_j = i_r == j
            k_j = tl.sum(tl.where(m_j[:, None], b_k, 0.0), axis=0)
            g_j = tl.sum(tl.where(m_j[:, None], b_g, 0.0), axis=0)
            b_decayed = tl.exp(b_cum) * k_j[None, :]
            b_kk = tl.where(m_j[None, :], tl.sum(b_k * b_decayed, axis=1)[:, None], b_kk)
            b_qk = tl.where(m_j[None, :], tl.sum(b_q * b_decayed, axis=1)[:, None], b_qk)
            b_cum += tl.where((i_r >= j)[:, None], g_j[None, :], 0.0)
    return b_kk, b_qk, b_cum


@triton.jit
def _inverse(b_l, i_r, DOT_PRECISION: tl.constexpr):
    """(I + L)^-1 of a strictly lower (16, 16) L, in blocks of 4.

    Both factors of I + L = (I + B)(I + M), B the blocks on the diagonal and M = (I + B)^-1 (L - B), have a nilpotent
    part of order 4: (I + X)^-1 = (I - X)(I + X^2) exactly, without the large powers that the same series over all 16
    rows would cancel.
    """
    b_one = tl.where(i_r[:, None] == i_r[None, :], 1.0, 0.0)
    m_block = i_r[:, None] // 4 == i_r[None, :] // 4
    b_block = tl.where(m_block, b_l, 0.0)
    b_square = tl.dot(b_block, b_block, input_precision=DOT_PRECISION)
    b_inner = tl.dot(b_one - b_block, b_one + b_square, input_precision=DOT_PRECISION)
    b_m = tl.dot(b_inner, tl.where(m_block, 0.0, b_l), input_precision=DOT_PRECISION)
    b_square = tl.dot(b_m, b_m, input_precision=DOT_PRECISION)
    b_outer = tl.dot(b_one - b_m, b_one + b_square, input_precision=DOT_PRECISION)
    return tl.dot(b_outer, b_inner, input_precision=DOT_PRECISION)


@triton.jit
def _load_block(
    qkv_ptr,
    f_ptr,
    b_ptr,
    conv_ptr,
    conv_w_ptr,
    a_log_ptr,
    dt_bias_ptr,
    head,
    i_t,
    T,
    qkv_stride_t,
    f_stride_t,
    b_stride_t,
    scale,
    C: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """What a block of rows of one head gives to the WY form, whatever the values are.

    Returns:
        k, g, exp(cumulated g), q (rows, K); beta (rows); (I + L)^-1 and P (rows, rows).
    """
    i_k = tl.arange(0, K)
    c_q = head * K + i_k
    m_t = i_t < T
    i_t64 = i_t.to(tl.int64)
    b_q = _short_conv(qkv_ptr, conv_ptr, conv_w_ptr, i_t, c_q, T, qkv_stride_t, C)
    b_k = _short_conv(qkv_ptr, conv_ptr, conv_w_ptr, i_t, H * K + c_q, T, qkv_stride_t, C)
    b_q = b_q / tl.sqrt(tl.sum(b_q * b_q, axis=1) + 1e-6)[:, None] * scale
    b_k = b_k / tl.sqrt(tl.sum(b_k * b_k, axis=1) + 1e-6)[:, None]
    b_f = tl.load(f_ptr + i_t64[:, None] * f_stride_t + c_q[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + head)
    b_dt = tl.load(dt_bias_ptr + c_q)
    b_g = tl.where(m_t[:, None], _log_decay(b_f, a_log, b_dt[None, :], LOWER_BOUND), 0.0)
    b_beta = tl.load(b_ptr + i_t64 * b_stride_t + head, mask=m_t, other=0.0).to(tl.float32)
    b_beta = tl.where(m_t, tl.sigmoid(b_beta), 0.0)
    b_q = tl.where(m_t[:, None], b_q, 0.0)
    b_k = tl.where(m_t[:, None], b_k, 0.0)

    i_r = tl.arange(0, i_t.shape[0])
    b_kk, b_qk, b_cum = _pair_products(b_q, b_k, b_g, i_r, i_t.shape[0], LOWER_BOUND is not None, DOT_PRECISION)
    b_l = tl.where(i_r[:, None] > i_r[None, :], b_kk * b_beta[:, None], 0.0)
    b_p = tl.where(i_r[:, None] >= i_r[None, :], b_qk, 0.0)
    return b_k, b_g, tl.exp(b_cum), b_q, b_beta, _inverse(b_l, i_r, DOT_PRECISION), b_p


@triton.jit
def _finish_head(
    out_ptr,
    gate_ptr,
    o_norm_ptr,
    head,
    start,
    T,
    gate_stride_t,
    eps,
    H: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Norm and gate ROWS rows of one head of out (T, H*V), in place."""
    i_v = tl.arange(0, V)
    i_t = (start + tl.arange(0, ROWS)).to(tl.int64)
    m_t = (i_t < T)[:, None]
    p_out = out_ptr + i_t[:, None] * (H * V) + (head * V + i_v)[None, :]
    b_o = tl.load(p_out, mask=m_t, other=0.0, cache_modifier=".cg").to(tl.float32)
    b_gate = tl.load(gate_ptr + i_t[:, None] * gate_stride_t + (head * V + i_v)[None, :], mask=m_t, other=0.0)
    b_norm = tl.load(o_norm_ptr + i_v).to(tl.float32)
    b_y = b_o / tl.sqrt(tl.sum(b_o * b_o, axis=1) / V + eps)[:, None] * b_norm[None, :]
    tl.store(p_out, (b_y * tl.sigmoid(b_gate.to(tl.float32))).to(out_ptr.dtype.element_ty), mask=m_t)


@triton.jit(do_not_specialize=["T"])
def prepare_kernel(
    qkv_ptr,
    f_ptr,
    b_ptr,
    conv_w_ptr,
    a_log_ptr,
    dt_bias_ptr,
    conv_ptr,
    w_ptr,
    q_ptr,
    k_ptr,
    u_ptr,
    p_ptr,
    total_ptr,
    T,
    qkv_stride_t,
    f_stride_t,
    b_stride_t,
    scale,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    H: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
    ROWS: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """One block of one head. Grid: (H, blocks). All results fp32, by block and head.

    With M = (I + L)^-1 diag(beta): w = M (exp(G) K), q = exp(G) Q, k = exp(G_last - G) K, each (rows, K); u = M V
    (rows, V); p (rows, rows); total = exp(G_last) (K).
    """
    head = tl.program_id(0)
    block = tl.program_id(1)
    i_r = tl.arange(0, ROWS)
    i_k = tl.arange(0, K)
    i_v = tl.arange(0, V)
    i_t = block * ROWS + i_r
    b_k, b_g, b_from_start, b_q, b_beta, b_inverse, b_p = _load_block(
        qkv_ptr,
        f_ptr,
        b_ptr,
        conv_ptr,
        conv_w_ptr,
        a_log_ptr,
        dt_bias_ptr,
        head,
        i_t,
        T,
        qkv_stride_t,
        f_stride_t,
        b_stride_t,
        scale,
        C,
        K,
        H,
        LOWER_BOUND,
        DOT_PRECISION,
    )
    b_m = b_inverse * b_beta[None, :]
    total = tl.sum(b_g, axis=0)  # (K,)
    o_block = (block * H + head).to(tl.int64)
    p_k = (o_block * ROWS + i_r)[:, None] * K + i_k[None, :]
    tl.store(w_ptr + p_k, tl.dot(b_m, b_from_start * b_k, input_precision=DOT_PRECISION))
    tl.store(q_ptr + p_k, b_from_start * b_q)
    # The g of all later rows: a sum, never a difference of sums.
    b_later = tl.dot(tl.where(i_r[:, None] < i_r[None, :], 1.0, 0.0), b_g, input_precision=DOT_PRECISION)
    tl.store(k_ptr + p_k, tl.exp(tl.minimum(b_later, 0.0)) * b_k)
    tl.store(p_ptr + (o_block * ROWS + i_r)[:, None] * ROWS + i_r[None, :], b_p)
    tl.store(total_ptr + o_block * K + i_k, tl.exp(total))
    b_v = _short_conv(qkv_ptr, conv_ptr, conv_w_ptr, i_t, 2 * H * K + head * V + i_v, T, qkv_stride_t, C)
    p_v = (o_block * ROWS + i_r)[:, None] * V + i_v[None, :]
    tl.store(u_ptr + p_v, tl.dot(b_m, b_v, input_precision=DOT_PRECISION))


@triton.jit(do_not_specialize=["T"])
def scan_kernel(
    w_ptr,
    q_ptr,
    k_ptr,
    u_ptr,
    p_ptr,
    total_ptr,
    state_ptr,
    out_ptr,
    T,
    K: tl.constexpr,
    V: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BV: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """All blocks of BV value channels of one head, in order. Grid: (H, V / BV). state (H, V, K) is written in place."""
    head = tl.program_id(0)
    i_r = tl.arange(0, ROWS)
    i_k = tl.arange(0, K)
    i_v = tl.program_id(1) * BV + tl.arange(0, BV)
    p_state = state_ptr + (head * V + i_v)[None, :] * K + i_k[:, None]
    b_state = tl.load(p_state)  # (K, BV)
    for block in range(tl.cdiv(T, ROWS)):
        o_rows = (block * H + head).to(tl.int64) * ROWS + i_r
        o_k = o_rows[:, None] * K + i_k[None, :]
        b_w = tl.load(w_ptr + o_k)
        b_q = tl.load(q_ptr + o_k)
        b_k = tl.load(k_ptr + o_k)
        b_u = tl.load(u_ptr + o_rows[:, None] * V + i_v[None, :])
        b_p = tl.load(p_ptr + o_rows[:, None] * ROWS + i_r[None, :])
        b_total = tl.load(total_ptr + (block * H + head).to(tl.int64) * K + i_k)
        b_n = b_u - tl.dot(b_w, b_state, input_precision=DOT_PRECISION)
        b_o = tl.dot(b_q, b_state, input_precision=DOT_PRECISION)
        b_o += tl.dot(b_p, b_n, input_precision=DOT_PRECISION)
        b_state = b_state * b_total[:, None] + tl.dot(tl.trans(b_k), b_n, input_precision=DOT_PRECISION)
        i_t = (block * ROWS + i_r).to(tl.int64)
        p_out = out_ptr + i_t[:, None] * (H * V) + (head * V + i_v)[None, :]
        tl.store(p_out, b_o.to(out_ptr.dtype.element_ty), mask=(i_t < T)[:, None])
    tl.store(p_state, b_state)


@triton.jit(do_not_specialize=["T"])
def finish_kernel(
    qkv_ptr,
    gate_ptr,
    o_norm_ptr,
    conv_ptr,
    out_ptr,
    T,
    qkv_stride_t,
    gate_stride_t,
    eps,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Norm and gate out (T, H*V) in place; the first programs of a head move the window. Grid: (H, T / ROWS)."""
    head = tl.program_id(0)
    _finish_head(out_ptr, gate_ptr, o_norm_ptr, head, tl.program_id(1) * ROWS, T, gate_stride_t, eps, H, V, ROWS)
    if tl.program_id(1) == 0:
        i_k = tl.arange(0, K)
        _shift_window(qkv_ptr, conv_ptr, T, head * K + i_k, qkv_stride_t, C)
        _shift_window(qkv_ptr, conv_ptr, T, H * K + head * K + i_k, qkv_stride_t, C)
        _shift_window(qkv_ptr, conv_ptr, T, 2 * H * K + head * V + tl.arange(0, V), qkv_stride_t, C)


def run_prompt(rows: KdaRows, weights: KdaWeights, cache: KdaCache) -> torch.Tensor:
    """Launch `kda_chunk`; arguments as there.

    Raises:
        UnsupportedError: keys or values are of another number than a power of two from 16 on.
    """
    qkv, f, gate, b = rows
    conv_w, A_log, dt_bias, o_norm, eps, lower_bound = weights
    state, conv = cache
    H, V, K = state.shape
    if any(size < 16 or size & (size - 1) for size in (K, V)):
        raise UnsupportedError(
            f"KDA heads of {K} keys and {V} values have no GPU kernel for a prompt; it takes 16, 32, 64 or 128 of each,"
            " a CPU any number"
        )
    T, C = qkv.shape[0], conv.shape[1]
    blocks = triton.cdiv(T, _ROWS)

    def scratch(*shape: int) -> torch.Tensor:
        return torch.empty((blocks, H, *shape), dtype=torch.float32, device=qkv.device)

    parts = (*(scratch(_ROWS, K) for _ in range(3)), scratch(_ROWS, V), scratch(_ROWS, _ROWS), scratch(K))
    out = torch.empty((T, H * V), dtype=qkv.dtype, device=qkv.device)
    sizes = {"K": K, "V": V, "H": H}
    prepare_kernel[(H, blocks)](
        qkv,
        f,
        b,
        conv_w,
        A_log,
        dt_bias,
        conv,
        *parts,
        T,
        qkv.stride(0),
        f.stride(0),
        b.stride(0),
        K**-0.5,
        C=C,
        LOWER_BOUND=lower_bound,
        ROWS=_ROWS,
        DOT_PRECISION=_DOT_PRECISION,
        num_warps=4,
        num_stages=1,
        **sizes,
    )
    block_v = min(V, _BLOCK_V)
    scan_kernel[(H, V // block_v)](
        *parts,
        state,
        out,
        T,
        ROWS=_ROWS,
        BV=block_v,
        DOT_PRECISION=_DOT_PRECISION,
        num_warps=4,
        num_stages=3,
        **sizes,
    )
    norm_rows = 32
    finish_kernel[(H, triton.cdiv(T, norm_rows))](
        qkv, gate, o_norm, conv, out, T, qkv.stride(0), gate.stride(0), eps, C=C, ROWS=norm_rows, num_warps=4, **sizes
    )
    return out
