"""Simulated acceptance, for benchmarks only: drafts are kept by lot, whatever the target says.

    draft i is kept, if those before it are, with probability p;   1 + p + p^2 + .. + p^(T-1) = A

The tokens are then not the target's, so every output of such a run says that it is simulated.
"""

import torch

from soloist.errors import UsageError
from soloist.kernels.sampling import Stream, draft_counter, uniform
from soloist.runtime.buffers import StepBuffers
from soloist.runtime.sampler import Target
from soloist.spec.verify import Verdict, conclude, count_chain


def solve_acceptance(acceptance_length: float, max_width: int) -> float:
    """Find the probability p that gives steps of `max_width` rows this many committed tokens on average.

    Raises:
        UsageError: no probability does.
    """
    if not 1 <= acceptance_length <= max_width:
        raise UsageError(
            f"a simulated acceptance length of {acceptance_length}; with {max_width} rows a step commits 1 to"
            f" {max_width} tokens"
        )
    low, high = 0.0, 1.0
    # Each halving gives a bit.
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**j for j in range(max_width)) < acceptance_length:
            low = middle
        else:
            high = middle
    return high


def accept_by_lot(target: Target, buffers: StepBuffers, context_len: torch.Tensor, probability: float) -> Verdict:
    """Decide by lot how many drafts of a step are kept; the bonus token is the target's.

    Args:
        target: at the T rows of the step, with tokens.
        buffers: the step's drafts, width and ends; only read.
        context_len: () int32, committed tokens before the step.
        probability: of each draft, once it is reached.
    """
    assert target.tokens is not None
    T = target.tokens.shape[0]
    draft_tokens = buffers.input_ids[1:T]
    num_accepted = (buffers.width - 1).clamp_min(0)
    if T > 1:
        uniforms = uniform(buffers.seed, draft_counter(context_len, buffers.rows[1:T]), Stream.ACCEPT)  # (T-1,)
        num_accepted = count_chain(torch.full_like(uniforms, probability), uniforms, num_accepted + 1)
    bonus = target.tokens.index_select(0, num_accepted.view(1))
    return conclude(buffers, draft_tokens, num_accepted, bonus, target.highest)
