"""Grouped products of a prompt's mixture of experts: more rows than a step, each expert on the rows that chose it.

The (token, choice) pairs are sorted by expert and cut into blocks of at most BLOCK_ROWS pairs of one expert; both
products run over the blocks, and each token adds its choices in order. No count is read on the host: the grid is the
largest number of blocks there can be. Pairs of rows that do not count come behind all experts, in no block.
"""

import torch
import triton
import triton.language as tl

from soloist.errors import UnsupportedError
from soloist.kernels.launch import IS_INTERPRETED

# Pairs of one expert that a program multiplies at once.
BLOCK_ROWS = 64
# Fewest inputs that tensor cores multiply at once.
MIN_INPUTS = 16
# Columns that a program sums.
_SUM_BLOCK = 1024


@triton.jit
def grouped_gate_up_kernel(
    h_ptr,
    gate_up_ptr,
    pair_token_ptr,
    block_expert_ptr,
    block_start_ptr,
    block_end_ptr,
    act_ptr,
    limit,
    D: tl.constexpr,
    F: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
    BD: tl.constexpr,
    IS_FP32_DOT: tl.constexpr,
):
    """act of each pair (sorted by expert). Grid: (F / BF, blocks). A block is up to BM pairs of one expert.

    h (T, D); pair_token (pairs) int32; act (pairs, F).
    """
    block = tl.program_id(1)
    start = tl.load(block_start_ptr + block)
    end = tl.load(block_end_ptr + block)
    if start < end:
        expert = tl.load(block_expert_ptr + block).to(tl.int64)
        i_p = start + tl.arange(0, BM)
        m_p = i_p < end
        i_token = tl.load(pair_token_ptr + i_p, mask=m_p, other=0).to(tl.int64)
        i_f = tl.program_id(0) * BF + tl.arange(0, BF)
        p_gate = gate_up_ptr + expert * 2 * F * D + i_f[None, :] * D
        b_gate = tl.zeros((BM, BF), dtype=tl.float32)
        b_up = tl.zeros((BM, BF), dtype=tl.float32)
        for o_d in range(0, D, BD):
            i_d = o_d + tl.arange(0, BD)
            b_h = tl.load(h_ptr + i_token[:, None] * D + i_d[None, :])
            w_gate = tl.load(p_gate + i_d[:, None])
            w_up = tl.load(p_gate + F * D + i_d[:, None])
            if IS_FP32_DOT:
                b_gate += tl.dot(b_h.to(tl.float32), w_gate.to(tl.float32), input_precision="ieee")
                b_up += tl.dot(b_h.to(tl.float32), w_up.to(tl.float32), input_precision="ieee")
            else:
                b_gate += tl.dot(b_h, w_gate)
                b_up += tl.dot(b_h, w_up)
        b_silu = b_gate * tl.sigmoid(b_gate)
        if HAS_LIMIT:
            b_silu = tl.minimum(b_silu, limit)
            b_up = tl.minimum(tl.maximum(b_up, -limit), limit)
        p_act = act_ptr + i_p.to(tl.int64)[:, None] * F + i_f[None, :]
        tl.store(p_act, (b_silu * b_up).to(act_ptr.dtype.element_ty), mask=m_p[:, None])


@triton.jit
def grouped_down_kernel(
    act_ptr,
    down_ptr,
    block_expert_ptr,
    block_start_ptr,
    block_end_ptr,
    pair_weight_ptr,
    pair_position_ptr,
    out_ptr,
    D: tl.constexpr,
    F: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BF: tl.constexpr,
    IS_FP32_DOT: tl.constexpr,
):
    """out[place of the pair] = weight * W_down act. Grid: (D / BD, blocks).

    down (E, F, D), as it lies in memory; out (pairs, D) fp32, choices in order.
    """
    block = tl.program_id(1)
    start = tl.load(block_start_ptr + block)
    end = tl.load(block_end_ptr + block)
    if start < end:
        expert = tl.load(block_expert_ptr + block).to(tl.int64)
        i_p = start + tl.arange(0, BM)
        m_p = i_p < end
        i_d = tl.program_id(0) * BD + tl.arange(0, BD)
        b_out = tl.zeros((BM, BD), dtype=tl.float32)
        for o_f in range(0, F, BF):
            i_f = o_f + tl.arange(0, BF)
            b_act = tl.load(act_ptr + i_p.to(tl.int64)[:, None] * F + i_f[None, :], mask=m_p[:, None], other=0.0)
            w_down = tl.load(down_ptr + expert * F * D + i_f[:, None] * D + i_d[None, :])
            if IS_FP32_DOT:
                b_out += tl.dot(b_act.to(tl.float32), w_down.to(tl.float32), input_precision="ieee")
            else:
                b_out += tl.dot(b_act, w_down)
        b_weight = tl.load(pair_weight_ptr + i_p, mask=m_p, other=0.0)
        i_out = tl.load(pair_position_ptr + i_p, mask=m_p, other=0).to(tl.int64)
        p_out = out_ptr + i_out[:, None] * D + i_d[None, :]
        tl.store(p_out, (b_out * b_weight[:, None]).to(out_ptr.dtype.element_ty), mask=m_p[:, None])


