"""MoE kernels: the router's slots are the reference's choice, and rows, experts and launches do not mix."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import moe, moe_grouped_triton, moe_route_cuda, moe_triton
from soloist.kernels.launch import IS_INTERPRETED, arrival_counters
from soloist.kernels.linear import norm_linear
from soloist.kernels.moe import RouterSettings
from soloist.kernels.moe_route_cuda import MAX_ROWS, Slots
from soloist.kernels.norm import rms_norm_ref
from tests.kernels import cuda_on_cpu
from tests.kernels.device import DEVICE, DTYPE, launch_kernels, nan_in_fresh_memory, rand
from tests.kernels.limits import LIMITS, Limit, assert_near

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

BF16 = torch.bfloat16
EPS = 1e-6
GROUPED = RouterSettings(num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=2.5)
PLAIN = RouterSettings(num_experts_per_tok=5, n_group=1, topk_group=1, routed_scaling_factor=2.446)
FLASH = RouterSettings(num_experts_per_tok=8, n_group=8, topk_group=4, routed_scaling_factor=2.5)
# On a GPU each expert's activation is rounded once more, with its weight.
LIMIT = LIMITS[torch.float32] if IS_INTERPRETED else Limit(rms=1e-2, worst_row=3e-2)


@pytest.fixture(autouse=True)
def _memory_of_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if IS_INTERPRETED:
        monkeypatch.setattr(moe_route_cuda, "load_kernel", cuda_on_cpu.load_kernel)
        monkeypatch.setattr(moe_route_cuda, "launch", cuda_on_cpu.launch)
    with nan_in_fresh_memory():
        yield


def i32(x: int | None) -> torch.Tensor | None:
    return None if x is None else torch.tensor(x, dtype=torch.int32, device=DEVICE)


# --- the router ---


def check_slots(
    logits: torch.Tensor, bias: torch.Tensor, settings: RouterSettings, *, num_shared: int, width: int | None = None
) -> Slots:
    """Compare every slot with the reference's choice."""
    T, E = logits.shape
    num_rows = T if width is None else min(width, T)
    D = 96
    x, norm = rand(T, D, dtype=BF16), torch.rand(D, device=DEVICE).add(0.5).to(BF16)
    slots = moe_route_cuda.route(x, norm, EPS, logits, bias, settings, num_shared=num_shared, width=i32(width))
    h, slot_expert, slot_weight, count = slots
    assert_near(h[:T], rms_norm_ref(x.float(), norm, EPS))
    assert (h[T:] == 0).all() and h.shape == (MAX_ROWS, D)
    experts, weights = moe.route_ref(logits, bias, settings)
    expected = [dict(zip(e, w, strict=True)) for e, w in zip(experts.tolist(), weights.double().tolist(), strict=True)][
        :num_rows
    ]
    active = sorted({e for chosen in expected for e in chosen})
    n = num_shared + len(active)
    assert int(count) == n <= slot_expert.shape[0] == slot_weight.shape[0]
    assert slot_expert[:n].tolist() == [*range(E, E + num_shared), *active]
    for slot, weight_by_row in enumerate(slot_weight[:n].double().tolist()):
        for t, weight in enumerate(weight_by_row):
            if slot < num_shared:
                assert weight == float(t < num_rows)
            else:
                want = expected[t].get(active[slot - num_shared], 0.0) if t < num_rows else 0.0
                assert weight == pytest.approx(want, rel=1e-5), (slot, t)
    return slots


@pytest.mark.parametrize("T", [1, 9, 16])
@pytest.mark.parametrize(
    ("E", "settings", "num_shared"), [(32, GROUPED, 2), (64, PLAIN, 0), (512, FLASH, 1)], ids=["32", "64", "512"]
)
def test_the_routers_slots_are_the_references_choice(E: int, settings: RouterSettings, num_shared: int, T: int):
    for _ in range(3):
        logits = rand(T, E, scale=2.0, dtype=torch.float32)
        check_slots(logits, rand(E, scale=0.3, dtype=torch.float32), settings, num_shared=num_shared)


