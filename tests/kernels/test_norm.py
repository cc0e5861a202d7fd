"""RMS norms against their equations in fp64."""

import pytest
import torch

from soloist.kernels.check import FLOATS
from soloist.kernels.norm import gated_rms_norm, gated_rms_norm_ref, rms_norm, rms_norm_ref
from tests.kernels.limits import LIMITS, assert_near

T, D, H, V = 5, 37, 3, 11
EPS = 1e-5


def rms_norm_fp64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_tokens", [1, T])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_rms_norm_is_its_equation(dtype: torch.dtype, num_tokens: int, size: float):
    # In fp16 the squares of the large ones overflow, and those of the small ones vanish beside eps.
    x, weight = (torch.randn(num_tokens, D) * size).to(dtype), (torch.rand(D) + 0.5).to(dtype)
    before = x.clone()
    assert_near(rms_norm(x, weight, EPS), rms_norm_fp64(x, weight, EPS), LIMITS[dtype])
    assert rms_norm(x, weight, EPS).dtype == dtype
    assert torch.equal(x, before)


@pytest.mark.parametrize("num_tokens", [1, T])
def test_rms_norm_rounds_once(num_tokens: int):
    x, weight = torch.randn(num_tokens, 999).bfloat16(), (torch.rand(999) + 0.5).bfloat16()
    exact = rms_norm_fp64(x, weight, EPS)
    is_nearest = rms_norm(x, weight, EPS) == exact.bfloat16()
    # All but those that fp32 puts on the other side of a tie.
    assert is_nearest.float().mean() > 0.998


def test_rms_norm_of_zeros_is_zero():
    assert torch.equal(rms_norm(torch.zeros(1, D), torch.ones(D), EPS), torch.zeros(1, D))
    assert torch.equal(rms_norm(torch.zeros(T, D), torch.ones(D), EPS), torch.zeros(T, D))


def test_rms_norm_takes_an_fp32_weight_beside_bf16_rows():
    x, weight = torch.randn(T, D).bfloat16(), torch.rand(D) + 0.5
    for rows in (x, x[:1]):
        y = rms_norm(rows, weight, EPS)
        assert y.dtype == torch.bfloat16
        assert_near(y, rms_norm_fp64(rows, weight, EPS))


def test_one_row_is_the_same_as_among_others():
    x, weight = torch.randn(T, D), torch.rand(D)
    assert_near(torch.cat([rms_norm_ref(x[t : t + 1], weight, EPS) for t in range(T)]), rms_norm_ref(x, weight, EPS))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(T, H, V), (1, H, V), (1, 1, V)])
def test_gated_rms_norm_is_its_equation(dtype: torch.dtype, shape: tuple[int, ...]):
    x, gate, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), (torch.rand(V) + 0.5).to(dtype)
    expected = rms_norm_fp64(x, weight, EPS) * torch.sigmoid(gate.double())
    y = gated_rms_norm(x, gate, weight, EPS)
    assert y.dtype == dtype
    assert_near(y.flatten(1), expected.flatten(1))
    assert torch.equal(y, gated_rms_norm_ref(x, gate, weight, EPS))


def test_gate_and_weight_may_be_fp32_beside_bf16_heads():
    x, gate, weight = torch.randn(T, H, V).bfloat16(), torch.randn(T, H, V), torch.rand(V)
    expected = rms_norm_fp64(x, weight, EPS) * torch.sigmoid(gate.double())
    assert_near(gated_rms_norm(x, gate, weight, EPS), expected)


def test_arguments_of_other_sizes_are_refused():
    with pytest.raises(AssertionError, match="weight: axis D is 36"):
        rms_norm(torch.zeros(T, D), torch.zeros(D - 1), EPS)
    with pytest.raises(AssertionError, match="gate: axis H is 4"):
        gated_rms_norm(torch.zeros(T, H, V), torch.zeros(T, H + 1, V), torch.zeros(V), EPS)
    with pytest.raises(AssertionError, match=r"weight: dtype torch\.float16"):
        rms_norm(torch.zeros(T, D), torch.zeros(D, dtype=torch.float16), EPS)
