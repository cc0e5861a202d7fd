"""The output head where ranks share the vocabulary: whole rows of logits, or only the likeliest token of each.

Every rank holds as many rows of the head, the last ones' end in padding. Who only wants the likeliest token never
gathers logits.
"""

import torch

from soloist.kernels.allreduce import TensorParallel, all_gather_columns, all_reduce_argmax
from soloist.kernels.head import linear_argmax, norm_argmax
from soloist.models.weights import Weight


def whole_logits(logits: torch.Tensor, vocab_size: int, group: TensorParallel) -> torch.Tensor:
    """Put this rank's logits (T, rows) and the others' together: (T, N)."""
    return all_gather_columns(logits, group)[:, :vocab_size]


def pick_likeliest(
    hidden: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    lm_head: Weight,
    num_tokens: int,
    group: TensorParallel,
    *,
    logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the likeliest token behind each row, without a row of logits in memory.

    Args:
        hidden: (T, D).
        norm: (D), the final norm. None: the rows are normalised.
        eps: of that norm.
        lm_head: (rows, D), this rank's.
        num_tokens: ids that may be drawn.
        group: the ranks.
        logits: (T, rows) fp32, this rank's, to which what the head gives is a bias; without a norm only. None: 0.

    Returns:
        (T,) int64 ids, the lowest of equals, and (T,) fp32 their logits.
    """
    num_rows = lm_head.shape[0]
    first = group.rank * num_rows
    num_own = min(max(num_tokens - first, 0), num_rows)
    if norm is not None:
        assert logits is None, "a bias comes without a norm"
        ids, values = norm_argmax(hidden, norm, eps, lm_head, max(num_own, 1), first_id=first)
    else:
        ids, values = linear_argmax(hidden, lm_head, logits, max(num_own, 1), first_id=first)
    if group.size == 1:
        return ids, values
    if not num_own:
        values = torch.full_like(values, -torch.inf)
    values, ids = all_reduce_argmax(values, ids, group)
    return ids, values
