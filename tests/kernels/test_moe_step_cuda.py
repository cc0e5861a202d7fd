"""A step's experts in CUDA C++: the choice and the sums are the reference's, and company changes a row by rounding."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from soloist.errors import UnsupportedError
from soloist.kernels import moe, moe_step_cuda
from soloist.kernels.launch import IS_INTERPRETED
from soloist.kernels.linear import norm_linear
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


# Of a launch on a CPU, side by side.
NUM_PROGRAMS = 3


@pytest.fixture(autouse=True)
def _on_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if IS_INTERPRETED:

        def load_kernel(source: str, name: str, definitions: tuple[tuple[str, str], ...], device: torch.device) -> Any:
            side_by_side = (("CLUSTER", dict(definitions)["NUM_PROGRAMS"]),)
            return cuda_on_cpu.load_kernel(source, name, definitions + side_by_side, device)

        monkeypatch.setattr(moe_step_cuda, "load_kernel", load_kernel)
        monkeypatch.setattr(moe_step_cuda, "launch", cuda_on_cpu.launch)
        monkeypatch.setattr(moe_step_cuda, "_num_programs", lambda _: NUM_PROGRAMS)
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
        "down": rand(E, F, D, scale=F**-0.5, dtype=BF16).mT,
        "shared_gate_up": rand(2 * Fs, D, scale=D**-0.5 * scale, dtype=BF16) if Fs else None,
        "shared_down": rand(Fs, D, scale=Fs**-0.5, dtype=BF16).mT if Fs else None,
        "settings": settings,
    }


def logits_of(call: dict[str, Any]) -> torch.Tensor:
    h = moe.rms_norm_ref(call["x"], call["norm_weight"], EPS)
    return h.float() @ call["router_weight"].float().T


def logits_of_a_launch(call: dict[str, Any]) -> torch.Tensor:
    """Round x * norm_weight instead of the normalised row, as the router's launch of more tokens does."""
    x = call["x"].float()
    h = (x * call["norm_weight"].float()).to(BF16).float()
    return h @ call["router_weight"].float().T * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def run(
    call: dict[str, Any],
    *,
    logits: torch.Tensor | None = None,
    has_router: bool = False,
    limit: float | None = None,
    shared_limit: float | None = None,
    width: int | None = None,
    adds_residual: bool = True,
) -> torch.Tensor:
    """Launch the experts behind the router's product, the reference's if none is given; or with their own."""
    logits = logits_of(call) if logits is None and not has_router else logits
    options = {"limit": limit, "shared_limit": shared_limit, "width": i32(width), "adds_residual": adds_residual}
    arguments = {"router" if name == "settings" else name: value for name, value in call.items()}
    return moe_step_cuda.run_experts(**arguments, **options, logits=logits)


def check(call: dict[str, Any], **options: Any) -> torch.Tensor:
    x = call["x"].clone()
    out = run(call, **options)
    assert torch.equal(call["x"], x)
    limits = {name: options[name] for name in ("limit", "shared_limit") if name in options}
    expected = moe.moe_ref(**call, **limits, width=i32(options.get("width")))
    assert_near(out - x, expected.float() - x, Limit(rms=1e-2, worst_row=3e-2))
    assert_near(out, expected, LIMIT)
    return out


@pytest.mark.parametrize("num_shared", [0, 1, 2])
@pytest.mark.parametrize("T", [1, 2, 8, 9, 16] if IS_INTERPRETED else range(1, 17))
def test_a_step_equals_its_reference(T: int, num_shared: int):
    check(make_call(T, num_shared=num_shared))


@pytest.mark.parametrize(
    ("settings", "E", "D", "F"),
    [(PLAIN, 64, 96, 512), (FLASH, 512, 32, 32), (GROUPED, 32, 2560, 12)],
    ids=["no groups", "many experts", "an odd width"],
)
@pytest.mark.parametrize("T", [1, 7])
def test_other_sizes_and_routers_equal_the_reference(T: int, settings: RouterSettings, E: int, D: int, F: int):
    check(make_call(T, settings=settings, E=E, D=D, F=F))


