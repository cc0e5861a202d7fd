"""The token ids of a request on the device, for drafters that read them."""

from dataclasses import dataclass

import torch

from soloist.kernels.check import use_reference
from soloist.kernels.launch import HAS_TRITON

if HAS_TRITON:
    from soloist.kernels import lookup_triton

# Entries before the first token, so that a window of a few tokens may begin anywhere.
PADDING = 4
# Stands where no token is; no id equals it.
NO_TOKEN = -1


@dataclass(frozen=True, kw_only=True)
class TokenHistory:
    """Prompt and answer, the pending token included. S is the most tokens of a request, T the rows of a step."""

    # (PADDING + S + T,) int64: no tokens, then the sequence, then room for the padding rows of a last step.
    padded_ids: torch.Tensor

    @classmethod
    def allocate(cls, max_context_len: int, max_width: int, device: torch.device) -> "TokenHistory":
        """Allocate an empty history."""
        shape = (PADDING + max_context_len + max_width,)
        return cls(padded_ids=torch.full(shape, NO_TOKEN, dtype=torch.int64, device=device))

    @property
    def ids(self) -> torch.Tensor:
        """The sequence by position: (S + T,) int64; what is behind the pending token means nothing."""
        return self.padded_ids[PADDING:]

    def begin(self, prompt_ids: torch.Tensor) -> None:
        """Take a prompt: (n,) int64."""
        self.ids[: prompt_ids.shape[0]] = prompt_ids

    def record(self, committed_tokens: torch.Tensor, context_len: torch.Tensor) -> None:
        """Write a step's tokens behind its pending token; those that were not committed are overwritten later.

        Args:
            committed_tokens: (T,) int64.
            context_len: () int32, position of the step's pending token.
        """
        if not use_reference(committed_tokens):
            lookup_triton.record(self.padded_ids, context_len, committed_tokens, num_padding=PADDING)
            return
        places = context_len + 1 + torch.arange(committed_tokens.shape[0], device=committed_tokens.device)  # (T,)
        self.ids.index_copy_(0, places, committed_tokens)
