"""One request under way: the prompt read, steps enqueued, records taken, figures kept.

Owns what belongs to a request and ends with it. The engine that runs its steps is `engine`'s.
"""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import torch

from soloist.errors import NumericsError
from soloist.kernels.sampling import top_logprobs
from soloist.prefix import Reuse
from soloist.request_stats import RequestStats
from soloist.runtime.buffers import FinishCode, SamplingPlan
from soloist.runtime.graph import StepQueue
from soloist.runtime.ring import StepRecord, TokenLogprob
from soloist.sampling_params import SamplingParams

if TYPE_CHECKING:
    from soloist.engine import Engine

FinishReason = Literal["stop", "length", "cancelled"]

_REASONS: dict[FinishCode, FinishReason] = {FinishCode.STOP: "stop", FinishCode.LENGTH: "length"}


# Rows whose logits over the whole vocabulary are held at once while a prompt is scored.
_SCORED_ROWS = 128


class Constraint(Protocol):
    """What an answer may say, decided on the host: a grammar. One object follows one answer."""

    def num_legal(self, draft_tokens: list[int]) -> int:
        """Count the leading drafts that may follow what was committed."""

    def allowed(self, draft_tokens: list[int]) -> torch.Tensor:
        """Give the tokens that may follow what was committed, and each of these legal drafts: (T, N) bool, CPU."""

    def advance(self, token_ids: list[int]) -> None:
        """Follow the answer by tokens that were committed.

        Raises:
            SoloistError: the answer cannot go on within the constraint.
        """


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step added to an answer."""

    token_ids: list[int]
    # One per token if they were asked for, else none.
    logprobs: list[TokenLogprob]
    # How the answer ended; None while it goes on.
    finish_reason: FinishReason | None


class Generation:
    """A request under way: an iterator of `StepResult`, of which the last has a finish reason.

    Made by `Engine.generate`. Iterating raises `NumericsError` where the model's output is not finite, and `UsageError`
    while another request of the same engine, or of another one on the same GPU, is under way.
    """

    def __init__(
        self,
        engine: "Engine",
        prompt_ids: list[int],
        params: SamplingParams,
        max_tokens: int,
        on_prefill: Callable[[int, int], None] | None,
    ) -> None:
        self._engine = engine
        self.prompt_ids = prompt_ids
        self._params = params
        self._max_tokens = max_tokens
        # Called with (prompt tokens read, prompt tokens to read); may be set until the request begins.
        self.on_prefill = on_prefill
        # As `Engine.generate` was given them.
        self.turn_ends: tuple[int, ...] = ()
        self.constraint: Constraint | None = None
        self.num_prompt_logprobs: int | None = None
        # One for every prompt token but the first, once the prompt is read; empty if they were not asked for.
        self.prompt_logprobs: list[TokenLogprob] = []
        # What of the prompt was kept; set when the request begins.
        self.reuse = Reuse(num_tokens=0, reason="nothing is kept between requests")
        # The answer so far.
        self.token_ids: list[int] = []
        # Of the random numbers; a rank takes rank 0's.
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self._is_cancelled = threading.Event()
        # Whether the other ranks wait for rank 0's word before the next step.
        self._awaits_word = False
        # Whether this request holds the engine, and whether its last result was given.
        self._is_running = self._is_over = self._has_failed = False
        # Whether it is among the engine's totals.
        self._is_counted = False
        self._steps: StepQueue | None = None
        self._num_kept: int | None = None
        # (drafted, accepted, committed) of every step.
        self._step_counts: list[tuple[int, int, int]] = []
        self._start_s = self._prefilled_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = 0.0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepResult:
        if self._is_over:
            raise StopIteration
        try:
            with self._engine.ranks.at_work():
                result = self._next_result()
        except BaseException as error:
            self._has_failed = True
            # All ranks find the same logits, so each ends by itself.
            is_alike = self._awaits_word or isinstance(error, NumericsError)
            is_out_of_step = self._is_running and not is_alike
            try:
                self.close()
            finally:
                # Also where the device is in no state to be asked for anything.
                if is_out_of_step:
                    self._engine.ranks.fail(error)
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
            try:
                with self._engine.ranks.at_work():
                    self._wind_up()
            finally:
                self._engine.give_back()

    def _wind_up(self) -> None:
        """Have what is under way end, and leave the engine as the next request needs it."""
        if self._awaits_word:
            self._engine.ranks.agree(True)
        if self._engine.ranks.group.size == 1:
            # Steps that were enqueued ahead do nothing behind the one under way, whose tokens nobody was given.
            # Ranks would see it at different steps, so they let the few that are under way commit.
            self._engine.runner.buffers.is_stop_requested.fill_(True)
        unread = [token for record in self._drain() for token in record.token_ids]
        # Steps so fast that none was left to see the request must not be gone on with.
        self._engine.runner.buffers.end()
        # A pass that broke off may have written state that belongs to no token.
        if self._engine.prefixes is not None and not self._has_failed:
            known_ids = [*self.prompt_ids, *self.token_ids, *unread]
            self._engine.prefixes.end(known_ids, self._engine.runner.cache, self._engine.drafter)
        self._is_counted = True
        self._count(1)

    def _drain(self) -> list[StepRecord]:
        return [] if self._steps is None else self._steps.drain()

    def keep(self, num_tokens: int) -> None:
        """Say that the client was given only the first `num_tokens` of the answer: the stats then end there too."""
        if self._is_counted:
            self._count(-1)
        self._num_kept = num_tokens
        if self._is_counted:
            self._count(1)

    def _count(self, weight: int) -> None:
        stats = self.stats
        self._engine.totals.add(
            completion_tokens=stats.completion_tokens,
            drafted_histogram=stats.drafted_histogram,
            accepted_histogram=stats.accepted_histogram,
            weight=weight,
        )

    def _counts(self) -> tuple[list[int], list[int]]:
        """Give the drafts that every step verified, and those it kept among the tokens that the client was given."""
        num_left = len(self.token_ids) if self._num_kept is None else self._num_kept
        accepted = []
        for _, num_accepted, num_committed in self._step_counts:
            accepted.append(min(num_accepted, num_left))
            num_left -= min(num_committed, num_left)
        return [num_drafted for num_drafted, _, _ in self._step_counts], accepted

    @property
    def stats(self) -> RequestStats:
        """What the request took so far."""
        engine, width = self._engine, self._engine.runner.buffers.max_width
        drafted, accepted = self._counts()
        return RequestStats(
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self.reuse.num_tokens,
            completion_tokens=len(self.token_ids) if self._num_kept is None else self._num_kept,
            seed=None if self._params.is_greedy else self.seed,
            drafter=engine.drafter.name,
            policy=engine.policy,
            drafting_off_after=None if engine.switch is None else engine.switch.off_after,
            simulated=engine.is_simulated,
            prefill_s=self._prefilled_s - self._start_s,
            ttft_s=None if self._first_s is None else self._first_s - self._start_s,
            decode_s=0.0 if self._first_s is None else self._last_s - self._first_s,
            forwards=len(self._step_counts),
            drafted=sum(drafted),
            accepted=sum(accepted),
            drafted_histogram=tuple(drafted.count(j) for j in range(width)),
            accepted_histogram=tuple(accepted.count(j) for j in range(width)),
        )

    def _next_result(self) -> StepResult:
        if self._steps is None:
            self._engine.take()
            self._is_running = True
            self._engine.ranks.lead(self._request())
            plan = self._begin()
            if not self._prefill(plan):
                return _end("cancelled")
            if self._max_tokens == 0:
                return _end("length")
            self._steps = self._engine.open_queue(plan, self.constraint, self._params.logprobs)
        self._awaits_word = False
        if self._engine.ranks.agree(self._is_cancelled.is_set()):
            return _end("cancelled")
        started_s = time.perf_counter()
        record = self._steps.next()
        if (switch := self._engine.switch) is not None:
            switch.note(record.num_drafted + 1, len(record.token_ids), 1000 * (time.perf_counter() - started_s))
            self._engine.drafter.is_following = switch.is_on
        return self._take_record(record)

    def _request(self) -> dict[str, Any]:
        """Put down what another rank needs to run the same request."""
        prefixes = self._engine.prefixes
        return {
            "prompt_ids": self.prompt_ids,
            "params": self._params,
            "seed": self.seed,
            # The text side adds its own to the model's.
            "eos_token_ids": self._engine.eos_token_ids,
            "turn_ends": self.turn_ends,
            "prompt_logprobs": self.num_prompt_logprobs,
            "has_constraint": self.constraint is not None,
            "prefix_bytes": None if prefixes is None else (prefixes.device_bytes, prefixes.host_bytes),
        }

    def _begin(self) -> SamplingPlan:
        engine, has_constraint = self._engine, self.constraint is not None
        self._start_s = self._prefilled_s = time.perf_counter()
        if not has_constraint:
            engine.prepare(SamplingPlan.of(self._params))
        if engine.width_rule is not None:
            engine.width_rule.begin()
        if engine.switch is not None:
            # Steps that are enqueued ahead cannot be timed one by one, timings would make the text differ, and every
            # rank has another clock.
            is_timed = not engine.execution.is_captured and engine.ranks.group.size == 1
            engine.switch.begin(has_clock=is_timed and self._params.seed is None)
        engine.ring.reset()
        eos = () if self._params.ignore_eos else engine.eos_token_ids
        return engine.runner.buffers.begin(
            self.prompt_ids,
            self._params,
            seed=self.seed,
            max_tokens=self._max_tokens,
            stop_ids={*eos, *self._params.stop_token_ids},
            has_constraint=has_constraint,
        )

    @torch.inference_mode()
    def _prefill(self, plan: SamplingPlan) -> bool:
        """Read what is not kept of the prompt; False after a cancel."""
        engine, runner = self._engine, self._engine.runner
        prompt = torch.tensor(self.prompt_ids, device=runner.buffers.input_ids.device)  # (n,)
        pauses: list[int] = []
        if engine.prefixes is None or self.num_prompt_logprobs is not None:
            engine.drafter.begin(prompt, plan)
            runner.cache.reset()
        else:
            self.reuse, restore = engine.prefixes.begin(self.prompt_ids, runner.cache, engine.drafter)
            engine.drafter.begin(prompt, plan)
            restore()
            if restore.is_exact:
                # Where this prompt left another one, the next one may leave both.
                pauses = sorted({*self.turn_ends, self.reuse.num_common})
        start, last = self.reuse.num_tokens, len(self.prompt_ids) - 1
        is_done = True
        for end in [*(place for place in pauses if start < place < last), last]:
            is_done = is_done and self._read_prompt(prompt, start, end)
            if is_done and end < last and engine.prefixes is not None:
                engine.prefixes.keep(self.prompt_ids[:end], runner.cache, engine.drafter)
            start = end
        engine.drafter.is_following = True
        self._prefilled_s = time.perf_counter()
        return is_done

    def _read_prompt(self, prompt: torch.Tensor, start: int, end: int) -> bool:
        """Read tokens `start` to `end` of the prompt; False after a cancel."""
        first, total = self.reuse.num_tokens, len(self.prompt_ids) - 1 - self.reuse.num_tokens

        def on_chunk(chunk: torch.Tensor, hidden: torch.Tensor, captured: torch.Tensor | None) -> None:
            if self.num_prompt_logprobs is not None:
                self._score(prompt, hidden)
            self._engine.drafter.prefill_chunk(chunk, hidden, captured)

        def on_progress(done: int, _of: int) -> None:
            if self.on_prefill is not None:
                self.on_prefill(start - first + done, total)

        def is_cancelled() -> bool:
            return self._engine.ranks.agree(self._is_cancelled.is_set())

        return self._engine.runner.prefill(
            prompt[start:end], on_chunk=on_chunk, on_progress=on_progress, is_cancelled=is_cancelled
        )

    def _score(self, prompt: torch.Tensor, hidden: torch.Tensor) -> None:
        """Note how likely each token behind the next C prompt tokens is, from their `hidden` (C, D)."""
        assert self.num_prompt_logprobs is not None
        num_tokens = self._engine.runner.buffers.num_tokens
        for start in range(0, hidden.shape[0], _SCORED_ROWS):
            rows = hidden[start : start + _SCORED_ROWS]
            at = len(self.prompt_logprobs) + 1
            tokens = prompt[at : at + rows.shape[0]]
            logits = self._engine.runner.model.compute_logits(rows)[:, :num_tokens]
            chosen, ids, values = (x.tolist() for x in top_logprobs(logits, tokens))
            M = self.num_prompt_logprobs
            self.prompt_logprobs += [
                TokenLogprob(token_id=token, logprob=logprob, top=tuple(zip(i[:M], v[:M], strict=True)))
                for token, logprob, i, v in zip(tokens.tolist(), chosen, ids, values, strict=True)
            ]

    def _take_record(self, record: StepRecord) -> StepResult:
        if record.finish_code is FinishCode.NOT_FINITE:
            self._engine.ranks.check()
            self._raise_not_finite()
        self._awaits_word = record.finish_code is FinishCode.RUNNING
        self._note(record)
        if self.constraint is not None:
            self.constraint.advance(record.token_ids)
        return StepResult(
            token_ids=record.token_ids,
            logprobs=record.logprobs,
            finish_reason=_REASONS.get(record.finish_code),
        )

    def _note(self, record: StepRecord) -> None:
        self.token_ids += record.token_ids
        self._step_counts.append((record.num_drafted, record.num_accepted, len(record.token_ids)))
        self._last_s = time.perf_counter()
        if self._first_s is None:
            self._first_s = self._last_s

    def _raise_not_finite(self) -> None:
        token_ids = [*self.prompt_ids, *self.token_ids]
        with torch.inference_mode():
            where = self._engine.runner.locate_non_finite(token_ids)
        raise NumericsError(
            f"the logits behind token {len(token_ids) - 1} are not finite: {where}. A damaged weight, or values too"
            " large for the dtype; bfloat16 and float32 have the larger range"
        )


def _end(reason: FinishReason) -> StepResult:
    return StepResult(token_ids=[], logprobs=[], finish_reason=reason)
