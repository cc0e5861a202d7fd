"""Prompt lookup: what followed the last few tokens where they last occurred, in prompt or answer, is the proposal.

No weights, so it works with every model. Without an occurrence it proposes nothing, and the step is an ordinary one.

Source: Saxena 2023, Prompt Lookup Decoding (github.com/apoorvumang/prompt-lookup-decoding, Apache-2.0), the idea only.
"""

import torch

from soloist.kernels.check import use_reference
from soloist.kernels.launch import HAS_TRITON
from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.spec.drafter import Drafter
from soloist.spec.history import PADDING, TokenHistory
from soloist.spec.verify import Verdict

if HAS_TRITON:
    from soloist.kernels import lookup_triton

DEFAULT_DRAFTS = 7
# Tokens compared, the longest match first. One or two recur too often to say what follows them.
MIN_MATCH, MAX_MATCH = 3, PADDING


def find_continuation(
    padded_ids: torch.Tensor, last: torch.Tensor, candidates: torch.Tensor, num_drafts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the latest of the longest earlier matches of a sequence's end, and read on behind it.

    m_p   = number of leading j < MAX_MATCH with id[p - j] = id[last - j]          p < last
    p*    = the largest p among those with the largest m_p >= MIN_MATCH
    draft = id[p* + 1], id[p* + 2], ..; behind `last` the cycle begins again, as in a text that repeats itself

    Args:
        padded_ids: (PADDING + S,) int64, the sequence behind entries that no id equals.
        last: () int32, position of the sequence's last token.
        candidates: (C,) int64, the positions p to look at, at least one.
        num_drafts: tokens to read.

    Returns:
        (num_drafts,) int64 tokens, ids of the sequence; () bool, whether there is a match.
    """
    places = PADDING - torch.arange(MAX_MATCH, device=last.device)  # (MAX_MATCH,)
    ends = padded_ids.index_select(0, places + last)  # (MAX_MATCH,)
    windows = padded_ids.index_select(0, (candidates[:, None] + places).view(-1)).view(-1, MAX_MATCH)
    num_equal = (windows == ends).int().cumprod(1).sum(1)  # (C,)
    is_match = (num_equal >= MIN_MATCH) & (candidates < last)
    # A longer match outweighs any position; among equals the latest wins.
    stride = padded_ids.shape[0]
    best = torch.where(is_match, num_equal * stride + candidates, -1).amax()
    has_match = best >= 0
    at = torch.where(has_match, best % stride, last - 1)
    ahead = torch.arange(num_drafts, device=last.device) % (last - at)  # (num_drafts,)
    return padded_ids.index_select(0, PADDING + at + 1 + ahead), has_match


class PromptLookup(Drafter):
    """Proposes what followed the sequence's last tokens where they last occurred.

    Args:
        max_context_len: most tokens of a request.
        max_drafts: tokens of a proposal, 1..15.
        device: where the steps run.
        is_fixed_shape: whether no shape may depend on data, as in a captured step. None: not on a CPU.
    """

    name = "ngram"

    def __init__(
        self, *, max_context_len: int, max_drafts: int, device: torch.device, is_fixed_shape: bool | None = None
    ) -> None:
        self.max_drafts = max_drafts
        self.is_fixed_shape = device.type != "cpu" if is_fixed_shape is None else is_fixed_shape
        self.history = TokenHistory.allocate(max_context_len, 1 + max_drafts, device)
        # (S,) int64: 0, 1, ..
        self.positions = torch.arange(max_context_len, device=device)
        # () int32: position of the step's pending token.
        self.context_len = torch.zeros((), dtype=torch.int32, device=device)

    def begin(self, prompt_ids: torch.Tensor, plan: SamplingPlan) -> None:
        self.history.begin(prompt_ids)

    def propose(self, buffers: StepBuffers, context_len: torch.Tensor) -> None:
        self.context_len.copy_(context_len)
        if not use_reference(buffers.input_ids):
            lookup_triton.lookup(
                self.history.padded_ids,
                context_len,
                buffers.input_ids,
                buffers.width,
                num_padding=PADDING,
                num_positions=self.positions.shape[0],
                min_match=MIN_MATCH,
                max_match=MAX_MATCH,
            )
            return
        candidates = self._candidates(context_len)
        if candidates.shape[0] == 0:
            buffers.width.clamp_max_(1)
            return
        tokens, has_match = find_continuation(self.history.padded_ids, context_len, candidates, self.max_drafts)
        # Without a match these are padding, and ids all the same: the pending token's.
        buffers.input_ids[1:].copy_(torch.where(has_match, tokens, buffers.input_ids[0]))
        buffers.width.copy_(torch.where(has_match, buffers.width, buffers.width.clamp_max(1)))

    def _candidates(self, context_len: torch.Tensor) -> torch.Tensor:
        """Give the positions at which a match may end: (C,) int64."""
        if self.is_fixed_shape:
            return self.positions
        # Few places hold the last token, and on the CPU a shape may depend on how many.
        ids = self.history.ids[: int(context_len) + 1]
        return (ids[:-1] == ids[-1]).nonzero().squeeze(1)

    def update(
        self, buffers: StepBuffers, verdict: Verdict, hidden: torch.Tensor, captured: torch.Tensor | None
    ) -> None:
        self.history.record(verdict.committed_tokens, self.context_len)