@pytest.mark.parametrize(
    ("E", "settings"), [(32, GROUPED), (64, PLAIN), (512, FLASH)], ids=["groups", "no groups", "flash"]
)
def test_among_equals_the_lowest_group_and_the_lowest_expert_win(E: int, settings: RouterSettings):
    """Few distinct values: within a lane, between lanes and between groups."""
    num_shared = {32: 2, 64: 0, 512: 1}[E]
    for high in (1, 2, 3):
        logits = torch.randint(0, high, (16, E), device=DEVICE).float()
        check_slots(logits, torch.zeros(E, device=DEVICE), settings, num_shared=num_shared)


def test_a_losing_group_stays_out_when_every_kept_score_is_negative():
    bias = torch.full((32,), -3.0, device=DEVICE)
    bias[8:24] = -2.0
    slots = check_slots(rand(16, 32, dtype=torch.float32), bias, GROUPED, num_shared=2)
    experts = slots.expert[2 : int(slots[3])]
    assert ((experts >= 8) & (experts < 24)).all()


def test_the_bias_selects_and_does_not_weigh():
    logits, bias = torch.zeros(3, 32, device=DEVICE), torch.zeros(32, device=DEVICE)
    logits[:, 9], bias[2:5] = 4.0, 10.0
    slots = check_slots(logits, bias, GROUPED, num_shared=2)
    assert slots.expert[2:5].tolist() == [2, 3, 4]


def test_vanishing_scores_give_no_weight_and_no_nan():
    slots = check_slots(
        torch.full((4, 32), -200.0, device=DEVICE), torch.zeros(32, device=DEVICE), GROUPED, num_shared=2
    )
    assert (slots.weight[2:5] == 0).all()


@pytest.mark.parametrize("width", [0, 1, 3, 7, 12])
def test_rows_past_the_width_choose_no_expert(width: int):
    check_slots(
        rand(7, 32, scale=2.0, dtype=torch.float32),
        rand(32, scale=0.3, dtype=torch.float32),
        GROUPED,
        num_shared=2,
        width=width,
    )


# --- the experts of a step ---


def make_call(
    T: int,
    *,
    D: int = 96,
    E: int = 32,
    F: int = 32,
    shared_slots: int = 2,
    settings: RouterSettings = GROUPED,
    scale: float = 1.0,
) -> dict[str, Any]:
    """Arguments of one call by name; `scale` makes the experts' activations large."""
    Fs = shared_slots * F
    return {
        "x": rand(T, D),
        "norm_weight": torch.rand(D, device=DEVICE).add(0.5).to(DTYPE),
        "eps": EPS,
        "router_weight": rand(E, D, scale=D**-0.5),
        "expert_bias": rand(E, scale=0.2, dtype=torch.float32),
        "gate_up": rand(E, 2 * F, D, scale=D**-0.5 * scale),
        "down": rand(E, D, F, scale=F**-0.5),
        "shared_gate_up": rand(2 * Fs, D, scale=D**-0.5 * scale) if Fs else None,
        "shared_down": rand(D, Fs, scale=Fs**-0.5) if Fs else None,
        "settings": settings,
    }


def slots_of(call: dict[str, Any], num_rows: int) -> Slots:
    """The reference's choice from the launcher's logits; entries that are not in use hold what must not be read."""
    E, _, F = call["down"].shape
    layer = (call["x"], call["norm_weight"], call["eps"])
    h, logits = rms_norm_ref(*layer), norm_linear(*layer, call["router_weight"], out_dtype=torch.float32)
    experts, weights = moe.route_ref(logits, call["expert_bias"], call["settings"])
    num_shared = 0 if call["shared_down"] is None else call["shared_down"].shape[1] // F
    slots = moe_route_cuda.route_ref(h, experts, weights, num_experts=E, num_shared=num_shared, num_rows=num_rows)
    slots[1][int(slots[3]) :] = 2**30
    slots[2][int(slots[3]) :] = torch.nan
    return slots


def added_by(
    call: dict[str, Any],
    slots: Slots,
    limit: float | None = None,
    shared_limit: float | None = None,
) -> torch.Tensor:
    """What the slots add to x (T, D), fp32."""
    T, E = call["x"].shape[0], call["down"].shape[0]
    h, expert, weight, count = slots
    out = torch.zeros(T, h.shape[1], device=DEVICE)
    for slot in range(int(count)):
        if (e := int(expert[slot])) < E:
            y = moe._feed_forward(h[:T], call["gate_up"][e], call["down"][e], limit)
            out += weight[slot, :T, None] * y
        elif e == E:
            y = moe._feed_forward(h[:T], call["shared_gate_up"], call["shared_down"], shared_limit)
            out += weight[slot, :T, None] * y
    return out


