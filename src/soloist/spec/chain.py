"""Drafting in a chain: a small model gives one token after the other, each from the ones before it.

Owns what such drafters share: how a draft is chosen from logits, when the chain ends, and the record of the law.
"""

from abc import abstractmethod

import torch

from soloist.kernels.sampling import Stream, draft_counter, draw, likeliest, target_probs, uniform
from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.spec.drafter import Drafter
from soloist.spec.width import EarlyStop


class ChainDrafter(Drafter):
    """Draws drafts from logits, greedily for a greedy request, else from the law that the request's filters leave.

    Penalties and biases are the target's: they cost a draft at most its acceptance.

    Args:
        max_drafts: tokens of a proposal, 1..15.
        device: where the steps run.
        is_fixed_shape: whether no shape may depend on data, as in a captured step. None: not on a CPU.
    """

    has_draft_law = True
    has_confidences = True

    def __init__(self, *, max_drafts: int, device: torch.device, is_fixed_shape: bool | None = None) -> None:
        self.max_drafts = max_drafts
        self.is_fixed_shape = device.type != "cpu" if is_fixed_shape is None else is_fixed_shape
        # () int32: position of the step's pending token.
        self.context_len = torch.zeros((), dtype=torch.int32, device=device)
        # (max_drafts,) fp32: the likeliest token's probability, before temperature and filters, in each draft's law.
        self.confidences = torch.zeros(max_drafts, device=device)
        # Drafts of the step, on the host: on the CPU it may be any number, else it is always the most.
        self.num_drafts = 0
        self._plan: SamplingPlan | None = None

    def begin(self, prompt_ids: torch.Tensor, plan: SamplingPlan) -> None:
        self._plan = plan

    @abstractmethod
    def first_hidden(self) -> torch.Tensor:
        """Give the hidden state (1, D) from which the token behind the pending one follows."""

    @abstractmethod
    def next_hidden(self, token: torch.Tensor) -> torch.Tensor:
        """Give the hidden state (1, D) behind `token` (1,), the draft that was chosen last."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Give the logits (1, N) fp32 that follow from a hidden state (1, D)."""

    @abstractmethod
    def pick_likeliest(self, hidden: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Give the likeliest of the first `num_tokens` tokens, (1,) int64, behind a hidden state (1, D)."""

    def propose(self, buffers: StepBuffers, context_len: torch.Tensor) -> None:
        self.context_len.copy_(context_len)
        most = self.max_drafts if self.is_fixed_shape else int(buffers.width) - 1
        stop = None if self.is_fixed_shape or self.width_rule is None else EarlyStop(self.width_rule)
        self.num_drafts = 0
        token: torch.Tensor | None = None
        while self.num_drafts < most and (stop is None or stop.pays()):
            hidden = self.first_hidden() if token is None else self.next_hidden(token)
            token = self._choose(hidden, buffers)
            self.num_drafts += 1
            if stop is not None:
                stop.add(float(self.confidences[self.num_drafts - 1]))
        if not self.is_fixed_shape:
            buffers.width.clamp_max_(1 + self.num_drafts)
        elif self.width_rule is not None:
            buffers.width.copy_(torch.minimum(buffers.width, self.width_rule.stop(self.confidences)))

    def _choose(self, hidden: torch.Tensor, buffers: StepBuffers) -> torch.Tensor:
        """Choose the next draft: (1,) int64, written into the step with its law."""
        assert self._plan is not None and buffers.draft_probs is not None
        t = self.num_drafts
        if self._plan.is_greedy and self.width_rule is None:
            token = self.pick_likeliest(hidden, buffers.num_tokens)
            buffers.input_ids[t + 1 : t + 2] = token
            return token
        # Rows of the head that are no token are never drafted.
        logits = self.compute_logits(hidden)[:, : buffers.num_tokens]
        if self.width_rule is not None:
            self.confidences[t : t + 1] = logits.softmax(-1).amax(-1)
        if self._plan.is_greedy:
            token, _ = likeliest(logits)
        else:
            filters = (buffers.top_k, buffers.top_p, buffers.min_p)
            law = target_probs(logits, buffers.temperature, *filters, has_filters=self._plan.has_filters)  # (1, N)
            # A draft's head may have fewer rows than there are tokens; those were never written.
            buffers.draft_probs[t, : law.shape[1]] = law[0]
            counter = draft_counter(self.context_len, buffers.rows[t + 1 : t + 2])
            token = draw(law, uniform(buffers.seed, counter, Stream.DRAFT))
        buffers.input_ids[t + 1 : t + 2] = token
        return token
