"""How many rows a step has: as many as pay, given how likely drafts are kept and what rows cost. Tensor code.

With c_i the probability that draft i is kept once it is reached, A_j = prod_{i<=j} c_i its survival, C(w) the duration
of a step of w rows, and e_l = 1 + sum_{j<=l} A_j the tokens that l drafts are expected to commit:

    best    l = argmax e_l / C(1 + l)
    stop    go on to draft l + 1 while A_{l+1} / e_l > (C(2 + l) - C(1 + l)) / C(1 + l)

Sampling stays lossless if whether a draft is verified does not depend on the draft: `best` is for survivals known from
earlier steps; `stop` ends at a confidence that was known before its draft was drawn, and never looks behind it.

Source: Chen et al., DSpark (arXiv 2607.05147), algorithm 1, for one request.
"""

import torch

from soloist.kernels.check import use_reference
from soloist.kernels.launch import HAS_TRITON
from soloist.spec.costs import StepCosts

if HAS_TRITON:
    from soloist.kernels import width_triton

# Share of the counts that is left behind each step: what was kept a hundred steps ago says little.
DECAY = 0.97
# Drafts that the guess before any counting is worth, and the guess for drafts of which nothing is known.
PRIOR_DRAFTS, PRIOR_ACCEPTANCE = 2.0, 0.75
# Cells that confidences are counted in.
NUM_CELLS = 10


def expected_tokens(survival: torch.Tensor) -> torch.Tensor:
    """Give the tokens a step is expected to commit, by its width: (T-1,) survivals to (T,)."""
    return torch.cat([torch.ones_like(survival[:1]), 1 + survival.cumsum(0)])


