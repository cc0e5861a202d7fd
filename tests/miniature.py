"""Miniature checkpoints of every family: the real tensor names and config keys, every axis of another size, few bytes.

`tensor_shapes` states the names and shapes of a checkpoint from its config alone, independently of the models; it holds
for the real configs as well.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FAMILIES = ("llama", "qwen2", "qwen3", "bailing_moe_v3", "kimi_linear")

Shape = tuple[int, ...]
_DENSE = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
    "use_cache": True,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _DENSE
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": 60,
        "intermediate_size": 84,
        "num_attention_heads": 6,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 257,
    },
    "qwen2": _DENSE
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 211,
    },
    "qwen3": _DENSE
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 14,
        "hidden_size": 44,
        "intermediate_size": 76,
        "num_attention_heads": 6,
        "num_hidden_layers": 3,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 193,
    },
    # 7 layers in groups of 3: KDA 0 1 3 4, MLA 2 5 and the tail 6; layer 0 is dense. Clamps low enough to bind.
    "bailing_moe_v3": {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "eos_token_id": 2,
        "pad_token_id": 3,
        "first_k_dense_replace": 1,
        "gated_attention_proj_granularity_type": "head_wise",
        "head_dim": 12,
        "hidden_act": "silu",
        "hidden_size": 40,
        "intermediate_size": 56,
        "kda_lower_bound": -5.0,
        "kda_safe_gate": True,
        "kv_lora_rank": 28,
        "layer_group_size": 3,
        "max_position_embeddings": 1024,
        "moe_intermediate_size": 18,
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 22,
        "n_group": 4,
        "no_kda_lora": True,
        "norm_topk_prob": True,
        "num_attention_heads": 3,
        "num_experts": 16,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 7,
        "num_key_value_heads": 3,
        "num_nextn_predict_layers": 1,
        "num_shared_experts": 1,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": None,
        "qk_head_dim": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "rope_scaling": None,
        "rope_theta": 10000,
        "rotary_dim": 8,
        "routed_scaling_factor": 2.5,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "short_conv_kernel_size": 4,
        "tie_word_embeddings": False,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "use_bias": False,
        "use_kda_lora": False,
        "use_mla_nope": False,
        "use_qkv_bias": False,
        "v_head_dim": 10,
        "vocab_size": 131,
        "expert_swiglu_limit_list": [0, 0, 0, 0, 0, 0.3, 0.3],
        "share_expert_swiglu_limit_list": [0, 0, 0, 0, 0.2, 0.2, 0.4],
    },
    # 5 layers: KDA 0 1 3, MLA 2 4; layer 0 is dense; the KDA heads are not the MLA heads.
    "kimi_linear": {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "eos_token_id": 2,
        "first_k_dense_replace": 1,
        "head_dim": 9,
        "hidden_act": "silu",
        "hidden_size": 36,
        "intermediate_size": 52,
        "kv_lora_rank": 26,
        "linear_attn_config": {
            "full_attn_layers": [3, 5],
            "head_dim": 12,
            "kda_layers": [1, 2, 4],
            "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 1024,
        "moe_intermediate_size": 20,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 2,
        "num_expert_group": 1,
        "num_experts": 14,
        "num_experts_per_token": 3,
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 6,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": 10,
        "vocab_size": 113,
    },
}


def miniature_config(family: str, **overrides: Any) -> dict[str, Any]:
    """Give the `config.json` of a miniature of one of `FAMILIES`, with some keys set otherwise."""
    return json.loads(json.dumps(_CONFIGS[family] | overrides))


def _dense_layer(config: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    architecture, D = config["architectures"][0], config["hidden_size"]
    H, G = config["num_attention_heads"], config["num_key_value_heads"]
    K = config.get("head_dim", D // H)
    for name, rows in (("q", H * K), ("k", G * K), ("v", G * K)):
        yield f"self_attn.{name}_proj.weight", (rows, D)
        if architecture == "Qwen2ForCausalLM":
            yield f"self_attn.{name}_proj.bias", (rows,)
    if architecture == "Qwen3ForCausalLM":
        yield "self_attn.q_norm.weight", (K,)
        yield "self_attn.k_norm.weight", (K,)
    yield "self_attn.o_proj.weight", (D, H * K)
    yield from _swiglu("mlp", D, config["intermediate_size"])


def _swiglu(
    at: str, hidden: int, size: int, maps: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> Iterator[tuple[str, Shape]]:
    gate, up, down = maps
    yield from ((f"{at}.{gate}.weight", (size, hidden)), (f"{at}.{up}.weight", (size, hidden)))
    yield f"{at}.{down}.weight", (hidden, size)


def _kda(
    at: str, hidden: int, heads: int, head_dim: int, rank: int | None, a_log: Shape
) -> Iterator[tuple[str, Shape]]:
    width = heads * head_dim
    for name in "qkv":
        yield f"{at}.{name}_proj.weight", (width, hidden)
        yield f"{at}.{name}_conv1d.weight", (width, 1, 4)
    for name in "fg":
        if rank is None:
            yield f"{at}.{name}_proj.weight", (width, hidden)
        else:
            yield f"{at}.{name}_a_proj.weight", (rank, hidden)
            yield f"{at}.{name}_b_proj.weight", (width, rank)
    yield f"{at}.b_proj.weight", (heads, hidden)
    yield f"{at}.A_log", a_log
    yield f"{at}.dt_bias", (width,)
    yield f"{at}.o_norm.weight", (head_dim,)
    yield f"{at}.o_proj.weight", (hidden, width)


def _mla(at: str, config: dict[str, Any], output: str) -> Iterator[tuple[str, Shape]]:
    D, H, R = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, V = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    if (rank := config["q_lora_rank"]) is None:
        yield f"{at}.q_proj.weight", (H * (nope + rope), D)
    else:
        yield f"{at}.q_a_proj.weight", (rank, D)
        yield f"{at}.q_a_layernorm.weight", (rank,)
        yield f"{at}.q_b_proj.weight", (H * (nope + rope), rank)
    yield f"{at}.kv_a_proj_with_mqa.weight", (R + rope, D)
    yield f"{at}.kv_a_layernorm.weight", (R,)
    yield f"{at}.kv_b_proj.weight", (H * (nope + V), R)
    if config.get("gated_attention_proj_granularity_type") == "head_wise":
        yield f"{at}.g_proj.weight", (H, D)
    yield f"{at}.{output}.weight", (D, H * V)


def _experts(at: str, config: dict[str, Any], bias: str, maps: tuple[str, ...]) -> Iterator[tuple[str, Shape]]:
    D, E, F = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    yield f"{at}.gate.weight", (E, D)
    yield f"{at}.gate.{bias}", (E,)
    for expert in range(E):
        yield from _swiglu(f"{at}.experts.{expert}", D, F, maps)
    if shared := config["num_shared_experts"]:
        yield from _swiglu(f"{at}.shared_experts", D, shared * config.get("moe_shared_expert_intermediate_size", F))


def _bailing_layer(config: dict[str, Any], i: int) -> Iterator[tuple[str, Shape]]:
    group, L = config["layer_group_size"], config["num_hidden_layers"]
    if (i + 1) % group == 0 or i >= L // group * group:
        yield from _mla("attention", config, "dense")
    else:
        heads, head_dim = config["num_attention_heads"], config["head_dim"]
        rank = None if config["no_kda_lora"] else head_dim
        yield from _kda("attention", config["hidden_size"], heads, head_dim, rank, (heads,))
    if i < config["first_k_dense_replace"]:
        yield from _swiglu("mlp", config["hidden_size"], config["intermediate_size"])
    else:
        yield from _experts("mlp", config, "expert_bias", ("gate_proj", "up_proj", "down_proj"))


def _kimi_layer(config: dict[str, Any], i: int) -> Iterator[tuple[str, Shape]]:
    linear = config["linear_attn_config"]
    if i + 1 in linear["full_attn_layers"]:
        yield from _mla("self_attn", config, "o_proj")
    else:
        heads, head_dim = linear["num_heads"], linear["head_dim"]
        yield from _kda("self_attn", config["hidden_size"], heads, head_dim, head_dim, (1, 1, heads, 1))
    if i < config["first_k_dense_replace"]:
        yield from _swiglu("mlp", config["hidden_size"], config["intermediate_size"])
    else:
        yield from _experts("block_sparse_moe", config, "e_score_correction_bias", ("w1", "w3", "w2"))


def tensor_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """Give every tensor of the checkpoint that a config describes, the MTP layer included, by its real name."""
    architecture = config["architectures"][0]
    N, D, L = config["vocab_size"], config["hidden_size"], config["num_hidden_layers"]
    is_bailing = architecture == "BailingMoeV3ForCausalLM"
    embedding = "model.word_embeddings.weight" if is_bailing else "model.embed_tokens.weight"
    shapes: dict[str, Shape] = {embedding: (N, D), "model.norm.weight": (D,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (N, D)
    num_mtp = config.get("num_nextn_predict_layers", 0)
    for i in range(L + num_mtp):
        if is_bailing:
            tensors = dict(_bailing_layer(config, i))
        elif architecture == "KimiLinearForCausalLM":
            tensors = dict(_kimi_layer(config, i))
        else:
            tensors = dict(_dense_layer(config))
        norms = ["input_layernorm", "post_attention_layernorm"]
        if i >= L:
            norms += ["enorm", "hnorm", "final_layernorm"]
            tensors["eh_proj.weight"] = (D, 2 * D)
        tensors |= {f"{name}.weight": (D,) for name in norms}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in tensors.items()}
    return shapes


# Held in fp32 by the checkpoints whatever their dtype.
FP32_NAMES = ("A_log", "dt_bias", "expert_bias", "e_score_correction_bias")


def _draw(name: str, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Draw values of a size that lets every part of the model move the logits."""
    x = torch.randn(shape, generator=generator)
    if name.endswith(("norm.weight", "o_norm.weight")):
        return 1 + 0.2 * x
    if name.endswith("A_log"):
        # Rates of 0.4 to 3: some channels forget at once, others hardly.
        return 0.5 * x
    if name.endswith(("bias", "conv1d.weight")):
        # Biases large enough to change which expert wins, some of them negative.
        return 0.4 * x
    if "embed" in name:
        return x
    return x * shape[-1] ** -0.5


def draw_tensors(config: dict[str, Any], seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Draw every tensor of a checkpoint, in the dtypes a checkpoint stores."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        stored = torch.float32 if name.endswith(FP32_NAMES) else dtype
        tensors[name] = _draw(name, shape, generator).to(stored)
    return tensors


def write_checkpoint(
    path: Path, family: str, seed: int, *, dtype: torch.dtype = torch.bfloat16, **overrides: Any
) -> Path:
    """Write `config.json` and two shards with their index, as the hub's checkpoints have them.

    Args:
        path: a folder, made if it is not there.
        family: one of `FAMILIES`.
        seed: of the weights.
        dtype: that all but the small fp32 tensors are stored in.
        overrides: config keys set otherwise.

    Returns:
        The folder.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = miniature_config(family, **overrides)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    tensors = draw_tensors(config, seed, dtype)
    names = list(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, path / file, metadata={"format": "pt"})
    total_size = sum(t.numel() * t.element_size() for t in tensors.values())
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path
