"""Triton kernels of a prompt's Kimi Delta Attention; equations and references are in `kernels/kda.py`.

Only the state passes from block to block of 16 rows, so `prepare_kernel` forms everything else for all blocks at once,
and `scan_kernel` is left with four products per block: N = M V - W S, O = Q S + P N, S = S diag(exp(G)) + N^T K.

Source: Kimi Linear (arXiv 2510.26692), section 3, the chunkwise form.
"""

import torch
import triton
import triton.language as tl

from soloist.kernels.kda_triton import (
    BLOCK_V,
    DOT_PRECISION,
    ROWS,
    finish_head,
    load_block,
    shift_window,
    short_conv,
)


@triton.jit
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
    b_v = short_conv(qkv_ptr, conv_ptr, conv_w_ptr, i_t, 2 * H * K + head * V + i_v, T, qkv_stride_t, C)
    p_v = (o_block * ROWS + i_r)[:, None] * V + i_v[None, :]
    tl.store(u_ptr + p_v, tl.dot(b_m, b_v, input_precision=DOT_PRECISION))


@triton.jit
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


@triton.jit
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
    finish_head(out_ptr, gate_ptr, o_norm_ptr, head, tl.program_id(1) * ROWS, T, gate_stride_t, eps, H, V, ROWS)
    if tl.program_id(1) == 0:
        i_k = tl.arange(0, K)
        shift_window(qkv_ptr, conv_ptr, T, head * K + i_k, qkv_stride_t, C)
        shift_window(qkv_ptr, conv_ptr, T, H * K + head * K + i_k, qkv_stride_t, C)
        shift_window(qkv_ptr, conv_ptr, T, 2 * H * K + head * V + tl.arange(0, V), qkv_stride_t, C)


def run_prompt(
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
) -> torch.Tensor:
    """Launch `kda_chunk`; arguments as there."""
    H, V, K = state.shape
    T, C = qkv.shape[0], conv.shape[1]
    blocks = triton.cdiv(T, ROWS)

    def scratch(*shape: int) -> torch.Tensor:
        return torch.empty((blocks, H, *shape), dtype=torch.float32, device=qkv.device)

    parts = (*(scratch(ROWS, K) for _ in range(3)), scratch(ROWS, V), scratch(ROWS, ROWS), scratch(K))
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
        ROWS=ROWS,
        DOT_PRECISION=DOT_PRECISION,
        num_warps=4,
        num_stages=1,
        **sizes,
    )
    block_v = min(V, BLOCK_V)
    scan_kernel[(H, V // block_v)](
        *parts,
        state,
        out,
        T,
        ROWS=ROWS,
        BV=block_v,
        DOT_PRECISION=DOT_PRECISION,
        num_warps=4,
        num_stages=3,
        **sizes,
    )
    norm_rows = 32
    finish_kernel[(H, triton.cdiv(T, norm_rows))](
        qkv, gate, o_norm, conv, out, T, qkv.stride(0), gate.stride(0), eps, C=C, ROWS=norm_rows, num_warps=4, **sizes
    )
    return out
