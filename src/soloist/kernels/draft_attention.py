"""Attention of a DSpark block: over the context that the target's hidden states gave, and over the block itself.

Owns no cache: it writes the rows it is given. Rows from the context's length on are scratch: a block leaves its own
keys and values there, nothing else ever reads them, and whatever is committed later overwrites them.
"""

import torch
import torch.nn.functional as F

from soloist.kernels.check import FLOATS, expect, use_reference
from soloist.kernels.launch import HAS_TRITON
from soloist.kernels.rotary import apply_rotary_ref

if HAS_TRITON:
    from soloist.kernels import draft_attention_triton


def _norm_and_rotate(
    heads: torch.Tensor, norm: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Normalise each head of `heads` (T, .., K) and rotate it, in fp32, rounded once to its dtype."""
    normed = heads.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps) * norm
    return apply_rotary_ref(normed, cos, sin, False).to(heads.dtype)


def append_context_ref(
    kv: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Normalise and rotate in fp32, then copy."""
    T, (L, G, _, K), start = kv.shape[0], k_cache.shape, int(context_len)
    rows = slice(start, start + T)
    k, v = kv.view(T, L, 2, G, K).unbind(2)  # (T, L, G, K) each
    k_cache[:, :, rows] = _norm_and_rotate(k, k_norm[:, None], eps, cos[rows], sin[rows]).permute(1, 2, 0, 3)
    v_cache[:, :, rows] = v.permute(1, 2, 0, 3)


def append_context(
    kv: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Store keys and values of T context tokens for all layers of the draft.

    k_cache[l, :, context_len + t] = rotary(norm(k[t, l])) at position context_len + t;  v_cache likewise, as it is

    Args:
        kv: (T, L * 2 * G * K), for each layer [k v]. On a GPU K is one of `HEAD_SIZES`.
        k_norm: (L, K) weights of the RMS norm of each key head.
        eps: of that norm.
        k_cache: (L, G, S, K); rows context_len..context_len+T-1 are written in place.
        v_cache: (L, G, S, K), likewise.
        context_len: () int32, tokens in the context.
        cos: (N, K/2) fp32 rotary table of N >= context_len + T positions.
        sin: (N, K/2) fp32.

    Raises:
        UnsupportedError: a GPU has no kernel for the heads.

    Source: Chen et al. 2026 (DFlash, arXiv 2602.06036), KV injection; DeepSpec (MIT).
    """
    dims: dict[str, int] = {}
    expect(k_cache, "L G S K", FLOATS, dims, name="k_cache")
    expect(v_cache, "L G S K", k_cache.dtype, dims, name="v_cache")
    L, G, K = (dims[letter] for letter in "LGK")
    dims |= {"C": L * 2 * G * K, "P": K // 2}
    expect(kv, "T C", k_cache.dtype, dims, name="kv")
    expect(k_norm, "L K", k_cache.dtype, dims, name="k_norm")
    expect(context_len, "", torch.int32, dims, name="context_len")
    expect(cos, "N P", torch.float32, dims, name="cos")
    expect(sin, "N P", torch.float32, dims, name="sin")
    form = append_context_ref if use_reference(kv) else draft_attention_triton.store_context
    form(kv, k_norm, eps, k_cache, v_cache, context_len, cos, sin)


def draft_attention_ref(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    window: int | None,
    is_causal: bool,
) -> torch.Tensor:
    """Store the block, then attend through a mask, in fp32 from the rounded cache."""
    T, H, (G, _, K), start = qkv.shape[0], num_heads, k_cache.shape, int(context_len)
    end = start + T
    cos, sin = cos[start:end], sin[start:end]  # (T, K/2) each
    q, k, v = qkv.view(T, H + 2 * G, K).split((H, G, G), dim=1)  # (T, H, K), (T, G, K) twice
    q, k = _norm_and_rotate(q, q_norm, eps, cos, sin), _norm_and_rotate(k, k_norm, eps, cos, sin)
    k_cache[:, start:end], v_cache[:, start:end] = k.transpose(0, 1), v.transpose(0, 1)
    distance = torch.arange(end, device=qkv.device) - torch.arange(start, end, device=qkv.device)[:, None]  # (T, S)
    is_seen = distance <= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        is_seen &= distance.abs() < window
    # The heads of a group are further rows of one query, so that no key is copied.
    q = q.view(T, G, H // G, K).permute(1, 2, 0, 3).reshape(1, G, -1, K)  # (1, G, H/G*T, K)
    keys, values = k_cache[None, :, :end].float(), v_cache[None, :, :end].float()  # (1, G, S, K) each
    mask = is_seen.repeat(H // G, 1)  # (H/G*T, S)
    out = F.scaled_dot_product_attention(q.float(), keys, values, attn_mask=mask)  # (1, G, H/G*T, K)
    return out.view(G, H // G, T, K).permute(2, 0, 1, 3).reshape(T, H * K).to(qkv.dtype)


def draft_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    window: int | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Attend with a block of T tokens to the context and, in both directions, to the block itself.

    q, k = rotary(norm(q)), rotary(norm(k)) at positions context_len + t
    out[t, h] = sum_s softmax_s(q[t, h] . k[s, g] / sqrt(K)) v[s, g], s < context_len + T, g = h // (H / G)

    Args:
        qkv: (T, (H + 2 G) * K), rows [q k v]. On a GPU K is one of `HEAD_SIZES`.
        k_cache: (G, S, K), keys of the context after rotary. Rows context_len..context_len+T-1 are written in place;
            later ones are never read.
        v_cache: (G, S, K), likewise.
        context_len: () int32, tokens in the context.
        cos: (N, K/2) fp32 rotary table of N >= context_len + T positions.
        sin: (N, K/2) fp32.
        num_heads: H, a multiple of G.
        q_norm: (K) weight of the RMS norm of each query head.
        k_norm: (K) weight of the RMS norm of each key head.
        eps: of those norms.
        window: a query sees rows less than this far from it. None: all.
        is_causal: a query sees no later row of its block.

    Returns:
        (T, H * K), the dtype of `qkv`.

    Raises:
        UnsupportedError: a GPU has no kernel for the heads.

    Source: DeepSpec (MIT), Qwen3DSparkAttention; windows and causal blocks as in z-lab's DFlash.
    """
    dims: dict[str, int] = {}
    expect(k_cache, "G S K", qkv.dtype, dims, name="k_cache")
    expect(v_cache, "G S K", qkv.dtype, dims, name="v_cache")
    G, K = dims["G"], dims["K"]
    assert num_heads % G == 0, f"{num_heads} query heads do not divide among {G} key heads"
    dims |= {"C": (num_heads + 2 * G) * K, "P": K // 2}
    expect(qkv, "T C", FLOATS, dims, name="qkv")
    expect(context_len, "", torch.int32, dims, name="context_len")
    expect(cos, "N P", torch.float32, dims, name="cos")
    expect(sin, "N P", torch.float32, dims, name="sin")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        expect(norm, "K", qkv.dtype, dims, name=name)
    form = draft_attention_ref if use_reference(qkv) else draft_attention_triton.attend_block
    return form(
        qkv,
        k_cache,
        v_cache,
        context_len,
        cos,
        sin,
        num_heads=num_heads,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        window=window,
        is_causal=is_causal,
    )
