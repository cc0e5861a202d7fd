"""Triton kernels of the mixture of experts; the equation, the reference and the launcher are in `kernels/moe.py`.

A step of T <= 16 tokens is three launches. Every token goes through every expert that any token chose ("sparse experts
as GEMMs"): the products are bound by the bytes of the weights, so the extra columns are free, and a weight of zero
removes them.

1. `router_kernel`: norm and logits; when all are there, the top-k, a token per program; then the list of slots, one
   per distinct expert behind the shared expert's, each with a weight per token.
2. `gate_up_kernel`: one program per (slot, tile of F): SwiGLU of two products, times the token's weight, rounded once.
3. `down_kernel`: a plain product over the concatenated (slot, F) axis, split over slots; the last program of a tile
   adds the splits in order and the residual.

A prompt (T > 16) is `kernels/moe_grouped_triton.py`.

Axis letters: TP = T padded to a power of two, >= 16 where a tensor core needs it.
"""

from dataclasses import dataclass
from typing import Protocol

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
    wait_for_all_programs,
    wait_for_producers,
)


class RouterShape(Protocol):
    """What a launch needs of `moe.RouterSettings`."""

    @property
    def num_experts_per_tok(self) -> int: ...
    @property
    def n_group(self) -> int: ...
    @property
    def topk_group(self) -> int: ...
    @property
    def routed_scaling_factor(self) -> float: ...


