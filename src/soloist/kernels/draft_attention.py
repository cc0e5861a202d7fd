"""Attention of a DSpark block: over the context that the target's hidden states gave, and over the block itself.

Owns no cache: it writes the rows it is given. Rows from the context's length on are scratch: a block leaves its own
keys and values there, and whatever is committed later overwrites them. Only finite values are stored, because a masked
row still meets the others in a product with 0.
"""

import torch
import torch.nn.functional as F

from soloist.kernels.check import FLOATS, expect, use_reference
from soloist.kernels.rotary import apply_rotary_ref


def _norm_and_rotate(
    heads: torch.Tensor, norm: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Normalise each head of `heads` (T, .., K) and rotate it, in fp32, rounded once to its dtype."""
    normed = heads.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps) * norm
    return apply_rotary_ref(normed, cos, sin, False).to(heads.dtype)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Replace what is not finite by 0."""
    return torch.nan_to_num(x, 0.0, 0.0, 0.0)


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

    One form for every device: fixed shapes, and nothing is read on the host.

    Args:
        kv: (T, L * 2 * G * K), for each layer [k v].
        k_norm: (L, K) weights of the RMS norm of each key head.
        eps: of that norm.
        k_cache: (L, G, S, K); rows context_len..context_len+T-1 are written in place.
        v_cache: (L, G, S, K), likewise.
        context_len: () int32, tokens in the context.
        cos: (N, K/2) fp32 rotary table of N >= context_len + T positions.
        sin: (N, K/2) fp32.

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
    T = kv.shape[0]
    positions = context_len.long() + torch.arange(T, device=kv.device)  # (T,)
    k, v = kv.view(T, L, 2, G, K).unbind(2)  # (T, L, G, K) each
    cos, sin = cos.index_select(0, positions), sin.index_select(0, positions)  # (T, K/2) each
    k = _norm_and_rotate(k, k_norm[:, None], eps, cos, sin)
    k_cache.index_copy_(2, positions, _finite(k).permute(1, 2, 0, 3))
    v_cache.index_copy_(2, positions, _finite(v).permute(1, 2, 0, 3))


def _is_seen(positions: torch.Tensor, num_rows: int, window: int | None, is_causal: bool) -> torch.Tensor:
    """Say which cache rows each query of a block sees, at (T,) consecutive `positions`: (T, num_rows) bool."""
    rows = torch.arange(num_rows, device=positions.device)
    here = positions[:, None]  # (T, 1)
    is_seen = rows <= (here if is_causal else positions[-1:].expand(len(here), 1))  # (T, num_rows)
    return is_seen if window is None else is_seen & ((rows - here).abs() < window)


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
    num_rows: int | None = None,
) -> torch.Tensor:
    """Store the block, then attend through a mask.

    With `num_rows`, cache rows to look at whatever the context's length, nothing is read on the host and the products
    are computed in the cache's dtype; without, only the rows in use are touched, in fp32.
    """
    T, H, (G, _, K) = qkv.shape[0], num_heads, k_cache.shape
    positions = context_len.long() + torch.arange(T, device=qkv.device)  # (T,)
    cos, sin = cos.index_select(0, positions), sin.index_select(0, positions)  # (T, K/2) each
    q, k, v = qkv.view(T, H + 2 * G, K).split((H, G, G), dim=1)  # (T, H, K), (T, G, K) twice
    q, k = _norm_and_rotate(q, q_norm, eps, cos, sin), _norm_and_rotate(k, k_norm, eps, cos, sin)
    k_cache.index_copy_(1, positions, _finite(k).transpose(0, 1))
    v_cache.index_copy_(1, positions, _finite(v).transpose(0, 1))

    dtype = torch.float32 if num_rows is None else qkv.dtype
    num_rows = num_rows or int(context_len) + T
    keys, values = k_cache[None, :, :num_rows].to(dtype), v_cache[None, :, :num_rows].to(dtype)  # (1, G, S, K) each
    # The heads of a group are further rows of one query, so that no key is copied.
    q = q.view(T, G, H // G, K).permute(1, 2, 0, 3).reshape(1, G, -1, K).to(dtype)  # (1, G, H/G*T, K)
    mask = _is_seen(positions, num_rows, window, is_causal).repeat(H // G, 1)  # (H/G*T, S)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)  # (1, G, H/G*T, K)
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

    On a GPU this is a masked attention over all S rows, with fixed shapes and nothing read on the host.

    Args:
        qkv: (T, (H + 2 G) * K), rows [q k v].
        k_cache: (G, S, K), keys of the context after rotary. Rows context_len..context_len+T-1 are written in place;
            later ones are never seen, but must be finite.
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

    Source: DeepSpec (MIT), Qwen3DSparkAttention; windows and causal blocks as in z-lab's DFlash.
    """
    dims: dict[str, int] = {}
    expect(k_cache, "G S K", qkv.dtype, dims, name="k_cache")
    expect(v_cache, "G S K", qkv.dtype, dims, name="v_cache")
    G, S, K = (dims[letter] for letter in "GSK")
    assert num_heads % G == 0, f"{num_heads} query heads do not divide among {G} key heads"
    dims |= {"C": (num_heads + 2 * G) * K, "P": K // 2}
    expect(qkv, "T C", FLOATS, dims, name="qkv")
    expect(context_len, "", torch.int32, dims, name="context_len")
    expect(cos, "N P", torch.float32, dims, name="cos")
    expect(sin, "N P", torch.float32, dims, name="sin")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        expect(norm, "K", qkv.dtype, dims, name=name)
    return draft_attention_ref(
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
        num_rows=None if use_reference(qkv) else S,
    )
