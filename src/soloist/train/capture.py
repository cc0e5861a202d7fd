"""The target's hidden states of the texts of a step: computed when they are needed, or once and kept on disk.

Owns what is captured (raw residual streams behind chosen layers, the last one behind the final norm) and the shards.
The default stores nothing: reading a text with the target costs less than a draft's step of it, and a token's states
take (layers + 1) * D * 2 bytes.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from soloist.errors import CheckpointError, UsageError
from soloist.models.causal_lm import CausalLM
from soloist.models.memory import free_bytes
from soloist.train.batches import Text, digest_of
from soloist.train.documents import Documents, send
from soloist.train.operators import changing_shapes
from soloist.train.packed import final_norm_packed, forward_packed

# Share of the free memory that states kept in memory may take.
MEMORY_SHARE = 0.5
# Tokens that the target reads at once, and texts of one shard.
PACK_TOKENS = 65536
SHARD_TEXTS = 256


@dataclass(frozen=True, kw_only=True)
class States:
    """What a draft learns from, of the T tokens of a pack."""

    # (T, layers, D): residual streams behind the capture layers.
    captured: torch.Tensor
    # (T, D): behind the final norm, as the output head takes it.
    last: torch.Tensor


@torch.no_grad()
@changing_shapes()
def read_states(
    model: CausalLM, input_ids: torch.Tensor, documents: Documents, layers: Sequence[int], dtype: torch.dtype
) -> States:
    """Read a pack with the target.

    Args:
        model: the target.
        input_ids: (T,) int64.
        documents: of these tokens; packs of more than `PACK_TOKENS` are read in parts.
        layers: to capture.
        dtype: of activations.
    """
    captured, last = [], []
    for first, stop in _parts(documents.lengths):
        rows = slice(sum(documents.lengths[:first]), sum(documents.lengths[:stop]))
        part = documents
        if stop - first < len(documents.lengths):
            part = Documents(documents.lengths[first:stop], documents.device)
        hidden, kept = forward_packed(model, input_ids[rows], part, capture_layers=layers, dtype=dtype)
        captured.append(torch.stack(kept, dim=1) if kept else hidden[:, None, :0])
        last.append(final_norm_packed(model, hidden))
    return States(captured=torch.cat(captured), last=torch.cat(last))


def _parts(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Cut documents into runs of at most `PACK_TOKENS`, or of one document."""
    parts, first, size = [], 0, 0
    for i, length in enumerate(lengths):
        if i > first and size + length > PACK_TOKENS:
            parts.append((first, i))
            first, size = i, 0
        size += length
    return [*parts, (first, len(lengths))]


