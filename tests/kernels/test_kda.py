"""KDA: every form equals the recurrence written in fp64, in the layout [H, V, K] with K != V."""

import pytest
import torch
import torch.nn.functional as F

from soloist.kernels import kda
from soloist.kernels.kda_inputs import KdaCache, KdaKept, KdaRows, KdaWeights

H, K, V = 3, 20, 12
C = H * (2 * K + V)
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127)
LAWS = {"ling": -5.0, "kimi": None}


def cut(rows: KdaRows, start: int, stop: int) -> KdaRows:
    return KdaRows(*(x[start:stop] for x in rows))


def make_layer(
    A_log: tuple[float, ...] = (-1.0, 0.3, 1.0),
    dtype: torch.dtype = torch.float32,
    lower_bound: float | None = -5.0,
) -> KdaWeights:
    taps, o_norm = torch.randn(C, 4).to(dtype), (torch.rand(V) + 0.5).to(dtype)
    return KdaWeights(taps, torch.tensor(A_log), torch.randn(H * K), o_norm, 1e-6, lower_bound)


def make_rows(T: int, dtype: torch.dtype = torch.float32, f_scale: float = 1.0) -> KdaRows:
    widths = (C, H * K, H * V, H)
    qkv, f, gate, b = (torch.randn(T, n).to(dtype) for n in widths)
    return KdaRows(qkv, f * f_scale, gate, b)


def make_cache(dtype: torch.dtype = torch.float32) -> KdaCache:
    return KdaCache(torch.randn(H, V, K), torch.randn(3, C).to(dtype))


def copy(cache: KdaCache) -> KdaCache:
    return KdaCache(*(x.clone() for x in cache))


def make_kept(T_max: int, *layers: int, dtype: torch.dtype = torch.float32) -> KdaKept:
    """What verify writes, filled with NaN."""
    shapes = ((T_max, H, K), (T_max, H, V), (T_max, H, K), (T_max, C))
    dtypes = (torch.float32, torch.float32, torch.float32, dtype)
    return KdaKept(*(torch.full((*layers, *s), torch.nan, dtype=d) for s, d in zip(shapes, dtypes, strict=True)))


def commit(cache: KdaCache, kept: KdaKept, num_rows: int) -> None:
    """Commit one layer."""
    count = torch.tensor(num_rows, dtype=torch.int32)
    kda.kda_commit(KdaCache(*(x[None] for x in cache)), KdaKept(*(x[None] for x in kept)), count)


def plain_fp64(rows: KdaRows, layer: KdaWeights, cache: KdaCache):
    """The equations token by token and head by head, fp64 but for the declared roundings; gives output, state, conv."""
    dtype = rows.qkv.dtype
    inputs = [x.double() for x in rows]
    conv_w, A_log, dt_bias, o_norm = (x.double() for x in layer[:4])
    state, window = cache.state.double().clone(), torch.cat([cache.conv.double(), inputs[0]])
    lower_bound = layer.lower_bound
    out = torch.full((len(rows.qkv), H, V), torch.nan, dtype=torch.float64)
    for t in range(len(rows.qkv)):
        mixed = F.silu((window[t : t + 4] * conv_w.T).sum(0)).to(dtype).double()
        for h in range(H):
            key, value = slice(h * K, (h + 1) * K), slice(h * V, (h + 1) * V)
            q, k, v = mixed[: H * K][key], mixed[H * K : 2 * H * K][key], mixed[2 * H * K :][value]
            q = q / (q.square().sum() + 1e-6).sqrt() / K**0.5
            k = k / (k.square().sum() + 1e-6).sqrt()
            drive = inputs[1][t, key] + dt_bias[key]
            rate = A_log[h].exp()
            g = -rate * F.softplus(drive) if lower_bound is None else lower_bound * torch.sigmoid(rate * drive)
            S = state[h] * g.exp()  # (V, K)
            S = S + torch.outer(torch.sigmoid(inputs[3][t, h]) * (v - S @ k), k)
            o = (S @ q).to(dtype).double()
            out[t, h] = o / (o.square().mean() + layer.eps).sqrt() * o_norm * torch.sigmoid(inputs[2][t, value])
            state[h] = S
    return out.flatten(1), state, window[-3:]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative RMS error."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("T", LENGTHS)
def test_every_form_equals_the_recurrence_in_fp64(T: int, law: str) -> None:
    layer, rows, cache = make_layer(lower_bound=LAWS[law]), make_rows(T), make_cache()
    expected, expected_state, expected_conv = plain_fp64(rows, layer, cache)
    for form in (kda.kda_recurrent_ref, kda.kda_chunk, *([kda.kda_step] if T == 1 else [])):
        new = copy(cache)
        assert error(form(rows, layer, new), expected) < 1e-5, form
        assert error(new.state, expected_state) < 1e-5, form
        assert torch.equal(new.conv.double(), expected_conv), form
    if T <= 16:
        kept = make_kept(16)
        assert error(kda.kda_verify(rows, layer, cache, kept), expected) < 1e-5
        commit(cache, kept, T)
        assert error(cache.state, expected_state) < 1e-5
        assert torch.equal(cache.conv.double(), expected_conv)


