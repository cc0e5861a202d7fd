"""The one generation loop: token ids in, committed tokens out, 1..16 a step.

Owns the step (draft, verify, accept, commit, extend, publish), the request that is under way and its figures. Knows no
text: stop strings and characters are `llm`'s. The first token of an answer comes from an ordinary step, whose pending
token is the prompt's last: a cold prompt and one whose prefix is in the cache run the same passes from there on.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch

from soloist.errors import ContextLengthError, NumericsError, UsageError
from soloist.kernels.sampling import top_logprobs
from soloist.runtime.buffers import FinishCode, SamplingPlan
from soloist.runtime.ring import StepRecord, TokenLogprob, TokenRing
from soloist.runtime.runner import ModelRunner
from soloist.runtime.sampler import make_target
from soloist.sampling_params import SamplingParams
from soloist.spec.drafter import Drafter, NoDrafter
from soloist.spec.verify import Rule, accept

FinishReason = Literal["stop", "length", "cancelled"]

_REASONS: dict[FinishCode, FinishReason] = {FinishCode.STOP: "stop", FinishCode.LENGTH: "length"}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step added to an answer."""

    token_ids: list[int]
    # One per token if they were asked for, else none.
    logprobs: list[TokenLogprob]
    # How the answer ended; None while it goes on.
    finish_reason: FinishReason | None


@dataclass(frozen=True, kw_only=True)
class RequestStats:
    """What a request took. Tokens are those the client was given."""

    prompt_tokens: int
    completion_tokens: int
    # Of the random numbers; None for a greedy request, which draws none.
    seed: int | None
    # Name of the drafter; with the seed, what a sampled text depends on.
    drafter: str
    # Reading the prompt, without its last token.
    prefill_s: float
    # From the request to its first token; None: there was none.
    ttft_s: float | None
    # From the first token to the last.
    decode_s: float
    # Passes of the target after prefill, those without a draft included.
    forwards: int
    # Draft tokens that were verified, and of them those that were kept.
    drafted: int
    accepted: int
    # Element j: steps that verified, and that kept, j draft tokens.
    drafted_histogram: tuple[int, ...]
    accepted_histogram: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens of the answer per forward pass; 0 without a pass."""
        return self.completion_tokens / self.forwards if self.forwards else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the verified draft tokens that was kept; None without any."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Element k: of the steps that verified a draft at place k, the share that kept it."""
        deepest = max((j for j, steps in enumerate(self.drafted_histogram) if steps), default=0)
        return tuple(
            sum(self.accepted_histogram[k + 1 :]) / sum(self.drafted_histogram[k + 1 :]) for k in range(deepest)
        )

    @property
    def tpot_ms(self) -> float | None:
        """Time per token behind the first; None for fewer than two tokens."""
        return 1000 * self.decode_s / (self.completion_tokens - 1) if self.completion_tokens > 1 else None

    @property
    def decode_tok_per_s(self) -> float | None:
        """Tokens behind the first per second; None for fewer than two tokens."""
        return (self.completion_tokens - 1) / self.decode_s if self.completion_tokens > 1 and self.decode_s else None


