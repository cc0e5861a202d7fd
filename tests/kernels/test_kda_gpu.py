"""KDA kernels equal the recurrence at every width and length, for both gates, and touch no state but their own."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from soloist.errors import UnsupportedError
from soloist.kernels import kda, kda_commit_cuda, kda_step_cuda, kda_verify_cuda
from soloist.kernels.kda_inputs import KdaCache, KdaKept, KdaRows, KdaWeights
from soloist.kernels.launch import IS_INTERPRETED, arrival_counters, programmatic_launch
from soloist.kernels.norm import gated_rms_norm_ref
from tests.kernels import cuda_on_cpu
from tests.kernels.device import DEVICE, DTYPE, launch_kernels, nan_in_fresh_memory, rand, split_rows
from tests.kernels.limits import LIMITS, Limit, assert_near

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

# More than one tile of value channels.
H, K, V = 3, 16, 64
LAWS = {"ling": -5.0, "kimi": None}
# On a GPU products have 17 bits, and a convolution's output may be rounded to the next bf16.
STATE = LIMITS[torch.float32] if IS_INTERPRETED else Limit(rms=1e-3, worst_row=1e-2)
WIDTHS = (1, 7, 16) if IS_INTERPRETED else range(1, 17)
LENGTHS = (2, 16, 17, 70) if IS_INTERPRETED else range(1, 71)


@pytest.fixture(autouse=True)
def _kernels_in_memory_of_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    launch_kernels(monkeypatch, kda)
    if IS_INTERPRETED:
        for module in (kda_commit_cuda, kda_step_cuda, kda_verify_cuda):
            monkeypatch.setattr(module, "load_kernel", cuda_on_cpu.load_kernel)
            monkeypatch.setattr(module, "launch", cuda_on_cpu.launch)
    with nan_in_fresh_memory():
        yield


class Layer:
    """Weights, state and conv of one layer, the middle one of three; nothing may touch the others'."""

    def __init__(
        self,
        law: str,
        *,
        heads: int = H,
        K: int = K,
        V: int = V,
        A_log: tuple[float, ...] = (-1.0, 0.3, 1.0),
        dtype: torch.dtype = DTYPE,
    ) -> None:
        C = heads * (2 * K + V)
        self.H, self.K, self.V, self.C, self.dtype = heads, K, V, C, dtype
        self.weights = KdaWeights(
            rand(C, 4, dtype=dtype),
            torch.tensor(A_log[:heads], device=DEVICE),
            rand(heads * K, dtype=torch.float32),
            torch.rand(V, device=DEVICE).add(0.5).to(dtype),
            1e-6,
            LAWS[law],
        )
        self.states = rand(3, heads, V, K, dtype=torch.float32)
        self.convs = rand(3, 3, C, dtype=dtype)
        self.states[::2], self.convs[::2] = torch.nan, torch.nan

    @property
    def cache(self) -> KdaCache:
        return KdaCache(self.states[1], self.convs[1])

    def copy_cache(self) -> KdaCache:
        return KdaCache(*(x.clone() for x in self.cache))

    def assert_others_are_untouched(self) -> None:
        assert self.states[::2].isnan().all() and self.convs[::2].isnan().all()

    def rows(self, T: int, *, f_scale: float = 1.0) -> KdaRows:
        sizes = [self.C, self.H * self.K, self.H * self.V, self.H]
        return KdaRows(*split_rows(T, sizes, scales=(1.0, f_scale, 1.0, 1.0), dtype=self.dtype))

    def scratch(self, T_max: int, *layers: int) -> KdaKept:
        """What verify writes, filled with NaN."""
        shapes = ((T_max, self.H, self.K), (T_max, self.H, self.V), (T_max, self.H, self.K), (T_max, self.C))
        dtypes = (torch.float32, torch.float32, torch.float32, self.dtype)
        return KdaKept(
            *(
                torch.full((*layers, *shape), torch.nan, dtype=dtype, device=DEVICE)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            )
        )

    def recurrence(self, rows: KdaRows, cache: KdaCache) -> torch.Tensor:
        """Advance `cache` by the definition."""
        return kda.kda_recurrent_ref(contiguous(rows), self.weights, cache)


def contiguous(rows: KdaRows) -> KdaRows:
    return KdaRows(*(x.contiguous() for x in rows))


