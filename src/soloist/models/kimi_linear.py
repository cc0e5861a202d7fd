"""Kimi-Linear (`KimiLinearForCausalLM`): KDA layers with low-rank gates, MLA layers that do not rotate, experts.

Owns the config's words and the checkpoint's names; the layers are in `mixers` and `feed_forward`, the forward pass in
`hybrid`. Where public implementations disagree: an expert's weight comes from its unbiased score (the publisher's own
code adds the bias in place and so uses the biased one), and the latent's norm has the eps of the publisher's code, 1e-6
(others take `rms_norm_eps`).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from soloist.errors import UnsupportedError
from soloist.kernels.moe import RouterSettings
from soloist.models.config_json import ConfigReader
from soloist.models.feed_forward import MoESettings
from soloist.models.hybrid import HybridCausalLM, HybridConfig
from soloist.models.mixers import CONV_SIZE, KDASettings, MLASettings

# Read by nothing: no head has `head_dim`, nothing rotates, training losses.
IGNORED_KEYS = ("head_dim", "output_router_logits", "rope_scaling", "rope_theta", "router_aux_loss_coef")
# Keys that would change the numerics, with the one value that is implemented.
FIXED_VALUES = {
    "hidden_act": "silu",
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "use_grouped_topk": True,
}


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig:
    """`linear_attn_config`: the KDA heads and the schedule."""

    num_heads: int
    # Key and value size of a head.
    head_dim: int
    # 1-based; every layer is in exactly one of the two.
    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]

    @classmethod
    def from_dict(cls, linear_attn_config: dict[str, Any]) -> "LinearAttentionConfig":
        """Read the part of `config.json`.

        Raises:
            UnsupportedError: its keys are not the five that are implemented, or the convolution has another size.
        """
        given = dict(linear_attn_config)
        keys = {"num_heads", "head_dim", "kda_layers", "full_attn_layers", "short_conv_kernel_size"}
        if given.keys() != keys:
            odd = ", ".join(sorted(given.keys() ^ keys))
            raise UnsupportedError(f"config.json: linear_attn_config has missing or unknown keys: {odd}")
        if given["short_conv_kernel_size"] != CONV_SIZE:
            raise UnsupportedError(
                f"config.json: short_conv_kernel_size is {given['short_conv_kernel_size']}; implemented is {CONV_SIZE}"
            )
        return cls(
            num_heads=given["num_heads"],
            head_dim=given["head_dim"],
            kda_layers=tuple(given["kda_layers"]),
            full_attn_layers=tuple(given["full_attn_layers"]),
        )


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(HybridConfig):
    """The keys of `config.json` that shape the model, in its words."""

    # Of the MLA layers.
    num_attention_heads: int
    linear_attn_config: LinearAttentionConfig
    # None: the MLA query is one full matrix.
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    # Shared key dims; they are not rotated here.
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts: int
    num_experts_per_token: int
    num_expert_group: int
    topk_group: int
    # Times num_shared_experts: also F of the shared expert.
    moe_intermediate_size: int
    num_shared_experts: int
    routed_scaling_factor: float

    def __post_init__(self) -> None:
        schedule = self.linear_attn_config
        layers = sorted(schedule.kda_layers + schedule.full_attn_layers)
        if layers != list(range(1, self.num_hidden_layers + 1)):
            raise UnsupportedError(
                f"config.json: kda_layers and full_attn_layers name the layers {layers}, expected each of "
                f"1..{self.num_hidden_layers} once"
            )
        if self.num_experts % self.num_expert_group:
            raise UnsupportedError(
                f"config.json: num_experts is {self.num_experts}, not a multiple of num_expert_group = "
                f"{self.num_expert_group}"
            )

    @classmethod
    def from_dict(cls, config_json: dict[str, Any]) -> "KimiLinearConfig":
        """Read a `config.json`.

        Raises:
            UnsupportedError: a key is missing, unknown, or has a value that is not implemented.
        """
        reader = ConfigReader(config_json, KimiLinearForCausalLM.architecture)
        for key, value in FIXED_VALUES.items():
            reader.require(key, value)
        num_heads = reader.take("num_attention_heads", int)
        reader.require("num_key_value_heads", num_heads)
        reader.ignore(*IGNORED_KEYS)
        config = cls(
            vocab_size=reader.take("vocab_size", int),
            hidden_size=reader.take("hidden_size", int),
            num_hidden_layers=reader.take("num_hidden_layers", int),
            max_position_embeddings=reader.take("model_max_length", int),
            eos_token_ids=reader.take_eos_token_ids(),
            intermediate_size=reader.take("intermediate_size", int),
            first_k_dense_replace=reader.take("first_k_dense_replace", int),
            rms_norm_eps=reader.take("rms_norm_eps", float),
            num_attention_heads=num_heads,
            linear_attn_config=LinearAttentionConfig.from_dict(reader.take("linear_attn_config", dict)),
            q_lora_rank=reader.take_optional("q_lora_rank", int),
            kv_lora_rank=reader.take("kv_lora_rank", int),
            qk_nope_head_dim=reader.take("qk_nope_head_dim", int),
            qk_rope_head_dim=reader.take("qk_rope_head_dim", int),
            v_head_dim=reader.take("v_head_dim", int),
            num_experts=reader.take("num_experts", int),
            num_experts_per_token=reader.take("num_experts_per_token", int),
            num_expert_group=reader.take("num_expert_group", int, 1),
            topk_group=reader.take("topk_group", int, 1),
            moe_intermediate_size=reader.take("moe_intermediate_size", int),
            num_shared_experts=reader.take("num_shared_experts", int, 0),
            routed_scaling_factor=reader.take("routed_scaling_factor", float),
        )
        reader.finish()
        return config

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(layer - 1 for layer in self.linear_attn_config.full_attn_layers)

    @property
    def kda(self) -> KDASettings:
        heads, head_dim = self.linear_attn_config.num_heads, self.linear_attn_config.head_dim
        return KDASettings(
            hidden_size=self.hidden_size,
            num_heads=heads,
            head_dim=head_dim,
            gate_rank=head_dim,
            lower_bound=None,
            a_log_shape=(1, 1, heads, 1),
            eps=self.rms_norm_eps,
        )

    @property
    def mla(self) -> MLASettings:
        return MLASettings(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            kv_lora_rank=self.kv_lora_rank,
            q_lora_rank=self.q_lora_rank,
            scale=(self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5,
            has_head_gate=False,
            o_proj="o_proj",
            eps=self.rms_norm_eps,
        )

    @property
    def moe(self) -> MoESettings:
        return MoESettings(
            hidden_size=self.hidden_size,
            num_experts=self.num_experts,
            intermediate_size=self.moe_intermediate_size,
            shared_intermediate_size=self.moe_intermediate_size * self.num_shared_experts or None,
            router=RouterSettings(
                num_experts_per_tok=self.num_experts_per_token,
                n_group=self.num_expert_group,
                topk_group=self.topk_group,
                routed_scaling_factor=self.routed_scaling_factor,
            ),
            module="block_sparse_moe.",
            expert_bias="e_score_correction_bias",
            expert_maps=("w1", "w3", "w2"),
            eps=self.rms_norm_eps,
        )


class KimiLinearForCausalLM(HybridCausalLM):
    """The decoder of Kimi-Linear."""

    architecture: ClassVar[str] = "KimiLinearForCausalLM"
    config_class = KimiLinearConfig
    embedding_name = "model.embed_tokens.weight"
    mixer_module = "self_attn."
    config: KimiLinearConfig
