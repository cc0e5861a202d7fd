"""The rows of a table that one of several ranks holds, in one launch; the equation is `embed`'s in `allreduce`."""

import torch
import triton
import triton.language as tl

from soloist.kernels.launch import let_consumers_start, pdl_options, wait_for_producers


@triton.jit(do_not_specialize=["first", "num_rows"])
def own_rows_kernel(
    ids_ptr, table_ptr, out_ptr, first, num_rows, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out[t] = table[id - first] where the table has that row, else 0. Grid: (T, D / BLOCK)."""
    i_t = tl.program_id(0)
    i_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    row = tl.load(ids_ptr + i_t) - first
    is_own = (row >= 0) & (row < num_rows)
    b_row = tl.load(table_ptr + row * D + i_d, mask=is_own & (i_d < D), other=0.0)
    tl.store(out_ptr + i_t.to(tl.int64) * D + i_d, b_row, mask=i_d < D)


def own_rows(input_ids: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
    """Look ids (T,) int64 up in rows `first` and behind, (rows, D): (T, D), 0 where the row is another rank's."""
    T, (num_rows, D) = input_ids.shape[0], table.shape
    out = torch.empty((T, D), dtype=table.dtype, device=table.device)
    block = min(triton.next_power_of_2(D), 1024)
    own_rows_kernel[(T, triton.cdiv(D, block))](
        input_ids, table, out, first, num_rows, D=D, BLOCK=block, num_warps=4, **pdl_options()
    )
    return out
