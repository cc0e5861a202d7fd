"""Triton kernels of adaptive width: a launch each where `spec/width.py` has a dozen operations on a few numbers.

The equations and references are `WidthRule.limit`, `stop` and `record` there.
"""

import torch
import triton
import triton.language as tl

from soloist.kernels.launch import let_consumers_start, pdl_options, wait_for_producers

# Rows of a step, drafts and cells are at most as many.
_MOST = 16


@triton.jit
def limit_kernel(
    width_ptr, cap_ptr, reached_ptr, kept_ptr, prior_ptr, step_ms_ptr, num_drafts, PRIOR_DRAFTS,
    HAS_BEST: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """width = min(width, cap, argmax e_l / C(1 + l) + 1), the last without confidences only. Grid: (1,)."""
    i = tl.arange(0, MOST)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    width = tl.minimum(tl.load(width_ptr), tl.load(cap_ptr))
    if HAS_BEST:
        # Place 0 is the pending token, which survives; place l the draft l.
        m = (i > 0) & (i <= num_drafts)
        b_kept = tl.load(kept_ptr + i - 1, mask=m, other=0.0)
        b_reached = tl.load(reached_ptr + i - 1, mask=m, other=0.0)
        b_prior = tl.load(prior_ptr + i - 1, mask=m, other=0.0)
        b_pass = (b_kept + PRIOR_DRAFTS * b_prior) / (b_reached + PRIOR_DRAFTS)
        b_survival = tl.cumprod(tl.where(i == 0, 1.0, tl.where(m, b_pass, 0.0)), axis=0)
        b_cost = tl.load(step_ms_ptr + i, mask=i <= num_drafts, other=1.0)
        b_gain = tl.where(i <= num_drafts, tl.cumsum(b_survival, axis=0) / b_cost, -1.0)
        width = tl.minimum(width, tl.argmax(b_gain, axis=0) + 1)
    tl.store(width_ptr, width)


@triton.jit
def stop_kernel(
    confidences_ptr, cells_ptr, reached_ptr, kept_ptr, prior_ptr, cost_ptr, out_ptr, num_drafts, PRIOR_DRAFTS,
    NUM_CELLS: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Width before the first draft that does not pay, and the cell of every draft. Grid: (1,)."""
    i = tl.arange(0, MOST)
    m = i < num_drafts
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    b_cell = (tl.load(confidences_ptr + i, mask=m, other=0.0) * NUM_CELLS).to(tl.int64)
    b_cell = tl.minimum(tl.maximum(b_cell, 0), NUM_CELLS - 1)
    tl.store(cells_ptr + i, b_cell, mask=m)
    b_kept, b_reached = tl.load(kept_ptr + b_cell), tl.load(reached_ptr + b_cell)
    b_pass = (b_kept + PRIOR_DRAFTS * tl.load(prior_ptr + b_cell)) / (b_reached + PRIOR_DRAFTS)
    b_survival = tl.cumprod(b_pass, axis=0)
    b_expected = 1.0 + tl.cumsum(b_survival, axis=0) - b_survival
    b_cost = tl.load(cost_ptr + i, mask=m, other=1.0)
    b_price = (tl.load(cost_ptr + 1 + i, mask=m, other=1.0) - b_cost) / b_cost
    m_pays = m & (b_survival / b_expected > b_price)
    tl.store(out_ptr, tl.min(tl.where(m_pays, MOST, i), axis=0) + 1)


@triton.jit
def count_kernel(
    width_ptr, num_accepted_ptr, cells_ptr, reached_ptr, kept_ptr, num_drafts, num_cells, DECAY,
    MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Fade the counts and add the step's drafts to their cells. Grid: (1,)."""
    i = tl.arange(0, MOST)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    width, num_accepted = tl.load(width_ptr), tl.load(num_accepted_ptr)
    b_cell = tl.load(cells_ptr + i, mask=i < num_drafts, other=-1)
    m_kept = i < num_accepted
    m_reached = (i <= num_accepted) & (i < width - 1)
    m_cell = b_cell[None, :] == i[:, None]
    b_reached = tl.load(reached_ptr + i, mask=i < num_cells, other=0.0) * DECAY
    b_kept = tl.load(kept_ptr + i, mask=i < num_cells, other=0.0) * DECAY
    b_reached += tl.sum((m_cell & m_reached[None, :]).to(tl.float32), axis=1)
    b_kept += tl.sum((m_cell & m_kept[None, :]).to(tl.float32), axis=1)
    tl.store(reached_ptr + i, b_reached, mask=i < num_cells)
    tl.store(kept_ptr + i, b_kept, mask=i < num_cells)


def limit(
    width: torch.Tensor,
    cap: torch.Tensor,
    reached: torch.Tensor,
    kept: torch.Tensor,
    prior: torch.Tensor,
    step_ms: torch.Tensor,
    *,
    prior_drafts: float,
    has_best: bool,
) -> None:
    """Lower `width` in place; arguments as `WidthRule` holds them. Without `has_best` only to `cap`."""
    limit_kernel[(1,)](
        width, cap, reached, kept, prior, step_ms, step_ms.shape[0] - 1, prior_drafts,
        HAS_BEST=has_best, MOST=_MOST, num_warps=1, **pdl_options(),
    )  # fmt: skip


def stop(
    confidences: torch.Tensor,
    cells: torch.Tensor,
    reached: torch.Tensor,
    kept: torch.Tensor,
    prior: torch.Tensor,
    envelope_ms: torch.Tensor,
    *,
    prior_drafts: float,
) -> torch.Tensor:
    """Choose a width () int32 by confidences (T-1,); writes `cells`. Arguments as `WidthRule` holds them."""
    width = torch.empty((), dtype=torch.int32, device=cells.device)
    stop_kernel[(1,)](
        confidences, cells, reached, kept, prior, envelope_ms, width, cells.shape[0], prior_drafts,
        NUM_CELLS=reached.shape[0], MOST=_MOST, num_warps=1, **pdl_options(),
    )  # fmt: skip
    return width


def count(
    width: torch.Tensor,
    num_accepted: torch.Tensor,
    cells: torch.Tensor,
    reached: torch.Tensor,
    kept: torch.Tensor,
    *,
    decay: float,
) -> None:
    """Count a step's drafts into `reached` and `kept`, in place."""
    count_kernel[(1,)](
        width, num_accepted, cells, reached, kept, cells.shape[0], reached.shape[0], decay,
        MOST=_MOST, num_warps=1, **pdl_options(),
    )  # fmt: skip
