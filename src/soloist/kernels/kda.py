"""Kimi Delta Attention (KDA): short convolutions, gates, the delta rule with a decay per key channel, gated norm.

Owns the four forms of the operator (step, chunk, verify, commit). The projections before it and after it are `linear`s.

Equations, per head and token t; [q~ k~ v~] is a row of `qkv`, S (V, K) the state, fp32:

    q, k, v = silu(sum_j w_j * [q~ k~ v~]_{t-3+j}), j = 0..3, depthwise
    q, k    = q / sqrt(sum(q^2) + 1e-6) * K^-0.5,  k / sqrt(sum(k^2) + 1e-6)
    g       = lower_bound * sigmoid(exp(A_log) * (f + dt_bias))      with a lower bound (Ling)
              -exp(A_log) * softplus(f + dt_bias)                    without one (Kimi)
    u       = sigmoid(b) * (v - S diag(exp(g)) k)
    S       = S diag(exp(g)) + u k^T
    y       = rms_norm(S q) * o_norm * sigmoid(gate)

Rounding, the same in every form: the convolution's output is rounded to the model's dtype after its SiLU, S q before
the output norm, y at the end. Everything between is fp32, above all the residual v - S k.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from soloist.kernels.check import FLOATS, expect, use_reference
from soloist.kernels.kda_inputs import KdaCache, KdaKept, KdaRows, KdaWeights
from soloist.kernels.launch import HAS_TRITON

if HAS_TRITON:
    from soloist.kernels import kda_commit_cuda, kda_prompt_triton, kda_step_cuda, kda_verify_cuda
from soloist.kernels.norm import gated_rms_norm_ref

# Rows that one triangular system ties together, and rows whose decays are formed pair by pair.
CHUNK = 64
SUB_CHUNK = 16
# Rows of a prefill whose chunks are prepared at once, while only the state is sequential; bounds the temporaries.
MAX_ROWS = 1024
# Added to the sum of squares inside the root; independent of the norms' eps.
L2_EPS = 1e-6


class _Operands(NamedTuple):
    """What the recurrence reads, fp32."""

    q: torch.Tensor  # (H, T, K)
    k: torch.Tensor  # (H, T, K)
    v: torch.Tensor  # (H, T, V)
    g: torch.Tensor  # (H, T, K)
    beta: torch.Tensor  # (H, T, 1)


def _l2_norm(x: torch.Tensor) -> torch.Tensor:
    """Normalise the last axis: x / sqrt(sum(x^2) + 1e-6)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _prepare(rows: KdaRows, weights: KdaWeights, conv: torch.Tensor) -> tuple[_Operands, torch.Tensor]:
    """Turn raw projections into the recurrence's inputs: convolution, SiLU, L2 norm, gates.

    Also gives the window (3+T, C): the three raw rows before this step, then this step's.
    """
    qkv, f, _, b = rows
    T, H = qkv.shape[0], weights.num_heads
    K = f.shape[1] // H
    window = torch.cat([conv, qkv])  # (3+T, C)
    taps = weights.conv_w.float()
    mixed = window[:T].float() * taps[:, 0]
    for tap in range(1, 4):
        mixed += window[tap : tap + T].float() * taps[:, tap]
    mixed = F.silu(mixed).to(qkv.dtype).float()  # (T, C)
    q, k, v = mixed.split([H * K, H * K, qkv.shape[1] - 2 * H * K], dim=1)
    q = _l2_norm(q.view(T, H, K)) * K**-0.5
    k = _l2_norm(k.view(T, H, K))
    rate = weights.A_log.exp()[:, None]  # (H, 1)
    drive = f.float().view(T, H, K) + weights.dt_bias.view(H, K)
    bound = weights.lower_bound
    g = -rate * F.softplus(drive) if bound is None else bound * torch.sigmoid(rate * drive)  # (T, H, K)
    beta = torch.sigmoid(b.float())[..., None]  # (T, H, 1)
    return _Operands(*(x.transpose(0, 1) for x in (q, k, v.view(T, H, -1), g, beta))), window


def _finish(o: torch.Tensor, rows: KdaRows, weights: KdaWeights) -> torch.Tensor:
    """Norm and gate what the recurrence reads: (H, T, V) fp32 to (T, H*V) in the rows' dtype."""
    o = o.transpose(0, 1).to(rows.gate.dtype)  # (T, H, V)
    return gated_rms_norm_ref(o, rows.gate.view(o.shape), weights.o_norm, weights.eps).flatten(1)


