"""Rotary positions: tables against transformers, rotations against complex numbers."""

import math

import pytest
import torch

from soloist.kernels.check import FLOATS
from soloist.kernels.rotary import (
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    apply_rotary,
    make_rotary_table,
    yarn_mscale,
)
from tests.kernels.limits import assert_near

T, H, P = 5, 3, 14
THETA = 1e4
LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=64)


def rotate_fp64(x: torch.Tensor, first_position: int, *, interleaved: bool) -> torch.Tensor:
    """Multiply each pair, read as a complex number, by exp(i * angle)."""
    num_tokens, dim = x.shape[0], x.shape[-1]
    split = x.double().unflatten(-1, (-1, 2)) if interleaved else x.double().unflatten(-1, (2, -1)).transpose(-1, -2)
    frequencies = torch.tensor([THETA ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    angles = torch.outer(torch.arange(first_position, first_position + num_tokens), frequencies)
    turn = torch.polar(torch.ones_like(angles), angles).view(num_tokens, *(1,) * (x.dim() - 2), -1)
    pairs = torch.view_as_real(torch.view_as_complex(split.contiguous()) * turn)
    return (pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(T, P), (T, H, P), (1, H, P), (T, H, 2, P)])
def test_a_rotation_is_a_complex_product(dtype: torch.dtype, interleaved: bool, shape: tuple[int, ...]):
    x = torch.randn(shape).to(dtype)
    before = x.clone()
    table = make_rotary_table(P, THETA, 20)
    rows = slice(7, 7 + shape[0])
    y = apply_rotary(x, table.cos[rows], table.sin[rows], interleaved)
    assert y.dtype == dtype
    assert_near(y, rotate_fp64(x, 7, interleaved=interleaved))
    assert torch.equal(x, before)


def test_both_arrangements_agree_up_to_their_permutation():
    x = torch.randn(T, H, P)
    table = make_rotary_table(P, THETA, T)
    to_halves = torch.cat([torch.arange(0, P, 2), torch.arange(1, P, 2)])
    interleaved = apply_rotary(x, table.cos, table.sin, True)
    halves = apply_rotary(x[..., to_halves], table.cos, table.sin, False)
    assert torch.equal(interleaved[..., to_halves], halves)


@pytest.mark.parametrize("interleaved", [False, True])
def test_part_of_a_wider_row_is_rotated_without_a_copy_first(interleaved: bool):
    wide = torch.randn(T, H + 2, P + 6)
    x = wide[:, 1 : 1 + H, 6:]
    table = make_rotary_table(P, THETA, T)
    before = wide.clone()
    y = apply_rotary(x, table.cos, table.sin, interleaved)
    assert torch.equal(y, apply_rotary(x.contiguous(), table.cos, table.sin, interleaved))
    assert torch.equal(wide, before)


def test_products_depend_on_the_distance_only():
    table = make_rotary_table(P, THETA, 100)
    q, k = torch.randn(1, P), torch.randn(1, P)
    product = lambda i, j: (
        apply_rotary(q, table.cos[i : i + 1], table.sin[i : i + 1], False)
        @ apply_rotary(k, table.cos[j : j + 1], table.sin[j : j + 1], False).T
    ).item()
    assert product(12, 5) == pytest.approx(product(97, 90), rel=1e-4)
    assert product(12, 5) != pytest.approx(product(12, 6), rel=1e-2)


def test_a_table_begins_with_no_rotation():
    table = make_rotary_table(P, THETA, 9)
    assert table.cos.shape == table.sin.shape == (9, P // 2)
    assert table.cos.dtype == table.sin.dtype == torch.float32
    assert torch.equal(table.cos[0], torch.ones(P // 2))
    assert torch.equal(table.sin[0], torch.zeros(P // 2))


# Ours, and the same in the words of config.json; dim 64 and these contexts put dimensions into every branch.
SCALINGS: dict[str, tuple[RopeScaling | None, dict[str, object]]] = {
    "default": (None, {"rope_type": "default"}),
    "llama3": (
        LLAMA3,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    "yarn, not truncated, other bounds": (
        YarnScaling(factor=4.0, original_max_position_embeddings=64, beta_fast=8.0, beta_slow=2.0, truncate=False),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
    ),
    "yarn, attention factor": (
        YarnScaling(factor=4.0, original_max_position_embeddings=64, attention_factor=1.25),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.25},
    ),
    "yarn, both mscales": (
        YarnScaling(factor=40.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.7),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    ),
    "yarn, one mscale": (
        YarnScaling(factor=40.0, original_max_position_embeddings=64, mscale=0.7),
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 0.7},
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_those_of_transformers(name: str):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    transformers = pytest.importorskip("transformers")
    ours, theirs = SCALINGS[name]
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": THETA, **theirs},
    )
    rotary = llama.LlamaRotaryEmbedding(config)
    positions = torch.arange(256)
    cos, sin = rotary(torch.zeros(1), positions[None])
    table = make_rotary_table(64, THETA, 256, ours)
    torch.testing.assert_close(table.cos, cos[0, :, :32], atol=2e-5, rtol=0)
    torch.testing.assert_close(table.sin, sin[0, :, :32], atol=2e-5, rtol=0)


def frequencies_of(scaling: RopeScaling | None, dim: int) -> torch.Tensor:
    """Read the frequencies back from the angles at position 1, which are below pi."""
    table = make_rotary_table(dim, THETA, 2, scaling)
    return torch.atan2(table.sin[1], table.cos[1])


@pytest.mark.parametrize("scaling", [LLAMA3, YARN])
def test_scaling_keeps_fast_dimensions_and_slows_slow_ones_by_the_factor(scaling: RopeScaling):
    plain, scaled = frequencies_of(None, 64), frequencies_of(scaling, 64)
    assert scaled[0] == pytest.approx(plain[0].item(), rel=1e-5)
    assert scaled[-1] == pytest.approx(plain[-1].item() / scaling.factor, rel=1e-4)
    ratio = plain / scaled
    assert (ratio.diff() >= -1e-4).all()
    assert ((ratio > 1.01) & (ratio < scaling.factor - 0.01)).any()


def test_yarn_lengthens_queries_and_keys_by_its_attention_factor():
    plain, yarn = make_rotary_table(P, THETA, 9), make_rotary_table(P, THETA, 9, YARN)
    length = (yarn.cos**2 + yarn.sin**2).sqrt()
    torch.testing.assert_close(length, torch.full_like(plain.cos, 0.1 * math.log(4.0) + 1))


def test_yarn_mscale_is_one_without_a_longer_context():
    assert yarn_mscale(1.0) == yarn_mscale(0.5, 3.0) == 1.0
    assert yarn_mscale(40.0, 0.7) == pytest.approx(0.07 * math.log(40.0) + 1)


def test_arguments_of_other_sizes_are_refused():
    table = make_rotary_table(P, THETA, T)
    with pytest.raises(AssertionError, match="cos: axis T is 4, expected 5"):
        apply_rotary(torch.zeros(T, P), table.cos[:-1], table.sin, False)
    with pytest.raises(AssertionError, match="cos: axis P is 7, expected 8"):
        apply_rotary(torch.zeros(T, P + 2), table.cos, table.sin, False)
    with pytest.raises(AssertionError, match="dim: 7 is odd"):
        make_rotary_table(7, THETA, T)
