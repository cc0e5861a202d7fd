"""Qwen2 (`Qwen2ForCausalLM`): Qwen2, Qwen2.5 and Qwen2.5-Coder, whose query, key and value projections have a bias."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from soloist.models.config_json import ConfigReader
from soloist.models.layers import DenseCausalLM, DenseConfig, refuse_sliding_window


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(DenseConfig):
    """The keys of `config.json` that shape the model, in its words."""

    @classmethod
    def from_dict(cls, config_json: dict[str, Any]) -> Self:
        reader = ConfigReader(config_json, Qwen2ForCausalLM.architecture)
        refuse_sliding_window(reader)
        reader.require("use_mrope", False)
        return cls.read(reader)


class Qwen2ForCausalLM(DenseCausalLM):
    """The decoder with biases on q, k and v.

    Source: Yang et al. 2024 (arXiv 2407.10671), section 2.2.
    """

    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    config_class = Qwen2Config
    has_qkv_bias = True
    config: Qwen2Config