class Engine:
    """Answers one request at a time with one model and one drafter.

    Args:
        runner: the model, with buffers for the drafter's proposals.
        drafter: what proposes tokens; None: plain decoding.
        eos_token_ids: tokens that end an answer. None: those of the model's config.
        rule: how drafts with a law are verified.
    """

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None = None,
        *,
        eos_token_ids: Sequence[int] | None = None,
        rule: Rule = Rule.CHAIN,
    ) -> None:
        self.runner = runner
        self.drafter = drafter or NoDrafter()
        self.eos_token_ids = tuple(runner.model.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.rule = rule
        buffers = runner.buffers
        assert buffers.max_width == 1 + self.drafter.max_drafts, "the buffers are of another width than the drafts"
        assert not self.drafter.has_draft_law or buffers.draft_probs is not None
        device = buffers.input_ids.device
        # Steps run one at a time: one slot is read while the next is written.
        self.ring = TokenRing(num_slots=2, max_width=buffers.max_width, num_tokens=buffers.num_tokens, device=device)
        # On the CPU the width can be read for nothing, and padding rows would cost; a captured step has all rows.
        self._reads_width = device.type == "cpu"
        # Held by the request that is under way.
        self.in_use = threading.Lock()

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> "Generation":
        """Check a request; its work is done as the result is iterated over.

        Args:
            prompt_ids: at least one token.
            params: how to sample and when to end. Stop strings are not looked at here.
            on_prefill: called with (prompt tokens read, prompt tokens to read) while the prompt is read.

        Raises:
            ContextLengthError: the prompt, or prompt and answer, do not fit into the context.
            UsageError: the prompt is empty, or a token id is not in the vocabulary.
        """
        self._check_ids("the prompt", prompt_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", tuple(params.logit_bias))
        max_tokens = self._max_tokens(len(prompt_ids), params)
        return Generation(self, list(prompt_ids), params, max_tokens, on_prefill)

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        num_tokens = self.runner.buffers.num_tokens
        for token_id in token_ids:
            if not 0 <= token_id < num_tokens:
                raise UsageError(f"{name}: there is no token {token_id}; the vocabulary has ids 0 to {num_tokens - 1}")

    def _max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        """Resolve how many tokens an answer may have."""
        limit = self.runner.max_context_len
        if num_prompt == 0:
            raise UsageError("the prompt is empty; give at least one token, such as BOS")
        room = limit - num_prompt
        if room < (1 if params.max_tokens is None else min(params.max_tokens, 1)):
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens; the context holds {limit}, and an answer needs at least one of"
                " them: shorten the prompt, or load the model with a larger context"
            )
        if params.max_tokens is None:
            return room
        if params.max_tokens > room:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens and max_tokens is {params.max_tokens}; the context holds {limit}:"
                f" ask for at most {room} tokens, or load the model with a larger context"
            )
        return params.max_tokens

    def make_step(self, plan: SamplingPlan) -> Callable[[], None]:
        """Compose one step for requests with this plan: fixed shapes, no host decision, ready to be captured."""
        runner, drafter, ring, rule = self.runner, self.drafter, self.ring, self.rule
        buffers, context_len = runner.buffers, runner.cache.context_len
        may_read_width = self._reads_width and buffers.max_width > 1

        @torch.inference_mode()
        def step() -> None:
            drafter.propose(buffers, context_len)
            if drafter.max_drafts:
                # A draft behind the last token that was asked for is not verified.
                buffers.width.copy_(torch.minimum(buffers.width, buffers.num_left.clamp_min(1)))
            num_rows = int(buffers.width) if may_read_width else buffers.max_width
            hidden, logits = runner.forward(num_rows)  # (T, D), (T, N)
            has_law = drafter.has_draft_law and num_rows > 1
            target = make_target(logits, buffers, context_len, plan, has_draft_law=has_law)
            verdict = accept(target, buffers, context_len, rule)
            runner.commit(verdict.num_committed, num_rows)
            drafter.update(buffers, verdict, hidden, runner.captured(num_rows))
            ring.publish(
                verdict.committed_tokens,
                verdict.num_committed,
                buffers.width - 1,
                verdict.num_accepted,
                verdict.finish_code,
                top_logprobs(logits, verdict.committed_tokens) if plan.has_logprobs else None,
            )
            buffers.advance(verdict.committed_tokens, verdict.num_committed, verdict.finish_code, plan)

        return step


