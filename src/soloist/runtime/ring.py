"""The ring through which committed tokens reach the host: the step publishes, the host polls.

Owns the layout of a record. Every step writes one slot, and its own number last, so the host knows a complete record by
the number it expects. For a GPU the records lie in pinned host memory, which its kernels write directly.
"""

import ctypes
from dataclasses import dataclass

import torch

from soloist.kernels.sampling import MAX_TOP_LOGPROBS
from soloist.runtime.buffers import FinishCode

# Words of a record before its tokens: step number, committed, drafted and accepted counts, finish code.
HEADER_WORDS = 5


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """How likely the model itself finds a token: natural logarithms, before penalties, temperature and filters."""

    token_id: int
    logprob: float
    # (token id, logprob) of the likeliest tokens, falling.
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step committed, on the host."""

    token_ids: list[int]
    # One per token, or none at all.
    logprobs: list[TokenLogprob]
    # Drafts that were verified, and those of them that were kept.
    num_drafted: int
    num_accepted: int
    finish_code: FinishCode


class TokenRing:
    """A ring of the records of the last steps.

    Args:
        num_slots: steps that may be ahead of the host, and one more.
        max_width: most tokens of a step.
        num_tokens: ids that may be drawn.
        device: where the steps run.
    """

    def __init__(self, *, num_slots: int, max_width: int, num_tokens: int, device: torch.device | str = "cpu") -> None:
        M = min(MAX_TOP_LOGPROBS, num_tokens)
        is_pinned = torch.device(device).type == "cuda"

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=is_pinned)

        # (slots, 5 + T) int64: header, then committed tokens.
        self.records = zeros(num_slots, HEADER_WORDS + max_width, dtype=torch.int64)
        # The same memory, one word a look: the host asks for a step's number many times before it is there.
        self._words = (ctypes.c_int64 * self.records.numel()).from_address(self.records.data_ptr())
        # (slots, T) fp32: log probability of each committed token.
        self.logprobs = zeros(num_slots, max_width, dtype=torch.float32)
        # (slots, T, M) int64 and fp32: the likeliest tokens and their log probabilities.
        self.top_ids = zeros(num_slots, max_width, M, dtype=torch.int64)
        self.top_logprobs = zeros(num_slots, max_width, M, dtype=torch.float32)
        # (1,) int64: steps published in this request.
        self.num_published = torch.zeros(1, dtype=torch.int64, device=device)
        self._num_polled = 0

    @property
    def num_slots(self) -> int:
        """Records that the ring holds."""
        return self.records.shape[0]

    def reset(self) -> None:
        """Forget every record, before a request's first step."""
        self.records[:, 0] = 0
        self.num_published.zero_()
        self._num_polled = 0

    def publish(
        self,
        committed_tokens: torch.Tensor,
        num_committed: torch.Tensor,
        num_drafted: torch.Tensor,
        num_accepted: torch.Tensor,
        finish_code: torch.Tensor,
        logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Write the record of one step; part of the step.

        Args:
            committed_tokens: (T,) int64; T may be less than the most.
            num_committed: () int32.
            num_drafted: () int32.
            num_accepted: () int32.
            finish_code: () int32.
            logprobs: (T,) of the tokens, (T, M) ids and (T, M) log probabilities of the likeliest; None: not asked for.
        """
        T = committed_tokens.shape[0]
        slot = self.num_published % self.num_slots  # (1,)
        if logprobs is not None:
            for ring, rows in zip((self.logprobs, self.top_ids, self.top_logprobs), logprobs, strict=True):
                ring[:, :T].index_copy_(0, slot, rows[None])
        self.num_published += 1
        counts = torch.stack([num_committed, num_drafted, num_accepted, finish_code]).long()
        record = torch.cat([self.num_published, counts, committed_tokens])  # (5 + T,)
        self.records[:, : HEADER_WORDS + T].index_copy_(0, slot, record[None])

    def poll(self, num_top: int | None = None) -> StepRecord | None:
        """Take the next record if its step has finished.

        Args:
            num_top: likeliest tokens reported beside each token; None: the step published no log probabilities.
        """
        slot, num_words = self._num_polled % self.num_slots, self.records.shape[1]
        begin = slot * num_words
        if self._words[begin] != self._num_polled + 1:
            return None
        self._num_polled += 1
        _, num_committed, num_drafted, num_accepted, code, *tokens = self._words[begin : begin + num_words]
        token_ids = tokens[:num_committed]
        return StepRecord(
            token_ids=token_ids,
            logprobs=[] if num_top is None else self._read_logprobs(slot, token_ids, num_top),
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            finish_code=FinishCode(code),
        )

    def _read_logprobs(self, slot: int, token_ids: list[int], num_top: int) -> list[TokenLogprob]:
        T = len(token_ids)
        chosen = self.logprobs[slot, :T].tolist()
        ids = self.top_ids[slot, :T, :num_top].tolist()
        values = self.top_logprobs[slot, :T, :num_top].tolist()
        return [
            TokenLogprob(token_id=token_ids[t], logprob=chosen[t], top=tuple(zip(ids[t], values[t], strict=True)))
            for t in range(T)
        ]
