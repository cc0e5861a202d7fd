"""Collectives of tensor parallelism: who the ranks are, and the exchanges of a step between them.

    all_reduce_add       y = residual + sum_r partial_r            in rank order, so every rank has the same bits
    all_reduce_argmax    the largest of the ranks' values, of equals the lowest rank's, with its id
    all_gather_columns   [x_0 x_1 ..]

References run on `torch.distributed`: gloo on a CPU, NCCL on GPUs. A GPU's steps of few rows go through mailboxes in
the peers' memory (`allreduce_cuda`), its prompts through NCCL. A group of one exchanges nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from soloist.kernels import allreduce_cuda
from soloist.kernels.check import FLOATS, expect, use_reference
from soloist.kernels.launch import HAS_TRITON
from soloist.kernels.linear import linear, linear_residual
from soloist.kernels.mailboxes import Mailboxes
from soloist.kernels.packed import Weight

if HAS_TRITON:
    from soloist.kernels import embedding_triton

# Most rows that go through mailboxes; more, a prompt's, go through NCCL.
MAX_PUSHED_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """The ranks that share one model, as one of them sees them."""

    # 0..size-1; rank 0 talks to the world.
    rank: int = 0
    size: int = 1
    # Of all ranks; None for a group of one.
    process_group: dist.ProcessGroup | None = None
    # What a GPU's steps are exchanged through; None on a CPU.
    mailboxes: Mailboxes | None = None

    def share(self, num_blocks: int) -> int:
        """Give how many of `num_blocks` heads or columns a rank holds; 1 where ranks share a head."""
        assert num_blocks % self.size == 0 or self.size % num_blocks == 0, f"{num_blocks} in {self.size} parts"
        return max(1, num_blocks // self.size)


# A model on one device.
ALONE = TensorParallel()

_is_exchanging: ContextVar[bool] = ContextVar("is_exchanging", default=True)


@contextmanager
def without_exchanges() -> Iterator[None]:
    """Have collectives on `torch.distributed` give any values inside the block: for passes that are only compiled."""
    token = _is_exchanging.set(False)
    try:
        yield
    finally:
        _is_exchanging.reset(token)


def _gather(x: torch.Tensor, group: TensorParallel) -> torch.Tensor:
    """Give every rank's tensor: (ranks, ...)."""
    x = x.contiguous()
    gathered = torch.empty((group.size, *x.shape), dtype=x.dtype, device=x.device)
    # As bytes: not every backend knows every dtype.
    places = gathered.view(group.size, -1).view(torch.uint8)
    if _is_exchanging.get():
        dist.all_gather(list(places.unbind()), x.view(-1).view(torch.uint8), group=group.process_group)
    return gathered


def all_reduce_add_ref(partial: torch.Tensor, residual: torch.Tensor | None, group: TensorParallel) -> torch.Tensor:
    """Gather, then sum in rank order in fp32."""
    total = partial.float()
    if group.size > 1:
        first, *others = _gather(partial, group).float().unbind()
        total = first
        for other in others:
            total = total + other
    return (total if residual is None else residual.float() + total).to(partial.dtype)


def all_reduce_add(partial: torch.Tensor, residual: torch.Tensor | None, group: TensorParallel) -> torch.Tensor:
    """Add the ranks' partial sums to the residual stream.

    y = residual + sum_r partial_r

    Args:
        partial: (T, D), this rank's.
        residual: (T, D), the dtype of `partial`, the same on every rank. None: 0.
        group: the ranks.

    Returns:
        (T, D), the dtype of `partial`, the same bits on every rank: sums in fp32 in rank order, rounded once. On GPUs
        more than 16 rows, and other dtypes than bf16, are summed by NCCL in their own dtype.
    """
    dims: dict[str, int] = {}
    expect(partial, "T D", FLOATS, dims, name="partial")
    if residual is not None:
        expect(residual, "T D", partial.dtype, dims, name="residual")
    if use_reference(partial) or group.size == 1:
        return all_reduce_add_ref(partial, residual, group)
    if partial.dtype is torch.bfloat16 and dims["T"] <= MAX_PUSHED_ROWS:
        assert group.mailboxes is not None, "a step on a GPU needs mailboxes"
        out = torch.empty_like(partial)
        allreduce_cuda.push_all_reduce_add(partial, residual, out, group.mailboxes)
        return out
    total = partial.contiguous()
    if _is_exchanging.get():
        dist.all_reduce(total, group=group.process_group)
    return total if residual is None else residual + total


