"""A prompt's multi-head latent attention on a GPU: the naive form, by PyTorch's own flash attention.

With many queries expanding the cache costs less than absorbing the maps: a position meets a query with Kn + P + V
products instead of 2 R + P. Equations and references are in `kernels/mla.py`.
"""

import torch
import torch.nn.functional as F

from soloist.kernels.norm import rms_norm_ref
from soloist.kernels.rotary import apply_rotary_ref


def expanded_values(num_heads: int, K: int, P: int, V: int) -> int:
    """Count the numbers that `attend` holds for every position at once, all heads: keys, values, and both padded.

    Args:
        num_heads: H.
        K: Kn, of a key without its rotary part.
        P: of that part.
        V: of a value.
    """
    size = max(K + P, V)
    return num_heads * ((K + V) + (K + P) + size + (size if size > K + P else 0))


def _attend_causally(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of the last T of S positions, each to those up to it: (1, H, T, X), (1, H, S, X) twice."""
    if q.is_cuda and q.element_size() == 2:
        # The operator itself aligns the last query with the last position; `scaled_dot_product_attention` aligns the
        # first ones, and what tells it otherwise, torch.nn.attention.bias, takes seconds to import.
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[0]
    T, S = q.shape[2], k.shape[2]
    is_seen = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=is_seen, scale=scale)


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    gate: torch.Tensor | None,
    kv_norm: torch.Tensor,
    eps: float,
    w_kv_b: torch.Tensor,
    latent_cache: torch.Tensor,
    start: int,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    num_heads: int,
    v_head_dim: int,
    scale: float,
) -> torch.Tensor:
    """Run `mla_attention` for a prompt's rows behind `start` positions; arguments as there.

    Rounding: expanded keys and values, probabilities and the result to the model's dtype, sums fp32.
    """
    T, H, V, R = q.shape[0], num_heads, v_head_dim, kv_norm.shape[0]
    P = kv.shape[1] - R
    S = start + T
    queries = q.reshape(T, H, -1)  # (T, H, Kn+P)
    c, k_r = kv.split([R, P], dim=-1)
    if cos is not None and sin is not None:
        angles = cos[start:S], sin[start:S]  # (T, P/2)
        q_n, q_r = queries.split([queries.shape[2] - P, P], dim=-1)
        queries = torch.cat([q_n, apply_rotary_ref(q_r, *angles, interleaved=True)], dim=-1)
        k_r = apply_rotary_ref(k_r, *angles, interleaved=True)
    latent_cache[start:S, :R] = rms_norm_ref(c, kv_norm, eps)
    latent_cache[start:S, R:] = k_r
    latents = latent_cache[:S]
    expanded = F.linear(latents[:, :R], w_kv_b).view(S, H, -1)  # (S, H, Kn+V)
    keys = torch.cat([expanded[..., :-V], latents[:, None, R:].expand(-1, H, -1)], dim=-1)  # (S, H, Kn+P)
    # Flash attention takes heads of one size; zeros change no product, and behind a value they give zeros.
    size = max(keys.shape[2], V)

    def as_heads(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (0, size - x.shape[2])).transpose(0, 1)[None]  # (1, H, T or S, size)

    # All positions' keys: padding by nothing would copy them.
    padded_keys = as_heads(keys) if keys.shape[2] < size else keys.transpose(0, 1)[None]

    a = _attend_causally(as_heads(queries), padded_keys, as_heads(expanded[..., -V:]), scale)
    a = a[0, ..., :V].transpose(0, 1)  # (T, H, V)
    if gate is not None:
        a = a * torch.sigmoid(gate.float()).to(a.dtype)[..., None]
    return a.flatten(1)
