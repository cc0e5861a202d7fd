"""Token mixers of the hybrid models: Kimi Delta Attention (KDA) and multi-head latent attention (MLA).

Owns the weights of one mixer with the norm before it and the residual around it: the packed projection, what lies
between, the output projection. The recurrence and the attention are in `kernels`; which layer mixes how, and what the
layers are called, is the architecture's.
"""

from dataclasses import dataclass

import torch

from soloist.kernels.allreduce import TensorParallel, linear_all_reduce
from soloist.kernels.kda import kda_chunk, kda_step, kda_verify
from soloist.kernels.kda_inputs import KdaCache, KdaKept, KdaRows, KdaWeights
from soloist.kernels.linear import linear, norm_linear
from soloist.kernels.mla import mla_attention
from soloist.kernels.mla_inputs import MlaRows, MlaWeights
from soloist.kernels.rotary import RotaryTable
from soloist.models.cache import LatentCache, RecurrentState, StepKind
from soloist.models.memory import check_fits
from soloist.models.weights import Part, WeightSource, columns, rows

# Inputs a short convolution sees: its own and the three before.
CONV_SIZE = 4
# The norms of the compressed query and of the latent. The publishers' code of Ling-3.0 and of Kimi-Linear passes no eps
# to them, so both use that class's default, whatever `rms_norm_eps` says.
LATENT_NORM_EPS = 1e-6
# Names of the f and g projections of KDA: full matrices, and the first halves of low-rank ones.
_GATES = {False: ("f_proj", "g_proj"), True: ("f_a_proj", "g_a_proj")}


@dataclass(frozen=True, kw_only=True)
class KDASettings:
    """What the KDA layers of one model have in common."""

    hidden_size: int
    num_heads: int
    # Both K and V.
    head_dim: int
    # Rank of the f and g projections; None: they are full matrices.
    gate_rank: int | None
    # Lower end of the log decay; None: the unbounded softplus law.
    lower_bound: float | None
    # Shape of the checkpoint's A_log, which holds one number a head.
    a_log_shape: tuple[int, ...]
    # Of the norm before the layer and of the norm behind the recurrence.
    eps: float


