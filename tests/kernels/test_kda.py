"""KDA: every form equals the recurrence written in fp64, in the layout [H, V, K] with K != V."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from soloist.kernels import kda

H, K, V = 3, 20, 12
C = H * (2 * K + V)
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127)
LAWS = {"ling": -5.0, "kimi": None}


class Layer(NamedTuple):
    """Weights of one layer."""

    conv_w: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    o_norm: torch.Tensor
    eps: float = 1e-6


class Rows(NamedTuple):
    """Projections of some tokens."""

    qkv: torch.Tensor
    f: torch.Tensor
    gate: torch.Tensor
    b: torch.Tensor

    def cut(self, start: int, stop: int) -> "Rows":
        return Rows(*(x[start:stop] for x in self))


def make_layer(A_log: tuple[float, ...] = (-1.0, 0.3, 1.0), dtype: torch.dtype = torch.float32) -> Layer:
    return Layer(torch.randn(C, 4).to(dtype), torch.tensor(A_log), torch.randn(H * K), (torch.rand(V) + 0.5).to(dtype))


def make_rows(T: int, dtype: torch.dtype = torch.float32, f_scale: float = 1.0) -> Rows:
    widths = (C, H * K, H * V, H)
    qkv, f, gate, b = (torch.randn(T, n).to(dtype) for n in widths)
    return Rows(qkv, f * f_scale, gate, b)


def make_state(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(H, V, K), torch.randn(3, C).to(dtype)


def make_scratch(T_max: int, *layers: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What verify writes, filled with NaN."""
    shapes = ((T_max, H, K), (T_max, H, V), (T_max, H, K), (T_max, C))
    dtypes = (torch.float32, torch.float32, torch.float32, dtype)
    return [torch.full((*layers, *s), torch.nan, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]


def plain_fp64(rows: Rows, layer: Layer, state: torch.Tensor, conv: torch.Tensor, lower_bound: float | None):
    """The equations token by token and head by head, fp64 but for the declared roundings; gives output, state, conv."""
    dtype = rows.qkv.dtype
    inputs = [x.double() for x in rows]
    conv_w, A_log, dt_bias, o_norm = (x.double() for x in layer[:4])
    state, window = state.double().clone(), torch.cat([conv.double(), inputs[0]])
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
    kw = {"num_heads": H, "lower_bound": LAWS[law]}
    layer, rows, (state, conv) = make_layer(), make_rows(T), make_state()
    expected, expected_state, expected_conv = plain_fp64(rows, layer, state, conv, LAWS[law])
    for form in (kda.kda_recurrent_ref, kda.kda_chunk, *([kda.kda_step] if T == 1 else [])):
        new_state, new_conv = state.clone(), conv.clone()
        y = form(*rows, *layer, new_state, new_conv, **kw)
        assert error(y, expected) < 1e-5, form
        assert error(new_state, expected_state) < 1e-5, form
        assert torch.equal(new_conv.double(), expected_conv), form
    if T <= 16:
        scratch = make_scratch(16)
        new_state, new_conv = state.clone(), conv.clone()
        assert error(kda.kda_verify(*rows, *layer, new_state, new_conv, *scratch, **kw), expected) < 1e-5
        kda.kda_commit(new_state[None], new_conv[None], *(x[None] for x in scratch), torch.tensor(T, dtype=torch.int32))
        assert error(new_state, expected_state) < 1e-5
        assert torch.equal(new_conv.double(), expected_conv)


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
    kw = {"num_heads": H, "lower_bound": LAWS[law]}
    layer, rows, (state, conv) = make_layer(A_log), make_rows(T, f_scale=f_scale), make_state()
    # One row that forgets all, among rows that forget little: differences of cumulated gates lose their digits here.
    rows.f[T // 2] = 60.0
    rows.f[T // 2 + 1 :] -= 6.0
    expected, expected_state, _ = plain_fp64(rows, layer, state, conv, LAWS[law])
    chunk_state = state.clone()
    y = kda.kda_chunk(*rows, *layer, chunk_state, conv.clone(), **kw)
    assert error(y, expected) < 1e-5
    assert error(chunk_state, expected_state) < 1e-5
    if T <= 16:
        scratch = make_scratch(T)
        assert error(kda.kda_verify(*rows, *layer, state, conv, *scratch, **kw), expected) < 1e-5
        states, convs = state[None].clone(), conv[None].clone()
        kda.kda_commit(states, convs, *(x[None] for x in scratch), torch.tensor(T, dtype=torch.int32))
        assert error(states[0], expected_state) < 1e-5


def test_vanishing_queries_and_keys_meet_the_eps_inside_the_root() -> None:
    layer, rows, (state, conv) = make_layer(), make_rows(3), make_state()
    rows.qkv.mul_(1e-4)
    expected, expected_state, _ = plain_fp64(rows, layer, state, conv * 1e-4, -5.0)
    y = kda.kda_chunk(*rows, *layer, state, conv * 1e-4, num_heads=H, lower_bound=-5.0)
    assert error(y, expected) < 1e-5
    assert error(state, expected_state) < 1e-5


@pytest.mark.parametrize("law", LAWS)
def test_a_prompt_cut_anywhere_leaves_the_same_state(law: str) -> None:
    T = 67
    kw = {"num_heads": H, "lower_bound": LAWS[law]}
    layer, rows, (state, conv) = make_layer(), make_rows(T), make_state()
    one_state, one_conv = state.clone(), conv.clone()
    expected = kda.kda_chunk(*rows, *layer, one_state, one_conv, **kw)
    for cut in range(1, T):
        two_state, two_conv = state.clone(), conv.clone()
        parts = [
            kda.kda_chunk(*part, *layer, two_state, two_conv, **kw) for part in (rows.cut(0, cut), rows.cut(cut, T))
        ]
        assert error(torch.cat(parts), expected) < 1e-5, cut
        assert error(two_state, one_state) < 1e-5, cut
        assert torch.equal(two_conv, one_conv), cut


def test_a_prompt_longer_than_one_block_of_rows_is_worked_on_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    kw = {"num_heads": H, "lower_bound": -5.0}
    layer, rows, (state, conv) = make_layer(), make_rows(150), make_state()
    one_state = state.clone()
    expected = kda.kda_chunk(*rows, *layer, one_state, conv.clone(), **kw)
    monkeypatch.setattr(kda, "MAX_ROWS", 70)
    assert error(kda.kda_chunk(*rows, *layer, state, conv, **kw), expected) < 1e-5
    assert error(state, one_state) < 1e-5


def test_hundreds_of_verified_steps_equal_plain_decoding() -> None:
    """Two layers, one of each law, commit together; plain decoding never sees the rejected rows."""
    choose = torch.Generator().manual_seed(3)
    layers = [(make_layer(), -5.0), (make_layer((0.5, -2.0, 1.5)), None)]
    state, conv = torch.zeros(2, H, V, K), torch.zeros(2, 3, C)
    plain_state, plain_conv = state.clone(), conv.clone()
    for _ in range(500):
        T = int(torch.randint(1, 9, (), generator=choose))
        num_rows = int(torch.randint(1, T + 1, (), generator=choose))
        scratch = make_scratch(8, 2)
        for i, (layer, lower_bound) in enumerate(layers):
            kw = {"num_heads": H, "lower_bound": lower_bound}
            rows = make_rows(T)
            verified = kda.kda_verify(*rows, *layer, state[i], conv[i], *(x[i] for x in scratch), **kw)
            kept = rows.cut(0, num_rows)
            plain = kda.kda_recurrent_ref(*kept, *layer, plain_state[i], plain_conv[i], **kw)
            assert error(verified[:num_rows], plain) < 1e-5
        kda.kda_commit(state, conv, *scratch, torch.tensor(num_rows, dtype=torch.int32))
        assert error(state, plain_state) < 1e-6
        assert torch.equal(conv, plain_conv)


@pytest.mark.parametrize("law", LAWS)
def test_a_commit_of_any_number_of_rows_reads_no_other_row(law: str) -> None:
    T, T_max = 7, 9
    kw = {"num_heads": H, "lower_bound": LAWS[law]}
    layer, rows, (state, conv) = make_layer(), make_rows(T), make_state()
    for num_rows in range(T + 1):
        scratch = make_scratch(T_max)
        kda.kda_verify(*rows, *layer, state, conv, *scratch, **kw)
        assert all(x[T:].isnan().all() and not x[:T].isnan().any() for x in scratch)
        for x in scratch:
            x[num_rows:] = torch.nan
        new_state, new_conv = state[None].clone(), conv[None].clone()
        count = torch.tensor(num_rows, dtype=torch.int32)
        kda.kda_commit(new_state, new_conv, *(x[None] for x in scratch), count)
        plain_state, plain_conv = state.clone(), conv.clone()
        if num_rows:
            kda.kda_recurrent_ref(*rows.cut(0, num_rows), *layer, plain_state, plain_conv, **kw)
        assert error(new_state[0], plain_state) < 1e-6, num_rows
        assert torch.equal(new_conv[0], plain_conv), num_rows


def test_a_verify_leaves_the_state_alone_and_no_row_sees_a_later_one() -> None:
    kw = {"num_heads": H, "lower_bound": -5.0}
    layer, rows, (state, conv) = make_layer(), make_rows(6), make_state()
    before = state.clone(), conv.clone()
    long = kda.kda_verify(*rows, *layer, state, conv, *make_scratch(6), **kw)
    short = kda.kda_verify(*rows.cut(0, 4), *layer, state, conv, *make_scratch(6), **kw)
    assert torch.equal(state, before[0])
    assert torch.equal(conv, before[1])
    assert error(short, long[:4]) < 1e-6


def test_a_commit_never_reads_the_number_of_rows_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, state, conv = make_scratch(5, 2), torch.randn(2, H, V, K), torch.randn(2, 3, C)
    num_rows = torch.tensor(0, dtype=torch.int32)
    for read in ("item", "tolist", "numpy", "cpu", "__int__", "__index__", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, read, lambda *_: pytest.fail("a device value was read on the host"))
    kda.kda_commit(state, conv, *scratch, num_rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_every_form_rounds_at_the_same_places(dtype: torch.dtype) -> None:
    kw = {"num_heads": H, "lower_bound": -5.0}
    layer, rows, (state, conv) = make_layer(dtype=dtype), make_rows(16, dtype), make_state(dtype)
    exact, exact_state, _ = plain_fp64(rows, layer, state, conv, -5.0)
    plain_state = state.clone()
    plain = kda.kda_recurrent_ref(*rows, *layer, plain_state, conv.clone(), **kw)
    chunk_state = state.clone()
    chunk = kda.kda_chunk(*rows, *layer, chunk_state, conv.clone(), **kw)
    verified = kda.kda_verify(*rows, *layer, state, conv, *make_scratch(16, dtype=dtype), **kw)
    for y in (plain, chunk, verified):
        assert y.dtype is dtype
        # The same values are rounded everywhere, so only a rounding that fp32 noise tips over may differ.
        assert (y != exact.to(dtype)).float().mean() < 0.02
    assert error(chunk_state, exact_state) < 1e-5
    assert error(plain_state, exact_state) < 1e-5


def test_projections_may_be_slices_of_one_packed_projection() -> None:
    kw = {"num_heads": H, "lower_bound": -5.0}
    layer, rows, (state, conv) = make_layer(), make_rows(5), make_state()
    packed = torch.cat(list(rows), dim=1)
    slices = packed.split([x.shape[1] for x in rows], dim=1)
    for form in (kda.kda_recurrent_ref, kda.kda_chunk):
        expected = form(*rows, *layer, state.clone(), conv.clone(), **kw)
        # Sums of rows that are apart may be vectorised differently.
        torch.testing.assert_close(form(*slices, *layer, state.clone(), conv.clone(), **kw), expected)


def test_shapes_that_disagree_are_refused() -> None:
    kw = {"num_heads": H, "lower_bound": -5.0}
    layer, rows, (state, conv) = make_layer(), make_rows(1), make_state()
    with pytest.raises(AssertionError, match="qkv has"):
        kda.kda_step(*rows, *layer, state.mT.contiguous(), conv, **kw)
    with pytest.raises(AssertionError, match="one row"):
        kda.kda_step(*make_rows(2), *layer, state, conv, **kw)
    with pytest.raises(AssertionError, match="17 rows"):
        kda.kda_verify(*make_rows(17), *layer, state, conv, *make_scratch(17), **kw)
    with pytest.raises(AssertionError, match="conv: dtype"):
        kda.kda_step(*rows, *layer, state, conv.bfloat16(), **kw)


@pytest.mark.parametrize("law", LAWS)
def test_the_recurrence_equals_fla_cores_naive_one(law: str) -> None:
    try:
        from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
        from fla.ops.kda.naive import naive_recurrent_kda
    except (ImportError, RuntimeError) as reason:
        pytest.skip(f"fla-core: {reason}")
    T = 33
    layer, rows, (state, conv) = make_layer(), make_rows(T), make_state()
    window = torch.cat([conv, rows.qkv])
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
        q, k, v.view(1, T, H, V), g, rows.b.sigmoid()[None], initial_state=state.mT[None], output_final_state=True
    )
    gate = rows.gate.view(T, H, V).sigmoid()
    expected = F.rms_norm(o[0], (V,), layer.o_norm, layer.eps) * gate
    y = kda.kda_chunk(*rows, *layer, state, conv, num_heads=H, lower_bound=LAWS[law])
    assert error(y, expected.flatten(1)) < 1e-5
    assert error(state, final[0].mT) < 1e-5
