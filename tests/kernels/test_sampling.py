"""Sampling operators: published Philox vectors, laws against plain definitions, draws against the law."""

import math
import os
import subprocess
import sys

import pytest
import torch

from soloist.kernels import sampling
from soloist.kernels.sampling import (
    Stream,
    draft_counter,
    draw,
    likeliest,
    penalize,
    target_probs,
    top_logprobs,
    uniform,
)


def f32(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)


def i32(x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Give the statistic in standard deviations above its mean."""
    expected = probs.double() * counts.sum()
    kept = expected > 0
    assert (counts[~kept] == 0).all()
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def philox_in_python(key: int, counter: tuple[int, int, int, int]) -> int:
    """Philox4x32-10 as in the paper, on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0


def test_the_python_oracle_gives_the_published_words():
    # Random123's known answers, philox4x32 with 10 rounds.
    ones = 0xFFFFFFFF
    assert philox_in_python(0, (0, 0, 0, 0)) == 0x6627E8D5
    assert philox_in_python(2**64 - 1, (ones, ones, ones, ones)) == 0x408F276D
    key = 0x299F31D0A4093822
    assert philox_in_python(key, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)) == 0xD16CFE09


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
def test_uniform_follows_philox_for_wide_seeds_and_positions(seed: int):
    positions = [0, 1, 2, 1000, 2**31, 2**32 - 1, 2**32 + 5, 2**40]
    for stream in Stream:
        got = uniform(torch.tensor(seed), torch.tensor(positions), stream)
        for position, u in zip(positions, got.tolist(), strict=True):
            word = philox_in_python(seed & (2**64 - 1), (position & 0xFFFFFFFF, position >> 32, stream, 0))
            assert u == ((word >> 9) + 0.5) * 2.0**-23


TRITON_SCRIPT = """
import torch, triton, triton.language as tl
from soloist.kernels.sampling import uniform

@triton.jit
def kernel(seed_ptr, position_ptr, u_ptr, STREAM: tl.constexpr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    position = tl.load(position_ptr + o)
    low = position.to(tl.uint32)
    word, _, _, _ = tl.philox(tl.load(seed_ptr), low, (position >> 32).to(tl.uint32), low * 0 + STREAM, low * 0)
    tl.store(u_ptr + o, ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07)

seed = torch.tensor(-12345678901234567)
positions = torch.tensor([0, 1, 2, 3, 99, 2**31, 2**32 + 7, 2**40])
for stream in range(3):
    u = torch.full((8,), float("nan"))
    kernel[(1,)](seed, positions, u, STREAM=stream, SIZE=8)
    assert torch.equal(u, uniform(seed, positions, stream)), (stream, u)
"""


def test_uniform_is_word_zero_of_tritons_philox(tmp_path):
    pytest.importorskip("triton")
    # A process of its own: the interpreter is chosen when Triton is imported.
    script = tmp_path / "philox.py"
    script.write_text(TRITON_SCRIPT)
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_uniform_is_open_and_even():
    u = uniform(torch.tensor(3), torch.arange(200_000), Stream.SAMPLE)
    assert 0 < u.min() < 1e-4 and 1 - 1e-4 < u.max() < 1
    counts = torch.histc(u.double(), 64, 0, 1)
    assert abs(chi_square(counts, torch.full((64,), 1 / 64))) < 4


def test_streams_and_neighbours_are_uncorrelated():
    positions = torch.arange(100_000)
    a, b = (uniform(torch.tensor(5), positions, stream).double() for stream in (Stream.SAMPLE, Stream.ACCEPT))
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.015
    assert abs(torch.corrcoef(torch.stack([a[1:], a[:-1]]))[0, 1]) < 0.015


def test_draft_counters_never_meet():
    rows = torch.arange(16)
    counters = torch.cat([draft_counter(i32(n), rows) for n in range(50)])
    assert counters.unique().numel() == 50 * 16


def test_target_probs_without_filters_is_the_softmax():
    logits = torch.randn(3, 37) * 4
    got = target_probs(logits, f32(0.7), i32(37), f32(1.0), f32(0.0))
    torch.testing.assert_close(got, (logits.double() / 0.7).softmax(-1).float())


def plain_law(row: list[float], temperature: float, k: int, top_p: float, min_p: float) -> list[float]:
    """One token at a time, from the definitions."""
    weights = [math.exp((z - max(row)) / temperature) for z in row]
    probs = [w / sum(weights) for w in weights]
    order = sorted(range(len(row)), key=lambda v: -probs[v])[:k]
    total, mass, nucleus = sum(probs[v] for v in order), 0.0, []
    for v in order:
        if mass >= top_p * total:
            break
        nucleus.append(v)
        mass += probs[v]
    kept = [v for v in nucleus if probs[v] >= min_p * max(probs)]
    return [probs[v] / sum(probs[u] for u in kept) if v in kept else 0.0 for v in range(len(row))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("k", "top_p", "min_p"),
    [
        (53, 0.9, 0.0),
        (7, 1.0, 0.0),
        (7, 0.6, 0.0),
        (1, 0.9, 0.0),
        (53, 1.0, 0.2),
        (9, 0.8, 0.15),
        (53, 1e-5, 0.0),
        (60, 0.5, 1.0),
    ],
)
def test_filters_follow_their_definitions(temperature: float, k: int, top_p: float, min_p: float):
    torch.manual_seed(11)
    logits = torch.randn(5, 53) * 3
    got = target_probs(logits, f32(temperature), i32(k), f32(top_p), f32(min_p))
    want = torch.tensor([plain_law(row, temperature, k, top_p, min_p) for row in logits.double().tolist()])
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-6)


