"""Kimi Delta Attention on packed documents, differentiable: the chunk form of `kernels.kda`, many documents at once.

    within a chunk that starts from S (K, V), c the cumulated g:

        L_ij = beta_i k_i . (exp(c_i - c_j) k_j), i > j         M = (I + L)^-1 diag(beta)
        P_ij = q_i . (exp(c_i - c_j) k_j), i >= j
        u    = M v - M (exp(c) k) S                             only this and the next line go chunk by chunk
        S'   = diag(exp(c_last)) S + (exp(c_last - c) k)^T u
        o    = (exp(c) q) S + P u

Source: Kimi Linear, arXiv 2510.26692, section 3 (the chunkwise form).
"""

import torch
import torch.nn.functional as F

from soloist.kernels.kda import L2_EPS, SUB_CHUNK
from soloist.train.documents import CHUNK, Documents
from soloist.train.operators import rms_norm, widen


def short_conv(x: torch.Tensor, taps: torch.Tensor, documents: Documents) -> torch.Tensor:
    """Mix each channel of `x` (T, C) with its last three rows by `taps` (C, 4), oldest first, and apply SiLU: (T, C).

    Rows before a document's first count as zeros.
    """
    wide, taps = widen(x), widen(taps)
    mixed = wide * taps[:, -1]
    for distance in range(1, taps.shape[1]):
        # The last row of the document before is not this document's.
        is_own = (documents.positions >= distance)[:, None]
        earlier = F.pad(wide, (0, 0, distance, 0))[: x.shape[0]]
        mixed = mixed + earlier * is_own * taps[:, -1 - distance]
    return F.silu(mixed).to(x.dtype)


def log_decay(
    f: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, num_heads: int, lower_bound: float | None
) -> torch.Tensor:
    """Give g (T, H, K) of the decay projection (T, H*K); the two laws are in `kernels.kda`."""
    rate = widen(A_log).exp()[:, None]  # (H, 1)
    drive = (widen(f) + widen(dt_bias)).unflatten(-1, (num_heads, -1))  # (T, H, K)
    return -rate * F.softplus(drive) if lower_bound is None else lower_bound * torch.sigmoid(rate * drive)


class _UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 of strictly lower triangular L (.., C, C)."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, L: torch.Tensor) -> torch.Tensor:
        eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand(L.shape)
        inverse = torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> torch.Tensor:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return -(inverse.mT @ grads[0] @ inverse.mT).tril(-1)


