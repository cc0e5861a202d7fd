"""Linear maps in fp64, and the packed kernels, ours and PyTorch's, against the weights they stand for."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from soloist.errors import UnsupportedError
from soloist.kernels import check, step_cpu
from soloist.kernels import packed as packed_module
from soloist.kernels.check import FLOATS
from soloist.kernels.linear import linear, linear_packed_cpu, linear_ref, linear_residual, norm_linear, norm_swiglu
from soloist.kernels.norm import rms_norm
from soloist.kernels.packed import (
    INT4_GROUP,
    INT4_TILES,
    PackedKind,
    PackedWeight,
    can_pack,
    pack_int4,
    pack_weight,
    packing_error,
)
from tests.kernels.limits import LIMITS, Limit, assert_near, relative_rms

T, I, O = 5, 96, 112
KINDS: tuple[PackedKind, ...] = get_args(PackedKind)
EPS = 1e-5

needs_int4 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in INT4_TILES, reason="PyTorch has no fast int4 kernel for this CPU"
)
on_this_cpu = [pytest.param(kind, marks=needs_int4) if kind == "int4" else kind for kind in KINDS]


@pytest.fixture(params=["tiles", "PyTorch's"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How int4 and int8 weights are held."""
    if request.param == "tiles" and step_cpu.load() is None:
        pytest.skip("no machine code for this processor")
    if request.param != "tiles":
        monkeypatch.setattr(step_cpu, "load", lambda: None)
    return request.param


def limit_of(weight: torch.Tensor | PackedWeight) -> Limit | None:
    """How far a product may be from its equation, where that is not the limit of the result's dtype."""
    is_coarse = isinstance(weight, PackedWeight) and weight.tiles is not None and not weight.tiles.has_fine_inputs
    # Inputs are rounded to 8 bits, relative to the largest of 32.
    return Limit(rms=1e-2, worst_row=2e-2) if is_coarse else None


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape) * shape[-1] ** -0.5).to(dtype)


