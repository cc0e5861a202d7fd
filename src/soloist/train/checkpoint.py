"""A trained draft as a checkpoint in DeepSpec's layout, which the engine and others read."""

import json
from pathlib import Path
from typing import Any

import torch

from soloist.spec.dspark_config import DSparkConfig
from soloist.train.network import DraftNetwork
from soloist.train.parameters import save_shards

ARCHITECTURE = "Qwen3DSparkModel"


def config_json(config: DSparkConfig) -> dict[str, Any]:
    """Write a draft's config in DeepSpec's words."""
    t = config.transformer
    temperatures = config.confidence_temperatures
    # What DeepSpec has no words for, if it is asked for.
    own: dict[str, Any] = {} if temperatures is None else {"confidence_temperatures": list(temperatures)}
    own |= {"last_layer_is_raw": True} if config.is_last_layer_raw else {}
    return {
        "architectures": [ARCHITECTURE],
        "attention_bias": False,
        "block_size": config.block_size,
        "confidence_head_with_markov": config.confidence_input == "hidden_and_markov",
        "dtype": "bfloat16",
        "enable_confidence_head": config.confidence_input is not None,
        "head_dim": t.head_dim,
        "hidden_act": "silu",
        "hidden_size": t.hidden_size,
        "intermediate_size": t.intermediate_size,
        "layer_types": ["full_attention"] * t.num_hidden_layers,
        "markov_head_type": config.markov_head_type or "vanilla",
        "markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
        "max_position_embeddings": t.max_position_embeddings,
        "model_type": "qwen3",
        "num_attention_heads": t.num_attention_heads,
        "num_hidden_layers": t.num_hidden_layers,
        "num_key_value_heads": t.num_key_value_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": t.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": t.rope_theta,
        "target_layer_ids": list(config.target_layer_ids),
        "tie_word_embeddings": False,
        "vocab_size": t.vocab_size,
    } | own


def save_draft(
    folder: Path,
    network: DraftNetwork,
    *,
    lm_head: torch.Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = 4 * 2**30,
) -> None:
    """Write config and weights.

    Args:
        folder: made if it is not there.
        network: what was trained.
        lm_head: (N, D) the target's, to be stored with its embedding. None: neither is; the engine takes the target's.
        dtype: of the weights.
        shard_bytes: most bytes of a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(network.state_dict())
    if lm_head is not None:
        tensors |= {"embed_tokens.weight": network.embed_tokens, "lm_head.weight": lm_head}
    # A copy each: a tied head is the embedding, and files hold every tensor once.
    tensors = {name: t.detach().to("cpu", dtype, copy=True).contiguous() for name, t in tensors.items()}
    save_shards(folder, tensors, shard_bytes)
    (folder / "config.json").write_text(json.dumps(config_json(network.config), indent=2) + "\n")
