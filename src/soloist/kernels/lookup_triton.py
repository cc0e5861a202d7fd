"""Triton kernels of prompt lookup: the search through a request's tokens, and what a step adds to them.

The equation and its reference are `find_continuation` of `spec/ngram.py` and `TokenHistory.record`: some ninety small
operations there, a launch each here.
"""

import torch
import triton
import triton.language as tl

from soloist.kernels.launch import (
    arrival_counters,
    is_last_arriver,
    let_consumers_start,
    pdl_options,
    wait_for_producers,
)

# Positions that a program looks at.
_BLOCK = 1024
_MAX_DRAFTS = 16


@triton.jit
def lookup_kernel(
    ids_ptr, context_len_ptr, input_ids_ptr, width_ptr, best_ptr, counter_ptr,
    num_positions, num_drafts, num_programs,
    FIRST: tl.constexpr, MIN_MATCH: tl.constexpr, MAX_MATCH: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the proposal and cut the width. ids (FIRST + S + T,) int64; best (programs,) int64. Grid: (programs,).

    Each program finds the best match of its positions, as length * 2**32 + position; the last to arrive reads on.
    """
    program = tl.program_id(0)
    i_p = program * BLOCK + tl.arange(0, BLOCK)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    last = tl.load(context_len_ptr)
    m_p = (i_p < last) & (i_p < num_positions)
    b_length = tl.zeros((BLOCK,), dtype=tl.int64)
    m_equal = m_p
    for j in tl.static_range(MAX_MATCH):
        m_equal = m_equal & (
            tl.load(ids_ptr + FIRST + i_p - j, mask=m_p, other=-2) == tl.load(ids_ptr + FIRST + last - j)
        )
        b_length += m_equal.to(tl.int64)
    b_key = tl.where(b_length >= MIN_MATCH, b_length * 4294967296 + i_p, -1)
    tl.store(best_ptr + program, tl.max(b_key, axis=0))
    if is_last_arriver(counter_ptr, num_programs):
        i = tl.arange(0, PROGRAMS)
        best = tl.max(tl.load(best_ptr + i, mask=i < num_programs, other=-1, volatile=True), axis=0)
        at = tl.where(best >= 0, best % 4294967296, last - 1)
        i_t = tl.arange(0, ROWS)
        m_t = i_t < num_drafts
        # Behind the last token the cycle begins again.
        token = tl.load(ids_ptr + FIRST + at + 1 + i_t % (last - at), mask=m_t, other=0)
        token = tl.where(best >= 0, token, tl.load(input_ids_ptr))
        tl.store(input_ids_ptr + 1 + i_t, token, mask=m_t)
        width = tl.load(width_ptr)
        tl.store(width_ptr, tl.where(best >= 0, width, tl.minimum(width, 1)))


@triton.jit
def record_kernel(ids_ptr, context_len_ptr, tokens_ptr, T, FIRST: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    """Write tokens (T,) int64 behind the pending one. Grid: (1,)."""
    i_t = tl.arange(0, ROWS)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    place = FIRST + tl.load(context_len_ptr) + 1 + i_t
    tl.store(ids_ptr + place, tl.load(tokens_ptr + i_t, mask=i_t < T, other=0), mask=i_t < T)


def lookup(
    padded_ids: torch.Tensor,
    context_len: torch.Tensor,
    input_ids: torch.Tensor,
    width: torch.Tensor,
    *,
    num_padding: int,
    num_positions: int,
    min_match: int,
    max_match: int,
) -> None:
    """Write the tokens that follow the best match of the sequence's end to `input_ids`; without a match cut `width`.

    Args:
        padded_ids: (padding + S + T,) int64.
        context_len: () int32, position of the sequence's last token.
        input_ids: (T,) int64, written from row 1 on.
        width: () int32, becomes at most 1 without a match.
        num_padding: entries before the first token, at least `max_match` - 1.
        num_positions: S.
        min_match: tokens that must be equal.
        max_match: tokens that are compared.
    """
    programs = triton.cdiv(num_positions, _BLOCK)
    best = torch.empty(programs, dtype=torch.int64, device=input_ids.device)
    lookup_kernel[programs,](
        padded_ids, context_len, input_ids, width, best, arrival_counters(input_ids.device),
        num_positions, input_ids.shape[0] - 1, programs,
        FIRST=num_padding, MIN_MATCH=min_match, MAX_MATCH=max_match,
        BLOCK=_BLOCK, PROGRAMS=triton.next_power_of_2(programs), ROWS=_MAX_DRAFTS, num_warps=4, **pdl_options(),
    )  # fmt: skip


def record(padded_ids: torch.Tensor, context_len: torch.Tensor, tokens: torch.Tensor, *, num_padding: int) -> None:
    """Write a step's tokens (T,) int64 behind the pending one, whose position is `context_len` () int32."""
    record_kernel[(1,)](
        padded_ids,
        context_len,
        tokens,
        tokens.shape[0],
        FIRST=num_padding,
        ROWS=_MAX_DRAFTS,
        num_warps=1,
        **pdl_options(),
    )
