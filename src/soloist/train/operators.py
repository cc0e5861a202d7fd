"""Differentiable forms of the operators, on packed documents.

Each equals its reference in `kernels` on every document alone; the equations are there. Activations come and go in one
dtype, weights are held in any (fp32 to be trained) and cast where they are used, so that gradients reach them in their
own dtype. Norms, softmax, gates and the recurrence are computed in fp32 (fp64 for fp64).

Owns norms, linear maps, rotary, the two attentions and the experts; the recurrence is in `kda`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from soloist.kernels.moe import RouterSettings, route_ref
from soloist.train.documents import Documents


def widen(x: torch.Tensor) -> torch.Tensor:
    """Give the values in fp32, or in fp64 if they are."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last axis of `x` (.., D) by its root mean square and scale it by `weight` (D)."""
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = widen(x)
    return F.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps).to(x.dtype)


@contextmanager
def changing_shapes() -> Iterator[None]:
    """Keep PyTorch's attention from cuDNN while its shapes are others in every call.

    cuDNN comes first on the newest GPUs, and plans each shape that it has not met, which takes longer than the pass.
    """
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Apply a linear map (O, I) to rows (.., I), in the dtype of `x`."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def swiglu(gate_up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """Give min(silu(gate), limit) * clamp(up, -limit, limit) of rows [gate up] (.., 2F); without a limit, no bounds."""
    gate, up = widen(gate_up).chunk(2, dim=-1)
    gate = F.silu(gate)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * up).to(gate_up.dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate pairs of `x` (T, .., P) by the angles (T, P/2) of its rows; pairs are neighbours, or half a head apart."""
    between = (1,) * (x.dim() - 2)
    cos, sin = (table.view(x.shape[0], *between, -1) for table in (cos, sin))  # (T, 1.., P/2)
    wide = widen(x)
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(x.dtype)
    a, b = wide.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float | None = None
) -> torch.Tensor:
    """Attend causally within each document.

    Args:
        q: (T, H, K) after rotary.
        k: (T, G, K) after rotary, H a multiple of G.
        v: (T, G, V).
        documents: whose rows these are.
        scale: of the scores. None: K^-0.5.

    Returns:
        (T, H, V).
    """
    groups, back = documents.padded()
    V = v.shape[-1]
    # The fast kernels want values as wide as keys.
    v = F.pad(v, (0, q.shape[-1] - V)) if q.shape[-1] > V else v
    outs = []
    for group in groups:
        # Padding stands behind a document's end, where a causal mask hides it.
        q_rows, k_rows, v_rows = (group.gather(x).transpose(1, 2) for x in (q, k, v))  # (n, H or G, S, .)
        out = F.scaled_dot_product_attention(
            q_rows, k_rows, v_rows, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )  # (n, H, S, V)
        outs.append(out.transpose(1, 2).flatten(0, 1))  # (n * S, H, V)
    return torch.cat(outs).index_select(0, back)[..., :V]


