"""Triton kernels of Kimi Delta Attention; the equations, the references and the launchers are in `kernels/kda.py`.

`step_kernel` is one token; one program owns one head and holds its state (V, K) fp32 in registers. `verify_kernel` is
up to 16 rows in WY form from a frozen state, a tile of value channels per program. `commit_kernel` advances every head
of every layer by the accepted rows. A prompt is `kernels/kda_prompt_triton.py`.

Source: Kimi Linear (arXiv 2510.26692), equations of the WY form; frozen-state verification with a log of (k, u, g).
"""

import torch
import triton
import triton.language as tl

from soloist.kernels.launch import (
    IS_INTERPRETED,
    arrival_counters,
    is_last_arriver,
    let_consumers_start,
    pdl_options,
    wait_for_producers,
)

# Rows of one WY block: the most a verify has.
ROWS = 16
# Three passes of bf16 give a product 17 bits: the state's error per commit is 5e-6, at two thirds of the time of
# TF32's three.
DOT_PRECISION = "ieee" if IS_INTERPRETED else "bf16x3"
# Value channels of a head that one program of a WY block, or of a commit, owns.
BLOCK_V = 32


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
def step_kernel(
    qkv_ptr,
    f_ptr,
    gate_ptr,
    b_ptr,
    conv_w_ptr,
    a_log_ptr,
    dt_bias_ptr,
    o_norm_ptr,
    state_ptr,
    conv_ptr,
    out_ptr,
    width_ptr,
    eps,
    scale,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    H: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
    HAS_WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token of one head. Grid: (H,). state (H, V, K) and conv (3, C) are written in place, at a width above 0."""
    head = tl.program_id(0)
    i_k = tl.arange(0, K)
    i_v = tl.arange(0, V)
    c_q = head * K + i_k
    c_k = H * K + head * K + i_k
    c_v = 2 * H * K + head * V + i_v
    dtype = qkv_ptr.dtype.element_ty

    # Written by the step before this one, or never: complete long before this kernel starts.
    p_state = state_ptr + (head * V + i_v)[:, None] * K + i_k[None, :]
    b_state = tl.load(p_state)  # (V, K)
    q1 = tl.load(conv_ptr + C + c_q)
    q2 = tl.load(conv_ptr + 2 * C + c_q)
    k1 = tl.load(conv_ptr + C + c_k)
    k2 = tl.load(conv_ptr + 2 * C + c_k)
    v1 = tl.load(conv_ptr + C + c_v)
    v2 = tl.load(conv_ptr + 2 * C + c_v)
    b_q = tl.load(conv_ptr + c_q).to(tl.float32) * tl.load(conv_w_ptr + c_q * 4).to(tl.float32)
    b_k = tl.load(conv_ptr + c_k).to(tl.float32) * tl.load(conv_w_ptr + c_k * 4).to(tl.float32)
    b_v = tl.load(conv_ptr + c_v).to(tl.float32) * tl.load(conv_w_ptr + c_v * 4).to(tl.float32)
    b_q += q1.to(tl.float32) * tl.load(conv_w_ptr + c_q * 4 + 1).to(tl.float32)
    b_k += k1.to(tl.float32) * tl.load(conv_w_ptr + c_k * 4 + 1).to(tl.float32)
    b_v += v1.to(tl.float32) * tl.load(conv_w_ptr + c_v * 4 + 1).to(tl.float32)
    b_q += q2.to(tl.float32) * tl.load(conv_w_ptr + c_q * 4 + 2).to(tl.float32)
    b_k += k2.to(tl.float32) * tl.load(conv_w_ptr + c_k * 4 + 2).to(tl.float32)
    b_v += v2.to(tl.float32) * tl.load(conv_w_ptr + c_v * 4 + 2).to(tl.float32)
    w_q = tl.load(conv_w_ptr + c_q * 4 + 3).to(tl.float32)
    w_k = tl.load(conv_w_ptr + c_k * 4 + 3).to(tl.float32)
    w_v = tl.load(conv_w_ptr + c_v * 4 + 3).to(tl.float32)
    a_log = tl.load(a_log_ptr + head)
    b_dt = tl.load(dt_bias_ptr + c_q)
    b_onorm = tl.load(o_norm_ptr + i_v).to(tl.float32)

    wait_for_producers(PDL)
    let_consumers_start(PDL)
    q3 = tl.load(qkv_ptr + c_q)
    k3 = tl.load(qkv_ptr + c_k)
    v3 = tl.load(qkv_ptr + c_v)
    b_g = _log_decay(tl.load(f_ptr + c_q).to(tl.float32), a_log, b_dt, LOWER_BOUND)
    beta = tl.sigmoid(tl.load(b_ptr + head).to(tl.float32))
    b_gate = tl.load(gate_ptr + head * V + i_v).to(tl.float32)

    b_q += q3.to(tl.float32) * w_q
    b_k += k3.to(tl.float32) * w_k
    b_v += v3.to(tl.float32) * w_v
    b_q = (b_q * tl.sigmoid(b_q)).to(dtype).to(tl.float32)
    b_k = (b_k * tl.sigmoid(b_k)).to(dtype).to(tl.float32)
    b_v = (b_v * tl.sigmoid(b_v)).to(dtype).to(tl.float32)
    b_q = b_q / tl.sqrt(tl.sum(b_q * b_q, axis=0) + 1e-6) * scale
    b_k = b_k / tl.sqrt(tl.sum(b_k * b_k, axis=0) + 1e-6)

    b_state = b_state * tl.exp(b_g)[None, :]
    b_u = beta * (b_v - tl.sum(b_state * b_k[None, :], axis=1))  # (V,)
    b_state += b_u[:, None] * b_k[None, :]
    b_o = tl.sum(b_state * b_q[None, :], axis=1).to(dtype).to(tl.float32)
    b_y = b_o / tl.sqrt(tl.sum(b_o * b_o, axis=0) / V + eps) * b_onorm * tl.sigmoid(b_gate)
    tl.store(out_ptr + head * V + i_v, b_y.to(out_ptr.dtype.element_ty))

    is_counted = True
    if HAS_WIDTH:
        is_counted = tl.load(width_ptr) > 0
    if is_counted:
        tl.store(p_state, b_state)
        tl.store(conv_ptr + c_q, q1)
        tl.store(conv_ptr + C + c_q, q2)
        tl.store(conv_ptr + 2 * C + c_q, q3)
        tl.store(conv_ptr + c_k, k1)
        tl.store(conv_ptr + C + c_k, k2)
        tl.store(conv_ptr + 2 * C + c_k, k3)
        tl.store(conv_ptr + c_v, v1)
        tl.store(conv_ptr + C + c_v, v2)
        tl.store(conv_ptr + 2 * C + c_v, v3)


@triton.jit
def _window(x_ptr, conv_ptr, i_row, i_c, T, stride_t, C: tl.constexpr):
    """Raw convolution inputs at rows `i_row` of this pass; rows -3..-1 are the cache's, rows >= T are zero."""
    m_new = (i_row >= 0) & (i_row < T)
    m_old = (i_row < 0) & (i_row >= -3)
    new = tl.load(x_ptr + i_row.to(tl.int64)[:, None] * stride_t + i_c[None, :], mask=m_new[:, None], other=0.0)
    old = tl.load(conv_ptr + (i_row + 3)[:, None] * C + i_c[None, :], mask=m_old[:, None], other=0.0)
    return tl.where(m_old[:, None], old, new)


@triton.jit
def short_conv(x_ptr, conv_ptr, conv_w_ptr, i_row, i_c, T, stride_t, C: tl.constexpr):
    """silu of the width-4 depthwise convolution, rounded to the model's dtype: (rows, channels) fp32."""
    b_y = tl.zeros((i_row.shape[0], i_c.shape[0]), dtype=tl.float32)
    for tap in tl.static_range(4):
        b_x = _window(x_ptr, conv_ptr, i_row + (tap - 3), i_c, T, stride_t, C).to(tl.float32)
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
def load_block(
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
    b_q = short_conv(qkv_ptr, conv_ptr, conv_w_ptr, i_t, c_q, T, qkv_stride_t, C)
    b_k = short_conv(qkv_ptr, conv_ptr, conv_w_ptr, i_t, H * K + c_q, T, qkv_stride_t, C)
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
def verify_kernel(
    qkv_ptr,
    f_ptr,
    gate_ptr,
    b_ptr,
    conv_w_ptr,
    a_log_ptr,
    dt_bias_ptr,
    o_norm_ptr,
    state_ptr,
    conv_ptr,
    verify_k_ptr,
    verify_u_ptr,
    verify_g_ptr,
    verify_conv_ptr,
    out_ptr,
    counter_ptr,
    T,
    qkv_stride_t,
    f_stride_t,
    gate_stride_t,
    b_stride_t,
    eps,
    scale,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    H: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
    ROWS: tl.constexpr,
    BV: tl.constexpr,
    PDL: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """T <= ROWS rows of BV value channels of one head from a frozen state. Grid: (H, V / BV).

    The last program of a head to finish norms and gates its output rows. verify_k (T, H, K), verify_u (T, H, V),
    verify_g (T, H, K), verify_conv (T, C) keep what a commit needs.
    """
    head = tl.program_id(0)
    tile = tl.program_id(1)
    i_t = tl.arange(0, ROWS)
    i_k = tl.arange(0, K)
    i_v = tile * BV + tl.arange(0, BV)
    c_v = 2 * H * K + head * V + i_v
    b_state = tl.load(state_ptr + (head * V + i_v)[:, None] * K + i_k[None, :])  # (BV, K)

    wait_for_producers(PDL)
    let_consumers_start(PDL)
    b_k, b_g, b_from_start, b_q, b_beta, b_inverse, b_p = load_block(
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
    b_v = short_conv(qkv_ptr, conv_ptr, conv_w_ptr, i_t, c_v, T, qkv_stride_t, C)

    # N = (I + L)^-1 diag(beta) (V - (exp(G) K) S).
    b_state_t = tl.trans(b_state)  # (K, BV)
    b_n = b_beta[:, None] * (b_v - tl.dot(b_from_start * b_k, b_state_t, input_precision=DOT_PRECISION))
    b_n = tl.dot(b_inverse, b_n, input_precision=DOT_PRECISION)
    b_o = tl.dot(b_from_start * b_q, b_state_t, input_precision=DOT_PRECISION)
    b_o += tl.dot(b_p, b_n, input_precision=DOT_PRECISION)

    m_t = i_t < T
    p_out = out_ptr + i_t[:, None] * (H * V) + (head * V + i_v)[None, :]
    tl.store(p_out, b_o.to(out_ptr.dtype.element_ty), mask=m_t[:, None])
    tl.store(verify_u_ptr + (i_t[:, None] * H + head) * V + i_v[None, :], b_n, mask=m_t[:, None])
    _copy_rows(qkv_ptr, verify_conv_ptr, i_t, c_v, m_t, qkv_stride_t, C)
    if tile == 0:
        tl.store(verify_k_ptr + (i_t[:, None] * H + head) * K + i_k[None, :], b_k, mask=m_t[:, None])
        tl.store(verify_g_ptr + (i_t[:, None] * H + head) * K + i_k[None, :], b_g, mask=m_t[:, None])
        _copy_rows(qkv_ptr, verify_conv_ptr, i_t, head * K + i_k, m_t, qkv_stride_t, C)
        _copy_rows(qkv_ptr, verify_conv_ptr, i_t, H * K + head * K + i_k, m_t, qkv_stride_t, C)
    if is_last_arriver(counter_ptr + head, tl.num_programs(1)):
        finish_head(out_ptr, gate_ptr, o_norm_ptr, head, 0, T, gate_stride_t, eps, H, V, ROWS)


@triton.jit
def finish_head(
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


@triton.jit
def shift_window(x_ptr, conv_ptr, num_rows, i_c, stride_t, C: tl.constexpr):
    """Make the last three raw rows of (window, the first `num_rows` rows of x) the new window, for channels `i_c`."""
    i_tail = tl.arange(0, 4)
    b_tail = _window(x_ptr, conv_ptr, num_rows - 3 + i_tail, i_c, num_rows, stride_t, C)
    tl.debug_barrier()
    tl.store(conv_ptr + i_tail[:, None] * C + i_c[None, :], b_tail, mask=(i_tail < 3)[:, None])


@triton.jit
def _copy_rows(from_ptr, to_ptr, i_t, i_c, m_t, stride_t, C: tl.constexpr):
    """Copy channels `i_c` of rows `i_t` to a contiguous (T, C) buffer."""
    b_x = tl.load(from_ptr + i_t.to(tl.int64)[:, None] * stride_t + i_c[None, :], mask=m_t[:, None], other=0.0)
    tl.store(to_ptr + i_t[:, None] * C + i_c[None, :], b_x, mask=m_t[:, None])


@triton.jit
def commit_kernel(
    state_ptr,
    conv_ptr,
    verify_k_ptr,
    verify_u_ptr,
    verify_g_ptr,
    verify_conv_ptr,
    num_rows_ptr,
    T_MAX: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BV: tl.constexpr,
    PDL: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """S_n = S_0 diag(exp(G_n)) + sum_{i<=n} u_i (exp(G_n - G_i) k_i)^T, and the new window. Grid: (V / BV, H, L)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    i_r = tl.arange(0, ROWS)
    i_k = tl.arange(0, K)
    i_v = tile * BV + tl.arange(0, BV)
    p_state = state_ptr + layer * H * V * K + (head * V + i_v)[:, None] * K + i_k[None, :]
    b_state = tl.load(p_state)

    wait_for_producers(PDL)
    let_consumers_start(PDL)
    num_rows = tl.load(num_rows_ptr)
    m_r = ((i_r < num_rows) & (i_r < T_MAX))[:, None]
    o_rows = (layer * T_MAX + i_r)[:, None] * H + head
    b_g = tl.load(verify_g_ptr + o_rows * K + i_k[None, :], mask=m_r, other=0.0)
    b_k = tl.load(verify_k_ptr + o_rows * K + i_k[None, :], mask=m_r, other=0.0)
    b_u = tl.load(verify_u_ptr + o_rows * V + i_v[None, :], mask=m_r, other=0.0)
    total = tl.sum(b_g, axis=0)
    # The g of all later rows: a sum, never a difference of sums.
    m_later = ((i_r + 1 < num_rows) & (i_r + 1 < T_MAX))[:, None]
    b_later = tl.load(verify_g_ptr + (o_rows + H) * K + i_k[None, :], mask=m_later, other=0.0)
    b_to_end = tl.exp(tl.cumsum(b_later, axis=0, reverse=True)) * b_k
    b_state = b_state * tl.exp(total)[None, :] + tl.dot(tl.trans(b_u), b_to_end, input_precision=DOT_PRECISION)
    tl.store(p_state, b_state)

    p_conv = conv_ptr + layer * 3 * C
    p_new = verify_conv_ptr + layer * T_MAX * C
    shift_window(p_new, p_conv, num_rows, 2 * H * K + head * V + i_v, C, C)
    if tile == 0:
        shift_window(p_new, p_conv, num_rows, head * K + i_k, C, C)
        shift_window(p_new, p_conv, num_rows, H * K + head * K + i_k, C, C)


def step(
    qkv: torch.Tensor,
    f: torch.Tensor,
    gate: torch.Tensor,
    b: torch.Tensor,
    conv_w: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    o_norm: torch.Tensor,
    eps: float,
    state: torch.Tensor,
    conv: torch.Tensor,
    *,
    lower_bound: float | None,
    width: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch `kda_step`; arguments as there."""
    H, V, K = state.shape
    out = torch.empty((1, H * V), dtype=qkv.dtype, device=qkv.device)
    step_kernel[(H,)](
        qkv,
        f,
        gate,
        b,
        conv_w,
        A_log,
        dt_bias,
        o_norm,
        state,
        conv,
        out,
        out if width is None else width,
        eps,
        K**-0.5,
        C=conv.shape[1],
        K=K,
        V=V,
        H=H,
        LOWER_BOUND=lower_bound,
        HAS_WIDTH=width is not None,
        num_warps=8,
        **pdl_options(),
    )
    return out


def verify(
    qkv: torch.Tensor,
    f: torch.Tensor,
    gate: torch.Tensor,
    b: torch.Tensor,
    conv_w: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    o_norm: torch.Tensor,
    eps: float,
    state: torch.Tensor,
    conv: torch.Tensor,
    verify_k: torch.Tensor,
    verify_u: torch.Tensor,
    verify_g: torch.Tensor,
    verify_conv: torch.Tensor,
    *,
    lower_bound: float | None,
) -> torch.Tensor:
    """Launch `kda_verify`; arguments as there."""
    H, V, K = state.shape
    T = qkv.shape[0]
    out = torch.empty((T, H * V), dtype=qkv.dtype, device=qkv.device)
    block_v = min(V, BLOCK_V)
    verify_kernel[(H, V // block_v)](
        qkv,
        f,
        gate,
        b,
        conv_w,
        A_log,
        dt_bias,
        o_norm,
        state,
        conv,
        verify_k,
        verify_u,
        verify_g,
        verify_conv,
        out,
        arrival_counters(qkv.device),
        T,
        qkv.stride(0),
        f.stride(0),
        gate.stride(0),
        b.stride(0),
        eps,
        K**-0.5,
        C=conv.shape[1],
        K=K,
        V=V,
        H=H,
        LOWER_BOUND=lower_bound,
        ROWS=ROWS,
        BV=block_v,
        DOT_PRECISION=DOT_PRECISION,
        num_warps=4,
        num_stages=1,
        **pdl_options(),
    )
    return out


def commit(
    state: torch.Tensor,
    conv: torch.Tensor,
    verify_k: torch.Tensor,
    verify_u: torch.Tensor,
    verify_g: torch.Tensor,
    verify_conv: torch.Tensor,
    num_rows: torch.Tensor,
) -> None:
    """Launch `kda_commit`; arguments as there."""
    L, H, V, K = state.shape
    block_v = min(V, BLOCK_V)
    commit_kernel[(V // block_v, H, L)](
        state,
        conv,
        verify_k,
        verify_u,
        verify_g,
        verify_conv,
        num_rows,
        T_MAX=verify_k.shape[1],
        C=conv.shape[2],
        K=K,
        V=V,
        H=H,
        ROWS=ROWS,
        BV=block_v,
        DOT_PRECISION=DOT_PRECISION,
        num_warps=4,
        num_stages=1,
        **pdl_options(),
    )
