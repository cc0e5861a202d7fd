"""A step's router and experts in CUDA C++: choice and sums are the reference's, and rows do not know of each other."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import moe, moe_step_cuda
from soloist.kernels.launch import IS_INTERPRETED, arrival_counters
from soloist.kernels.moe import RouterSettings
from tests.kernels import cuda_on_cpu
from tests.kernels.device import DEVICE, launch_kernels, nan_in_fresh_memory, rand
from tests.kernels.limits import Limit, assert_near

BF16 = torch.bfloat16
EPS = 1e-6
GROUPED = RouterSettings(num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=2.5)
PLAIN = RouterSettings(num_experts_per_tok=5, n_group=1, topk_group=1, routed_scaling_factor=2.446)
FLASH = RouterSettings(num_experts_per_tok=8, n_group=8, topk_group=4, routed_scaling_factor=2.5)
# The output's own rounding, and an activation that is now and then rounded the other way.
LIMIT = Limit(rms=4e-3, worst_row=1e-2)


@pytest.fixture(autouse=True)
def _on_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if IS_INTERPRETED:
        monkeypatch.setattr(moe_step_cuda, "load_kernel", cuda_on_cpu.load_kernel)
        monkeypatch.setattr(moe_step_cuda, "launch", cuda_on_cpu.launch)
    with nan_in_fresh_memory():
        yield


def i32(x: int | None) -> torch.Tensor | None:
    return None if x is None else torch.tensor(x, dtype=torch.int32, device=DEVICE)


def make_call(
    T: int,
    *,
    D: int = 288,
    E: int = 32,
    F: int = 96,
    num_shared: int = 1,
    settings: RouterSettings = GROUPED,
    scale: float = 1.0,
) -> dict[str, Any]:
    """Arguments of `moe` by name; `scale` makes the experts' activations large."""
    Fs = num_shared * F
    return {
        "x": rand(T, D, dtype=BF16),
        "norm_weight": torch.rand(D, device=DEVICE).add(0.5).to(BF16),
        "eps": EPS,
        "router_weight": rand(E, D, scale=D**-0.5, dtype=BF16),
        "expert_bias": rand(E, scale=0.2, dtype=torch.float32),
        "gate_up": rand(E, 2 * F, D, scale=D**-0.5 * scale, dtype=BF16),
        "down": rand(E, D, F, scale=F**-0.5, dtype=BF16),
        "shared_gate_up": rand(2 * Fs, D, scale=D**-0.5 * scale, dtype=BF16) if Fs else None,
        "shared_down": rand(D, Fs, scale=Fs**-0.5, dtype=BF16) if Fs else None,
        "settings": settings,
    }


def logits_of(call: dict[str, Any]) -> torch.Tensor:
    h = moe.rms_norm_ref(call["x"], call["norm_weight"], EPS)
    return h.float() @ call["router_weight"].float().T


