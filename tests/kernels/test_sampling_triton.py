"""Sampling on the device: the references' random bits, draws and laws, whatever the sizes and however flat the law."""

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import sampling, sampling_triton
from soloist.kernels.launch import IS_INTERPRETED
from soloist.kernels.sampling import Stream
from tests.kernels.device import DEVICE, launch_kernels, nan_in_fresh_memory

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

# Less than 1, and nothing lies between.
LAST_UNIFORM = 1 - 2.0**-24


@pytest.fixture(autouse=True)
def _kernels_in_memory_of_nan(monkeypatch: pytest.MonkeyPatch):
    launch_kernels(monkeypatch, sampling)
    with nan_in_fresh_memory():
        yield


def uniforms(T: int) -> torch.Tensor:
    return torch.rand(T, device=DEVICE).clamp(2.0**-24, LAST_UNIFORM)


@pytest.mark.parametrize("T", [1, 5, 16, 17])
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
def test_uniforms_are_the_references_bit_for_bit(T: int, seed: int):
    positions = torch.randint(2**40, (T,), device=DEVICE)
    positions[:2] = torch.tensor([2**32 - 1, 0], device=DEVICE)[:T]
    for stream in Stream:
        key = torch.tensor(seed, device=DEVICE)
        got = sampling.uniform(key, positions, stream)
        assert torch.equal(got, sampling.uniform_ref(key, positions, stream))


@pytest.mark.parametrize(("T", "N"), [(1, 1), (3, 7), (2, 4096), (5, 4097), (2, 13001)])
def test_draws_are_the_references(T: int, N: int):
    """Up to the rounding of the cumulated law: a draw may move to a token that lies within it."""
    probs = (torch.randn(T, N, device=DEVICE) * 4).softmax(-1)
    probs *= probs >= probs.amax(-1, keepdim=True) * 1e-3
    u = uniforms(T)
    got = sampling.draw(probs, u)
    assert (probs.gather(1, got[:, None]) > 0).all()
    cdf = probs.double().cumsum(-1)
    at = cdf.gather(1, got[:, None]).squeeze(1)
    before = at - probs.gather(1, got[:, None]).squeeze(1)
    threshold = u * cdf[:, -1]
    assert (before <= threshold + 5e-6).all() and (threshold <= at + 5e-6).all()
    if N < 100:
        assert torch.equal(got, sampling.draw_ref(probs, u))


def test_draws_follow_the_law_from_one_end_to_the_other():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], device=DEVICE).expand(6, 6)
    u = torch.tensor([2.0**-24, 0.2499, 0.25, 0.7499, 0.75, LAST_UNIFORM], device=DEVICE)
    assert sampling.draw(probs, u).tolist() == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("N", [5000, 9000])
def test_the_largest_number_draws_a_token_that_can_be_drawn(N: int):
    """The sum of a row and the end of its cumulated law are rounded differently; behind both lie impossible tokens."""
    rows = 40 if IS_INTERPRETED else 400
    probs = torch.rand(rows, N, device=DEVICE)
    probs[:, N - 100 :] = 0
    got = sampling.draw(probs, torch.full((rows,), LAST_UNIFORM, device=DEVICE))
    assert (probs.gather(1, got[:, None]) > 0).all()
    assert (got > N - 200).all()


def test_a_law_that_is_not_finite_draws_an_id():
    probs = torch.full((2, 9), torch.nan, device=DEVICE)
    probs[1] = 0
    got = sampling.draw(probs, uniforms(2))
    assert ((got >= 0) & (got < 9)).all()


def test_a_row_draws_the_same_in_any_company():
    probs, u = torch.rand(6, 5000, device=DEVICE).softmax(-1), uniforms(6)
    together = sampling_triton.draw(probs, u)
    alone = torch.cat([sampling_triton.draw(probs[t : t + 1], u[t : t + 1]) for t in range(6)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("k", "top_p", "min_p"),
    [(53, 1.0, 0.0), (53, 0.9, 0.0), (7, 1.0, 0.0), (7, 0.6, 0.0), (1, 0.9, 0.0), (53, 1.0, 0.2), (9, 0.8, 0.15)],
)
def test_the_law_of_a_captured_step_is_the_references(temperature: float, k: int, top_p: float, min_p: float):
    logits = torch.randn(5, 53, device=DEVICE) * 3
    # Equals at the threshold, impossible tokens and a law of one token.
    logits[1, 10:20], logits[2, 5:] = logits[1].topk(5).values[-1], -torch.inf
    logits[3, 4] = 1e4
    f32 = lambda x: torch.tensor(x, dtype=torch.float32, device=DEVICE)
    parameters = (f32(temperature), torch.tensor(k, dtype=torch.int32, device=DEVICE), f32(top_p), f32(min_p))
    got = sampling.target_probs_sorted(logits, *parameters)
    expected = sampling.target_probs_ref(logits, *parameters)
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("T", "N"), [(1, 1), (3, 2048), (2, 2049), (5, 6151)])
def test_the_likeliest_is_the_references_whatever_lies_beside_it(T: int, N: int):
    wider = torch.full((T, N + 9), torch.nan, device=DEVICE)
    logits = wider[:, :N]
    # Few values, so that there are equals in every block; small ones everywhere.
    logits.copy_(torch.randint(-40, -20, (T, N), device=DEVICE))
    tokens, highest = sampling.likeliest(logits, first_id=7)
    expected, values = sampling.likeliest_ref(logits)
    assert torch.equal(tokens, expected + 7) and torch.equal(highest, values)


def test_a_row_that_cannot_be_trusted_has_no_finite_likeliest():
    logits = torch.randn(4, 5000, device=DEVICE)
    logits[0, 4321], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    tokens, highest = sampling.likeliest(logits)
    assert highest.isfinite().tolist() == [False, False, False, True]
    assert tokens[:3].tolist() == [4321, 3, 0]
