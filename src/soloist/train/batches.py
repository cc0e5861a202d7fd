"""What one step trains on: documents drawn for it, and in each the places that blocks begin at.

Owns the order of documents and the choice of anchors, both functions of seed and step alone, so that a run that is
resumed, or spread over processes, sees the same.
"""

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from soloist.train.documents import Documents, send


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt and what the target answered."""

    token_ids: tuple[int, ...]
    # Of the prompt, at least 1.
    num_prompt: int
    # The answer was drawn at; 0: greedy.
    temperature: float

    @property
    def num_candidates(self) -> int:
        """Places that a block can begin at: from the prompt's last token on, with a token to predict."""
        return len(self.token_ids) - self.num_prompt


def digest_of(texts: Sequence[Text]) -> str:
    """Give a number that other texts do not have."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(repr((text.num_prompt, text.temperature, text.token_ids)).encode())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's documents and blocks. n documents, A blocks of B slots in each."""

    documents: Documents
    # (T,) int64.
    input_ids: torch.Tensor
    # (n, A) int64: positions in the document; a document with too few places has some of them twice, as dummies.
    anchors: torch.Tensor
    # (n, A) int64: the tokens there.
    anchor_ids: torch.Tensor
    # (n, A, B) int64: the token before each slot's, and the token that the slot predicts.
    previous_ids: torch.Tensor
    labels: torch.Tensor
    # (n, A, B) int64: rows of the target's hidden states whose law each slot shall have.
    teacher_rows: torch.Tensor
    # (n, A, B) bool: slots that count.
    is_counted: torch.Tensor
    # (n,) fp32: temperature of each document.
    temperatures: torch.Tensor


def choose_texts(num_texts: int, count: int, seed: int, step: int) -> list[int]:
    """Choose the documents of a step: epoch after epoch, each in an order of its own."""
    first, last = step * count, (step + 1) * count
    chosen: list[int] = []
    for epoch in range(first // num_texts, (last - 1) // num_texts + 1):
        start = epoch * num_texts
        chosen += _order(num_texts, seed, epoch)[max(first - start, 0) : min(last - start, num_texts)].tolist()
    return chosen


@functools.lru_cache(maxsize=2)
def _order(num_texts: int, seed: int, epoch: int) -> torch.Tensor:
    """Give the order of an epoch (num_texts,)."""
    return torch.randperm(num_texts, generator=torch.Generator().manual_seed(_mix(seed, epoch, 0)))


def draw_bases(numbers: Sequence[int], seed: int, step: int) -> list[int]:
    """Give what the anchors of each document are drawn from in a step."""
    return [_mix(seed, step, number + 1) for number in numbers]


def make_batch(
    texts: Sequence[Text],
    numbers: Sequence[int],
    *,
    num_anchors: int,
    block_size: int,
    seed: int,
    step: int,
    device: torch.device,
) -> Batch:
    """Put documents into one pack and choose their anchors.

    Args:
        texts: the documents.
        numbers: of the documents in the whole corpus; anchors depend on them, not on what else is in the batch.
        num_anchors: A, the most of a document.
        block_size: B.
        seed: of the run.
        step: of the run.
        device: of the batch.
    """
    lengths = [len(text.token_ids) for text in texts]
    input_ids = torch.tensor(list(itertools.chain.from_iterable(text.token_ids for text in texts)))  # (T,)
    table = [lengths, [text.num_prompt for text in texts], draw_bases(numbers, seed, step)]
    length, num_prompt, bases = send(torch.tensor(table), device)
    return place_blocks(
        send(input_ids, device),
        Documents(lengths, device),
        length,
        num_prompt,
        send(torch.tensor([text.temperature for text in texts]), device),
        bases,
        num_places=max(text.num_candidates for text in texts),
        num_anchors=num_anchors,
        block_size=block_size,
    )


def place_blocks(
    input_ids: torch.Tensor,
    documents: Documents,
    length: torch.Tensor,
    num_prompt: torch.Tensor,
    temperatures: torch.Tensor,
    bases: torch.Tensor,
    *,
    num_places: int,
    num_anchors: int,
    block_size: int,
) -> Batch:
    """Choose anchors on the device, without the host.

    Args:
        input_ids: (T,) int64.
        documents: of these rows; they may be longer than what there is of a text, and what is behind it is never read.
        length: (n,) int64 of the texts.
        num_prompt: (n,) int64.
        temperatures: (n,) fp32.
        bases: (n,) int64, as `draw_bases` gives them.
        num_places: at least the most places of a text that a block can begin at.
        num_anchors: A.
        block_size: B.
    """
    anchors, is_real = _choose_anchors(length - num_prompt, bases, num_places, num_anchors)
    anchors = anchors + num_prompt[:, None] - 1  # (n, A)
    positions = anchors[..., None] + torch.arange(block_size, device=anchors.device)  # (n, A, B)
    last = length[:, None, None] - 1
    first = documents.starts[:, None, None]
    # Slots behind the end look at the last row, and do not count.
    rows = first + positions.minimum(last)
    return Batch(
        documents=documents,
        input_ids=input_ids,
        anchors=anchors,
        anchor_ids=input_ids[rows[..., 0]],
        previous_ids=input_ids[rows],
        labels=input_ids[first + (positions + 1).minimum(last)],
        teacher_rows=rows,
        is_counted=is_real[..., None] & (positions < last),
        temperatures=temperatures,
    )


def _choose_anchors(
    counts: torch.Tensor, bases: torch.Tensor, num_places: int, num_anchors: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose among `counts` (n,) places of each document: (n, A) int64, sorted, and (n, A) bool, which are no dummies.

    Every place of a document gets a random number, and the first A by that are taken.
    """
    counts, bases = counts[:, None], bases[:, None]  # (n, 1)
    place = torch.arange(max(num_places, num_anchors), device=counts.device)  # (P,)
    is_there = place < counts  # (n, P)
    # 62 bits, so that places that are not there come last.
    keys = torch.where(is_there, _scramble(bases + place * (0x9E3779B97F4A7C15 - 2**64)) >> 2, 2**62)
    ranks = keys.argsort(dim=1)[:, :num_anchors]  # (n, A)
    # Places first, in order, then those that are not there.
    chosen = torch.where(ranks < counts, ranks, len(place)).sort(dim=1).values
    is_real = chosen < counts
    return torch.where(is_real, chosen, chosen[:, :1]), is_real


def _scramble(x: torch.Tensor) -> torch.Tensor:
    """Turn int64 into random-looking int64 of 0 and more: splitmix64's finish."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        # Shifts without the sign; products wrap around.
        x = (x ^ (x >> shift & 2 ** (64 - shift) - 1)) * (factor - 2**64)
    return (x ^ (x >> 31 & 2**33 - 1)) & 2**63 - 1


def _mix(*numbers: int) -> int:
    """Turn numbers into a seed; other numbers give another one."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = ((state ^ number) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state % 2**63
