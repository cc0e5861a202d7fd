"""Triton kernels of Kimi Delta Attention; the equations, the references and the launchers are in `kernels/kda.py`.

`step_kernel` is one token; one program owns one head and holds its state (V, K) fp32 in registers. `commit_kernel`
advances every head of every layer by the accepted rows of a verification (`kernels/kda_verify_cuda.py`). A prompt is
`kernels/kda_prompt_triton.py`.

Source: Kimi Linear (arXiv 2510.26692), equations of the WY form; frozen-state verification with a log of (k, u, g).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from soloist.kernels.kda_inputs import KdaCache, KdaRows, KdaWeights
from soloist.kernels.launch import (
    IS_INTERPRETED,
    let_consumers_start,
    pdl_options,
    wait_for_producers,
)
from soloist.kernels.read_ahead import read_ahead, shares

# Rows of one WY block: the most a verify has.
ROWS = 16
# Three passes of bf16 give a product 17 bits: the state's error per commit is 5e-6, at two thirds of the time of
# TF32's three.
DOT_PRECISION = "ieee" if IS_INTERPRETED else "bf16x3"
# Bytes of the next launches' weights that a step asks for, and the programs that do nothing else, on multiprocessors
# that would idle; measured on one H200, `docs/log.md`.
READ_AHEAD_BYTES = 20 << 20
_READERS = 64
# Value channels of a head that one program of a WY block, or of a commit, owns.
BLOCK_V = 32


@triton.jit
def log_decay(f, a_log, dt_bias, LOWER_BOUND: tl.constexpr):
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
    upcoming,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    H: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
    HAS_WIDTH: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One token of one head. state (H, V, K) and conv (3, C) are written in place, at a width above 0.

    Grid: (H + programs that only read ahead,).
    """
    head = tl.program_id(0)
    if head >= H:
        wait_for_producers(PDL)
        let_consumers_start(PDL)
        read_ahead(upcoming, head - H, INTERPRETED)
        return
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
    b_g = log_decay(tl.load(f_ptr + c_q).to(tl.float32), a_log, b_dt, LOWER_BOUND)
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
def window_rows(x_ptr, conv_ptr, i_row, i_c, T, stride_t, C: tl.constexpr):
    """Raw convolution inputs at rows `i_row` of this pass; rows -3..-1 are the cache's, rows >= T are zero."""
    m_new = (i_row >= 0) & (i_row < T)
    m_old = (i_row < 0) & (i_row >= -3)
    new = tl.load(x_ptr + i_row.to(tl.int64)[:, None] * stride_t + i_c[None, :], mask=m_new[:, None], other=0.0)
    old = tl.load(conv_ptr + (i_row + 3)[:, None] * C + i_c[None, :], mask=m_old[:, None], other=0.0)
    return tl.where(m_old[:, None], old, new)


@triton.jit
def shift_window(x_ptr, conv_ptr, num_rows, i_c, stride_t, C: tl.constexpr):
    """Make the last three raw rows of (window, the first `num_rows` rows of x) the new window, for channels `i_c`."""
    i_tail = tl.arange(0, 4)
    b_tail = window_rows(x_ptr, conv_ptr, num_rows - 3 + i_tail, i_c, num_rows, stride_t, C)
    tl.debug_barrier()
    tl.store(conv_ptr + i_tail[:, None] * C + i_c[None, :], b_tail, mask=(i_tail < 3)[:, None])


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
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    *,
    width: torch.Tensor | None = None,
    upcoming: Sequence[object] = (),
) -> torch.Tensor:
    """Launch `kda_step`; arguments as there."""
    H, V, K = cache.state.shape
    out = torch.empty((1, H * V), dtype=rows.qkv.dtype, device=rows.qkv.device)
    ahead = shares(upcoming, READ_AHEAD_BYTES, _READERS)
    step_kernel[(H + _READERS if ahead else H,)](
        *rows,
        *weights[:4],
        *cache,
        out,
        out if width is None else width,
        weights.eps,
        K**-0.5,
        ahead,
        C=cache.conv.shape[1],
        K=K,
        V=V,
        H=H,
        LOWER_BOUND=weights.lower_bound,
        HAS_WIDTH=width is not None,
        INTERPRETED=IS_INTERPRETED,
        num_warps=8,
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
