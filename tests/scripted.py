"""Scripted parts for tests of the loop: models that say what they are told, drafters that are right, wrong, random."""

from collections.abc import Callable, Sequence

import torch

from soloist.engine import Engine
from soloist.kernels.sampling import Stream, draft_counter, draw, uniform
from soloist.models.cache import Cache, StepKind
from soloist.models.causal_lm import CausalLM, HiddenCapture, ModelConfig
from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.runtime.runner import ModelRunner
from soloist.spec.drafter import Drafter
from soloist.spec.verify import Rule


class TableModel(CausalLM):
    """A model whose logits are a function of position and last token.

    Args:
        logits: given (T,) positions and (T,) token ids, gives (T, N) logits.
    """

    architecture = "Scripted"

    def __init__(
        self,
        vocab_size: int,
        logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        max_context_len: int = 512,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.config = ModelConfig(
            vocab_size=vocab_size,
            hidden_size=2,
            num_hidden_layers=1,
            max_position_embeddings=max_context_len,
            eos_token_ids=eos_token_ids,
        )
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self._logits = logits
        self.num_forwards = 0

    def make_cache(self, max_context_len: int, max_width: int = 16) -> Cache:
        return Cache(max_context_len=max_context_len, max_width=max_width, device=self.device)

    def forward(
        self,
        input_ids: torch.Tensor,
        cache: Cache,
        kind: StepKind,
        *,
        width: torch.Tensor | None = None,
        capture: HiddenCapture | None = None,
    ) -> torch.Tensor:
        self.num_forwards += 1
        T = input_ids.shape[0]
        assert int(cache.context_len) + T <= cache.max_context_len, "a step wrote behind the cache"
        hidden = torch.stack([cache.context_len + torch.arange(T), input_ids], dim=1).float()  # (T, 2)
        if capture is not None:
            for layer in capture.layers:
                capture.keep(layer, hidden)
        return hidden

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        positions, input_ids = hidden.long().unbind(1)
        return self._logits(positions, input_ids).float()


class Script(Drafter):
    """Commits given ids in given groups: `Script([[5], [7, 8]])` is a model that says 5 7 8, in two steps.

    Behind its last token the model goes on with `end_id`.
    """

    name = "script"

    def __init__(
        self, groups: Sequence[Sequence[int]], *, vocab_size: int, end_id: int = 0, max_context_len: int = 512
    ) -> None:
        self.token_ids = [token for group in groups for token in group]
        # Tokens from each place to the end of its group.
        self._group_left = [left for group in groups for left in range(len(group), 0, -1)]
        self._end_id = end_id
        self._num_prompt = 0
        self.max_drafts = max(map(len, groups)) - 1
        self.model = TableModel(vocab_size, self._logits, max_context_len=max_context_len)

    def begin(self, prompt_ids: torch.Tensor, plan: SamplingPlan) -> None:
        self._num_prompt = prompt_ids.shape[0]

    def propose(self, buffers: StepBuffers, context_len: torch.Tensor) -> None:
        at = int(context_len) - self._num_prompt + 1
        width = self._group_left[at] if at < len(self._group_left) else 1
        buffers.width.clamp_max_(width)
        if width > 1:
            buffers.input_ids[1:width] = torch.tensor(self.token_ids[at : at + width - 1])

    def _logits(self, positions: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        at = (positions - self._num_prompt + 1).tolist()
        said = [self.token_ids[i] if 0 <= i < len(self.token_ids) else self._end_id for i in at]
        # Some spread, so that log probabilities differ from token to token.
        logits = torch.cos(torch.arange(self.model.config.vocab_size) + positions[:, None])  # (T, N)
        return logits.scatter(1, torch.tensor(said)[:, None], 20.0)

    def engine(self, *, eos_token_ids: tuple[int, ...] = (), num_tokens: int | None = None) -> Engine:
        """Make the engine that runs the script."""
        runner = ModelRunner(self.model, max_width=1 + self.max_drafts, num_tokens=num_tokens)
        return Engine(runner, self, eos_token_ids=eos_token_ids)


class KnownAnswer(Drafter):
    """Drafts an answer that is known beforehand, right or with every token wrong.

    Args:
        answers: the answer to each prompt, by the prompt's ids.
        offset: added to each token; 0 is right, anything else wrong.
        widths: widths of the steps, over and over. The drafts themselves are always `max_drafts`.
    """

    name = "known"

    def __init__(
        self,
        answers: dict[tuple[int, ...], list[int]],
        *,
        max_drafts: int,
        vocab_size: int,
        offset: int = 0,
        widths: Sequence[int] | None = None,
    ) -> None:
        self.answers, self.offset, self.vocab_size = answers, offset, vocab_size
        self.max_drafts = max_drafts
        self.widths = widths or [1 + max_drafts]
        self._num_steps = 0
        self._prompt: tuple[int, ...] = ()

    def begin(self, prompt_ids: torch.Tensor, plan: SamplingPlan) -> None:
        self._prompt = tuple(prompt_ids.tolist())

    def propose(self, buffers: StepBuffers, context_len: torch.Tensor) -> None:
        at = int(context_len) - len(self._prompt) + 1
        drafts = (self.answers[self._prompt] + [0] * self.max_drafts)[at : at + self.max_drafts]
        drafts += [0] * (self.max_drafts - len(drafts))
        buffers.input_ids[1:] = (torch.tensor(drafts, dtype=torch.int64) + self.offset) % self.vocab_size
        buffers.width.clamp_max_(self.widths[self._num_steps % len(self.widths)])
        self._num_steps += 1


class RandomDrafter(Drafter):
    """Draws drafts from a law that depends on the row only; with `has_draft_law` it says which."""

    name = "random"

    def __init__(self, *, max_drafts: int, vocab_size: int, has_draft_law: bool, sharpness: float = 1.0) -> None:
        self.max_drafts, self.has_draft_law = max_drafts, has_draft_law
        generator = torch.Generator().manual_seed(5)
        logits = torch.randn(max_drafts, vocab_size, generator=generator) * sharpness
        self.laws = logits.softmax(-1)  # (T-1, N)

    def propose(self, buffers: StepBuffers, context_len: torch.Tensor) -> None:
        counters = draft_counter(context_len, buffers.rows[1:])
        buffers.input_ids[1:] = draw(self.laws, uniform(buffers.seed, counters, Stream.DRAFT))
        buffers.width.clamp_max_(1 + self.max_drafts)
        if buffers.draft_probs is not None:
            buffers.draft_probs.copy_(self.laws)


def make_engine(
    model: CausalLM,
    drafter: Drafter | None = None,
    *,
    eos_token_ids: tuple[int, ...] = (),
    rule: Rule = Rule.CHAIN,
    max_context_len: int | None = None,
    chunk_tokens: int | None = None,
) -> Engine:
    """Put a model and a drafter together."""
    runner = ModelRunner(
        model,
        max_context_len=max_context_len,
        max_width=1 + (drafter.max_drafts if drafter else 0),
        has_draft_probs=bool(drafter and drafter.has_draft_law),
        capture_layers=drafter.capture_layers if drafter else (),
        chunk_tokens=chunk_tokens,
    )
    return Engine(runner, drafter, eos_token_ids=eos_token_ids, rule=rule)
