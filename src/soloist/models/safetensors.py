"""Reading safetensors checkpoints: which files there are, what their headers promise, and tensors mapped from them.

Owns the faults of incomplete and damaged downloads, and the refusal of checkpoints that are pickles. All headers are
read before the first tensor, so that a shard that was cut short is found before any memory is taken.
"""

import json
import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from soloist.errors import CheckpointError, UnsupportedError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# The last two are maps between vocabularies, which only drafts have.
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    # From the start of the file, in bytes.
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes the tensor takes in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsFolder:
    """A folder with a model's safetensors, one file or shards with an index.

    Args:
        folder: the folder; every header in it is read and checked, no tensor is.

    Raises:
        CheckpointError: files are missing, cut short or damaged.
        UnsupportedError: the weights are pickles, or have a dtype that is not read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # By name, in the order of the files.
        self.tensors: dict[str, StoredTensor] = {}
        for file in _find_files(folder):
            for name, tensor in _read_header(file).items():
                if name in self.tensors:
                    raise CheckpointError(f"{name} is both in {self.tensors[name].file.name} and in {file.name}")
                self.tensors[name] = tensor
        self._maps: dict[Path, mmap.mmap] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def read(self, name: str) -> torch.Tensor:
        """Give a tensor mapped from its file, in its own dtype: copy before writing to it."""
        tensor = self.tensors[name]
        if tensor.file not in self._maps:
            with tensor.file.open("rb") as file:
                # Private: torch wants writable memory under a tensor, and nothing ever writes to it.
                self._maps[tensor.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        num_values = torch.Size(tensor.shape).numel()
        if num_values == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        values = torch.frombuffer(self._maps[tensor.file], dtype=tensor.dtype, count=num_values, offset=tensor.offset)
        return values.view(tensor.shape)


def _find_files(folder: Path) -> list[Path]:
    """List the files of a checkpoint; all of them exist."""
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is not an index of safetensors ({error}): the file is damaged") from error
        return _all_there(folder, names)
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    if not names:
        raise _no_weights(folder)
    expected = set(names)
    for name in names:
        if match := _SHARD.fullmatch(name):
            stem, number, count = match.groups()
            expected |= {f"{stem}-{i:0{len(number)}}-of-{count}.safetensors" for i in range(1, int(count) + 1)}
    return _all_there(folder, sorted(expected))


def _all_there(folder: Path, names: list[str]) -> list[Path]:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} weight files are missing: {', '.join(missing)}:"
            " incomplete download? Fetch the model again"
        )
    return [folder / name for name in names]


def _no_weights(folder: Path) -> CheckpointError | UnsupportedError:
    """Say why a folder has no weights that can be read."""
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        return UnsupportedError(
            f"{folder}: {pickles[0]} is a pickle, which can run code when it is read; safetensors and GGUF are read."
            " Convert it, or take a revision of the model that has safetensors"
        )
    ggufs = sorted(file.name for file in folder.glob("*.gguf"))
    if ggufs:
        return UnsupportedError(f"{folder}: has no safetensors, but {', '.join(ggufs)}: give the path of that file")
    return CheckpointError(f"{folder}: has no weights (no .safetensors files): incomplete download?")


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """Read what one file holds, and check it against the file's size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        header_bytes = int.from_bytes(start, "little")
        if start + stream.read(len(_LFS_POINTER) - 8) == _LFS_POINTER:
            raise CheckpointError(f"{file} is a git-lfs pointer, not the weights: run `git lfs pull` in the folder")
        if size < 8 or 8 + header_bytes > size:
            raise CheckpointError(f"{file} is truncated inside its header ({size} bytes): incomplete download?")
        stream.seek(8)
        text = stream.read(header_bytes)
    try:
        header: dict[str, dict[str, Any]] = json.loads(text)
        header.pop("__metadata__", None)
        fields = [(name, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: its header is not one of safetensors ({error!r}): damaged file") from error
    data_start = 8 + header_bytes
    tensors = {}
    for name, dtype, shape, begin, end in fields:
        if dtype not in _DTYPES:
            raise UnsupportedError(f"{file}: {name} is {dtype}; what is read: {', '.join(_DTYPES)}")
        tensors[name] = StoredTensor(file=file, dtype=_DTYPES[dtype], shape=shape, offset=data_start + begin)
        if tensors[name].num_bytes != end - begin:
            raise CheckpointError(
                f"{file}: {name} of shape {list(shape)} and dtype {dtype} has {end - begin} bytes: damaged file"
            )
    data_end = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=data_start)
    if size < data_end:
        raise CheckpointError(f"{file} is truncated: it has {size} of {data_end} bytes: incomplete download?")
    if size > data_end:
        raise CheckpointError(f"{file} has {size} bytes, but its header says {data_end}: damaged file")
    return tensors
