"""Miniature DSpark and DFlash drafts for miniature targets, and their checkpoints in every public layout."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from soloist.models.causal_lm import CausalLM
from tests.spec.dspark_reference import Reference, Shape


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A draft as DeepSpec would save it: no axis has the size of another."""

    hidden_size: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    markov: str | None = "vanilla"
    rank: int = 7
    confidence: str | None = "hidden_and_markov"
    block_size: int = 5
    num_layers: int = 2
    num_heads: int = 6
    num_kv_heads: int = 3
    head_dim: int = 14
    intermediate_size: int = 34
    eps: float = 1e-5
    theta: float = 500.0
    windows: tuple[int | None, ...] = ()
    causal: tuple[bool, ...] = ()
    # Rows of head and Markov bias; None: all.
    draft_vocab_size: int | None = None

    @property
    def mask_token_id(self) -> int:
        return self.vocab_size - 2

    @property
    def num_rows(self) -> int:
        return self.draft_vocab_size or self.vocab_size

    @property
    def shape(self) -> Shape:
        return Shape(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            eps=self.eps,
            theta=self.theta,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            markov=self.markov,
            windows=self.windows,
            causal=self.causal,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors by DeepSpec's names; embedding and head are the target's."""
        D, V, M, F = self.hidden_size, self.vocab_size, self.rank, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (D, len(self.target_layer_ids) * D),
            "hidden_norm.weight": (D,),
            "norm.weight": (D,),
        }
        for i in range(self.num_layers):
            at = f"layers.{i}."
            shapes |= {
                f"{at}input_layernorm.weight": (D,),
                f"{at}post_attention_layernorm.weight": (D,),
                f"{at}self_attn.q_proj.weight": (q, D),
                f"{at}self_attn.k_proj.weight": (kv, D),
                f"{at}self_attn.v_proj.weight": (kv, D),
                f"{at}self_attn.o_proj.weight": (D, q),
                f"{at}self_attn.q_norm.weight": (self.head_dim,),
                f"{at}self_attn.k_norm.weight": (self.head_dim,),
                f"{at}mlp.gate_proj.weight": (F, D),
                f"{at}mlp.up_proj.weight": (F, D),
                f"{at}mlp.down_proj.weight": (D, F),
            }
        if self.markov:
            shapes |= {"markov_head.markov_w1.weight": (V, M), "markov_head.markov_w2.weight": (self.num_rows, M)}
        if self.markov == "gated":
            shapes |= {"markov_head.gate_proj.weight": (M, D + M), "markov_head.gate_proj.bias": (M,)}
        if self.markov == "rnn":
            shapes |= {"markov_head.joint_proj.weight": (3 * M, 2 * M + D), "markov_head.joint_proj.bias": (3 * M,)}
        if self.confidence:
            size = D + (M if self.confidence == "hidden_and_markov" else 0)
            shapes |= {"confidence_head.proj.weight": (1, size), "confidence_head.proj.bias": (1,)}
        return shapes

    def draw(self, seed: int) -> dict[str, torch.Tensor]:
        """Draw weights under which every part moves the logits; fp32."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in self.shapes().items():
            x = torch.randn(shape, generator=generator)
            if name.endswith("norm.weight"):
                x = 1 + 0.2 * x
            elif "markov_w1" not in name and len(shape) == 2:
                x = x * shape[-1] ** -0.5
            tensors[name] = x
        return tensors


def draft_for(target: CausalLM, **overrides: Any) -> Draft:
    """Describe a draft that fits a miniature target; it reads all layers but the last, and the embedding."""
    depth = target.config.num_hidden_layers
    fields = {
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
        "target_layer_ids": tuple(range(-1, depth - 1)),
        "num_target_layers": depth,
    }
    return Draft(**(fields | overrides))


def heads_of(target: CausalLM) -> dict[str, torch.Tensor]:
    """Copies of the target's embedding and head, which are dense."""
    assert isinstance(target.lm_head, torch.Tensor)
    return {"embed_tokens.weight": target.embed_tokens.clone(), "lm_head.weight": target.lm_head.clone()}


def reference_of(draft: Draft, tensors: dict[str, torch.Tensor], target: CausalLM) -> Reference:
    return Reference(draft.shape, heads_of(target) | tensors)


# --- checkpoints ---


def _layers_json(draft: Draft) -> dict[str, Any]:
    layer_types = ["sliding_attention" if window else "full_attention" for window in draft.windows]
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": draft.head_dim,
        "hidden_act": "silu",
        "hidden_size": draft.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": draft.intermediate_size,
        "layer_types": layer_types or ["full_attention"] * draft.num_layers,
        "max_position_embeddings": 4096,
        "max_window_layers": draft.num_layers,
        "model_type": "qwen3",
        "num_attention_heads": draft.num_heads,
        "num_hidden_layers": draft.num_layers,
        "num_key_value_heads": draft.num_kv_heads,
        "rms_norm_eps": draft.eps,
        "sliding_window": next((window for window in draft.windows if window), None),
        "use_cache": True,
        "use_sliding_window": any(draft.windows),
        "vocab_size": draft.vocab_size,
    }


