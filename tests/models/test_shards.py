"""What ranks hold: every value of a model once, but for what each needs whole; sizes that do not divide are named."""

from pathlib import Path

import pytest
import torch

from soloist.errors import UnsupportedError
from soloist.kernels.allreduce import ALONE, TensorParallel
from soloist.models import load_model
from soloist.models.weights import Part, columns, kv_rows, rows, token_rows
from tests.miniature import FAMILIES
from tests.rank_program import OVERRIDES
from tests.spec.drafters import write_small


def ranks(size: int) -> list[TensorParallel]:
    return [TensorParallel(rank=rank, size=size) for rank in range(size)]


def held(part: Part, whole: torch.Tensor, size: int) -> list[torch.Tensor]:
    found = []
    for group in ranks(size):
        destination = torch.full(part.held_shape(group), torch.nan)
        num_bytes = part.copy_held(whole, destination, group)
        assert num_bytes == part.held_of(whole, group).numel() * 4
        found.append(destination)
    return found


def test_heads_and_columns_are_each_held_once():
    whole = torch.randn(12, 10)
    assert torch.equal(torch.cat(held(Part(name="w", shape=(12, 10), split=rows(6)), whole, 2)), whole)
    assert torch.equal(torch.cat(held(Part(name="w", shape=(12, 10), split=columns(5)), whole, 5), dim=1), whole)
    assert all(torch.equal(x, whole) for x in held(Part(name="w", shape=(12, 10)), whole, 2))


def test_ranks_share_a_head_where_there_are_fewer_heads_than_ranks():
    whole = torch.randn(6, 4)
    first, second, third, fourth = held(Part(name="w", shape=(6, 4), split=kv_rows(2)), whole, 4)
    assert torch.equal(first, whole[:3]) and torch.equal(second, whole[:3])
    assert torch.equal(third, whole[3:]) and torch.equal(fourth, whole[3:])


@pytest.mark.parametrize("num_tokens", [7, 8, 2])
def test_tokens_that_do_not_divide_end_in_rows_of_zeros(num_tokens: int):
    whole = torch.randn(num_tokens, 3)
    found = torch.cat(held(Part(name="w", shape=(num_tokens, 3), split=token_rows(num_tokens)), whole, 4))
    assert found.shape[0] % 4 == 0 and torch.equal(found[:num_tokens], whole) and not found[num_tokens:].any()


def test_a_split_says_which_numbers_of_ranks_it_allows():
    assert [n for n in (1, 2, 4, 8) if rows(12).allows(n)] == [1, 2, 4]
    assert [n for n in (1, 2, 4, 8) if kv_rows(2).allows(n)] == [1, 2, 4, 8]
    assert [n for n in (1, 2, 4, 8) if kv_rows(3).allows(n)] == [1]
    assert all(token_rows(7).allows(n) for n in (1, 2, 4, 8))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["file", "random"])
def test_ranks_hold_half_of_a_model_and_what_all_need_alike(tmp_path: Path, family: str, weights: str):
    path = write_small(tmp_path / family, family, **OVERRIDES[family])
    whole = load_model(path, dtype=torch.float32, weights=weights)
    parts = [load_model(path, dtype=torch.float32, weights=weights, group=group) for group in ranks(2)]
    assert parts[0].report.checksums == parts[1].report.checksums and len(parts[0].report.checksums) > 1
    N = whole.config.vocab_size
    assert torch.equal(torch.cat([part.embed_tokens for part in parts])[:N], whole.embed_tokens)
    assert torch.equal(torch.cat([part.lm_head for part in parts])[:N], whole.lm_head)
    num_bytes = [part.report.weight_bytes for part in parts]
    assert num_bytes[0] == num_bytes[1]
    # All but norms, routers and latents.
    assert 0.5 < num_bytes[0] / whole.report.weight_bytes < 0.66
    assert parts[0].footprint.weight_bytes == num_bytes[0]
    caches = [model.make_cache(64) for model in (whole, parts[0])]
    if caches[0].recurrent is not None:
        assert 2 * caches[1].recurrent.state.numel() == caches[0].recurrent.state.numel()


def test_a_number_of_ranks_that_cannot_share_a_model_is_refused_with_those_that_can(tmp_path: Path):
    path = write_small(tmp_path / "qwen2", "qwen2")
    with pytest.raises(UnsupportedError, match="widths of 4, which 8 ranks cannot share: allowed are 1, 2, 4"):
        load_model(path, dtype=torch.float32, group=TensorParallel(rank=0, size=8))
    assert load_model(path, dtype=torch.float32, group=ALONE).group.size == 1
