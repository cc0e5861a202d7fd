"""The dense decoder that Llama, Qwen2 and Qwen3 share: grouped-query attention, SwiGLU, rotary positions.

Owns the layers and the forward pass; the architectures' own files read their configs and say what differs.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from soloist.errors import ContextLengthError, UnsupportedError
from soloist.kernels.allreduce import embed, linear_all_reduce
from soloist.kernels.attention import attention
from soloist.kernels.linear import norm_linear
from soloist.kernels.norm import rms_norm
from soloist.kernels.rotary import RopeScaling, RotaryTable, YarnScaling, make_rotary_table
from soloist.models.cache import Cache, KVCache, StepKind
from soloist.models.causal_lm import CausalLM, HiddenCapture, ModelConfig
from soloist.models.config_json import ConfigReader, take_rope
from soloist.models.feed_forward import DenseFeedForward
from soloist.models.head import pick_likeliest, whole_logits
from soloist.models.memory import check_fits
from soloist.models.weights import Part, Weight, WeightSource, columns, kv_rows, rows, token_rows


@dataclass(frozen=True, kw_only=True)
class DenseConfig(ModelConfig):
    """Sizes and laws of a dense decoder."""

    # F.
    intermediate_size: int
    # H.
    num_attention_heads: int
    # G.
    num_key_value_heads: int
    # K and V.
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    # How a longer context was reached; None: plain angles.
    rope_scaling: RopeScaling | None
    # Whether the output head is the token embedding.
    tie_word_embeddings: bool

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise UnsupportedError(
                f"config.json: num_attention_heads is {self.num_attention_heads}, not a multiple of"
                f" num_key_value_heads = {self.num_key_value_heads}"
            )

    @classmethod
    def read(cls, reader: ConfigReader, *, default_head_dim: int | None = None) -> Self:
        """Take the keys that all dense decoders have, and refuse what is left.

        Args:
            reader: where from.
            default_head_dim: K of a config that does not name it; None: D / H.

        Raises:
            UnsupportedError: a key is missing, unknown, or has a value that is not implemented.
        """
        reader.require("hidden_act", "silu")
        hidden_size = reader.take("hidden_size", int)
        num_attention_heads = reader.take("num_attention_heads", int)
        max_position_embeddings = reader.take("max_position_embeddings", int)
        rope_theta, rope_scaling = take_rope(reader, max_position_embeddings=max_position_embeddings)
        if isinstance(rope_scaling, YarnScaling):
            # Qwen's configs keep the length before the extension.
            extended = int(rope_scaling.factor * rope_scaling.original_max_position_embeddings)
            max_position_embeddings = max(max_position_embeddings, extended)
        config = cls(
            vocab_size=reader.take("vocab_size", int),
            hidden_size=hidden_size,
            num_hidden_layers=reader.take("num_hidden_layers", int),
            max_position_embeddings=max_position_embeddings,
            eos_token_ids=reader.take_eos_token_ids(),
            intermediate_size=reader.take("intermediate_size", int),
            num_attention_heads=num_attention_heads,
            num_key_value_heads=reader.take("num_key_value_heads", int, num_attention_heads),
            head_dim=reader.take("head_dim", int, default_head_dim or hidden_size // num_attention_heads),
            rms_norm_eps=reader.take("rms_norm_eps", float),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=reader.take("tie_word_embeddings", bool, False),
        )
        reader.finish()
        return config


def refuse_sliding_window(reader: ConfigReader) -> None:
    """Take Qwen's keys about sliding windows, which are inert while `use_sliding_window` is false.

    Raises:
        UnsupportedError: some layer attends through a window.
    """
    reader.require("use_sliding_window", False)
    reader.ignore("sliding_window", "max_window_layers")
    kinds = set(reader.take("layer_types", list, []))
    if not kinds <= {"full_attention"}:
        raise UnsupportedError(f"config.json: layer_types names {', '.join(sorted(kinds))}; only full_attention works")


class GroupedQueryAttention:
    """One attention layer: `x + o_proj(attention(qkv_proj(rms_norm(x))))`.

    Args:
        weights: the source.
        layer: prefix of the decoder layer's tensors, with its dot.
        config: sizes.
        has_qkv_bias: whether the query, key and value projections have a bias.
        has_qk_norm: whether each query and key head is normalised before the rotation.
    """

    def __init__(
        self, weights: WeightSource, layer: str, config: DenseConfig, *, has_qkv_bias: bool, has_qk_norm: bool
    ) -> None:
        D, K = config.hidden_size, config.head_dim
        H, G = config.num_attention_heads, config.num_key_value_heads
        at = f"{layer}self_attn."
        # Heads of this rank.
        self.num_heads, self.num_kv_heads = weights.group.share(H), weights.group.share(G)
        self.eps, self.group = config.rms_norm_eps, weights.group
        self.norm = weights.tensor(Part(name=f"{layer}input_layernorm.weight", shape=(D,)))
        splits = {"q_proj": (H * K, rows(H)), "k_proj": (G * K, kv_rows(G)), "v_proj": (G * K, kv_rows(G))}
        self.qkv_proj = weights.linear(
            *(Part(name=f"{at}{name}.weight", shape=(n, D), split=split) for name, (n, split) in splits.items())
        )
        self.qkv_bias = None
        if has_qkv_bias:
            # Not `cat`: on the meta device it would import PyTorch's compiler, which takes seconds.
            sizes = [self.num_heads * K, self.num_kv_heads * K, self.num_kv_heads * K]
            self.qkv_bias = torch.empty(sum(sizes), dtype=weights.dtype, device=weights.device)  # ((H+2G)*K)
            for (name, (n, split)), bias in zip(splits.items(), self.qkv_bias.split(sizes), strict=True):
                bias.copy_(weights.tensor(Part(name=f"{at}{name}.bias", shape=(n,), split=split), init="bias"))
        self.q_norm = weights.tensor(Part(name=f"{at}q_norm.weight", shape=(K,))) if has_qk_norm else None
        self.k_norm = weights.tensor(Part(name=f"{at}k_norm.weight", shape=(K,))) if has_qk_norm else None
        self.o_proj = weights.linear(Part(name=f"{at}o_proj.weight", shape=(D, H * K), split=columns(H)))
        # What is read behind the attention, in order; the model adds the block behind this one.
        self.upcoming: tuple[Weight, ...] = (self.o_proj,)

    def __call__(
        self,
        x: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context_len: torch.Tensor,
        rotary: RotaryTable,
    ) -> torch.Tensor:
        """Mix the rows of the residual stream (T, D) with the cache (G, S, K) of this layer and add the result."""
        qkv = norm_linear(x, self.norm, self.eps, self.qkv_proj, self.qkv_bias)  # (T, (H+2G)*K)
        heads = attention(
            qkv,
            k_cache,
            v_cache,
            context_len,
            rotary.cos,
            rotary.sin,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.eps,
            upcoming=self.upcoming,
        )  # (T, H*K)
        return linear_all_reduce(heads, self.o_proj, x, self.group)


class DenseCausalLM(CausalLM):
    """The decoder; a subclass says which variant of the attention layer it has."""

    has_qkv_bias: ClassVar[bool] = False
    has_qk_norm: ClassVar[bool] = False
    config: DenseConfig

    def __init__(self, config: DenseConfig, weights: WeightSource) -> None:
        self.config = config
        self.dtype, self.device, self.group = weights.dtype, weights.device, weights.group
        N, D = config.vocab_size, config.hidden_size
        table = Part(name="model.embed_tokens.weight", shape=(N, D), split=token_rows(N))
        self.embed_tokens = weights.embedding(table)
        self.layers = [self._make_layer(weights, layer) for layer in range(config.num_hidden_layers)]
        self.norm = weights.tensor(Part(name="model.norm.weight", shape=(D,)))
        if config.tie_word_embeddings:
            self.lm_head = weights.tied_head(table, self.embed_tokens)
        else:
            self.lm_head = weights.linear(Part(name="lm_head.weight", shape=(N, D), split=token_rows(N)))
        self.rotary = make_rotary_table(
            config.head_dim,
            config.rope_theta,
            config.max_position_embeddings,
            config.rope_scaling,
            device=self.device,
        )

    def _make_layer(self, weights: WeightSource, layer: int) -> tuple[GroupedQueryAttention, DenseFeedForward]:
        config, prefix = self.config, f"model.layers.{layer}."
        mixer = GroupedQueryAttention(
            weights, prefix, config, has_qkv_bias=self.has_qkv_bias, has_qk_norm=self.has_qk_norm
        )
        D, F = config.hidden_size, config.intermediate_size
        feed_forward = DenseFeedForward(weights, prefix, hidden_size=D, intermediate_size=F, eps=config.rms_norm_eps)
        mixer.upcoming = (mixer.o_proj, feed_forward.gate_up)
        return mixer, feed_forward

    @classmethod
    def ignores_tensor(cls, config: ModelConfig, name: str) -> bool:
        assert isinstance(config, DenseConfig)
        is_second_head = config.tie_word_embeddings and name == "lm_head.weight"
        return is_second_head or super().ignores_tensor(config, name)

    def make_cache(self, max_context_len: int, max_width: int = 16) -> Cache:
        config = self.config
        if max_context_len > config.max_position_embeddings:
            raise ContextLengthError(
                f"a context of {max_context_len} tokens is asked for; the model has {config.max_position_embeddings}"
            )
        num_kv_heads = self.group.share(config.num_key_value_heads)
        shape = (config.num_hidden_layers, num_kv_heads, max_context_len, config.head_dim)
        num_bytes = 2 * torch.Size(shape).numel() * self.dtype.itemsize
        check_fits(num_bytes, self.device, f"a context of {max_context_len} tokens")
        k, v = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))  # (L, G, S, K) each
        return Cache(max_context_len=max_context_len, max_width=max_width, device=self.device, kv=KVCache(k=k, v=v))

    def forward(
        self,
        input_ids: torch.Tensor,
        cache: Cache,
        kind: StepKind,
        *,
        width: torch.Tensor | None = None,
        capture: HiddenCapture | None = None,
    ) -> torch.Tensor:
        assert cache.kv is not None
        x = embed(input_ids, self.embed_tokens, self.group)  # (T, D)
        if capture is not None:
            capture.keep(-1, x)
        layers = zip(self.layers, cache.kv.k.unbind(), cache.kv.v.unbind(), strict=True)
        for layer, ((mixer, feed_forward), k_cache, v_cache) in enumerate(layers):
            x = mixer(x, k_cache, v_cache, cache.context_len, self.rotary)
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
