"""MoE: the router against an fp64 one written with Python's sort, the experts token by token in fp64."""

from typing import Any

import pytest
import torch

from soloist.errors import UnsupportedError
from soloist.kernels.moe import RouterSettings, moe, route_ref

D, E, F, Fs = 24, 16, 10, 14
GROUPED = RouterSettings(num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=2.5)
PLAIN = RouterSettings(num_experts_per_tok=3, n_group=1, topk_group=1, routed_scaling_factor=2.446)


def route_fp64(logits: torch.Tensor, bias: torch.Tensor, settings: RouterSettings) -> list[dict[int, float]]:
    """Each token's experts and weights. Sorting by (-score, place) puts the lowest place first among equals."""
    # Selection compares fp32 scores: that is where a tie is a tie.
    biased = (torch.sigmoid(logits) + bias).tolist()
    scores = torch.sigmoid(logits.double()).tolist()
    size = logits.shape[1] // settings.n_group
    chosen = []
    for r, s in zip(biased, scores, strict=True):
        groups = [range(i, i + size) for i in range(0, len(r), size)]
        best_two = [sum(sorted((r[e] for e in group), reverse=True)[:2]) for group in groups]
        kept = sorted(range(settings.n_group), key=lambda i: (-best_two[i], i))[: settings.topk_group]
        experts = sorted((e for i in kept for e in groups[i]), key=lambda e: (-r[e], e))[: settings.num_experts_per_tok]
        total = sum(s[e] for e in experts) + 1e-20
        chosen.append({e: s[e] / total * settings.routed_scaling_factor for e in experts})
    return chosen


def assert_same_routing(logits: torch.Tensor, bias: torch.Tensor, settings: RouterSettings) -> None:
    experts, weights = route_ref(logits, bias, settings)
    for t, expected in enumerate(route_fp64(logits, bias, settings)):
        assert experts[t].tolist() == list(expected), t
        assert weights[t].tolist() == pytest.approx(list(expected.values()), rel=1e-6), t
        assert weights[t].sum().item() == pytest.approx(settings.routed_scaling_factor, rel=1e-6)