@triton.jit
def sum_choices_kernel(
    pairs_ptr, residual_ptr, shared_ptr, width_ptr, out_ptr, D: tl.constexpr, A: tl.constexpr, BD: tl.constexpr
):
    """out (T, D) = residual + pairs summed in order + shared, rounded once. Grid: (T, D / BD). pairs (T, A, D) fp32.

    Behind `width` nothing is added to the residual.
    """
    token = tl.program_id(0).to(tl.int64)
    i_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = i_d < D
    m_added = m_d
    if width_ptr is not None:
        m_added = m_d & (token < tl.load(width_ptr))
    b_sum = tl.zeros((BD,), dtype=tl.float32)
    for a in tl.static_range(A):
        b_sum += tl.load(pairs_ptr + (token * A + a) * D + i_d, mask=m_added, other=0.0)
    if residual_ptr is not None:
        b_sum = tl.load(residual_ptr + token * D + i_d, mask=m_d, other=0.0).to(tl.float32) + b_sum
    if shared_ptr is not None:
        b_sum += tl.load(shared_ptr + token * D + i_d, mask=m_added, other=0.0)
    tl.store(out_ptr + token * D + i_d, b_sum.to(out_ptr.dtype.element_ty), mask=m_d)


def _blocks(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort pairs by expert and cut them into blocks.

    Args:
        experts: (pairs) of whole numbers, the expert of each pair; E: none.
        num_experts: E.

    Returns:
        The sorted pairs' old places (pairs), then each block's expert, first pair and end, (blocks) int32; an unused
        block is empty, and pairs without an expert are in none.
    """
    num_pairs = experts.shape[0]
    # Sorting takes a pass for every few bits.
    sorted_experts, order = experts.short().sort(stable=True)
    numbers = torch.arange(num_experts + 1, dtype=torch.int16, device=experts.device)
    bounds = torch.searchsorted(sorted_experts, numbers)  # (E+1,)
    first_block = (bounds.diff() + BLOCK_ROWS - 1) // BLOCK_ROWS
    first_block = torch.cat([first_block.new_zeros(1), first_block.cumsum(0)])  # (E+1,)
    block = torch.arange(num_pairs // BLOCK_ROWS + num_experts, device=experts.device)
    expert = (torch.searchsorted(first_block, block, right=True) - 1).clamp(max=num_experts - 1)
    start = bounds[expert] + (block - first_block[expert]) * BLOCK_ROWS
    end = torch.minimum(start + BLOCK_ROWS, bounds[expert + 1])
    return order, expert.int(), start.int(), torch.maximum(start, end).int()


def run_experts(
    h: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    limit: float | None,
    *,
    residual: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    width: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of each row's experts, between what else is added.

    Args:
        h: (T, D) normalised rows.
        experts: (T, A) of whole numbers.
        weights: (T, A) fp32.
        gate_up: (E, 2F, D).
        down: (E, D, F), whose inputs are the rows in memory: a contiguous (E, F, D).
        limit: of the SwiGLU, or None.
        residual: (T, D) contiguous, or None.
        shared: (T, D) fp32, what the shared expert gives, or None.
        width: () int32; to rows at or past it nothing is added, and they touch no expert. None: all rows count.

    Returns:
        (T, D), the dtype of `h`.

    Raises:
        UnsupportedError: sizes that the kernels do not take.
    """
    T, D = h.shape
    A = experts.shape[1]
    E, _, F = down.shape
    if D % MIN_INPUTS or F % MIN_INPUTS:
        raise UnsupportedError(
            f"experts of size {F} on a hidden size of {D} have no GPU kernel; it takes multiples of {MIN_INPUTS}, on"
            " every GPU that has a part of each: take fewer, or the CPU"
        )
    assert down.mT.is_contiguous(), f"down: strides {down.stride()}, expected its inputs as rows in memory"
    if width is not None:
        i_t = torch.arange(T, device=h.device)
        experts = experts.where((i_t < width)[:, None], E)
    order, block_expert, block_start, block_end = _blocks(experts.flatten(), E)
    blocks = (block_expert, block_start, block_end)
    act = torch.empty((T * A, F), dtype=h.dtype, device=h.device)
    pairs = torch.empty((T * A, D), dtype=torch.float32, device=h.device)
    is_fp32_dot = IS_INTERPRETED or h.dtype == torch.float32
    block_f, block_d = min(F & -F, 64), min(D & -D, 64)
    options = {"num_warps": 4, "num_stages": 3, "IS_FP32_DOT": is_fp32_dot, "BM": BLOCK_ROWS}
    grouped_gate_up_kernel[(F // block_f, block_expert.shape[0])](
        h,
        gate_up,
        (order // A).int(),
        *blocks,
        act,
        limit or 0.0,
        D=D,
        F=F,
        HAS_LIMIT=limit is not None,
        BF=block_f,
        BD=block_d,
        **options,
    )
    grouped_down_kernel[(D // block_d, block_expert.shape[0])](
        act, down, *blocks, weights.flatten()[order], order.int(), pairs, D=D, F=F, BD=block_d, BF=block_f, **options
    )
    out = torch.empty_like(h)
    sum_choices_kernel[(T, triton.cdiv(D, _SUM_BLOCK))](
        pairs, residual, shared, width, out, D=D, A=A, BD=_SUM_BLOCK, num_warps=4
    )
    return out
