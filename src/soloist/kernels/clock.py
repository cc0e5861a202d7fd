"""The GPU's own clock, read between kernels: what a step takes without a profiler beside it."""

import torch

from soloist.kernels.check import expect
from soloist.kernels.launch import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def stamp_kernel(times_ptr, num_steps_ptr, NUM_SLOTS: tl.constexpr, IS_END: tl.constexpr):
        """Write the clock, ns, at (step, IS_END). Grid: (1,)."""
        step = tl.load(num_steps_ptr)
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [step.to(tl.int32)], dtype=tl.int64, is_pure=False, pack=1
        )
        tl.store(times_ptr + step % NUM_SLOTS * 2 + IS_END, now)
        if IS_END:
            tl.store(num_steps_ptr, step + 1)


def stamp(times: torch.Tensor, num_steps: torch.Tensor, *, is_end: bool) -> None:
    """Note when the work before this has ended.

    Args:
        times: (slots, 2) int64, written in place: ns at the begin and at the end of each step, over and over.
        num_steps: () int64 on the same GPU, counted up at the end of each.
        is_end: of a step; False: its begin.
    """
    expect(times, "S 2", torch.int64, {}, name="times")
    expect(num_steps, "", torch.int64, {}, name="num_steps")
    stamp_kernel[(1,)](times, num_steps, NUM_SLOTS=times.shape[0], IS_END=is_end, num_warps=1)