def run_experts(
    call: dict[str, Any],
    *,
    num_rows: int | None = None,
    limit: float | None = None,
    shared_limit: float | None = None,
    **settings: int,
) -> torch.Tensor:
    """Launch the experts on the reference's slots."""
    T = call["x"].shape[0]
    table = next(known for most_rows, known in moe_triton.STEP_SETTINGS.items() if most_rows >= T)
    weights = (call[name] for name in ("gate_up", "down", "shared_gate_up", "shared_down"))
    slots = slots_of(call, T if num_rows is None else num_rows)
    out = moe_triton.run_experts(
        call["x"], slots, *weights, limit=limit, shared_limit=shared_limit, settings=replace(table, **settings)
    )
    assert not arrival_counters(DEVICE).any()
    return out


def check_experts(call: dict[str, Any], **options: Any) -> torch.Tensor:
    """Compare what the experts add with the reference."""
    x = call["x"].clone()
    limits = {name: options[name] for name in ("limit", "shared_limit") if name in options}
    out = run_experts(call, **options)
    assert torch.equal(call["x"], x)
    assert_near(out, x + added_by(call, slots_of(call, x.shape[0]), **limits), LIMIT)
    return out


@pytest.mark.parametrize("shared_slots", [0, 1, 2])
@pytest.mark.parametrize("T", [1, 5, 16] if IS_INTERPRETED else range(1, 17))
def test_a_step_equals_its_reference(T: int, shared_slots: int):
    # Fewer slots than splits for one token, more for sixteen; as many programs as 1, 2 or 3 tiles of D and F need.
    check_experts(make_call(T, shared_slots=shared_slots, F=48 if T == 5 else 32))


def test_sums_of_any_number_of_splits_equal_the_reference():
    for down_splits in (1, 2, 7):
        check_experts(make_call(3, D=64), down_splits=down_splits)


@pytest.mark.parametrize(("limit", "shared_limit"), [(None, 0.5), (0.4, 0.5), (0.4, None)])
def test_the_clamps_act_behind_the_silu_with_their_own_limits(limit: float | None, shared_limit: float | None):
    call = make_call(4, scale=3.0, D=64)
    out = check_experts(call, limit=limit, shared_limit=shared_limit)
    # The limits bind.
    assert (run_experts(call) - out).abs().max() > 0.1


@pytest.mark.parametrize("width", [0, 2, 5])
def test_rows_past_the_width_come_back_unchanged_and_read_no_expert(width: int):
    T = 5
    call = make_call(T, D=64)
    call["x"][width:] *= 1e3
    slots = slots_of(call, width)
    expected, used = call["x"] + added_by(call, slots), slots.expert
    is_unused = torch.ones(call["down"].shape[0], dtype=torch.bool, device=DEVICE)
    is_unused[used[used < len(is_unused)].long()] = False
    call["gate_up"][is_unused], call["down"][is_unused] = torch.nan, torch.nan
    out = run_experts(call, num_rows=width)
    if width:
        assert_near(out[:width], expected[:width], LIMIT)
    assert torch.equal(out[width:], call["x"][width:])


def test_a_row_has_the_same_bits_in_any_company():
    call = make_call(6, D=64)
    together = run_experts(call, num_rows=6)
    assert torch.equal(run_experts(call, num_rows=6), together)
    # The same slots, so the same sums: rows past the width change nothing.
    slots_of_six = slots_of(call, 6)
    call["x"][4:] = rand(2, 64)
    slots = Slots(slots_of(call, 4)[0], *slots_of_six[1:])
    weights = (call[name] for name in ("gate_up", "down", "shared_gate_up", "shared_down"))
    alone = moe_triton.run_experts(call["x"], slots, *weights, limit=None, shared_limit=None)
    assert torch.equal(alone[:4], together[:4])


# --- router and experts together ---


