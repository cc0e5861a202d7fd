"""The strip kernels equal the references, give a row the same bits at every width, and read nothing past the width."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import linear, linear_triton
from soloist.kernels.launch import IS_INTERPRETED, arrival_counters, programmatic_launch
from soloist.kernels.norm import rms_norm_ref
from tests.kernels.device import DEVICE, DTYPE, launch_kernels, nan_in_fresh_memory, rand
from tests.kernels.limits import LIMITS, Limit, assert_near

EPS = 1e-5

TWO_WARPS = linear_triton.StripSettings(warps=2, run=1, tiles=2, ahead=2, outputs=16)
SETTINGS = [
    TWO_WARPS,
    # One long run; outputs that do not fill the tiles; more chunks ahead than there are.
    linear_triton.StripSettings(warps=1, run=4, tiles=4, ahead=3, outputs=27),
    # One tile, a chunk at a time.
    linear_triton.StripSettings(warps=4, run=2, tiles=1, ahead=1, outputs=8),
]


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    with nan_in_fresh_memory():
        yield


def rows(T: int, size: int) -> torch.Tensor:
    """T rows of a wider buffer; what is beside and below them is noise."""
    buffer = torch.full((T + 3, size + 16), 1e30, device=DEVICE, dtype=DTYPE)
    buffer[:T, :size] = rand(T, size)
    return buffer[:T, :size]


def assert_close(out: torch.Tensor, ref: torch.Tensor) -> None:
    """The operands are rounded to DTYPE whatever the dtype of the result."""
    assert_near(out, ref, LIMITS[DTYPE])


def norm_weight(size: int) -> torch.Tensor:
    return torch.rand(size, device=DEVICE).add(0.5).to(DTYPE)


@pytest.mark.parametrize("T", [1, 2, 3, 8, 9, 16])
def test_norm_linear_equals_its_reference(T: int):
    O, I = 53, 200
    x, weight, bias, norm = rows(T, I), rand(O, I, scale=I**-0.5), rand(O), norm_weight(I)
    out = linear_triton.linear_step(x, norm, EPS, weight, bias, None, torch.float32, TWO_WARPS)
    assert_close(out, linear.linear_ref(rms_norm_ref(x.float(), norm, EPS), weight.float(), bias.float()))


def test_a_map_whose_inputs_are_the_rows_in_memory_is_left_to_cublas():
    """As the shared expert's is, where a step's experts run as a prompt's."""
    O, I = 53, 200
    x, weight = rand(5, I, dtype=torch.bfloat16), rand(I, O, scale=I**-0.5, dtype=torch.bfloat16).t()
    assert linear.is_step_map(x, weight.contiguous()) and not linear.is_step_map(x, weight)
    out = linear.linear(x, weight, out_dtype=torch.float32)
    assert_near(out, linear.linear_ref(x.float(), weight.float()), LIMITS[torch.float32])


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("O", "I"), [(1, 8), (29, 264), (64, 256)])
def test_every_setting_gives_the_reference(settings: linear_triton.StripSettings, O: int, I: int):
    x, weight, residual = rows(5, I), rand(O, I, scale=I**-0.5), rand(5, O)
    out = linear_triton.linear_step(x, None, 0.0, weight, None, residual, DTYPE, settings)
    assert_close(out, linear.linear_ref(x.float(), weight.float()) + residual.float())


@pytest.mark.parametrize("splits", [2, 3])
def test_programs_that_share_a_strip_add_up_and_leave_their_counters_at_zero(splits: int):
    O, I, T = 37, 328, 11
    settings = dataclasses.replace(TWO_WARPS, splits=splits)
    x, weight, residual = rows(T, I), rand(O, I, scale=I**-0.5), rand(T, O)
    for _ in range(2):
        out = linear_triton.linear_step(x, None, 0.0, weight, None, residual, torch.float32, settings)
        assert_close(out, linear.linear_ref(x.float(), weight.float()) + residual.float())
    assert not arrival_counters(DEVICE).any()


@pytest.mark.parametrize("limit", [None, 0.4])
@pytest.mark.parametrize("T", [1, 7, 13])
def test_swiglu_equals_its_reference(T: int, limit: float | None):
    F, I = 21, 136
    x, gate_up, norm = rows(T, I), rand(2 * F, I, scale=I**-0.5), norm_weight(I)
    settings = dataclasses.replace(TWO_WARPS, outputs=8)
    out = linear_triton.swiglu_step(x, norm, EPS, gate_up, limit, settings)
    ref = linear.norm_swiglu(x.float().cpu(), norm.float().cpu(), EPS, gate_up.float().cpu(), limit)
    # A product of two sums, each of rounded operands.
    limit = LIMITS[DTYPE]
    assert_near(out, ref.to(DEVICE), Limit(rms=2 * limit.rms, worst_row=2 * limit.worst_row))


