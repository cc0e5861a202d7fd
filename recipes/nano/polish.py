"""What unlikelihood training needs: prompts to continue, and packs that say where a continuation repeats itself.

Prompts are beginnings of functions and classes, as `prompts.py` cuts them, and pieces from anywhere in the training
documents, taking turns, so that neither form of a prompt alone is learnt.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import data
import numpy as np
import torch
from data import Batch, make_batch
from tokenizers import Tokenizer
from torch import Tensor

from soloist.train.batches import Text

# Tokens of a prompt from anywhere: a few up to about as many as the other form has.
MIN_LEN, MAX_LEN = 2, 96
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def find_repeats(answer: np.ndarray, run_len: int) -> np.ndarray:
    """Say of each token of an answer (n,) whether it closes a run of `run_len` tokens that has been before: (n,) bool.

    Runs are told apart by a hash of 64 bits.
    """
    is_repeat = np.zeros(len(answer), dtype=bool)
    num_runs = len(answer) - run_len + 1
    if num_runs > 0:
        codes = np.zeros(num_runs, dtype=np.uint64)
        for i in range(run_len):
            codes = codes * HASH_FACTOR + answer[i : i + num_runs].astype(np.uint64) + np.uint64(1)
        _, first, places = np.unique(codes, return_index=True, return_inverse=True)
        is_repeat[run_len - 1 :] = first[places] != np.arange(num_runs)
    return is_repeat


class Prompts:
    """Draws prompts of about the same length.

    Args:
        tokens: (T,) the training documents.
        beginnings: what `prompts.py` wrote, as tokens; with none, prompts are from anywhere alone.
        seed: of the draws.
    """

    def __init__(self, tokens: np.ndarray, beginnings: list[list[int]], seed: int) -> None:
        self._tokens, self._beginnings = tokens, sorted(beginnings, key=len)
        self._random = np.random.default_rng(seed)
        self._num_drawn = 0

    def draw(self, count: int) -> list[list[int]]:
        """Give `count` prompts, or as many as there are."""
        self._num_drawn += 1
        if self._beginnings and self._num_drawn % 2:
            start = self._random.integers(0, max(len(self._beginnings) - count, 0) + 1)
            return self._beginnings[start : start + count]
        length = int(self._random.integers(MIN_LEN, MAX_LEN + 1))
        starts = self._random.integers(0, len(self._tokens) - length, count)
        return [self._tokens[start : start + length].tolist() for start in starts]


def read_beginnings(file: Path, tokenizer_json: Path) -> list[list[int]]:
    """Read what `prompts.py` wrote, as tokens."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    texts = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]


def pack_answers(
    answers: Sequence[Text], num_tokens: int, run_len: int, end: int, device: torch.device
) -> list[tuple[Batch, Tensor]]:
    """Lay answered prompts out in packs of `num_tokens`.

    Returns:
        Packs whose labels are the answers' tokens and -100 elsewhere, and (T,) bool: whether a label closes a run of
        `run_len` tokens that its answer has held before. A pack ends with documents of no account.
    """
    groups: list[list[Text]] = [[]]
    room = num_tokens
    for answer in answers:
        if len(answer.token_ids) > room:
            groups.append([])
            room = num_tokens
        groups[-1].append(answer)
        room -= len(answer.token_ids)
    return [_pack(group, num_tokens, run_len, end, device) for group in groups]


def _pack(answers: list[Text], num_tokens: int, run_len: int, end: int, device: torch.device) -> tuple[Batch, Tensor]:
    lengths = [len(answer.token_ids) for answer in answers]
    rest = num_tokens - sum(lengths)
    fill = [min(rest - start, data.MAX_LEN) for start in range(0, rest, data.MAX_LEN)]
    ids = np.full(num_tokens, end)
    labels = np.full(num_tokens, -100)
    is_repeat = np.zeros(num_tokens, dtype=bool)
    start = 0
    for answer, length in zip(answers, lengths, strict=True):
        stop, first = start + length, start + answer.num_prompt
        ids[start:stop] = answer.token_ids
        # A position is told what the next one holds.
        labels[first - 1 : stop - 1] = ids[first:stop]
        is_repeat[first - 1 : stop - 1] = find_repeats(ids[first:stop], run_len)
        start = stop
    batch = make_batch(ids, np.array(lengths + fill), device)
    return replace(batch, labels=torch.from_numpy(labels).to(device)), torch.from_numpy(is_repeat).to(device)
