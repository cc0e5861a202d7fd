"""Packs of training documents: shuffled anew every epoch, cut at a largest length, one pack after another."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from forward import Pack
from torch import Tensor

# Longest document; what is behind it counts as another.
MAX_LEN = 2048


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One pack, and what each of its positions is to predict."""

    pack: Pack
    # (T,) int64: the token one to the right, whatever it is, as the MTP layer reads it.
    next_ids: Tensor
    # (T,) int64: the token one to the right; -100 at a document's end.
    labels: Tensor
    # (T,) int64: the token two to the right; -100 where the document ends before.
    mtp_labels: Tensor


def split_documents(tokens: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Give where pieces of at most MAX_LEN tokens begin and how long they are; the end token closes a document."""
    ends = np.flatnonzero(tokens == end) + 1
    starts = np.concatenate([[0], ends[:-1]])
    num_pieces = -(-(ends - starts) // MAX_LEN)
    first = np.repeat(starts, num_pieces)
    index = np.arange(len(first)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    piece_starts = first + index * MAX_LEN
    return piece_starts, np.minimum(np.repeat(ends, num_pieces) - piece_starts, MAX_LEN)


def make_batch(input_ids: np.ndarray, lengths: np.ndarray, device: torch.device) -> Batch:
    """Lay documents out: ids (T,) of documents of these lengths; T counts one label beyond for nobody."""
    T = len(input_ids)
    ids = torch.from_numpy(input_ids.astype(np.int64))
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = torch.from_numpy(lengths).cumsum(0)
    starts = torch.repeat_interleave(cu_seqlens[:-1].long(), torch.from_numpy(lengths))
    left = torch.repeat_interleave(cu_seqlens[1:].long(), torch.from_numpy(lengths)) - torch.arange(T)  # (T,), 1 last
    ahead = torch.cat([ids, ids.new_zeros(2)])
    columns = [
        ids,
        torch.arange(T) - starts,
        ahead[1 : T + 1],
        ahead[1 : T + 1].masked_fill(left < 2, -100),
        ahead[2:].masked_fill(left < 3, -100),
    ]
    table = torch.stack(columns)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    input_ids_, positions, next_ids, labels, mtp_labels = table.unbind()
    pack = Pack(
        input_ids=input_ids_,
        positions=positions,
        cu_seqlens=cu_seqlens.to(device, non_blocking=True),
        cu_seqlens_cpu=cu_seqlens,
        max_len=MAX_LEN,
    )
    return Batch(pack=pack, next_ids=next_ids, labels=labels, mtp_labels=mtp_labels)


def packs(tokens: np.ndarray, end: int, num_tokens: int, seed: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Give packs (ids, lengths) of exactly `num_tokens`; a document over a pack's edge goes on as another in the next.

    Args:
        tokens: (T,) documents, each closed by `end`.
        end: the end token.
        num_tokens: of a pack.
        seed: of the order, which is another in every epoch, without end. None: one epoch in order, the rest dropped.
    """
    starts, lengths = split_documents(tokens, end)
    random = None if seed is None else np.random.default_rng(seed)
    ids: list[np.ndarray] = []
    sizes: list[int] = []
    room = num_tokens
    while True:
        for piece in np.arange(len(starts)) if random is None else random.permutation(len(starts)):
            start, length = starts[piece], lengths[piece]
            while length:
                taken = min(room, length)
                ids.append(tokens[start : start + taken])
                sizes.append(taken)
                start, length, room = start + taken, length - taken, room - taken
                if not room:
                    yield np.concatenate(ids), np.array(sizes)
                    ids, sizes, room = [], [], num_tokens
        if random is None:
            return


class Loader:
    """Makes batches in a thread of its own, a few ahead."""

    def __init__(self, path: Path, end: int, num_tokens: int, device: torch.device, seed: int = 0) -> None:
        self.tokens = np.load(path, mmap_mode=None)
        self._queue: queue.Queue[Batch] = queue.Queue(maxsize=8)
        self._source = packs(self.tokens, end, num_tokens, seed)
        self._device = device
        threading.Thread(target=self._fill, daemon=True).start()

    def _fill(self) -> None:
        for ids, lengths in self._source:
            self._queue.put(make_batch(ids, lengths, self._device))

    def next(self) -> Batch:
        """Give the next batch."""
        return self._queue.get()
