"""Making confidences mean what they say: one temperature per slot, fitted one after the other.

A head that says 0.8 where 0.7 are kept makes adaptive width verify too much. Slot k's logit is divided by T_k, chosen
so that the product of the confidences up to k is the share of blocks that are kept up to k, the earlier T being fixed.

Source: DSpark (arXiv 2607.05147), sequential temperature scaling.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from soloist.engine import Engine
from soloist.errors import UsageError
from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.runtime.graph import Execution
from soloist.sampling_params import SamplingParams
from soloist.spec.drafter import Drafter
from soloist.spec.dspark import DSpark
from soloist.spec.verify import Verdict

_NUM_BINS = 10
# Temperatures that are tried.
_GRID = torch.logspace(-1, 1, 201)
# A logit is bounded by what fp32 tells from 1.
_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The temperatures, and what they change. Errors are of the products, in 0..1, by slot."""

    temperatures: tuple[float, ...]
    error_before: tuple[float, ...]
    error_after: tuple[float, ...]
    num_blocks: int


class _Watched(Drafter):
    """A drafter whose confidences and verdicts are written down."""

    def __init__(self, drafter: DSpark) -> None:
        self._drafter = drafter
        self.name, self.max_drafts, self.has_draft_law = drafter.name, drafter.max_drafts, drafter.has_draft_law
        self.capture_layers, self.max_context_len = drafter.capture_layers, drafter.max_context_len
        self.confidences: list[torch.Tensor] = []
        self.num_drafted: list[torch.Tensor] = []
        self.num_accepted: list[torch.Tensor] = []

    def begin(self, prompt_ids: torch.Tensor, plan: SamplingPlan) -> None:
        self._drafter.begin(prompt_ids, plan)

    def prefill_chunk(self, input_ids: torch.Tensor, hidden: torch.Tensor, captured: torch.Tensor | None) -> None:
        self._drafter.prefill_chunk(input_ids, hidden, captured)

    def propose(self, buffers: StepBuffers, context_len: torch.Tensor) -> None:
        self._drafter.propose(buffers, context_len)

    def update(
        self, buffers: StepBuffers, verdict: Verdict, hidden: torch.Tensor, captured: torch.Tensor | None
    ) -> None:
        self.confidences.append(self._drafter.buffers.confidence.clone())
        self.num_drafted.append(buffers.width - 1)
        self.num_accepted.append(verdict.num_accepted.clone())
        self._drafter.update(buffers, verdict, hidden, captured)


def calibrate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Answer prompts with a draft, every block verified whole, and fit its temperatures.

    Args:
        engine: whose drafter has a confidence head that is not calibrated yet.
        prompts: token ids that the draft was not trained on.
        temperatures: of the answers, taking turns.
        max_tokens: of an answer.
        seed: of the draws.
        on_progress: called with (answers done, answers to give).

    Raises:
        UsageError: the drafter has no such head, or has temperatures.
    """
    drafter = engine.drafter
    if not isinstance(drafter, DSpark) or drafter.model.confidence is None:
        raise UsageError("there is no confidence head to calibrate")
    if drafter.model.confidence.temperatures is not None:
        raise UsageError("the confidence head is calibrated already: take confidence_temperatures out of config.json")
    watched = _Watched(drafter)
    # What is written down is read on the host, so steps are neither captured nor run ahead.
    plain = Execution(is_captured=False, run_ahead=0, has_pdl=False)
    watching = Engine(engine.runner, watched, eos_token_ids=engine.eos_token_ids, rule=engine.rule, execution=plain)
    for i, prompt in enumerate(prompts):
        temperature = temperatures[i % len(temperatures)]
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + i)
        for _ in watching.generate(prompt, params):
            pass
        on_progress(i + 1, len(prompts))
    confidence = torch.stack(watched.confidences).cpu()
    drafted, accepted = (torch.stack(x).cpu() for x in (watched.num_drafted, watched.num_accepted))
    # The last step of an answer verifies fewer.
    is_whole = drafted == drafter.max_drafts
    return fit(confidence[is_whole].clamp(_EPS, 1 - _EPS).logit(), accepted[is_whole])


def fit(logits: torch.Tensor, num_accepted: torch.Tensor) -> Calibration:
    """Fit temperatures.

    Args:
        logits: (n, B) fp32 of blocks that were verified whole.
        num_accepted: (n,) drafts kept of each.
    """
    n, B = logits.shape
    if n == 0:
        raise UsageError("no block was verified whole: give more prompts, or longer answers")
    survival = before = torch.ones(n)
    temperatures, errors_before, errors_after = [], [], []
    for k in range(B):
        is_kept = (num_accepted > k).float()
        before = before * logits[:, k].sigmoid()
        errors_before.append(calibration_error(before, is_kept))
        tried = [(calibration_error(survival * (logits[:, k] / t).sigmoid(), is_kept), float(t)) for t in _GRID]
        error, best = min(tried)
        survival = survival * (logits[:, k] / best).sigmoid()
        temperatures.append(best)
        errors_after.append(error)
    return Calibration(
        temperatures=tuple(temperatures),
        error_before=tuple(errors_before),
        error_after=tuple(errors_after),
        num_blocks=n,
    )


def calibration_error(predicted: torch.Tensor, happened: torch.Tensor) -> float:
    """Give the expected calibration error of predictions (n,) in 0..1 of what happened (n,), 0 or 1."""
    bins = (predicted * _NUM_BINS).long().clamp(max=_NUM_BINS - 1)
    gap = torch.zeros(_NUM_BINS).index_add(0, bins, predicted - happened)
    return float(gap.abs().sum() / len(predicted))
