"""What ranks hold: every value of a model once, but for what each needs whole; sizes that do not divide are named."""

import json
from pathlib import Path

import pytest
import torch

from soloist.errors import UnsupportedError
from soloist.kernels.allreduce import ALONE, TensorParallel
from soloist.kernels.packed import PackedWeight
from soloist.models import load_model, loader
from soloist.models.layers import DenseCausalLM
from soloist.models.loader import Placement, RandomSource
from soloist.models.weights import Part, RecordingSource, columns, kv_rows, rows, token_rows
from tests.miniature import FAMILIES, draw_tensors
from tests.models.gguf_files import draw, write_gguf
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


@pytest.mark.parametrize(
    ("family", "routed", "shared"),
    [
        ("bailing_moe_v3", "mlp.experts.{e}.down_proj", "mlp.shared_experts.down_proj"),
        ("kimi_linear", "block_sparse_moe.experts.{e}.w2", "block_sparse_moe.shared_experts.down_proj"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_the_inputs_of_experts_down_maps_are_the_rows_in_memory(
    tmp_path: Path, family: str, routed: str, shared: str, size: int
):
    path = write_small(tmp_path / family, family, seed=3, **OVERRIDES[family])
    stored = draw_tensors(json.loads((path / "config.json").read_text()), seed=3)
    stacks: list[list[torch.Tensor]] = []
    for group in ranks(size):
        model = load_model(path, dtype=torch.float32, group=group)
        block = model.feed_forwards[1]
        asked = RecordingSource(torch.float32, group)
        on_meta = type(model)(model.config, asked).feed_forwards[1]
        for held, meta in ((block.down, on_meta.down), (block.shared_down, on_meta.shared_down)):
            assert held.mT.is_contiguous() and held.shape[-1] != held.shape[-2]
            assert meta.shape == held.shape and meta.stride() == held.stride()
        stacks.append([block.down, block.shared_down])
    down, shared_down = (torch.cat(parts, dim=-1) for parts in zip(*stacks, strict=True))
    at = "model.layers.1."
    wanted = torch.stack([stored[f"{at}{routed}.weight".format(e=e)].float() for e in range(len(down))])
    assert torch.equal(down, wanted) and torch.equal(shared_down, stored[f"{at}{shared}.weight"].float())


def test_random_experts_have_the_same_values_however_they_lie():
    part = Part(name="{e}", shape=(5, 8), split=columns(8))
    for group in (ALONE, *ranks(2)):
        source = RandomSource(1, Placement(device=torch.device("cpu"), dtype=torch.float32, group=group))
        plain, transposed = (source.experts(part, num_experts=3, is_transposed=t) for t in (False, True))
        assert torch.equal(plain, transposed) and plain.is_contiguous() and transposed.mT.is_contiguous()


def test_a_sum_of_bits_knows_their_order(monkeypatch: pytest.MonkeyPatch):
    # Longer than what is summed at a time.
    monkeypatch.setattr(loader, "_SUMMED_VALUES", 7)
    x = torch.randn(5, 6, dtype=torch.bfloat16)
    swapped = x[[1, 0, 2, 3, 4]]
    sums = {int(loader._sum_bits(y)) for y in (x, x.flip(0), x.flip(1), swapped, x.neg())}
    assert len(sums) == 5


def test_a_number_of_ranks_that_cannot_share_a_model_is_refused_with_those_that_can(tmp_path: Path):
    path = write_small(tmp_path / "qwen2", "qwen2")
    with pytest.raises(UnsupportedError, match="widths of 4, which 8 ranks cannot share: allowed are 1, 2, 4"):
        load_model(path, dtype=torch.float32, group=TensorParallel(rank=0, size=8))
    assert load_model(path, dtype=torch.float32, group=ALONE).group.size == 1


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("type_name", ["Q4_0", "Q8_0"])
def test_ranks_hold_the_values_of_a_gguf_file(tmp_path: Path, family: str, type_name: str):
    # Half of each row is whole groups of 32, and half of the heads whole tiles of int4; the vocabulary does not divide.
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "vocab_size": 177, "num_hidden_layers": 1}
    config, tensors = draw(family, **sizes)
    path = write_gguf(tmp_path / "model.gguf", family, config, tensors, lambda name: type_name)
    for options in ({"dtype": torch.float32}, {"weights_dtype": "int4"}):
        whole = load_model(path, **options)
        parts = [load_model(path, group=group, **options) for group in ranks(2)]
        assert isinstance(whole, DenseCausalLM) and all(isinstance(part, DenseCausalLM) for part in parts)
        for model in (whole, *parts):
            mixer, feed_forward = model.layers[0]
            model.read = {
                "head": dense(model.lm_head),
                "embedding": model.embed_tokens.float(),
                "out": dense(mixer.o_proj),
                "down": dense(feed_forward.down),
                "up": dense(feed_forward.gate_up).view(2, -1, 128).transpose(0, 1),
                "bias": torch.zeros(1) if mixer.qkv_bias is None else mixer.qkv_bias[: 32 * mixer.num_heads].float(),
            }
        for name, axis in {"head": 0, "embedding": 0, "out": 1, "down": 1, "up": 0, "bias": 0}.items():
            found = torch.cat([part.read[name] for part in parts], dim=axis)
            wanted = whole.read[name]
            size = wanted.shape[axis]
            # What is 4-bit in the file is never rounded again; the rest is, each half by itself.
            limit = 0.0 if type_name == "Q4_0" or "dtype" in options else 0.1
            error = (found.narrow(axis, 0, size) - wanted).norm() / wanted.norm().clamp_min(1e-9)
            assert error <= limit, (name, options, error)


def dense(weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    return weight.dequantise() if isinstance(weight, PackedWeight) else weight.float()