class Generation:
    """A request under way: an iterator of `StepResult`, of which the last has a finish reason.

    Made by `Engine.generate`. Iterating raises `NumericsError` where the model's output is not finite, and `UsageError`
    while another request of the same engine is under way.
    """

    def __init__(
        self,
        engine: Engine,
        prompt_ids: list[int],
        params: SamplingParams,
        max_tokens: int,
        on_prefill: Callable[[int, int], None] | None,
    ) -> None:
        self._engine = engine
        self._prompt_ids = prompt_ids
        self._params = params
        self._max_tokens = max_tokens
        self._on_prefill = on_prefill
        # The answer so far.
        self.token_ids: list[int] = []
        self._seed = secrets.randbits(63) if params.seed is None else params.seed
        self._is_cancelled = threading.Event()
        # Whether this request holds the engine, and whether its last result was given.
        self._is_running = self._is_over = False
        self._step: Callable[[], None] | None = None
        self._num_kept: int | None = None
        # (drafted, accepted) of every step.
        self._drafts: list[tuple[int, int]] = []
        self._start_s = self._prefilled_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = 0.0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepResult:
        if self._is_over:
            raise StopIteration
        try:
            result = self._next_result()
        except BaseException:
            self.close()
            raise
        if result.finish_reason is not None:
            self.close()
        return result

    def __del__(self) -> None:
        self.close()

    def cancel(self) -> None:
        """End the request within one step, or one chunk of the prompt; may be called from any thread."""
        self._is_cancelled.set()

    def close(self) -> None:
        """End the request and let the engine go; from the thread that iterates."""
        self._is_over = True
        if self._is_running:
            self._is_running = False
            # Steps that were enqueued ahead do nothing from here on.
            self._engine.runner.buffers.is_stop_requested.fill_(True)
            self._engine.in_use.release()

    def keep(self, num_tokens: int) -> None:
        """Say that the client was given only the first `num_tokens` of the answer: the stats then end there too."""
        self._num_kept = num_tokens

    @property
    def stats(self) -> RequestStats:
        """What the request took so far."""
        width = self._engine.runner.buffers.max_width
        drafted, accepted = ([step[i] for step in self._drafts] for i in range(2))
        return RequestStats(
            prompt_tokens=len(self._prompt_ids),
            completion_tokens=len(self.token_ids) if self._num_kept is None else self._num_kept,
            seed=None if self._params.is_greedy else self._seed,
            drafter=self._engine.drafter.name,
            prefill_s=self._prefilled_s - self._start_s,
            ttft_s=None if self._first_s is None else self._first_s - self._start_s,
            decode_s=0.0 if self._first_s is None else self._last_s - self._first_s,
            forwards=len(self._drafts),
            drafted=sum(drafted),
            accepted=sum(accepted),
            drafted_histogram=tuple(drafted.count(j) for j in range(width)),
            accepted_histogram=tuple(accepted.count(j) for j in range(width)),
        )

    def _next_result(self) -> StepResult:
        if self._step is None:
            if not self._engine.in_use.acquire(blocking=False):
                raise UsageError("the model is answering another request; finish or close that one first")
            self._is_running = True
            plan = self._begin()
            if not self._prefill(plan):
                return _end("cancelled")
            if self._max_tokens == 0:
                return _end("length")
            self._step = self._engine.make_step(plan)
        if self._is_cancelled.is_set():
            return _end("cancelled")
        self._step()
        return self._take_record()

    def _begin(self) -> SamplingPlan:
        engine = self._engine
        self._start_s = self._prefilled_s = time.perf_counter()
        eos = () if self._params.ignore_eos else engine.eos_token_ids
        engine.ring.reset()
        return engine.runner.buffers.begin(
            self._prompt_ids,
            self._params,
            seed=self._seed,
            max_tokens=self._max_tokens,
            stop_ids={*eos, *self._params.stop_token_ids},
        )

    @torch.inference_mode()
    def _prefill(self, plan: SamplingPlan) -> bool:
        engine = self._engine
        prompt = torch.tensor(self._prompt_ids, device=engine.runner.buffers.input_ids.device)  # (n,)
        engine.drafter.begin(prompt, plan)
        is_done = engine.runner.prefill(
            prompt[:-1],
            on_chunk=engine.drafter.prefill_chunk,
            on_progress=self._on_prefill,
            is_cancelled=self._is_cancelled.is_set,
        )
        self._prefilled_s = time.perf_counter()
        return is_done

    def _take_record(self) -> StepResult:
        record = self._engine.ring.poll(self._params.logprobs)
        assert record is not None, "a step published nothing"
        if record.finish_code is FinishCode.NOT_FINITE:
            self._raise_not_finite()
        self._note(record)
        return StepResult(
            token_ids=record.token_ids,
            logprobs=record.logprobs,
            finish_reason=_REASONS.get(record.finish_code),
        )

    def _note(self, record: StepRecord) -> None:
        self.token_ids += record.token_ids
        self._drafts.append((record.num_drafted, record.num_accepted))
        self._last_s = time.perf_counter()
        if self._first_s is None:
            self._first_s = self._last_s

    def _raise_not_finite(self) -> None:
        token_ids = [*self._prompt_ids, *self.token_ids]
        with torch.inference_mode():
            where = self._engine.runner.locate_non_finite(token_ids)
        raise NumericsError(
            f"the logits behind token {len(token_ids) - 1} are not finite: {where}. A damaged weight, or values too"
            " large for the dtype; bfloat16 and float32 have the larger range"
        )


def _end(reason: FinishReason) -> StepResult:
    return StepResult(token_ids=[], logprobs=[], finish_reason=reason)
