"""Triton kernels of the mixture of experts; the equation, the reference and the launcher are in `kernels/moe.py`.

Every token of a step of T <= 16 goes through every expert that any token chose ("sparse experts as GEMMs"): the
products are bound by the bytes of the weights, so the extra columns are free, and a weight of zero removes them. The
router (`kernels/moe_route_cuda.py`) leaves a list of slots, one per distinct expert behind the shared expert's.

1. `gate_up_kernel`: one program per (slot, tile of F): SwiGLU of two products, times the token's weight, rounded once.
2. `down_kernel`: a plain product over the concatenated (slot, F) axis, split over slots; the last program of a tile to
   finish adds the splits in order and the residual.

A prompt (T > 16) is `kernels/moe_grouped_triton.py`. Axis letter: TP = the 16 columns that tokens are padded to.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from soloist.kernels.launch import (
    IS_INTERPRETED,
    arrival_counters,
    is_last_arriver,
    let_consumers_start,
    pdl_options,
    prefetch_rows,
    wait_for_producers,
)
from soloist.kernels.moe_route_cuda import MAX_ROWS, Slots


@triton.jit
def gate_up_kernel(
    h_ptr,
    gate_up_ptr,
    shared_offset,
    down_ptr,
    slot_expert_ptr,
    slot_weight_ptr,
    num_slots_ptr,
    act_ptr,
    limit,
    shared_limit,
    D: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    SHARED_F: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_SHARED_LIMIT: tl.constexpr,
    PREFETCHES_DOWN: tl.constexpr,
    TP: tl.constexpr,
    BF: tl.constexpr,
    BD: tl.constexpr,
    PDL: tl.constexpr,
    IS_FP32_DOT: tl.constexpr,
):
    """act = weight * swiglu(W_gate h, W_up h) for each slot. Grid: (F / BF, slots).

    gate_up (E, 2F, D); `shared_offset` elements behind it lies the shared expert's (2*SHARED_F, D); act (slots, TP, F).
    """
    i_f = tl.program_id(0) * BF + tl.arange(0, BF)
    slot = tl.program_id(1)
    i_t = tl.arange(0, TP)

    if slot < NUM_SHARED:
        o_first = shared_offset + (slot * F + tl.program_id(0) * BF) * D
        prefetch_rows(gate_up_ptr + o_first, BF * D, PDL)
        prefetch_rows(gate_up_ptr + o_first + SHARED_F * D, BF * D, PDL)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    if slot < tl.load(num_slots_ptr):
        expert = tl.load(slot_expert_ptr + slot).to(tl.int64)
        is_shared = expert >= E
        o_gate = tl.where(is_shared, shared_offset + (expert - E) * F * D, expert * 2 * F * D)
        o_gate = tl.multiple_of(o_gate, 16)
        o_up = o_gate + tl.where(is_shared, SHARED_F, F).to(tl.int64) * D
        p_gate = gate_up_ptr + o_gate + i_f[:, None] * D
        p_up = gate_up_ptr + tl.multiple_of(o_up, 16) + i_f[:, None] * D
        p_h = h_ptr + i_t[None, :] * D

        b_gate = tl.zeros((BF, TP), dtype=tl.float32)
        b_up = tl.zeros((BF, TP), dtype=tl.float32)
        for o_d in range(0, D, BD):
            i_d = o_d + tl.arange(0, BD)
            w_gate = tl.load(p_gate + i_d[None, :], eviction_policy="evict_first")
            w_up = tl.load(p_up + i_d[None, :], eviction_policy="evict_first")
            b_h = tl.load(p_h + i_d[:, None])
            if IS_FP32_DOT:
                b_gate += tl.dot(w_gate.to(tl.float32), b_h.to(tl.float32), input_precision="ieee")
                b_up += tl.dot(w_up.to(tl.float32), b_h.to(tl.float32), input_precision="ieee")
            else:
                b_gate += tl.dot(w_gate, b_h)
                b_up += tl.dot(w_up, b_h)

        if PREFETCHES_DOWN:
            # Few slots: their down maps fit into the L2, and reading them may begin before the next launch does.
            if not is_shared:
                prefetch_rows(down_ptr + (expert * F + tl.program_id(0) * BF) * D, BF * D, PDL)
        b_silu = b_gate * tl.sigmoid(b_gate)
        if HAS_LIMIT:
            if not is_shared:
                b_silu = tl.minimum(b_silu, limit)
                b_up = tl.minimum(tl.maximum(b_up, -limit), limit)
        if HAS_SHARED_LIMIT:
            if is_shared:
                b_silu = tl.minimum(b_silu, shared_limit)
                b_up = tl.minimum(tl.maximum(b_up, -shared_limit), shared_limit)
        b_weight = tl.load(slot_weight_ptr + slot * TP + i_t)
        b_act = b_silu * b_up * b_weight[None, :]
        p_act = act_ptr + slot * TP * F + i_t[None, :] * F + i_f[:, None]
        tl.store(p_act, b_act.to(act_ptr.dtype.element_ty))


@triton.jit
def down_kernel(
    act_ptr,
    down_ptr,
    shared_offset,
    slot_expert_ptr,
    num_slots_ptr,
    residual_ptr,
    partial_ptr,
    counter_ptr,
    out_ptr,
    T,
    D: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    SHARED_F: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TP: tl.constexpr,
    BD: tl.constexpr,
    BF: tl.constexpr,
    PDL: tl.constexpr,
    IS_FP32_DOT: tl.constexpr,
):
    """out = residual + sum over slots of W_down act. Grid: (D / BD, NUM_SPLITS).

    down (E, D, F); `shared_offset` elements behind it lies the shared expert's (D, SHARED_F); partial (NUM_SPLITS, TP,
    D) fp32.
    """
    pid_d = tl.program_id(0)
    split = tl.program_id(1)
    i_d = pid_d * BD + tl.arange(0, BD)
    i_t = tl.arange(0, TP)

    wait_for_producers(PDL)
    let_consumers_start(PDL)
    num_slots = tl.load(num_slots_ptr)
    first = split * num_slots // NUM_SPLITS
    last = (split + 1) * num_slots // NUM_SPLITS

    b_out = tl.zeros((BD, TP), dtype=tl.float32)
    for slot in range(first, last):
        expert = tl.load(slot_expert_ptr + slot).to(tl.int64)
        is_shared = expert >= E
        o_down = tl.where(is_shared, shared_offset + (expert - E) * F, expert * D * F)
        stride_d = tl.where(is_shared, SHARED_F, F)
        p_down = down_ptr + tl.multiple_of(o_down, 16) + i_d[:, None] * tl.multiple_of(stride_d, 16)
        p_act = act_ptr + slot * TP * F + i_t[None, :] * F
        for o_f in range(0, F, BF):
            i_f = o_f + tl.arange(0, BF)
            w_down = tl.load(p_down + i_f[None, :], eviction_policy="evict_first")
            b_act = tl.load(p_act + i_f[:, None])
            if IS_FP32_DOT:
                b_out += tl.dot(w_down.to(tl.float32), b_act.to(tl.float32), input_precision="ieee")
            else:
                b_out += tl.dot(w_down, b_act)

    m_out = (i_t < T)[None, :]
    p_out = i_t[None, :] * D + i_d[:, None]
    if NUM_SPLITS == 1:
        b_out += tl.load(residual_ptr + p_out, mask=m_out, other=0.0).to(tl.float32)
        tl.store(out_ptr + p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_out)
    else:
        tl.store(partial_ptr + split * TP * D + p_out, b_out)
        if is_last_arriver(counter_ptr + pid_d, NUM_SPLITS):
            b_sum = tl.load(residual_ptr + p_out, mask=m_out, other=0.0).to(tl.float32)
            for other in tl.static_range(NUM_SPLITS):
                b_sum += tl.load(partial_ptr + other * TP * D + p_out, cache_modifier=".cg")
            tl.store(out_ptr + p_out, b_sum.to(out_ptr.dtype.element_ty), mask=m_out)


def _largest_divisor(size: int, *, limit: int) -> int:
    """The largest power of two, at most `limit`, that divides `size`."""
    return min(size & -size, limit)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Launch settings of a step's two products."""

    # Rows of gate (and of up) a gate_up program owns.
    gate_up_block_f: int
    gate_up_block_d: int
    gate_up_warps: int = 4
    gate_up_stages: int
    # Rows a down program owns, and over how many programs the slots are split.
    down_block_d: int
    down_block_f: int = 128
    down_warps: int = 4
    down_stages: int
    down_splits: int
    # Whether gate_up programs bring the down maps into the L2.
    prefetches_down: bool = False


