"""Counting a model's parts for `roofline`, by building it: the constructor that reads a checkpoint also counts it.

Owns the names of the parts and which of them tensor parallelism divides. Counting on the meta device needs no memory;
counting around a real source gives the bytes as they are held (packed weights included).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from soloist.kernels.allreduce import TensorParallel
from soloist.kernels.packed import PackedWeight
from soloist.models.cache import Cache
from soloist.models.causal_lm import CausalLM, ModelConfig
from soloist.models.hybrid import HybridConfig
from soloist.models.weights import Init, Part, RecordingSource, Weight, WeightSource
from soloist.roofline import Footprint, Reads, WeightPart

_LAYER = re.compile(r"^(model\.layers\.\d+\.)(.*)$")
# Parts that every GPU of a tensor-parallel group holds whole: what all heads share, and what is too small to divide.
REPLICATED = ("norms", "router", "kv_a_proj_with_mqa", "q_a_proj", "f_a_proj", "g_a_proj", "layernorm", "_norm")


@dataclass(frozen=True, kw_only=True)
class _Count:
    """One checkpoint tensor, or all experts' tensors of one name."""

    parameters: int
    weight_bytes: int
    read_bytes: int
    reads: Reads = Reads.ALL
    num_choices: int = 1


def held_bytes(weight: Weight) -> int:
    """Count the bytes of a weight in memory."""
    if isinstance(weight, PackedWeight):
        return weight.num_bytes
    return weight.numel() * weight.element_size()


class CountingSource(WeightSource):
    """Passes everything on from another source and counts it.

    Args:
        source: where the tensors come from.
    """

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.dtype, self.device, self.group = source.dtype, source.device, source.group
        # Checkpoint name (with `{e}` for the experts) -> what it holds.
        self._counts: dict[str, _Count] = {}

    @contextmanager
    def shared_by(self, group: TensorParallel) -> Iterator[None]:
        with self.source.shared_by(group), super().shared_by(group):
            yield

    def _add(self, parts: tuple[Part, ...], held_bytes: int, num_copies: int = 1) -> None:
        """Count parts stacked in one weight of `held_bytes`, which they share by what this rank holds of them."""
        held = [torch.Size(part.held_shape(self.group)).numel() * num_copies for part in parts]
        for part, size in zip(parts, held, strict=True):
            part_bytes = held_bytes * size // sum(held)
            parameters = torch.Size(part.shape).numel() * num_copies
            self._counts[part.name] = _Count(parameters=parameters, weight_bytes=part_bytes, read_bytes=part_bytes)

    def linear(self, *parts: Part) -> Weight:
        weight = self.source.linear(*parts)
        self._add(parts, held_bytes(weight))
        return weight

    def embedding(self, part: Part) -> torch.Tensor:
        table = self.source.embedding(part)
        self._add((part,), held_bytes(table))
        self._counts[part.name] = replace(self._counts[part.name], reads=Reads.ROW, num_choices=part.shape[0])
        return table

    def tied_head(self, part: Part, embedding: torch.Tensor) -> Weight:
        head = self.source.tied_head(part, embedding)
        extra_bytes = 0 if head is embedding else held_bytes(head)
        self._counts["lm_head.weight"] = _Count(parameters=0, weight_bytes=extra_bytes, read_bytes=held_bytes(head))
        return head

    def tensor(self, part: Part, *, dtype: torch.dtype | None = None, init: Init = "ones") -> torch.Tensor:
        tensor = self.source.tensor(part, dtype=dtype, init=init)
        self._add((part,), held_bytes(tensor))
        return tensor

    def experts(self, *parts: Part, num_experts: int, is_transposed: bool = False) -> torch.Tensor:
        stacked = self.source.experts(*parts, num_experts=num_experts, is_transposed=is_transposed)
        self._add(parts, held_bytes(stacked), num_experts)
        if num_experts > 1:
            for part in parts:
                count = self._counts[part.name]
                self._counts[part.name] = replace(count, reads=Reads.EXPERTS, num_choices=num_experts)
        return stacked

    def footprint(self, cache: Cache, config: ModelConfig, *, num_layers: int) -> Footprint:
        """Sum up by part what the source gave since it was made.

        Args:
            cache: state of one sequence of what was built; on the meta device it costs nothing.
            config: of the model.
            num_layers: decoder layers that were built.
        """
        by_part: dict[str, WeightPart] = {}
        mixers = self._mixers()
        for name, count in self._counts.items():
            part = _part_name(name, mixers)
            old = by_part.get(part)
            by_part[part] = WeightPart(
                name=part,
                parameters=count.parameters + (old.parameters if old else 0),
                weight_bytes=count.weight_bytes + (old.weight_bytes if old else 0),
                read_bytes=count.read_bytes + (old.read_bytes if old else 0),
                reads=count.reads,
                num_choices=count.num_choices,
                is_sharded=not part.endswith(REPLICATED),
            )
        kv_bytes, num_kv_shards = 0, 1
        if cache.kv is not None:
            kv_bytes = (held_bytes(cache.kv.k) + held_bytes(cache.kv.v)) // cache.max_context_len
            num_kv_shards = cache.kv.k.shape[1]
        if cache.latent is not None:
            kv_bytes += held_bytes(cache.latent.latent) // cache.max_context_len
        recurrent = cache.recurrent
        return Footprint(
            parts=tuple(by_part.values()),
            num_layers=num_layers,
            num_experts_per_tok=config.moe.router.num_experts_per_tok if isinstance(config, HybridConfig) else 0,
            state_bytes=held_bytes(recurrent.state) if recurrent else 0,
            conv_state_bytes=held_bytes(recurrent.conv) if recurrent else 0,
            kv_bytes_per_position=kv_bytes,
            num_kv_shards=num_kv_shards,
        )

    def _mixers(self) -> dict[str, str]:
        """How each layer mixes tokens, by its prefix: what its tensors are called does not tell."""
        mixers = {}
        for name in self._counts:
            if match := _LAYER.match(name):
                if name.endswith("A_log"):
                    mixers[match[1]] = "kda"
                elif name.endswith("kv_b_proj.weight"):
                    mixers[match[1]] = "mla"
        return mixers


def _part_name(name: str, mixers: dict[str, str]) -> str:
    """Name the part that a checkpoint tensor belongs to."""
    match = _LAYER.match(name)
    if match is None:
        return {"lm_head.weight": "lm_head", "model.norm.weight": "norms"}.get(name, "embedding")
    layer, rest = match.groups()
    rest = rest.removesuffix(".weight")
    if "shared_experts." in rest:
        return "shared_experts"
    if "experts.{e}." in rest:
        return "routed_experts"
    if re.match(r"\w+\.gate(\.|$)", rest):
        return "router"
    if "." not in rest:
        return "norms" if rest.endswith("norm") else rest
    module, tensor = rest.split(".", 1)
    if module == "mlp":
        return "mlp"
    return f"{mixers.get(layer, 'attention')}.{tensor}"


def model_footprint(
    model_class: type[CausalLM], config: ModelConfig, *, dtype: torch.dtype = torch.bfloat16
) -> Footprint:
    """Count a model by building it on the meta device.

    Args:
        model_class: the architecture.
        config: its config.
        dtype: that weights and caches are held in.
    """
    counted = CountingSource(RecordingSource(dtype))
    model = model_class(config, counted)
    return counted.footprint(model.make_cache(1), config, num_layers=config.num_hidden_layers)