@pytest.mark.parametrize(("T", "width"), [(1, None), (3, 2), (16, None)])
def test_the_launcher_joins_router_and_experts(T: int, width: int | None, monkeypatch: pytest.MonkeyPatch):
    if IS_INTERPRETED:
        # The router takes bf16, and the interpreter's products fp32.
        route = lambda x, *rest, num_shared, width: slots_of(call, T if width is None else int(width))
        monkeypatch.setattr(moe_route_cuda, "route", route)
    launch_kernels(monkeypatch, moe)
    call = make_call(T, D=64)
    expected = call["x"] + added_by(call, slots_of(call, T if width is None else width), 0.5, 0.6)
    assert_near(moe.moe(**call, limit=0.5, shared_limit=0.6, width=i32(width)), expected, LIMIT)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter would take minutes")
@pytest.mark.parametrize("T", [1, 4, 9, 16])
def test_the_real_sizes_equal_the_reference(T: int):
    call = make_call(T, D=2560, E=512, F=384, shared_slots=1, settings=FLASH)
    expected = call["x"] + added_by(call, slots_of(call, T), 4.0, 5.0)
    first = moe.moe(**call, limit=4.0, shared_limit=5.0)
    assert_near(first, expected, LIMIT)
    for _ in range(20):
        assert torch.equal(moe.moe(**call, limit=4.0, shared_limit=5.0), first)


# --- prompts ---


def check_grouped(experts: torch.Tensor, E: int, *, limit: float | None) -> None:
    """Grouped products against one expert at a time."""
    T, A = experts.shape
    D, F = 64, 48
    h, weights = rand(T, D), torch.rand(T, A, device=DEVICE)
    gate_up, down = rand(E, 2 * F, D, scale=2 * D**-0.5), rand(E, D, F, scale=F**-0.5)
    unused = sorted(set(range(E)) - set(experts.flatten().tolist()))
    gate_up[unused], down[unused] = torch.nan, torch.nan
    expected = torch.zeros(T, D, device=DEVICE)
    for a in range(A):
        for t in range(T):
            e = experts[t, a]
            y = moe._feed_forward(h[t : t + 1].float(), gate_up[e].float(), down[e].float(), limit)
            expected[t] += weights[t, a] * y[0]
    out = moe_grouped_triton.run_experts(h, experts, weights, gate_up, down, limit)
    assert out.dtype is torch.float32
    assert_near(out, expected, LIMIT)


def test_grouped_products_take_full_blocks_and_what_is_left():
    """Blocks of exactly 64, one of 65, an expert with one row and one without any."""
    experts = torch.tensor([[0, 2]] * 64 + [[4, 2]], device=DEVICE)
    check_grouped(experts, 5, limit=None)


def test_grouped_products_of_random_choices_equal_the_reference():
    experts = torch.stack([torch.randperm(6)[:3] for _ in range(23)]).to(DEVICE)
    check_grouped(experts, 6, limit=0.7)


@pytest.mark.parametrize(("num_pairs", "E"), [(1, 1), (64, 3), (300, 7), (1000, 64)])
def test_blocks_hold_every_pair_once_and_one_expert_each(num_pairs: int, E: int):
    experts = (torch.rand(num_pairs, device=DEVICE) ** 3 * E).long()
    order, block_expert, start, end = moe_grouped_triton._blocks(experts, E)
    assert sorted(order.tolist()) == list(range(num_pairs))
    held: list[int] = []
    for expert, first, last in zip(block_expert.tolist(), start.tolist(), end.tolist(), strict=True):
        assert 0 <= expert < E and 0 <= last - first <= moe_grouped_triton.BLOCK_ROWS
        assert (experts[order[first:last]] == expert).all()
        held += range(first, last)
    assert sorted(held) == list(range(num_pairs))


def test_the_launcher_takes_grouped_products_for_a_prompt(monkeypatch: pytest.MonkeyPatch):
    call = make_call(18, D=64, E=4, settings=RouterSettings(
        num_experts_per_tok=2, n_group=2, topk_group=1, routed_scaling_factor=2.5
    ))  # fmt: skip
    expected = moe.moe_ref(**call, limit=0.7, shared_limit=0.6)
    launch_kernels(monkeypatch, moe)
    assert_near(moe.moe(**call, limit=0.7, shared_limit=0.6), expected, LIMIT)