def test_a_nucleus_wider_than_the_first_look_is_found():
    logits = torch.cat([torch.zeros(1, 3000), torch.full((1, 1000), -20.0)], dim=1)
    logits += torch.linspace(0, -1e-3, 4000)
    got = target_probs(logits, f32(1.0), i32(4000), f32(0.9), f32(0.0))
    assert abs(int((got > 0).sum()) - 2700) <= 2
    assert got[0, :2000].min() > 0 and got[0, 3000:].max() == 0


def test_equals_at_the_threshold_all_stay():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    got = target_probs(logits, f32(1.0), i32(2), f32(1.0), f32(0.0))
    assert (got > 0).tolist() == [[True, True, True, False]]


def test_a_tiny_temperature_is_the_argmax():
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4]])
    got = target_probs(logits, f32(1e-5), i32(3), f32(1.0), f32(0.0))
    assert got.tolist() == [[1.0, 0.0, 0.0]]


def test_banned_tokens_have_no_probability():
    logits = torch.tensor([[1.0, -math.inf, 0.5]])
    got = target_probs(logits, f32(1.0), i32(3), f32(0.99), f32(0.0))
    assert got[0, 1] == 0 and got.sum().item() == pytest.approx(1)


def test_draws_follow_the_law():
    probs = torch.tensor([0.05, 0.0, 0.4, 0.25, 0.0, 0.29999, 0.00001, 0.0])
    n = 100_000
    tokens = draw(probs.expand(n, 8), uniform(torch.tensor(1), torch.arange(n), Stream.SAMPLE))
    assert abs(chi_square(tokens.bincount(minlength=8), probs)) < 4


def test_a_draw_never_takes_an_impossible_token():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    edges = torch.tensor([2.0**-24, 0.5 - 2.0**-24, 0.5, 1 - 2.0**-24])
    assert draw(probs.expand(4, 5), edges).tolist() == [1, 1, 3, 3]


def test_a_draw_from_a_broken_law_stays_in_the_vocabulary():
    probs = torch.full((2, 5), math.nan)
    assert draw(probs, torch.tensor([0.1, 0.9])).max() < 5


def test_a_law_of_any_sum_is_drawn_in_proportion():
    probs = torch.tensor([[0.1, 0.3]])
    u = torch.tensor([0.2499, 0.2501])
    assert draw(probs.expand(2, 2), u).tolist() == [0, 1]


def plain_penalties(row, counts, prompt, repetition, presence, frequency):
    out = []
    for v, z in enumerate(row):
        if counts[v] or prompt[v]:
            z = z / repetition if z > 0 else z * repetition
        out.append(z - frequency * counts[v] - presence * (counts[v] > 0))
    return out


def test_penalties_count_the_drafts_before_each_row():
    torch.manual_seed(2)
    T, N = 4, 11
    logits = torch.randn(T, N)
    drafts = torch.tensor([3, 3, 7])
    prompt = torch.zeros(N, dtype=torch.bool)
    prompt[[1, 3]] = True
    counts = torch.zeros(N, dtype=torch.int32)
    counts[[5, 7]] = torch.tensor([2, 1], dtype=torch.int32)
    before = counts.clone()
    got = penalize(logits, drafts, prompt, counts, f32(1.3), f32(0.4), f32(0.25))
    for t in range(T):
        row_counts = counts.tolist()
        for token in drafts[:t].tolist():
            row_counts[token] += 1
        want = plain_penalties(logits[t].tolist(), row_counts, prompt.tolist(), 1.3, 0.4, 0.25)
        torch.testing.assert_close(got[t], torch.tensor(want))
    assert torch.equal(counts, before)


def test_penalties_of_one_row_need_no_drafts():
    logits = torch.tensor([[1.0, -1.0, 2.0]])
    none = torch.empty(0, dtype=torch.int64)
    mask, counts = torch.tensor([True, True, False]), torch.zeros(3, dtype=torch.int32)
    got = penalize(logits, none, mask, counts, f32(2.0), f32(1.0), f32(1.0))
    assert got.tolist() == [[0.5, -2.0, 2.0]]


def test_likeliest_takes_the_lowest_id_of_equals():
    logits = torch.zeros(3, 5003)
    logits[0, [700, 4000]] = 1.0
    logits[1, 5002] = 1.0
    tokens, values = likeliest(logits)
    assert tokens.tolist() == [700, 5002, 0] and values.tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 1234, 4999])
def test_likeliest_shows_that_a_row_is_not_finite(bad: float, at: int):
    logits = torch.randn(2, 5000)
    logits[1, at] = bad
    assert likeliest(logits)[1].isfinite().tolist() == [True, False]


def test_likeliest_shows_that_everything_is_banned():
    assert not likeliest(torch.full((1, 9), -math.inf))[1].isfinite().any()


def test_top_logprobs_are_the_log_softmax():
    torch.manual_seed(4)
    logits = torch.randn(3, 61) * 5
    tokens = torch.tensor([60, 0, 17])
    chosen, ids, values = top_logprobs(logits, tokens)
    want = logits.double().log_softmax(-1).float()
    torch.testing.assert_close(chosen, want[torch.arange(3), tokens])
    assert ids.shape == (3, sampling.MAX_TOP_LOGPROBS)
    torch.testing.assert_close(values, want.sort(-1, descending=True).values[:, :20])
    torch.testing.assert_close(values, want.gather(-1, ids))


def test_top_logprobs_of_a_small_vocabulary_report_all_of_it():
    assert top_logprobs(torch.randn(2, 7), torch.tensor([0, 6]))[1].shape == (2, 7)
