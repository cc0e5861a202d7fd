"""What a drafter is, and the one that proposes nothing.

A drafter guesses the tokens behind the pending one; it can change the speed of an answer and nothing else. Everything
it does within a step is tensor code on fixed shapes, so that the step can be captured.
"""

from abc import ABC, abstractmethod

import torch

from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.spec.verify import Verdict
from soloist.spec.width import WidthRule


class Drafter(ABC):
    """Proposes the next tokens of a request.

    The order of calls: `begin`, `prefill_chunk` for each chunk, then `propose` and `update` in every step.
    """

    # As the command line and the stats call it.
    name: str
    # Most tokens of a proposal, 0..15. A step has 1 + max_drafts rows.
    max_drafts: int
    # Whether tokens are drawn from a law, which `propose` then writes to `buffers.draft_probs`. If not, or for a greedy
    # request, the proposal is verified by comparing tokens.
    has_draft_law: bool = False
    # Target layers whose residual stream the drafter reads, as in `HiddenCapture`.
    capture_layers: tuple[int, ...] = ()
    # Most tokens of a request that the drafter can follow; None: any number.
    max_context_len: int | None = None
    # Whether `propose` knows how likely its drafts are kept, and then ends them by `width_rule`, if there is one. For
    # drafters that do not, adaptive width counts what was kept before.
    has_confidences: bool = False
    # Set by the engine for adaptive width; None: every proposal is as long as it can be.
    width_rule: WidthRule | None = None
    # Cleared by the engine when a request goes on without the drafter, whose state is then behind the target's.
    is_following: bool = True

    def begin(self, prompt_ids: torch.Tensor, plan: SamplingPlan) -> None:  # noqa: B027
        """Forget the last request and take a new one.

        Args:
            prompt_ids: (n,) int64, the whole prompt. Its last token is the first pending one, so it is in no prefill
                chunk.
            plan: of the request; a greedy one wants the likeliest proposal.
        """

    def skip(self, num_tokens: int) -> None:  # noqa: B027
        """Hear that the first tokens of the prompt are in the target's cache already and come in no prefill chunk.

        Called behind `begin`, for a drafter whose `snapshot` is None; one with a state gets it back by `restore`.

        Args:
            num_tokens: how many, at least 1.
        """

    def prefill_chunk(  # noqa: B027
        self, input_ids: torch.Tensor, hidden: torch.Tensor, captured: torch.Tensor | None
    ) -> None:
        """Read what the target made of the next C prompt tokens.

        Args:
            input_ids: (C,) int64.
            hidden: (C, D) residual stream before the final norm.
            captured: (C, len(capture_layers), D), None without capture layers; overwritten by the next chunk.
        """

    @abstractmethod
    def propose(self, buffers: StepBuffers, context_len: torch.Tensor) -> None:
        """Write a proposal into the buffers.

        `input_ids[1:]` gets the draft tokens, each an id that may be drawn; `width` gets 1 + their number;
        `draft_probs` the law of each, if the drafter has one. Numbers for drawing come from `Stream.DRAFT` at
        `draft_counter`. A width may depend on the past and on the confidences up to its end, not on those behind it.

        Args:
            buffers: `input_ids[0]` is the pending token; `width` comes with the most rows this step can use, so drafts
                behind it need not be made.
            context_len: () int32, its position.
        """

    def update(  # noqa: B027
        self, buffers: StepBuffers, verdict: Verdict, hidden: torch.Tensor, captured: torch.Tensor | None
    ) -> None:
        """Follow the target, which has committed the first `verdict.num_committed` rows of the step.

        Args:
            buffers: `input_ids` are still the step's rows; row t is followed by `verdict.committed_tokens[t]`.
            verdict: what was committed.
            hidden: (T, D) residual stream of the step's rows before the final norm.
            captured: (T, len(capture_layers), D), None without capture layers; overwritten by the next step.
        """

    def read_bytes(self, width: int, context_len: int, *, distinct_experts: float | None = None) -> float:
        """Count what this rank reads to draft for a step, besides what the target reads; 0: nothing worth counting.

        Args:
            width: rows of the step, at least 1.
            context_len: positions in the cache.
            distinct_experts: experts that a pass over the step's rows reads per layer; None: uniform routing.
        """
        return 0.0

    def snapshot(self) -> object:
        """Copy the drafter's state of the sequence, to be kept beside a snapshot of the target's cache."""
        return None

    def restore(self, snapshot: object) -> None:  # noqa: B027
        """Set the state to one that `snapshot` gave."""


class NoDrafter(Drafter):
    """Proposes nothing: plain decoding."""

    name = "off"
    max_drafts = 0

    def propose(self, buffers: StepBuffers, context_len: torch.Tensor) -> None:
        """Leave the width at 1."""
