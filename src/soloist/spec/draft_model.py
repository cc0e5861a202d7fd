"""A smaller model with the same vocabulary drafts for the target.

Owns the draft's cache, which holds what was committed: rows of attention are cut back to it by their number, and a
recurrent state never sees a guess, because the chain of guesses runs on a copy.
"""

from dataclasses import replace

import torch

from soloist.errors import UnsupportedError
from soloist.models import load_model
from soloist.models.cache import Cache, StepKind
from soloist.models.causal_lm import CausalLM
from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.spec.chain import ChainDrafter
from soloist.spec.history import TokenHistory
from soloist.spec.setup import DrafterSetup
from soloist.spec.verify import Verdict

# Tokens of a proposal by device type. On a CPU rows cost what they compute, from the third or fourth on.
DEFAULT_DRAFTS = {"cpu": 3, "cuda": 5}
# Tokens that are read at once while a prompt is followed.
CHUNK_TOKENS = 512


class DraftModel(ChainDrafter):
    """Drafts with a model of its own.

    In every step the model first reads what was committed since it last read, and the pending token; then it goes on
    with its own drafts. Rows of attention that a draft left stay where the draft was kept. The last draft is not read
    in the step that makes it: if all are kept, the next step reads two tokens.

    Args:
        model: the draft.
        max_context_len: most tokens of a request. Fewer if the model allows fewer: see `max_context_len`.
        num_tokens: ids that may be drawn.
        max_drafts: tokens of a proposal, 1..15.
        is_fixed_shape: whether no shape may depend on data, as in a captured step. None: not on a CPU.

    Raises:
        UnsupportedError: the model knows fewer tokens than may be drawn.
    """

    name = "model"

    def __init__(
        self,
        model: CausalLM,
        *,
        max_context_len: int,
        num_tokens: int,
        max_drafts: int,
        is_fixed_shape: bool | None = None,
    ) -> None:
        super().__init__(max_drafts=max_drafts, device=model.device, is_fixed_shape=is_fixed_shape)
        if model.config.vocab_size < num_tokens:
            raise UnsupportedError(
                f"the draft model has {model.config.vocab_size} tokens, the target {num_tokens}: a draft model must"
                " have the target's vocabulary"
            )
        self.model = model
        # Most tokens that a step reads before it drafts: what a step before it may have committed, and one.
        self.max_unread = 1 + max_drafts
        size = min(max_context_len + max_drafts, model.config.max_position_embeddings)
        self.max_context_len = size - max_drafts
        self.history = TokenHistory.allocate(self.max_context_len, 1 + max_drafts, model.device)
        # Tokens that were committed, and from the proposal on the pending one.
        self.cache = model.make_cache(size, self.max_unread)
        # The chain of drafts: rows behind those of `cache` in the same tensors, and a recurrent state of its own.
        self.chain = _branch(self.cache)

    def begin(self, prompt_ids: torch.Tensor, plan: SamplingPlan) -> None:
        super().begin(prompt_ids, plan)
        self._num_known = self._count_known(prompt_ids)
        self._num_read = 0
        self.history.begin(prompt_ids)
        self.cache.reset()

    def _count_known(self, prompt_ids: torch.Tensor) -> int:
        """Count the leading tokens of a prompt whose rows are in the cache."""
        num_held = min(int(self.cache.context_len), prompt_ids.shape[0] - 1)
        if not self.cache.can_rollback:
            return 0
        return int((self.history.ids[:num_held] == prompt_ids[:num_held]).int().cumprod(0).sum())

    def skip(self, num_tokens: int) -> None:
        # Nothing was written since `begin`, so rows that are known are still there.
        self._num_read = min(self._num_known, num_tokens)
        self.cache.context_len.fill_(self._num_read)
        self._read(num_tokens)

    def read_bytes(self, width: int, context_len: int, *, distinct_experts: float | None = None) -> float:
        # One pass over what is unread, and one for each draft behind the first.
        return (width - 1) * self.model.footprint.step_bytes(1, context_len).total

    def prefill_chunk(self, input_ids: torch.Tensor, hidden: torch.Tensor, captured: torch.Tensor | None) -> None:
        self._read(self._num_read + input_ids.shape[0])

    def _read(self, end: int) -> torch.Tensor | None:
        """Read the sequence up to position `end`, on the host's word; give the last hidden row (1, D), if any."""
        hidden = None
        while self._num_read < end:
            ids = self.history.ids[self._num_read : min(end, self._num_read + CHUNK_TOKENS)]  # (C,)
            kind = StepKind.DECODE if ids.shape[0] == 1 else StepKind.PREFILL
            hidden = self.model.forward(ids, self.cache, kind)[-1:]
            self.cache.commit(ids.shape[0], kind)
            self._num_read += ids.shape[0]
        return hidden

    def first_hidden(self) -> torch.Tensor:
        if self.is_fixed_shape:
            hidden = self._read_unread()
        else:
            self._num_read = int(self.cache.context_len)
            last = self._read(int(self.context_len) + 1)
            assert last is not None, "the pending token was read before"
            hidden = last
        self.chain.context_len.copy_(self.cache.context_len)
        if self.cache.recurrent is not None and self.chain.recurrent is not None:
            self.chain.recurrent.state.copy_(self.cache.recurrent.state)
            self.chain.recurrent.conv.copy_(self.cache.recurrent.conv)
        return hidden

    def _read_unread(self) -> torch.Tensor:
        """Read up to the pending token in one pass of `max_unread` rows; give its hidden row (1, D)."""
        num_unread = (self.context_len + 1 - self.cache.context_len).clamp_max(self.max_unread)
        rows = torch.arange(self.max_unread, device=num_unread.device)  # (R,)
        # Rows behind the pending token are padding, and what is there may be no token.
        ids = self.history.ids.index_select(0, self.cache.context_len + rows).clamp_min(0)
        hidden = self.model.forward(ids, self.cache, StepKind.VERIFY, width=num_unread)  # (R, D)
        self.cache.commit(num_unread, StepKind.VERIFY)
        # Behind the end of an answer steps go on, with nothing to read.
        return hidden.index_select(0, (num_unread - 1).clamp_min(0).view(1))

    def next_hidden(self, token: torch.Tensor) -> torch.Tensor:
        hidden = self.model.forward(token, self.chain, StepKind.DECODE)  # (1, D)
        self.chain.commit(1, StepKind.DECODE)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden)

    def pick_likeliest(self, hidden: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return self.model.pick_likeliest(hidden, num_tokens)[0]

    def update(
        self, buffers: StepBuffers, verdict: Verdict, hidden: torch.Tensor, captured: torch.Tensor | None
    ) -> None:
        self.history.record(verdict.committed_tokens, self.context_len)
        # Drafts that were read and kept have their rows; a recurrent state reads them again.
        if self.num_drafts and self.cache.can_rollback:
            kept = verdict.num_committed.clamp_max(self.num_drafts)
            self.cache.context_len.copy_(self.context_len + kept)


def _branch(cache: Cache) -> Cache:
    """Make a cache that shares the rows of another and has a length and a recurrent state of its own."""
    recurrent = cache.recurrent
    if recurrent is not None:
        recurrent = replace(recurrent, state=recurrent.state.clone(), conv=recurrent.conv.clone())
    return Cache(
        max_context_len=cache.max_context_len,
        max_width=cache.max_width,
        device=cache.context_len.device,
        kv=cache.kv,
        latent=cache.latent,
        recurrent=recurrent,
    )


def load_draft_model(setup: DrafterSetup) -> DraftModel:
    """Load the model at `setup.draft_path`; whether its tokens mean the target's is the caller's to check.

    Raises:
        UnsupportedError: its architecture or a format is not implemented, or it cannot draft for the target.
        CheckpointError: its files are incomplete or damaged.
        DoesNotFitError: it is larger than the free memory.
    """
    assert setup.draft_path is not None
    device = setup.target.device
    model = load_model(setup.draft_path, device=device, dtype=setup.target.dtype, weights_dtype=setup.weights_dtype)
    return DraftModel(
        model,
        max_context_len=setup.max_context_len,
        num_tokens=setup.num_tokens,
        max_drafts=setup.max_drafts(DEFAULT_DRAFTS[device.type]),
    )
