"""Reading the container of a GGUF file: metadata, the list of tensors, and their raw blocks.

Owns the file format and the faults of a damaged or contradictory file. Knows no architecture, decodes no block and
makes no tokenizer: the vocabulary stays in `metadata` under its own keys (`tokenizer.ggml.*`).

The `gguf` package's reader is not used: it takes ten seconds and more for a vocabulary of 150,000 strings.
"""

import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from soloist.errors import CheckpointError, ModelNotFoundError, UnsupportedError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32

# Number types of metadata values, in the letters of `struct`, by the format's id.
_NUMBER_TYPES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class BlockType:
    """How a tensor type stores its values."""

    name: str
    # Values in one block; a block never crosses a row.
    block_values: int
    block_bytes: int


# By the format's id; the types that Soloist reads.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}

# Only to refuse them by name.
_OTHER_TYPE_NAMES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """Where one tensor lies in the file."""

    name: str
    # Row-major: the last axis is contiguous. (The file lists axes the other way round.)
    shape: tuple[int, ...]
    type: BlockType
    # From the start of the file, in bytes.
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes the tensor takes in the file."""
        num_values = 1
        for size in self.shape:
            num_values *= size
        return num_values // self.type.block_values * self.type.block_bytes


class _Cursor:
    """Reads little-endian values one after the other, and knows where the file ends."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self.offset = 0

    def skip(self, num_bytes: int) -> int:
        """Step over bytes that must be there, and give the offset where they begin."""
        start = self.offset
        self.offset += num_bytes
        if self.offset > len(self._data):
            raise CheckpointError(f"{self._path}: the file ends inside its header: incomplete download?")
        return start

    def numbers(self, letter: str, num_items: int) -> list[Any]:
        start = self.skip(num_items * struct.calcsize(f"<{letter}"))
        return list(struct.unpack_from(f"<{num_items}{letter}", self._data, start))

    def number(self, letter: str) -> Any:
        return self.numbers(letter, 1)[0]

    def string(self) -> str:
        start = self.skip(self.number("Q"))
        try:
            return self._data[start : self.offset].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: the string at byte {start} is not UTF-8: damaged file") from error

    def value(self, value_type: int) -> Any:
        if value_type == _STRING:
            return self.string()
        if value_type == _ARRAY:
            item_type, num_items = self.number("I"), self.number("Q")
            if item_type in _NUMBER_TYPES:
                return self.numbers(_NUMBER_TYPES[item_type], num_items)
            return [self.value(item_type) for _ in range(num_items)]
        if value_type not in _NUMBER_TYPES:
            raise CheckpointError(f"{self._path}: metadata type {value_type} does not exist: damaged file")
        return self.number(_NUMBER_TYPES[value_type])


class GGUFFile:
    """An open GGUF file, memory-mapped.

    Args:
        path: the file.

    Raises:
        ModelNotFoundError: there is no such file.
        CheckpointError: not a GGUF file, damaged, truncated, or its vocabulary contradicts itself.
        UnsupportedError: a version, byte order, split file or tensor type that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ModelNotFoundError(f"{path}: no such file")
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise CheckpointError(f"{path}: not a GGUF file (it does not begin with {_MAGIC.decode()!r})")
            # Private: torch wants writable memory under a tensor, and nothing ever writes to it.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        cursor = _Cursor(path, self._data)
        cursor.skip(len(_MAGIC))
        version = cursor.number("I")
        if version not in _VERSIONS:
            order = "; it may be big-endian" if version % 2**16 == 0 else ""
            raise UnsupportedError(f"{path}: GGUF version {version}{order}; little-endian versions 2 and 3 are read")
        num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
        # Key -> number, string, bool, or a list of these, as in the file.
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.number("I"))
        # Name -> tensor, in file order.
        self.tensors: dict[str, GGUFTensor] = self._read_tensor_list(cursor, num_tensors)
        self._check_not_split()
        self._check_vocabulary()

    def _read_tensor_list(self, cursor: _Cursor, num_tensors: int) -> dict[str, GGUFTensor]:
        listed = []
        for _ in range(num_tensors):
            name = cursor.string()
            axes = [cursor.number("Q") for _ in range(cursor.number("I"))]
            listed.append((name, tuple(reversed(axes)), cursor.number("I"), cursor.number("Q")))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}: damaged file")
        data_start = -(-cursor.offset // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset in listed:
            tensors[name] = tensor = GGUFTensor(
                name=name, shape=shape, type=self._block_type(name, type_id), offset=data_start + offset
            )
            if not shape or shape[-1] % tensor.type.block_values:
                raise CheckpointError(f"{self.path}: {name} of shape {shape} cannot be {tensor.type.name}")
            if tensor.offset + tensor.num_bytes > len(self._data):
                raise CheckpointError(
                    f"{self.path}: truncated: {name} ends at byte {tensor.offset + tensor.num_bytes}, the file at"
                    f" {len(self._data)}: incomplete download?"
                )
        if len(tensors) < num_tensors:
            raise CheckpointError(f"{self.path}: {num_tensors - len(tensors)} tensors are there twice: damaged file")
        return tensors

    def _block_type(self, name: str, type_id: int) -> BlockType:
        if type_id not in BLOCK_TYPES:
            given = _OTHER_TYPE_NAMES.get(type_id, f"unknown type {type_id}")
            works = ", ".join(block_type.name for block_type in BLOCK_TYPES.values())
            raise UnsupportedError(f"{self.path}: tensor {name} is {given}; what is read: {works}")
        return BLOCK_TYPES[type_id]

    def _check_not_split(self) -> None:
        count = self.metadata.get("split.count", 1)
        if count > 1:
            raise UnsupportedError(f"{self.path}: split.count is {count}; join the parts with gguf-split --merge")

    def _check_vocabulary(self) -> None:
        """Refuse a vocabulary that no tokenizer can be made of."""
        tokens = self.metadata.get("tokenizer.ggml.tokens", [])
        repeated = [token for token, count in Counter(tokens).items() if count > 1]
        if repeated:
            raise CheckpointError(
                f"{self.path}: {len(repeated)} tokens are in the vocabulary twice, the first is {repeated[0]!r}"
            )
        for word in ("bos", "eos"):
            key = f"tokenizer.ggml.{word}_token_id"
            token_id = self.metadata.get(key)
            if token_id is None and self.metadata.get(f"tokenizer.ggml.add_{word}_token"):
                raise CheckpointError(f"{self.path}: add_{word}_token is true, but {key} is missing")
            if token_id is not None and tokens and not 0 <= token_id < len(tokens):
                raise CheckpointError(f"{self.path}: {key} is {token_id}, but there are {len(tokens)} tokens")

    def blocks(self, name: str) -> torch.Tensor:
        """Give a tensor's raw bytes, (rows, bytes per row) uint8, mapped from the file: copy before writing to it."""
        tensor = self.tensors[name]
        rows = torch.frombuffer(self._data, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.offset)
        row_bytes = tensor.shape[-1] // tensor.type.block_values * tensor.type.block_bytes
        return rows.view(-1, row_bytes)  # (rows, row_bytes)
