"""MLA: absorbed and naive forms equal the equations written in fp64; the cache is touched only where it should be."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from soloist.kernels import mla, mla_prompt
from soloist.kernels.mla_inputs import MlaRows, MlaWeights
from soloist.kernels.rotary import RotaryTable, make_rotary_table

H, Kn, P, V, R = 3, 10, 6, 14, 20
FORMS = {"absorbed": mla.mla_attention_ref, "naive": mla.mla_naive_ref, "launcher": mla.mla_attention}


def make_call(
    T: int, context_len: int, *, S: int = 0, has_rotary: bool = True, has_gate: bool = True, dtype=torch.float32
):
    """Arguments of one call by name. Cached rows are random, rows behind them NaN, the table is not at position 0."""
    S = S or context_len + T + 2
    table = make_rotary_table(P, 100.0, S + 1)
    cache = torch.randn(S, R + P)
    cache[context_len:] = torch.nan
    call: dict[str, Any] = {
        "q": torch.randn(T, H * (Kn + P)).to(dtype),
        "kv": torch.randn(T, R + P).to(dtype),
        "gate": torch.randn(T, H).to(dtype) if has_gate else None,
        "kv_norm": (torch.rand(R) + 0.5).to(dtype),
        "eps": 1e-6,
        "w_kv_b": (torch.randn(H * (Kn + V), R) / R**0.5).to(dtype),
        "latent_cache": cache.to(dtype),
        "context_len": torch.tensor(context_len, dtype=torch.int32),
        "rotary": table if has_rotary else None,
        "num_heads": H,
        "v_head_dim": V,
        "scale": (Kn + P) ** -0.5,
    }
    return call


def run(call: dict[str, Any], form: Callable[..., torch.Tensor] = mla.mla_attention) -> torch.Tensor:
    rows = MlaRows(call["q"], call["kv"], call["gate"])
    weights = MlaWeights(*(call[name] for name in MlaWeights._fields))
    return form(rows, weights, call["latent_cache"], call["context_len"], call["rotary"])


def copy(call: dict[str, Any]) -> dict[str, Any]:
    """The same call on its own cache."""
    return call | {"latent_cache": call["latent_cache"].clone()}


def rows_of(call: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Some rows of a call, at their positions, on the same cache."""
    cut = {name: call[name][start:stop] if call[name] is not None else None for name in ("q", "kv", "gate")}
    return call | cut | {"context_len": call["context_len"] + start}


def rotate_fp64(x: torch.Tensor, rotary: RotaryTable | None, position: int) -> torch.Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of one vector (P)."""
    if rotary is None:
        return x
    out = torch.full_like(x, torch.nan)
    for j in range(P // 2):
        c, s = rotary.cos[position, j].double(), rotary.sin[position, j].double()
        out[2 * j] = x[2 * j] * c - x[2 * j + 1] * s
        out[2 * j + 1] = x[2 * j + 1] * c + x[2 * j] * s
    return out


def plain_fp64(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The naive equations, token by token and head by head, in fp64; gives output and cache."""
    cache, q, kv = (call[name].double() for name in ("latent_cache", "q", "kv"))
    rotary = call["rotary"]
    dtype, context_len = call["q"].dtype, int(call["context_len"])
    out = torch.full((len(q), H, V), torch.nan, dtype=torch.float64)
    for t in range(len(q)):
        position = context_len + t
        c = kv[t, :R] / (kv[t, :R].square().mean() + call["eps"]).sqrt() * call["kv_norm"].double()
        # As the cache holds it: the one place where a rounding is declared.
        cache[position] = torch.cat([c, rotate_fp64(kv[t, R:], rotary, position)]).to(dtype).double()
        for h in range(H):
            w = call["w_kv_b"].double().view(H, Kn + V, R)[h]
            query = q[t].view(H, Kn + P)[h]
            query = torch.cat([query[:Kn], rotate_fp64(query[Kn:], rotary, position)])
            seen = cache[: position + 1]
            keys = torch.cat([seen[:, :R] @ w[:Kn].T, seen[:, R:]], dim=1)
            a = (keys @ query * call["scale"]).softmax(0) @ (seen[:, :R] @ w[Kn:].T)
            out[t, h] = a if call["gate"] is None else a * torch.sigmoid(call["gate"][t, h].double())
    return out.flatten(1), cache


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative RMS error."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("T", "context_len"), [(1, 0), (1, 9), (5, 0), (16, 7)])
@pytest.mark.parametrize(("has_rotary", "has_gate"), [(True, True), (False, False), (True, False)])
def test_every_form_equals_the_equations_in_fp64(
    form: str, T: int, context_len: int, has_rotary: bool, has_gate: bool
) -> None:
    call = make_call(T, context_len, has_rotary=has_rotary, has_gate=has_gate)
    expected, expected_cache = plain_fp64(call)
    before = call["latent_cache"].clone()
    assert error(run(call, FORMS[form]), expected) < 1e-6
    last = context_len + T
    assert torch.equal(call["latent_cache"][:context_len], before[:context_len])
    assert error(call["latent_cache"][context_len:last], expected_cache[context_len:last]) < 1e-6
    assert call["latent_cache"][last:].isnan().all()


