"""The target's own next-token-prediction layer (MTP) drafts in a chain.

Row i of the layer's cache is made from the target's hidden state i and token i+1. A chain has no hidden states of the
target for its own drafts and goes on with the layer's; once tokens are committed, their rows are made again from the
target's states, so the cache never holds a guess.
"""

import torch

from soloist.errors import CheckpointError, UnsupportedError
from soloist.models.bailing_moe_v3 import BailingMoeV3ForCausalLM, BailingMoeV3MTP
from soloist.models.cache import Cache, Snapshot, StepKind
from soloist.models.footprint import CountingSource, held_bytes
from soloist.models.loader import LoadingSource, RandomSource, SafetensorsSource, choose_placement
from soloist.models.safetensors import SafetensorsFolder
from soloist.models.weights import RecordingSource
from soloist.roofline import Footprint
from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.spec.chain import ChainDrafter
from soloist.spec.setup import DrafterSetup
from soloist.spec.verify import Verdict

DEFAULT_DRAFTS = 5


class MTPDrafter(ChainDrafter):
    """Drafts with the layer that the target was trained with.

    Args:
        mtp: the layer.
        footprint: what a pass of it reads.
        max_context_len: most tokens of a request.
        max_drafts: tokens of a proposal, 1..15.
        is_fixed_shape: whether no shape may depend on data, as in a captured step. None: not on a CPU.
    """

    name = "mtp"

    def __init__(
        self,
        mtp: BailingMoeV3MTP,
        footprint: Footprint,
        *,
        max_context_len: int,
        max_drafts: int,
        is_fixed_shape: bool | None = None,
    ) -> None:
        super().__init__(max_drafts=max_drafts, device=mtp.device, is_fixed_shape=is_fixed_shape)
        self.mtp, self.footprint = mtp, footprint
        limit = mtp.config.max_position_embeddings
        size = min(max_context_len + max_drafts, limit)
        self.max_context_len = size - max_drafts
        # As long as the target's, between steps.
        self.cache = mtp.make_cache(size, 1 + max_drafts)
        # The chain of drafts: rows behind those of `cache` in the same tensor.
        self.chain = Cache(max_context_len=size, max_width=1, device=mtp.device, latent=self.cache.latent)
        # (1, D): the layer's output at the last committed position, which predicts the token behind the pending one.
        self.last_hidden = torch.zeros(1, mtp.config.hidden_size, dtype=mtp.dtype, device=mtp.device)
        # (1, D): what the chain goes on with.
        self._chain_hidden = self.last_hidden

    def begin(self, prompt_ids: torch.Tensor, plan: SamplingPlan) -> None:
        super().begin(prompt_ids, plan)
        self._prompt_ids, self._num_read = prompt_ids, 0
        self.cache.reset()

    def read_bytes(self, width: int, context_len: int, *, distinct_experts: float | None = None) -> float:
        if width == 1:
            return 0.0
        # The first draft follows from the pass over the step's rows; the output head is read for each.
        chain = (width - 2) * self.footprint.step_bytes(1, context_len).total
        update = self.footprint.step_bytes(width, context_len, distinct_experts=distinct_experts).total
        return chain + update + (width - 1) * held_bytes(self.mtp.target.lm_head)

    def prefill_chunk(self, input_ids: torch.Tensor, hidden: torch.Tensor, captured: torch.Tensor | None) -> None:
        C = input_ids.shape[0]
        # Each row takes the token one to the right; the last one's is the next chunk's first, or the pending token.
        tokens = self._prompt_ids[self._num_read + 1 :][:C]  # (C,)
        with self.cache.known_len(self._num_read):
            out = self.mtp.forward(self.mtp.target.final_norm(hidden), tokens, self.cache)  # (C, D)
        self.cache.commit(C, StepKind.PREFILL)
        self._num_read += C
        self.last_hidden.copy_(out[-1:])

    def propose(self, buffers: StepBuffers, context_len: torch.Tensor) -> None:
        # A prompt of one token gives its first step no hidden state to draft from.
        if not self.is_fixed_shape and int(context_len) == 0:
            buffers.width.clamp_max_(1)
        super().propose(buffers, context_len)
        if self.is_fixed_shape:
            buffers.width.copy_(torch.where(context_len > 0, buffers.width, buffers.width.clamp_max(1)))

    def first_hidden(self) -> torch.Tensor:
        self.chain.context_len.copy_(self.cache.context_len)
        self._chain_hidden = self.last_hidden
        return self.last_hidden

    def next_hidden(self, token: torch.Tensor) -> torch.Tensor:
        self._chain_hidden = self.mtp.forward(self._chain_hidden, token, self.chain)  # (1, D)
        self.chain.commit(1, StepKind.DECODE)
        return self._chain_hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mtp.compute_logits(hidden)

    def pick_likeliest(self, hidden: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return self.mtp.pick_likeliest(hidden, num_tokens)[0]

    def update(
        self, buffers: StepBuffers, verdict: Verdict, hidden: torch.Tensor, captured: torch.Tensor | None
    ) -> None:
        num_committed, tokens = verdict.num_committed, verdict.committed_tokens
        if not self.is_fixed_shape:
            num_rows = int(num_committed)
            hidden, tokens = hidden[:num_rows], tokens[:num_rows]
        if hidden.shape[0] == 0:
            return
        hidden = self.mtp.target.final_norm(hidden)  # (T, D)
        out = self.mtp.forward(hidden, tokens, self.cache, width=num_committed)  # (T, D)
        self.cache.commit(num_committed, StepKind.VERIFY)
        choices = torch.cat([self.last_hidden, out])  # (T+1, D)
        self.last_hidden.copy_(choices.index_select(0, num_committed.view(1)))

    def snapshot(self) -> tuple[Snapshot, torch.Tensor]:
        return self.cache.snapshot(), self.last_hidden.clone()

    def restore(self, snapshot: object) -> None:
        assert isinstance(snapshot, tuple)
        rows, last_hidden = snapshot
        self.cache.restore(rows)
        self.last_hidden.copy_(last_hidden)
        self._num_read = rows.context_len


def load_mtp(setup: DrafterSetup) -> MTPDrafter:
    """Load the layer from the target's checkpoint; random numbers if the target's weights are random.

    Raises:
        UnsupportedError: the target has no such layer.
        CheckpointError: its checkpoint lacks tensors of the layer.
    """
    target, path = setup.target, setup.target_path
    if not isinstance(target, BailingMoeV3ForCausalLM):
        raise UnsupportedError(f"a {target.architecture} has no MTP layer; `ngram` drafts for every model")
    placement = choose_placement(target.device, target.dtype, setup.weights_dtype, setup.layer_group)
    asked = RecordingSource(target.dtype, setup.layer_group)
    BailingMoeV3MTP(target, asked)
    source: LoadingSource
    if path is None:
        source = RandomSource(setup.seed, placement)
    else:
        folder = SafetensorsFolder(path)
        if wrong := [name for name, shape in asked.shapes.items() if folder.shapes.get(name) != shape]:
            raise CheckpointError(
                f"{path} lacks {len(wrong)} of {len(asked.shapes)} tensors of its MTP layer, such as {wrong[0]}:"
                " draft with another drafter"
            )
        source = SafetensorsSource(folder, placement)
    counted = CountingSource(source)
    mtp = BailingMoeV3MTP(target, counted)
    return MTPDrafter(
        mtp,
        counted.footprint(mtp.make_cache(1), target.config, num_layers=1),
        max_context_len=setup.max_context_len,
        max_drafts=setup.max_drafts(DEFAULT_DRAFTS),
    )
