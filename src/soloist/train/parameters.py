"""A model of `soloist.models` as something to be trained: its tensors as parameters, saved in their public names.

Owns the way from a constructor's tensors to parameters and back to a checkpoint. Optimisers and losses are others'.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from soloist.kernels.rotary import RotaryTable
from soloist.models.loader import LoadingSource
from soloist.models.mixers import CONV_SIZE, KimiDeltaAttention
from soloist.models.safetensors import INDEX_NAME, SINGLE_NAME
from soloist.models.weights import Init, Part, Weight, WeightSource


class TrainableSource(WeightSource):
    """Passes on the tensors of another source and remembers where each of the checkpoint's own lies.

    Give it to the constructors of all that is trained together (a decoder, its MTP layer), then take `parameters`.

    Args:
        source: dense, in fp32 if its tensors are to be trained.
    """

    def __init__(self, source: LoadingSource) -> None:
        assert source.packing is None, "packed weights cannot be trained"
        self.dtype, self.device = source.dtype, source.device
        self._source = source
        # By checkpoint name: a view of the tensor that was given out.
        self.stored: dict[str, torch.Tensor] = {}
        # Checkpoint names that stay fp32 in a checkpoint of any dtype.
        self.fp32_names: set[str] = set()

    def _record(self, stacked: torch.Tensor, parts: Sequence[Part]) -> None:
        pieces = stacked.split([part.shape[0] for part in parts])
        self.stored |= {part.name: piece for part, piece in zip(parts, pieces, strict=True)}

    def linear(self, *parts: Part) -> Weight:
        stacked = self._source.linear(*parts)
        assert isinstance(stacked, torch.Tensor)
        self._record(stacked, parts)
        return stacked

    def embedding(self, part: Part) -> torch.Tensor:
        self.stored[part.name] = self._source.embedding(part)
        return self.stored[part.name]

    def tied_head(self, part: Part, embedding: torch.Tensor) -> Weight:
        return embedding

    def tensor(self, part: Part, *, dtype: torch.dtype | None = None, init: Init = "ones") -> torch.Tensor:
        self.stored[part.name] = self._source.tensor(part, dtype=dtype, init=init)
        if dtype is torch.float32:
            self.fp32_names.add(part.name)
        return self.stored[part.name]

    def experts(self, *parts: Part, num_experts: int, is_transposed: bool = False) -> torch.Tensor:
        stacked = self._source.experts(*parts, num_experts=num_experts, is_transposed=is_transposed)
        for expert in range(num_experts):
            self._record(stacked[expert], [Part(name=p.name.format(e=expert), shape=p.shape) for p in parts])
        return stacked

    def parameters(self, *models: Any) -> dict[str, torch.Tensor]:
        """Make every tensor that these objects hold a leaf that requires a gradient.

        Biases that choose experts are not among them: no gradient reaches them.

        Args:
            models: all that was constructed from this source.

        Returns:
            The leaves by path, `mixers.0.in_proj`. Changing them in place changes `stored`.
        """
        found: dict[str, torch.Tensor] = {}
        layers: list[KimiDeltaAttention] = []
        for index, model in enumerate(models):
            _collect(model, f"{index}." if index else "", found, layers)
        # The taps are the one thing that a constructor copies: q's, k's and v's, stacked.
        prefixes = [name.removesuffix("A_log") for name in self.stored if name.endswith("A_log")]
        for prefix, layer in zip(prefixes, layers, strict=True):
            for own, taps in zip("qkv", layer.conv.view(-1, 1, CONV_SIZE).chunk(3), strict=True):
                self.stored[f"{prefix}{own}_conv1d.weight"] = taps
        for tensor in found.values():
            tensor.requires_grad_()
        return found

    def save(self, folder: Path, dtype: torch.dtype, *, shard_bytes: int = 4 * 2**30) -> None:
        """Write the tensors as a checkpoint, without its config.

        Args:
            folder: gets the safetensors, and an index if they are several.
            dtype: of all but the few that every checkpoint keeps in fp32.
            shard_bytes: most bytes of a file.
        """
        tensors = {
            name: tensor.detach().to("cpu", torch.float32 if name in self.fp32_names else dtype).contiguous().clone()
            for name, tensor in self.stored.items()
        }
        save_shards(folder, tensors, shard_bytes)


def _collect(thing: Any, path: str, found: dict[str, torch.Tensor], layers: list[KimiDeltaAttention]) -> None:
    """Add the tensors of an object of ours, of its members and theirs, each tensor once."""
    if isinstance(thing, torch.Tensor):
        is_new = all(thing is not other for other in found.values())
        if thing.is_floating_point() and is_new and not path.endswith("expert_bias."):
            found[path.removesuffix(".")] = thing
        return
    if isinstance(thing, list | tuple):
        for index, member in enumerate(thing):
            _collect(member, f"{path}{index}.", found, layers)
        return
    if isinstance(thing, RotaryTable) or not type(thing).__module__.startswith("soloist."):
        return
    if isinstance(thing, KimiDeltaAttention):
        layers.append(thing)
    for name, member in vars(thing).items():
        # A drafter's borrowed target is collected as itself.
        if name != "target":
            _collect(member, f"{path}{name}.", found, layers)


def save_shards(folder: Path, tensors: dict[str, torch.Tensor], shard_bytes: int = 4 * 2**30) -> None:
    """Write tensors as `model.safetensors`, or as shards of at most `shard_bytes` with an index."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    metadata = {"format": "pt"}
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE_NAME, metadata=metadata)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata=metadata)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
