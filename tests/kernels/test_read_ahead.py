"""Shares of weights that are read ahead."""

import pytest
import torch

from soloist.kernels.linear import PackedWeight
from soloist.kernels.read_ahead import shares


def weight(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes // 2, dtype=torch.bfloat16)


@pytest.mark.parametrize("num_programs", [1, 7, 132])
def test_shares_lie_within_their_weight_and_apart_from_each_other(num_programs: int):
    first, second = weight(1 << 20), weight(3 << 20)
    for share in shares([first, second], 2 << 20, num_programs):
        distance_bytes = share.distance * 2
        assert 0 < share.num_bytes <= distance_bytes
        assert (num_programs - 1) * distance_bytes + share.num_bytes <= share.weight.numel() * 2
        assert distance_bytes % 128 == 0 == share.num_bytes % 128


def test_the_budget_goes_to_what_is_read_first():
    first, second, third = weight(1 << 20), weight(4 << 20), weight(1 << 20)
    taken = shares([first, second, third], 2 << 20, 64)
    assert [share.weight is tensor for share, tensor in zip(taken, (first, second), strict=True)] == [True, True]
    assert [64 * share.num_bytes for share in taken] == [1 << 20, 1 << 20]


def test_nothing_is_asked_for_that_is_packed_or_too_small():
    packed = object.__new__(PackedWeight)
    assert shares([packed], 1 << 20, 8) == ()
    assert shares([weight(1 << 20)], 0, 8) == ()
    # Less than a line of the cache each.
    assert shares([weight(1 << 10)], 1 << 20, 64) == ()
    assert shares([weight(1 << 20)], 1 << 20, 8)
