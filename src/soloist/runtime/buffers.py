"""What a step reads and writes besides weights and caches: `StepBuffers`, allocated once, each field with its shape.

Owns the request's parameters on the device and the progress of the answer. The codes in which a step says how an answer
ended are here too, as is `SamplingPlan`, the parts of the sampler that a request runs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import torch

from soloist.sampling_params import SamplingParams

# Most rows of a step: the pending token and 15 drafts.
MAX_WIDTH = 16


class FinishCode(IntEnum):
    """How an answer stands, as a device scalar. Of several that apply the highest counts."""

    RUNNING = 0
    # All the tokens that were asked for are emitted.
    LENGTH = 1
    # A stop token was emitted.
    STOP = 2
    # The logits hold a NaN or an infinity; nothing was emitted.
    NOT_FINITE = 3


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """Which parts of the sampler a request runs. Fixed before its first step, so that no step branches on data."""

    is_greedy: bool
    has_logit_bias: bool
    has_penalties: bool
    has_min_tokens: bool
    has_logprobs: bool
    # Whether tokens are drawn that top-k, top-p or min-p cut.
    has_filters: bool
    # Whether every row has a set of its own of the tokens that may be drawn.
    has_constraint: bool

    @property
    def needs_logits(self) -> bool:
        """Whether a step must hold a row of logits, rather than only know its largest."""
        return self != SamplingPlan.of(SamplingParams())

    @classmethod
    def of(cls, params: SamplingParams, *, has_constraint: bool = False) -> Self:
        """Choose the parts that `params` needs."""
        return cls(
            has_constraint=has_constraint,
            is_greedy=params.is_greedy,
            has_logit_bias=bool(params.logit_bias),
            has_penalties=params.has_penalties,
            has_min_tokens=params.min_tokens > 0,
            has_logprobs=params.logprobs is not None,
            has_filters=not params.is_greedy and params.has_filters,
        )


@dataclass(frozen=True, kw_only=True)
class StepBuffers:
    """Inputs, parameters and progress of one request. T is the most rows a step may have, N the tokens it may draw."""

    # (T,) int64: the pending token (emitted, in no cache yet), then the draft tokens, always ids below N.
    input_ids: torch.Tensor
    # () int32, 0..T: rows of this step that count; those behind are padding. Before a proposal, the most it may have; 0
    # behind the end of an answer.
    width: torch.Tensor
    # (T-1, N) fp32: the law each draft token was drawn from. None: drafters here choose without drawing.
    draft_probs: torch.Tensor | None
    # (T,) int32: 0, 1, .. T-1.
    rows: torch.Tensor

    # () int32: tokens that may still be emitted; 0 once the answer has ended, and a step then changes nothing.
    num_left: torch.Tensor
    # () int32, may be negative: so many of the next tokens may not be stop tokens.
    num_unstoppable: torch.Tensor
    # () int32: a `FinishCode`.
    finish_code: torch.Tensor
    # (3,) int32: the codes of an ended answer, for comparing with.
    end_codes: torch.Tensor
    # () bool: raised by the host to end the answer before the device does. On a GPU in pinned host memory. A step reads
    # it where it ends: a recurrent state has moved on by then, so its own tokens count.
    is_stop_requested: torch.Tensor

    # () int64.
    seed: torch.Tensor
    # () fp32; 1 when greedy, where it is not read.
    temperature: torch.Tensor
    # () int32; N keeps all.
    top_k: torch.Tensor
    # () fp32.
    top_p: torch.Tensor
    # () fp32.
    min_p: torch.Tensor
    # () fp32.
    repetition_penalty: torch.Tensor
    # () fp32.
    presence_penalty: torch.Tensor
    # () fp32.
    frequency_penalty: torch.Tensor
    # (N) bool: tokens that end the answer.
    stop_mask: torch.Tensor
    # (N) fp32, added to the logits; written only for a plan that has it.
    logit_bias: torch.Tensor
    # (T, N) bool: tokens that each row may be followed by; written and read only for a plan with a constraint.
    is_allowed: torch.Tensor
    # (N) bool: tokens of the prompt; written only for a plan with penalties.
    prompt_mask: torch.Tensor
    # (N) int32: how often the answer holds each token, the pending one included; as above.
    output_counts: torch.Tensor

    @classmethod
    def allocate(
        cls, *, max_width: int, num_tokens: int, has_draft_probs: bool = False, device: torch.device | str = "cpu"
    ) -> Self:
        """Allocate the buffers of one engine.

        Args:
            max_width: T, 1..16.
            num_tokens: N, the ids that may be drawn: the vocabulary without the padding rows of the model's head.
            has_draft_probs: whether the drafter draws from a law that verification must know.
            device: where.
        """
        assert 1 <= max_width <= MAX_WIDTH, f"a step has 1..{MAX_WIDTH} rows, got {max_width}"

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        T, N = max_width, num_tokens
        is_gpu = torch.device(device).type == "cuda"
        i32, f32 = torch.int32, torch.float32
        scalars = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        counters = ("num_left", "num_unstoppable", "finish_code", "top_k")
        return cls(
            input_ids=zeros(T, dtype=torch.int64),
            width=torch.ones((), dtype=i32, device=device),
            draft_probs=zeros(T - 1, N, dtype=f32) if has_draft_probs else None,
            rows=torch.arange(T, dtype=i32, device=device),
            end_codes=torch.tensor(
                [FinishCode.LENGTH, FinishCode.STOP, FinishCode.NOT_FINITE], dtype=i32, device=device
            ),
            is_stop_requested=torch.zeros((), dtype=torch.bool, pin_memory=True) if is_gpu else zeros(dtype=torch.bool),
            seed=zeros(dtype=torch.int64),
            stop_mask=zeros(N, dtype=torch.bool),
            logit_bias=zeros(N, dtype=f32),
            is_allowed=zeros(T, N, dtype=torch.bool),
            prompt_mask=zeros(N, dtype=torch.bool),
            output_counts=zeros(N, dtype=i32),
            **{name: zeros(dtype=f32) for name in scalars},
            **{name: zeros(dtype=i32) for name in counters},
        )

    @property
    def max_width(self) -> int:
        """T."""
        return self.input_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.stop_mask.shape[0]

    def begin(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        stop_ids: Iterable[int],
        has_constraint: bool = False,
    ) -> SamplingPlan:
        """Set everything for a request, before its first step.

        Args:
            prompt_ids: the prompt; its last token becomes the first pending token.
            params: what was asked; seed, max_tokens and stop ids are given as they were resolved.
            seed: 64 bits, signed.
            max_tokens: at least 1.
            stop_ids: tokens that end the answer.
            has_constraint: whether `is_allowed` will be written in every step.

        Returns:
            What of the sampler the request needs.
        """
        plan = SamplingPlan.of(params, has_constraint=has_constraint)
        self.input_ids.zero_()
        self.input_ids[0] = prompt_ids[-1]
        self.width.fill_(min(self.max_width, max_tokens))
        self.num_left.fill_(max_tokens)
        # No answer is longer; more than fits a word may be asked for where nothing bounds the answer but the context.
        self.num_unstoppable.fill_(min(params.min_tokens, max_tokens))
        self.finish_code.fill_(FinishCode.RUNNING)
        self.is_stop_requested.fill_(False)
        self.seed.fill_(seed)
        self.temperature.fill_(1 if params.is_greedy else params.temperature)
        self.top_k.fill_(self.num_tokens if params.top_k is None else min(params.top_k, self.num_tokens))
        for name in ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            getattr(self, name).fill_(getattr(params, name))
        self.stop_mask.fill_(False)
        self.stop_mask[_ids(stop_ids, self.stop_mask)] = True
        if plan.has_logit_bias:
            bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=self.logit_bias.device)
            self.logit_bias.zero_()
            self.logit_bias[_ids(params.logit_bias, self.logit_bias)] = bias
        if plan.has_penalties:
            self.output_counts.zero_()
            self.prompt_mask.fill_(False)
            self.prompt_mask[_ids(prompt_ids, self.prompt_mask)] = True
        return plan

    def end(self) -> None:
        """Put the request behind its end: steps then change nothing, as capture needs it."""
        self.num_left.zero_()
        self.width.zero_()

    def advance(
        self, committed_tokens: torch.Tensor, num_committed: torch.Tensor, finish_code: torch.Tensor, plan: SamplingPlan
    ) -> None:
        """Record what a step emitted; its last token is the next one pending.

        Args:
            committed_tokens: (T,) int64; T may be less than the most.
            num_committed: () int32, 0..T: rows of `committed_tokens` that count.
            finish_code: () int32.
            plan: of the request.
        """
        choices = torch.cat([self.input_ids[:1], committed_tokens])  # (T+1,)
        self.input_ids[:1] = choices.index_select(0, num_committed.view(1))
        self.num_left.sub_(num_committed).mul_((finish_code == 0) & ~self.is_stop_requested)
        self.width.copy_(self.num_left.clamp(max=self.max_width))
        self.num_unstoppable.sub_(num_committed)
        self.finish_code.copy_(finish_code)
        if plan.has_penalties:
            self.count(committed_tokens, num_committed)

    def count(self, committed_tokens: torch.Tensor, num_committed: torch.Tensor) -> None:
        """Count the first `num_committed` of the tokens (T,) into `output_counts`."""
        is_committed = self.rows[: committed_tokens.shape[0]] < num_committed  # (T,)
        self.output_counts.scatter_add_(0, committed_tokens, is_committed.int())


def _ids(ids: Iterable[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=like.device)
