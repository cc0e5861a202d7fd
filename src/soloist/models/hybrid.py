"""A decoder whose layers mix tokens by Kimi Delta Attention or by multi-head latent attention.

Owns the forward pass that Ling-3.0 and Kimi-Linear share and the construction of its layers. Their configs say what the
layers are, their files what the checkpoints call them.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from soloist.errors import ContextLengthError
from soloist.kernels.allreduce import embed
from soloist.kernels.linear import norm_linear
from soloist.kernels.mla_prompt import expanded_values
from soloist.kernels.norm import rms_norm
from soloist.kernels.rotary import RotaryTable
from soloist.models.cache import Cache, StepKind
from soloist.models.causal_lm import CausalLM, HiddenCapture, ModelConfig
from soloist.models.feed_forward import DenseFeedForward, MixtureOfExperts, MoESettings
from soloist.models.head import pick_likeliest, whole_logits
from soloist.models.mixers import (
    KDASettings,
    KimiDeltaAttention,
    LatentAttention,
    MLASettings,
    make_latent_cache,
    make_recurrent_state,
)
from soloist.models.weights import Part, WeightSource, token_rows


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ModelConfig):
    """What the configs of both architectures say, each in its own words."""

    # F of a dense block.
    intermediate_size: int
    # Layers below this one have a dense block, the others experts.
    first_k_dense_replace: int
    rms_norm_eps: float

    @property
    @abstractmethod
    def mla_layers(self) -> tuple[int, ...]:
        """Layers, 0-based, that mix by latent attention; the others mix by KDA."""

    @property
    @abstractmethod
    def kda(self) -> KDASettings:
        """The KDA layers."""

    @property
    @abstractmethod
    def mla(self) -> MLASettings:
        """The MLA layers."""

    @property
    @abstractmethod
    def moe(self) -> MoESettings:
        """The blocks of experts."""

    def swiglu_limits(self, layer: int) -> tuple[float | None, float | None]:
        """Give the clamps of a layer's routed experts and of its shared expert; None: not clamped."""
        return None, None


class HybridCausalLM(CausalLM):
    """The decoder; a subclass names its tensors and makes its rotary table.

    Args:
        config: sizes, schedule and laws.
        weights: the source.
        rotary: angles of the MLA layers; None: they do not rotate.
    """

    # Names in the checkpoint: the token embedding, and the mixer within a layer (with its dot).
    embedding_name: ClassVar[str]
    mixer_module: ClassVar[str]
    config: HybridConfig

    def __init__(self, config: HybridConfig, weights: WeightSource, rotary: RotaryTable | None = None) -> None:
        self.config, self.rotary = config, rotary
        self.dtype, self.device, self.group = weights.dtype, weights.device, weights.group
        N, D = config.vocab_size, config.hidden_size
        self.embed_tokens = weights.embedding(Part(name=self.embedding_name, shape=(N, D), split=token_rows(N)))
        self.mixers = [self._make_mixer(weights, layer) for layer in range(config.num_hidden_layers)]
        self.feed_forwards = [self._make_feed_forward(weights, layer) for layer in range(config.num_hidden_layers)]
        self.norm = weights.tensor(Part(name="model.norm.weight", shape=(D,)))
        self.lm_head = weights.linear(Part(name="lm_head.weight", shape=(N, D), split=token_rows(N)))
        behind = [mixer.in_proj for mixer in self.mixers[1:]] + [self.lm_head]
        for feed_forward, weight in zip(self.feed_forwards, behind, strict=True):
            if isinstance(feed_forward, MixtureOfExperts):
                feed_forward.next_weight = weight

    def _make_mixer(self, weights: WeightSource, layer: int) -> KimiDeltaAttention | LatentAttention:
        prefix = f"model.layers.{layer}."
        if layer in self.config.mla_layers:
            return LatentAttention(weights, prefix, self.mixer_module, self.config.mla)
        return KimiDeltaAttention(weights, prefix, self.mixer_module, self.config.kda)

    def _make_feed_forward(self, weights: WeightSource, layer: int) -> DenseFeedForward | MixtureOfExperts:
        config, prefix = self.config, f"model.layers.{layer}."
        if layer < config.first_k_dense_replace:
            D, F = config.hidden_size, config.intermediate_size
            return DenseFeedForward(weights, prefix, hidden_size=D, intermediate_size=F, eps=config.rms_norm_eps)
        limit, shared_limit = config.swiglu_limits(layer)
        return MixtureOfExperts(weights, prefix, config.moe, limit=limit, shared_limit=shared_limit)

    @property
    def prompt_bytes_per_position(self) -> int:
        mla = self.config.mla
        num_heads = self.group.share(mla.num_heads)
        values = expanded_values(num_heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim)
        return values * self.dtype.itemsize

    def make_cache(self, max_context_len: int, max_width: int = 16) -> Cache:
        config = self.config
        if max_context_len > config.max_position_embeddings:
            raise ContextLengthError(
                f"a context of {max_context_len} tokens was asked for; the model has {config.max_position_embeddings}"
            )
        num_mla = len(config.mla_layers)
        num_kda = config.num_hidden_layers - num_mla
        dtype, device = self.dtype, self.device
        return Cache(
            max_context_len=max_context_len,
            max_width=max_width,
            device=device,
            latent=make_latent_cache(num_mla, config.mla, max_context_len, dtype=dtype, device=device),
            recurrent=make_recurrent_state(
                num_kda, config.kda, max_width, dtype=dtype, device=device, group=self.group
            ),
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        cache: Cache,
        kind: StepKind,
        *,
        width: torch.Tensor | None = None,
        capture: HiddenCapture | None = None,
    ) -> torch.Tensor:
        assert cache.latent is not None and cache.recurrent is not None
        x = embed(input_ids, self.embed_tokens, self.group)  # (T, D)
        if capture is not None:
            capture.keep(-1, x)
        num_kda = num_mla = 0
        for layer, (mixer, feed_forward) in enumerate(zip(self.mixers, self.feed_forwards, strict=True)):
            if isinstance(mixer, KimiDeltaAttention):
                x = mixer(x, cache.recurrent, num_kda, kind, width)
                num_kda += 1
            else:
                x = mixer(x, cache.latent, num_mla, cache.context_len, self.rotary, host_len=cache.host_len)
                num_mla += 1
            x = feed_forward(x, width)
            if capture is not None:
                capture.keep(layer, x)
        return x

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = norm_linear(hidden, self.norm, self.config.rms_norm_eps, self.lm_head, out_dtype=torch.float32)
        return whole_logits(logits, self.config.vocab_size, self.group)

    def pick_likeliest(self, hidden: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return pick_likeliest(hidden, self.norm, self.config.rms_norm_eps, self.lm_head, num_tokens, self.group)
