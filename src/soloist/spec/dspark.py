"""The DSpark drafter: one parallel pass over a block, then a short walk that lets each draft see the one before it.

Owns the draft's context of one sequence and the round around the network: what the target has committed becomes
context, the block drafts behind the pending token, and nothing of the block is kept. DFlash is the same without a walk.

A proposal depends on the committed tokens only through the target's hidden states, so a draft can be wrong but never
stale: rows of rejected drafts are overwritten before they can be seen.
"""

from dataclasses import dataclass
from typing import Self

import torch

from soloist.errors import UsageError
from soloist.kernels.allreduce import TensorParallel
from soloist.kernels.sampling import Stream, draft_counter, draw, target_probs, uniform
from soloist.models.loader import RandomSource, choose_placement, refuse_num_ranks
from soloist.models.memory import check_fits
from soloist.models.weights import RecordingSource
from soloist.runtime.buffers import MAX_WIDTH, SamplingPlan, StepBuffers
from soloist.spec.drafter import Drafter
from soloist.spec.dspark_config import DSparkConfig, random_config
from soloist.spec.dspark_model import DraftContext, DSparkModel
from soloist.spec.setup import DrafterSetup
from soloist.spec.verify import Verdict


@dataclass(frozen=True, kw_only=True)
class DSparkBuffers:
    """What a round reads and writes besides weights and the step's buffers. B slots a block, S rows of context."""

    # Keys and values of the context, (L, G, S, K) each.
    context: DraftContext
    # () int32: rows of the context that count.
    context_len: torch.Tensor
    # (B,) int64: the anchor, then mask tokens.
    block_ids: torch.Tensor
    # (drafts,) fp32: how likely each draft is to be accepted once it is reached; 1 without a confidence head.
    confidence: torch.Tensor

    @classmethod
    def allocate(cls, model: DSparkModel, num_drafts: int) -> Self:
        """Allocate the buffers of one drafter."""
        device = model.device
        block_ids = torch.full((model.config.block_size,), model.config.mask_token_id, device=device)
        return cls(
            context=model.make_context(),
            context_len=torch.zeros((), dtype=torch.int32, device=device),
            block_ids=block_ids,
            confidence=torch.ones(num_drafts, device=device),
        )


@dataclass(frozen=True, kw_only=True)
class DSparkSnapshot:
    """A copy of the context of one sequence."""

    # (L, G, n, K) each, n tokens.
    k: torch.Tensor
    v: torch.Tensor


def _num_scratch_rows(config: DSparkConfig) -> int:
    """Count the rows behind the last token of a context: of a block, or of a step of which nothing is committed."""
    return max(config.block_size, MAX_WIDTH)


def num_positions(config: DSparkConfig, max_context_len: int) -> int:
    """Count the rows that a context of `max_context_len` tokens needs, scratch included."""
    return max_context_len + _num_scratch_rows(config)