def _own_products(rows: torch.Tensor, k: torch.Tensor, c: torch.Tensor, is_bounded: bool) -> torch.Tensor:
    """Give rows_i . (exp(c_i - c_j) k_j) inside sub-chunks: rows (2, .., s, K), k and c (.., s, K) to (2, .., s, s).

    Entries above the diagonal are finite and mean nothing.
    """
    if is_bounded:
        # A decay of at least exp(-5) a row: relative to the middle of 16 rows, no factor leaves fp32.
        middle = c - c[..., SUB_CHUNK // 2 - 1, None, :]
        return (rows * middle.exp()) @ (k * (-middle).exp()).mT
    difference = (c[..., :, None, :] - c[..., None, :, :]).clamp(max=0)  # (.., s, s, K)
    return torch.einsum("r...ik,...ijk->r...ij", rows, difference.exp() * k[..., None, :, :])


def _decayed_products(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, is_bounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give k_i . (D_ij k_j) and q_i . (D_ij k_j), D_ij = exp(g_{j+1} + .. + g_i), for i >= j: (n, H, C, C) each.

    Inside sub-chunks pair by pair; pairs across them meet at the later one's first row, so that no factor exceeds 1.
    """
    s, num_subs = SUB_CHUNK, k.shape[-2] // SUB_CHUNK
    rows = torch.stack([k, q]).unflatten(-2, (num_subs, s))  # (2, n, H, C/s, s, K)
    k_subs = k.unflatten(-2, (num_subs, s))
    c = g.unflatten(-2, (num_subs, s)).cumsum(-2)  # (n, H, C/s, s, K)
    own = _own_products(rows, k_subs, c, is_bounded)  # (2, n, H, C/s, s, s)
    from_start = rows * c.exp()
    total = c[..., -1:, :]  # (n, H, C/s, 1, K)
    to_end = k_subs * (total - c).exp()
    bands = []
    for sub in range(num_subs):
        # Decay from the end of each earlier sub-chunk to the start of this one.
        pieces = [own[..., sub, :, :]]
        between = torch.zeros_like(total[..., 0, :, :])  # (n, H, 1, K)
        for earlier in range(sub - 1, -1, -1):
            far_k = to_end[..., earlier, :, :] * between.exp()
            pieces.insert(0, from_start[..., sub, :, :] @ far_k.mT)
            between = between + total[..., earlier, :, :]
        band = torch.cat(pieces, dim=-1)  # (2, n, H, s, (sub+1)*s)
        bands.append(F.pad(band, (0, (num_subs - 1 - sub) * s)))
    products = torch.cat(bands, dim=-2).tril()  # (2, n, H, C, C)
    return products[0], products[1]


def _scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    counts: tuple[int, ...],
    is_bounded: bool,
) -> torch.Tensor:
    """Run the recurrence over chunks (n, H, C, .) in the order of `Chunks`: (n, H, C, V)."""
    kk, scores = _decayed_products(q, k, g, is_bounded)
    inverse = _UnitLowerInverse.apply((beta * kk).tril(-1)) * beta.mT  # (n, H, C, C)
    c = g.cumsum(-2)
    from_start, last = c.exp(), c[..., -1:, :]
    pushed = inverse @ torch.cat([v, k * from_start], dim=-1)  # (n, H, C, V+K)
    parts = [x.split(counts) for x in (*pushed.split([v.shape[-1], k.shape[-1]], dim=-1), last.exp().mT)]
    keys = (k * (last - c).exp()).mT.split(counts)
    state = v.new_zeros(counts[0], *k.shape[1:2], k.shape[-1], v.shape[-1])  # (n, H, K, V)
    states, all_u = [], []
    for count, mv, mk, decay, k_end in zip(counts, *parts, keys, strict=True):
        state = state[:count] if count < state.shape[0] else state
        u = mv - mk @ state  # (count, H, C, V)
        states.append(state)
        all_u.append(u)
        state = decay * state + k_end @ u
    return (q * from_start) @ torch.cat(states) + scores @ torch.cat(all_u)


def kda(
    qkv: torch.Tensor,
    f: torch.Tensor,
    gate: torch.Tensor,
    b: torch.Tensor,
    conv_w: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    o_norm: torch.Tensor,
    eps: float,
    documents: Documents,
    *,
    num_heads: int,
    lower_bound: float | None,
) -> torch.Tensor:
    """Run the operator over every document from an empty state; `kernels.kda.kda_chunk`, whose arguments these are.

    Args:
        qkv: (T, C) raw projections [q k v], C = H*(K+K+V).
        f: (T, H*K) decay projection.
        gate: (T, H*V) output gate projection.
        b: (T, H) write strength projection.
        conv_w: (C, 4) taps, oldest input first.
        A_log: (H).
        dt_bias: (H*K).
        o_norm: (V) weight of the output norm.
        eps: of the output norm.
        documents: whose rows these are.
        num_heads: H.
        lower_bound: of the log decay, in [-5, 0); None selects the softplus law.

    Returns:
        (T, H*V).
    """
    H, chunks = num_heads, documents.chunks()
    K = f.shape[1] // H
    mixed = widen(short_conv(qkv, conv_w, documents))  # (T, C)
    V = (qkv.shape[1] - 2 * H * K) // H
    parts = mixed.split([H * K, H * K, H * V], dim=-1)
    heads = [x.unflatten(-1, (H, -1)) for x in (*parts, widen(b))]  # (T, H, .) each
    rows = torch.cat([*heads[:3], log_decay(f, A_log, dt_bias, H, lower_bound), heads[3]], dim=-1)  # (T, H, 3K+V+1)
    rows = rows.index_select(0, chunks.rows).unflatten(0, (-1, CHUNK)).transpose(1, 2)  # (n, H, C, .)
    # Head by head in memory, once: everything behind is products of matrices.
    q, k, v, g, strength = rows.contiguous().split([K, K, V, K, 1], dim=-1)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    beta = strength.sigmoid()
    if not chunks.is_full:
        # Padding writes nothing and decays nothing.
        g, beta = g * chunks.is_real, beta * chunks.is_real
    o = _scan(q * K**-0.5, k, v, g, beta, chunks.counts, lower_bound is not None)  # (n, H, C, V)
    o = o.transpose(1, 2).flatten(0, 1).index_select(0, chunks.places).to(gate.dtype)  # (T, H, V)
    normed = rms_norm(widen(o), o_norm, eps)
    return (normed * widen(gate).unflatten(-1, (H, -1)).sigmoid()).to(gate.dtype).flatten(1)
