"""Grouped-query attention over a key/value cache of one sequence. Owns no cache: it writes the rows it is given."""

import torch
import torch.nn.functional as F

from soloist.kernels.check import expect, use_reference
from soloist.kernels.rotary import apply_rotary_ref

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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
    """Compute `attention` with fp32 norm, rotation and softmax."""
    num_tokens, head_dim = qkv.shape[0], k_cache.shape[2]
    start = int(context_len)
    end = start + num_tokens
    q, k, v = qkv.view(num_tokens, -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q = F.rms_norm(q, (head_dim,), q_norm, eps)
        k = F.rms_norm(k, (head_dim,), k_norm, eps)
    q = apply_rotary_ref(q, cos[start:end], sin[start:end], False)  # (T, H, K)
    k = apply_rotary_ref(k, cos[start:end], sin[start:end], False)  # (T, G, K)
    k_cache[:, start:end] = k.transpose(0, 1)
    v_cache[:, start:end] = v.transpose(0, 1)
    group = num_heads // num_kv_heads
    keys = k_cache[:, :end].float().repeat_interleave(group, dim=0)  # (H, S, K)
    values = v_cache[:, :end].float().repeat_interleave(group, dim=0)  # (H, S, K)
    scores = q.transpose(0, 1).float() @ keys.transpose(1, 2) * head_dim**-0.5  # (H, T, S)
    future = torch.ones(num_tokens, end, dtype=torch.bool, device=qkv.device).triu(start + 1)  # (T, S)
    probs = scores.masked_fill(future, float("-inf")).softmax(-1)
    return (probs @ values).transpose(0, 1).reshape(num_tokens, -1).to(qkv.dtype)  # (T, H*K)


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
        k_cache: (G, S, K), keys after rotary; rows context_len..context_len+T-1 written in place, later rows never read.
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
