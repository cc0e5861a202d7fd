"""The machine code of a CPU's step: both builds against the references, and against the source they were built from."""

import ctypes
import itertools
import mmap
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from soloist.kernels import attention as attention_module
from soloist.kernels import step_cpu
from soloist.kernels.attention import attention, attention_ref
from soloist.kernels.linear import linear, linear_residual, norm_linear, norm_swiglu
from soloist.kernels.packed import PackedKind, PackedWeight, pack_weight
from soloist.kernels.rotary import make_rotary_table
from tests.kernels.limits import LIMITS, Limit, assert_near, relative_rms
from tests.kernels.test_linear import dense_fp64, draw

pytestmark = pytest.mark.skipif(step_cpu.load() is None, reason="no machine code for this processor")

FOLDER = Path(step_cpu.__file__).parent / "cpu"
NAMES = ("avx2", "avx512")
# Tiles of outputs, groups of inputs, and more rows than one reading of a tile serves.
O, I, T = 5 * 16, 3 * 32, 21
H, G, S = 6, 2, 210
EPS = 1e-5
# Inputs have 15 bits, relative to the largest of 32, or 8.
FINE, COARSE = Limit(rms=6e-5, worst_row=1e-4), Limit(rms=1e-2, worst_row=1.5e-2)


@pytest.fixture(params=NAMES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """One build, which is used in the test whatever is best for this processor."""
    library = ctypes.CDLL(str(FOLDER / f"step_{request.param}.so"))
    if not library.is_supported():
        pytest.skip(f"this processor has no {request.param}")
    library.linear.restype = library.attention.restype = None
    monkeypatch.setattr(step_cpu, "load", lambda: library)
    return library


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs GCC")
def test_the_machine_code_is_that_of_the_source(tmp_path: Path):
    version = subprocess.run(["gcc", "--version"], capture_output=True, text=True, check=True).stdout
    if "12.2.0" not in version:
        pytest.skip("another compiler gives other code")
    subprocess.run(["sh", FOLDER / "build.sh", tmp_path], check=True)
    for name in NAMES:
        shipped, built = (folder / f"step_{name}.so" for folder in (FOLDER, tmp_path))
        assert built.read_bytes() == shipped.read_bytes(), f"run cpu/build.sh: step_{name}.so is not built from step.c"


@pytest.mark.usefixtures("library")
class TestLinear:
    @pytest.mark.parametrize("kind", ["int4", "int8"])
    @pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 6, 7, 8, 9, T])
    def test_every_number_of_rows_is_its_equation(self, kind: PackedKind, num_tokens: int):
        packed, bias = pack_weight(draw(O, I), kind), draw(O).bfloat16()
        assert packed.tiles is not None
        x, residual = torch.randn(num_tokens, I).bfloat16(), torch.randn(num_tokens, O).bfloat16()
        assert packed.tiles.has_fine_inputs == (kind == "int8")
        for is_fine in (True,) if kind == "int8" else (True, False):
            held = replace(packed, tiles=replace(packed.tiles, has_fine_inputs=is_fine))
            y = linear(x, held, bias, out_dtype=torch.float32)
            assert_near(y, dense_fp64(x, packed.dequantise(), bias), FINE if is_fine else COARSE)
            assert is_fine or relative_rms(y, dense_fp64(x, packed.dequantise(), bias)) > 1e-3
            y = linear_residual(x, held, residual)
            limit = LIMITS[torch.bfloat16] if is_fine else COARSE
            assert_near(y, residual.double() + dense_fp64(x, packed.dequantise()), limit)

    @pytest.mark.parametrize("num_tokens", [1, T])
    def test_coarse_inputs_are_rounded_to_8_bits_and_nothing_else(self, num_tokens: int):
        packed, x = pack_weight(draw(O, I), "int4"), torch.randn(num_tokens, I).bfloat16()
        groups = x.float().unflatten(-1, (-1, step_cpu.GROUP))
        most = groups.abs().amax(-1, keepdim=True)
        rounded = (groups * (127 / most)).round() * (most / 127)
        y = linear(x, packed, out_dtype=torch.float32)
        # Inputs between two codes may go to either.
        assert_near(y, dense_fp64(rounded.flatten(-2), packed.dequantise()), Limit(rms=2e-3, worst_row=8e-3))

    @pytest.mark.parametrize("kind", ["int4", "int8"])
    def test_the_largest_codes_do_not_overflow(self, kind: PackedKind):
        # All weights and inputs of a group at the end of their ranges, with either sign.
        signs = torch.tensor([1.0, -1.0])
        weight = signs[torch.randint(2, (O, 1))].expand(O, I) * torch.tensor([1.0, 0.25]).repeat(I // 2)
        x = (signs[torch.randint(2, (T, 1))] * 3).expand(T, I).bfloat16()
        packed = pack_weight(weight, kind)
        y = linear(x, packed, out_dtype=torch.float32)
        assert_near(y, dense_fp64(x, packed.dequantise()), Limit(rms=1e-5, worst_row=1e-5))
        assert packed.tiles is not None
        fine = replace(packed, tiles=replace(packed.tiles, has_fine_inputs=True))
        assert_near(linear(x, fine, out_dtype=torch.float32), y.double(), Limit(rms=1e-5, worst_row=1e-5))

    @pytest.mark.parametrize("kind", ["int4", "int8"])
    def test_rows_and_threads_change_no_bit(self, kind: PackedKind, two_threads: None):
        packed, norm = pack_weight(draw(O * 6, I), kind), (torch.rand(I) + 0.5).bfloat16()
        x = torch.randn(T, I).bfloat16()
        for operator in (norm_linear, norm_swiglu):
            all_rows = operator(x, norm, EPS, packed)
            assert torch.equal(all_rows, torch.cat([operator(row[None], norm, EPS, packed) for row in x]))
            torch.set_num_threads(1)
            assert torch.equal(operator(x, norm, EPS, packed), all_rows)
            torch.set_num_threads(2)

    @pytest.mark.parametrize("kind", ["int4", "int8"])
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_what_is_no_number_spoils_its_row_and_no_other(self, kind: PackedKind, value: float):
        packed, norm = pack_weight(draw(O * 2, I), kind), torch.ones(I).bfloat16()
        x = torch.randn(3, I).bfloat16()
        x[1, 40] = value
        for y in (
            linear(x, packed),
            linear(x, packed, out_dtype=torch.float32),
            norm_linear(x, norm, EPS, packed),
            norm_swiglu(x, norm, EPS, packed),
        ):
            assert y[1].isnan().all() and y[[0, 2]].isfinite().all()

    @pytest.mark.parametrize("kind", ["int4", "int8"])
    def test_rows_of_a_long_prompt_have_the_bits_of_those_of_a_step(self, kind: PackedKind):
        packed, norm = pack_weight(draw(O * 2, I), kind), (torch.rand(I) + 0.5).bfloat16()
        x, residual = torch.randn(150, I).bfloat16(), torch.randn(150, O * 2).bfloat16()
        for operator in (
            lambda rows: linear(x[rows], packed),
            lambda rows: norm_linear(x[rows], norm, EPS, packed),
            lambda rows: norm_swiglu(x[rows], norm, EPS, packed),
            lambda rows: linear_residual(x[rows], packed, residual[rows]),
        ):
            assert torch.equal(operator(slice(0, 150))[40:43], operator(slice(40, 43)))

    def test_rows_of_zeros_give_zeros(self):
        packed = pack_weight(draw(O, I), "int4")
        assert not linear(torch.zeros(2, I).bfloat16(), packed).any()
        assert not norm_linear(torch.zeros(2, I).bfloat16(), torch.ones(I), EPS, packed).any()

    def test_gates_far_from_zero_are_zero_or_themselves(self):
        # One input that counts; a group's codes hold multiples of its largest weight exactly.
        x = torch.zeros(1, 32).bfloat16()
        x[0, 0] = 1
        weight = torch.zeros(32, 32)
        weight[:16, 0] = torch.tensor(
            [-1e4, -200.0, -90.0, -88.0, -80.0, -1.0, 0.0, 1e-3, 1.0, 30.0, 89.0, 200.0, 1e4, 5, 6, 7]
        )
        weight[16:, 0] = 2.0
        packed = pack_weight(weight, "int8")
        gate, up = packed.dequantise()[:16, 0].double(), packed.dequantise()[16:, 0].double()
        y = step_cpu.linear(x, packed.tiles, has_gate=True, out_dtype=torch.float32)
        torch.testing.assert_close(y[0].double(), gate * torch.sigmoid(gate) * up, rtol=1e-5, atol=1e-30)

    def test_other_shapes_and_dtypes_are_refused(self):
        packed: PackedWeight = pack_weight(draw(O, I), "int8")
        with pytest.raises(AssertionError, match=r"x is \(2, 64\).*96 inputs"):
            linear(torch.zeros(2, 64).bfloat16(), packed)
        with pytest.raises(AssertionError, match=r"torch\.float16"):
            linear(torch.zeros(2, I).half(), packed)
        x = torch.zeros(2, I).bfloat16()
        with pytest.raises(AssertionError, match="norm_weight: axis D is 95, expected 96"):
            norm_linear(x, torch.ones(I - 1), EPS, packed)
        with pytest.raises(AssertionError, match=r"norm_weight: dtype torch\.float64"):
            norm_linear(x, torch.ones(I).double(), EPS, packed)
        with pytest.raises(AssertionError, match=r"bias is \(80,\) torch\.float32"):
            norm_linear(x, torch.ones(I), EPS, packed, torch.zeros(O))
        with pytest.raises(AssertionError, match=r"residual: dtype torch\.float32"):
            linear_residual(x, packed, torch.zeros(2, O))
        with pytest.raises(AssertionError, match=r"residual is \(1, 80\), expected \(2, 80\)"):
            linear_residual(x, packed, torch.zeros(1, O).bfloat16())
        gate_up = pack_weight(draw(O * 2, I), "int8").tiles
        with pytest.raises(AssertionError, match="a gated map has no bias"):
            step_cpu.linear(x, gate_up, bias=torch.zeros(O * 2).bfloat16(), has_gate=True)


@pytest.mark.usefixtures("library")
class TestAttention:
    @pytest.mark.parametrize("K", [32, 64, 96, 128, 256])
    @pytest.mark.parametrize("num_tokens", [1, 2, 5, 16])
    # Before, at and behind the ends of blocks of positions.
    @pytest.mark.parametrize("context_len", [0, 1, 62, 63, 64, 130])
    @pytest.mark.parametrize("has_norms", [False, True])
    def test_it_is_the_reference(self, K: int, num_tokens: int, context_len: int, has_norms: bool):
        table = make_rotary_table(K, 1e3, S)
        qkv = torch.randn(num_tokens, (H + 2 * G) * K).bfloat16()
        names = ("q_norm", "k_norm")
        norms = {name: (torch.rand(K) + 0.5).bfloat16() if has_norms else None for name in names}
        caches = []
        outs = []
        for is_reference in (True, False):
            torch.manual_seed(context_len)
            k, v = torch.randn(2, G, S, K).bfloat16().unbind()
            # What nobody may read.
            k[:, context_len:], v[:, context_len:] = torch.nan, 1e4
            run = attention_ref if is_reference else attention
            assert is_reference or step_cpu.can_attend(qkv, k)
            length = torch.tensor(context_len, dtype=torch.int32)
            args = (qkv, k, v, length, table.cos, table.sin)
            outs.append(run(*args, num_heads=H, num_kv_heads=G, eps=EPS, **norms))
            caches.append((k, v))
        end = context_len + num_tokens
        assert_near(outs[1], outs[0].float())
        assert torch.equal(caches[0][1][:, :end], caches[1][1][:, :end])
        # A unit in the last place: both round fp32.
        assert_near(caches[1][0][:, :end].flatten(0, 1), caches[0][0][:, :end].flatten(0, 1).float())
        for i, reference in enumerate(caches[0]):
            assert torch.equal(caches[1][i][:, end:].nan_to_num(7), reference[:, end:].nan_to_num(7))

    def test_rows_and_threads_change_no_bit(self, two_threads: None):
        K = 64
        table = make_rotary_table(K, 1e3, S)
        qkv = torch.randn(100, (H + 2 * G) * K).bfloat16()

        def run(steps: list[int]) -> torch.Tensor:
            k, v = torch.full((2, G, S, K), torch.nan).bfloat16().unbind()
            outs, done = [], 0
            for num in steps:
                length = torch.tensor(done, dtype=torch.int32)
                rows = qkv[done : done + num]
                outs.append(attention(rows, k, v, length, table.cos, table.sin, num_heads=H, num_kv_heads=G))
                done += num
            return torch.cat(outs)

        expected = run([1] * 100)
        assert torch.equal(run([16, 3, 1, 16, 16, 16, 16, 16]), expected)
        torch.set_num_threads(1)
        assert torch.equal(run([16, 3, 1, 16, 16, 16, 16, 16]), expected)

    def test_scores_far_from_each_other_do_not_overflow(self):
        K = 64
        table = make_rotary_table(K, 1e3, S)
        qkv = (torch.randn(3, (H + 2 * G) * K) * 300).bfloat16()
        outs = []
        for run in (attention_ref, attention):
            k, v = torch.zeros(2, G, S, K).bfloat16().unbind()
            length = torch.tensor(0, dtype=torch.int32)
            args = (qkv, k, v, length, table.cos, table.sin)
            outs.append(run(*args, num_heads=H, num_kv_heads=G, q_norm=None, k_norm=None, eps=EPS))
        assert_near(outs[1], outs[0].float())

    def test_heads_of_other_sizes_take_the_reference(self, monkeypatch: pytest.MonkeyPatch):
        k = torch.zeros(G, S, 48).bfloat16()
        assert not step_cpu.can_attend(torch.zeros(2, (H + 2 * G) * 48).bfloat16(), k)
        k = torch.zeros(G, S, 64)
        assert not step_cpu.can_attend(torch.zeros(2, (H + 2 * G) * 64), k)
        assert attention_module.step_cpu is step_cpu


def test_a_system_without_large_pages_has_small_ones(monkeypatch: pytest.MonkeyPatch):
    # Advice that no kernel knows is refused as MADV_HUGEPAGE is by one that was built without.
    monkeypatch.setattr(step_cpu.mmap, "MADV_HUGEPAGE", 9999)
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(-1, mmap.PAGESIZE).madvise(step_cpu.mmap.MADV_HUGEPAGE)
    x = torch.randint(256, (1000, 3), dtype=torch.uint8)
    assert torch.equal(step_cpu.LargePages().place(x), x)


def test_weights_in_large_pages_are_the_same_and_do_not_overlap(monkeypatch: pytest.MonkeyPatch):
    # Some share a mapping, one is larger than a mapping, and sizes are odd.
    monkeypatch.setattr(step_cpu.LargePages, "_CHUNK_BYTES", 10_000)
    pages = step_cpu.LargePages()
    tensors = [torch.randint(256, (num, 3), dtype=torch.uint8) for num in (1000, 1, 2000, 777, 1_500_001, 5)]
    placed = [pages.place(x) for x in tensors]
    for x, y in zip(tensors, placed, strict=True):
        assert torch.equal(x, y) and y.data_ptr() % 64 == 0
    spans = sorted((y.data_ptr(), y.data_ptr() + y.numel()) for y in placed)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