def attention(
    qkv: torch.Tensor,
    documents: Documents,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Grouped-query attention; `kernels.attention` for every document.

    Args:
        qkv: (T, (H + 2 G) * K), rows [q k v].
        documents: whose rows these are.
        cos: (S, K/2) table by position, S at least the longest document.
        sin: likewise.
        num_heads: H.
        num_kv_heads: G.
        q_norm: (K) weight of the norm of each query head; None: no norm.
        k_norm: (K), likewise for keys.
        eps: of those norms.

    Returns:
        (T, H * K).
    """
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))  # (T, H+2G, K)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    angles = cos[documents.positions], sin[documents.positions]
    q, k = (apply_rotary(x, *angles, interleaved=False) for x in (q, k))
    return attend(q, k, v, documents).flatten(1)


def mla_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    gate: torch.Tensor | None,
    kv_norm: torch.Tensor,
    eps: float,
    w_kv_b: torch.Tensor,
    documents: Documents,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    num_heads: int,
    v_head_dim: int,
    scale: float,
) -> torch.Tensor:
    """Latent attention in its naive form; `kernels.mla` for every document.

    Args:
        q: (T, H*(Kn+P)).
        kv: (T, R+P) raw latent, then the raw shared key.
        gate: (T, H) before its sigmoid, or None.
        kv_norm: (R) weight of the latent's norm.
        eps: of that norm.
        w_kv_b: (H*(Kn+V), R) per head Kn key rows, then V value rows.
        documents: whose rows these are.
        cos: (S, P/2) table by position; None, as sin: no rotary.
        sin: likewise.
        num_heads: H.
        v_head_dim: V.
        scale: of the scores.

    Returns:
        (T, H*V).
    """
    R = kv_norm.shape[0]
    P = kv.shape[1] - R
    q_n, q_r = q.unflatten(-1, (num_heads, -1)).tensor_split([q.shape[1] // num_heads - P], dim=-1)  # (T, H, Kn), ..
    c, k_r = kv.split([R, P], dim=-1)
    k_r = k_r[:, None]  # (T, 1, P)
    if cos is not None and sin is not None:
        angles = cos[documents.positions], sin[documents.positions]
        q_r, k_r = (apply_rotary(x, *angles, interleaved=True) for x in (q_r, k_r))
    expanded = linear(rms_norm(c, kv_norm, eps), w_kv_b).unflatten(-1, (num_heads, -1))  # (T, H, Kn+V)
    k_n, v = expanded.split([expanded.shape[-1] - v_head_dim, v_head_dim], dim=-1)
    k = torch.cat([k_n, k_r.expand(-1, num_heads, -1)], dim=-1)  # (T, H, Kn+P)
    a = attend(torch.cat([q_n, q_r], dim=-1), k, v, documents, scale)  # (T, H, V)
    if gate is not None:
        a = (a * torch.sigmoid(widen(gate))[..., None]).to(q.dtype)
    return a.flatten(1)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Apply each expert's map to the rows that are its own.

    Args:
        x: (n, I) rows of expert 0, then of expert 1, and so on.
        weight: (E, O, I).
        counts: (E,) int64 rows of each expert; on a GPU they are never read by the host.

    Returns:
        (n, O).
    """
    weight = weight.to(x.dtype)
    if x.is_cuda and x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    parts = x.split(counts.tolist())
    return torch.cat([F.linear(part, own) for part, own in zip(parts, weight, strict=True)])


def moe(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router_weight: torch.Tensor,
    expert_bias: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate_up: torch.Tensor | None,
    shared_down: torch.Tensor | None,
    settings: RouterSettings,
    *,
    limit: float | None = None,
    shared_limit: float | None = None,
    on_route: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Add the routed and the shared experts to the residual stream; `kernels.moe`, whose arguments these are.

    Args:
        x: (T, D) residual stream.
        norm_weight: (D).
        eps: of the norm.
        router_weight: (E, D).
        expert_bias: (E) fp32; it chooses, and gets no gradient.
        gate_up: (E, 2F, D).
        down: (E, D, F).
        shared_gate_up: (2Fs, D), or None without a shared expert.
        shared_down: (D, Fs), or None.
        settings: the router's.
        limit: of the routed experts' SwiGLU; None: no clamp.
        shared_limit: likewise of the shared expert's.
        on_route: called with the router's logits (T, E) fp32, in the graph, and the chosen experts (T, A) int64: for
            balancing.

    Returns:
        (T, D).
    """
    h = rms_norm(x, norm_weight, eps)
    logits = F.linear(widen(h), router_weight.to(widen(h).dtype))  # (T, E)
    experts, weights = route_ref(logits, expert_bias.detach(), settings)  # (T, A) each
    if on_route is not None:
        on_route(logits, experts)
    A = experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # (T * A,)
    counts = experts.flatten().bincount(minlength=router_weight.shape[0])  # (E,)
    rows = order // A
    inside = swiglu(grouped_linear(h.index_select(0, rows), gate_up, counts), limit)  # (T * A, F)
    outside = grouped_linear(inside, down, counts)  # (T * A, D)
    outside = widen(outside) * weights.flatten().index_select(0, order)[:, None]
    y = widen(x).index_add(0, rows, outside)
    if shared_gate_up is not None and shared_down is not None:
        y = y + linear(swiglu(linear(h, shared_gate_up), shared_limit), shared_down)
    return y.to(x.dtype)
