"""Numbers by which ranks see, before they read weights, whether they have the same files.

A mark stands for a tensor's shape and type, and for its bytes: all of a small tensor, a sample of a large one, so that
marking takes seconds where reading takes minutes. It tells models, revisions and tensors that were zeroed apart,
not every single byte of a large tensor.
"""

import os
import zlib
from pathlib import Path

from soloist.models.gguf import GGUFFile
from soloist.models.safetensors import SafetensorsFolder

# Larger tensors are read where they begin, in the middle, and where they end.
_SMALL_BYTES, _SAMPLE_BYTES = 1 << 16, 512


def mark_files(model: Path | GGUFFile) -> dict[str, object]:
    """Mark a checkpoint's config and each of its tensors.

    Args:
        model: what `open_model` gives.

    Returns:
        Marks by the tensor's name.

    Raises:
        CheckpointError: files are missing, cut short or damaged.
        UnsupportedError: the weights are pickles, or have a dtype that is not read.
    """
    if isinstance(model, GGUFFile):
        marks: dict[str, object] = {"metadata": zlib.crc32(repr(model.metadata).encode())}
        forms = {name: (model.path, t.offset, t.num_bytes, t.shape, t.type.name) for name, t in model.tensors.items()}
    else:
        marks = {"config.json": zlib.crc32((model / "config.json").read_bytes())}
        stored = SafetensorsFolder(model).tensors
        forms = {name: (t.file, t.offset, t.num_bytes, t.shape, str(t.dtype)) for name, t in stored.items()}
    files = {path: os.open(path, os.O_RDONLY) for path in {path for path, *_ in forms.values()}}
    try:
        for name, (path, offset, num_bytes, shape, kind) in forms.items():
            mark = zlib.crc32(repr((shape, kind)).encode())
            for start, count in _samples(num_bytes):
                mark = zlib.crc32(os.pread(files[path], count, offset + start), mark)
            marks[name] = mark
    finally:
        for file in files.values():
            os.close(file)
    return marks


def _samples(num_bytes: int) -> list[tuple[int, int]]:
    """Choose where a tensor is read: starts and counts of bytes."""
    if num_bytes <= _SMALL_BYTES:
        return [(0, num_bytes)]
    last = num_bytes - _SAMPLE_BYTES
    return [(0, _SAMPLE_BYTES), (last // 2, _SAMPLE_BYTES), (last, _SAMPLE_BYTES)]
