"""Triton kernels that end a step: what is committed, and its record on the way to the host.

The equations and references are `count_matching` and `conclude` of `spec/verify.py`, `StepBuffers.advance` and
`TokenRing.publish`: a few dozen operations on a handful of numbers, here one program each. A record lies in pinned host
memory; its number is written last, behind a system-wide fence, so a host that sees the number sees the record.
"""

import torch
import triton
import triton.language as tl

from soloist.kernels.launch import IS_INTERPRETED, let_consumers_start, pdl_options, wait_for_producers

_MAX_ROWS = 16


@triton.jit
def conclude_kernel(
    target_tokens_ptr,
    highest_ptr,
    num_accepted_in_ptr,
    bonus_ptr,
    input_ids_ptr,
    width_ptr,
    num_left_ptr,
    stop_mask_ptr,
    finish_code_ptr,
    tokens_ptr,
    counts_ptr,
    T,
    LENGTH: tl.constexpr,
    STOP: tl.constexpr,
    NOT_FINITE: tl.constexpr,
    IS_MATCHING: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """tokens (T,) int64; counts (3,) int32: committed, accepted, finish code. Grid: (1,)."""
    i_t = tl.arange(0, ROWS)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    width = tl.load(width_ptr)
    num_left = tl.load(num_left_ptr)
    old_code = tl.load(finish_code_ptr)
    draft = tl.load(input_ids_ptr + 1 + i_t, mask=i_t + 1 < T, other=0)
    highest = tl.load(highest_ptr + i_t, mask=i_t < T, other=0.0).to(tl.float32)
    # NaN fails every comparison.
    m_bad = (i_t < tl.minimum(width, T)) & ~(tl.abs(highest) < float("inf"))
    is_finite = tl.sum(m_bad.to(tl.int32), axis=0) == 0
    if IS_MATCHING:
        target = tl.load(target_tokens_ptr + i_t, mask=i_t < T, other=0)
        m_equal = (draft == target) & (i_t < width - 1)
        num_accepted = tl.min(tl.where(m_equal, ROWS, i_t), axis=0)
        bonus = tl.sum(tl.where(i_t == num_accepted, target, 0), axis=0)
    else:
        num_accepted = tl.maximum(tl.load(num_accepted_in_ptr), 0)
        bonus = tl.load(bonus_ptr)
    tokens = tl.where(i_t < num_accepted, draft, bonus)
    m_stop = tl.load(stop_mask_ptr + tokens, mask=i_t < T, other=0) != 0
    num_before_stop = tl.min(tl.where(m_stop, i_t, T), axis=0)
    num_allowed = tl.where(is_finite, num_left, 0)
    num_committed = tl.minimum(tl.minimum(num_accepted, num_before_stop) + 1, num_allowed)
    code = old_code
    code = tl.maximum(code, tl.where(num_committed == num_left, LENGTH, 0))
    code = tl.maximum(code, tl.where(num_before_stop < num_committed, STOP, 0))
    code = tl.maximum(code, tl.where(is_finite, 0, NOT_FINITE))
    tl.store(tokens_ptr + i_t, tokens, mask=i_t < T)
    tl.store(counts_ptr, num_committed)
    tl.store(counts_ptr + 1, tl.minimum(num_accepted, num_committed))
    tl.store(counts_ptr + 2, code)


@triton.jit
def finish_kernel(
    tokens_ptr,
    num_committed_ptr,
    num_accepted_ptr,
    code_ptr,
    input_ids_ptr,
    width_ptr,
    num_left_ptr,
    num_unstoppable_ptr,
    finish_code_ptr,
    stop_requested_ptr,
    num_published_ptr,
    records_ptr,
    T,
    num_slots,
    record_words,
    MAX_WIDTH: tl.constexpr,
    HEADER: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
    HAS_FENCE: tl.constexpr,
):
    """Publish the record, then advance the request to its next step. Grid: (1,). records (slots, words) int64."""
    i_t = tl.arange(0, ROWS)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    number = tl.load(num_published_ptr)
    num_committed = tl.load(num_committed_ptr)
    code = tl.load(code_ptr)
    width = tl.load(width_ptr)
    num_left = tl.load(num_left_ptr)
    num_unstoppable = tl.load(num_unstoppable_ptr)
    pending = tl.load(input_ids_ptr)
    tokens = tl.load(tokens_ptr + i_t, mask=i_t < T, other=0)
    num_accepted = tl.load(num_accepted_ptr)

    p_record = records_ptr + (number % num_slots) * record_words
    tl.store(p_record + 1, num_committed.to(tl.int64))
    tl.store(p_record + 2, (tl.maximum(width, 1) - 1).to(tl.int64))
    tl.store(p_record + 3, num_accepted.to(tl.int64))
    tl.store(p_record + 4, code.to(tl.int64))
    tl.store(p_record + HEADER + i_t, tokens, mask=i_t < T)
    if HAS_FENCE:
        tl.inline_asm_elementwise(
            "{ fence.acq_rel.sys; mov.u32 $0, 0; }", "=r,r", [i_t], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    tl.store(p_record, number + 1)
    tl.store(num_published_ptr, number + 1)

    last = tl.sum(tl.where(i_t == num_committed - 1, tokens, 0), axis=0)
    tl.store(input_ids_ptr, tl.where(num_committed > 0, last, pending))
    is_running = (code == 0) & (tl.load(stop_requested_ptr, volatile=True) == 0)
    num_left = tl.where(is_running, num_left - num_committed, 0)
    tl.store(num_left_ptr, num_left)
    tl.store(num_unstoppable_ptr, num_unstoppable - num_committed)
    tl.store(finish_code_ptr, code)
    tl.store(width_ptr, tl.minimum(num_left, MAX_WIDTH))


@triton.jit
def copy_to_slot_kernel(
    from_ptr, to_ptr, num_published_ptr, num_slots, num_from, num_to, SIZE: tl.constexpr, PDL: tl.constexpr
):
    """Copy `num_from` elements into the slot, of `num_to` elements, of the record to come. Grid: (1,)."""
    i = tl.arange(0, SIZE)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    slot = tl.load(num_published_ptr) % num_slots
    tl.store(to_ptr + slot * num_to + i, tl.load(from_ptr + i, mask=i < num_from), mask=i < num_from)


def conclude(
    target_tokens: torch.Tensor | None,
    highest: torch.Tensor,
    num_accepted: torch.Tensor | None,
    bonus: torch.Tensor | None,
    *,
    input_ids: torch.Tensor,
    width: torch.Tensor,
    num_left: torch.Tensor,
    stop_mask: torch.Tensor,
    finish_code: torch.Tensor,
    end_codes: tuple[int, int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decide what a step commits.

    Args:
        target_tokens: (T,) int64, to match the drafts with; None: `num_accepted` () int32 and `bonus` (1,) are given.
        highest: (T,) fp32, the highest logit of each row.
        num_accepted: see above.
        bonus: see above.
        input_ids: (T_max,) int64, pending token and drafts.
        width: () int32.
        num_left: () int32.
        stop_mask: (N) bool.
        finish_code: () int32.
        end_codes: of an answer that ends by length, by a stop token, by logits that are not finite.

    Returns:
        Committed tokens (T,) int64; then () int32 each: committed, accepted, finish code.
    """
    T = highest.shape[0]
    device = input_ids.device
    tokens = torch.empty(T, dtype=torch.int64, device=device)
    counts = torch.empty(3, dtype=torch.int32, device=device)
    length, stop, not_finite = end_codes
    conclude_kernel[(1,)](
        input_ids if target_tokens is None else target_tokens,
        highest,
        counts if num_accepted is None else num_accepted,
        input_ids if bonus is None else bonus,
        input_ids,
        width,
        num_left,
        stop_mask,
        finish_code,
        tokens,
        counts,
        T,
        LENGTH=length,
        STOP=stop,
        NOT_FINITE=not_finite,
        IS_MATCHING=target_tokens is not None,
        ROWS=_MAX_ROWS,
        num_warps=1,
        **pdl_options(),
    )
    return tokens, counts[0], counts[1], counts[2]


def finish(
    tokens: torch.Tensor,
    num_committed: torch.Tensor,
    num_accepted: torch.Tensor,
    code: torch.Tensor,
    *,
    input_ids: torch.Tensor,
    width: torch.Tensor,
    num_left: torch.Tensor,
    num_unstoppable: torch.Tensor,
    finish_code: torch.Tensor,
    is_stop_requested: torch.Tensor,
    num_published: torch.Tensor,
    records: torch.Tensor,
    header: int,
) -> None:
    """Publish a step's record and advance the request; arguments as `StepBuffers` and `TokenRing` name them."""
    finish_kernel[(1,)](
        tokens,
        num_committed,
        num_accepted,
        code,
        input_ids,
        width,
        num_left,
        num_unstoppable,
        finish_code,
        is_stop_requested,
        num_published,
        records,
        tokens.shape[0],
        records.shape[0],
        records.shape[1],
        MAX_WIDTH=input_ids.shape[0],
        HEADER=header,
        ROWS=_MAX_ROWS,
        HAS_FENCE=not IS_INTERPRETED,
        num_warps=1,
        **pdl_options(),
    )


def copy_to_slot(source: torch.Tensor, ring: torch.Tensor, num_published: torch.Tensor) -> None:
    """Copy rows (T, ...) to the front of the slot that the next record will have; ring (slots, T_max, ...)."""
    copy_to_slot_kernel[(1,)](
        source,
        ring,
        num_published,
        ring.shape[0],
        source.numel(),
        ring[0].numel(),
        SIZE=triton.next_power_of_2(source.numel()),
        num_warps=4,
        **pdl_options(),
    )