class KimiDeltaAttention:
    """One KDA layer: `x + o_proj(KDA(rms_norm(x)))`.

    Args:
        weights: the source.
        layer: prefix of the decoder layer's tensors, with its dot.
        module: prefix of the mixer's tensors within the layer, with its dot.
        settings: sizes and laws.
    """

    def __init__(self, weights: WeightSource, layer: str, module: str, settings: KDASettings) -> None:
        at = layer + module
        D, H, K = settings.hidden_size, settings.num_heads, settings.head_dim
        self.settings, self.group = settings, weights.group
        # Heads of this rank.
        self.num_heads = h = weights.group.share(H)
        self.norm = weights.tensor(Part(name=f"{layer}input_layernorm.weight", shape=(D,)))

        heads = rows(H)
        low_rank = settings.gate_rank is not None
        gate_rows, gate_split = settings.gate_rank or H * K, None if low_rank else heads
        f, g = (Part(name=f"{at}{n}.weight", shape=(gate_rows, D), split=gate_split) for n in _GATES[low_rank])
        q, k, v = (Part(name=f"{at}{n}_proj.weight", shape=(H * K, D), split=heads) for n in "qkv")
        b = Part(name=f"{at}b_proj.weight", shape=(H, D), split=heads)
        # One read of x for everything: rows [q k v f g b].
        self.in_proj = weights.linear(q, k, v, f, g, b)
        gate_size = f.held_shape(weights.group)[0]
        self.in_sizes = [3 * h * K, gate_size, gate_size, h]
        self.f_b_proj, self.g_b_proj = None, None
        if low_rank:
            f_b, g_b = (Part(name=f"{at}{n}_b_proj.weight", shape=(H * K, gate_rows), split=heads) for n in "fg")
            self.f_b_proj, self.g_b_proj = weights.linear(f_b), weights.linear(g_b)

        self.conv = torch.empty(3 * h * K, CONV_SIZE, dtype=weights.dtype, device=weights.device)  # (C, 4)
        for name, channels in zip("qkv", self.conv.chunk(3), strict=True):
            conv = Part(name=f"{at}{name}_conv1d.weight", shape=(H * K, 1, CONV_SIZE), split=heads)
            channels.copy_(weights.tensor(conv, init="normal").view(h * K, CONV_SIZE))
        a_log = Part(name=f"{at}A_log", shape=settings.a_log_shape)
        # Read whole, because its heads are on another axis in every architecture.
        all_a_log = weights.tensor(a_log, dtype=torch.float32, init="decay").view(H)
        self.A_log = all_a_log[weights.group.rank * h :][:h]
        dt_bias = Part(name=f"{at}dt_bias", shape=(H * K,), split=heads)
        self.dt_bias = weights.tensor(dt_bias, dtype=torch.float32, init="bias")
        self.o_norm = weights.tensor(Part(name=f"{at}o_norm.weight", shape=(K,)))
        self.o_proj = weights.linear(Part(name=f"{at}o_proj.weight", shape=(D, H * K), split=columns(H)))

    def __call__(
        self, x: torch.Tensor, recurrent: RecurrentState, index: int, kind: StepKind, width: torch.Tensor | None
    ) -> torch.Tensor:
        """Mix tokens and add the result.

        Args:
            x: (T, D) residual stream.
            recurrent: written in place at `index`: state and conv, or for VERIFY the rows its commit needs.
            index: this layer among the KDA layers.
            kind: VERIFY leaves the state as it is.
            width: () int32 rows that count, or None; a DECODE of 0 leaves the state as it is.

        Returns:
            (T, D) residual stream.
        """
        s = self.settings
        projected = norm_linear(x, self.norm, s.eps, self.in_proj)  # (T, C + f + g + H)
        qkv, f, gate, b = projected.split(self.in_sizes, dim=-1)
        if self.f_b_proj is not None and self.g_b_proj is not None:
            f, gate = linear(f, self.f_b_proj), linear(gate, self.g_b_proj)  # (T, H*K), (T, H*V)
        rows = KdaRows(qkv, f, gate, b)
        weights = KdaWeights(self.conv, self.A_log, self.dt_bias, self.o_norm, s.eps, s.lower_bound)
        cache = KdaCache(recurrent.state[index], recurrent.conv[index])
        if kind is StepKind.VERIFY:
            out = kda_verify(rows, weights, cache, KdaKept(*(x[index] for x in recurrent.kept)))
        elif kind is StepKind.DECODE:
            out = kda_step(rows, weights, cache, width=width)
        else:
            out = kda_chunk(rows, weights, cache)
        return linear_all_reduce(out, self.o_proj, x, self.group)


def make_recurrent_state(
    num_layers: int,
    settings: KDASettings,
    max_width: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: TensorParallel,
) -> RecurrentState:
    """Allocate the empty state of `num_layers` KDA layers, of the heads of one rank.

    Args:
        num_layers: KDA layers of the model.
        settings: their sizes.
        max_width: most rows of one verify step.
        dtype: of the convolutions' inputs, the model's; everything else is fp32.
        device: where.
        group: the rank.
    """
    L, H, K = num_layers, group.share(settings.num_heads), settings.head_dim
    V, C = K, 3 * H * K
    return RecurrentState(
        state=torch.zeros(L, H, V, K, dtype=torch.float32, device=device),
        conv=torch.zeros(L, CONV_SIZE - 1, C, dtype=dtype, device=device),
        verify_k=torch.zeros(L, max_width, H, K, dtype=torch.float32, device=device),
        verify_u=torch.zeros(L, max_width, H, V, dtype=torch.float32, device=device),
        verify_g=torch.zeros(L, max_width, H, K, dtype=torch.float32, device=device),
        verify_conv=torch.zeros(L, max_width, C, dtype=dtype, device=device),
    )


@dataclass(frozen=True, kw_only=True)
class MLASettings:
    """What the MLA layers of one model have in common."""

    hidden_size: int
    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    # None: the query projection is one full matrix.
    q_lora_rank: int | None
    # Of the scores, before the softmax.
    scale: float
    # Whether each head's output is multiplied by a sigmoid of its own.
    has_head_gate: bool
    # Name of the output projection.
    o_proj: str
    # Of the norm before the layer.
    eps: float


