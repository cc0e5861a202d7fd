"""Grouped products of a prompt's experts: every pair once, in blocks of one expert, as one expert at a time."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from soloist.errors import UnsupportedError
from soloist.kernels import moe, moe_grouped_triton
from soloist.kernels.launch import IS_INTERPRETED, fused_experts
from soloist.kernels.moe import RouterSettings
from tests.kernels.device import DEVICE, DTYPE, launch_kernels, nan_in_fresh_memory, rand
from tests.kernels.limits import LIMITS, Limit, assert_near

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

LIMIT = LIMITS[torch.float32] if IS_INTERPRETED else Limit(rms=1e-2, worst_row=3e-2)


@pytest.fixture(autouse=True)
def _memory_of_nan() -> Iterator[None]:
    with nan_in_fresh_memory():
        yield


def check_grouped(experts: torch.Tensor, E: int, *, limit: float | None) -> None:
    """Grouped products against one expert at a time."""
    T, A = experts.shape
    D, F = 64, 48
    h, weights = rand(T, D), torch.rand(T, A, device=DEVICE)
    gate_up, down = rand(E, 2 * F, D, scale=2 * D**-0.5), rand(E, F, D, scale=F**-0.5).mT
    unused = sorted(set(range(E)) - set(experts.flatten().tolist()))
    gate_up[unused], down[unused] = torch.nan, torch.nan
    expected = torch.zeros(T, D, device=DEVICE)
    for a in range(A):
        for t in range(T):
            e = experts[t, a]
            y = moe._feed_forward(h[t : t + 1].float(), gate_up[e].float(), down[e].float(), limit)
            expected[t] += weights[t, a] * y[0]
    out = moe_grouped_triton.run_experts(h, experts, weights, gate_up, down, limit)
    assert out.dtype is DTYPE
    assert_near(out.float(), expected, LIMIT)
    residual, shared = rand(T, D), torch.randn(T, D, device=DEVICE)
    out = moe_grouped_triton.run_experts(h, experts, weights, gate_up, down, limit, residual=residual, shared=shared)
    assert_near(out.float(), residual.float() + expected + shared, LIMIT)


def test_grouped_products_take_full_blocks_and_what_is_left():
    """Blocks of exactly 64, one of 65, an expert with one row and one without any."""
    experts = torch.tensor([[0, 2]] * 64 + [[4, 2]], device=DEVICE)
    check_grouped(experts, 5, limit=None)


def test_grouped_products_of_random_choices_equal_the_reference():
    experts = torch.stack([torch.randperm(6)[:3] for _ in range(23)]).to(DEVICE)
    check_grouped(experts, 6, limit=0.7)


def test_down_maps_that_lie_otherwise_are_refused():
    h, experts, weights = rand(3, 64), torch.zeros(3, 1, dtype=torch.int64, device=DEVICE), torch.ones(3, 1)
    with pytest.raises(AssertionError, match=r"down: strides .* inputs as rows"):
        moe_grouped_triton.run_experts(h, experts, weights, rand(2, 96, 64), rand(2, 64, 48), None)


@pytest.mark.parametrize(("D", "F"), [(64, 40), (72, 48)])
def test_sizes_that_tensor_cores_cannot_take_are_refused_by_number(D: int, F: int):
    experts, weights = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE), torch.ones(3, 1, device=DEVICE)
    with pytest.raises(UnsupportedError, match=f"of size {F} on a hidden size of {D} .* multiples of 16"):
        moe_grouped_triton.run_experts(rand(3, D), experts, weights, rand(2, 2 * F, D), rand(2, F, D).mT, None)


@pytest.mark.parametrize(("num_pairs", "E"), [(1, 1), (64, 3), (300, 7), (1000, 64)])
def test_blocks_hold_every_pair_once_and_one_expert_each(num_pairs: int, E: int):
    experts = (torch.rand(num_pairs, device=DEVICE) ** 3 * E).long()
    # Some have none.
    experts[::5] = E
    order, block_expert, start, end = moe_grouped_triton._blocks(experts, E)
    assert sorted(order.tolist()) == list(range(num_pairs))
    held: list[int] = []
    for expert, first, last in zip(block_expert.tolist(), start.tolist(), end.tolist(), strict=True):
        assert 0 <= expert < E and 0 <= last - first <= moe_grouped_triton.BLOCK_ROWS
        assert (experts[order[first:last]] == expert).all()
        held += range(first, last)
    assert sorted(held) == list(range(int((experts < E).sum())))


def make_layer(T: int, *, E: int = 4) -> dict[str, Any]:
    """Arguments of `moe` by name."""
    D, F, Fs = 64, 32, 64
    return {
        "x": rand(T, D),
        "norm_weight": torch.rand(D, device=DEVICE).add(0.5).to(DTYPE),
        "eps": 1e-6,
        "router_weight": rand(E, D, scale=D**-0.5),
        "expert_bias": rand(E, scale=0.2, dtype=torch.float32),
        "gate_up": rand(E, 2 * F, D, scale=D**-0.5),
        "down": rand(E, F, D, scale=F**-0.5).mT,
        "shared_gate_up": rand(2 * Fs, D, scale=D**-0.5),
        "shared_down": rand(Fs, D, scale=Fs**-0.5).mT,
        "settings": RouterSettings(num_experts_per_tok=2, n_group=2, topk_group=1, routed_scaling_factor=2.5),
    }


def test_the_launcher_takes_grouped_products_for_a_prompt(monkeypatch: pytest.MonkeyPatch):
    call = make_layer(18)
    expected = moe.moe_ref(**call, limit=0.7, shared_limit=0.6)
    launch_kernels(monkeypatch, moe)
    assert_near(moe.moe(**call, limit=0.7, shared_limit=0.6), expected, LIMIT)


@pytest.mark.parametrize("width", [0, 1, 5, 7])
def test_rows_behind_the_width_come_back_unchanged_and_touch_no_expert(monkeypatch: pytest.MonkeyPatch, width: int):
    call = make_layer(7, E=16)
    options = {"limit": 0.7, "shared_limit": 0.6, "width": torch.tensor(width, dtype=torch.int32, device=DEVICE)}
    h = moe.rms_norm_ref(call["x"][:width], call["norm_weight"], call["eps"]).float()
    experts, _ = moe.route_ref(h @ call["router_weight"].float().T, call["expert_bias"], call["settings"])
    for e in set(range(16)) - set(experts.flatten().tolist()):
        call["gate_up"][e], call["down"][e] = torch.nan, torch.nan
    # Of padding anything may be left.
    if width < 7:
        call["x"][-1] = torch.inf
    for adds_residual in (True, False):
        expected = moe.moe_ref(**call, **options, adds_residual=adds_residual)
        with monkeypatch.context() as patch, fused_experts(False):
            launch_kernels(patch, moe)
            out = moe.moe(**call, **options, adds_residual=adds_residual)
        if width:
            assert_near(out[:width], expected[:width], LIMIT)
        assert torch.equal(out[width:], expected[width:])
        assert torch.equal(out[width:], call["x"][width:] if adds_residual else torch.zeros_like(out[width:]))