@pytest.mark.parametrize(
    ("law", "A_log", "f_scale"),
    [
        # Decays of 1, of e^-5 and of both, channel by channel.
        ("ling", (-8.0, 3.0, 6.0), 4.0),
        # From e^-0.0003 to e^-4000 a token: everything is forgotten within one row, next to rows that forget nothing.
        ("kimi", (-8.0, 2.0, 6.0), 4.0),
    ],
)
@pytest.mark.parametrize("T", [2, 16, 17, 65, 127])
def test_extreme_gates_keep_every_form_exact(T: int, law: str, A_log: tuple[float, ...], f_scale: float) -> None:
    layer, rows, cache = make_layer(A_log, lower_bound=LAWS[law]), make_rows(T, f_scale=f_scale), make_cache()
    # One row that forgets all, among rows that forget little: differences of cumulated gates lose their digits here.
    rows.f[T // 2] = 60.0
    rows.f[T // 2 + 1 :] -= 6.0
    expected, expected_state, _ = plain_fp64(rows, layer, cache)
    chunked = copy(cache)
    assert error(kda.kda_chunk(rows, layer, chunked), expected) < 1e-5
    assert error(chunked.state, expected_state) < 1e-5
    if T <= 16:
        kept = make_kept(T)
        assert error(kda.kda_verify(rows, layer, cache, kept), expected) < 1e-5
        commit(cache, kept, T)
        assert error(cache.state, expected_state) < 1e-5


def test_vanishing_queries_and_keys_meet_the_eps_inside_the_root() -> None:
    layer, rows, cache = make_layer(), make_rows(3), make_cache()
    rows.qkv.mul_(1e-4)
    cache.conv.mul_(1e-4)
    expected, expected_state, _ = plain_fp64(rows, layer, cache)
    assert error(kda.kda_chunk(rows, layer, cache), expected) < 1e-5
    assert error(cache.state, expected_state) < 1e-5


@pytest.mark.parametrize("law", LAWS)
def test_a_prompt_cut_anywhere_leaves_the_same_state(law: str) -> None:
    T = 67
    layer, rows, cache = make_layer(lower_bound=LAWS[law]), make_rows(T), make_cache()
    one = copy(cache)
    expected = kda.kda_chunk(rows, layer, one)
    for place in range(1, T):
        two = copy(cache)
        parts = [kda.kda_chunk(part, layer, two) for part in (cut(rows, 0, place), cut(rows, place, T))]
        assert error(torch.cat(parts), expected) < 1e-5, place
        assert error(two.state, one.state) < 1e-5, place
        assert torch.equal(two.conv, one.conv), place


def test_a_prompt_longer_than_one_block_of_rows_is_worked_on_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rows, cache = make_layer(), make_rows(150), make_cache()
    one = copy(cache)
    expected = kda.kda_chunk(rows, layer, one)
    monkeypatch.setattr(kda, "MAX_ROWS", 70)
    assert error(kda.kda_chunk(rows, layer, cache), expected) < 1e-5
    assert error(cache.state, one.state) < 1e-5


def test_hundreds_of_verified_steps_equal_plain_decoding() -> None:
    """Two layers, one of each law, commit together; plain decoding never sees the rejected rows."""
    choose = torch.Generator().manual_seed(3)
    layers = [make_layer(), make_layer((0.5, -2.0, 1.5), lower_bound=None)]
    caches = KdaCache(torch.zeros(2, H, V, K), torch.zeros(2, 3, C))
    plain = copy(caches)
    for _ in range(500):
        T = int(torch.randint(1, 9, (), generator=choose))
        num_rows = int(torch.randint(1, T + 1, (), generator=choose))
        kept = make_kept(8, 2)
        for i, layer in enumerate(layers):
            rows = make_rows(T)
            cache, own = KdaCache(*(x[i] for x in caches)), KdaKept(*(x[i] for x in kept))
            verified = kda.kda_verify(rows, layer, cache, own)
            expected = kda.kda_recurrent_ref(cut(rows, 0, num_rows), layer, KdaCache(*(x[i] for x in plain)))
            assert error(verified[:num_rows], expected) < 1e-5
        kda.kda_commit(caches, kept, torch.tensor(num_rows, dtype=torch.int32))
        assert error(caches.state, plain.state) < 1e-6
        assert torch.equal(caches.conv, plain.conv)


@pytest.mark.parametrize("law", LAWS)
def test_a_commit_of_any_number_of_rows_reads_no_other_row(law: str) -> None:
    T, T_max = 7, 9
    layer, rows, cache = make_layer(lower_bound=LAWS[law]), make_rows(T), make_cache()
    for num_rows in range(T + 1):
        kept = make_kept(T_max)
        kda.kda_verify(rows, layer, cache, kept)
        assert all(x[T:].isnan().all() and not x[:T].isnan().any() for x in kept)
        for x in kept:
            x[num_rows:] = torch.nan
        new, plain = copy(cache), copy(cache)
        commit(new, kept, num_rows)
        if num_rows:
            kda.kda_recurrent_ref(cut(rows, 0, num_rows), layer, plain)
        assert error(new.state, plain.state) < 1e-6, num_rows
        assert torch.equal(new.conv, plain.conv), num_rows


def test_a_verify_leaves_the_state_alone_and_no_row_sees_a_later_one() -> None:
    layer, rows, cache = make_layer(), make_rows(6), make_cache()
    before = copy(cache)
    long = kda.kda_verify(rows, layer, cache, make_kept(6))
    short = kda.kda_verify(cut(rows, 0, 4), layer, cache, make_kept(6))
    assert torch.equal(cache.state, before.state)
    assert torch.equal(cache.conv, before.conv)
    assert error(short, long[:4]) < 1e-6


def test_a_commit_never_reads_the_number_of_rows_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, caches = make_kept(5, 2), KdaCache(torch.randn(2, H, V, K), torch.randn(2, 3, C))
    num_rows = torch.tensor(0, dtype=torch.int32)
    for read in ("item", "tolist", "numpy", "cpu", "__int__", "__index__", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, read, lambda *_: pytest.fail("a device value was read on the host"))
    kda.kda_commit(caches, kept, num_rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_every_form_rounds_at_the_same_places(dtype: torch.dtype) -> None:
    layer, rows, cache = make_layer(dtype=dtype), make_rows(16, dtype), make_cache(dtype)
    exact, exact_state, _ = plain_fp64(rows, layer, cache)
    plain, chunked = copy(cache), copy(cache)
    outputs = (
        kda.kda_recurrent_ref(rows, layer, plain),
        kda.kda_chunk(rows, layer, chunked),
        kda.kda_verify(rows, layer, cache, make_kept(16, dtype=dtype)),
    )
    for y in outputs:
        assert y.dtype is dtype
        # The same values are rounded everywhere, so only a rounding that fp32 noise tips over may differ.
        assert (y != exact.to(dtype)).float().mean() < 0.02
    assert error(chunked.state, exact_state) < 1e-5
    assert error(plain.state, exact_state) < 1e-5


def test_projections_may_be_slices_of_one_packed_projection() -> None:
    layer, rows, cache = make_layer(), make_rows(5), make_cache()
    packed = torch.cat(list(rows), dim=1)
    slices = KdaRows(*packed.split([x.shape[1] for x in rows], dim=1))
    for form in (kda.kda_recurrent_ref, kda.kda_chunk):
        expected = form(rows, layer, copy(cache))
        # Sums of rows that are apart may be vectorised differently.
        torch.testing.assert_close(form(slices, layer, copy(cache)), expected)


def test_shapes_that_disagree_are_refused() -> None:
    layer, rows, cache = make_layer(), make_rows(1), make_cache()
    with pytest.raises(AssertionError, match="qkv has"):
        kda.kda_step(rows, layer, cache._replace(state=cache.state.mT.contiguous()))
    with pytest.raises(AssertionError, match="one row"):
        kda.kda_step(make_rows(2), layer, cache)
    with pytest.raises(AssertionError, match="17 rows"):
        kda.kda_verify(make_rows(17), layer, cache, make_kept(17))
    with pytest.raises(AssertionError, match="conv: dtype"):
        kda.kda_step(rows, layer, cache._replace(conv=cache.conv.bfloat16()))


@pytest.mark.parametrize("law", LAWS)
def test_the_recurrence_equals_fla_cores_naive_one(law: str) -> None:
    try:
        from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
        from fla.ops.kda.naive import naive_recurrent_kda
    except (ImportError, RuntimeError) as reason:
        pytest.skip(f"fla-core: {reason}")
    T = 33
    layer, rows, cache = make_layer(lower_bound=LAWS[law]), make_rows(T), make_cache()
    window = torch.cat([cache.conv, rows.qkv])
    mixed = F.silu(F.conv1d(window.T[None], layer.conv_w[:, None], groups=C)[0].T)  # (T, C)
    q, k, v = mixed.split([H * K, H * K, H * V], dim=1)
    q, k = (x.view(1, T, H, K) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    f = rows.f.view(1, T, H, K)
    if law == "kimi":
        g = naive_kda_gate(f, layer.A_log, layer.dt_bias)
    else:
        g = naive_kda_lowerbound_gate(f, layer.A_log, layer.dt_bias, -5.0)
    o, final = naive_recurrent_kda(
        q, k, v.view(1, T, H, V), g, rows.b.sigmoid()[None], initial_state=cache.state.mT[None], output_final_state=True
    )
    gate = rows.gate.view(T, H, V).sigmoid()
    expected = F.rms_norm(o[0], (V,), layer.o_norm, layer.eps) * gate
    assert error(kda.kda_chunk(rows, layer, cache), expected.flatten(1)) < 1e-5
    assert error(cache.state, final[0].mT) < 1e-5
