"""The loss of a draft: agreement with the text, with the target's law, and the length of what will be accepted.

With q the draft's law at slot k of a block, p the target's, w_k = exp(-k / gamma) for slots that count, else 0:

    L_ce   = sum w (-log q[label]) / sum w
    L_l1   = sum w |p - q|_1 / sum w                       twice the total variation
    L_conf = sum w BCE(c, a) / sum w                       a = sum min(p, q), detached: the acceptance at this slot
    L_len  = -sum_blocks sum_k W_k log a_k / blocks        W_k = sum_{m >= k} prod_{j <= m} a~_j, detached

The gradient of L_len is that of minus the expected number of accepted drafts if a~ = a; a floor f in
a~ = (1 - f) a + f lets the late slots learn before the early ones are right.

Logits exist for a few rows at a time and once: values and gradients are made together, by their formulas

    CE: q - 1[label]        L1: 2 V        -log a: V / a        V_v = -q_v (1[q_v < p_v] - sum_u q_u 1[q_u < p_u])

Source: DSpark (arXiv 2607.05147); LK losses (arXiv 2602.23881); D-PACE (arXiv 2605.18810) for the form of W.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from soloist.train.operators import widen
from soloist.train.settings import ObjectiveSettings

# Rows of a matrix that products on a GPU take at once, and their strides are aligned to.
TILE = 64
# Below this an acceptance counts as this in the logarithm's gradient.
MIN_ACCEPTANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class SlotWeights:
    """How much each slot counts, already divided by the sums over all processes. n blocks of B slots."""

    # (n*B,) fp32 each.
    ce: torch.Tensor
    l1: torch.Tensor
    confidence: torch.Tensor
    # (n, B) fp32: 1 / number of blocks where a slot counts, times the weight of the length term; else 0.
    length: torch.Tensor
    length_floor: float


def slot_weights(is_counted: torch.Tensor, settings: ObjectiveSettings) -> torch.Tensor:
    """Give w (n, B) for slots that count (n, B)."""
    B = is_counted.shape[-1]
    gamma = settings.decay_gamma or B / 2
    return torch.exp(-torch.arange(B, device=is_counted.device) / gamma) * is_counted


def make_weights(
    is_counted: torch.Tensor,
    settings: ObjectiveSettings,
    *,
    is_last_stage: bool,
    total_weight: torch.Tensor,
    total_blocks: torch.Tensor,
) -> SlotWeights:
    """Weigh the slots of one process.

    Args:
        is_counted: (n, B) bool.
        settings: of the loss.
        is_last_stage: whether the length term is on, instead of CE and L1.
        total_weight: () sum of w over all processes.
        total_blocks: () blocks with a slot that counts, over all processes.
    """
    w = (slot_weights(is_counted, settings) / total_weight).flatten()
    off = torch.zeros_like(w)
    length = is_counted * (settings.length_weight / total_blocks)
    return SlotWeights(
        ce=off if is_last_stage else settings.ce_weight * w,
        l1=off if is_last_stage else settings.l1_weight * w,
        confidence=settings.confidence_weight * w,
        length=length if is_last_stage else torch.zeros_like(length),
        length_floor=settings.length_floor,
    )


@dataclass(frozen=True, kw_only=True)
class SlotFigures:
    """What was found at each slot, detached: (n, B) fp32 each."""

    # Sum of min(p, q).
    acceptance: torch.Tensor
    # 1 where both laws have the same likeliest token.
    agreement: torch.Tensor
    ce: torch.Tensor


def _expected_weights(acceptance: torch.Tensor, is_counted: torch.Tensor, floor: float) -> torch.Tensor:
    """Give W (n, B) of acceptances (n, B)."""
    lifted = torch.where(is_counted, (1 - floor) * acceptance + floor, 0.0)
    survival = lifted.cumprod(dim=1)
    return survival.flip(1).cumsum(1).flip(1)


class _HeadLoss(torch.autograd.Function):
    """CE, L1 and length terms of rows of hidden states, logits held for `rows` at a time."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: torch.Tensor,
        markov: torch.Tensor | None,
        w2: torch.Tensor | None,
        lm_head: torch.Tensor,
        teacher: torch.Tensor,
        labels: torch.Tensor,
        sharpness: torch.Tensor,
        weights: SlotWeights,
        rows: int,
        is_compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        B = weights.length.shape[1]
        step = max(rows // B, 1) * B
        row_loss = _compiled_row_loss() if is_compiled else _row_loss
        loss = hidden.new_zeros((), dtype=widen(hidden).dtype)
        figures = torch.empty(3, hidden.shape[0], dtype=loss.dtype, device=hidden.device)
        d_hidden = torch.empty_like(hidden)
        d_markov = None if markov is None else torch.empty_like(markov)
        d_w2 = None if w2 is None else torch.zeros_like(w2)
        num_tokens = lm_head.shape[0]
        head = _pad_rows(lm_head.to(hidden.dtype))  # (N', D), from here on
        map2 = None if w2 is None else _pad_rows(w2[:num_tokens].to(hidden.dtype))
        for start in range(0, hidden.shape[0], step):
            own = slice(start, min(start + step, hidden.shape[0]))
            logits = F.linear(hidden[own], head)  # (rows, N')
            bias = None if markov is None or map2 is None else F.linear(markov[own], map2)
            wanted = F.linear(teacher[own], head)
            parts = labels[own], sharpness[own], weights.ce[own], weights.l1[own]
            length = weights.length[start // B : own.stop // B]
            value, figures[:, own], dz = row_loss(
                logits, bias, wanted, *parts, length, weights.length_floor, num_tokens
            )
            pull = (-weights.ce[own] * sharpness[own]).to(dz.dtype)
            dz.scatter_add_(1, labels[own, None], pull[:, None])
            loss += value
            d_hidden[own] = dz @ head
            if markov is not None and map2 is not None:
                assert d_markov is not None and d_w2 is not None
                d_markov[own] = dz @ map2
                d_w2[:num_tokens] += (dz.mT @ markov[own])[:num_tokens].to(d_w2.dtype)
        ctx.save_for_backward(d_hidden, d_markov, d_w2)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(figures)
        return loss, figures

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_hidden, d_markov, d_w2 = (
            None if d is None else d * grads[0].to(d.dtype)
            for d in ctx.saved_tensors  # type: ignore[attr-defined]
        )
        return d_hidden, d_markov, d_w2, *[None] * 7


def _row_loss(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    wanted: torch.Tensor,
    labels: torch.Tensor,
    sharpness: torch.Tensor,
    ce_weight: torch.Tensor,
    l1_weight: torch.Tensor,
    length: torch.Tensor,
    length_floor: float,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give the loss, figures (3, rows) and the gradient to the logits (rows, N'), in their dtype, of whole blocks.

    CE's pull on the label is left out of the gradient: one element a row, and the passes over whole rows stay fusible.

    Args:
        logits: (rows, N') of the draft, any dtype; N' - N columns are padding, and are given no gradient.
        bias: (rows, N') to be added to them, or None.
        wanted: (rows, N') of the target.
        labels: (rows,) int64.
        sharpness: (rows,) that logits are multiplied by.
        ce_weight: (rows,).
        l1_weight: (rows,).
        length: (blocks, B).
        length_floor: f.
        num_tokens: N.
    """
    sharp, dtype, num_columns = sharpness[:, None], logits.dtype, logits.shape[1]
    logits, wanted = logits[:, :num_tokens], wanted[:, :num_tokens]
    bias = None if bias is None else bias[:, :num_tokens]
    logits = widen(logits) if bias is None else widen(logits) + widen(bias)
    wanted = widen(wanted)
    log_q = (logits * sharp).log_softmax(-1)
    q, p = log_q.exp(), (wanted * sharp).softmax(-1)
    is_less = q < p
    a = torch.where(is_less, q, p).sum(-1)  # (rows)
    label = labels[:, None]
    ce = -log_q.gather(1, label)[:, 0]
    agreement = (logits.argmax(-1) == wanted.argmax(-1)).to(a.dtype)
    W = _expected_weights(a.view(length.shape), length > 0, length_floor)
    pull = (W * length).flatten()  # (rows)
    bounded = a.clamp(min=MIN_ACCEPTANCE)
    loss = (ce_weight * ce + l1_weight * 2 * (1 - a) - pull * bounded.log()).sum()
    # V, the gradient of the total variation, times what L1 and the length term ask of it.
    tv_weight = 2 * l1_weight + pull / bounded
    gained = torch.where(is_less, q, 0.0)  # (rows, N)
    dz = ce_weight[:, None] * q - tv_weight[:, None] * (gained - q * gained.sum(-1, keepdim=True))
    dz = F.pad((dz * sharp).to(dtype), (0, num_columns - num_tokens))
    return loss, torch.stack([a, agreement, ce]), dz


def _pad_rows(weight: torch.Tensor) -> torch.Tensor:
    """Add rows of zeros up to a whole number of tiles: matrix products with odd strides are several times slower."""
    return F.pad(weight, (0, 0, 0, -weight.shape[0] % TILE))


@functools.cache
def _compiled_row_loss() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Fuse the passes over rows of logits: they are what a step with a large vocabulary takes its time with."""
    return torch.compile(_row_loss, dynamic=True)


def draft_loss(
    hidden: torch.Tensor,
    markov: torch.Tensor | None,
    w2: torch.Tensor | None,
    confidences: torch.Tensor | None,
    *,
    lm_head: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    temperatures: torch.Tensor,
    weights: SlotWeights,
    rows: int,
    is_compiled: bool = False,
) -> tuple[torch.Tensor, SlotFigures]:
    """Compute the loss of a batch; the module's docstring has the terms.

    Args:
        hidden: (n*B, D) of the draft, behind its final norm.
        markov: (n*B, M) what W2 is applied to, or None.
        w2: (N, M), or None.
        confidences: (n*B,) before their sigmoid, or None.
        lm_head: (N', D) the target's, N' at most N: rows that are tokens.
        teacher: (n*B, D) the target's hidden states behind its final norm, at the position before each label.
        labels: (n*B,) int64 tokens of the text.
        temperatures: (n*B,) both laws are taken at.
        weights: of the slots.
        rows: whose logits are held at once.
        is_compiled: whether the passes over logits are fused by `torch.compile`, which takes a while the first time.

    Returns:
        The loss and what was found at each slot.
    """
    sharpness = 1 / temperatures
    inputs = hidden, markov, w2, lm_head, teacher, labels, sharpness, weights, rows, is_compiled
    loss, figures = _HeadLoss.apply(*inputs)
    if confidences is not None:
        bce = F.binary_cross_entropy_with_logits(
            confidences, figures[0].clamp(0, 1).to(confidences.dtype), reduction="none"
        )
        loss = loss + (weights.confidence * bce).sum()
    a, agreement, ce = figures.view(3, *weights.length.shape)
    return loss, SlotFigures(acceptance=a, agreement=agreement, ce=ce)


def acceptance_length(by_slot: torch.Tensor, is_counted: torch.Tensor) -> torch.Tensor:
    """Give 1 + the expected accepted drafts of blocks that count whole: () mean over them.

    Args:
        by_slot: (n, B) acceptance or agreement.
        is_counted: (n, B) bool.
    """
    is_whole = is_counted.all(dim=1)
    lengths = 1 + by_slot.cumprod(dim=1).sum(dim=1)
    return (lengths * is_whole).sum() / is_whole.sum().clamp(min=1)
