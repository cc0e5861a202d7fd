"""Where a model's weights come from: the one interface between architectures and checkpoints.

A model's constructor *pulls* each tensor by its checkpoint name and shape. The same constructor therefore lists what a
checkpoint must hold (`RecordingSource`), builds on the meta device, reads files, or draws random weights. Only a source
knows about files, formats, dtypes and packing.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from soloist.kernels.linear import PackedWeight

Weight = torch.Tensor | PackedWeight
Init = Literal["normal", "ones", "zeros", "decay", "bias"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One checkpoint tensor, as the checkpoint names and shapes it."""

    # Name in the checkpoint; `{e}` stands for the expert number in `WeightSource.experts`.
    name: str
    # Shape in the checkpoint; linear maps are (out, in).
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What loading a model's weights did."""

    # Bytes the weights take as they are held, by format: a dtype's name ("bfloat16") or a packed kind ("int4").
    bytes_by_format: dict[str, int]
    # Worst relative RMS error of a packed weight against the checkpoint's own values, by packed kind; measured on rows
    # spread over each matrix.
    packing_error: dict[str, float]
    load_s: float

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights together."""
        return sum(self.bytes_by_format.values())


class WeightSource(ABC):
    """Gives a model its tensors, on `device`, in `dtype` unless a method says otherwise."""

    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def linear(self, *parts: Part) -> Weight:
        """Read linear maps of the same input size and stack their rows: (sum of out, in), maybe packed."""

    @abstractmethod
    def embedding(self, part: Part) -> torch.Tensor:
        """Read a lookup table (N, D), never packed."""

    @abstractmethod
    def tied_head(self, part: Part, embedding: torch.Tensor) -> Weight:
        """Give the output head of a model that ties it to `embedding`: the same tensor, or a packed copy of it."""

    @abstractmethod
    def tensor(self, part: Part, *, dtype: torch.dtype | None = None, init: Init = "ones") -> torch.Tensor:
        """Read a small tensor (norm weight, bias, decay), in `dtype` if given; `init`: how random weights are drawn."""

    @abstractmethod
    def experts(self, *parts: Part, num_experts: int) -> torch.Tensor:
        """Read every expert's maps and stack them: (E, sum of out, in). `{e}` in each name runs over the experts."""


class RecordingSource(WeightSource):
    """Gives meta tensors and remembers every part that was asked for."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype
        self.device = torch.device("meta")
        # Checkpoint name -> shape, in the order of asking.
        self.shapes: dict[str, tuple[int, ...]] = {}
        # Checkpoint name -> dtype it is held in, unless it is packed.
        self.dtypes: dict[str, torch.dtype] = {}
        # Checkpoint names of the maps that a source may pack.
        self.packable: set[str] = set()

    def _record(self, part: Part, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.shapes[part.name] = part.shape
        self.dtypes[part.name] = dtype or self.dtype
        return torch.empty(part.shape, dtype=dtype or self.dtype, device="meta")

    def linear(self, *parts: Part) -> torch.Tensor:
        for part in parts:
            self._record(part)
            self.packable.add(part.name)
        rows = sum(part.shape[0] for part in parts)
        # Not `cat`: on the meta device it would import PyTorch's compiler, which takes seconds.
        return torch.empty((rows, *parts[0].shape[1:]), dtype=self.dtype, device="meta")

    def embedding(self, part: Part) -> torch.Tensor:
        return self._record(part)

    def tied_head(self, part: Part, embedding: torch.Tensor) -> torch.Tensor:
        return embedding

    def tensor(self, part: Part, *, dtype: torch.dtype | None = None, init: Init = "ones") -> torch.Tensor:
        return self._record(part, dtype)

    def experts(self, *parts: Part, num_experts: int) -> torch.Tensor:
        for expert in range(num_experts):
            for part in parts:
                name = part.name.format(e=expert)
                self.shapes[name], self.dtypes[name] = part.shape, self.dtype
        rows = sum(part.shape[0] for part in parts)
        return torch.empty((num_experts, rows, *parts[0].shape[1:]), dtype=self.dtype, device="meta")