class LatentAttention:
    """One MLA layer: `x + o_proj(MLA(rms_norm(x)))`.

    Args:
        weights: the source.
        layer: prefix of the decoder layer's tensors, with its dot.
        module: prefix of the mixer's tensors within the layer, with its dot.
        settings: sizes and names.
    """

    def __init__(self, weights: WeightSource, layer: str, module: str, settings: MLASettings) -> None:
        s, at = settings, layer + module
        D, H, R = s.hidden_size, s.num_heads, s.kv_lora_rank
        q_rows = H * (s.qk_nope_head_dim + s.qk_rope_head_dim)
        kv_rows = R + s.qk_rope_head_dim
        self.settings, self.group = s, weights.group
        # Heads of this rank; the latent, which all heads share, is whole on every rank.
        self.num_heads, heads = weights.group.share(H), rows(H)
        self.norm = weights.tensor(Part(name=f"{layer}input_layernorm.weight", shape=(D,)))

        parts = [Part(name=f"{at}q_proj.weight", shape=(q_rows, D), split=heads)]
        if s.q_lora_rank is not None:
            parts = [Part(name=f"{at}q_a_proj.weight", shape=(s.q_lora_rank, D))]
        parts.append(Part(name=f"{at}kv_a_proj_with_mqa.weight", shape=(kv_rows, D)))
        if s.has_head_gate:
            parts.append(Part(name=f"{at}g_proj.weight", shape=(H, D), split=heads))
        # One read of x for everything: rows [q kv_a gate], or [q_a kv_a gate].
        self.in_proj = weights.linear(*parts)
        self.in_sizes = [part.held_shape(weights.group)[0] for part in parts]
        self.q_a_norm, self.q_b_proj = None, None
        if s.q_lora_rank is not None:
            self.q_a_norm = weights.tensor(Part(name=f"{at}q_a_layernorm.weight", shape=(s.q_lora_rank,)))
            q_b = Part(name=f"{at}q_b_proj.weight", shape=(q_rows, s.q_lora_rank), split=heads)
            self.q_b_proj = weights.linear(q_b)
        self.kv_a_norm = weights.tensor(Part(name=f"{at}kv_a_layernorm.weight", shape=(R,)))
        # Never packed: the absorbed form reads its key rows and its value rows apart, per head.
        kv_b = Part(name=f"{at}kv_b_proj.weight", shape=(H * (s.qk_nope_head_dim + s.v_head_dim), R), split=heads)
        self.kv_b_proj = weights.tensor(kv_b, init="normal")
        out = Part(name=f"{at}{s.o_proj}.weight", shape=(D, H * s.v_head_dim), split=columns(H))
        self.o_proj = weights.linear(out)

    def __call__(
        self,
        x: torch.Tensor,
        latent: LatentCache,
        index: int,
        context_len: torch.Tensor,
        rotary: RotaryTable | None,
        *,
        host_len: int | None = None,
    ) -> torch.Tensor:
        """Attend to the cached latents and to the rows of this step, and add the result.

        Args:
            x: (T, D) residual stream.
            latent: rows `context_len` .. `context_len + T - 1` of layer `index` are written in place.
            index: this layer among the MLA layers.
            context_len: () int32, tokens in the cache.
            rotary: angles by position; None: the model does not rotate.
            host_len: `context_len` on the host, if it is known there.

        Returns:
            (T, D) residual stream.
        """
        s = self.settings
        projected = norm_linear(x, self.norm, s.eps, self.in_proj)  # (T, q + (R+P) + H)
        q, kv, *gate = projected.split(self.in_sizes, dim=-1)
        if self.q_a_norm is not None and self.q_b_proj is not None:
            q = norm_linear(q, self.q_a_norm, LATENT_NORM_EPS, self.q_b_proj)  # (T, H*(Kn+P))
        weights = MlaWeights(self.kv_a_norm, LATENT_NORM_EPS, self.kv_b_proj, self.num_heads, s.v_head_dim, s.scale)
        rows = MlaRows(q, kv, gate[0] if gate else None)
        out = mla_attention(rows, weights, latent.latent[index], context_len, rotary, host_len=host_len)  # (T, H*V)
        return linear_all_reduce(out, self.o_proj, x, self.group)


def make_latent_cache(
    num_layers: int, settings: MLASettings, max_context_len: int, *, dtype: torch.dtype, device: torch.device
) -> LatentCache:
    """Allocate the rows of `num_layers` MLA layers, in the model's dtype.

    Raises:
        DoesNotFitError: less memory is free.
    """
    shape = (num_layers, max_context_len, settings.kv_lora_rank + settings.qk_rope_head_dim)
    check_fits(torch.Size(shape).numel() * dtype.itemsize, device, f"a context of {max_context_len} tokens")
    return LatentCache(latent=torch.zeros(shape, dtype=dtype, device=device))  # (L, S, R+P)