def dense_fp64(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


class TestDense:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("num_tokens", [1, T])
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_it_is_its_equation(self, dtype: torch.dtype, num_tokens: int, has_bias: bool):
        x, weight = torch.randn(num_tokens, 37).to(dtype), draw(23, 37, dtype=dtype)
        bias = draw(23, dtype=dtype) if has_bias else None
        y = linear(x, weight, bias)
        assert y.dtype == dtype
        assert_near(y, dense_fp64(x, weight, bias))

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("num_tokens", [1, T])
    def test_fp32_logits_are_never_rounded(self, dtype: torch.dtype, num_tokens: int):
        x, weight, bias = torch.randn(num_tokens, 37).to(dtype), draw(23, 37, dtype=dtype), draw(23, dtype=dtype)
        y = linear(x, weight, bias, out_dtype=torch.float32)
        assert y.dtype == torch.float32
        assert_near(y, dense_fp64(x, weight, bias), LIMITS[torch.float32])

    def test_it_rounds_once(self):
        x, weight, bias = torch.randn(T, 37).bfloat16(), draw(999, 37, dtype=torch.bfloat16), draw(999).bfloat16()
        is_nearest = linear(x, weight, bias) == dense_fp64(x, weight, bias).bfloat16()
        assert is_nearest.float().mean() > 0.998

    def test_a_weight_of_many_blocks_is_converted_block_by_block(self, monkeypatch: pytest.MonkeyPatch):
        x, weight = torch.randn(T, 37).bfloat16(), draw(200, 37, dtype=torch.bfloat16)
        monkeypatch.setattr(packed_module, "BLOCK_VALUES", 64 * 37)
        assert_near(linear(x, weight, out_dtype=torch.float32), dense_fp64(x, weight), LIMITS[torch.float32])

    def test_arguments_of_other_sizes_are_refused(self):
        x, weight = torch.zeros(T, 37), torch.zeros(23, 37)
        with pytest.raises(AssertionError, match="weight: axis I is 36, expected 37"):
            linear(x, weight[:, 1:])
        with pytest.raises(AssertionError, match="bias: axis O is 22, expected 23"):
            linear(x, weight, torch.zeros(22))
        with pytest.raises(AssertionError, match=r"weight: dtype torch\.bfloat16"):
            linear(x, weight.bfloat16())
        with pytest.raises(AssertionError, match="residual: axis D is 22, expected 23"):
            linear_residual(x, weight, torch.zeros(T, 22))
        with pytest.raises(AssertionError, match="norm_weight: axis D is 36, expected 37"):
            norm_linear(x, torch.zeros(36), EPS, weight)


@pytest.mark.usefixtures("form")
class TestPacked:
    @pytest.mark.parametrize("kind", on_this_cpu)
    # One token, a verify step, and prefills on both sides of the length from which weights are dequantised.
    @pytest.mark.parametrize("num_tokens", [1, 2, 16, 33, 130])
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_a_kernel_applies_the_weight_it_stands_for(self, kind: PackedKind, num_tokens: int, has_bias: bool):
        x, bias = torch.randn(num_tokens, I).bfloat16(), draw(O).bfloat16() if has_bias else None
        packed = pack_weight(draw(O, I), kind)
        before = x.clone()
        y = linear(x, packed, bias)
        assert y.dtype == torch.bfloat16
        assert_near(y, dense_fp64(x, packed.dequantise(), bias), limit_of(packed))
        assert torch.equal(x, before)

    @pytest.mark.parametrize("kind", on_this_cpu)
    @pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float16, 1e-3)])
    def test_other_activations_than_bf16_work(self, kind: PackedKind, dtype: torch.dtype, limit: float):
        x, packed = torch.randn(T, I).to(dtype), pack_weight(draw(O, I), kind, activation_dtype=dtype)
        assert relative_rms(linear(x, packed), dense_fp64(x, packed.dequantise())) < limit

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_fp16_weights_take_any_activations_and_never_round_logits(self, dtype: torch.dtype):
        x, weight, bias = torch.randn(T, I).to(dtype), draw(O, I), draw(O).to(dtype)
        packed = pack_weight(weight, "fp16")
        y = linear(x, packed, bias, out_dtype=torch.float32)
        assert y.dtype == torch.float32
        assert_near(y, dense_fp64(x, weight.half(), bias), LIMITS[torch.float32])

    def test_fp16_weights_work_without_fbgemm(self):
        x, weight, bias = torch.randn(T, I).bfloat16(), draw(O, I), draw(O).bfloat16()
        packed = PackedWeight(kind="fp16", shape=(O, I), codes=weight.half())
        assert_near(linear(x, packed, bias), dense_fp64(x, weight.half(), bias))
        assert torch.equal(packed.dequantise(), weight.half().float())

    @pytest.mark.parametrize("kind", ["int8", pytest.param("int4", marks=needs_int4)])
    def test_a_row_does_not_depend_on_how_many_there_are(self, kind: PackedKind):
        packed = pack_weight(draw(O, I), kind)
        x = torch.randn(16, I).bfloat16()
        one_by_one = torch.cat([linear(x[t : t + 1], packed) for t in range(16)])
        for num_tokens in range(2, 17):
            assert torch.equal(linear(x[:num_tokens], packed), one_by_one[:num_tokens]), num_tokens

    @pytest.mark.parametrize("kind", on_this_cpu)
    @pytest.mark.parametrize("num_tokens", [1, T, 200])
    def test_inputs_of_another_size_are_refused(self, kind: PackedKind, num_tokens: int):
        packed = pack_weight(draw(O, I), kind)
        for num_inputs in (I - 32, I + 32):
            with pytest.raises((RuntimeError, AssertionError)):
                linear(torch.zeros(num_tokens, num_inputs).bfloat16(), packed)

    @pytest.mark.parametrize("kind", on_this_cpu)
    def test_the_reference_switch_overrules_the_kernel(self, kind: PackedKind, monkeypatch: pytest.MonkeyPatch):
        x, packed = torch.randn(T, I).bfloat16(), pack_weight(draw(O, I), kind)
        monkeypatch.setattr(check, "_REFERENCE_EVERYWHERE", True)
        y = linear(x, packed, out_dtype=torch.float32)
        assert torch.equal(y, linear_ref(x, packed, out_dtype=torch.float32))
        assert_near(y, dense_fp64(x, packed.dequantise()), LIMITS[torch.float32])

    @pytest.mark.parametrize("kind", on_this_cpu)
    def test_blocks_and_chunks_change_nothing(self, kind: PackedKind, monkeypatch: pytest.MonkeyPatch):
        # Not a multiple of a block, a chunk or a tile.
        weight = draw(208, I)
        whole = pack_weight(weight, kind)
        x = torch.randn(130, I).bfloat16()
        exact = whole.dequantise()
        monkeypatch.setattr(packed_module, "BLOCK_VALUES", 64 * I)
        monkeypatch.setattr(packed_module, "PACK_ROWS", 128)
        chunked = pack_weight(weight, kind)
        assert torch.equal(chunked.dequantise(), exact)
        assert_near(linear_packed_cpu(x, chunked), dense_fp64(x, exact), limit_of(chunked))

    @pytest.mark.parametrize(
        ("kind", "limit"), [pytest.param("int4", 0.1, marks=needs_int4), ("int8", 0.01), ("fp16", 3e-4)]
    )
    def test_the_error_of_packing_is_that_of_rounding_to_its_bits(self, kind: PackedKind, limit: float):
        weight = draw(O, I)
        error = packing_error(pack_weight(weight, kind), weight)
        assert limit / 10 < error < limit
        assert error == pytest.approx(relative_rms(pack_weight(weight, kind).dequantise(), weight), rel=1e-4)

    @pytest.mark.parametrize("kind", on_this_cpu)
    def test_rows_of_zeros_stay_zeros(self, kind: PackedKind):
        weight = draw(O, I)
        weight[17] = 0
        packed = pack_weight(weight, kind)
        assert not packed.dequantise()[17].any()
        y = linear(torch.randn(T, I).bfloat16(), packed)
        assert y.isfinite().all()
        assert not y[:, 17].any()

    @pytest.mark.parametrize("kind", on_this_cpu)
    def test_constant_rows_keep_their_value(self, kind: PackedKind):
        weight = draw(O, I)
        weight[3] = 0.375
        torch.testing.assert_close(pack_weight(weight, kind).dequantise()[3], weight[3], rtol=4e-3, atol=0)

    @pytest.mark.parametrize(
        ("kind", "num_bytes"),
        [
            pytest.param("int4", O * I // 2 + O * I // 32 * 4, marks=needs_int4),
            ("int8", {"tiles": O * I + O * I // 32 * 2, "PyTorch's": O * I + O * 2}),
            ("fp16", O * I * 2),
        ],
    )
    def test_bytes_are_those_read_per_token(self, kind: PackedKind, num_bytes: int | dict[str, int], form: str):
        num_bytes = num_bytes[form] if isinstance(num_bytes, dict) else num_bytes
        assert pack_weight(draw(O, I), kind).num_bytes == num_bytes


@needs_int4
class TestInt4:
    @staticmethod
    def quantised(num_rows: int = O, *, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scales and minima as a GGUF file has them; `exact`: scales and zeros that bf16 can hold."""
        codes = torch.randint(0, 16, (num_rows, I), dtype=torch.uint8)
        shape = (num_rows, I // INT4_GROUP)
        if exact:
            return codes, 2.0 ** torch.randint(-6, -1, shape), 2.0 ** torch.randint(-3, 3, shape) - 8.0
        return codes, torch.rand(shape).half() + 0.1, -torch.rand(shape).half() * 8

    @staticmethod
    def values(codes: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor) -> torch.Tensor:
        groups = codes.double().view(*scales.shape, INT4_GROUP)
        return (groups * scales.double()[..., None] + mins.double()[..., None]).view(codes.shape)

    def test_the_zero_of_pytorchs_kernel_belongs_to_code_8(self):
        codes = torch.arange(16).repeat(16, 4).int()  # (16, 64)
        packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
        scale_and_zero = torch.empty(2, 16, 2)  # (I/32, O, 2)
        scale_and_zero[..., 0], scale_and_zero[..., 1] = 0.5, 100.0
        # Each group has scales of its own.
        scale_and_zero[1] = torch.tensor([2.0, -3.0])
        weight = torch._weight_int4pack_mm_for_cpu(torch.eye(64), packed, INT4_GROUP, scale_and_zero).t()  # (16, 64)
        assert torch.equal(weight[:, :32], (codes[:, :32] - 8) * 0.5 + 100)
        assert torch.equal(weight[:, 32:], (codes[:, 32:] - 8) * 2.0 - 3)

    # Fewer rows than a tile, whole tiles, tiles and each remainder, of both sizes of tile.
    @pytest.mark.usefixtures("form")
    @pytest.mark.parametrize("num_rows", [16, 32, 48, 64, 80, 96, 112, 192])
    @pytest.mark.parametrize("num_tokens", [1, 3, 128])
    def test_codes_and_scales_that_bf16_holds_are_exact(self, num_rows: int, num_tokens: int):
        quantised = self.quantised(num_rows, exact=True)
        packed = pack_int4(*quantised)
        expected = self.values(*quantised)
        assert torch.equal(packed.dequantise().double(), expected)
        assert packing_error(packed, expected) == 0.0
        x = torch.randn(num_tokens, I).bfloat16()
        assert_near(linear(x, packed), dense_fp64(x, expected))

    def test_tiles_keep_what_a_file_has(self, form: str):
        quantised = self.quantised()
        if form == "tiles":
            assert torch.equal(pack_int4(*quantised).dequantise(), self.values(*quantised).float())

    def test_q4_0_loses_the_rounding_of_its_scale_only(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(step_cpu, "load", lambda: None)
        codes, scales, _ = self.quantised()
        packed = pack_int4(codes, scales, -8 * scales)
        expected = self.values(codes, scales, -8 * scales)
        # bf16 rounds a scale by at most 2^-8 of it; the zero, (8 - 8) * d, is exact.
        assert ((packed.dequantise() - expected).abs() <= expected.abs() * 2**-8).all()
        assert 1e-4 < packing_error(packed, expected) < 2e-3

    def test_q4_1_loses_the_rounding_of_scale_and_zero_only(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(step_cpu, "load", lambda: None)
        codes, scales, mins = self.quantised()
        packed = pack_int4(codes, scales, mins)
        expected = self.values(codes, scales, mins)
        d, m = scales.double(), mins.double()
        # bf16 rounds by at most 2^-8 of a value; the scale counts once for each step from code 8.
        bound = 2**-8 * (8 * d + (m + 8 * d).abs()).repeat_interleave(INT4_GROUP, dim=1)
        assert ((packed.dequantise() - expected).abs() <= bound * (1 + 1e-6)).all()
        assert 1e-4 < packing_error(packed, expected) < 4e-3

    def test_fp32_scales_lose_nothing(self):
        quantised = self.quantised()
        packed = pack_int4(*quantised, activation_dtype=torch.float32)
        expected = self.values(*quantised)
        assert packing_error(packed, expected) < 1e-7
        x = torch.randn(T, I)
        assert_near(linear(x, packed), dense_fp64(x, expected))

    @pytest.mark.parametrize("shape", [(24, 64), (16, 48), (15, 33)])
    def test_a_shape_without_kernel_is_refused_with_its_sizes(self, shape: tuple[int, int]):
        assert not can_pack("int4", *shape)
        with pytest.raises(
            UnsupportedError, match=rf"{shape[0]} outputs and {shape[1]} inputs.*in int8, fp16 or dense"
        ):
            pack_weight(torch.zeros(shape), "int4")
        assert can_pack("fp16", *shape)

    @pytest.mark.parametrize("num_inputs", [44, 60, 72])
    def test_int8_inputs_behind_whose_end_the_kernel_would_read_are_refused(self, num_inputs: int):
        assert not can_pack("int8", 24, num_inputs) and can_pack("int8", 24, 64)
        with pytest.raises(UnsupportedError, match=f"an int8 weight of {num_inputs} inputs: they come in 16s"):
            pack_weight(torch.zeros(24, num_inputs), "int8")

    def test_a_cpu_without_kernel_is_refused_by_name(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert not can_pack("int4", O, I)
        codes, scales, mins = self.quantised()
        with pytest.raises(UnsupportedError, match=r"CPU with DEFAULT.*must have AVX512 or AVX2"):
            pack_int4(codes, scales, mins)

    def test_arguments_of_other_sizes_are_refused(self):
        codes, scales, mins = self.quantised()
        with pytest.raises(AssertionError, match="scales: axis B is 2, expected 3"):
            pack_int4(codes, scales[:, 1:], mins)
        with pytest.raises(AssertionError, match="mins: axis O is 111"):
            pack_int4(codes, scales, mins[1:])


@pytest.mark.usefixtures("form")
class TestFused:
    """The operators around a linear map, on dense weights and on packed ones."""

    @staticmethod
    def make(kind: str, num_rows: int, num_inputs: int) -> tuple[torch.Tensor | PackedWeight, torch.Tensor]:
        """A weight, and its values."""
        weight = draw(num_rows, num_inputs, dtype=torch.bfloat16)
        if kind == "dense":
            return weight, weight.double()
        packed = pack_weight(weight, kind)
        return packed, packed.dequantise().double()

    @pytest.mark.parametrize("kind", ["dense", *on_this_cpu])
    @pytest.mark.parametrize("num_tokens", [1, T])
    def test_norm_linear_is_the_norm_and_then_the_map(self, kind: str, num_tokens: int):
        weight, values = self.make(kind, O, I)
        bias = draw(O).bfloat16()
        x, norm = (torch.randn(num_tokens, I) * 3).bfloat16(), (torch.rand(I) + 0.5).bfloat16()
        expected = dense_fp64(rms_norm(x.double().float(), norm.float(), EPS), values, bias)
        for norm_weight in (norm, norm.float()):
            y = norm_linear(x, norm_weight, EPS, weight, bias, out_dtype=torch.float32)
            assert y.dtype == torch.float32
            assert_near(y, expected, limit_of(weight) or LIMITS[torch.bfloat16])
        if isinstance(weight, PackedWeight) and weight.tiles is not None:
            # The norm's result is not rounded to bf16 on the way.
            return
        assert torch.equal(norm_linear(x, norm, EPS, weight, bias), linear(rms_norm(x, norm, EPS), weight, bias))

    @pytest.mark.parametrize("kind", ["dense", *on_this_cpu])
    @pytest.mark.parametrize("num_tokens", [1, T])
    @pytest.mark.parametrize("limit", [None, 0.5])
    def test_norm_swiglu_is_its_equation(self, kind: str, num_tokens: int, limit: float | None):
        # Half of 7 tiles, which the kernel with a gate does not take, and of 6.
        for num_factors in (24,) if kind == "dense" else (56, 48):
            self.check_norm_swiglu(kind, num_factors, num_tokens, limit)

    def check_norm_swiglu(self, kind: str, num_factors: int, num_tokens: int, limit: float | None):
        weight, values = self.make(kind, 2 * num_factors, I)
        x, norm = torch.randn(num_tokens, I).bfloat16(), (torch.rand(I) + 0.5).bfloat16()
        gate, up = dense_fp64(rms_norm(x.float(), norm.float(), EPS), values).chunk(2, dim=1)
        gate = gate * torch.sigmoid(gate)
        if limit is not None:
            assert (gate > limit).any() and (up > limit).any() and (up < -limit).any()
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        y = norm_swiglu(x, norm, EPS, weight, limit)
        assert y.dtype == torch.bfloat16
        # Gate and up are rounded before their product.
        assert_near(
            y, gate * up, Limit(rms=2e-2, worst_row=3e-2) if limit_of(weight) else Limit(rms=1e-2, worst_row=2e-2)
        )

    @pytest.mark.parametrize("num_tokens", [1, T])
    def test_the_limit_holds_behind_the_silu_and_not_for_negative_gates(self, num_tokens: int):
        # One input of norm 1 makes gate and up what the weight says.
        x, norm = torch.ones(num_tokens, 1), torch.ones(1)
        gates, ups = torch.tensor([4.0, 40.0, -40.0, -1.0]), torch.tensor([1.0, 5.0, 1.0, -5.0])
        y = norm_swiglu(x, norm, 0.0, torch.cat([gates, ups])[:, None], 3.5)
        # silu(4) = 3.93 is cut to 3.5; a clamp before the SiLU would have given silu(3.5) = 3.40.
        expected = torch.tensor([3.5, 3.5 * 3.5, F.silu(torch.tensor(-40.0)), F.silu(torch.tensor(-1.0)) * -3.5])
        torch.testing.assert_close(y, expected.expand(num_tokens, 4))

    @pytest.mark.parametrize("kind", ["dense", *on_this_cpu])
    @pytest.mark.parametrize("num_tokens", [1, T])
    def test_linear_residual_adds_to_the_stream(self, kind: str, num_tokens: int):
        weight, values = self.make(kind, O, I)
        x, residual = torch.randn(num_tokens, I).bfloat16(), torch.randn(num_tokens, O).bfloat16()
        before = residual.clone()
        y = linear_residual(x, weight, residual)
        assert_near(y, residual.double() + dense_fp64(x, values), limit_of(weight))
        assert torch.equal(residual, before)

    @pytest.mark.parametrize("operator", [norm_linear, norm_swiglu])
    def test_the_norms_scale_is_applied(self, operator: Callable[..., torch.Tensor]):
        x, weight = torch.randn(T, I), draw(O, I)
        norm = torch.rand(I) + 0.5
        assert_near(operator(x, norm, EPS, weight), operator(x, torch.ones(I), EPS, weight * norm))