def choose(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Give each row's experts as the reference chooses them, and by logits rounded as a step's router rounds them."""
    h = (call["x"].float() * call["norm_weight"].float()).to(BF16).float()
    scale = (call["x"].float().square().mean(-1, keepdim=True) + EPS).rsqrt()
    all_logits = (logits_of(call), h @ call["router_weight"].float().T * scale)
    one, other = (moe.route_ref(logits, call["expert_bias"], call["settings"])[0] for logits in all_logits)
    return one.sort().values, other.sort().values


def unused(call: dict[str, Any], rows: slice = slice(None)) -> torch.Tensor:
    """(E) bool: the experts that none of the rows can choose."""
    is_unused = torch.ones(call["down"].shape[0], dtype=torch.bool, device=DEVICE)
    for chosen in choose(call):
        is_unused[chosen[rows].flatten()] = False
    return is_unused


def run(
    call: dict[str, Any],
    *,
    logits: torch.Tensor | None = None,
    limit: float | None = None,
    shared_limit: float | None = None,
    width: int | None = None,
    adds_residual: bool = True,
) -> torch.Tensor:
    """Launch the experts with the router, or behind its product `logits`."""
    router = (call["router_weight"], None) if logits is None else (None, logits)
    layer = (call["x"], call["norm_weight"], EPS, *router, call["expert_bias"])
    weights = (call[name] for name in ("gate_up", "down", "shared_gate_up", "shared_down"))
    options = {"limit": limit, "shared_limit": shared_limit, "width": i32(width), "adds_residual": adds_residual}
    out = moe_step_cuda.run_experts(*layer, *weights, call["settings"], **options)
    assert not arrival_counters(DEVICE).any()
    return out


def check(call: dict[str, Any], **options: Any) -> torch.Tensor:
    x = call["x"].clone()
    out = run(call, **options)
    assert torch.equal(call["x"], x)
    limits = {name: options[name] for name in ("limit", "shared_limit") if name in options}
    expected = moe.moe_ref(**call, **limits, width=i32(options.get("width")))
    if options.get("logits") is None:
        # At a near-tie a rounding decides.
        one, other = choose(call)
        is_clear = (one == other).all(-1)
        assert is_clear.any()
        out, expected, x = out[is_clear], expected[is_clear], x[is_clear]
    assert_near(out - x, expected.float() - x, Limit(rms=1e-2, worst_row=3e-2))
    assert_near(out, expected, LIMIT)


@pytest.mark.parametrize("num_shared", [0, 1, 2])
@pytest.mark.parametrize("T", [1, 2, 16] if IS_INTERPRETED else range(1, 17))
def test_a_step_equals_its_reference(T: int, num_shared: int):
    check(make_call(T, num_shared=num_shared))


@pytest.mark.parametrize("T", [1, 2, 16] if IS_INTERPRETED else range(1, 17))
def test_a_step_behind_the_routers_product_equals_its_reference(T: int):
    call = make_call(T)
    check(call, logits=logits_of(call))


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize(
    ("E", "settings", "num_programs"), [(8, GROUPED, 10), (16, GROUPED, 3), (40, PLAIN, 4)], ids=["8", "16", "40"]
)
def test_more_programs_than_experts_and_the_other_way_round(
    E: int, settings: RouterSettings, num_programs: int, T: int, monkeypatch: pytest.MonkeyPatch
):
    """Experts in other numbers than 32 too, groups that leave lanes empty, and nothing behind the logits' end."""
    logits = torch.full((T + 1, E), torch.nan, device=DEVICE)
    launch = moe_step_cuda.launch

    def launch_on_logits(*arguments: Any, **options: Any) -> None:
        # Where there is room behind them.
        (place,) = (i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor) and x.shape == (T, E))
        launch(*arguments[:place], logits, *arguments[place + 1 :], **options)

    monkeypatch.setattr(moe_step_cuda, "launch", launch_on_logits)
    if IS_INTERPRETED:
        monkeypatch.setattr(moe_step_cuda, "_num_programs", lambda _: num_programs)
        load_kernel = moe_step_cuda.load_kernel

        def load_side_by_side(source: str, name: str, definitions: tuple[tuple[str, str], ...], device: Any) -> Any:
            return load_kernel(source, name, (*definitions, ("CLUSTER", str(num_programs))), device)

        monkeypatch.setattr(moe_step_cuda, "load_kernel", load_side_by_side)
    call = make_call(T, E=E, D=96, F=32, settings=settings)
    for _ in range(2):
        check(call)
        assert_near(logits[:T], logits_of(call), Limit(rms=1e-2, worst_row=1e-2))
        assert logits[T].isnan().all()
        logits.fill_(torch.nan)


@pytest.mark.parametrize(
    ("settings", "E", "D", "F"), [(PLAIN, 64, 96, 512), (FLASH, 512, 32, 32)], ids=["no groups", "many experts"]
)
@pytest.mark.parametrize("T", [1, 7])
def test_other_sizes_and_routers_equal_the_reference(T: int, settings: RouterSettings, E: int, D: int, F: int):
    check(make_call(T, settings=settings, E=E, D=D, F=F))


@pytest.mark.parametrize(("limit", "shared_limit"), [(None, 0.5), (0.4, 0.5), (0.4, None)])
def test_the_clamps_act_behind_the_silu_with_their_own_limits(limit: float | None, shared_limit: float | None):
    call = make_call(4, scale=3.0)
    check(call, limit=limit, shared_limit=shared_limit)
    # The limits bind.
    assert (run(call) - run(call, limit=limit, shared_limit=shared_limit)).abs().max() > 0.1


def test_the_residual_stream_can_be_left_out():
    call = make_call(3)
    expected = moe.moe_ref(**call, adds_residual=False, width=i32(2))
    out = run(call, adds_residual=False, width=2)
    assert_near(out, expected, Limit(rms=1e-2, worst_row=3e-2))
    assert (out[2] == 0).all()


