"""The attention half of a dense layer: norm, projections and grouped-query attention around the residual stream."""

from collections.abc import Sequence

import torch

from soloist.kernels import attention_block_cuda
from soloist.kernels.allreduce import TensorParallel, linear_all_reduce
from soloist.kernels.attention import attention, attention_ref
from soloist.kernels.check import expect, use_reference
from soloist.kernels.linear import linear_ref, norm_linear
from soloist.kernels.norm import rms_norm_ref
from soloist.kernels.packed import Weight


def attention_block_ref(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    qkv_proj: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    o_proj: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `attention_block` of one rank by the references of its parts, each of which sums in fp32."""
    qkv = linear_ref(rms_norm_ref(x, norm, eps), qkv_proj, qkv_bias)  # (T, (H+2G)*K)
    heads = attention_ref(
        qkv, k_cache, v_cache, context_len, cos, sin,
        num_heads=num_heads, num_kv_heads=k_cache.shape[0], q_norm=q_norm, k_norm=k_norm, eps=eps,
    )  # (T, H*K)  # fmt: skip
    return (x.float() + linear_ref(heads, o_proj, out_dtype=torch.float32)).to(x.dtype)


def attention_block(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    qkv_proj: Weight,
    qkv_bias: torch.Tensor | None,
    o_proj: Weight,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    group: TensorParallel,
    upcoming: Sequence[object] = (),
) -> torch.Tensor:
    """Append T tokens to the cache and add what their heads attend to.

    y = x + sum_r W_o attention(W_qkv rms_norm(x) + b)

    Args:
        x: (T, D).
        norm: (D) the dtype of `x`.
        eps: of all norms.
        qkv_proj: ((H + 2 G) * K, D) the dtype of `x`, or packed.
        qkv_bias: ((H + 2 G) * K) the dtype of `x`, or None.
        o_proj: (D, H * K) the dtype of `x`, or packed.
        k_cache: (G, S, K), see `attention`.
        v_cache: (G, S, K), likewise.
        context_len: () int32, tokens in the cache.
        cos: (N, K/2) fp32 rotary table.
        sin: (N, K/2) fp32.
        num_heads: H of this rank.
        q_norm: (K) weight of the norm of each query head, or None.
        k_norm: (K) weight of the norm of each key head, or None.
        group: the ranks, each with its heads.
        upcoming: weights that the next launches read, in order; a GPU reads them ahead (`read_ahead.py`).

    Returns:
        (T, D), the dtype of `x`: on a GPU without other ranks, for few tokens, in one launch, where both projections
        and a run of the cache fit the multiprocessors' shared memory.

    Source: Ainslie et al. 2023 (arXiv 2305.13245); query and key norm as in Qwen3.
    """
    if group.size == 1 and not use_reference(x) and attention_block_cuda.can_run(x, k_cache, num_heads):
        dims = {"T": x.shape[0], "H": num_heads, "G": k_cache.shape[0], "K": k_cache.shape[2]}
        dims |= {"I": dims["H"] * dims["K"], "O": (dims["H"] + 2 * dims["G"]) * dims["K"], "P": dims["K"] // 2}
        expect(norm, "D", x.dtype, dims, name="norm")
        for name, weight, shape in (("qkv_proj", qkv_proj, "O D"), ("o_proj", o_proj, "D I")):
            assert isinstance(weight, torch.Tensor), "packed weights are for the CPU"
            expect(weight, shape, x.dtype, dims, name=name)
        for name, optional, shape in (("qkv_bias", qkv_bias, "O"), ("q_norm", q_norm, "K"), ("k_norm", k_norm, "K")):
            if optional is not None:
                expect(optional, shape, x.dtype, dims, name=name)
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            expect(cache, "G S K", x.dtype, dims, name=name)
        expect(context_len, "", torch.int32, dims, name="context_len")
        for name, table in (("cos", cos), ("sin", sin)):
            expect(table, "N P", torch.float32, dims, name=name)
        assert isinstance(qkv_proj, torch.Tensor) and isinstance(o_proj, torch.Tensor)
        return attention_block_cuda.run(
            x, norm, eps, qkv_proj, qkv_bias, o_proj, k_cache, v_cache, context_len, cos, sin, num_heads,
            q_norm, k_norm, upcoming,
        )  # fmt: skip
    qkv = norm_linear(x, norm, eps, qkv_proj, qkv_bias)  # (T, (H+2G)*K)
    heads = attention(
        qkv, k_cache, v_cache, context_len, cos, sin,
        num_heads=num_heads, num_kv_heads=k_cache.shape[0], q_norm=q_norm, k_norm=k_norm, eps=eps,
        upcoming=(o_proj, *upcoming),
    )  # (T, H*K)  # fmt: skip
    return linear_all_reduce(heads, o_proj, x, group)
