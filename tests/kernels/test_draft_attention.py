"""Block attention against plain loops in fp64, with windows, causal blocks, short and empty contexts."""

import math

import pytest
import torch

from soloist.kernels.draft_attention import append_context, draft_attention
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


@pytest.mark.parametrize(("start", "T"), [(0, 5), (1, 1), (13, 5), (30, 7)])
@pytest.mark.parametrize(("window", "is_causal"), [(None, False), (None, True), (4, True), (3, False), (100, False)])
def test_a_block_sees_what_it_ought_to(start: int, T: int, window: int | None, is_causal: bool):
    qkv = noise(T, (H + 2 * G) * K, seed=1)
    q_norm, k_norm = 1 + noise(K, seed=2, scale=0.3), 1 + noise(K, seed=3, scale=0.3)
    keys, values = noise(G, S, K, seed=4), noise(G, S, K, seed=5)
    # Behind the context lies what earlier blocks left.
    keys[:, start:] = values[:, start:] = math.nan
    want = naive(qkv, keys, values, start, q_norm, k_norm, window, is_causal)
    before = keys[:, :start].clone()
    got = draft_attention(
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
    )
    assert (got.double() - want).abs().max() < 1e-5
    assert torch.equal(keys[:, :start], before)
    assert keys[:, start + T :].isnan().all() and keys[:, start : start + T].isfinite().all()


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_at_the_ends_only(dtype: torch.dtype):
    qkv = noise(5, (H + 2 * G) * K, seed=1).to(dtype)
    norms = {"q_norm": torch.ones(K, dtype=dtype), "k_norm": torch.ones(K, dtype=dtype)}
    keys, values = noise(G, S, K, seed=4).to(dtype), noise(G, S, K, seed=5).to(dtype)
    want = naive(qkv, keys, values, 17, *norms.values(), None, False)
    got = draft_attention(qkv, keys, values, i32(17), TABLE.cos, TABLE.sin, num_heads=H, eps=EPS, **norms)
    assert got.dtype is dtype
    assert (got.double() - want).norm() < 1e-2 * want.norm()
