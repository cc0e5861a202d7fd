"""Packing: documents of any lengths one behind the other, without a batch axis and without seeing each other.

Owns where each document's rows lie in the two arrangements that operators compute in: padded documents for attention,
chunks for the recurrence. Everything is known on the host, so no operator waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Rows of a recurrence that one triangular system ties together.
CHUNK = 64


def send(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host to a device, without waiting for what the device is at."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


@dataclass(frozen=True, kw_only=True)
class PaddedGroup:
    """Documents of about the same length, side by side."""

    # (n,) int64: which documents.
    documents: torch.Tensor
    # (n, S) int64: the row of each position; behind a document's end, its last row.
    rows: torch.Tensor

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Bring packed rows (T, ..) side by side: (n, S, ..)."""
        return x.index_select(0, self.rows.flatten()).view(*self.rows.shape, *x.shape[1:])


class Documents:
    """Lengths of packed documents, and the index tables that they give.

    Args:
        lengths: of the documents in the order of the pack, each at least 1.
        device: of the tables.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        assert lengths and min(lengths) >= 1, f"documents have at least one token: {lengths}"
        self.lengths = tuple(lengths)
        self.num_tokens = sum(lengths)
        self.device = torch.device(device)
        ends = torch.tensor(lengths).cumsum(0)
        self._starts = ends - torch.tensor(lengths)  # (n,), on the host
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))  # (T,)
        # (T,) int64: which document a row is of, and where in it.
        self.document = send(document, self.device)
        self.positions = send(torch.arange(self.num_tokens) - self._starts[document], self.device)
        self.starts = send(self._starts, self.device)
        # Longest first.
        self._order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        self._groups: tuple[list[PaddedGroup], torch.Tensor] | None = None
        self._chunks: Chunks | None = None

    def padded(self) -> tuple[list[PaddedGroup], torch.Tensor]:
        """Group documents so that padding at most doubles them.

        Returns:
            The groups, and (T,) int64: where each row is in the groups' positions, laid out one behind the other.
        """
        if self._groups is None:
            groups, back, offset = [], torch.empty(self.num_tokens, dtype=torch.int64), 0
            left = list(self._order)
            while left:
                longest = self.lengths[left[0]]
                own = [i for i in left if 2 * self.lengths[i] > longest]
                left = left[len(own) :]
                position = torch.arange(longest)
                starts = self._starts[own, None]  # (n, 1)
                length = torch.tensor([self.lengths[i] for i in own])[:, None]
                rows = starts + position.minimum(length - 1)  # (n, S)
                documents = send(torch.tensor(own), self.device)
                groups.append(PaddedGroup(documents=documents, rows=send(rows, self.device)))
                is_real = position < length  # (n, S)
                back[rows[is_real]] = offset + is_real.flatten().nonzero()[:, 0]
                offset += len(own) * longest
            self._groups = groups, send(back, self.device)
        return self._groups

    def chunks(self) -> "Chunks":
        """Cut documents into chunks of a recurrence."""
        if self._chunks is None:
            self._chunks = Chunks.cut([self.lengths[i] for i in self._order], self._starts[self._order], self.device)
        return self._chunks


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The j-th chunks of all documents side by side, then the next; the longest document first.

    So the documents that still go on are always the first of those before, and a scan takes as many steps as the
    longest document has chunks.
    """

    # (n * C,) int64: the row of each place; the last row of its document behind its end.
    rows: torch.Tensor
    # (n, 1, C, 1) fp32: 1 for real rows, 0 for padding.
    is_real: torch.Tensor
    # Whether there is no padding.
    is_full: bool
    # (T,) int64: the place of each row.
    places: torch.Tensor
    # Documents that have a j-th chunk, for each j.
    counts: tuple[int, ...]

    @classmethod
    def cut(cls, lengths: list[int], starts: torch.Tensor, device: torch.device) -> "Chunks":
        """Cut documents of falling lengths, which begin at `starts` (n,)."""
        num_chunks = [-(-length // CHUNK) for length in lengths]
        counts = [sum(n > j for n in num_chunks) for j in range(max(num_chunks))]
        length = torch.tensor(lengths)
        position = torch.cat(
            [j * CHUNK + torch.arange(CHUNK).expand(count, CHUNK) for j, count in enumerate(counts)]
        )  # (n, C)
        document = torch.cat([torch.arange(count) for count in counts])[:, None]  # (n, 1)
        is_real = position < length[document]
        rows = starts[document] + position.minimum(length[document] - 1)  # (n, C)
        places = torch.empty(sum(lengths), dtype=torch.int64)
        places[rows[is_real]] = is_real.flatten().nonzero()[:, 0]
        return cls(
            rows=send(rows.flatten(), device),
            is_real=send(is_real[:, None, :, None].float(), device),
            is_full=all(length % CHUNK == 0 for length in lengths),
            places=send(places, device),
            counts=tuple(counts),
        )