def best_width(survival: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
    """Choose the width with the most tokens per time, the narrowest of equals.

    Args:
        survival: (T-1,) fp32, known before anything was drafted.
        costs: (T,) fp32, of a step by its width.

    Returns:
        () int32, 1..T.
    """
    return (expected_tokens(survival) / costs).argmax().int() + 1


def stop_width(survival: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
    """Choose the width before the first draft that does not pay.

    Args:
        survival: (T-1,) fp32; each may depend on the drafts before it.
        costs: (T,) fp32, convex.

    Returns:
        () int32, 1..T.
    """
    gain = survival / expected_tokens(survival)[:-1]  # (T-1,)
    price = costs.diff() / costs[:-1]  # (T-1,)
    return (gain > price).int().cumprod(0).sum(dtype=torch.int32) + 1


class WidthRule:
    """Counts which drafts are kept and chooses widths by it.

    Drafts are counted in cells: by their place in the step, or by the confidence they came with, which counting
    corrects. The counts fade, back to a guess that is worth a try.

    Args:
        costs: of a step by its width.
        has_confidences: whether drafts come with a confidence.
        device: where the steps run.
    """

    def __init__(self, costs: StepCosts, *, has_confidences: bool, device: torch.device) -> None:
        self.costs = costs
        max_drafts = len(costs.step_ms) - 1
        num_cells = NUM_CELLS if has_confidences else max_drafts
        # (T,) fp32.
        self.step_ms = torch.tensor(costs.step_ms, dtype=torch.float32, device=device)
        self.envelope_ms = torch.tensor(costs.envelope_ms, dtype=torch.float32, device=device)
        # (cells,) fp32: drafts that were reached, and that were kept.
        self.reached = torch.zeros(num_cells, device=device)
        self.kept = torch.zeros(num_cells, device=device)
        # (cells,) fp32: what is assumed without counts.
        centres = (torch.arange(num_cells, device=device) + 0.5) / num_cells
        self.prior = centres if has_confidences else torch.full((num_cells,), PRIOR_ACCEPTANCE, device=device)
        # (T-1,) int64: the cell of each draft of the step.
        self.cells = torch.zeros(max_drafts, dtype=torch.int64, device=device)
        self.has_confidences = has_confidences
        # (T-1,) int64: 0, 1, ..
        self.rows = torch.arange(max_drafts, device=device)
        # () int32: most rows of the next step, as the host wishes.
        self.cap = torch.full((), 1 + max_drafts, dtype=torch.int32, device=device)
        self.begin()

    def begin(self) -> None:
        """Forget the counts, at a request's begin."""
        self.reached.zero_()
        self.kept.zero_()
        self.cells.copy_(self.rows.clamp_max(self.kept.shape[0] - 1))

    def acceptance(self) -> torch.Tensor:
        """Give the probability that a reached draft of each cell is kept: (cells,) fp32."""
        return (self.kept + PRIOR_DRAFTS * self.prior) / (self.reached + PRIOR_DRAFTS)

    def limit(self, width: torch.Tensor) -> None:
        """Lower the width () int32 that a step may have, in place, by what is known before anything is drafted."""
        if not use_reference(width):
            width_triton.limit(
                width,
                self.cap,
                self.reached,
                self.kept,
                self.prior,
                self.step_ms,
                prior_drafts=PRIOR_DRAFTS,
                has_best=not self.has_confidences,
            )
            return
        width.copy_(torch.minimum(width, self.cap))
        if not self.has_confidences:
            width.copy_(torch.minimum(width, best_width(self.acceptance().cumprod(0), self.step_ms)))

    def stop(self, confidences: torch.Tensor) -> torch.Tensor:
        """Choose the width from confidences.

        Args:
            confidences: (T-1,) fp32 in 0..1, each known before its draft was drawn.

        Returns:
            () int32, 1..T.
        """
        if not use_reference(confidences):
            counts = (self.reached, self.kept, self.prior)
            return width_triton.stop(confidences, self.cells, *counts, self.envelope_ms, prior_drafts=PRIOR_DRAFTS)
        self.cells.copy_((confidences * NUM_CELLS).long().clamp(0, NUM_CELLS - 1))
        return stop_width(self.acceptance().index_select(0, self.cells).cumprod(0), self.envelope_ms)

    def record(self, width: torch.Tensor, num_accepted: torch.Tensor) -> None:
        """Count what became of a step's drafts.

        Args:
            width: () int32, of the step.
            num_accepted: () int32.
        """
        if not use_reference(width):
            width_triton.count(width, num_accepted, self.cells, self.reached, self.kept, decay=DECAY)
            return
        is_kept = self.rows < num_accepted
        is_reached = (self.rows <= num_accepted) & (self.rows < width - 1)
        self.reached.mul_(DECAY).scatter_add_(0, self.cells, is_reached.float())
        self.kept.mul_(DECAY).scatter_add_(0, self.cells, is_kept.float())


class EarlyStop:
    """The `stop` rule while drafting, one draft at a time, for a CPU: a draft that will not be verified is not made.

    Args:
        rule: gets the confidences for its counts.
    """

    def __init__(self, rule: WidthRule) -> None:
        self._rule = rule
        self._acceptance = rule.acceptance().tolist()
        # Of any draft, before its confidence is known.
        self._mean = float((rule.kept.sum() + PRIOR_DRAFTS * PRIOR_ACCEPTANCE) / (rule.reached.sum() + PRIOR_DRAFTS))
        self._survival = self._expected = 1.0
        self._num_drafts = 0

    def pays(self) -> bool:
        """Say whether one more draft is worth making and verifying."""
        costs, w = self._rule.costs.envelope_ms, self._num_drafts
        return self._survival * self._mean / self._expected > (costs[w + 1] - costs[w]) / costs[w]

    def add(self, confidence: float) -> None:
        """Take the confidence of the draft that was just made."""
        cell = min(int(confidence * NUM_CELLS), NUM_CELLS - 1)
        self._rule.cells[self._num_drafts] = cell
        self._num_drafts += 1
        self._survival *= self._acceptance[cell]
        self._expected += self._survival