def bytes_per_token(model: CausalLM, layers: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that the kept states of a token take; on disk they are bf16."""
    return (len(layers) + 1) * model.config.hidden_size * dtype.itemsize


class Store(Protocol):
    """States that were computed before."""

    def read(self, numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> States:
        """Give the states of some texts, one behind the other."""


def fits_in_memory(model: CausalLM, texts: Sequence[Text], layers: Sequence[int], dtype: torch.dtype) -> bool:
    """Say whether the states of all texts take less than a share of the memory that is free now."""
    free = free_bytes(model.device)
    needed = bytes_per_token(model, layers, dtype) * sum(len(text.token_ids) for text in texts)
    # Where nobody knows what is free, nothing is kept.
    return not math.isinf(free) and needed < MEMORY_SHARE * free


class MemoryStore:
    """States of all texts on the target's device, computed once: for texts that are read many times.

    Args:
        texts: all that will be asked for.
        model: the target.
        layers: to capture.
        dtype: of activations.
    """

    def __init__(self, texts: Sequence[Text], model: CausalLM, layers: Sequence[int], dtype: torch.dtype) -> None:
        self.texts = texts
        lengths = [len(text.token_ids) for text in texts]
        self.starts = [0, *itertools.accumulate(lengths)]
        total, D = sum(lengths), model.config.hidden_size
        # (T,) int32, (T, layers, D) and (T, D): T rows of all texts.
        ids = itertools.chain.from_iterable(text.token_ids for text in texts)
        self.ids = torch.from_numpy(np.fromiter(ids, np.int32, total)).to(model.device)
        self.captured = torch.empty(total, len(layers), D, dtype=dtype, device=model.device)
        self.last = torch.empty(total, D, dtype=dtype, device=model.device)
        # Of about the same length together, so that little is padded.
        order = sorted(range(len(texts)), key=lambda i: lengths[i])
        for first, stop in _parts([lengths[i] for i in order]):
            own = order[first:stop]
            rows = self._rows(own)
            documents = Documents([lengths[i] for i in own], model.device)
            states = read_states(model, self.ids[rows].long(), documents, layers, dtype)
            self.captured[rows], self.last[rows] = states.captured, states.last

    def _rows(self, numbers: Sequence[int]) -> torch.Tensor:
        starts = torch.tensor([self.starts[i] for i in numbers])
        lengths = torch.tensor([self.starts[i + 1] - self.starts[i] for i in numbers])
        # Behind each other, the texts begin at the sums of the lengths before.
        shifts = starts - lengths.cumsum(0) + lengths
        rows = torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)
        return send(rows, self.last.device)

    def read(self, numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> States:
        """Give the states of some texts, one behind the other."""
        rows = self._rows(numbers)
        captured, last = self.captured.index_select(0, rows), self.last.index_select(0, rows)
        return States(captured=captured.to(device, dtype), last=last.to(device, dtype))


class StateStore:
    """States of all texts in shards on disk, bf16, `SHARD_TEXTS` texts each; shards that are there are kept.

    Args:
        folder: of the shards.
        texts: all that will be asked for.
        model: the target.
        layers: to capture.
        budget_bytes: most that the shards may take.

    Raises:
        UsageError: they would take more.
        CheckpointError: the folder has states of other texts or layers.
    """

    def __init__(
        self, folder: Path, texts: Sequence[Text], model: CausalLM, layers: Sequence[int], budget_bytes: int
    ) -> None:
        self._folder, self._texts, self._layers = folder, texts, tuple(layers)
        needed = bytes_per_token(model, layers) * sum(len(text.token_ids) for text in texts)
        if needed > budget_bytes:
            raise UsageError(
                f"hidden states of {len(texts)} texts take {needed / 1e9:.1f} GB, the budget is"
                f" {budget_bytes / 1e9:.1f} GB: store nothing (the default), raise it, or train on fewer texts"
            )
        folder.mkdir(parents=True, exist_ok=True)
        manifest, own = folder / "manifest.json", {"texts": digest_of(texts), "layers": list(self._layers)}
        if manifest.is_file() and json.loads(manifest.read_text()) != own:
            raise CheckpointError(
                f"{folder} has the hidden states of other texts or layers: delete it, or name another folder"
            )
        manifest.write_text(json.dumps(own) + "\n")
        for shard in range(-(-len(texts) // SHARD_TEXTS)):
            if not self._path(shard).is_file():
                self._fill(shard, model)

    def _path(self, shard: int) -> Path:
        return self._folder / f"states-{shard:05}.safetensors"

    def _fill(self, shard: int, model: CausalLM) -> None:
        own = self._texts[shard * SHARD_TEXTS : (shard + 1) * SHARD_TEXTS]
        lengths = [len(text.token_ids) for text in own]
        ids = torch.tensor([token for text in own for token in text.token_ids], device=model.device)
        states = read_states(model, ids, Documents(lengths, model.device), self._layers, model.dtype)
        tensors = {}
        pieces = zip(states.captured.split(lengths), states.last.split(lengths), strict=True)
        for i, (captured, last) in enumerate(pieces, start=shard * SHARD_TEXTS):
            tensors[f"{i}.captured"] = captured.to("cpu", torch.bfloat16).contiguous()
            tensors[f"{i}.last"] = last.to("cpu", torch.bfloat16).contiguous()
        # A shard is there whole or not at all.
        unfinished = self._path(shard).with_suffix(".part")
        save_file(tensors, unfinished)
        unfinished.rename(self._path(shard))

    def read(self, numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> States:
        """Give the states of some texts, one behind the other."""
        captured, last = [], []
        for number in numbers:
            with safe_open(self._path(number // SHARD_TEXTS), framework="pt") as shard:
                captured.append(shard.get_tensor(f"{number}.captured"))
                last.append(shard.get_tensor(f"{number}.last"))
        return States(captured=torch.cat(captured).to(device, dtype), last=torch.cat(last).to(device, dtype))
