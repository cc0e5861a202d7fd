"""A model's forward pass over packed documents, differentiable in its weights: what training and capturing run.

Owns the order of the operators for the models of `soloist.models`, whose own tensors are read. A pass over one document
equals a prefill of it.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from soloist.errors import UnsupportedError
from soloist.kernels.rotary import RotaryTable
from soloist.models.bailing_moe_v3 import BailingMoeV3MTP
from soloist.models.causal_lm import CausalLM
from soloist.models.feed_forward import DenseFeedForward, FeedForward, MixtureOfExperts
from soloist.models.hybrid import HybridCausalLM
from soloist.models.layers import DenseCausalLM, GroupedQueryAttention
from soloist.models.mixers import LATENT_NORM_EPS, KimiDeltaAttention, LatentAttention
from soloist.train import operators as op
from soloist.train.documents import Documents
from soloist.train.kda import kda

# Called with the layer, the router's logits (T, E) in the graph, and the chosen experts (T, A).
OnRoute = Callable[[int, torch.Tensor, torch.Tensor], None]


def dense(weight: object) -> torch.Tensor:
    """Give a weight that is held as a tensor.

    Raises:
        UnsupportedError: it is packed.
    """
    if not isinstance(weight, torch.Tensor):
        raise UnsupportedError("packed weights cannot be trained on: load the model with weights_dtype bf16 or fp32")
    return weight


def _mix_by_kda(layer: KimiDeltaAttention, x: torch.Tensor, documents: Documents) -> torch.Tensor:
    s = layer.settings
    projected = op.linear(op.rms_norm(x, layer.norm, s.eps), dense(layer.in_proj))
    qkv, f, gate, b = projected.split(layer.in_sizes, dim=-1)
    if layer.f_b_proj is not None and layer.g_b_proj is not None:
        f, gate = op.linear(f, dense(layer.f_b_proj)), op.linear(gate, dense(layer.g_b_proj))
    inputs = (qkv, f, gate, b, layer.conv, layer.A_log, layer.dt_bias, layer.o_norm, s.eps)
    out = kda(*inputs, documents, num_heads=s.num_heads, lower_bound=s.lower_bound)
    return x + op.linear(out, dense(layer.o_proj))


def _mix_by_mla(
    layer: LatentAttention, x: torch.Tensor, documents: Documents, rotary: RotaryTable | None
) -> torch.Tensor:
    s = layer.settings
    projected = op.linear(op.rms_norm(x, layer.norm, s.eps), dense(layer.in_proj))
    q, kv, *gate = projected.split(layer.in_sizes, dim=-1)
    if layer.q_a_norm is not None and layer.q_b_proj is not None:
        q = op.linear(op.rms_norm(q, layer.q_a_norm, LATENT_NORM_EPS), dense(layer.q_b_proj))
    out = op.mla_attention(
        q,
        kv,
        gate[0] if gate else None,
        layer.kv_a_norm,
        LATENT_NORM_EPS,
        layer.kv_b_proj,
        documents,
        None if rotary is None else rotary.cos,
        None if rotary is None else rotary.sin,
        num_heads=s.num_heads,
        v_head_dim=s.v_head_dim,
        scale=s.scale,
    )
    return x + op.linear(out, dense(layer.o_proj))


def _mix_by_attention(
    layer: GroupedQueryAttention, x: torch.Tensor, documents: Documents, rotary: RotaryTable
) -> torch.Tensor:
    qkv = op.linear(op.rms_norm(x, layer.norm, layer.eps), dense(layer.qkv_proj), layer.qkv_bias)
    out = op.attention(
        qkv,
        documents,
        rotary.cos,
        rotary.sin,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        eps=layer.eps,
    )
    return x + op.linear(out, dense(layer.o_proj))


def feed_forward_packed(block: FeedForward, x: torch.Tensor, index: int, on_route: OnRoute | None) -> torch.Tensor:
    """Run the feed-forward block of layer `index` on rows (T, D), which do not see each other, and add the result."""
    if isinstance(block, DenseFeedForward):
        inside = op.swiglu(op.linear(op.rms_norm(x, block.norm, block.eps), dense(block.gate_up)))
        return x + op.linear(inside, dense(block.down))
    assert isinstance(block, MixtureOfExperts)
    return op.moe(
        x,
        block.norm,
        block.settings.eps,
        block.router,
        block.expert_bias,
        block.gate_up,
        block.down,
        block.shared_gate_up,
        block.shared_down,
        block.settings.router,
        limit=block.limit,
        shared_limit=block.shared_limit,
        on_route=None if on_route is None else lambda logits, experts: on_route(index, logits, experts),
    )


def forward_packed(
    model: CausalLM,
    input_ids: torch.Tensor,
    documents: Documents,
    *,
    capture_layers: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    on_route: OnRoute | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the decoder over packed documents.

    Args:
        model: dense or hybrid; its weights may require gradients and are then best held in fp32.
        input_ids: (T,) int64.
        documents: of these T rows.
        capture_layers: as in `HiddenCapture`.
        dtype: of activations. None: the model's.
        on_route: hears what every router decides.

    Returns:
        (T, D) residual stream before the final norm, and for each capture layer (T, D) the residual stream behind it.

    Raises:
        UnsupportedError: an architecture without a training form, or packed weights.
    """
    assert model.group.size == 1, "a rank of several holds a part of the weights"
    x = F.embedding(input_ids, model.embed_tokens).to(dtype or model.dtype)  # (T, D)
    kept = {-1: x}
    if isinstance(model, HybridCausalLM):
        for index, (mixer, feed_forward) in enumerate(zip(model.mixers, model.feed_forwards, strict=True)):
            if isinstance(mixer, KimiDeltaAttention):
                x = _mix_by_kda(mixer, x, documents)
            else:
                x = _mix_by_mla(mixer, x, documents, model.rotary)
            x = kept[index] = feed_forward_packed(feed_forward, x, index, on_route)
    elif isinstance(model, DenseCausalLM):
        for index, (attention, mlp) in enumerate(model.layers):
            x = _mix_by_attention(attention, x, documents, model.rotary)
            x = kept[index] = feed_forward_packed(mlp, x, index, on_route)
    else:
        raise UnsupportedError(f"{model.architecture} has no training form")
    return x, [kept[layer] for layer in capture_layers]