def test_argmax_takes_the_lowest_of_equals_and_no_padding_row():
    N, padded, I, T = 61, 70, 72, 9
    x, weight, norm = rows(T, I), rand(padded, I), norm_weight(I)
    # Token t likes row 6 t + 3 best, token 2 row 40 just as well, and token 0 the padding rows, were they asked.
    winners = 6 * torch.arange(T, device=DEVICE) + 3
    weight[winners] = 3 * x
    weight[40] = weight[15]
    weight[N:] = 50 * x[:1]
    ids, best = linear_triton.argmax_step(x, norm, EPS, weight, N, TWO_WARPS)
    logits = linear.linear_ref(rms_norm_ref(x.float(), norm, EPS), weight[:N].float())
    assert torch.equal(ids, winners)
    assert_close(best, logits.amax(1))


def test_one_rows_likeliest_token_and_its_bits_are_those_of_a_wider_step():
    N, I = 61, 1536
    narrow, wide = (linear_triton.argmax_settings_for(T, 157184, I) for T in (1, 2))
    assert narrow != wide
    x, weight, norm = rows(2, I), rand(N, I), norm_weight(I)
    ids, best = linear_triton.argmax_step(x, norm, EPS, weight, N, wide)
    own_id, own_best = linear_triton.argmax_step(x[:1], norm, EPS, weight, N, narrow)
    assert torch.equal(own_id, ids[:1])
    assert_close(own_best, best[:1])
    # NumPy's matrix product depends on the tile's width.
    assert IS_INTERPRETED or torch.equal(own_best, best[:1])


@pytest.mark.parametrize(("T", "O", "I"), [(2, 157184, 2560), (1, 512, 2048), (1, 151936, 896), (1, 157184, 4096)])
def test_a_head_that_was_not_measured_is_cut_as_any_map(T: int, O: int, I: int):
    assert linear_triton.argmax_settings_for(T, O, I) == linear_triton.settings_for(O, I)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_row_has_the_same_bits_at_every_width(splits: int):
    O, I = 37, 200
    settings = dataclasses.replace(TWO_WARPS, splits=splits)
    x, weight, norm = rows(16, I), rand(O, I), norm_weight(I) if splits == 1 else None
    all_rows = linear_triton.linear_step(x, norm, EPS, weight, None, None, torch.float32, settings)
    for T in (1, 2, 8, 9):
        some_rows = linear_triton.linear_step(x[:T], norm, EPS, weight, None, None, torch.float32, settings)
        assert torch.equal(some_rows, all_rows[:T])
        if IS_INTERPRETED:
            # NumPy's matrix product depends on where a row stands.
            continue
        last_row = linear_triton.linear_step(x[T - 1 : T], norm, EPS, weight, None, None, torch.float32, settings)
        assert torch.equal(last_row[0], all_rows[T - 1])


def test_launchers_take_the_kernels(monkeypatch: pytest.MonkeyPatch):
    launch_kernels(monkeypatch, linear)
    D, F, T = 136, 21, 3
    x, norm, gate_up, down = (rand(*shape, dtype=torch.bfloat16) for shape in ((T, D), (D,), (2 * F, D), (D, F)))
    bias = rand(D, dtype=torch.bfloat16)
    taken = []
    for name in ("linear_kernel", "swiglu_kernel"):
        kernel = getattr(linear_triton, name)
        monkeypatch.setattr(linear_triton, name, _Counted(kernel, taken))
    outs = [
        linear.norm_linear(x, norm, EPS, gate_up),
        linear.linear(x, gate_up, out_dtype=torch.float32),
        linear.norm_swiglu(x, norm, EPS, gate_up, 2.0),
        linear.linear_residual(x[:, :F], down, bias.expand(T, D).contiguous()),
    ]
    assert len(taken) == 4
    h = rms_norm_ref(x.float(), norm, EPS)
    refs = [
        linear.linear_ref(h, gate_up.float()),
        linear.linear_ref(x.float(), gate_up.float()),
        linear.norm_swiglu(x.float().cpu(), norm.float().cpu(), EPS, gate_up.float().cpu(), 2.0),
        linear.linear_ref(x[:, :F].float(), down.float(), bias.float()),
    ]
    for out, ref in zip(outs, refs, strict=True):
        # The interpreter truncates to bf16, several times.
        assert_near(out, ref.to(DEVICE), Limit(rms=2e-2, worst_row=4e-2))


class _Counted:
    """A kernel that notes its launches."""

    def __init__(self, kernel, taken: list) -> None:
        self.kernel, self.taken = kernel, taken

    def __getitem__(self, grid):
        self.taken.append(grid)
        return self.kernel[grid]


@pytest.mark.skipif(IS_INTERPRETED, reason="launches overlap on a GPU only")
def test_chained_launches_wait_for_each_other():
    x, weight, norm = rand(3, 2048), rand(2048, 2048, scale=2048**-0.5), norm_weight(2048)
    settings = linear_triton.StripSettings(warps=4, run=4, tiles=2, ahead=2, outputs=16)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(30):
            y = linear_triton.linear_step(y, norm, EPS, weight, None, y, DTYPE, settings)
        return y

    with programmatic_launch(False):
        one_by_one = chain()
    for _ in range(20):
        assert torch.equal(chain(), one_by_one)
