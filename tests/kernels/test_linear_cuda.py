"""A step's linear maps in CUDA C++ equal their references at every width, and rows do not know of each other."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import linear, linear_cuda
from soloist.kernels.launch import IS_INTERPRETED
from soloist.kernels.norm import rms_norm_ref
from tests.kernels import cuda_on_cpu
from tests.kernels.device import DEVICE, nan_in_fresh_memory, rand
from tests.kernels.limits import Limit, assert_near

BF16 = torch.bfloat16
EPS = 1e-6
WIDTHS = (1, 3, 16) if IS_INTERPRETED else range(1, 17)
# The rounded normalised row: h has one more rounding here than in the reference.
LIMIT = Limit(rms=5e-3, worst_row=1.5e-2)


@pytest.fixture(autouse=True)
def _on_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if IS_INTERPRETED:
        monkeypatch.setattr(linear_cuda, "load_kernel", cuda_on_cpu.load_kernel)
        monkeypatch.setattr(linear_cuda, "launch", cuda_on_cpu.launch)
    with nan_in_fresh_memory():
        yield


def rows_of(T: int, I: int) -> torch.Tensor:
    """Rows as a slice of a wider buffer that is noise."""
    buffer = torch.full((T + 1, I + 24), 1e30, device=DEVICE).to(BF16)
    buffer[:T, 8 : 8 + I] = rand(T, I, dtype=BF16)
    return buffer[:T, 8 : 8 + I]


def norm_of(I: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.rand(I, device=DEVICE).add(0.5).to(dtype)


@pytest.mark.parametrize("T", WIDTHS)
# One run of inputs; warps that share unevenly; more runs than are on their way; outputs that fill no eight.
@pytest.mark.parametrize(("I", "O"), [(32, 203), (672, 64), (4512, 21), (1536, 40)])
def test_a_map_equals_its_reference(I: int, O: int, T: int):
    x, weight, norm = rows_of(T, I), rand(O, I, scale=I**-0.5, dtype=BF16), norm_of(I)
    out = linear_cuda.run(x, norm, EPS, weight)
    assert_near(out, rms_norm_ref(x.float(), norm.float(), EPS) @ weight.float().T, LIMIT)


@pytest.mark.parametrize("norm_dtype", [BF16, torch.float32])
def test_norm_and_bias_equal_their_reference(norm_dtype: torch.dtype):
    T, I, O = 5, 288, 56
    x, weight, norm, bias = (
        rows_of(T, I),
        rand(O, I, scale=I**-0.5, dtype=BF16),
        norm_of(I, norm_dtype),
        rand(O, dtype=BF16),
    )
    out = linear_cuda.run(x, norm, EPS, weight, bias, out_dtype=torch.float32)
    assert out.dtype is torch.float32
    assert_near(out, rms_norm_ref(x.float(), norm.float(), EPS) @ weight.float().T + bias, LIMIT)


@pytest.mark.parametrize("T", WIDTHS)
@pytest.mark.parametrize("limit", [None, 0.3])
def test_a_gated_map_equals_its_reference(T: int, limit: float | None):
    I, F = 288, 76
    x, weight, norm = rows_of(T, I), rand(2 * F, I, scale=2 * I**-0.5, dtype=BF16), norm_of(I)
    out = linear_cuda.run(x, norm, EPS, weight, has_gate=True, limit=limit)
    gate, up = (rms_norm_ref(x.float(), norm, EPS) @ weight.float().T).chunk(2, dim=1)
    gate = torch.nn.functional.silu(gate)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    assert_near(out, gate * up, Limit(rms=8e-3, worst_row=2e-2))


def test_a_row_has_the_same_bits_at_every_width():
    I, O = 672, 40
    x, weight, norm = rows_of(16, I), rand(O, I, dtype=BF16), norm_of(I)
    together = linear_cuda.run(x, norm, EPS, weight)
    for T in (1, 4, 8, 9):
        assert torch.equal(linear_cuda.run(x[16 - T :], norm, EPS, weight), together[16 - T :])
        assert torch.equal(linear_cuda.run(x[:T], norm, EPS, weight), together[:T])


@pytest.mark.skipif(IS_INTERPRETED, reason="a CPU would take minutes")
@pytest.mark.parametrize("T", [1, 2, 4, 9, 16])
@pytest.mark.parametrize(("O", "I"), [(20512, 2560), (10256, 2560), (10256, 1536), (15360, 4096)])
def test_the_real_sizes_equal_the_reference_every_time(O: int, I: int, T: int):
    x, weight, norm = rows_of(T, I), rand(O, I, scale=I**-0.5, dtype=BF16), norm_of(I)
    assert linear_cuda.can_run(x, weight)
    first = linear.norm_linear(x, norm, EPS, weight)
    assert_near(first, rms_norm_ref(x.float(), norm.float(), EPS) @ weight.float().T, LIMIT)
    for _ in range(10):
        assert torch.equal(linear.norm_linear(x, norm, EPS, weight), first)
