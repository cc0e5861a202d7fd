"""The output head where ranks share the vocabulary: whole rows of logits, or only the likeliest token of each.

Every rank holds as many rows of the head, the last ones' end in padding. Who only wants the likeliest token never
gathers logits.
"""

import torch

from soloist.kernels.allreduce import TensorParallel, all_gather_columns, all_reduce_argmax
from soloist.kernels.head import norm_argmax
from soloist.kernels.sampling import likeliest
from soloist.models.weights import Weight


def whole_logits(logits: torch.Tensor, vocab_size: int, group: TensorParallel) -> torch.Tensor:
    """Put this rank's logits (T, rows) and the others' together: (T, N)."""
    return all_gather_columns(logits, group)[:, :vocab_size]


def likeliest_of(logits: torch.Tensor, num_tokens: int, group: TensorParallel) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the likeliest token of each row from the ranks' own logits.

    Args:
        logits: (T, rows) fp32, this rank's.
        num_tokens: ids that may be drawn.
        group: the ranks.

    Returns:
        (T,) int64 ids, the lowest of equals, and (T,) fp32 their logits.
    """
    num_own = _num_own(logits.shape[1], num_tokens, group)
    ids, values = likeliest(logits[:, : max(num_own, 1)])
    return _exchange(ids, values, logits.shape[1], num_own, group)


def pick_likeliest(
    hidden: torch.Tensor, norm: torch.Tensor, eps: float, lm_head: Weight, num_tokens: int, group: TensorParallel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the likeliest token behind each row of the residual stream (T, D), without logits; else as `likeliest_of`.

    Args:
        hidden: (T, D).
        norm: (D), the final norm.
        eps: of that norm.
        lm_head: (rows, D), this rank's.
        num_tokens: ids that may be drawn.
        group: the ranks.
    """
    num_own = _num_own(lm_head.shape[0], num_tokens, group)
    ids, values = norm_argmax(hidden, norm, eps, lm_head, max(num_own, 1))
    return _exchange(ids, values, lm_head.shape[0], num_own, group)


def _num_own(num_rows: int, num_tokens: int, group: TensorParallel) -> int:
    """Count the tokens that may be drawn among this rank's rows."""
    return min(max(num_tokens - group.rank * num_rows, 0), num_rows)


def _exchange(
    ids: torch.Tensor, values: torch.Tensor, num_rows: int, num_own: int, group: TensorParallel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn a rank's likeliest rows into the likeliest tokens of all ranks."""
    if group.size == 1:
        return ids, values
    if not num_own:
        values = torch.full_like(values, -torch.inf)
    values, ids = all_reduce_argmax(values, ids + group.rank * num_rows, group)
    return ids, values
