"""Grouped-query attention over a key/value cache of one sequence. Owns no cache: it writes the rows it is given."""

import torch
import torch.nn.functional as F

from soloist.kernels.check import FLOATS, expect, use_reference
from soloist.kernels.norm import rms_norm_ref
from soloist.kernels.rotary import apply_rotary_ref

# Queries that attend at a time, so that no mask or score grows with the square of a long prompt.
QUERY_BLOCK = 256


def attention_ref(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Compute `attention` in fp32; see there."""
    T, K = qkv.shape[0], k_cache.shape[2]
    H, G = num_heads, num_kv_heads
    start = int(context_len)
    end = start + T
    heads = qkv.view(T, H + 2 * G, K)  # (T, H+2G, K)
    qk = heads[:, : H + G]  # (T, H+G, K)
    if q_norm is not None and k_norm is not None:
        qk = torch.cat((rms_norm_ref(qk[:, :H], q_norm, eps), rms_norm_ref(qk[:, H:], k_norm, eps)), dim=1)
    qk = apply_rotary_ref(qk, cos[start:end], sin[start:end], False)
    k_cache[:, start:end] = qk[:, H:].transpose(0, 1)
    v_cache[:, start:end] = heads[:, H + G :].transpose(0, 1)
    q, k, v = qk[:, :H].float(), k_cache[:, :end].float(), v_cache[:, :end].float()
    if T == 1:
        # One query sees every key, so the heads of a group are the rows of a plain matrix product.
        scores = torch.bmm(q.view(G, -1, K), k.transpose(1, 2)).mul_(K**-0.5)  # (G, H/G, S)
        return torch.bmm(scores.softmax(dim=-1), v).view(1, H * K).to(qkv.dtype)
    out = torch.empty(T, H, K, dtype=qkv.dtype, device=qkv.device)  # (T, H, K)
    for first in range(0, T, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, T)
        seen = start + last
        mask = torch.ones(last - first, seen, dtype=torch.bool, device=qkv.device).tril_(start + first)
        out[first:last] = F.scaled_dot_product_attention(
            q[first:last].transpose(0, 1)[None], k[None, :, :seen], v[None, :, :seen], attn_mask=mask, enable_gqa=True
        )[0].transpose(0, 1)
    return out.view(T, H * K)


def attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Append T tokens to the cache and attend causally to everything before and including each of them.

    q, k = rotary(norm(q)), rotary(norm(k)) at positions context_len + t
    out[t, h] = sum_s softmax_s(q[t, h] . k[s, g] / sqrt(K)) v[s, g], s <= context_len + t, g = h // (H / G)

    Args:
        qkv: (T, (H + 2 G) * K), rows [q k v].
        k_cache: (G, S, K), keys after rotary. Rows context_len..context_len+T-1 are written in place; later ones never
            read.
        v_cache: (G, S, K), likewise.
        context_len: () int32, tokens in the cache.
        cos: (S', K/2) fp32 rotary table, S' >= context_len + T.
        sin: (S', K/2) fp32.
        num_heads: H, a multiple of `num_kv_heads`.
        num_kv_heads: G.
        q_norm: (K) weight of the RMS norm of each query head; None: no norm.
        k_norm: (K) weight of the RMS norm of each key head; None: no norm.
        eps: of those norms.

    Returns:
        (T, H * K), the dtype of `qkv`.

    Source: Ainslie et al. 2023 (arXiv 2305.13245); query and key norm as in Qwen3.
    """
    dims: dict[str, int] = {}
    expect(k_cache, "G S K", qkv.dtype, dims, name="k_cache")
    expect(v_cache, "G S K", qkv.dtype, dims, name="v_cache")
    assert dims["G"] == num_kv_heads and num_heads % num_kv_heads == 0
    dims["C"] = (num_heads + 2 * num_kv_heads) * dims["K"]
    expect(qkv, "T C", FLOATS, dims, name="qkv")
    expect(context_len, "", torch.int32, dims, name="context_len")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            expect(norm, "K", qkv.dtype, dims, name=name)
    if use_reference(qkv):
        return attention_ref(
            qkv,
            k_cache,
            v_cache,
            context_len,
            cos,
            sin,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
        )
    raise NotImplementedError("attention has no CUDA kernel yet: set SOLOIST_REFERENCE=1")
