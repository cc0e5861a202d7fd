"""Grouped-query attention over a key/value cache of one sequence. Owns no cache: it writes the rows it is given."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from soloist.errors import UnsupportedError
from soloist.kernels import step_cpu
from soloist.kernels.check import FLOATS, check_head_size, expect, use_reference, use_reference_everywhere
from soloist.kernels.launch import HAS_TRITON
from soloist.kernels.rotary import apply_rotary_ref

if HAS_TRITON:
    from soloist.kernels import attention_triton

# Queries that attend at a time, so that no mask or score grows with the square of a long prompt.
QUERY_BLOCK = 256


def _norm_heads(
    qk: torch.Tensor, num_heads: int, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Normalise each query head and each key head of `qk` (.., H+G, K) fp32, where the model has such norms."""
    if q_norm is None or k_norm is None:
        return qk
    qk = qk * torch.rsqrt(qk.square().mean(dim=-1, keepdim=True).add_(eps))
    q, k = qk.split((num_heads, qk.shape[-2] - num_heads), dim=-2)
    q.mul_(q_norm)
    k.mul_(k_norm)
    return qk


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
    """Compute `attention` in fp32 from the rounded cache, a block of queries at a time."""
    T, H, G, K = qkv.shape[0], num_heads, num_kv_heads, k_cache.shape[2]
    start = int(context_len)
    end = start + T
    heads = qkv.view(T, H + 2 * G, K)  # (T, H+2G, K)
    qk = _norm_heads(heads[:, : H + G].float(), H, q_norm, k_norm, eps)  # (T, H+G, K)
    qk = apply_rotary_ref(qk, cos[start:end], sin[start:end], False)
    k_cache[:, start:end] = qk[:, H:].transpose(0, 1)
    v_cache[:, start:end] = heads[:, H + G :].transpose(0, 1)
    keys, values = k_cache[None, :, :end].float(), v_cache[None, :, :end].float()  # (1, G, S, K) each
    out = torch.empty(T, H, K, device=qkv.device)  # (T, H, K)
    for first in range(0, T, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, T)
        q = qk[first:last, :H].transpose(0, 1)[None]  # (1, H, block, K)
        k, v = keys[:, :, : start + last], values[:, :, : start + last]
        is_seen = torch.ones(last - first, start + last, dtype=torch.bool, device=qkv.device).tril_(start + first)
        block = F.scaled_dot_product_attention(q, k, v, attn_mask=is_seen, enable_gqa=True)  # (1, H, block, K)
        out[first:last] = block[0].transpose(0, 1)
    return out.view(T, H * K).to(qkv.dtype)


def _attention_row_cpu(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Compute `attention` of one token with half the calls, which are what it costs on a CPU."""
    H, G, K = num_heads, num_kv_heads, k_cache.shape[2]
    start = int(context_len)
    heads = qkv.view(H + 2 * G, K)  # (H+2G, K)
    halves = _norm_heads(heads[: H + G].float(), H, q_norm, k_norm, eps).view(H + G, 2, K // 2)
    c, s = cos[start], sin[start]  # (K/2) each
    rotated = halves * c  # (H+G, 2, K/2)
    (a, b), (rotated_a, rotated_b) = halves.unbind(1), rotated.unbind(1)  # (H+G, K/2) each
    rotated_a.addcmul_(b, s, value=-1)
    rotated_b.addcmul_(a, s)
    qk = rotated.view(H + G, K)
    k_cache[:, start] = qk[H:]
    v_cache[:, start] = heads[H + G :]
    keys, values = k_cache[:, : start + 1].float(), v_cache[:, : start + 1].float()  # (G, S, K) each
    # One query sees every key, so the heads of a group are the rows of a plain matrix product.
    scores = torch.bmm(qk[:H].view(G, H // G, K), keys.transpose(1, 2)).mul_(K**-0.5)  # (G, H/G, S)
    return torch.bmm(scores.softmax(dim=-1), values).view(1, H * K).to(qkv.dtype)


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
    upcoming: Sequence[object] = (),
) -> torch.Tensor:
    """Append T tokens to the cache and attend causally to everything before and including each of them.

    q, k = rotary(norm(q)), rotary(norm(k)) at positions context_len + t
    out[t, h] = sum_s softmax_s(q[t, h] . k[s, g] / sqrt(K)) v[s, g], s <= context_len + t, g = h // (H / G)

    Args:
        qkv: (T, (H + 2 G) * K), rows [q k v]. On a GPU bf16 or fp16, and K one of `HEAD_SIZES`.
        k_cache: (G, S, K), keys after rotary. Rows context_len..context_len+T-1 are written in place; later ones never
            read.
        v_cache: (G, S, K), likewise.
        context_len: () int32, tokens in the cache.
        cos: (N, K/2) fp32 rotary table of N >= context_len + T positions.
        sin: (N, K/2) fp32.
        num_heads: H, a multiple of `num_kv_heads`.
        num_kv_heads: G.
        q_norm: (K) weight of the RMS norm of each query head; None: no norm.
        k_norm: (K) weight of the RMS norm of each key head; None: no norm.
        eps: of those norms.
        upcoming: weights that the next launches read, in order; a GPU reads them ahead (`read_ahead.py`).

    Returns:
        (T, H * K), the dtype of `qkv`.

    Raises:
        UnsupportedError: a GPU has no kernel for the dtype, or for the heads.

    Source: Ainslie et al. 2023 (arXiv 2305.13245); query and key norm as in Qwen3.
    """
    if qkv.is_cpu and not use_reference_everywhere() and step_cpu.can_attend(qkv, k_cache):
        # It checks what it reads and writes; the checks below cost as much as a norm.
        return step_cpu.attention(
            qkv, k_cache, v_cache, context_len, cos, sin, num_heads, num_kv_heads, q_norm, k_norm, eps
        )
    if qkv.shape[0] == 1 and qkv.is_cpu and not use_reference_everywhere():
        return _attention_row_cpu(
            qkv, k_cache, v_cache, context_len, cos, sin, num_heads, num_kv_heads, q_norm, k_norm, eps
        )
    dims: dict[str, int] = {}
    expect(k_cache, "G S K", qkv.dtype, dims, name="k_cache")
    expect(v_cache, "G S K", qkv.dtype, dims, name="v_cache")
    assert dims["G"] == num_kv_heads and num_heads % num_kv_heads == 0
    assert (q_norm is None) == (k_norm is None), "queries and keys are normalised both, or neither"
    dims["C"] = (num_heads + 2 * num_kv_heads) * dims["K"]
    expect(qkv, "T C", FLOATS, dims, name="qkv")
    expect(context_len, "", torch.int32, dims, name="context_len")
    dims["P"] = dims["K"] // 2
    expect(cos, "N P", torch.float32, dims, name="cos")
    expect(sin, "N P", torch.float32, dims, name="sin")
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
    if qkv.element_size() != 2:
        raise UnsupportedError(
            f"attention in {qkv.dtype} has no GPU kernel; it takes bfloat16 and float16: run the model in one of them,"
            " or on the CPU"
        )
    check_head_size(dims["K"])
    args = (qkv, k_cache, v_cache, context_len, cos, sin, num_heads, q_norm, k_norm, eps)
    if dims["T"] <= attention_triton.MAX_STEP_TOKENS:
        return attention_triton.attend_step(*args, attention_triton.settings_for(num_kv_heads), upcoming)
    return attention_triton.attend_prompt(*args)