@pytest.mark.parametrize("has_rotary", [True, False])
def test_a_prompt_in_parts_or_token_by_token_equals_one_shot(has_rotary: bool) -> None:
    T, context_len = 171, 4
    # Long enough that the one shot expands its keys and works in two blocks of queries.
    assert T > mla.MIN_ROWS_TO_EXPAND > mla.MAX_ROWS
    call = make_call(T, context_len, has_rotary=has_rotary)
    one = copy(call)
    expected = run(one)
    for size in (1, 37, 165):
        parts = copy(call)
        starts = range(0, T, size)
        y = torch.cat([run(rows_of(parts, start, start + size)) for start in starts])
        assert error(y, expected) < 1e-5, size
        assert error(parts["latent_cache"][: context_len + T], one["latent_cache"][: context_len + T]) < 1e-6, size
    assert error(run(copy(call), mla.mla_attention_ref), expected) < 1e-5


def test_a_rejected_row_is_overwritten_by_the_next_step() -> None:
    call = make_call(4, 3, S=12)
    run(call)
    # Two of the four rows are kept; the next step starts behind them.
    following = make_call(3, 5, S=12) | {"latent_cache": call["latent_cache"]}
    clean = following | {"latent_cache": call["latent_cache"].clone()}
    clean["latent_cache"][5:] = torch.nan
    assert torch.equal(run(following), run(clean))


def test_the_norm_takes_its_eps_and_leaves_the_rotary_part_alone() -> None:
    call = make_call(2, 0) | {"eps": 1e-2}
    call["kv"] *= 0.1
    expected, expected_cache = plain_fp64(call)
    assert error(run(call), expected) < 1e-6
    assert error(call["latent_cache"][:2], expected_cache[:2]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_only_the_cache_and_the_result_are_rounded(dtype: torch.dtype) -> None:
    call = make_call(9, 5, dtype=dtype)
    expected, expected_cache = plain_fp64(call)
    for form in (mla.mla_attention_ref, mla.mla_naive_ref):
        mine = copy(call)
        y = run(mine, form)
        assert y.dtype is dtype
        assert (y != expected.to(dtype)).float().mean() < 0.02
        assert torch.equal(mine["latent_cache"][:14], expected_cache[:14].to(dtype))


def test_projections_may_be_slices_of_one_packed_projection() -> None:
    call = make_call(5, 2)
    expected = run(copy(call))
    packed = torch.cat([call["q"], call["kv"], call["gate"]], dim=1)
    q, kv, gate = packed.split([H * (Kn + P), R + P, H], dim=1)
    assert torch.equal(run(call | {"q": q, "kv": kv, "gate": gate}), expected)


def test_shapes_that_disagree_are_refused() -> None:
    call = make_call(2, 1)
    with pytest.raises(AssertionError, match="w_kv_b: axis"):
        run(call | {"v_head_dim": V + 1})
    with pytest.raises(AssertionError, match="cos: axis"):
        run(call | {"rotary": replace(call["rotary"], cos=call["rotary"].cos[:, 1:])})
    with pytest.raises(AssertionError, match="context_len: dtype"):
        run(call | {"context_len": torch.tensor(1)})


class _Peak(TorchDispatchMode):
    """Notes how many bytes were allocated at once inside the block, beside the inputs."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.num_bytes = self.most_bytes = 0
        self._held = {x.untyped_storage().data_ptr(): 0 for x in inputs if isinstance(x, torch.Tensor)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and (address := x.untyped_storage().data_ptr()) not in self._held:
                self._held[address] = x.untyped_storage().nbytes()
                self.num_bytes += self._held[address]
                self.most_bytes = max(self.most_bytes, self.num_bytes)
                weakref.finalize(x.untyped_storage(), self._free, address)
        return out

    def _free(self, address: int) -> None:
        self.num_bytes -= self._held.pop(address)


@pytest.mark.parametrize("V", [20, 44])
def test_what_a_prompt_takes_for_each_position_is_counted(V: int, monkeypatch: pytest.MonkeyPatch):
    H, K, P, R, T = 5, 24, 8, 16, 4
    monkeypatch.setattr(mla_prompt, "_attend_causally", lambda q, k, v, scale: q.clone())

    def take(start: int) -> int:
        S = start + T
        q, kv, gate = torch.zeros(T, H * (K + P)), torch.zeros(T, R + P), torch.zeros(T, H)
        w_kv_b, latents, angles = torch.zeros(H * (K + V), R), torch.zeros(S, R + P), torch.zeros(S, P // 2)
        inputs = (q, kv, gate, torch.ones(R), 1e-6, w_kv_b, latents, start, angles, angles)
        with _Peak(inputs) as peak:
            mla_prompt.attend(*inputs, num_heads=H, v_head_dim=V, scale=1.0)
        return peak.most_bytes

    assert take(500) - take(100) == 400 * 4 * mla_prompt.expanded_values(H, K, P, V)
