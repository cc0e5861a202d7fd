"""Where a model's weights come from: the one interface between architectures and checkpoints.

A model's constructor *pulls* each tensor by its checkpoint name and shape. The same constructor therefore lists what a
checkpoint must hold (`RecordingSource`), builds on the meta device, reads files, or draws random weights. Only a source
knows about files, formats, dtypes and packing.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from soloist.kernels.allreduce import ALONE, TensorParallel
from soloist.kernels.packed import PackedWeight

Weight = torch.Tensor | PackedWeight
Init = Literal["normal", "ones", "zeros", "decay", "bias"]


@dataclass(frozen=True)
class Split:
    """How tensor parallelism divides one axis of a tensor: `rows`, `columns`, `kv_rows` or `token_rows` of it."""

    axis: int
    # Equal blocks that the axis consists of, heads or single rows. A rank holds whole ones.
    num_blocks: int
    # With fewer blocks than ranks: several ranks hold the same one.
    may_repeat: bool = False
    # If the blocks do not divide: the last ranks hold rows of zeros.
    may_pad: bool = False

    def allows(self, num_ranks: int) -> bool:
        """Say whether so many ranks can share the axis."""
        repeats = self.may_repeat and num_ranks % self.num_blocks == 0
        return self.num_blocks % num_ranks == 0 or repeats or self.may_pad

    def place(self, size: int, group: TensorParallel) -> tuple[int, int, int]:
        """Give where a rank's values begin, where they end, and the size of the axis it holds, padding included.

        Args:
            size: of the whole axis.
            group: the rank.
        """
        if self.num_blocks < group.size and self.may_repeat:
            held = size // self.num_blocks
            start = group.rank * self.num_blocks // group.size * held
            return start, start + held, held
        held = -(-size // group.size)
        return min(group.rank * held, size), min((group.rank + 1) * held, size), held


def rows(num_blocks: int) -> Split:
    """Divide the outputs of a linear map: by head, or each by itself."""
    return Split(0, num_blocks)


def columns(num_blocks: int) -> Split:
    """Divide the inputs of a linear map, whose results must then be summed over the ranks."""
    return Split(1, num_blocks)


def kv_rows(num_heads: int) -> Split:
    """Divide key or value heads; ranks share a head where there are fewer heads than ranks."""
    return Split(0, num_heads, may_repeat=True)


def token_rows(num_tokens: int) -> Split:
    """Divide a table or head by token, whatever the size of the vocabulary."""
    return Split(0, num_tokens, may_pad=True)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One checkpoint tensor, as the checkpoint names and shapes it."""

    # Name in the checkpoint; `{e}` stands for the expert number in `WeightSource.experts`.
    name: str
    # Shape in the checkpoint; linear maps are (out, in).
    shape: tuple[int, ...]
    # How ranks divide it; None: each holds all of it.
    split: Split | None = None

    def held_shape(self, group: TensorParallel) -> tuple[int, ...]:
        """Give the shape of what one rank holds."""
        if self.split is None or group.size == 1:
            return self.shape
        shape = list(self.shape)
        _, _, shape[self.split.axis] = self.split.place(shape[self.split.axis], group)
        return tuple(shape)

    def held_of(self, whole: torch.Tensor, group: TensorParallel) -> torch.Tensor:
        """Give the view of what one rank holds of a tensor of the part's shape, padding left out."""
        if self.split is None or group.size == 1:
            return whole
        start, end, _ = self.split.place(self.shape[self.split.axis], group)
        return whole.narrow(self.split.axis, start, end - start)

    def copy_held(self, whole: torch.Tensor, destination: torch.Tensor, group: TensorParallel) -> int:
        """Copy what one rank holds of a tensor, and of nothing else a byte; give the bytes that were read.

        Args:
            whole: of the part's shape, maybe mapped from a file.
            destination: of the held shape, written in place; rows of padding become zero.
            group: the rank.
        """
        own = self.held_of(whole, group)
        if own.shape != destination.shape:
            # Only first axes are padded.
            destination[own.shape[0] :].zero_()
            destination = destination[: own.shape[0]]
        destination.copy_(own)
        return own.numel() * own.element_size()


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What loading a model's weights did."""

    # Bytes the weights take as they are held, by format: a dtype's name ("bfloat16") or a packed kind ("int4").
    bytes_by_format: dict[str, int]
    # Worst relative RMS error of a packed weight against the checkpoint's own values, by packed kind; measured on rows
    # spread over each matrix.
    packing_error: dict[str, float]
    load_s: float
    # By name of a tensor that every rank holds whole: a sum of its bits, each weighted by its place, which must be the
    # same on all. Empty on one rank.
    checksums: dict[str, int] = field(default_factory=dict)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights together."""
        return sum(self.bytes_by_format.values())


class WeightSource(ABC):
    """Gives a model its tensors, on `device`, in `dtype` unless a method says otherwise.

    To one rank of several it gives what that rank holds: sizes below are of the held shapes.
    """

    dtype: torch.dtype
    device: torch.device
    group: TensorParallel = ALONE

    @contextmanager
    def shared_by(self, group: TensorParallel) -> Iterator[None]:
        """Give what a rank of another group holds inside the block, for parts that other ranks share than the rest."""
        usual, self.group = self.group, group
        try:
            yield
        finally:
            self.group = usual

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
    def experts(self, *parts: Part, num_experts: int, is_transposed: bool = False) -> torch.Tensor:
        """Read every expert's maps and stack them: (E, sum of out, in). `{e}` in each name runs over the experts.

        `is_transposed`: an expert's inputs are the rows in memory, which is a contiguous (E, in, sum of out).
        """

    def _empty_experts(self, shapes: Sequence[tuple[int, ...]], num_experts: int, is_transposed: bool) -> torch.Tensor:
        """Allocate what `experts` returns for maps of these shapes: (E, sum of out, in)."""
        shape = (num_experts, sum(n for n, *_ in shapes), *shapes[0][1:])
        order = (0, 2, 1) if is_transposed else (0, 1, 2)
        return torch.empty_permuted(shape, order, dtype=self.dtype, device=self.device)


class RecordingSource(WeightSource):
    """Gives meta tensors and remembers every part that was asked for."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, group: TensorParallel = ALONE) -> None:
        self.dtype, self.group = dtype, group
        self.device = torch.device("meta")
        # Checkpoint name -> shape, in the order of asking.
        self.shapes: dict[str, tuple[int, ...]] = {}
        # Checkpoint name -> values of it that this rank holds.
        self.num_held: dict[str, int] = {}
        # Every way in which an axis is divided.
        self.splits: set[Split] = set()
        # Checkpoint name -> dtype it is held in, unless it is packed.
        self.dtypes: dict[str, torch.dtype] = {}
        # Checkpoint names of the maps that a source may pack.
        self.packable: set[str] = set()

    def _note(self, name: str, part: Part, dtype: torch.dtype | None = None) -> tuple[int, ...]:
        """Remember a part under its name; give the shape that this rank holds."""
        shape = part.held_shape(self.group)
        self.shapes[name] = part.shape
        self.num_held[name] = torch.Size(shape).numel()
        self.dtypes[name] = dtype or self.dtype
        if part.split is not None:
            self.splits.add(part.split)
        return shape

    def _record(self, part: Part, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(self._note(part.name, part, dtype), dtype=dtype or self.dtype, device="meta")

    def linear(self, *parts: Part) -> torch.Tensor:
        shapes = [self._note(part.name, part) for part in parts]
        self.packable |= {part.name for part in parts}
        # Not `cat`: on the meta device it would import PyTorch's compiler, which takes seconds.
        return torch.empty((sum(n for n, *_ in shapes), *shapes[0][1:]), dtype=self.dtype, device="meta")

    def embedding(self, part: Part) -> torch.Tensor:
        return self._record(part)

    def tied_head(self, part: Part, embedding: torch.Tensor) -> torch.Tensor:
        return embedding

    def tensor(self, part: Part, *, dtype: torch.dtype | None = None, init: Init = "ones") -> torch.Tensor:
        return self._record(part, dtype)

    def experts(self, *parts: Part, num_experts: int, is_transposed: bool = False) -> torch.Tensor:
        for expert in range(num_experts):
            shapes = [self._note(part.name.format(e=expert), part) for part in parts]
        return self._empty_experts(shapes, num_experts, is_transposed)