def all_reduce_argmax_ref(
    values: torch.Tensor, ids: torch.Tensor, group: TensorParallel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather, then let each later rank win only with a larger value, or with the first NaN."""
    if group.size == 1:
        return values, ids
    # Both fit into fp64 exactly.
    first, *others = _gather(torch.stack([values.double(), ids.double()]), group).unbind()  # (2, T) each
    best, best_ids = first
    for other, other_ids in others:
        is_better = (other > best) | (other.isnan() & ~best.isnan())
        best, best_ids = torch.where(is_better, other, best), torch.where(is_better, other_ids, best_ids)
    return best.float(), best_ids.long()


def all_reduce_argmax(
    values: torch.Tensor, ids: torch.Tensor, group: TensorParallel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the largest of the ranks' values for each row.

    Args:
        values: (T,) fp32, this rank's largest; a NaN is larger than any number.
        ids: (T,) int64 that stand for them, rising with the rank.
        group: the ranks.

    Returns:
        (T,) fp32 values and (T,) int64 ids, the lowest of equals; the same on every rank.
    """
    dims: dict[str, int] = {}
    expect(values, "T", torch.float32, dims, name="values")
    expect(ids, "T", torch.int64, dims, name="ids")
    if use_reference(values) or group.size == 1 or dims["T"] > MAX_PUSHED_ROWS:
        return all_reduce_argmax_ref(values, ids, group)
    assert group.mailboxes is not None, "a step on a GPU needs mailboxes"
    out_values, out_ids = torch.empty_like(values), torch.empty_like(ids)
    allreduce_cuda.push_argmax(values, ids, out_values, out_ids, group.mailboxes)
    return out_values, out_ids


def all_gather_columns(x: torch.Tensor, group: TensorParallel) -> torch.Tensor:
    """Put the ranks' columns side by side: (T, I) to (T, ranks * I). For rows of logits that a sampler needs whole."""
    if group.size == 1:
        return x
    return _gather(x, group).transpose(0, 1).flatten(1)  # (T, ranks * I)


def broadcast(x: torch.Tensor, group: TensorParallel) -> None:
    """Give every rank what rank 0 has in `x`, written in place."""
    if group.size > 1:
        dist.broadcast(x.view(-1).view(torch.uint8), group_src=0, group=group.process_group)


def linear_all_reduce(x: torch.Tensor, weight: Weight, residual: torch.Tensor, group: TensorParallel) -> torch.Tensor:
    """Apply a linear map whose inputs the ranks share, and add it to the residual stream.

    y = residual + sum_r x_r W_r^T

    Args:
        x: (T, I), this rank's inputs.
        weight: (D, I) the dtype of `x`, or packed: this rank's columns.
        residual: (T, D), the dtype of `x`.
        group: the ranks. One alone is `linear_residual`.

    Returns:
        (T, D), the dtype of `x`. A rank's product is rounded to that dtype before it is sent.
    """
    if group.size == 1:
        return linear_residual(x, weight, residual)
    return all_reduce_add(linear(x, weight), residual, group)


def own_rows_ref(input_ids: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
    """Look up with ids cut to the table, then drop what they do not mean."""
    rows = input_ids - first
    is_own = (rows >= 0) & (rows < table.shape[0])  # (T,)
    looked_up = F.embedding(rows.clamp(0, table.shape[0] - 1), table)  # (T, D)
    # Not a product: what another row holds may be no number.
    return torch.where(is_own[:, None], looked_up, 0)


def embed(input_ids: torch.Tensor, table: torch.Tensor, group: TensorParallel) -> torch.Tensor:
    """Look tokens up in a table of which each rank holds as many rows.

    Args:
        input_ids: (T,) int64.
        table: (rows, D): rank r has the tokens from r * rows on.
        group: the ranks.

    Returns:
        (T, D), exact.
    """
    if group.size == 1:
        return F.embedding(input_ids, table)
    form = own_rows_ref if use_reference(table) else embedding_triton.own_rows
    return all_reduce_add(form(input_ids, table, group.rank * table.shape[0]), None, group)
