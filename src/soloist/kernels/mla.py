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
from soloist.kernels.mla_inputs import MlaRows, MlaWeights
from soloist.kernels.norm import rms_norm_ref
from soloist.kernels.rotary import RotaryTable, apply_rotary_ref

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
    rows: MlaRows,
    weights: MlaWeights,
    latent_cache: torch.Tensor,
    context_len: torch.Tensor,
    rotary: RotaryTable | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate and write the cache; give q_n (H, T, Kn), q_r (H, T, P) and the cache so far (S, R+P), in fp32."""
    T, H, R = rows.q.shape[0], weights.num_heads, weights.latent_rank
    P = rows.kv.shape[1] - R
    start = int(context_len)
    q_n, q_r = rows.q.float().view(T, H, -1).split([rows.q.shape[1] // H - P, P], dim=-1)
    c, k_r = rows.kv.split([R, P], dim=-1)
    if rotary is not None:
        angles = rotary.cos[start : start + T], rotary.sin[start : start + T]  # (T, P/2)
        q_r = apply_rotary_ref(q_r, *angles, interleaved=True)
        k_r = apply_rotary_ref(k_r, *angles, interleaved=True)
    latent_cache[start : start + T, :R] = rms_norm_ref(c, weights.kv_norm, weights.eps)
    latent_cache[start : start + T, R:] = k_r
    return q_n.transpose(0, 1), q_r.transpose(0, 1), latent_cache[: start + T].float()


def _split_maps(weights: MlaWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Give W_uk (H, Kn, R) and W_uv (H, V, R), fp32."""
    maps = weights.w_kv_b.float().view(weights.num_heads, -1, weights.latent_rank)  # (H, Kn+V, R)
    return maps[:, : -weights.v_head_dim], maps[:, -weights.v_head_dim :]


def _finish(a: torch.Tensor, gate: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Gate the heads and round: (H, T, V) fp32 to (T, H*V)."""
    y = a.transpose(0, 1)  # (T, H, V)
    if gate is not None:
        y = y * torch.sigmoid(gate.float())[..., None]
    return y.to(dtype).flatten(1)


def mla_attention_ref(
    rows: MlaRows,
    weights: MlaWeights,
    latent_cache: torch.Tensor,
    context_len: torch.Tensor,
    rotary: RotaryTable | None,
) -> torch.Tensor:
    """Attend to the latents themselves: the query is taken into the latent space, the result out of it."""
    q_n, q_r, latent = _prepare(rows, weights, latent_cache, context_len, rotary)
    w_uk, w_uv = _split_maps(weights)
    queries = torch.cat([q_n @ w_uk, q_r], dim=-1)  # (H, T, R+P)
    values = latent[None, :, : weights.latent_rank]  # (1, S, R)
    z = _attend(queries, latent[None], values, int(context_len), weights.scale)  # (H, T, R)
    return _finish(z @ w_uv.mT, rows.gate, rows.q.dtype)


def mla_naive_ref(
    rows: MlaRows,
    weights: MlaWeights,
    latent_cache: torch.Tensor,
    context_len: torch.Tensor,
    rotary: RotaryTable | None,
) -> torch.Tensor:
    """Expand every head's keys and values from the latents, then attend as usual."""
    q_n, q_r, latent = _prepare(rows, weights, latent_cache, context_len, rotary)
    R = weights.latent_rank
    c, k_r = latent[:, :R], latent[:, R:]  # (S, R), (S, P)
    w_uk, w_uv = _split_maps(weights)
    keys = torch.cat([c @ w_uk.mT, k_r.expand(weights.num_heads, -1, -1)], dim=-1)  # (H, S, Kn+P)
    a = _attend(torch.cat([q_n, q_r], dim=-1), keys, c @ w_uv.mT, int(context_len), weights.scale)  # (H, T, V)
    return _finish(a, rows.gate, rows.q.dtype)


def mla_attention(
    rows: MlaRows,
    weights: MlaWeights,
    latent_cache: torch.Tensor,
    context_len: torch.Tensor,
    rotary: RotaryTable | None,
    *,
    host_len: int | None = None,
) -> torch.Tensor:
    """Attend to the cache and to this step's own rows. The module's docstring has the equations.

    Args:
        rows: of the tokens.
        weights: of the layer.
        latent_cache: (S, R+P), rows context_len..context_len+T-1 are written in place; later rows are never read.
        context_len: () int32 on the device: cached rows before this step.
        rotary: tables of more positions than the last one; None: no rotary.
        host_len: `context_len` on the host. None: where it is needed there, for a prompt, the device is asked.

    Returns:
        (T, H*V) in q's dtype.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C; the head gate as in Ling-3.0.
    """
    q, kv, gate = rows
    H, V = weights.num_heads, weights.v_head_dim
    dims = {"H": H}
    expect(q, "T I", FLOATS, dims, name="q")
    expect(weights.kv_norm, "R", (q.dtype, torch.float32), dims, name="kv_norm")
    expect(latent_cache, "S X", q.dtype, dims, name="latent_cache")
    expect(kv, "T X", q.dtype, dims, name="kv")
    P = dims["X"] - dims["R"]
    expect(weights.w_kv_b, f"{dims['I'] + H * (V - P)} R", q.dtype, dims, name="w_kv_b")
    if gate is not None:
        expect(gate, "T H", q.dtype, dims, name="gate")
    expect(context_len, "", torch.int32, dims, name="context_len")
    if rotary is not None:
        expect(rotary.cos, f"S' {P // 2}", torch.float32, dims, name="cos")
        expect(rotary.sin, f"S' {P // 2}", torch.float32, dims, name="sin")
    if use_reference(q):
        form = mla_attention_ref if dims["T"] < MIN_ROWS_TO_EXPAND else mla_naive_ref
        return form(rows, weights, latent_cache, context_len, rotary)
    if dims["T"] <= mla_triton.MAX_STEP_ROWS:
        return mla_triton.attend(rows, weights, latent_cache, context_len, rotary)
    start = int(context_len) if host_len is None else host_len
    cos, sin = (None, None) if rotary is None else (rotary.cos, rotary.sin)
    inputs = (q, kv, gate, weights.kv_norm, weights.eps, weights.w_kv_b, latent_cache, start, cos, sin)
    return mla_prompt.attend(*inputs, num_heads=H, v_head_dim=V, scale=weights.scale)
