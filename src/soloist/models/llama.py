"""Llama (`LlamaForCausalLM`): Llama 2 and 3, SmolLM2 and other decoders of that form."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from soloist.models.config_json import ConfigReader
from soloist.models.layers import DenseCausalLM, DenseConfig

# Keys that would change the numerics, with the one value that is implemented.
FIXED_VALUES = {
    "attention_bias": False,
    "is_llama_config": True,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_interleaved": False,
}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DenseConfig):
    """The keys of `config.json` that shape the model, in its words."""

    @classmethod
    def from_dict(cls, config_json: dict[str, Any]) -> Self:
        if "rope_parameters" not in config_json:
            # Configs of Llama 2 do not name it.
            config_json = {"rope_theta": 10000.0} | config_json
        reader = ConfigReader(config_json, LlamaForCausalLM.architecture)
        for key, value in FIXED_VALUES.items():
            reader.require(key, value)
        # How a JavaScript library should load the checkpoint.
        reader.ignore("transformers.js_config")
        return cls.read(reader)


class LlamaForCausalLM(DenseCausalLM):
    """The decoder with neither biases nor head norms.

    Source: Touvron et al. 2023 (arXiv 2302.13971), section 2.2.
    """

    architecture: ClassVar[str] = "LlamaForCausalLM"
    config_class = LlamaConfig
    config: LlamaConfig