@triton.jit
def _sort_keys(x, i_place, NUM_PLACES: tl.constexpr):
    """Keys, all different, whose largest is that of the largest x, at the lowest place among equals."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (NUM_PLACES - 1 - i_place)


@triton.jit
def _choose_experts(
    logits_ptr,
    bias_ptr,
    weight_ptr,
    t,
    num_tokens,
    E: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    A: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Group-limited top-k of one token: row t of weight (TP, E) fp32, zero for the experts it does not take."""
    lowest = -0x8000000000000000
    i_e = tl.arange(0, E)
    b_score = tl.sigmoid(tl.load(logits_ptr + t * E + i_e, cache_modifier=".cg"))  # (E,)
    b_biased = b_score + tl.load(bias_ptr + i_e)
    b_key = _sort_keys(b_biased, i_e, E)
    if NUM_GROUPS > 1:
        i_g = tl.arange(0, NUM_GROUPS)
        b_grouped = tl.reshape(b_biased, (NUM_GROUPS, E // NUM_GROUPS))
        b_grouped_key = tl.reshape(b_key, (NUM_GROUPS, E // NUM_GROUPS))
        m_first = b_grouped_key == tl.max(b_grouped_key, axis=1)[:, None]
        b_second = tl.max(tl.where(m_first, float("-inf"), b_grouped), axis=1)
        b_group = _sort_keys(tl.max(b_grouped, axis=1) + b_second, i_g, NUM_GROUPS)  # (NUM_GROUPS,)
        m_lost = i_g >= 0
        for _ in tl.static_range(TOPK_GROUPS):
            m_best = b_group == tl.max(b_group, axis=0)
            m_lost = m_lost & (b_group != tl.max(b_group, axis=0))
            b_group = tl.where(m_best, lowest, b_group)
        b_key = tl.reshape(tl.where(m_lost[:, None], lowest, b_grouped_key), (E,))
    m_chosen = i_e < 0
    for _ in tl.static_range(A):
        m_best = b_key == tl.max(b_key, axis=0)
        m_chosen = m_chosen | m_best
        b_key = tl.where(m_best, lowest, b_key)
    b_weight = tl.where(m_chosen & (t < num_tokens), b_score, 0.0)
    b_weight = b_weight / (tl.sum(b_weight, axis=0) + 1e-20) * SCALE
    tl.store(weight_ptr + t * E + i_e, b_weight)


@triton.jit
def _list_slots(
    weight_ptr,
    slot_expert_ptr,
    slot_weight_ptr,
    num_slots_ptr,
    T,
    num_tokens,
    E: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    TP: tl.constexpr,
):
    """List the shared experts, then those that any token takes, in ascending order, each with its weight per token."""
    i_e = tl.arange(0, E)
    i_t = tl.arange(0, TP)
    b_weight = tl.load(
        weight_ptr + i_t[:, None] * E + i_e[None, :], mask=(i_t < T)[:, None], other=0.0, cache_modifier=".cg"
    )  # (TP, E)
    # A weight may underflow to zero with its score; such an expert adds nothing and is not read.
    m_active = tl.sum(b_weight, axis=0) > 0.0
    i_slot = NUM_SHARED + tl.cumsum(m_active.to(tl.int32), axis=0) - 1
    tl.store(slot_expert_ptr + i_slot, i_e, mask=m_active)
    tl.store(
        slot_weight_ptr + i_slot[None, :] * TP + i_t[:, None], b_weight, mask=m_active[None, :] & (i_t[:, None] >= 0)
    )
    for shared in tl.static_range(NUM_SHARED):
        tl.store(slot_expert_ptr + shared, E + shared)
        tl.store(slot_weight_ptr + shared * TP + i_t, tl.where(i_t < num_tokens, 1.0, 0.0))
    tl.store(num_slots_ptr, NUM_SHARED + tl.sum(m_active.to(tl.int32), axis=0))


@triton.jit
def router_kernel(
    x_ptr,
    norm_weight_ptr,
    gate_ptr,
    bias_ptr,
    width_ptr,
    h_ptr,
    logits_ptr,
    weight_ptr,
    slot_expert_ptr,
    slot_weight_ptr,
    num_slots_ptr,
    counter_ptr,
    T,
    eps,
    D: tl.constexpr,
    E: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    A: tl.constexpr,
    SCALE: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    HAS_WIDTH: tl.constexpr,
    TP: tl.constexpr,
    BE: tl.constexpr,
    BD: tl.constexpr,
    PDL: tl.constexpr,
    IS_FP32_DOT: tl.constexpr,
):
    """h = rms_norm(x), logits = h W^T, the top-k and the list of slots. Grid: (E / BE,), at most what the GPU holds.

    When all logits are written each program routes every (E / BE)th token, and the last one done lists the slots.

    x (T, D), h (TP, D) in x's dtype; logits and weight (TP, E) fp32; slot_expert (slots) int32; slot_weight (slots,
    TP) fp32; num_slots () int32.
    """
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    i_t = tl.arange(0, TP)
    i_e = pid * BE + tl.arange(0, BE)
    m_t = i_t < T
    num_blocks: tl.constexpr = D // BD

    prefetch_rows(gate_ptr + pid * BE * D, BE * D, PDL)
    wait_for_producers(PDL)
    let_consumers_start(PDL)

    # The norm's scale is a factor of the logits: one pass over x gives both.
    b_square = tl.zeros((TP,), dtype=tl.float32)
    b_logits = tl.zeros((BE, TP), dtype=tl.float32)
    for block in range(num_blocks):
        i_d = block * BD + tl.arange(0, BD)
        b_gate = tl.load(gate_ptr + i_e[:, None] * D + i_d[None, :])  # (BE, BD)
        b_x = tl.load(x_ptr + i_t[:, None] * D + i_d[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
        b_square += tl.sum(b_x * b_x, axis=1)
        b_h = tl.trans((b_x * tl.load(norm_weight_ptr + i_d).to(tl.float32)[None, :]).to(h_ptr.dtype.element_ty))
        if IS_FP32_DOT:
            b_logits += tl.dot(b_gate.to(tl.float32), b_h.to(tl.float32), input_precision="ieee")
        else:
            b_logits += tl.dot(b_gate.to(b_h.dtype), b_h)
    b_scale = 1.0 / tl.sqrt(b_square / D + eps)  # (TP,)
    tl.store(logits_ptr + i_t[None, :] * E + i_e[:, None], b_logits * b_scale[None, :])
    for block in range(pid, num_blocks, num_programs):
        i_d = block * BD + tl.arange(0, BD)
        b_x = tl.load(x_ptr + i_t[:, None] * D + i_d[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
        b_h = b_x * b_scale[:, None] * tl.load(norm_weight_ptr + i_d).to(tl.float32)[None, :]
        tl.store(h_ptr + i_t[:, None] * D + i_d[None, :], b_h.to(h_ptr.dtype.element_ty))

    wait_for_all_programs(counter_ptr, num_programs)
    num_tokens = T
    if HAS_WIDTH:
        num_tokens = tl.minimum(T, tl.load(width_ptr))
    for t in range(pid, T, num_programs):
        _choose_experts(logits_ptr, bias_ptr, weight_ptr, t, num_tokens, E, NUM_GROUPS, TOPK_GROUPS, A, SCALE)
    if is_last_arriver(counter_ptr + 1, num_programs):
        tl.store(counter_ptr, 0)
        _list_slots(weight_ptr, slot_expert_ptr, slot_weight_ptr, num_slots_ptr, T, num_tokens, E, NUM_SHARED, TP)


@triton.jit
def gate_up_kernel(
    h_ptr,
    gate_up_ptr,
    shared_offset,
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


# Most tokens a step has; more is a prompt.
MAX_STEP_ROWS = 16
# Columns of a product on tensor cores.
_MIN_COLUMNS = 16


def _largest_divisor(size: int, *, limit: int) -> int:
    """The largest power of two, at most `limit`, that divides `size`."""
    return min(size & -size, limit)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Launch settings of a step's three kernels."""

    # Experts a router program scores.
    router_block_e: int = 16
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


# By the most rows of a step. Measured on one H200: benchmarks/results/h200/kernels.json.
STEP_SETTINGS: dict[int, StepSettings] = {
    2: StepSettings(
        gate_up_block_f=64, gate_up_block_d=128, gate_up_stages=3, down_block_d=64, down_stages=3, down_splits=9
    ),
    16: StepSettings(
        gate_up_block_f=64, gate_up_block_d=128, gate_up_stages=3, down_block_d=64, down_stages=3, down_splits=16
    ),
}


def moe_step(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router_weight: torch.Tensor,
    expert_bias: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate_up: torch.Tensor | None,
    shared_down: torch.Tensor | None,
    router: RouterShape,
    *,
    limit: float | None,
    shared_limit: float | None,
    width: torch.Tensor | None,
    settings: StepSettings | None = None,
) -> torch.Tensor:
    """Launch a step of T <= 16 rows; arguments as `moe`, and the launch settings if not the table's."""
    T, D = x.shape
    if settings is None:
        settings = next(known for most_rows, known in STEP_SETTINGS.items() if most_rows >= T)
    E, _, F = down.shape
    shared_f = 0 if shared_down is None else shared_down.shape[1]
    num_shared = shared_f // F
    TP = _MIN_COLUMNS
    num_slots = min(T * router.num_experts_per_tok, E) + num_shared
    device = x.device
    is_fp32_dot = IS_INTERPRETED or x.dtype == torch.float32

    h = torch.empty((TP, D), dtype=x.dtype, device=device)
    logits, weight = torch.empty((2, TP, E), dtype=torch.float32, device=device)
    slot_expert = torch.empty(num_slots, dtype=torch.int32, device=device)
    slot_weight = torch.empty((num_slots, TP), dtype=torch.float32, device=device)
    count = torch.empty((), dtype=torch.int32, device=device)
    act = torch.empty((num_slots, TP, F), dtype=x.dtype, device=device)
    out = torch.empty_like(x)
    counters = arrival_counters(device)

    block_e = _largest_divisor(E, limit=settings.router_block_e)
    router_kernel[(E // block_e,)](
        x,
        norm_weight,
        router_weight,
        expert_bias,
        x if width is None else width,
        h,
        logits,
        weight,
        slot_expert,
        slot_weight,
        count,
        counters,
        T,
        eps,
        D=D,
        E=E,
        NUM_GROUPS=router.n_group,
        TOPK_GROUPS=router.topk_group,
        A=router.num_experts_per_tok,
        SCALE=router.routed_scaling_factor,
        NUM_SHARED=num_shared,
        HAS_WIDTH=width is not None,
        TP=TP,
        BE=block_e,
        BD=_largest_divisor(D, limit=256),
        IS_FP32_DOT=is_fp32_dot or router_weight.dtype == torch.float32,
        num_warps=4,
        num_stages=4,
        **pdl_options(),
    )
    block_f = _largest_divisor(F, limit=settings.gate_up_block_f)
    gate_up_kernel[(F // block_f, num_slots)](
        h,
        gate_up,
        _elements_between(gate_up, shared_gate_up),
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
