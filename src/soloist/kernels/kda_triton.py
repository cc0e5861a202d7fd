"""One token of Kimi Delta Attention in Triton; the equations and the references are in `kernels/kda.py`.

One program owns one head and holds its state (V, K) fp32 in registers. What a prompt needs too is here:
`kernels/kda_prompt_triton.py`.

Source: Kimi Linear (arXiv 2510.26692), section 3.
"""

import torch
import triton
import triton.language as tl

from soloist.errors import UnsupportedError
from soloist.kernels.kda_inputs import KdaCache, KdaRows, KdaWeights
from soloist.kernels.launch import (
    IS_INTERPRETED,
    let_consumers_start,
    pdl_options,
    wait_for_producers,
)

# Rows of one WY block of a prompt.
ROWS = 16
# Three passes of bf16 give a product 17 bits, at two thirds of the time of TF32's three.
DOT_PRECISION = "ieee" if IS_INTERPRETED else "bf16x3"
# Value channels of a head that one program of a WY block owns.
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
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    H: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
    HAS_WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token of one head. state (H, V, K) and conv (3, C) are written in place, at a width above 0.

    Grid: (H,).
    """
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


def check_head(K: int, V: int) -> None:
    """Refuse a head whose sizes no Triton kernel takes.

    Raises:
        UnsupportedError: keys or values are of another number than a power of two from 16 on.
    """
    if any(size < 16 or size & (size - 1) for size in (K, V)):
        raise UnsupportedError(
            f"KDA heads of {K} keys and {V} values have no GPU kernel; it takes 16, 32, 64 or 128 of each,"
            " a CPU any number"
        )


def step(
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    *,
    width: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch `kda_step`; arguments as there."""
    H, V, K = cache.state.shape
    check_head(K, V)
    out = torch.empty((1, H * V), dtype=rows.qkv.dtype, device=rows.qkv.device)
    step_kernel[(H,)](
        *rows,
        *weights[:4],
        *cache,
        out,
        out if width is None else width,
        weights.eps,
        K**-0.5,
        C=cache.conv.shape[1],
        K=K,
        V=V,
        H=H,
        LOWER_BOUND=weights.lower_bound,
        HAS_WIDTH=width is not None,
        num_warps=8,
        **pdl_options(),
    )
    return out
