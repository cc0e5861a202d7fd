"""Writing GGUF files of the miniatures, as llama.cpp's exporters do, with the `gguf` package."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch

from tests.miniature import draw_tensors, miniature_config

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Sizes whose rows hold whole blocks of 32 values, and that the int4 kernel takes.
BLOCKED = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 176,
}


def gguf_name(name: str) -> str:
    """Translate a checkpoint name."""
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def interleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder rows from half-split to interleaved rotary pairs, as convert_hf_to_gguf.py does for llama."""
    rows, inputs = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, inputs).transpose(1, 2).reshape(rows, inputs)


def draw(family: str, **overrides: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Give a miniature's config and its tensors, in fp32."""
    config = miniature_config(family, **BLOCKED | overrides)
    return config, draw_tensors(config, seed=11, dtype=torch.float32)


def write_gguf(
    path: Path,
    family: str,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    type_of: Callable[[str], str] = lambda name: "F32",
    *,
    keys: dict[str, Any] | None = None,
    extra: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write a file.

    Args:
        path: where.
        family: `general.architecture`.
        config: in the words of config.json.
        tensors: by checkpoint name; matrices get the type that `type_of` their GGUF name says, vectors are F32.
        type_of: GGUF name to type name.
        keys: metadata added, or put in the place of what is written otherwise; None leaves a key out.
        extra: tensors by GGUF name, written as F32.
    """
    metadata: dict[str, Any] = {
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.embedding_length": config["hidden_size"],
        f"{family}.feed_forward_length": config["intermediate_size"],
        f"{family}.attention.head_count": config["num_attention_heads"],
        f"{family}.attention.head_count_kv": config["num_key_value_heads"],
        f"{family}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{family}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.tokens": [f"token {i}" for i in range(config["vocab_size"])],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    if "head_dim" in config:
        metadata[f"{family}.attention.key_length"] = config["head_dim"]
        metadata[f"{family}.attention.value_length"] = config["head_dim"]
    writer = gguf.GGUFWriter(path, (keys or {}).pop("general.architecture", family))
    for key, value in (metadata | (keys or {})).items():
        if value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    heads = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        for suffix, num_heads in heads.items():
            if family == "llama" and name.endswith(suffix):
                tensor = interleave(tensor, num_heads)
        kind = gguf.GGMLQuantizationType[type_of(gguf_name(name)) if tensor.dim() == 2 else "F32"]
        data = gguf.quantize(tensor.contiguous().numpy(), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_stored(tensor: torch.Tensor, type_name: str) -> torch.Tensor:
    """Give the values that a tensor has when it is stored in a type."""
    kind = gguf.GGMLQuantizationType[type_name]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.contiguous().numpy(), kind), kind).copy())
