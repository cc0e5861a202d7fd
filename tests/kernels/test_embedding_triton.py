"""A rank looks up its own rows of a table, and gives zeros for the others'."""

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import embedding_triton
from soloist.kernels.allreduce import own_rows_ref
from tests.kernels.device import DEVICE, nan_in_fresh_memory, rand

ROWS = 23


@pytest.mark.parametrize(("T", "D"), [(1, 8), (5, 1100), (40, 96)])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_own_rows_equal_their_reference(T: int, D: int, rank: int):
    # Rows of three ranks; those of nobody are not numbers.
    table = torch.full((3 * ROWS, D), torch.nan, device=DEVICE, dtype=rand(1).dtype)
    own = table[rank * ROWS : (rank + 1) * ROWS]
    own.copy_(rand(ROWS, D))
    ids = torch.randint(3 * ROWS, (T,), device=DEVICE)
    # Both ends of the own rows, and their neighbours.
    edges = torch.tensor([rank * ROWS, rank * ROWS - 1, (rank + 1) * ROWS - 1, (rank + 1) * ROWS, 0], device=DEVICE)
    ids[: min(T, 5)] = edges[:T].clamp(0, 3 * ROWS - 1)
    with nan_in_fresh_memory():
        out = embedding_triton.own_rows(ids, own, rank * ROWS)
    assert torch.equal(out, own_rows_ref(ids, own, rank * ROWS))
    is_own = (ids >= rank * ROWS) & (ids < (rank + 1) * ROWS)
    assert torch.equal(out, torch.where(is_own[:, None], table.nan_to_num(0.0)[ids], 0))