class DSpark(Drafter):
    """Drafts with a DSpark or DFlash network.

    Args:
        model: the network, with `num_positions` rows for the context.
        max_drafts: most drafts to verify; the trained block is always run whole. None: all of it, at most 15.
        draft_greedily: take the likeliest drafts although the target samples. They are then compared with the target's
            own tokens, which pays only where the draft is much flatter than the target.

    Raises:
        UsageError: the block does not give so many drafts.
    """

    name = "dspark"

    def __init__(
        self,
        model: DSparkModel,
        *,
        max_drafts: int | None = None,
        draft_greedily: bool = False,
    ) -> None:
        config = model.config
        limit = min(config.num_drafts, MAX_WIDTH - 1)
        if max_drafts is not None and not 1 <= max_drafts <= limit:
            raise UsageError(f"max_drafts is {max_drafts}; a block of this draft gives 1 to {limit}")
        self.model = model
        self.max_drafts = max_drafts or limit
        self.has_draft_law = not draft_greedily
        self.has_confidences = model.confidence is not None
        self.capture_layers = config.target_layer_ids
        self.max_context_len = model.max_positions - _num_scratch_rows(config)
        self.buffers = DSparkBuffers.allocate(model, self.max_drafts)
        # On the CPU the width can be read for nothing, and drafts that nobody verifies would cost.
        self.is_fixed_shape = model.device.type != "cpu"
        # Whether this request draws its drafts, and from a law that is cut.
        self._is_drawn = self._has_filters = False

    def begin(self, prompt_ids: torch.Tensor, plan: SamplingPlan) -> None:
        self.buffers.context_len.zero_()
        self._is_drawn = self.has_draft_law and not plan.is_greedy
        self._has_filters = plan.has_filters

    def read_bytes(self, width: int, context_len: int, *, distinct_experts: float | None = None) -> float:
        return float(self.model.read_bytes(context_len, width - 1)) if width > 1 else 0.0

    def prefill_chunk(self, input_ids: torch.Tensor, hidden: torch.Tensor, captured: torch.Tensor | None) -> None:
        assert captured is not None
        own = self.buffers
        self.model.read_context(captured, own.context, own.context_len)
        own.context_len.add_(captured.shape[0])

    def propose(self, buffers: StepBuffers, context_len: torch.Tensor) -> None:
        own, model = self.buffers, self.model
        num_drafts = self.max_drafts if self.is_fixed_shape else int(buffers.width) - 1
        # The target's length counts, whatever was restored or measured in between.
        own.context_len.copy_(context_len)
        if num_drafts < 1:
            return
        own.block_ids[:1] = buffers.input_ids[:1]
        hidden = model.run_block(own.block_ids, own.context, own.context_len)  # (B, D)
        first = model.config.first_slot
        hidden = hidden[first : first + num_drafts]  # (drafts, D)
        counters = draft_counter(context_len, buffers.rows[1 : 1 + num_drafts])
        uniforms = uniform(buffers.seed, counters, Stream.DRAFT) if self._is_drawn else None  # (drafts,)
        if model.markov is None:
            self._choose(buffers, slice(0, num_drafts), model.compute_logits(hidden), None, uniforms)
            embedded = None
        else:
            embedded = self._walk(buffers, hidden, uniforms)
        if model.confidence is not None:
            own.confidence[:num_drafts] = model.confidence(hidden, embedded)
        if self.has_confidences and self.width_rule is not None:
            buffers.width.copy_(torch.minimum(buffers.width, self.width_rule.stop(own.confidence)))

    def _walk(self, buffers: StepBuffers, hidden: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
        """Choose one draft after the other; give the (drafts, M) embeddings of the tokens before them."""
        markov, logits = self.model.markov, self.model.compute_logits(hidden)  # (drafts, N)
        assert markov is not None
        state = markov.start
        all_embedded = []
        for i in range(hidden.shape[0]):
            row = slice(i, i + 1)
            # Row i of the step is the token before draft i: the pending one, then the draft just chosen.
            embedded = markov.embed(buffers.input_ids[row])  # (1, M)
            mixed, state = markov.mix(embedded, hidden[row], state)  # (1, M)
            self._choose(buffers, row, logits[row], mixed, uniforms)
            all_embedded.append(embedded)
        return torch.cat(all_embedded)

    def _choose(
        self,
        buffers: StepBuffers,
        rows: slice,
        logits: torch.Tensor,
        mixed: torch.Tensor | None,
        uniforms: torch.Tensor | None,
    ) -> None:
        """Write the drafts of some rows, and their law if they are drawn; logits are this rank's, without the bias."""
        if uniforms is None:
            tokens = self.model.pick_likeliest(logits, mixed, buffers.num_tokens)
        else:
            assert buffers.draft_probs is not None
            logits = self.model.whole_logits(logits, mixed)[:, : buffers.num_tokens]
            filters = (buffers.top_k, buffers.top_p, buffers.min_p)
            law = target_probs(logits, buffers.temperature, *filters, has_filters=self._has_filters)
            # What is recorded is what was drawn from, to the bit.
            buffers.draft_probs[rows] = law
            tokens = draw(law, uniforms[rows])
        buffers.input_ids[1:][rows] = tokens

    def update(
        self, buffers: StepBuffers, verdict: Verdict, hidden: torch.Tensor, captured: torch.Tensor | None
    ) -> None:
        assert captured is not None
        own = self.buffers
        # All rows of the step: those that were not committed are behind the context, and overwritten by the next step.
        self.model.read_context(captured, own.context, own.context_len)
        own.context_len.add_(verdict.num_committed)

    def snapshot(self) -> DSparkSnapshot:
        """Copy the context; reads its length from the device, so never call it inside a decode loop."""
        num_tokens = int(self.buffers.context_len)
        context = self.buffers.context
        return DSparkSnapshot(k=context.k[:, :, :num_tokens].clone(), v=context.v[:, :, :num_tokens].clone())

    def restore(self, snapshot: object) -> None:
        assert isinstance(snapshot, DSparkSnapshot)
        num_tokens, context = snapshot.k.shape[2], self.buffers.context
        context.k[:, :, :num_tokens].copy_(snapshot.k)
        context.v[:, :, :num_tokens].copy_(snapshot.v)
        self.buffers.context_len.fill_(num_tokens)


def check_num_ranks(config: DSparkConfig, group: TensorParallel) -> None:
    """Refuse a number of ranks that cannot share the draft's layers; any number can share its vocabulary.

    Raises:
        UnsupportedError: heads or widths do not divide; the message names what does.
    """
    asked = RecordingSource()
    DSparkModel(config, asked, 1)
    refuse_num_ranks(asked.splits, group.size, "the draft")


def check_context_fits(
    config: DSparkConfig, max_context_len: int, dtype: torch.dtype, device: torch.device, group: TensorParallel
) -> None:
    """Refuse a context that cannot fit, before it is allocated.

    Raises:
        DoesNotFitError: the device has less free memory.
    """
    t = config.transformer
    rows = num_positions(config, max_context_len)
    num_heads = group.share(t.num_key_value_heads)
    num_bytes = 2 * t.num_hidden_layers * num_heads * rows * t.head_dim * dtype.itemsize
    check_fits(num_bytes, device, f"the draft's context of {max_context_len} tokens")


def make_dspark(model: DSparkModel, setup: DrafterSetup) -> DSpark:
    """Put a drafter around a network."""
    return DSpark(model, max_drafts=None if setup.max_width is None else setup.max_width - 1)


def make_random_dspark(setup: DrafterSetup, config: DSparkConfig | None = None) -> DSpark:
    """Make a drafter with random weights and the target's embedding and head, so that speed can be measured.

    Args:
        setup: the target and the wishes around it.
        config: what to make. None: `random_config` of the target.

    Raises:
        UnsupportedError: the config does not fit the target.
        DoesNotFitError: the device has too little memory.
        UsageError: the block does not give so many drafts.
    """
    target = setup.target
    config = config or random_config(target.config)
    config.check_target(target.config)
    check_num_ranks(config, setup.layer_group)
    check_context_fits(config, setup.max_context_len, target.dtype, target.device, setup.layer_group)
    placement = choose_placement(target.device, target.dtype, setup.weights_dtype, setup.layer_group)
    model = DSparkModel(
        config,
        RandomSource(setup.seed, placement),
        num_positions(config, setup.max_context_len),
        embed_tokens=target.embed_tokens,
        lm_head=target.lm_head,
        vocabulary_group=target.group,
    )
    return make_dspark(model, setup)
