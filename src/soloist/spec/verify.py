"""Lossless acceptance of draft tokens, and where an answer ends. Tensor code throughout: no host decision in between.

With P_t the target's law behind row t of the step (pending token, then drafts d_1 .. d_g) and q_t the law d_{t+1} was
drawn from:

    matching   a = longest prefix with d_{t+1} = y_t, y_t the token the target itself takes at row t; bonus y_a.
               For drafts that are chosen, not drawn (q one-hot), and for greedy targets. y_t is drawn with the random
               number of its position, so the text equals that of decoding without a draft, sampled or greedy.
    chain      accept d_{t+1} while u < P_t(d) / q_t(d); the bonus follows max(P_a - q_a, 0), or P_g if all passed.
    block      p_0 = 1, p_i = min(p_{i-1} P_{i-1}(d_i) / q_{i-1}(d_i), 1), Z_i = sum_v max(p_i P_i(v) - q_i(v), 0),
               h_i = Z_i / (Z_i + 1 - p_i), h_g = p_g; a = the largest i with u_i < h_i, not the first failure;
               the bonus follows max(p_a P_a - q_a, 0), or P_g.

Committed are the accepted drafts and the bonus, up to the first that ends the answer.

Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1; Sun et al. 2024 (arXiv 2403.10444), algorithm 2.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from soloist.kernels.check import use_reference
from soloist.kernels.launch import HAS_TRITON
from soloist.kernels.sampling import Stream, draft_counter, draw, uniform
from soloist.runtime.buffers import FinishCode, SamplingPlan, StepBuffers
from soloist.runtime.ring import HEADER_WORDS, TokenRing
from soloist.runtime.sampler import Target

if HAS_TRITON:
    from soloist.kernels import step_end_triton


class Rule(Enum):
    """How drafts with a law are verified."""

    CHAIN = "chain"
    BLOCK = "block"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a step of T rows commits."""

    # (T,) int64: accepted drafts, then the bonus token; rows from `num_committed` on mean nothing.
    committed_tokens: torch.Tensor
    # () int32, 0..T: tokens emitted, and rows of the step that enter the cache. 0 once the answer has ended.
    num_committed: torch.Tensor
    # () int32: drafts among the committed tokens.
    num_accepted: torch.Tensor
    # () int32: the `FinishCode` after this step.
    finish_code: torch.Tensor


def accept(target: Target, buffers: StepBuffers, context_len: torch.Tensor, rule: Rule) -> Verdict:
    """Decide which drafts of a step are kept, add the target's own next token, and cut where the answer ends.

    Args:
        target: at the T rows of the step.
        buffers: the step's drafts, width and ends; only read.
        context_len: () int32, committed tokens before the step.
        rule: for targets with a law.
    """
    if target.tokens is not None:
        if not use_reference(target.tokens):
            return _conclude_on_gpu(buffers, target.highest, target_tokens=target.tokens)
        draft_tokens = buffers.input_ids[1 : target.tokens.shape[0]]  # (T-1,)
        num_accepted = count_matching(target.tokens, draft_tokens, buffers.width)
        bonus = target.tokens.index_select(0, num_accepted.view(1))
        return conclude(buffers, draft_tokens, num_accepted, bonus, target.highest)
    assert target.probs is not None and buffers.draft_probs is not None
    T = target.probs.shape[0]
    draft_tokens, draft_probs = buffers.input_ids[1:T], buffers.draft_probs[: T - 1]
    counters = draft_counter(context_len, buffers.rows[1:T])
    uniforms = uniform(buffers.seed, counters, Stream.ACCEPT)  # (T-1,)
    if rule is Rule.CHAIN:
        passing = chain_passing(target.probs, draft_tokens, draft_probs)
        num_accepted = count_chain(passing, uniforms, buffers.width)
        scale = passing.new_ones(())
    else:
        passing, scales = block_passing(target.probs, draft_tokens, draft_probs, buffers.width)
        num_accepted = count_block(passing, uniforms)
        scale = scales.index_select(0, num_accepted.view(1))
    law = bonus_law(target.probs, draft_probs, num_accepted, buffers.width, scale)
    position = (context_len + num_accepted + 1).long().view(1)
    bonus = draw(law, uniform(buffers.seed, position, Stream.SAMPLE))
    return conclude(buffers, draft_tokens, num_accepted, bonus, target.highest)


