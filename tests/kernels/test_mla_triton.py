"""MLA kernels equal the reference for steps and prompts of any context, and touch no row of the cache but their own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from soloist.errors import UnsupportedError
from soloist.kernels import mla, mla_triton
from soloist.kernels.launch import IS_INTERPRETED, arrival_counters
from soloist.kernels.mla_inputs import MlaRows, MlaWeights
from soloist.kernels.rotary import make_rotary_table
from tests.kernels.device import DEVICE, DTYPE, launch_kernels, nan_in_fresh_memory, rand, split_rows
from tests.kernels.limits import LIMITS, Limit, assert_near

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

H, Kn, P, V, R = 3, 32, 16, 64, 128
# The absorbed query, the softmax's weights and the merged latent are rounded on the way.
LIMIT = LIMITS[torch.float32] if IS_INTERPRETED else Limit(rms=6e-3, worst_row=2e-2)
# The cache's row is rounded once.
ROW = LIMITS[DTYPE]


@pytest.fixture(autouse=True)
def _kernels_in_memory_of_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    launch_kernels(monkeypatch, mla)
    if IS_INTERPRETED:
        # A program takes as long however little it has to do. Some of these find no position at all.
        monkeypatch.setattr(mla_triton, "_NUM_PROGRAMS", 5)
    with nan_in_fresh_memory():
        yield


def make_call(
    T: int, context_len: int, *, heads: int = H, latent: int = R, has_rotary: bool = True, has_gate: bool = True
) -> dict[str, Any]:
    """Arguments of one call by name: projections are slices of one, rows of the cache behind `context_len` are NaN."""
    S = context_len + T + 3
    table = make_rotary_table(P, 100.0, S + 1, device=DEVICE)
    cache = rand(S, latent + P)
    cache[context_len:] = torch.nan
    q, kv, gate = split_rows(T, [heads * (Kn + P), latent + P, heads])
    return {
        "q": q,
        "kv": kv,
        "gate": gate if has_gate else None,
        "kv_norm": torch.rand(latent, device=DEVICE).add(0.5).to(DTYPE),
        "eps": 1e-6,
        "w_kv_b": rand(heads * (Kn + V), latent, scale=latent**-0.5),
        "latent_cache": cache,
        "context_len": torch.tensor(context_len, dtype=torch.int32, device=DEVICE),
        "rotary": table if has_rotary else None,
        "num_heads": heads,
        "v_head_dim": V,
        "scale": (Kn + P) ** -0.5,
    }


def run(call: dict[str, Any], form: Callable[..., torch.Tensor] = mla.mla_attention) -> torch.Tensor:
    rows = MlaRows(call["q"], call["kv"], call["gate"])
    weights = MlaWeights(*(call[name] for name in MlaWeights._fields))
    return form(rows, weights, call["latent_cache"], call["context_len"], call["rotary"])


def check(call: dict[str, Any], limit: Limit = LIMIT) -> torch.Tensor:
    """Compare output and cache with the reference; give the output."""
    before = call["latent_cache"].clone()
    ref = call | {name: call[name].contiguous() for name in ("q", "kv")} | {"latent_cache": before.clone()}
    expected = run(ref, mla.mla_attention_ref)
    out = run(call)
    assert_near(out, expected, limit)
    start = int(call["context_len"])
    rows = slice(start, start + call["q"].shape[0])
    assert_near(call["latent_cache"][rows], ref["latent_cache"][rows], ROW)
    call["latent_cache"][rows] = before[rows]
    assert torch.equal(call["latent_cache"].nan_to_num(7.0), before.nan_to_num(7.0)), "another row was written"
    assert not arrival_counters(DEVICE).any()
    return out


@pytest.mark.parametrize(
    ("T", "context_len"), [(1, 0), (1, 63), (1, 700), (2, 64), (5, 0), (5, 127), (9, 300), (16, 0), (16, 55)]
)
def test_a_step_equals_its_reference(T: int, context_len: int):
    check(make_call(T, context_len))


@pytest.mark.parametrize(("has_rotary", "has_gate"), [(False, False), (True, False), (False, True)])
def test_a_step_without_rotary_or_gate_equals_its_reference(has_rotary: bool, has_gate: bool):
    check(make_call(3, 70, has_rotary=has_rotary, has_gate=has_gate))


@pytest.mark.parametrize(("heads", "latent"), [(1, 64), (7, 256), (16, 16)])
def test_a_step_takes_any_number_of_heads_and_latents(heads: int, latent: int):
    check(make_call(4, 70, heads=heads, latent=latent))


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter would take minutes")
@pytest.mark.parametrize("T", range(1, 17))
@pytest.mark.parametrize("context_len", [0, 5, 1000, 8192, 65536])
def test_a_step_of_the_real_sizes_equals_its_reference(T: int, context_len: int):
    check(make_call(T, context_len, heads=16, latent=512))


@pytest.mark.parametrize("heads", [1, 5])
def test_every_row_of_a_prompt_sees_what_is_before_it(heads: int):
    """Row tiles that end within a token's heads, with and without earlier chunks."""
    check(make_call(17, 0, heads=heads))
    check(make_call(30, 40, heads=heads))
    check(make_call(70, 3, heads=heads, has_rotary=False, has_gate=False))


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter would take minutes")
@pytest.mark.parametrize(("T", "context_len"), [(1000, 0), (2048, 777), (513, 8000)])
def test_a_prompt_of_the_real_sizes_equals_its_reference(T: int, context_len: int):
    check(make_call(T, context_len, heads=16, latent=512))


def test_a_rejected_row_is_overwritten_by_the_next_step():
    call = make_call(4, 30)
    run(call)
    following = make_call(3, 32)
    # Two of the four rows are kept; what the others left must not be seen.
    following["latent_cache"][:34] = call["latent_cache"][:34]
    clean = following["latent_cache"].clone()
    clean[32:] = torch.nan
    assert torch.equal(run(following), run(following | {"latent_cache": clean}))


def test_large_scores_do_not_overflow():
    """The running maximum moves from split to split and from block to block."""
    call = make_call(2, 330)
    call["q"].mul_(30)
    # Rounded in bf16, a score of 30 is off by several per cent of its weight.
    check(call, LIMIT if IS_INTERPRETED else Limit(rms=0.1, worst_row=0.3))


@pytest.mark.parametrize("T", [1, 9])
def test_a_step_gives_the_same_bits_every_time(T: int):
    call = make_call(T, 300)
    first = run(call)
    for _ in range(1 if IS_INTERPRETED else 20):
        assert torch.equal(run(call), first)


def test_a_rank_without_a_kernel_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"rank 96 with 32 \+ 16 keys and 64 values a head has no GPU kernel"):
        run(make_call(2, 5, latent=96))
