"""What ranks give each other: sums in rank order, rounded once, and the first of the largest. Ranks are played here."""

import pytest
import torch

from soloist.kernels import allreduce
from soloist.kernels.allreduce import TensorParallel
from tests.kernels.limits import LIMITS, assert_near

SIZE, T, D = 4, 3, 10
GROUP = TensorParallel(rank=1, size=SIZE)


def play(monkeypatch: pytest.MonkeyPatch, every_rank: torch.Tensor) -> torch.Tensor:
    """Let the exchange give what every rank has, (ranks, ...); gives this rank's."""
    monkeypatch.setattr(allreduce, "_gather", lambda x, group: every_rank)
    return every_rank[GROUP.rank]


def test_partial_sums_are_added_in_rank_order_and_rounded_once(monkeypatch: pytest.MonkeyPatch):
    partials = torch.randn(SIZE, T, D).bfloat16()
    # In another order the small ones would be lost.
    partials[:, 0, 0] = torch.tensor([2.0**30, -(2.0**30), 1.0, 2.0])
    residual = torch.randn(T, D).bfloat16()
    residual[0, 0] = 0
    y = allreduce.all_reduce_add(play(monkeypatch, partials), residual, GROUP)
    assert y.dtype == torch.bfloat16 and y[0, 0] == 3
    exact = residual.double() + partials.double().sum(0)
    assert_near(y.float(), exact, LIMITS[torch.bfloat16])
    total = allreduce.all_reduce_add(play(monkeypatch, partials), None, GROUP)
    assert_near(total.float(), partials.double().sum(0), LIMITS[torch.bfloat16])


def test_a_pass_that_is_only_compiled_exchanges_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(allreduce, "dist", None)
    x, values = torch.randn(T, D), torch.randn(T)
    with allreduce.without_exchanges():
        assert allreduce.all_reduce_add(x, x, GROUP).shape == (T, D)
        assert allreduce.all_gather_columns(x, GROUP).shape == (T, SIZE * D)
        assert allreduce.all_reduce_argmax(values, torch.arange(T), GROUP)[1].shape == (T,)
    with pytest.raises(AttributeError):
        allreduce.all_gather_columns(x, GROUP)


def test_one_rank_alone_only_adds():
    x, residual = torch.randn(T, D), torch.randn(T, D)
    assert torch.equal(allreduce.all_reduce_add(x, residual, allreduce.ALONE), residual + x)
    values, ids = torch.randn(T), torch.arange(T)
    assert all(map(torch.equal, allreduce.all_reduce_argmax(values, ids, allreduce.ALONE), (values, ids)))


def test_the_largest_wins_the_first_of_equals_and_a_nan_over_all(monkeypatch: pytest.MonkeyPatch):
    nan, inf = torch.nan, torch.inf
    values = torch.tensor([[1.0, 5.0, nan, -inf, 2.0], [3.0, 5.0, 9.0, -inf, nan], [2.0, 4.0, nan, -inf, inf]])
    ids = torch.arange(15).view(3, 5) * 1_000_003
    group = TensorParallel(rank=0, size=3)
    every = torch.stack([torch.stack([v.double(), i.double()]) for v, i in zip(values, ids, strict=True)])
    play(monkeypatch, every)
    found, found_ids = allreduce.all_reduce_argmax(values[0], ids[0], group)
    assert found_ids.tolist() == [ids[1, 0], ids[0, 1], ids[0, 2], ids[0, 3], ids[1, 4]]
    assert found[:2].tolist() == [3.0, 5.0] and found[2].isnan() and found[3] == -inf and found[4].isnan()


def test_columns_stand_side_by_side(monkeypatch: pytest.MonkeyPatch):
    whole = torch.randn(T, SIZE * 2)
    every = torch.stack(whole.chunk(SIZE, dim=1))
    assert torch.equal(allreduce.all_gather_columns(play(monkeypatch, every), GROUP), whole)