def test_a_group_may_be_one_expert():
    settings = RouterSettings(num_experts_per_tok=2, n_group=32, topk_group=4, routed_scaling_factor=2.5)
    check(make_call(3, E=32, D=32, F=32, settings=settings))


def can_run(call: dict[str, Any]) -> bool:
    return moe_step_cuda.can_run(call["x"], call["down"], call["shared_down"], call["settings"])


@pytest.mark.parametrize(
    "sizes",
    [
        {"D": 48},
        {"D": 4096},
        {"E": 40},
        {"E": 1056, "F": 8, "D": 32},
        {"settings": replace(PLAIN, num_experts_per_tok=32), "E": 1024, "F": 8, "D": 32},
    ],
    ids=str,
)
def test_a_step_of_other_sizes_runs_as_a_prompt(sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    call = make_call(9, **sizes)
    assert not can_run(call)
    assert can_run(make_call(9, D=2560, E=512, F=8, settings=FLASH))
    launch_kernels(monkeypatch, moe)
    monkeypatch.setattr(moe, "_moe_prompt", lambda x, *_, **__: "as a prompt")
    assert moe.moe(**call) == "as a prompt"


def test_a_choice_that_takes_too_much_shared_memory_is_not_the_kernels():
    def call(T: int, num_chosen: int) -> dict[str, Any]:
        settings = replace(PLAIN, num_experts_per_tok=num_chosen)
        return make_call(T, E=1024, D=32, F=8, num_shared=0, settings=settings)

    assert not can_run(call(16, 32))
    # One token has few slots, and fewer experts a token fit; the source holds the launcher's count to its own.
    for T, num_chosen in ((1, 32), (2, 32), (16, 24)):
        check(call(T, num_chosen))


def test_another_dtype_is_refused_by_name():
    call = make_call(1)
    call = {name: x.half() if isinstance(x, torch.Tensor) and x.dtype == BF16 else x for name, x in call.items()}
    with pytest.raises(
        UnsupportedError, match=r"torch\.float16 have no GPU kernel for a step: run the model in bfloat16"
    ):
        run(call, logits=rand(1, 32, dtype=torch.float32))


@pytest.mark.parametrize(("limit", "shared_limit"), [(None, 0.5), (0.4, 0.5), (0.4, None)])
def test_the_clamps_act_behind_the_silu_with_their_own_limits(limit: float | None, shared_limit: float | None):
    call = make_call(4, scale=3.0)
    out = check(call, limit=limit, shared_limit=shared_limit)
    # The limits bind.
    assert (run(call) - out).abs().max() > 0.1


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
    chosen, _ = moe.route_ref(logits_of(call)[:width], call["expert_bias"], call["settings"])
    is_unused = torch.ones(call["down"].shape[0], dtype=torch.bool, device=DEVICE)
    is_unused[chosen.flatten()] = False
    call["gate_up"][is_unused], call["down"][is_unused] = torch.nan, torch.nan
    out = check(call, width=min(width, T)) if width else run(call, width=0)
    assert torch.equal(out[width:], call["x"][width:])


def test_a_row_is_the_same_in_any_company_but_for_where_sums_are_cut():
    call = make_call(6)
    logits = logits_of(call)
    together = run(call, logits=logits)
    for rows in (slice(0, 1), slice(2, 3), slice(1, 4)):
        alone = run(call | {"x": call["x"][rows].clone()}, logits=logits[rows].contiguous())
        assert (alone != together[rows]).float().mean() < 0.02
        assert_near(alone, together[rows], Limit(rms=5e-4, worst_row=1e-3))


@pytest.mark.parametrize("T", [1, 16])
@pytest.mark.parametrize(("E", "settings"), [(32, GROUPED), (64, PLAIN), (512, FLASH)], ids=["32", "64", "512"])
def test_among_equals_the_lowest_group_and_the_lowest_expert_win(E: int, settings: RouterSettings, T: int):
    """Few distinct values: within a lane, between lanes and between groups."""
    for high in (1, 2, 3):
        call = make_call(T, E=E, settings=settings, D=32, F=32)
        call["expert_bias"].zero_()
        logits = torch.randint(0, high, (T, E), device=DEVICE).float()
        chosen, _ = moe.route_ref(logits, call["expert_bias"], settings)
        # An expert that was not chosen answers with NaN.
        is_unused = torch.ones(E, dtype=torch.bool, device=DEVICE)
        is_unused[chosen.flatten()] = False
        call["gate_up"][is_unused] = torch.nan
        assert torch.isfinite(run(call, logits=logits)).all()


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
def test_the_launcher_joins_router_and_experts(T: int, width: int | None, monkeypatch: pytest.MonkeyPatch):
    launch_kernels(monkeypatch, moe)
    if IS_INTERPRETED:
        # The interpreter's products are fp32.
        monkeypatch.setattr(moe, "norm_linear", lambda *_, **__: logits_of(call))
    call = make_call(T)
    expected = moe.moe_ref(**call, limit=0.5, shared_limit=0.6, width=i32(width))
    assert_near(moe.moe(**call, limit=0.5, shared_limit=0.6, width=i32(width)), expected, LIMIT)


@pytest.fixture
def few_rows_of_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many programs on a CPU that the rows of 32 experts fit one stage, and are not equally many."""
    if IS_INTERPRETED:
        monkeypatch.setattr(moe_step_cuda, "_num_programs", lambda _: 5)


@pytest.mark.usefixtures("few_rows_of_the_router")
@pytest.mark.parametrize("num_shared", [0, 1, 2])
def test_a_token_with_its_router_equals_its_reference(num_shared: int):
    check(make_call(1, num_shared=num_shared), has_router=True)


@pytest.mark.parametrize(("E", "programs"), [(32, 40), (64, 64), (512, 66)])
def test_routers_of_other_sizes_equal_the_reference(E: int, programs: int, monkeypatch: pytest.MonkeyPatch):
    """Some programs have no row, all have one, some have eight."""
    if IS_INTERPRETED:
        monkeypatch.setattr(moe_step_cuda, "_num_programs", lambda _: programs)
    check(make_call(1, E=E, D=32, F=32, settings=FLASH if E == 512 else PLAIN), has_router=True)


@pytest.mark.usefixtures("few_rows_of_the_router")
def test_no_launch_takes_logits_of_another_one():
    waits = None
    for _ in range(5):
        # Some warps have two tiles of the inputs, some one.
        call = make_call(1, D=544, F=32)
        # An expert that was not chosen answers with NaN.
        logits = logits_of_a_launch(call)
        chosen, _ = moe.route_ref(logits, call["expert_bias"], call["settings"])
        is_unused = torch.ones(32, dtype=torch.bool, device=DEVICE)
        is_unused[chosen.flatten()] = False
        call["gate_up"][is_unused] = torch.nan
        check(call, has_router=True)
        # One half has this launch's logits, the other one waits for the next, and they take turns.
        meeting = moe_step_cuda._meeting(call["x"].device, moe_step_cuda._num_programs(call["x"].device), 32)
        now = [bool(half.view(torch.int32).eq(-1).all()) for half in meeting.logits]
        assert sorted(now) == [False, True] and now != waits
        torch.testing.assert_close(meeting.logits[now.index(False)], logits[0], rtol=1e-5, atol=1e-5)
        waits = now


@pytest.mark.usefixtures("few_rows_of_the_router")
def test_a_router_of_no_token_reads_no_expert():
    call = make_call(1)
    call["gate_up"].fill_(torch.nan)
    assert torch.equal(run(call, width=0, has_router=True), call["x"])


@pytest.mark.usefixtures("few_rows_of_the_router")
def test_a_router_without_numbers_ends():
    call = make_call(1)
    call["router_weight"].fill_(torch.nan)
    run(call, has_router=True)


def test_a_router_that_the_kernel_does_not_take_has_a_launch_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """More tokens than one, another dtype, more rows a program than a stage holds."""
    asked = []

    def norm_linear(x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, **_: Any) -> torch.Tensor:
        asked.append(weight)
        return moe.rms_norm_ref(x, norm, eps).float() @ weight.float().T

    launch_kernels(monkeypatch, moe)
    monkeypatch.setattr(moe, "norm_linear", norm_linear)
    one, two = make_call(1), make_call(2)
    for call, programs, is_asked in (
        (two, 4, True),
        (one | {"router_weight": one["router_weight"].float()}, 4, True),
        (one, 3, True),
        (one, 4, False),
    ):
        if IS_INTERPRETED:
            monkeypatch.setattr(moe_step_cuda, "_num_programs", lambda _, programs=programs: programs)
        elif programs == 3:
            continue
        assert_near(moe.moe(**call), moe.moe_ref(**call), LIMIT)
        assert len(asked) == is_asked
        asked.clear()


@pytest.mark.parametrize("num_bytes", [0, 2 << 20, 64 << 20])
def test_the_next_weights_are_asked_for_within_their_bounds(num_bytes: int, monkeypatch: pytest.MonkeyPatch):
    """In two halves: less than they have, and all of it."""
    asked = []
    monkeypatch.setattr(moe_step_cuda, "launch", lambda *arguments, **_: asked.append(arguments))
    call = make_call(2) | {"next_weight": torch.empty(num_bytes // 2, dtype=BF16, device=DEVICE) if num_bytes else None}
    run(call)
    num_programs = asked[0][1][0]
    weight, distance, half_bytes, _ = asked[0][-4:]
    assert weight is call["next_weight"]
    if num_bytes:
        assert half_bytes % 16 == 0 and 0 < 2 * half_bytes <= 2 * distance
        assert distance * num_programs <= weight.numel() and distance % 8 == 0
        assert 2 * half_bytes * num_programs == pytest.approx(min(num_bytes, moe_step_cuda.READ_AHEAD_BYTES), rel=0.05)


@pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU's warps go on in their own order")
@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize(("T", "has_router"), [(1, True), (1, False), (5, False), (9, False)])
def test_no_order_of_warps_changes_a_bit(stages: int, has_router: bool, T: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(moe_step_cuda, "_num_stages", lambda *_: stages)
    monkeypatch.setattr(moe_step_cuda, "_num_programs", lambda _: 4 if has_router else NUM_PROGRAMS)
    # Each program has whole units and parts of them, and one token's first run ends within the ring. A router's warps
    # all have inputs.
    D = 544 if has_router else 64
    call = make_call(T, D=D, F=20, num_shared=2, settings=replace(GROUPED, num_experts_per_tok=2))
    first = check(call, has_router=has_router)
    for seed in range(1, 9 if has_router else 5):
        monkeypatch.setattr(moe_step_cuda, "launch", partial(cuda_on_cpu.launch, seed=seed))
        assert torch.equal(run(call, has_router=has_router), first)


@pytest.mark.parametrize("T", [1, 2])
def test_a_program_may_have_no_rows(T: int, monkeypatch: pytest.MonkeyPatch):
    call = make_call(T, D=32, F=1, settings=replace(PLAIN, num_experts_per_tok=1))
    check(call)
    for seed in range(1, 5) if IS_INTERPRETED else ():
        monkeypatch.setattr(moe_step_cuda, "launch", partial(cuda_on_cpu.launch, seed=seed))
        check(call)


@pytest.mark.skipif(IS_INTERPRETED, reason="a CPU would take minutes")
@pytest.mark.parametrize("T", [1, 4, 9, 16])
def test_the_real_sizes_equal_the_reference_every_time(T: int):
    call = make_call(T, D=2560, E=512, F=384, settings=FLASH)
    logits = norm_linear(call["x"], call["norm_weight"], EPS, call["router_weight"], out_dtype=torch.float32)
    for options in ({"logits": logits}, *([{"has_router": True}] if T == 1 else [])):
        first = check(call, limit=4.0, shared_limit=5.0, **options)
        for _ in range(20):
            assert torch.equal(run(call, limit=4.0, shared_limit=5.0, **options), first)