def make_call(
    T: int, *, has_shared: bool = True, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> dict[str, Any]:
    """Arguments of one call by name; `scale` makes the experts' activations large."""
    draw = lambda *shape: (torch.randn(*shape) * shape[-1] ** -0.5).to(dtype)
    return {
        "x": torch.randn(T, D).to(dtype),
        "norm_weight": (torch.rand(D) + 0.5).to(dtype),
        "eps": 1e-6,
        "router_weight": draw(E, D),
        "expert_bias": torch.randn(E) * 0.2,
        "gate_up": draw(E, 2 * F, D) * scale,
        "down": draw(E, D, F),
        "shared_gate_up": draw(2 * Fs, D) * scale if has_shared else None,
        "shared_down": draw(D, Fs) if has_shared else None,
        "settings": GROUPED,
    }


def expert_fp64(h: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, limit: float | None, dtype: torch.dtype):
    """One expert on one row; h and the activation are rounded, as declared."""
    gate, up = (gate_up.double() @ h).chunk(2)
    a = gate * torch.sigmoid(gate)
    if limit is not None:
        a, up = torch.minimum(a, torch.tensor(limit)), up.clamp(-limit, limit)
    return down.double() @ (a * up).to(dtype).double()


def moe_fp64(call: dict[str, Any]) -> torch.Tensor:
    """The equations token by token, in fp64."""
    x, dtype = call["x"].double(), call["x"].dtype
    h = x / (x.square().mean(-1, keepdim=True) + call["eps"]).sqrt() * call["norm_weight"].double()
    h = h.to(dtype).double()
    routing = route_fp64((h @ call["router_weight"].double().T).float(), call["expert_bias"], call["settings"])
    out = torch.full_like(x, torch.nan)
    for t, chosen in enumerate(routing):
        out[t] = x[t]
        for e, weight in chosen.items():
            out[t] += weight * expert_fp64(h[t], call["gate_up"][e], call["down"][e], call.get("limit"), dtype)
        if call["shared_down"] is not None:
            shared = call["shared_gate_up"], call["shared_down"]
            out[t] += expert_fp64(h[t], *shared, call.get("shared_limit"), dtype)
    return out


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative RMS error."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


@pytest.mark.parametrize("settings", [GROUPED, PLAIN], ids=["groups", "no groups"])
def test_the_router_equals_one_in_fp64(settings: RouterSettings) -> None:
    assert_same_routing(torch.randn(200, E) * 2, torch.randn(E) * 0.3, settings)


@pytest.mark.parametrize("settings", [GROUPED, PLAIN], ids=["groups", "no groups"])
def test_among_equals_the_lowest_group_and_expert_win(settings: RouterSettings) -> None:
    # Few distinct values: most groups and experts tie.
    assert_same_routing(torch.randint(0, 3, (200, E)).float(), torch.zeros(E), settings)
    experts, _ = route_ref(torch.zeros(1, E), torch.zeros(E), settings)
    assert experts.tolist() == [[0, 1, 2]]


def test_the_lowest_expert_wins_among_five_hundred_equals() -> None:
    """As wide as flash: a sort of this size takes another path than one of sixteen."""
    settings = RouterSettings(num_experts_per_tok=8, n_group=8, topk_group=4, routed_scaling_factor=2.5)
    assert_same_routing(torch.randint(0, 4, (5, 512)).float(), torch.zeros(512), settings)


def test_a_losing_group_stays_out_when_every_kept_score_is_negative() -> None:
    """Masked with 0 instead of -inf, the losing groups would win."""
    bias = torch.full((E,), -3.0)
    bias[4:8] = -2.0
    settings = RouterSettings(num_experts_per_tok=4, n_group=4, topk_group=1, routed_scaling_factor=1.0)
    logits = torch.randn(50, E)
    experts, weights = route_ref(logits, bias, settings)
    assert ((experts >= 4) & (experts < 8)).all()
    assert (weights > 0).all()
    assert_same_routing(logits, bias, settings)


def test_the_bias_selects_and_does_not_weigh() -> None:
    logits, bias = torch.zeros(1, E), torch.zeros(E)
    logits[0, 9], bias[2:5] = 4.0, 10.0
    experts, weights = route_ref(logits, bias, PLAIN)
    assert experts.tolist() == [[2, 3, 4]]
    assert weights[0].tolist() == pytest.approx([2.446 / 3] * 3)


def test_vanishing_scores_give_no_weight_and_no_nan() -> None:
    _, weights = route_ref(torch.full((2, E), -200.0), torch.zeros(E), GROUPED)
    assert torch.equal(weights, torch.zeros(2, 3))


def test_a_groups_score_is_the_sum_of_its_two_largest() -> None:
    # Group 0 holds the single best expert, group 1 the best pair.
    settings = RouterSettings(num_experts_per_tok=2, n_group=2, topk_group=1, routed_scaling_factor=1.0)
    bias = torch.tensor([5.0, 0.0, 0.0, 3.0, 3.0, 0.0])
    assert route_ref(torch.zeros(1, 6), bias, settings)[0].tolist() == [[3, 4]]


@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize("T", range(1, 17))
def test_any_width_equals_the_equations_in_fp64(T: int, has_shared: bool) -> None:
    call = make_call(T, has_shared=has_shared)
    x = call["x"].clone()
    y = moe(**call)
    assert error(y - x, moe_fp64(call) - x) < 1e-6
    assert torch.equal(call["x"], x)


@pytest.mark.parametrize(("limit", "shared_limit"), [(None, 5.0), (4.0, 5.0), (4.0, 7.0)], ids=["34", "35-39", "40-41"])
def test_the_clamps_of_flash_act_behind_the_silu_with_their_own_limits(
    limit: float | None, shared_limit: float
) -> None:
    call = make_call(6, scale=20.0) | {"limit": limit, "shared_limit": shared_limit}
    expected = moe_fp64(call)
    assert error(moe(**call), expected) < 1e-6
    # The activations are large enough for each limit to matter, and for a clamp before the SiLU to show.
    for other in ({"limit": 7.0}, {"shared_limit": None}, {"limit": 5.0, "shared_limit": 4.0}):
        assert error(moe(**call | other), expected) > 1e-3


def test_the_clamp_is_one_sided_on_the_gate_and_two_sided_on_the_product() -> None:
    """One expert of one channel, by hand: silu(8) = 7.997 is cut to 4, -9 to -4; silu(-8) = -0.0027 is kept."""
    settings = RouterSettings(num_experts_per_tok=1, n_group=1, topk_group=1, routed_scaling_factor=1.0)
    weights = {
        "norm_weight": torch.ones(1),
        "eps": 0.0,
        "router_weight": torch.zeros(1, 1),
        "expert_bias": torch.zeros(1),
    }
    shared = {"shared_gate_up": None, "shared_down": None, "settings": settings, "limit": 4.0}
    for gate, up, expected in (
        (8.0, -9.0, -16.0),
        (-8.0, 9.0, 4.0 * -8.0 / (1 + torch.e**8)),
        (1.0, 2.0, 2 / (1 + torch.e**-1)),
    ):
        maps = {"gate_up": torch.tensor([[[gate], [up]]]), "down": torch.ones(1, 1, 1)}
        y = moe(torch.ones(1, 1), **weights, **maps, **shared)
        assert y.item() - 1.0 == pytest.approx(expected, abs=1e-6)


def test_rows_past_the_width_come_back_unchanged_and_touch_no_expert() -> None:
    T = 7
    call = make_call(T)
    for num_rows in range(T + 3):
        kept = min(num_rows, T)
        expected = moe(**call | {"x": call["x"][:kept]}) if kept else call["x"][:0]
        # Experts that only rows past the width would choose hold NaN; those rows route to others than the kept ones.
        x = call["x"].clone()
        x[kept:] = 1e4 * torch.randn(T - kept, D)
        h = torch.nn.functional.rms_norm(x[:kept], (D,), call["norm_weight"], call["eps"])
        used = route_ref(h @ call["router_weight"].T, call["expert_bias"], GROUPED)[0].unique()
        gate_up, down = torch.full_like(call["gate_up"], torch.nan), torch.full_like(call["down"], torch.nan)
        gate_up[used], down[used] = call["gate_up"][used], call["down"][used]
        y = moe(**call | {"x": x, "gate_up": gate_up, "down": down, "width": torch.tensor(num_rows, dtype=torch.int32)})
        assert error(y[:kept], expected) < 1e-6 or not kept
        assert torch.equal(y[kept:], x[kept:])
        assert y.data_ptr() != x.data_ptr()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    call = make_call(9)
    y = moe(**call)
    rows = [moe(**call | {"x": call["x"][t : t + 1]}) for t in range(9)]
    assert error(torch.cat(rows), y) < 1e-6
    assert torch.equal(moe(**call), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_only_the_declared_places_are_rounded(dtype: torch.dtype) -> None:
    call = make_call(8, dtype=dtype)
    y = moe(**call)
    assert y.dtype is dtype
    assert (y != moe_fp64(call).to(dtype)).float().mean() < 0.02
    # A router kept in fp32 next to half precision experts is allowed, and is used as it is.
    call["router_weight"] = call["router_weight"].float() + torch.randn(E, D) * 1e-3
    assert (moe(**call) != moe_fp64(call).to(dtype)).float().mean() < 0.02


def test_impossible_routers_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="topk_group is 5"):
        RouterSettings(num_experts_per_tok=2, n_group=4, topk_group=5, routed_scaling_factor=1.0)
    with pytest.raises(UnsupportedError, match="num_experts_per_tok is 0"):
        RouterSettings(num_experts_per_tok=0, n_group=4, topk_group=2, routed_scaling_factor=1.0)


def test_shapes_that_disagree_are_refused() -> None:
    call = make_call(2)
    with pytest.raises(AssertionError, match="gate_up: axis"):
        moe(**call | {"gate_up": call["gate_up"][:, 1:]})
    with pytest.raises(AssertionError, match="expert_bias: dtype"):
        moe(**call | {"expert_bias": call["expert_bias"].bfloat16()})
    with pytest.raises(AssertionError, match="both maps"):
        moe(**call | {"shared_down": None})
    with pytest.raises(AssertionError, match="not 0"):
        moe(**call | {"limit": 0.0})
    odd = RouterSettings(num_experts_per_tok=2, n_group=3, topk_group=2, routed_scaling_factor=1.0)
    with pytest.raises(AssertionError, match="16 experts in 3 groups"):
        moe(**call | {"settings": odd})