def kda_recurrent_ref(rows: KdaRows, weights: KdaWeights, cache: KdaCache) -> torch.Tensor:
    """Run the recurrence token by token, any T: the definition that every other form must equal."""
    (q, k, v, g, beta), window = _prepare(rows, weights, cache.conv)
    o = torch.empty_like(v)  # (H, T, V)
    for t in range(o.shape[1]):
        cache.state.mul_(g[:, t, None].exp())
        u = beta[:, t, None] * (v[:, t, :, None] - cache.state @ k[:, t, :, None])  # (H, V, 1)
        cache.state.add_(u * k[:, t, None])
        o[:, t] = (cache.state @ q[:, t, :, None]).squeeze(-1)
    cache.conv.copy_(window[-3:])
    return _finish(o, rows, weights)


# One token is the recurrence at T = 1.
kda_step_ref = kda_recurrent_ref


def _decay_to_end(g: torch.Tensor) -> torch.Tensor:
    """exp(sum of the g of all later rows) for each row of g (..., C, K); a sum, never a difference of sums."""
    later = g.flip(-2).cumsum(-2).flip(-2)[..., 1:, :]
    return F.pad(later, (0, 0, 0, 1)).exp()


def _decayed_products(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Give k_i . (D_ij k_j) and q_i . (D_ij k_j), D_ij = exp(g_{j+1} + ... + g_i), for i >= j, else 0: (2, ..., C, C).

    Inside a sub-chunk the decay between two rows is a product of single rows' decays; pairs across sub-chunks meet at
    the later one's first row. So no factor exceeds 1: right for any decay, also one that underflows within a few rows.
    """
    size = min(SUB_CHUNK, k.shape[-2])
    num_subs = k.shape[-2] // size
    rows = torch.stack([k, q]).unflatten(-2, (num_subs, size))  # (2, ..., C/16, 16, K)
    g_subs = g.unflatten(-2, (num_subs, size))  # (..., C/16, 16, K)
    decay, from_start = g_subs.exp(), g_subs.cumsum(-2).exp()
    own = k.new_zeros(*rows.shape[:-1], size)  # (2, ..., C/16, 16, 16)
    # Its row j holds k_j, decayed from row j to the row at hand.
    decayed_k = rows[0].clone()
    for i in range(size):
        decayed_k[..., :i, :] *= decay[..., i, None, :]
        own[..., i, : i + 1] = (decayed_k[..., : i + 1, :] @ rows[..., i, :].movedim(0, -1)).movedim(-1, 0)

    products = k.new_zeros(*rows.shape[:-1], num_subs * size)  # (2, ..., C/16, 16, C)
    for sub in range(num_subs):
        start, stop = sub * size, (sub + 1) * size
        products[..., sub, :, start:stop] = own[..., sub, :, :]
        if start:
            earlier_k = k[..., :start, :] * _decay_to_end(g[..., :start, :])
            products[..., sub, :, :start] = (rows[..., sub, :, :] * from_start[..., sub, :, :]) @ earlier_k.mT
    return products.flatten(-3, -2)


def _solve(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give M = (I + L)^-1 diag(beta), L_ij = beta_i k_i . D_ij k_j below the diagonal, and P_ij = q_i . D_ij k_j."""
    kk, qk = _decayed_products(q, k, g)  # (..., C, C)
    system = (beta * kk).tril(-1)
    inverse = torch.linalg.solve_triangular(system, torch.diag_embed(beta[..., 0]), upper=False, unitriangular=True)
    return inverse, qk


def _scan_chunks(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Advance `state` (H, V, K) in place over rows (H, T, .), a chunk at a time, and give S q (H, T, V)."""
    T = q.shape[1]
    chunk = min(CHUNK, -(-T // SUB_CHUNK) * SUB_CHUNK)
    num_chunks = -(-T // chunk)
    # Padding rows have beta = 0 and g = 0: they write nothing and decay nothing.
    padding = (0, 0, 0, num_chunks * chunk - T)
    q, k, v, g, beta = (F.pad(x, padding).unflatten(1, (num_chunks, chunk)) for x in (q, k, v, g, beta))  # (H, n, C, .)
    inverse, scores = _solve(q, k, g, beta)  # (H, n, C, C)
    from_start = g.cumsum(-2).exp()  # (H, n, C, K)
    q_start, k_start, k_end = q * from_start, k * from_start, k * _decay_to_end(g)
    o = torch.empty_like(v)
    S = state.mT  # (H, K, V)
    for i in range(num_chunks):
        u = inverse[:, i] @ (v[:, i] - k_start[:, i] @ S)  # (H, C, V)
        o[:, i] = q_start[:, i] @ S + scores[:, i] @ u
        S = from_start[:, i, -1, :, None] * S + k_end[:, i].mT @ u
    state.copy_(S.mT)
    return o.flatten(1, 2)[:, :T]


def kda_chunk_ref(rows: KdaRows, weights: KdaWeights, cache: KdaCache) -> torch.Tensor:
    """Run the recurrence in WY form, 64 rows per triangular system; only the state passes from chunk to chunk."""
    operands, window = _prepare(rows, weights, cache.conv)
    parts = zip(*(x.split(MAX_ROWS, dim=1) for x in operands), strict=True)
    o = torch.cat([_scan_chunks(cache.state, *part) for part in parts], dim=1)  # (H, T, V)
    cache.conv.copy_(window[-3:])
    return _finish(o, rows, weights)


def kda_verify_ref(rows: KdaRows, weights: KdaWeights, cache: KdaCache, kept: KdaKept) -> torch.Tensor:
    """Run the recurrence as one small chunk from a frozen state and keep k, u, g and the raw rows for the commit."""
    T, S = rows.qkv.shape[0], cache.state.mT  # (H, K, V)
    (q, k, v, g, beta), _ = _prepare(rows, weights, cache.conv)
    inverse, scores = _solve(q, k, g, beta)  # (H, T, T)
    from_start = g.cumsum(1).exp()  # (H, T, K)
    u = inverse @ (v - (k * from_start) @ S)  # (H, T, V)
    o = (q * from_start) @ S + scores @ u
    for row, x in zip(kept, (k, u, g), strict=False):
        row[:T] = x.transpose(0, 1)
    kept.conv[:T] = rows.qkv
    return _finish(o, rows, weights)


def kda_commit_ref(cache: KdaCache, kept: KdaKept, num_rows: torch.Tensor) -> None:
    """Apply the first `num_rows` kept rows to the states; equation in `kda_commit`."""
    state, conv = cache
    row = torch.arange(kept.k.shape[1], device=state.device)
    is_kept = (row < num_rows)[:, None, None]  # (T, 1, 1)
    # Rows past num_rows hold rejected drafts or were never written: select, never multiply by zero.
    k, u, g = (x.where(is_kept, 0).transpose(1, 2) for x in kept[:3])  # (L, H, T, .)
    state.mul_(g.sum(2).exp()[:, :, None]).add_(u.mT @ (k * _decay_to_end(g)))
    window = torch.cat([conv, kept.conv], dim=1)  # (L, 3+T, C)
    conv.copy_(window.index_select(1, num_rows + torch.arange(3, device=state.device)))


def _expect_layer(rows: KdaRows, weights: KdaWeights, cache: KdaCache) -> dict[str, int]:
    """Check the arguments that step, chunk and verify share, and give the sizes by letter; "C" counts the channels."""
    dtype, H = rows.qkv.dtype, weights.num_heads
    dims = {"H": H, "C": rows.qkv.shape[-1]}
    expect(rows.qkv, "T C", FLOATS, dims, name="qkv")
    expect(cache.state, "H V K", torch.float32, dims, name="state")
    key_channels, value_channels = H * dims["K"], H * dims["V"]
    assert dims["C"] == 2 * key_channels + value_channels, f"qkv has {dims['C']} channels, state says H, V, K = {dims}"
    expect(rows.f, f"T {key_channels}", dtype, dims, name="f")
    expect(rows.gate, f"T {value_channels}", dtype, dims, name="gate")
    expect(rows.b, "T H", dtype, dims, name="b")
    expect(weights.conv_w, "C 4", (dtype, torch.float32), dims, name="conv_w")
    expect(weights.A_log, "H", torch.float32, dims, name="A_log")
    expect(weights.dt_bias, f"{key_channels}", torch.float32, dims, name="dt_bias")
    expect(weights.o_norm, "V", (dtype, torch.float32), dims, name="o_norm")
    expect(cache.conv, "3 C", dtype, dims, name="conv")
    return dims


def kda_step(
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    *,
    width: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode one token. The module's docstring has the equations.

    Args:
        rows: of the token.
        weights: of the layer.
        cache: of the layer, written in place.
        width: () int32 on the device; at 0, behind the end of an answer, `state` and `conv` stay as they are. None: 1.

    Returns:
        (1, H*V) in qkv's dtype.

    Source: Kimi Linear, arXiv 2510.26692, section 3; the bounded gate: `naive_kda_lowerbound_gate` of fla-core (MIT).
    """
    dims = _expect_layer(rows, weights, cache)
    assert dims["T"] == 1, f"a step is one row, got {dims['T']}"
    if width is not None:
        expect(width, "", torch.int32, dims, name="width")
    if not use_reference(rows.qkv):
        return kda_step_cuda.step(rows, weights, cache, width=width)
    if width is not None and int(width) == 0:
        cache = KdaCache(cache.state.clone(), cache.conv.clone())
    return kda_step_ref(rows, weights, cache)


def kda_chunk(rows: KdaRows, weights: KdaWeights, cache: KdaCache) -> torch.Tensor:
    """Prefill any number of tokens; arguments and equations as in `kda_step`, with T rows.

    Chunked, for i, j in a chunk that starts from state S_0 (K, V), G the cumulated g, D_ij = exp(G_i - G_j):

        L_ij = beta_i sum(k_i D_ij k_j), i > j      M = (I + L)^-1 diag(beta)
        N    = M (V - (exp(G) K) S_0)               row i is u_i of the recurrence
        O    = (exp(G) Q) S_0 + P N                 P_ij = sum(q_i D_ij k_j), i >= j
        S    = diag(exp(G_last)) S_0 + (exp(G_last - G) K)^T N

    Returns:
        (T, H*V) in qkv's dtype; `cache` is written in place.

    Source: Kimi Linear, arXiv 2510.26692, section 3 (the chunkwise form).
    """
    _expect_layer(rows, weights, cache)
    if use_reference(rows.qkv):
        return kda_chunk_ref(rows, weights, cache)
    return kda_prompt_triton.run_prompt(rows, weights, cache)


def kda_verify(rows: KdaRows, weights: KdaWeights, cache: KdaCache, kept: KdaKept) -> torch.Tensor:
    """Run T <= 16 tokens of which some may be rejected: `cache` is read only.

    Equations as in `kda_step` and `kda_chunk`.

    Args:
        rows: of the tokens.
        weights: of the layer.
        cache: of the layer.
        kept: rows 0..T-1 are written in place.

    Returns:
        (T, H*V) in qkv's dtype.

    Source: Kimi Linear, arXiv 2510.26692, section 3 (the chunkwise form with one chunk).
    """
    dims = _expect_layer(rows, weights, cache)
    expect(kept.k, "T_max H K", torch.float32, dims, name="kept k")
    expect(kept.u, "T_max H V", torch.float32, dims, name="kept u")
    expect(kept.g, "T_max H K", torch.float32, dims, name="kept g")
    expect(kept.conv, "T_max C", rows.qkv.dtype, dims, name="kept conv")
    assert dims["T"] <= min(SUB_CHUNK, dims["T_max"]), f"{dims['T']} rows to verify, room for {dims['T_max']}"
    if use_reference(rows.qkv):
        return kda_verify_ref(rows, weights, cache, kept)
    return kda_verify_cuda.verify(rows, weights, cache, kept)


def kda_commit(cache: KdaCache, kept: KdaKept, num_rows: torch.Tensor) -> None:
    """Advance the states of all layers by the first `num_rows` rows that a verify step kept.

        S = S diag(exp(G)) + sum_i u_i (exp(G - G_i) k_i)^T,    G_i = g_1 + ... + g_i,  G = G_{num_rows}

    Args:
        cache: of all layers, written in place.
        kept: of all layers; rows at or past `num_rows` may hold anything.
        num_rows: () int32, 0..T, on the device; never read by the host.

    Source: Kimi Linear, arXiv 2510.26692, section 3 (the state update of the chunkwise form).
    """
    dims: dict[str, int] = {}
    expect(cache.state, "L H V K", torch.float32, dims, name="state")
    expect(cache.conv, "L 3 C", FLOATS, dims, name="conv")
    expect(kept.k, "L T H K", torch.float32, dims, name="kept k")
    expect(kept.u, "L T H V", torch.float32, dims, name="kept u")
    expect(kept.g, "L T H K", torch.float32, dims, name="kept g")
    expect(kept.conv, "L T C", cache.conv.dtype, dims, name="kept conv")
    expect(num_rows, "", torch.int32, dims, name="num_rows")
    commit = kda_commit_ref if use_reference(cache.state) else kda_commit_cuda.commit
    commit(cache, kept, num_rows)
