"""Filling a model's tensors: from safetensors, memory-mapped, or with random numbers; dense, or packed for the CPU.

Owns the comparison of a checkpoint with what a model asks for, the form that linear maps are held in, and the report.
GGUF files are in `gguf_source`. Never pickle, never code from a checkpoint.
"""

import hashlib
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from soloist.errors import CheckpointError, UnsupportedError, UsageError
from soloist.kernels.allreduce import ALONE, TensorParallel
from soloist.kernels.packed import (
    INT4_GROUP,
    INT4_ROWS,
    PackedKind,
    PackedWeight,
    can_pack,
    pack_weight,
    packing_error,
)
from soloist.kernels.step_cpu import LargePages
from soloist.models.causal_lm import CausalLM, ModelConfig
from soloist.models.memory import check_fits
from soloist.models.safetensors import SafetensorsFolder
from soloist.models.weights import Init, LoadReport, Part, RecordingSource, Split, Weight, WeightSource

# Called with the bytes that were read so far, and the bytes there are.
Progress = Callable[[int, int], None]
WeightsDtype = Literal["fp32", "bf16", "fp16", "int8", "int4"]
DENSE_DTYPES: dict[torch.dtype, WeightsDtype] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
PACKED_BYTES_PER_VALUE: dict[PackedKind, float] = {"fp16": 2, "int8": 1, "int4": 0.5 + 4 / INT4_GROUP}
# How a CPU with bf16 activations holds maps that are whole in their file.
DEFAULT_PACKING: PackedKind | None = "fp16"
# And those that are quantised there, to other than 4 bits: as tiles they lose little, and half of the bytes.
DEFAULT_REPACKING: PackedKind | None = "int8"
# Ranks that may share a model.
NUM_RANKS = (1, 2, 4, 8)
# Integers as wide as a dtype.
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
# Values that are summed at a time, as 64 bits each.
_SUMMED_VALUES = 2**22
# Names shown when many tensors are wrong.
MAX_NAMES_SHOWN = 10
# Standard deviation of random linear maps and embeddings.
RANDOM_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where tensors go, and in what form."""

    device: torch.device
    # Of activations, norms and dense weights.
    dtype: torch.dtype
    # How linear maps are held; None: dense.
    packing: PackedKind | None = None
    # Whether maps that are 4-bit in their file are held as int4 whatever `packing` is: the same integers, scales and
    # minima rounded to `dtype`.
    keeps_four_bits: bool = False
    # How maps are held that are quantised in their file, to other than 4 bits, if they can be tiles; None: as `packing`
    # says.
    repacking: PackedKind | None = None
    # The rank that holds them.
    group: TensorParallel = ALONE


def choose_placement(
    device: torch.device, dtype: torch.dtype, weights_dtype: WeightsDtype | None, group: TensorParallel = ALONE
) -> Placement:
    """Decide how linear maps are held.

    Args:
        device: where the model runs.
        dtype: of its activations.
        weights_dtype: what was asked for; None: the default of `load_model`.
        group: the rank that holds them.

    Raises:
        UsageError: a device that is not there, or a dtype that no operator takes.
        UnsupportedError: weights cannot be held in that form here.
    """
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if device.type not in devices:
        raise UsageError(f"device is {str(device)!r}; this PyTorch on this machine has {' and '.join(devices)}")
    if dtype not in DENSE_DTYPES:
        raise UsageError(f"dtype is {dtype}; it can be {', '.join(map(str, DENSE_DTYPES))}")
    can_pack = device.type == "cpu" and dtype == torch.bfloat16
    if weights_dtype == DENSE_DTYPES[dtype] or (weights_dtype is None and not can_pack):
        return Placement(device=device, dtype=dtype, group=group)
    if weights_dtype is None:
        return Placement(
            device=device,
            dtype=dtype,
            packing=DEFAULT_PACKING,
            keeps_four_bits=True,
            repacking=DEFAULT_REPACKING,
            group=group,
        )
    if can_pack and weights_dtype in PACKED_BYTES_PER_VALUE:
        is_int4 = weights_dtype == "int4"
        return Placement(device=device, dtype=dtype, packing=weights_dtype, keeps_four_bits=is_int4, group=group)
    allowed = [DENSE_DTYPES[dtype], *(PACKED_BYTES_PER_VALUE if can_pack else ())]
    raise UnsupportedError(
        f"weights_dtype is {weights_dtype!r}; with activations in {DENSE_DTYPES[dtype]} on {device.type} it can be"
        f" {' or '.join(allowed)}"
    )


class LoadingSource(WeightSource):
    """What files and random numbers share: allocate a tensor, have its parts written into it, pack it, count it.

    Args:
        placement: where tensors go. A matrix whose shape no packed kernel takes is held dense: the report shows it.
        num_file_bytes: what there is to read, for `progress`.
        progress: called behind each part.
    """

    def __init__(self, placement: Placement, num_file_bytes: int = 0, progress: Progress | None = None) -> None:
        self.device, self.dtype, self.packing = placement.device, placement.dtype, placement.packing
        self.group = placement.group
        self._num_file_bytes, self._num_read_bytes, self._progress = num_file_bytes, 0, progress
        self._bytes_by_format: Counter[str] = Counter()
        self._packing_error: dict[str, float] = {}
        self._pages = LargePages()
        # () int64 each.
        self._checksums: dict[str, torch.Tensor] = {}
        self._start_s = time.perf_counter()

    @abstractmethod
    def _fill(self, part: Part, destination: torch.Tensor, init: Init) -> int:
        """Write what this rank holds of a part into `destination`, of any strides; give the bytes that were read."""

    def report(self) -> LoadReport:
        """Say what was loaded since the source was made."""
        return LoadReport(
            bytes_by_format=dict(self._bytes_by_format),
            packing_error=dict(self._packing_error),
            load_s=time.perf_counter() - self._start_s,
            checksums={name: int(checksum) for name, checksum in self._checksums.items()},
        )

    def _advance(self, num_bytes: int) -> None:
        self._num_read_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._num_read_bytes, self._num_file_bytes)

    def _stack(self, parts: tuple[Part, ...], dtype: torch.dtype, init: Init = "normal") -> torch.Tensor:
        """Read parts one below the other: (sum of rows, ...)."""
        shapes = [part.held_shape(self.group) for part in parts]
        num_rows = [shape[0] for shape in shapes]
        stacked = torch.empty((sum(num_rows), *shapes[0][1:]), dtype=dtype, device=self.device)
        for part, destination in zip(parts, stacked.split(num_rows), strict=True):
            self._advance(self._fill(part, destination, init))
            if part.split is None and self.group.size > 1:
                self._checksums[part.name] = _sum_bits(destination)
        return stacked

    def _count_dense(self, tensor: torch.Tensor) -> torch.Tensor:
        self._bytes_by_format[DENSE_DTYPES[tensor.dtype]] += tensor.numel() * tensor.element_size()
        return tensor

    def _count_packed(self, packed: PackedWeight, sample: PackedWeight, rows: torch.Tensor) -> PackedWeight:
        """Count a packed weight, and measure the error of `sample` against the values of the file, `rows`."""
        self._bytes_by_format[packed.kind] += packed.num_bytes
        error = packing_error(sample, rows)
        self._packing_error[packed.kind] = max(error, self._packing_error.get(packed.kind, 0.0))
        return packed.place_in(self._pages)

    def linear(self, *parts: Part) -> Weight:
        if self.packing is None or not can_pack(self.packing, *stacked_shape(parts, self.group)):
            return self._count_dense(self._stack(parts, self.dtype))
        return self._pack(parts, self.packing)

    def _pack(self, parts: tuple[Part, ...], kind: PackedKind) -> PackedWeight:
        """Read maps and quantise them."""
        weight = self._stack(parts, torch.float32)
        packed = pack_weight(weight, kind, activation_dtype=self.dtype)
        rows = weight[sampled_rows(len(weight))]
        return self._count_packed(packed, pack_weight(rows, kind, activation_dtype=self.dtype), rows)

    def embedding(self, part: Part) -> torch.Tensor:
        return self._count_dense(self._stack((part,), self.dtype))

    def tied_head(self, part: Part, embedding: torch.Tensor) -> Weight:
        if self.packing is None or not can_pack(self.packing, *stacked_shape((part,), self.group)):
            return embedding
        # Read once more, because the embedding is already rounded.
        return self.linear(part)

    def tensor(self, part: Part, *, dtype: torch.dtype | None = None, init: Init = "ones") -> torch.Tensor:
        return self._count_dense(self._stack((part,), dtype or self.dtype, init))

    def experts(self, *parts: Part, num_experts: int, is_transposed: bool = False) -> torch.Tensor:
        shapes = [part.held_shape(self.group) for part in parts]
        stacked = self._empty_experts(shapes, num_experts, is_transposed)  # (E, rows, I)
        for expert in range(num_experts):
            for part, destination in zip(parts, stacked[expert].split([n for n, *_ in shapes]), strict=True):
                one = replace(part, name=part.name.format(e=expert))
                self._advance(self._fill(one, destination, "normal"))
        return self._count_dense(stacked)


def _sum_bits(x: torch.Tensor) -> torch.Tensor:
    """Sum a tensor's bits, each value weighted by an odd number that depends on its place: () int64."""
    bits = x.flatten().view(_BITS[x.dtype])
    odd = torch.arange(1, 2 * min(len(bits), _SUMMED_VALUES), 2, device=x.device)
    sums = [(2 * i + 1) * (part * odd[: len(part)]).sum() for i, part in enumerate(bits.split(_SUMMED_VALUES))]
    return torch.stack(sums).sum()


