"""Block attention against plain loops in fp64, with windows, causal blocks, short and empty contexts."""

import math

import pytest
import torch

from soloist.kernels.draft_attention import append_context, draft_attention, draft_attention_ref
from soloist.kernels.rotary import make_rotary_table

L, H, G, K, S, EPS = 2, 6, 3, 14, 40, 1e-5


def noise(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def i32(x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


TABLE = make_rotary_table(K, 300.0, S)


def norm_and_rotate(head: torch.Tensor, weight: torch.Tensor, position: int) -> torch.Tensor:
    x = head.double() / torch.sqrt((head.double() ** 2).mean() + EPS) * weight.double()
    angles = position * 300.0 ** (-2 * torch.arange(K // 2, dtype=torch.float64) / K)
    a, b = x[: K // 2], x[K // 2 :]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])


def naive(qkv, keys, values, start, q_norm, k_norm, window, is_causal):
    """Attend head by head; keys and values (G, start, K) of the context are given rotated."""
    T = qkv.shape[0]
    heads = qkv.view(T, H + 2 * G, K).double()
    out = torch.zeros(T, H, K, dtype=torch.float64)
    for h in range(H):
        g = h // (H // G)
        k = [keys[g, j].double() for j in range(start)]
        k += [norm_and_rotate(heads[t, H + g], k_norm, start + t) for t in range(T)]
        v = [values[g, j].double() for j in range(start)] + [heads[t, H + G + g] for t in range(T)]
        for t in range(T):
            q = norm_and_rotate(heads[t, h], q_norm, start + t)
            seen = [
                j
                for j in range(start + T)
                if (not is_causal or j <= start + t) and (window is None or abs(j - start - t) < window)
            ]
            p = torch.stack([q @ k[j] / math.sqrt(K) for j in seen]).softmax(0)
            out[t, h] = sum(p[i] * v[j] for i, j in enumerate(seen))
    return out.view(T, H * K)


@pytest.mark.parametrize("is_fixed_shape", [False, True])
@pytest.mark.parametrize(("start", "T"), [(0, 5), (1, 1), (13, 5), (30, 7)])
@pytest.mark.parametrize(("window", "is_causal"), [(None, False), (None, True), (4, True), (3, False), (100, False)])
def test_a_block_sees_what_it_ought_to(start: int, T: int, window: int | None, is_causal: bool, is_fixed_shape: bool):
    qkv = noise(T, (H + 2 * G) * K, seed=1)
    q_norm, k_norm = 1 + noise(K, seed=2, scale=0.3), 1 + noise(K, seed=3, scale=0.3)
    # Behind the context lies what earlier blocks left.
    keys, values = noise(G, S, K, seed=4), noise(G, S, K, seed=5)
    keys[:, start:], values[:, start:] = 1e4, -1e4
    want = naive(qkv, keys, values, start, q_norm, k_norm, window, is_causal)
    before = keys[:, :start].clone()
    if not is_fixed_shape:
        # Not even looked at.
        keys[:, start + T :] = values[:, start + T :] = math.nan
    got = draft_attention_ref(
        qkv,
        keys,
        values,
        i32(start),
        TABLE.cos,
        TABLE.sin,
        num_heads=H,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=EPS,
        window=window,
        is_causal=is_causal,
        num_rows=S if is_fixed_shape else None,
    )
    assert (got.double() - want).abs().max() < 1e-5
    assert torch.equal(keys[:, :start], before)


def test_the_launcher_computes_the_reference():
    qkv = noise(5, (H + 2 * G) * K, seed=1)
    norms = {"q_norm": 1 + noise(K, seed=2, scale=0.3), "k_norm": 1 + noise(K, seed=3, scale=0.3)}
    keys, values = noise(G, S, K, seed=4), noise(G, S, K, seed=5)
    want = naive(qkv, keys, values, 9, *norms.values(), None, False)
    got = draft_attention(qkv, keys, values, i32(9), TABLE.cos, TABLE.sin, num_heads=H, eps=EPS, **norms)
    assert (got.double() - want).abs().max() < 1e-5


@pytest.mark.parametrize(("start", "T"), [(0, 3), (7, 1), (20, 11)])
def test_context_rows_are_normalised_rotated_and_stored(start: int, T: int):
    kv = noise(T, L * 2 * G * K, seed=6)
    k_norm = 1 + noise(L, K, seed=7, scale=0.3)
    k_cache, v_cache = (torch.full((L, G, S, K), math.nan) for _ in range(2))
    append_context(kv, k_norm, EPS, k_cache, v_cache, i32(start), TABLE.cos, TABLE.sin)
    parts = kv.view(T, L, 2, G, K)
    for layer in range(L):
        for t in range(T):
            for g in range(G):
                want = norm_and_rotate(parts[t, layer, 0, g], k_norm[layer], start + t)
                assert (k_cache[layer, g, start + t].double() - want).abs().max() < 1e-5
                assert torch.equal(v_cache[layer, g, start + t], parts[t, layer, 1, g])
    untouched = [j for j in range(S) if not start <= j < start + T]
    assert k_cache[:, :, untouched].isnan().all() and v_cache[:, :, untouched].isnan().all()


def test_what_is_not_finite_is_not_stored():
    # A masked row is still multiplied by 0, and 0 * NaN would reach every later block.
    kv = noise(4, L * 2 * G * K, seed=6)
    kv[1] = math.nan
    kv[2, ::3] = math.inf
    k_cache, v_cache = (torch.zeros(L, G, S, K) for _ in range(2))
    append_context(kv, torch.ones(L, K), EPS, k_cache, v_cache, i32(2), TABLE.cos, TABLE.sin)
    qkv = torch.full((3, (H + 2 * G) * K), math.nan)
    ones = torch.ones(K)
    draft_attention(
        qkv, k_cache[0], v_cache[0], i32(9), TABLE.cos, TABLE.sin, num_heads=H, q_norm=ones, k_norm=ones, eps=EPS
    )
    assert k_cache.isfinite().all() and v_cache.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_forms_agree_in_half_precision(dtype: torch.dtype):
    qkv = noise(5, (H + 2 * G) * K, seed=1).to(dtype)
    norms = {"q_norm": torch.ones(K, dtype=dtype), "k_norm": torch.ones(K, dtype=dtype)}
    results = []
    for num_rows in (None, S):
        keys, values = noise(G, S, K, seed=4).to(dtype), noise(G, S, K, seed=5).to(dtype)
        results.append(
            draft_attention_ref(
                qkv,
                keys,
                values,
                i32(17),
                TABLE.cos,
                TABLE.sin,
                num_heads=H,
                eps=EPS,
                window=None,
                is_causal=False,
                num_rows=num_rows,
                **norms,
            )
        )
    assert results[0].dtype is dtype
    assert (results[0].float() - results[1].float()).norm() < 2e-2 * results[0].float().norm()
