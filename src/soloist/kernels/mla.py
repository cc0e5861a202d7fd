"""Multi-head latent attention (MLA): all heads share one cached latent per token; optional rotary part and head gate.

Equations, per head, [q_n q_r] its query, [c k_r] = a row of `kv`, W_uk (Kn, R) and W_uv (V, R) its rows of `w_kv_b`:

    c, k_r  = rms_norm(c) * kv_norm, rotary(k_r)                    cached, row context_len + t
    q_r     = rotary(q_r)
    score_s = scale * ((W_uk^T q_n) . c_s + q_r . k_r_s),  s <= context_len + t
    a       = W_uv sum_s softmax(score)_s c_s
    y       = sigmoid(gate) * a

This is the absorbed form; the naive form expands k_s = [W_uk c_s, k_r_s] and v_s = W_uv c_s and costs less when many
queries share the expansion. Rotary pairs neighbouring dims; without cos and sin (Kimi) nothing is rotated.

Rounding: c and k_r to the model's dtype as they enter the cache, y at the end; everything between is fp32.
"""

import torch

from soloist.kernels.check import FLOATS, expect, use_reference
from soloist.kernels.launch import HAS_TRITON
from soloist.kernels.norm import rms_norm_ref
from soloist.kernels.rotary import apply_rotary_ref

if HAS_TRITON:
    from soloist.kernels import mla_prompt, mla_triton

# Queries from which on expanding the cache costs less than absorbing the maps: (Kn+V) R S a head against (2R-Kn-V) T S.
MIN_ROWS_TO_EXPAND = 170
# Queries that attend at once; bounds the scores to H * 128 * S.
MAX_ROWS = 128


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context_len: int, scale: float) -> torch.Tensor:
    """Causal attention of the last T of S positions: q (H, T, X), k (H or 1, S, X), v (H or 1, S, Y) to (H, T, Y)."""
    S = k.shape[1]
    position = torch.arange(S, device=q.device)
    outputs = []
    for rows, row_positions in zip(q.split(MAX_ROWS, dim=1), position[context_len:].split(MAX_ROWS), strict=True):
        scores = rows @ k.mT * scale  # (H, T', S)
        scores.masked_fill_(position > row_positions[:, None], -torch.inf)
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, dim=1)