def commit(cache: KdaCache, kept: KdaKept, num_rows: torch.Tensor) -> None:
    """Commit one layer."""
    kda.kda_commit(KdaCache(*(x[None] for x in cache)), KdaKept(*(x[None] for x in kept)), num_rows)


def i32(x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("width", [None, 1, 9])
def test_a_step_equals_the_recurrence(law: str, width: int | None):
    layer = Layer(law)
    rows, plain = layer.rows(1), layer.copy_cache()
    expected = layer.recurrence(rows, plain)
    out = kda.kda_step(rows, layer.weights, layer.cache, width=None if width is None else i32(width))
    assert_near(out, expected)
    assert_near(layer.cache[0], plain[0], STATE)
    assert torch.equal(layer.cache[1], plain[1])
    layer.assert_others_are_untouched()


def test_a_step_of_width_zero_leaves_state_and_conv_alone():
    layer = Layer("ling")
    before = layer.copy_cache()
    kda.kda_step(layer.rows(1), layer.weights, layer.cache, width=i32(0))
    assert all(torch.equal(now, old) for now, old in zip(layer.cache, before, strict=True))


@pytest.mark.parametrize(("K", "V"), [(64, 16), (48, 72), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_takes_heads_of_any_form(K: int, V: int, dtype: torch.dtype):
    layer = Layer("ling" if V == 16 else "kimi", heads=1, K=K, V=V, dtype=dtype)
    plain = layer.copy_cache()
    # Rows that move into the window, and out of it.
    for _ in range(4):
        rows = layer.rows(1)
        expected = layer.recurrence(rows, plain)
        assert_near(kda.kda_step(rows, layer.weights, layer.cache), expected)
        assert_near(layer.cache[0], plain[0], STATE)
        assert torch.equal(layer.cache[1], plain[1])


@pytest.mark.parametrize(("law", "A_log"), [("ling", (-8.0, 3.0, 6.0)), ("kimi", (-8.0, 2.0, 6.0))])
def test_extreme_gates_keep_a_step_exact(law: str, A_log: tuple[float, ...]):
    layer = Layer(law, A_log=A_log)
    for f in (-60.0, 0.0, 60.0):
        rows, plain = layer.rows(1, f_scale=4.0), layer.copy_cache()
        rows.f.add_(f)
        expected = layer.recurrence(rows, plain)
        assert_near(kda.kda_step(rows, layer.weights, layer.cache), expected)
        assert_near(layer.cache[0], plain[0], STATE)


@pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU chooses the order itself")
def test_no_order_of_warps_changes_a_bit_of_a_step(monkeypatch: pytest.MonkeyPatch):
    layer = Layer("ling", heads=1, K=32, V=96)
    rows, before, seen = layer.rows(1), layer.copy_cache(), []
    for seed in range(12):
        monkeypatch.setattr(kda_step_cuda, "launch", partial(cuda_on_cpu.launch, seed=seed))
        cache = KdaCache(*(x.clone() for x in before))
        seen.append((kda.kda_step(rows, layer.weights, cache), *cache))
    assert all(torch.equal(x, y) for each in seen[1:] for x, y in zip(each, seen[0], strict=True))
    assert not any(x.isnan().any() for x in seen[0])


def check_verify(layer: Layer, rows: KdaRows, T_max: int) -> None:
    """Verify all rows and compare what comes out and what is kept; nothing else may be written."""
    T, before, plain = rows.qkv.shape[0], layer.copy_cache(), layer.copy_cache()
    expected, kept, kept_ref = layer.recurrence(rows, plain), layer.scratch(T_max), layer.scratch(T_max)
    kda.kda_verify_ref(contiguous(rows), layer.weights, before, kept_ref)
    out = kda.kda_verify(rows, layer.weights, layer.cache, kept)
    assert_near(out, expected)
    assert all(torch.equal(now, old) for now, old in zip(layer.cache, before, strict=True))
    for x, x_ref in zip(kept[:3], kept_ref[:3], strict=True):
        assert_near(x[:T], x_ref[:T], STATE)
    assert torch.equal(kept.conv[:T], rows.qkv)
    assert all(x[T:].isnan().all() for x in kept)
    assert not arrival_counters(DEVICE).any()

    commit(layer.cache, kept, i32(T))
    assert_near(layer.cache[0], plain[0], STATE)
    assert torch.equal(layer.cache[1], plain[1])
    layer.assert_others_are_untouched()


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("T", WIDTHS)
def test_a_verify_and_its_commit_equal_the_recurrence(T: int, law: str):
    layer = Layer(law)
    check_verify(layer, layer.rows(T), T_max=min(T + 2, 16))


def test_a_verify_takes_heads_of_any_form():
    layer = Layer("kimi", heads=1, K=64, V=16)
    check_verify(layer, layer.rows(5), T_max=16)


# Decays of 1, of e^-5 and of both for the bounded law; from e^-0.0003 to e^-4000 a token for the other: one row forgets
# everything, among rows that forget nothing.
EXTREMES = [("ling", (-8.0, 3.0, 6.0)), ("kimi", (-8.0, 2.0, 6.0))]


def extreme_rows(layer: Layer, T: int) -> KdaRows:
    rows = layer.rows(T, f_scale=4.0)
    rows.f[T // 2] = 60.0
    rows.f[T // 2 + 1 :] -= 6.0
    return rows


@pytest.mark.parametrize(("law", "A_log"), EXTREMES)
def test_extreme_gates_keep_a_verify_exact(law: str, A_log: tuple[float, ...]):
    layer = Layer(law, A_log=A_log)
    check_verify(layer, extreme_rows(layer, 16), T_max=16)


@pytest.mark.parametrize(("law", "A_log"), EXTREMES)
def test_extreme_gates_keep_a_prompt_exact(law: str, A_log: tuple[float, ...]):
    layer = Layer(law, A_log=A_log)
    check_prompt(layer, extreme_rows(layer, 33))


def check_prompt(layer: Layer, rows: KdaRows) -> None:
    plain = layer.copy_cache()
    expected = layer.recurrence(rows, plain)
    assert_near(kda.kda_chunk(rows, layer.weights, layer.cache), expected)
    assert_near(layer.cache[0], plain[0], STATE)
    assert torch.equal(layer.cache[1], plain[1])
    layer.assert_others_are_untouched()


@pytest.mark.parametrize("T", LENGTHS)
def test_a_prompt_of_any_length_equals_the_recurrence(T: int):
    layer = Layer("ling" if T % 3 else "kimi", heads=1)
    check_prompt(layer, layer.rows(T))


@pytest.mark.parametrize("law", LAWS)
def test_a_prompt_of_many_heads_equals_the_recurrence(law: str):
    layer = Layer(law)
    check_prompt(layer, layer.rows(19))


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 5, 7])
def test_a_commit_advances_every_layer_and_reads_no_other_row(num_rows: int):
    layer, L, T = Layer("ling", heads=1), 2, 7
    cache = KdaCache(rand(L, 1, V, K, dtype=torch.float32), rand(L, 3, layer.C))
    kept = KdaKept(*(rand(*x.shape, dtype=x.dtype) for x in layer.scratch(T, L)))
    kept.g.abs_().neg_()
    for x in kept:
        x[:, num_rows:] = torch.nan
    plain = KdaCache(*(x.clone() for x in cache))
    kda.kda_commit_ref(plain, kept, i32(num_rows))
    kda.kda_commit(cache, kept, i32(num_rows))
    # No convolution here, and fp32 throughout.
    assert_near(cache.state, plain.state)
    assert torch.equal(cache.conv, plain.conv)


def test_the_state_after_many_verified_steps_is_that_of_plain_decoding():
    """Both laws by turns on one state. In fp32 all through, so that only the kernels' products are rounded."""
    is_small = IS_INTERPRETED
    layer = Layer("ling", heads=1 if is_small else H, V=16 if is_small else V, dtype=torch.float32)
    layer.states[1], layer.convs[1] = 0.0, 0.0
    plain = layer.copy_cache()
    choose = torch.Generator().manual_seed(3)
    limit = Limit(rms=1e-5, worst_row=1e-4) if is_small else Limit(rms=5e-5, worst_row=5e-4)
    with programmatic_launch(False):
        for i in range(52 if is_small else 600):
            layer.weights = layer.weights._replace(lower_bound=LAWS["kimi"] if i % 8 == 7 else LAWS["ling"])
            T = int(torch.randint(1, 17, (), generator=choose))
            num_rows = int(torch.randint(0, T + 1, (), generator=choose))
            rows, kept = layer.rows(T), layer.scratch(16)
            out = kda.kda_verify(rows, layer.weights, layer.cache, kept)
            commit(layer.cache, kept, i32(num_rows))
            if num_rows:
                expected = layer.recurrence(KdaRows(*(x[:num_rows] for x in rows)), plain)
                assert_near(out[:num_rows], expected, Limit(rms=1e-4, worst_row=1e-3))
                assert_near(layer.cache[0], plain[0], limit)
            assert torch.equal(layer.cache[1], plain[1])


@pytest.mark.skipif(IS_INTERPRETED, reason="fla-core's kernels run on a GPU only")
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("T", [1, 9, 16])
def test_a_verify_and_its_commit_equal_those_of_fla_core(T: int, law: str):
    fla = pytest.importorskip("fla.ops.kda")
    layer = Layer(law, K=128, V=128)
    # Taps that let a row through: fla-core's recurrence begins behind the convolution.
    layer.weights.conv_w.zero_()[:, 3] = 1
    rows, kept = layer.rows(T), layer.scratch(16)
    q, k, v = (x.unflatten(-1, (H, 128)) for x in F.silu(rows.qkv.float()).to(DTYPE).chunk(3, dim=-1))
    o, state = fla.fused_recurrent_kda(
        *(x[None].contiguous() for x in (q, k, v, rows.f.unflatten(-1, (H, 128)), rows.b)),
        A_log=layer.weights.A_log,
        dt_bias=layer.weights.dt_bias,
        initial_state=layer.states[1:2].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=LAWS[law],
        state_v_first=True,
    )
    gate, (*_, o_norm, eps, _) = rows.gate.reshape(o[0].shape), layer.weights
    expected = gated_rms_norm_ref(o[0], gate, o_norm, eps).flatten(1)
    out = kda.kda_verify(rows, layer.weights, layer.cache, kept)
    commit(layer.cache, kept, i32(T))
    assert_near(out, expected, Limit(rms=1e-2, worst_row=3e-2))
    assert_near(layer.cache[0], state[0], Limit(rms=2e-3, worst_row=2e-2))


@pytest.mark.skipif(IS_INTERPRETED, reason="launches overlap on a GPU only")
@pytest.mark.parametrize("law", LAWS)
def test_chained_launches_give_the_bits_of_separate_ones(law: str):
    layer = Layer(law, heads=31, K=128, V=128, A_log=(0.1,) * 31)
    rows = [layer.rows(9) for _ in range(20)]
    counts = [i32(i % 10) for i in range(20)]

    def run() -> tuple[torch.Tensor, ...]:
        cache, kept, outs = layer.copy_cache(), layer.scratch(9), []
        for each, count in zip(rows, counts, strict=True):
            outs.append(kda.kda_verify(each, layer.weights, cache, kept))
            commit(cache, kept, count)
            # A step has other kernels between a commit and the next read of the state.
            outs.append(outs[-1] * 2)
        return torch.cat(outs), *cache

    with programmatic_launch(False):
        expected = run()
    for _ in range(5):
        assert all(torch.equal(x, y) for x, y in zip(run(), expected, strict=True))


@pytest.mark.parametrize("T", [1, 5])
def test_heads_without_a_kernel_are_refused_by_name(T: int):
    layer = Layer("ling", K=24)
    form = kda.kda_step if T == 1 else kda.kda_chunk
    with pytest.raises(UnsupportedError, match="heads of 24 keys and 64 values have no GPU kernel"):
        form(layer.rows(T), layer.weights, layer.cache)


@pytest.mark.parametrize("form", [kda.kda_step, kda.kda_verify])
@pytest.mark.parametrize(("K", "V"), [(16, 88), (16, 264), (144, 64), (24, 64)])
def test_heads_that_no_cluster_divides_are_refused_by_name(form: Callable[..., object], K: int, V: int):
    layer = Layer("ling", heads=1, K=K, V=V)
    more = (layer.scratch(1),) if form is kda.kda_verify else ()
    with pytest.raises(UnsupportedError, match=f"heads of {K} keys and {V} values have no GPU kernel for a step"):
        form(layer.rows(1), layer.weights, layer.cache, *more)


def test_taps_of_another_type_than_the_rows_are_refused_by_name():
    layer = Layer("ling", dtype=torch.bfloat16)
    weights = layer.weights._replace(conv_w=layer.weights.conv_w.float())
    with pytest.raises(UnsupportedError, match=r"rows of torch.bfloat16 beside taps of torch.float32"):
        kda.kda_step(layer.rows(1), weights, layer.cache)
