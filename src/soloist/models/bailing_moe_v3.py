"""Ling-3.0 (`BailingMoeV3ForCausalLM`): KDA and MLA layers in groups, experts chosen from groups, clamped SwiGLU, MTP.

Owns the config's words and the checkpoint's names; the layers are in `mixers` and `feed_forward`, the forward pass in
`hybrid`. The publisher's configs share `model_type` with an older architecture, so only `architectures` decides.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from soloist.errors import UnsupportedError
from soloist.kernels.allreduce import embed
from soloist.kernels.linear import linear
from soloist.kernels.moe import RouterSettings
from soloist.kernels.norm import rms_norm
from soloist.kernels.rotary import RopeScaling, YarnScaling, make_rotary_table, yarn_mscale
from soloist.models.cache import Cache
from soloist.models.causal_lm import ModelConfig
from soloist.models.config_json import ConfigReader, take_rope
from soloist.models.feed_forward import MixtureOfExperts, MoESettings
from soloist.models.head import pick_likeliest, whole_logits
from soloist.models.hybrid import HybridCausalLM, HybridConfig
from soloist.models.mixers import CONV_SIZE, KDASettings, LatentAttention, MLASettings, make_latent_cache
from soloist.models.weights import Part, WeightSource

# Read by the publisher's training code only, or by nothing.
IGNORED_KEYS = (
    "embedding_dropout",
    "group_norm_size",
    "linear_silu",
    "max_window_layers",
    "mtp_loss_scaling_factor",
    "num_kv_heads_for_linear_attn",
    "output_dropout",
    "output_router_logits",
    # Halves nothing: the rotary part of an MLA head is qk_rope_head_dim, all of it.
    "partial_rotary_factor",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "seq_aux",
    "use_qk_norm",
)
# Keys that would change the numerics, with the one value that is implemented.
FIXED_VALUES = {
    "hidden_act": "silu",
    "kda_safe_gate": True,
    "moe_router_enable_expert_bias": True,
    "mtp_use_kda": False,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "router_dtype": "fp32",
    "scale_router_input": False,
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "short_conv_kernel_size": CONV_SIZE,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "up_proj_norm": False,
    "use_bias": False,
    "use_nGPT": False,
    "use_qkv_bias": False,
    "value_norm": False,
}


@dataclass(frozen=True, kw_only=True)
class BailingMoeV3Config(HybridConfig):
    """The keys of `config.json` that shape the model, in its words."""

    # KDA and MLA alike.
    num_attention_heads: int
    # Key and value size of a KDA head.
    head_dim: int
    # Layers per MLA layer.
    layer_group_size: int
    # Whether the f and g projections of the KDA layers are full matrices; otherwise their rank is head_dim.
    no_kda_lora: bool
    # Lower end of the KDA log decay, in [-5, 0).
    kda_lower_bound: float
    # None: the MLA query is one full matrix.
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    # "head_wise": one sigmoid gate per MLA head. None: no gate.
    gated_attention_proj_granularity_type: str | None
    # True: the MLA layers do not rotate.
    use_mla_nope: bool
    rope_theta: float
    rope_scaling: RopeScaling | None
    num_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    moe_intermediate_size: int
    num_shared_experts: int
    # Times num_shared_experts: F of the shared expert.
    moe_shared_expert_intermediate_size: int
    routed_scaling_factor: float
    # One clamp per layer, 0 for none; layers behind the list's end have none.
    expert_swiglu_limit_list: tuple[float, ...]
    share_expert_swiglu_limit_list: tuple[float, ...]
    # Next-token prediction layers behind the last decoder layer.
    num_nextn_predict_layers: int

    def __post_init__(self) -> None:
        if not -5.0 <= self.kda_lower_bound < 0.0:
            raise UnsupportedError(f"config.json: kda_lower_bound is {self.kda_lower_bound}; allowed are [-5, 0)")
        if self.gated_attention_proj_granularity_type not in (None, "head_wise"):
            raise UnsupportedError(
                "config.json: gated_attention_proj_granularity_type is "
                f"{self.gated_attention_proj_granularity_type!r}; implemented are 'head_wise' and null"
            )
        if self.num_experts % self.n_group:
            raise UnsupportedError(
                f"config.json: num_experts is {self.num_experts}, not a multiple of n_group = {self.n_group}"
            )
        if self.num_nextn_predict_layers not in (0, 1):
            raise UnsupportedError(
                f"config.json: num_nextn_predict_layers is {self.num_nextn_predict_layers}; implemented are 0 and 1"
            )

    @classmethod
    def from_dict(cls, config_json: dict[str, Any]) -> "BailingMoeV3Config":
        """Read a `config.json`.

        Raises:
            UnsupportedError: a key is missing, unknown, or has a value that is not implemented.
        """
        reader = ConfigReader(config_json, BailingMoeV3ForCausalLM.architecture)
        for key, value in FIXED_VALUES.items():
            reader.require(key, value)
        max_position_embeddings = reader.take("max_position_embeddings", int)
        theta, scaling = take_rope(
            reader, max_position_embeddings=max_position_embeddings, ignored=("partial_rotary_factor",)
        )
        if isinstance(scaling, YarnScaling):
            extended = int(scaling.factor * scaling.original_max_position_embeddings)
            max_position_embeddings = max(max_position_embeddings, extended)
        num_heads = reader.take("num_attention_heads", int)
        nope, rope = reader.take("qk_nope_head_dim", int), reader.take("qk_rope_head_dim", int)
        moe_size = reader.take("moe_intermediate_size", int)
        no_kda_lora = reader.take("no_kda_lora", bool)
        reader.require("num_key_value_heads", num_heads)
        reader.require("qk_head_dim", nope + rope)
        reader.require("rotary_dim", rope)
        reader.require("use_kda_lora", not no_kda_lora)
        reader.ignore(*IGNORED_KEYS)
        # The chat template ends a turn with the one, the text of a document with the other.
        ends = (*reader.take_eos_token_ids(), config_json.get("pad_token_id"))
        config = cls(
            vocab_size=reader.take("vocab_size", int),
            hidden_size=reader.take("hidden_size", int),
            num_hidden_layers=reader.take("num_hidden_layers", int),
            max_position_embeddings=max_position_embeddings,
            eos_token_ids=tuple(i for i in ends if i is not None),
            intermediate_size=reader.take("intermediate_size", int),
            first_k_dense_replace=reader.take("first_k_dense_replace", int),
            rms_norm_eps=reader.take("rms_norm_eps", float),
            num_attention_heads=num_heads,
            head_dim=reader.take("head_dim", int),
            layer_group_size=reader.take("layer_group_size", int),
            no_kda_lora=no_kda_lora,
            kda_lower_bound=reader.take("kda_lower_bound", float),
            q_lora_rank=reader.take_optional("q_lora_rank", int),
            kv_lora_rank=reader.take("kv_lora_rank", int),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            v_head_dim=reader.take("v_head_dim", int),
            gated_attention_proj_granularity_type=reader.take_optional("gated_attention_proj_granularity_type", str),
            use_mla_nope=reader.take("use_mla_nope", bool, False),
            rope_theta=theta,
            rope_scaling=scaling,
            num_experts=reader.take("num_experts", int),
            num_experts_per_tok=reader.take("num_experts_per_tok", int),
            n_group=reader.take("n_group", int),
            topk_group=reader.take("topk_group", int),
            moe_intermediate_size=moe_size,
            num_shared_experts=reader.take("num_shared_experts", int, 0),
            moe_shared_expert_intermediate_size=reader.take("moe_shared_expert_intermediate_size", int, moe_size),
            routed_scaling_factor=reader.take("routed_scaling_factor", float),
            expert_swiglu_limit_list=_take_limits(reader, "expert_swiglu_limit_list"),
            share_expert_swiglu_limit_list=_take_limits(reader, "share_expert_swiglu_limit_list"),
            num_nextn_predict_layers=reader.take("num_nextn_predict_layers", int, 0),
        )
        reader.finish()
        return config

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """The last layer of each group, and a tail that fills no group."""
        group = self.layer_group_size
        tail = self.num_hidden_layers // group * group
        return tuple(i for i in range(self.num_hidden_layers) if (i + 1) % group == 0 or i >= tail)

    @property
    def kda(self) -> KDASettings:
        return KDASettings(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            gate_rank=None if self.no_kda_lora else self.head_dim,
            lower_bound=self.kda_lower_bound,
            a_log_shape=(self.num_attention_heads,),
            eps=self.rms_norm_eps,
        )

    @property
    def mla(self) -> MLASettings:
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_scaling.mscale_all_dim:
            scale *= yarn_mscale(self.rope_scaling.factor, self.rope_scaling.mscale_all_dim) ** 2
        return MLASettings(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            kv_lora_rank=self.kv_lora_rank,
            q_lora_rank=self.q_lora_rank,
            scale=scale,
            has_head_gate=self.gated_attention_proj_granularity_type is not None,
            o_proj="dense",
            eps=self.rms_norm_eps,
        )

    @property
    def moe(self) -> MoESettings:
        return MoESettings(
            hidden_size=self.hidden_size,
            num_experts=self.num_experts,
            intermediate_size=self.moe_intermediate_size,
            shared_intermediate_size=self.moe_shared_expert_intermediate_size * self.num_shared_experts or None,
            router=RouterSettings(
                num_experts_per_tok=self.num_experts_per_tok,
                n_group=self.n_group,
                topk_group=self.topk_group,
                routed_scaling_factor=self.routed_scaling_factor,
            ),
            module="mlp.",
            expert_bias="expert_bias",
            expert_maps=("gate_proj", "up_proj", "down_proj"),
            eps=self.rms_norm_eps,
        )

    def swiglu_limits(self, layer: int) -> tuple[float | None, float | None]:
        lists = self.expert_swiglu_limit_list, self.share_expert_swiglu_limit_list
        routed, shared = (limits[layer] if layer < len(limits) else 0.0 for limits in lists)
        return routed or None, shared or None


def _take_limits(reader: ConfigReader, key: str) -> tuple[float, ...]:
    """Take a list of clamps by layer; null means no clamps."""
    limits = reader.take_optional(key, list) or []
    if not all(type(limit) in (int, float) and limit >= 0 for limit in limits):
        raise UnsupportedError(f"config.json: {key} is {limits!r}, expected numbers that are not negative")
    return tuple(float(limit) for limit in limits)


class BailingMoeV3ForCausalLM(HybridCausalLM):
    """The decoder of Ling-3.0, without its MTP layer."""

    architecture: ClassVar[str] = "BailingMoeV3ForCausalLM"
    config_class = BailingMoeV3Config
    embedding_name = "model.word_embeddings.weight"
    mixer_module = "attention."
    config: BailingMoeV3Config

    def __init__(self, config: BailingMoeV3Config, weights: WeightSource) -> None:
        rotary = None
        if not config.use_mla_nope:
            dim, theta, max_len = config.qk_rope_head_dim, config.rope_theta, config.max_position_embeddings
            rotary = make_rotary_table(dim, theta, max_len, config.rope_scaling, device=weights.device)
        super().__init__(config, weights, rotary)

    @classmethod
    def ignores_tensor(cls, config: ModelConfig, name: str) -> bool:
        """Besides the usual: the MTP layer, which `BailingMoeV3MTP` reads, and any layer behind it."""
        if super().ignores_tensor(config, name):
            return True
        prefix, _, rest = name.partition("model.layers.")
        layer = rest.partition(".")[0]
        return not prefix and layer.isdecimal() and int(layer) >= config.num_hidden_layers


class BailingMoeV3MTP:
    """The next-token-prediction layer: drafts token i+2 from the target's hidden state i and token i+1.

        p, e = rms_norm(h_i, hnorm), rms_norm(embedding[token_{i+1}], enorm)
        x    = eh_proj [e p]
        x    = MLA layer, then experts (never clamped)
        h'   = rms_norm(x, final_layernorm)        logits = lm_head h'

    Embedding, output head and angles are the target's. Row t of a pass holds h of position `context_len + t`, so the
    layer's own cache has the target's positions.

    Args:
        target: the model it drafts for.
        weights: the source that holds layer `num_hidden_layers`; ranks may share the layer otherwise than the target.

    Raises:
        UnsupportedError: the target's checkpoint has no such layer.
    """

    def __init__(self, target: BailingMoeV3ForCausalLM, weights: WeightSource) -> None:
        config = target.config
        if not config.num_nextn_predict_layers:
            raise UnsupportedError("MTP was asked for; this model has none (num_nextn_predict_layers is 0)")
        self.target, self.config = target, config
        self.dtype, self.device = weights.dtype, weights.device
        # Of embedding and head; the ranks that share the layer are the source's.
        self.group = target.group
        D, index = config.hidden_size, config.num_hidden_layers
        layer = f"model.layers.{index}."
        self.enorm = weights.tensor(Part(name=f"{layer}enorm.weight", shape=(D,)))
        self.hnorm = weights.tensor(Part(name=f"{layer}hnorm.weight", shape=(D,)))
        self.eh_proj = weights.linear(Part(name=f"{layer}eh_proj.weight", shape=(D, 2 * D)))
        self.mixer = LatentAttention(weights, layer, target.mixer_module, config.mla)
        limit, shared_limit = config.swiglu_limits(index)
        self.feed_forward = MixtureOfExperts(weights, layer, config.moe, limit=limit, shared_limit=shared_limit)
        self.final_layernorm = weights.tensor(Part(name=f"{layer}final_layernorm.weight", shape=(D,)))

    def make_cache(self, max_context_len: int, max_width: int = 16) -> Cache:
        """Allocate the layer's own latents; as the target's, but it can roll back."""
        latent = make_latent_cache(1, self.config.mla, max_context_len, dtype=self.dtype, device=self.device)
        return Cache(max_context_len=max_context_len, max_width=max_width, device=self.device, latent=latent)

    def forward(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, cache: Cache, *, width: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the layer on T positions that follow its cache's `context_len`.

        Args:
            hidden: (T, D) the target's hidden states of these positions behind its final norm, or the h' of the
                position before, to draft on in a chain.
            token_ids: (T,) int64, each the token one position to the right.
            cache: from `make_cache`; its rows are written in place, `commit` is the caller's.
            width: () int32 on the device; rows at or past it are padding. None: all rows count.

        Returns:
            (T, D) h', for `compute_logits` and as `hidden` of the next position.
        """
        assert cache.latent is not None
        eps = self.config.rms_norm_eps
        e = rms_norm(embed(token_ids, self.target.embed_tokens, self.group), self.enorm, eps)  # (T, D)
        p = rms_norm(hidden, self.hnorm, eps)  # (T, D)
        x = linear(torch.cat([e, p], dim=-1), self.eh_proj)  # (T, D)
        x = self.mixer(x, cache.latent, 0, cache.context_len, self.target.rotary, host_len=cache.host_len)
        x = self.feed_forward(x, width)
        return rms_norm(x, self.final_layernorm, eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the target's output head to h' (T, D): logits (T, N) fp32 of the token two positions to the right."""
        logits = linear(hidden, self.target.lm_head, out_dtype=torch.float32)
        return whole_logits(logits, self.config.vocab_size, self.group)

    def pick_likeliest(self, hidden: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the likeliest of the first `num_tokens` tokens behind each h' (T, D), as the target does."""
        return pick_likeliest(hidden, None, 0.0, self.target.lm_head, num_tokens, self.group)