# By the most rows of a step. Measured on one H200: benchmarks/results/h200/kernels.json.
STEP_SETTINGS: dict[int, StepSettings] = {
    2: StepSettings(
        gate_up_block_f=64,
        gate_up_block_d=128,
        gate_up_stages=3,
        down_block_d=64,
        down_stages=3,
        down_splits=9,
        prefetches_down=True,
    ),
    16: StepSettings(
        gate_up_block_f=64, gate_up_block_d=128, gate_up_stages=3, down_block_d=64, down_stages=3, down_splits=16
    ),
}


def run_experts(
    x: torch.Tensor,
    slots: Slots,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate_up: torch.Tensor | None,
    shared_down: torch.Tensor | None,
    *,
    limit: float | None,
    shared_limit: float | None,
    settings: StepSettings | None = None,
) -> torch.Tensor:
    """Launch both products of a step; weights and limits as `moe` in `kernels/moe.py` takes them.

    Args:
        x: (T, D) residual stream, T <= 16.
        slots: the router's choice.
        gate_up: see `moe`, as the weights and limits that follow.
        down: as there.
        shared_gate_up: as there.
        shared_down: as there.
        limit: as there.
        shared_limit: as there.
        settings: launch settings; None: the table's.

    Returns:
        (T, D): x and all experts.
    """
    T, D = x.shape
    E, _, F = down.shape
    if settings is None:
        settings = next(known for most_rows, known in STEP_SETTINGS.items() if most_rows >= T)
    shared_f = 0 if shared_down is None else shared_down.shape[1]
    num_shared, num_slots, TP = shared_f // F, slots.expert.shape[0], MAX_ROWS
    h, slot_expert, slot_weight, count = slots
    device = x.device
    is_fp32_dot = IS_INTERPRETED
    act = torch.empty((num_slots, TP, F), dtype=x.dtype, device=device)
    out = torch.empty_like(x)
    counters = arrival_counters(device)
    block_f = _largest_divisor(F, limit=settings.gate_up_block_f)
    gate_up_kernel[(F // block_f, num_slots)](
        h,
        gate_up,
        _elements_between(gate_up, shared_gate_up),
        down,
        slot_expert,
        slot_weight,
        count,
        act,
        limit or 0.0,
        shared_limit or 0.0,
        D=D,
        E=E,
        F=F,
        SHARED_F=shared_f,
        NUM_SHARED=num_shared,
        HAS_LIMIT=limit is not None,
        HAS_SHARED_LIMIT=shared_limit is not None,
        PREFETCHES_DOWN=settings.prefetches_down,
        TP=TP,
        BF=block_f,
        BD=_largest_divisor(D, limit=settings.gate_up_block_d),
        IS_FP32_DOT=is_fp32_dot,
        num_warps=settings.gate_up_warps,
        num_stages=settings.gate_up_stages,
        **pdl_options(),
    )
    block_d = _largest_divisor(D, limit=settings.down_block_d)
    partial = torch.empty((settings.down_splits, TP, D), dtype=torch.float32, device=device)
    down_kernel[(D // block_d, settings.down_splits)](
        act,
        down,
        _elements_between(down, shared_down),
        slot_expert,
        count,
        x,
        partial,
        counters,
        out,
        T,
        D=D,
        E=E,
        F=F,
        SHARED_F=shared_f,
        NUM_SPLITS=settings.down_splits,
        TP=TP,
        BD=block_d,
        BF=_largest_divisor(F, limit=settings.down_block_f),
        IS_FP32_DOT=is_fp32_dot,
        num_warps=settings.down_warps,
        num_stages=settings.down_stages,
        **pdl_options(),
    )
    return out


def _elements_between(first: torch.Tensor, second: torch.Tensor | None) -> int:
    """Distance from one tensor's data to another's, in elements: kernels reach both from one pointer."""
    if second is None:
        return 0
    distance = second.data_ptr() - first.data_ptr()
    assert distance % (16 * first.element_size()) == 0, "weights are aligned to 16 elements"
    return distance // first.element_size()