def stacked_shape(parts: tuple[Part, ...], group: TensorParallel = ALONE) -> tuple[int, int]:
    """Give the outputs and inputs of linear maps stacked in one weight, as a rank holds it."""
    shapes = [part.held_shape(group) for part in parts]
    return sum(shape[0] for shape in shapes), shapes[0][1]


def sampled_rows(num_rows: int) -> torch.Tensor:
    """Choose the rows that an error is measured on: (16) int64, spread evenly; 16 can be packed in every form."""
    return torch.linspace(0, num_rows - 1, INT4_ROWS).long()


class RandomSource(LoadingSource):
    """Draws weights on the device, each a function of the seed and the tensor's name, so that speed can be measured.

    Linear maps and embeddings are normal with a deviation of 0.02, norms one, biases zero, decays the logarithm of
    1..16. The same seed gives other numbers on another kind of device.
    """

    def __init__(self, seed: int, placement: Placement) -> None:
        super().__init__(placement)
        self._seed = seed
        self._generator = torch.Generator(placement.device)

    def _fill(self, part: Part, destination: torch.Tensor, init: Init) -> int:
        if destination.is_contiguous() and (part.split is None or self.group.size == 1):
            self._draw(part.name, destination, init)
            return destination.numel() * destination.element_size()
        # Drawn whole and row by row, so that neither the number of ranks nor the order in memory changes a value.
        whole = torch.empty(part.shape, dtype=destination.dtype, device=self.device)
        self._draw(part.name, whole, init)
        return part.copy_held(whole, destination, self.group)

    def _draw(self, name: str, destination: torch.Tensor, init: Init) -> None:
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        self._generator.manual_seed(int.from_bytes(digest, "little", signed=True))
        if init == "normal":
            destination.normal_(0.0, RANDOM_STD, generator=self._generator)
        elif init == "ones":
            destination.fill_(1.0)
        elif init == "decay":
            destination.uniform_(1.0, 16.0, generator=self._generator).log_()
        else:
            destination.zero_()


