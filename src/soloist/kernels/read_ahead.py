"""Reading ahead: launches that leave the memory idle bring weights of the launches behind them into the L2.

A step is a chain of short launches, and the memory rests in some of them: while partial results are merged, or until it
is known which experts are read. What comes next is known when the model is built, so such a launch asks for it and
waits for none of it. It changes no result.

A weight is asked for in equal shares, one a program, spread evenly over it: its launch then takes some of its rows from
the L2 and the others from the memory at the same time.

Source: PTX `cp.async.bulk.prefetch.L2`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from soloist.kernels.launch import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

# Shares begin and end at lines of the cache.
_LINE_BYTES = 128


class Share(NamedTuple):
    """What each program of a launch asks for of one weight: program i takes `num_bytes` from `i * distance` on."""

    weight: torch.Tensor
    # Elements from one program's share to the next one's.
    distance: int
    num_bytes: int


def shares(upcoming: Sequence[object], budget: int, num_programs: int) -> tuple[Share, ...]:
    """Cut the weights that are read next into one share a program.

    Args:
        upcoming: contiguous weights in the order of their use; what is no tensor is passed over.
        budget: bytes to ask for in all; the last weight may be taken in part.
        num_programs: of the launch that reads ahead.
    """
    taken = []
    for weight in upcoming:
        if not isinstance(weight, torch.Tensor) or budget <= 0:
            continue
        total = weight.numel() * weight.element_size()
        distance = total // num_programs // _LINE_BYTES * _LINE_BYTES
        num_bytes = min(distance, -(-budget // num_programs // _LINE_BYTES) * _LINE_BYTES)
        budget -= num_bytes * num_programs
        if num_bytes > 0:
            taken.append(Share(weight, distance // weight.element_size(), num_bytes))
    return tuple(taken)


if HAS_TRITON:

    @triton.jit
    def prefetch(ptr, num_bytes, INTERPRETED: tl.constexpr):
        """Bring `num_bytes` (a multiple of 16, may be negative: none) from a 16-byte boundary on into the L2."""
        if not INTERPRETED:
            tl.inline_asm_elementwise(
                """{ .reg .pred %is_first, %is_any; .reg .u32 %thread;
                mov.u32 %thread, %tid.x; setp.gt.s32 %is_any, $2, 0; setp.eq.and.u32 %is_first, %thread, 0, %is_any;
                @%is_first cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }""",
                "=r,l,r",
                [ptr.to(tl.uint64), num_bytes],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )

    @triton.jit
    def read_ahead(upcoming, program, INTERPRETED: tl.constexpr):
        """Ask for a program's share of each weight of `upcoming`, what `shares` gave for all that ask."""
        for k in tl.static_range(len(upcoming)):
            ptr, distance, num_bytes = upcoming[k]
            prefetch(ptr + program * distance.to(tl.int64), num_bytes, INTERPRETED)
