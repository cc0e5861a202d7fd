"""The operators of training written plainly: one document, one token at a time, autograd does the rest."""

import torch
import torch.nn.functional as F
from torch import Tensor

from soloist.kernels.moe import RouterSettings


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def kda(
    qkv: Tensor,
    f: Tensor,
    gate: Tensor,
    b: Tensor,
    taps: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    o_norm: Tensor,
    eps: float,
    num_heads: int,
    lower_bound: float | None,
) -> Tensor:
    T, H, K = len(qkv), num_heads, f.shape[1] // num_heads
    padded = torch.cat([qkv.new_zeros(3, qkv.shape[1]), qkv])
    mixed = F.silu(sum(padded[j : j + T] * taps[:, j] for j in range(4)))
    q, k, v = (x.unflatten(1, (H, -1)) for x in mixed.split([H * K, H * K, qkv.shape[1] - 2 * H * K], dim=1))
    q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() / K**0.5
    k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    rate, drive = A_log.exp()[:, None], (f + dt_bias).view(T, H, K)
    g = -rate * F.softplus(drive) if lower_bound is None else lower_bound * (rate * drive).sigmoid()
    S = qkv.new_zeros(H, K, v.shape[-1])
    outs = []
    for t in range(T):
        S = g[t].exp()[..., None] * S
        u = b[t].sigmoid()[:, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
        S = S + k[t][..., None] * u[:, None]
        outs.append(torch.einsum("hkv,hk->hv", S, q[t]))
    return (rms(torch.stack(outs), o_norm, eps) * gate.view(T, H, -1).sigmoid()).flatten(1)


def rotate(x: Tensor, theta: float, interleaved: bool) -> Tensor:
    """Rotate (T, .., P), row t at position t."""
    P = x.shape[-1]
    angle = torch.outer(torch.arange(len(x)).double(), theta ** (-torch.arange(0, P, 2).double() / P))
    angle = angle.view(len(x), *(1,) * (x.dim() - 2), P // 2).to(x.dtype)
    if interleaved:
        z = torch.view_as_complex(x.unflatten(-1, (P // 2, 2)).contiguous())
        return torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    a, b = x.split(P // 2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of (T, H, K) to (T, H, K) and (T, H, V)."""
    scores = torch.einsum("thk,shk->hts", q, k) * scale
    scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), float("-inf"))
    return torch.einsum("hts,shv->thv", scores.softmax(-1), v)


def attention(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, H: int, G: int, theta: float) -> Tensor:
    heads = qkv.unflatten(1, (H + 2 * G, -1))
    q, k, v = heads[:, :H], heads[:, H : H + G], heads[:, H + G :]
    q, k = rotate(rms(q, q_norm, eps), theta, False), rotate(rms(k, k_norm, eps), theta, False)
    k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    return attend(q, k, v, q.shape[-1] ** -0.5).flatten(1)


def mla(
    q: Tensor,
    kv: Tensor,
    gate: Tensor,
    kv_norm: Tensor,
    eps: float,
    w_kv_b: Tensor,
    H: int,
    V: int,
    scale: float,
    theta: float,
) -> Tensor:
    R = len(kv_norm)
    P = kv.shape[1] - R
    q = q.unflatten(1, (H, -1))
    q = torch.cat([q[..., :-P], rotate(q[..., -P:], theta, True)], dim=-1)
    expanded = (rms(kv[:, :R], kv_norm, eps) @ w_kv_b.T).unflatten(1, (H, -1))
    k_r = rotate(kv[:, None, R:], theta, True).repeat(1, H, 1)
    k = torch.cat([expanded[..., :-V], k_r], dim=-1)
    return (attend(q, k, expanded[..., -V:], scale) * gate.sigmoid()[..., None]).flatten(1)


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor, limit: float | None) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    gate = gate / (1 + (-gate).exp())
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * up) @ down.T


def moe(
    x: Tensor,
    norm: Tensor,
    eps: float,
    router: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor,
    shared_down: Tensor,
    settings: RouterSettings,
    limit: float,
    shared_limit: float,
) -> Tensor:
    h = rms(x, norm, eps)
    rows = []
    for t in range(len(x)):
        scores = (router @ h[t]).sigmoid()
        biased = (scores + bias).detach().view(settings.n_group, -1)
        best = biased.topk(2, dim=-1).values.sum(-1).topk(settings.topk_group).indices.tolist()
        size = biased.shape[1]
        legal = [e for e in range(len(bias)) if e // size in best]
        chosen = sorted(legal, key=lambda e: -float(biased.flatten()[e]))[: settings.num_experts_per_tok]
        total = sum(scores[e] for e in chosen) + 1e-20
        y = x[t] + swiglu(h[t], shared_gate_up, shared_down, shared_limit)
        for e in chosen:
            y = y + settings.routed_scaling_factor * scores[e] / total * swiglu(h[t], gate_up[e], down[e], limit)
        rows.append(y)
    return torch.stack(rows)