def _heads_json(draft: Draft) -> dict[str, Any]:
    return {
        "markov_rank": draft.rank if draft.markov else 0,
        **({"markov_head_type": draft.markov} if draft.markov else {}),
        "enable_confidence_head": draft.confidence is not None,
        **({"confidence_head_with_markov": draft.confidence == "hidden_and_markov"} if draft.confidence else {}),
    }


def deepspec_json(draft: Draft, architecture: str = "Qwen3DSparkModel") -> dict[str, Any]:
    return {
        **_layers_json(draft),
        **_heads_json(draft),
        "architectures": [architecture],
        "block_size": draft.block_size,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "mask_token_id": draft.mask_token_id,
        "num_anchors": 512,
        "num_target_layers": draft.num_target_layers,
        "rope_scaling": None,
        "rope_theta": draft.theta,
        "target_layer_ids": list(draft.target_layer_ids),
        "tie_word_embeddings": False,
        "transformers_version": "5.10.2",
    }


def specforge_json(draft: Draft, architecture: str = "DSparkDraftModel") -> dict[str, Any]:
    return {
        **_layers_json(draft),
        "architectures": [architecture],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "block_size": draft.block_size,
        "dflash_config": {
            **_heads_json(draft),
            "attention_mode": "gqa",
            "confidence_head_alpha": 1.0,
            "mask_token_id": draft.mask_token_id,
            "projector_type": "dspark",
            "target_layer_ids": list(draft.target_layer_ids),
        },
        "eos_token_id": 2,
        "num_target_layers": draft.num_target_layers,
        "pad_token_id": 3,
        "rope_parameters": {"rope_theta": draft.theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        **({"draft_vocab_size": draft.draft_vocab_size} if draft.draft_vocab_size else {}),
    }


def ling_json(draft: Draft) -> dict[str, Any]:
    """DeepSpec's, with keys of the Ling target's own config left in it."""
    left = {
        "first_k_dense_replace": 1,
        "kda_lower_bound": -5.0,
        "kda_safe_gate": True,
        "layer_group_size": 6,
        "moe_intermediate_size": 18,
        "n_group": 8,
        "num_experts": 512,
        "qk_rope_head_dim": 64,
        "rope_interleave": True,
        "score_function": "sigmoid",
        "use_qk_norm": True,
    }
    return deepspec_json(draft, "LingDSparkModel") | left


def speculators_json(draft: Draft, *, kind: str = "dspark", slot0_predicts: bool | None = True) -> dict[str, Any]:
    is_from_anchor = kind == "dspark" if slot0_predicts is None else slot0_predicts
    num_drafts = draft.block_size - (0 if is_from_anchor else 1)
    config = {
        **(_heads_json(draft) if kind == "dspark" else {}),
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        # Theirs are the numbers of the layers that the hidden states go into.
        "aux_hidden_state_layer_ids": [layer + 1 for layer in draft.target_layer_ids],
        "block_size": draft.block_size,
        "draft_vocab_size": draft.num_rows,
        "mask_token_id": draft.mask_token_id,
        "sliding_window_non_causal": bool(draft.windows) and not any(draft.causal),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_drafts}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somewhere"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "transformer_layer_config": {
            **_layers_json(draft),
            "rope_parameters": {"rope_theta": draft.theta, "rope_type": "default"},
        },
        "transformers_version": "5.3.0",
    }
    return config if slot0_predicts is None else config | {"sample_from_anchor": slot0_predicts}


def dflash_json(draft: Draft) -> dict[str, Any]:
    return {
        **_layers_json(draft),
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": draft.block_size,
        "dflash_config": {"mask_token_id": draft.mask_token_id, "target_layer_ids": list(draft.target_layer_ids)},
        "num_target_layers": draft.num_target_layers,
        "rope_scaling": None,
        "rope_theta": draft.theta,
    }


def write_draft(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], prefix: str = "") -> Path:
    """Write a draft's checkpoint.

    Args:
        folder: made if it is not there.
        config: its `config.json`.
        tensors: by DeepSpec's names.
        prefix: in front of every name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({prefix + name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
