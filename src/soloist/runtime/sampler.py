"""From logits to what the target wants at each row of a step: its tokens, or the law to compare a draft with.

Owns the order in which a request's parameters act: logit bias, penalties, the ban on end tokens, temperature, filters.
Accepting drafts is `spec.verify`'s.
"""

from dataclasses import dataclass

import torch

from soloist.kernels.sampling import Stream, draw, likeliest, penalize, target_probs, uniform
from soloist.runtime.buffers import SamplingPlan, StepBuffers


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target's own will at T rows. Exactly one of `tokens` and `probs` is given."""

    # (T,) int64: the token the target takes at each row, as it would without a draft.
    tokens: torch.Tensor | None
    # (T, N): the law at each row, for drafts drawn from a law of their own.
    probs: torch.Tensor | None
    # (T,) fp32: the highest logit, which is not finite if the row holds a NaN or +inf, or nothing but -inf.
    highest: torch.Tensor


def make_target(
    logits: torch.Tensor,
    buffers: StepBuffers,
    context_len: torch.Tensor,
    plan: SamplingPlan,
    *,
    has_draft_law: bool,
) -> Target:
    """Apply a request's parameters to the logits of a step.

    Row t draws the token of position `context_len + t + 1` with that position's own random number, so the tokens do not
    depend on how positions are grouped into steps.

    Args:
        logits: (T, N) fp32, row t for the token behind row t of `buffers.input_ids`.
        buffers: the request's parameters and draft tokens.
        context_len: () int32, committed tokens before the step.
        plan: parts of the sampler that the request needs.
        has_draft_law: whether the drafts were drawn from `buffers.draft_probs`; a greedy request never compares laws.
    """
    rows = buffers.rows[: logits.shape[0]]  # (T,)
    logits = _adjust(logits, buffers, rows, plan)
    if plan.is_greedy:
        tokens, highest = likeliest(logits)
        return Target(tokens=tokens, probs=None, highest=highest)
    highest = logits.amax(-1)
    filters = (buffers.top_k, buffers.top_p, buffers.min_p)
    probs = target_probs(logits, buffers.temperature, *filters, has_filters=plan.has_filters)
    if has_draft_law:
        return Target(tokens=None, probs=probs, highest=highest)
    positions = context_len + rows.long() + 1
    tokens = draw(probs, uniform(buffers.seed, positions, Stream.SAMPLE))
    return Target(tokens=tokens, probs=None, highest=highest)


def _adjust(logits: torch.Tensor, buffers: StepBuffers, rows: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
    if plan.has_constraint:
        logits = logits.masked_fill(~buffers.is_allowed[: logits.shape[0]], float("-inf"))
    if plan.has_logit_bias:
        logits = logits + buffers.logit_bias
    if plan.has_penalties:
        logits = penalize(
            logits,
            buffers.input_ids[1 : logits.shape[0]],
            buffers.prompt_mask,
            buffers.output_counts,
            buffers.repetition_penalty,
            buffers.presence_penalty,
            buffers.frequency_penalty,
        )
    if plan.has_min_tokens:
        is_early = rows < buffers.num_unstoppable  # (T,)
        logits = logits.masked_fill(is_early[:, None] & buffers.stop_mask, float("-inf"))
    return logits