class SafetensorsSource(LoadingSource):
    """Copies tensors from a folder of safetensors straight into their places, converting the dtype on the way."""

    def __init__(self, folder: SafetensorsFolder, placement: Placement, progress: Progress | None = None) -> None:
        super().__init__(placement, folder.num_bytes, progress)
        self._folder = folder

    def _fill(self, part: Part, destination: torch.Tensor, init: Init) -> int:
        stored = self._folder.read(part.name)
        if not stored.is_floating_point():
            raise CheckpointError(f"{part.name} holds {stored.dtype}, expected floating-point weights")
        return part.copy_held(stored, destination, self.group)


def check_tensors(
    model_class: type[CausalLM],
    config: ModelConfig,
    asked: RecordingSource,
    found: Mapping[str, tuple[int, ...]],
    checkpoint: Path,
) -> None:
    """Compare what a checkpoint holds with what the model asks for.

    Args:
        model_class: the architecture.
        config: its config.
        asked: what its constructor asked for.
        found: shapes by name, in the architecture's names.
        checkpoint: for the message.

    Raises:
        CheckpointError: tensors are missing, left over or of another shape; the message counts all of them.
    """
    complaint = f"{checkpoint} does not hold a {model_class.architecture}"
    compare_tensors(asked, found, lambda name: model_class.ignores_tensor(config, name), complaint)