def _conclude_on_gpu(
    buffers: StepBuffers,
    highest: torch.Tensor,
    *,
    target_tokens: torch.Tensor | None = None,
    num_accepted: torch.Tensor | None = None,
    bonus: torch.Tensor | None = None,
) -> Verdict:
    """Match (with `target_tokens`) and conclude in one launch."""
    tokens, *counts = step_end_triton.conclude(
        target_tokens,
        highest,
        num_accepted,
        bonus,
        input_ids=buffers.input_ids,
        width=buffers.width,
        num_left=buffers.num_left,
        stop_mask=buffers.stop_mask,
        finish_code=buffers.finish_code,
        end_codes=(FinishCode.LENGTH, FinishCode.STOP, FinishCode.NOT_FINITE),
    )
    return Verdict(committed_tokens=tokens, num_committed=counts[0], num_accepted=counts[1], finish_code=counts[2])


def count_matching(target_tokens: torch.Tensor, draft_tokens: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """Count the leading drafts among the first `width - 1` that are the target's own tokens.

    Args:
        target_tokens: (T,) int64.
        draft_tokens: (T-1,) int64.
        width: () int32; 0, behind the end of an answer, counts none.

    Returns:
        () int32.
    """
    num_drafts = (width - 1).clamp_min(0)
    if draft_tokens.shape[0] == 0:
        return num_drafts
    is_equal = (draft_tokens == target_tokens[:-1]).int()
    return torch.minimum(is_equal.cumprod(0).sum(dtype=torch.int32), num_drafts)


def _ratios(target_probs: torch.Tensor, draft_tokens: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Divide target and draft probability of each draft token: (T-1,)."""
    chosen = draft_tokens[:, None]
    wanted = target_probs[:-1].gather(1, chosen).squeeze(1)
    # A drafted token has a probability; the clamp only keeps padding rows from 0 / 0.
    drawn = draft_probs.gather(1, chosen).squeeze(1).clamp_min(torch.finfo(draft_probs.dtype).tiny)
    return wanted / drawn


def chain_passing(target_probs: torch.Tensor, draft_tokens: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Give the probability with which each draft passes once it is reached.

    Args:
        target_probs: (T, N).
        draft_tokens: (T-1,) int64.
        draft_probs: (T-1, N), the laws they were drawn from.

    Returns:
        (T-1,) in [0, 1].
    """
    return _ratios(target_probs, draft_tokens, draft_probs).clamp_max(1)


def count_chain(passing: torch.Tensor, uniforms: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """Count the leading drafts that pass: () int32; a width of 0, behind the end of an answer, counts none."""
    num_passed = (uniforms < passing).int().cumprod(0).sum(dtype=torch.int32)
    return torch.minimum(num_passed, (width - 1).clamp_min(0))


def block_passing(
    target_probs: torch.Tensor, draft_tokens: torch.Tensor, draft_probs: torch.Tensor, width: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give h_i, the probability with which the prefix of i drafts passes, and the scale p_i of the bonus law behind it.

    Args:
        target_probs: (T, N).
        draft_tokens: (T-1,) int64.
        draft_probs: (T-1, N).
        width: () int32: g = width - 1 drafts count.

    Returns:
        (T-1,) h_1 .. h_{T-1}, 0 behind g; (T,) p_0 .. p_{T-1}.
    """
    ratios = _ratios(target_probs, draft_tokens, draft_probs)
    scales = [torch.ones_like(ratios[0])]
    for ratio in ratios:
        scales.append((scales[-1] * ratio).clamp_max(1))
    scale = torch.stack(scales)  # (T,)
    inner = (scale[1:-1, None] * target_probs[1:-1] - draft_probs[1:]).clamp_min(0).sum(-1)  # (T-2,): Z_1 .. Z_{T-2}
    # Exactly 0 / 0, a draft law equal to the target's, counts as 0.
    room = inner + 1 - scale[1:-1]
    prefix = torch.where(room > 0, inner / room, 0.0)
    last = scale[-1:]
    counts = torch.arange(1, scale.shape[0], device=scale.device)  # (T-1,)
    passing = torch.where(counts == width - 1, scale[1:], torch.cat([prefix, last]))
    return torch.where(counts < width, passing, 0.0), scale


def count_block(passing: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Give the length of the longest prefix that passes: () int32."""
    counts = torch.arange(1, passing.shape[0] + 1, dtype=torch.int32, device=passing.device)
    return (counts * (uniforms < passing)).amax()


def bonus_law(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    num_accepted: torch.Tensor,
    width: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """Give the law of the token behind the accepted drafts.

    Args:
        target_probs: (T, N).
        draft_probs: (T-1, N).
        num_accepted: () int32.
        width: () int32.
        scale: () or (1,): 1 for the chain, p_a for a block.

    Returns:
        (1, N), not normalised.
    """
    row = num_accepted.view(1)
    wanted = target_probs.index_select(0, row)  # (1, N)
    drawn = draft_probs.index_select(0, row.clamp_max(draft_probs.shape[0] - 1))
    residual = (scale * wanted - drawn).clamp_min(0)
    # Behind the last draft nothing was refused; a residual of nothing means that the laws differ by rounding only.
    is_whole = (row == width - 1) | (residual.sum() <= 0)
    return torch.where(is_whole, wanted, residual)


def conclude(
    buffers: StepBuffers,
    draft_tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    bonus: torch.Tensor,
    highest: torch.Tensor,
) -> Verdict:
    """Put the committed tokens together and cut them behind the first that ends the answer.

    Args:
        buffers: ends and progress of the request; only read.
        draft_tokens: (T-1,) int64.
        num_accepted: () int32, at most T-1.
        bonus: (1,) int64.
        highest: (T,) fp32, the highest logit of each row. If one of a row that counts is not finite, nothing is
            committed and the answer ends.
    """
    if not use_reference(highest):
        return _conclude_on_gpu(buffers, highest, num_accepted=num_accepted, bonus=bonus)
    T = draft_tokens.shape[0] + 1
    tokens = bonus  # (T,)
    if T > 1:
        tokens = torch.where(buffers.rows[:T] < num_accepted, torch.cat([draft_tokens, bonus]), bonus)
    is_stop = buffers.stop_mask.index_select(0, tokens)  # (T,)
    is_finite = (highest.isfinite() | (buffers.rows[:T] >= buffers.width)).all()
    num_before_stop = (~is_stop).int().cumprod(0).sum(dtype=torch.int32)
    num_allowed = buffers.num_left * is_finite
    num_committed = torch.minimum(torch.minimum(num_accepted, num_before_stop) + 1, num_allowed)
    # In the order of `end_codes`. Behind the end nothing is left and nothing committed; the old code is no lower.
    applies = torch.stack([num_committed == buffers.num_left, num_before_stop < num_committed, ~is_finite])
    return Verdict(
        committed_tokens=tokens,
        num_committed=num_committed,
        num_accepted=torch.minimum(num_accepted, num_committed),
        finish_code=torch.maximum(buffers.finish_code, (applies * buffers.end_codes).amax()),
    )


def finish(
    verdict: Verdict,
    buffers: StepBuffers,
    ring: TokenRing,
    plan: SamplingPlan,
    *,
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> None:
    """End a step: publish its record and advance the request.

    Args:
        verdict: of this step.
        buffers: advanced in place.
        ring: gets the record.
        plan: of the request.
        logprobs: as `TokenRing.publish` takes them.
    """
    tokens, num_committed = verdict.committed_tokens, verdict.num_committed
    if not tokens.is_cuda:
        num_drafted = (buffers.width - 1).clamp_min(0)
        ring.publish(tokens, num_committed, num_drafted, verdict.num_accepted, verdict.finish_code, logprobs)
        buffers.advance(tokens, num_committed, verdict.finish_code, plan)
        return
    # The ring lies in host memory, which only a kernel reaches without waiting.
    if logprobs is not None:
        for rows, slots in zip(logprobs, (ring.logprobs, ring.top_ids, ring.top_logprobs), strict=True):
            step_end_triton.copy_to_slot(rows, slots, ring.num_published)
    if plan.has_penalties:
        buffers.count(tokens, num_committed)
    step_end_triton.finish(
        tokens,
        num_committed,
        verdict.num_accepted,
        verdict.finish_code,
        input_ids=buffers.input_ids,
        width=buffers.width,
        num_left=buffers.num_left,
        num_unstoppable=buffers.num_unstoppable,
        finish_code=buffers.finish_code,
        is_stop_requested=buffers.is_stop_requested,
        num_published=ring.num_published,
        records=ring.records,
        header=HEADER_WORDS,
    )