def forward_packed_mtp(
    mtp: BailingMoeV3MTP,
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    documents: Documents,
    *,
    on_route: OnRoute | None = None,
) -> torch.Tensor:
    """Run the next-token-prediction layer over packed documents.

    Args:
        mtp: the layer.
        hidden: (T, D) the target's hidden states behind its final norm.
        token_ids: (T,) int64, each the token one position to the right.
        documents: of these T rows.
        on_route: hears what its router decides, as layer `num_hidden_layers`.

    Returns:
        (T, D) behind the layer's own final norm: for the output head as it is.
    """
    eps = mtp.config.rms_norm_eps
    e = op.rms_norm(F.embedding(token_ids, mtp.target.embed_tokens).to(hidden.dtype), mtp.enorm, eps)
    x = op.linear(torch.cat([e, op.rms_norm(hidden, mtp.hnorm, eps)], dim=-1), dense(mtp.eh_proj))
    x = _mix_by_mla(mtp.mixer, x, documents, mtp.target.rotary)
    x = feed_forward_packed(mtp.feed_forward, x, mtp.config.num_hidden_layers, on_route)
    return op.rms_norm(x, mtp.final_layernorm, eps)


def final_norm_packed(model: CausalLM, hidden: torch.Tensor) -> torch.Tensor:
    """Apply a model's final norm to a residual stream (T, D), differentiably: rows for the output head."""
    assert isinstance(model, HybridCausalLM | DenseCausalLM)
    return op.rms_norm(hidden, final_norm_weight(model), model.config.rms_norm_eps)


def final_norm_weight(model: CausalLM) -> torch.Tensor:
    """Give the weight (D) of a model's final norm."""
    assert isinstance(model, HybridCausalLM | DenseCausalLM)
    return model.norm