def compare_tensors(
    asked: RecordingSource, found: Mapping[str, tuple[int, ...]], is_ignored: Callable[[str], bool], complaint: str
) -> None:
    """Compare tensors that were asked for with those that there are.

    Args:
        asked: what a constructor asked for.
        found: shapes by name.
        is_ignored: whether a tensor may be there although nobody asks for it.
        complaint: beginning of the message.

    Raises:
        CheckpointError: tensors are missing, left over or of another shape; the message counts all of them.
    """
    missing = [f"{name} {list(shape)}" for name, shape in asked.shapes.items() if name not in found]
    extra = [name for name in found if name not in asked.shapes and not is_ignored(name)]
    misshaped = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in asked.shapes.items()
        if name in found and found[name] != shape
    ]
    faults = {"missing": missing, "unknown": extra, "of another shape than config.json says": misshaped}
    lines = [_describe(kind, names) for kind, names in faults.items() if names]
    if lines:
        raise CheckpointError(f"{complaint}: {'; '.join(lines)}")


def _describe(kind: str, names: list[str]) -> str:
    """Say how many tensors are wrong in one way, and name the first ones."""
    shown = ", ".join(names[:MAX_NAMES_SHOWN])
    rest = f", and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return f"{len(names)} {kind}: {shown}{rest}"


def check_num_ranks(model_class: type[CausalLM], config: ModelConfig, num_ranks: int) -> None:
    """Refuse a number of ranks that cannot share a model.

    Raises:
        UnsupportedError: heads or widths do not divide; the message names what does.
    """
    if num_ranks == 1:
        return
    asked = RecordingSource()
    model_class(config, asked)
    refuse_num_ranks(asked.splits, num_ranks, f"this {model_class.architecture}")


def refuse_num_ranks(splits: Iterable[Split], num_ranks: int, what: str) -> None:
    """Refuse a number of ranks that some split does not allow.

    Raises:
        UnsupportedError: the message names the numbers that all splits allow.
    """
    bad = sorted({split.num_blocks for split in splits if not split.allows(num_ranks)})
    if bad:
        allowed = [str(n) for n in NUM_RANKS if all(split.allows(n) for split in splits)]
        raise UnsupportedError(
            f"tensor_parallel_size is {num_ranks}; {what} has heads or widths of {', '.join(map(str, bad))}, which"
            f" {num_ranks} ranks cannot share: allowed are {', '.join(allowed)}"
        )


def check_weights_fit(asked: RecordingSource, placement: Placement) -> None:
    """Refuse weights that cannot fit, before anything is allocated.

    Raises:
        DoesNotFitError: the device has less free memory than the weights take at least.
    """
    num_bytes = 0.0
    for name, num_held in asked.num_held.items():
        bytes_per_value: float = asked.dtypes[name].itemsize
        if placement.packing is not None and name in asked.packable:
            bytes_per_value = min(PACKED_BYTES_PER_VALUE["int4"], PACKED_BYTES_PER_VALUE[placement.packing])
        num_bytes += num_held * bytes_per_value
    check_fits(num_bytes, placement.device, "the model")