def _prepare(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    latent_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate and write the cache; give q_n (H, T, Kn), q_r (H, T, P) and the cache so far (S, R+P), in fp32."""
    T, R = q.shape[0], kv_norm.shape[0]
    P = kv.shape[1] - R
    start = int(context_len)
    q_n, q_r = q.float().view(T, num_heads, -1).split([q.shape[1] // num_heads - P, P], dim=-1)
    c, k_r = kv.split([R, P], dim=-1)
    if cos is not None and sin is not None:
        angles = cos[start : start + T], sin[start : start + T]  # (T, P/2)
        q_r = apply_rotary_ref(q_r, *angles, interleaved=True)
        k_r = apply_rotary_ref(k_r, *angles, interleaved=True)
    latent_cache[start : start + T, :R] = rms_norm_ref(c, kv_norm, eps)
    latent_cache[start : start + T, R:] = k_r
    return q_n.transpose(0, 1), q_r.transpose(0, 1), latent_cache[: start + T].float()


def _finish(a: torch.Tensor, gate: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Gate the heads and round: (H, T, V) fp32 to (T, H*V)."""
    y = a.transpose(0, 1)  # (T, H, V)
    if gate is not None:
        y = y * torch.sigmoid(gate.float())[..., None]
    return y.to(dtype).flatten(1)


def mla_attention_ref(
    q: torch.Tensor,
    kv: torch.Tensor,
    gate: torch.Tensor | None,
    kv_norm: torch.Tensor,
    eps: float,
    w_kv_b: torch.Tensor,
    latent_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    num_heads: int,
    v_head_dim: int,
    scale: float,
) -> torch.Tensor:
    """Attend to the latents themselves: the query is taken into the latent space, the result out of it."""
    q_n, q_r, latent = _prepare(q, kv, kv_norm, eps, latent_cache, context_len, cos, sin, num_heads)
    R = kv_norm.shape[0]
    w_uk, w_uv = w_kv_b.float().view(num_heads, -1, R).split([q_n.shape[-1], v_head_dim], dim=1)
    queries = torch.cat([q_n @ w_uk, q_r], dim=-1)  # (H, T, R+P)
    z = _attend(queries, latent[None], latent[None, :, :R], int(context_len), scale)  # (H, T, R)
    return _finish(z @ w_uv.mT, gate, q.dtype)


def mla_naive_ref(
    q: torch.Tensor,
    kv: torch.Tensor,
    gate: torch.Tensor | None,
    kv_norm: torch.Tensor,
    eps: float,
    w_kv_b: torch.Tensor,
    latent_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    num_heads: int,
    v_head_dim: int,
    scale: float,
) -> torch.Tensor:
    """Expand every head's keys and values from the latents, then attend as usual."""
    q_n, q_r, latent = _prepare(q, kv, kv_norm, eps, latent_cache, context_len, cos, sin, num_heads)
    R = kv_norm.shape[0]
    c, k_r = latent[:, :R], latent[:, R:]  # (S, R), (S, P)
    w_uk, w_uv = w_kv_b.float().view(num_heads, -1, R).split([q_n.shape[-1], v_head_dim], dim=1)
    keys = torch.cat([c @ w_uk.mT, k_r.expand(num_heads, -1, -1)], dim=-1)  # (H, S, Kn+P)
    a = _attend(torch.cat([q_n, q_r], dim=-1), keys, c @ w_uv.mT, int(context_len), scale)  # (H, T, V)
    return _finish(a, gate, q.dtype)


def mla_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    gate: torch.Tensor | None,
    kv_norm: torch.Tensor,
    eps: float,
    w_kv_b: torch.Tensor,
    latent_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    num_heads: int,
    v_head_dim: int,
    scale: float,
    host_len: int | None = None,
) -> torch.Tensor:
    """Attend to the cache and to this step's own rows. The module's docstring has the equations.

    Args:
        q: (T, H*(Kn+P)) per head Kn dims without, then P with rotary. Rows may be strided.
        kv: (T, R+P) raw latent, then the raw shared key. Rows may be strided.
        gate: (T, H) before its sigmoid, or None.
        kv_norm: (R) weight of the latent's norm.
        eps: of that norm.
        w_kv_b: (H*(Kn+V), R) per head Kn key rows, then V value rows.
        latent_cache: (S, R+P), rows context_len..context_len+T-1 are written in place; later rows are never read.
        context_len: () int32 on the device: cached rows before this step.
        cos: (S', P/2) fp32 table by position, S' > the last position; None, as sin: no rotary.
        sin: likewise.
        num_heads: H.
        v_head_dim: V.
        scale: of the scores, (Kn+P)^-0.5 times what YaRN adds.
        host_len: `context_len` on the host. None: where it is needed there, for a prompt, the device is asked.

    Returns:
        (T, H*V) in q's dtype.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C; the head gate as in Ling-3.0.
    """
    dims = {"H": num_heads}
    expect(q, "T I", FLOATS, dims, name="q")
    expect(kv_norm, "R", (q.dtype, torch.float32), dims, name="kv_norm")
    expect(latent_cache, "S X", q.dtype, dims, name="latent_cache")
    expect(kv, "T X", q.dtype, dims, name="kv")
    P = dims["X"] - dims["R"]
    expect(w_kv_b, f"{dims['I'] + num_heads * (v_head_dim - P)} R", q.dtype, dims, name="w_kv_b")
    if gate is not None:
        expect(gate, "T H", q.dtype, dims, name="gate")
    expect(context_len, "", torch.int32, dims, name="context_len")
    assert (cos is None) == (sin is None), "cos and sin go together"
    if cos is not None and sin is not None:
        expect(cos, f"S' {P // 2}", torch.float32, dims, name="cos")
        expect(sin, f"S' {P // 2}", torch.float32, dims, name="sin")
    inputs = (q, kv, gate, kv_norm, eps, w_kv_b, latent_cache)
    if not use_reference(q) and dims["T"] > mla_triton.MAX_STEP_ROWS:
        start = int(context_len) if host_len is None else host_len
        return mla_prompt.attend(*inputs, start, cos, sin, num_heads=num_heads, v_head_dim=v_head_dim, scale=scale)
    if not use_reference(q):
        form = mla_triton.attend
    else:
        form = mla_attention_ref if dims["T"] < MIN_ROWS_TO_EXPAND else mla_naive_ref
    return form(*inputs, context_len, cos, sin, num_heads=num_heads, v_head_dim=v_head_dim, scale=scale)
