"""Qwen3 (`Qwen3ForCausalLM`): dense Qwen3, which normalises each query and key head before the rotation."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from soloist.models.config_json import ConfigReader
from soloist.models.layers import DenseCausalLM, DenseConfig, refuse_sliding_window


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DenseConfig):
    """The keys of `config.json` that shape the model, in its words."""

    @classmethod
    def from_dict(cls, config_json: dict[str, Any]) -> Self:
        reader = ConfigReader(config_json, Qwen3ForCausalLM.architecture)
        refuse_sliding_window(reader)
        reader.require("attention_bias", False)
        return cls.read(reader, default_head_dim=128)


class Qwen3ForCausalLM(DenseCausalLM):
    """The decoder with head norms.

    Source: Yang et al. 2025 (arXiv 2505.09388), section 2.
    """

    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    config_class = Qwen3Config
    has_qk_norm = True
    config: Qwen3Config
