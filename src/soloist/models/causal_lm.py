"""The interface every architecture implements. Owns no weights, no files, no requests."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from soloist.kernels.allreduce import ALONE, TensorParallel
from soloist.kernels.sampling import likeliest
from soloist.models.cache import Cache, StepKind
from soloist.models.weights import LoadReport, Weight, WeightSource
from soloist.roofline import Footprint


@dataclass(frozen=True, kw_only=True)
class HiddenCapture:
    """Asks a forward pass to keep the residual stream behind some layers (drafters read it)."""

    # Decoder layers, 0-based, strictly increasing: the residual stream after layer l, before any norm; -1: embedding.
    layers: tuple[int, ...]
    # (T_max, len(layers), D), the model's dtype; rows 0..T-1 are written in place.
    hidden: torch.Tensor

    def keep(self, layer: int, x: torch.Tensor) -> None:
        """Store the residual stream `x` (T, D) behind `layer`, if it was asked for."""
        if layer in self.layers:
            self.hidden[: x.shape[0], self.layers.index(layer)] = x


class CausalLM(ABC):
    """A decoder: token ids in, residual stream out; logits on request."""

    # `architectures[0]` of the checkpoints this class reads.
    architecture: ClassVar[str]
    # What reads their `config.json`.
    config_class: ClassVar[type["ModelConfig"]]
    # The architecture's own frozen config dataclass; every one has vocab_size, hidden_size, num_hidden_layers,
    # max_position_embeddings and eos_token_ids (a tuple).
    config: "ModelConfig"
    # Of activations and caches, and where they are; every constructor sets both.
    dtype: torch.dtype
    device: torch.device
    # The ranks that share the model; every constructor takes them from its source.
    group: TensorParallel = ALONE
    # (N, D) token embedding, and (N, D) output head behind the final norm: drafters borrow both. Every constructor sets
    # them, whatever the checkpoint calls them. Of several ranks each holds ceil(N / ranks) rows.
    embed_tokens: torch.Tensor
    lm_head: Weight
    # How the weights were loaded; set by `load_model`.
    report: LoadReport
    # What a step reads, the weights as they are held; set by `load_model`.
    footprint: Footprint

    @property
    def prompt_bytes_per_position(self) -> int:
        """Memory that a GPU takes, while it reads a prompt, for every position in the cache; beside the cache."""
        return 0

    @classmethod
    def ignores_tensor(cls, config: "ModelConfig", name: str) -> bool:
        """Say whether a checkpoint of this `config` may hold tensor `name` although the model never asks for it.

        Only known harmless extras; an architecture adds its own to these two: rotary frequencies that old exporters
        stored, and next-token-prediction heads under `model.mtp`.
        """
        return name.endswith("rotary_emb.inv_freq") or name.startswith("model.mtp")

    @abstractmethod
    def __init__(self, config: "ModelConfig", weights: WeightSource) -> None:
        """Pull every tensor from `weights`."""

    @abstractmethod
    def make_cache(self, max_context_len: int, max_width: int = 16) -> Cache:
        """Allocate the state of one sequence, for steps of at most `max_width` verified rows."""

    @abstractmethod
    def forward(
        self,
        input_ids: torch.Tensor,
        cache: Cache,
        kind: StepKind,
        *,
        width: torch.Tensor | None = None,
        capture: HiddenCapture | None = None,
    ) -> torch.Tensor:
        """Run the decoder on the T tokens that follow the cache's `context_len`.

        Row t stands at position `context_len + t`. The caller advances the cache with `cache.commit`.

        Args:
            input_ids: (T,) int64.
            cache: written in place: attention rows always; recurrent state unless `kind` is VERIFY.
            kind: PREFILL (any T), DECODE (T = 1) or VERIFY (T <= max_width, recurrent state frozen).
            width: () int32 on the device; rows at or past it are padding and may cost nothing. None: all rows count.
            capture: residual streams to keep.

        Returns:
            (T, D) residual stream before the final norm.
        """

    @abstractmethod
    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to a residual stream (T, D)."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and output head: residual stream (T, D) to logits (T, N) fp32."""

    def pick_likeliest(self, hidden: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the likeliest of the first `num_tokens` tokens behind each row; models may do so without the logits.

        Args:
            hidden: (T, D) residual stream.
            num_tokens: N, ids that may be drawn.

        Returns:
            (T,) int64 ids, the lowest of equals, and (T,) fp32 their logits.
        """
        return likeliest(self.compute_logits(hidden)[:, :num_tokens])


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every architecture's config has in common; each model file extends it."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    # Ids that end an answer, from the model's config; the tokenizer's are added by `llm`.
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dict(cls, config_json: dict[str, Any]) -> Self:
        """Read a `config.json`.

        Raises:
            UnsupportedError: a key is missing, unknown, or has a value that is not implemented.
        """
        raise NotImplementedError(f"{cls.__name__} does not read config.json")