@pytest.mark.parametrize("width", [0, 2, 5, 9])
def test_rows_past_the_width_come_back_unchanged_and_read_no_expert(width: int):
    T = 5
    call = make_call(T)
    call["x"][width:] *= 100
    is_unused = unused(call, slice(width))
    call["gate_up"][is_unused], call["down"][is_unused] = torch.nan, torch.nan
    if width:
        check(call, width=min(width, T))
    out = run(call, width=min(width, T))
    assert torch.equal(out[width:], call["x"][width:])


def test_a_row_has_the_same_bits_in_any_company_and_at_any_width():
    call = make_call(11)
    together = run(call)
    for rows in (slice(0, 1), slice(9, 10), slice(2, 5)):
        assert torch.equal(run(call | {"x": call["x"][rows].clone()}), together[rows])


@pytest.mark.parametrize("T", [1, 16])
@pytest.mark.parametrize(("E", "settings"), [(32, GROUPED), (64, PLAIN), (512, FLASH)], ids=["32", "64", "512"])
def test_among_equals_the_lowest_group_and_the_lowest_expert_win(E: int, settings: RouterSettings, T: int):
    """Few distinct values: within a lane, between lanes and between groups."""
    for high in (1, 2, 3):
        call = make_call(T, E=E, settings=settings, D=32, F=32)
        call["expert_bias"].zero_()
        # Row t reads input t of the router alone.
        call["x"] = torch.eye(T, 32, device=DEVICE, dtype=BF16)
        call["norm_weight"].fill_(1)
        call["router_weight"] = torch.randint(0, high, (E, 32), device=DEVICE).to(BF16)
        # An expert that was not chosen answers with NaN.
        call["gate_up"][unused(call)] = torch.nan
        assert torch.isfinite(run(call)).all()
        assert torch.isfinite(run(call, logits=logits_of(call))).all()


def test_a_losing_group_stays_out_when_every_kept_score_is_negative():
    call = make_call(9)
    call["expert_bias"] = torch.full((32,), -3.0, device=DEVICE)
    call["expert_bias"][8:24] = -2.0
    call["gate_up"][:8], call["gate_up"][24:] = torch.nan, torch.nan
    check(call)


def test_the_bias_selects_and_does_not_weigh():
    call = make_call(3)
    call["expert_bias"].zero_()
    call["expert_bias"][2:5] = 10.0
    call["gate_up"][:2], call["gate_up"][5:] = torch.nan, torch.nan
    check(call)


def test_vanishing_scores_add_nothing_and_no_nan():
    call = make_call(4, num_shared=0)
    logits = torch.full((4, 32), -200.0, device=DEVICE)
    assert torch.equal(run(call, logits=logits), call["x"])


def test_a_nan_is_not_clamped_away():
    call = make_call(2)
    call["gate_up"].fill_(torch.nan)
    assert torch.isnan(run(call, limit=0.5, shared_limit=0.5)).all()


@pytest.mark.parametrize(("T", "width"), [(1, None), (3, 2), (16, None)])
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "in front"])
def test_the_launcher_joins_router_and_experts(
    T: int, width: int | None, is_inside: bool, monkeypatch: pytest.MonkeyPatch
):
    launch_kernels(monkeypatch, moe)
    monkeypatch.setattr(moe_step_cuda, "ROUTER_INSIDE", is_inside)
    if IS_INTERPRETED:
        # The interpreter's products are fp32.
        monkeypatch.setattr(moe, "norm_linear", lambda *_, **__: logits_of(call))
    call = make_call(T)
    expected = moe.moe_ref(**call, limit=0.5, shared_limit=0.6, width=i32(width))
    assert_near(moe.moe(**call, limit=0.5, shared_limit=0.6, width=i32(width)), expected, LIMIT)


@pytest.mark.skipif(IS_INTERPRETED, reason="a CPU would take minutes")
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "in front"])
@pytest.mark.parametrize("T", [1, 4, 9, 16])
def test_the_real_sizes_equal_the_reference_every_time(T: int, is_inside: bool):
    call = make_call(T, D=2560, E=512, F=384, settings=FLASH)
    logits = None if is_inside else logits_of(call)
    check(call, limit=4.0, shared_limit=5.0, logits=logits)
    first = run(call, limit=4.0, shared_limit=5.0, logits=logits)
    for _ in range(20):
        assert torch.equal(run(call, limit=4.0, shared_limit=5.0, logits=logits), first)
