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
from typing import Literal, Protocol, Self

import torch

from soloist.errors import ContextLengthError, NumericsError, UsageError
from soloist.kernels.sampling import top_logprobs
from soloist.prefix import PrefixStore, Reuse
from soloist.runtime.buffers import FinishCode, SamplingPlan
from soloist.runtime.graph import Execution, StepGraph, StepQueue
from soloist.runtime.ring import StepRecord, TokenLogprob, TokenRing
from soloist.runtime.runner import ModelRunner
from soloist.runtime.sampler import Target, make_target
from soloist.sampling_params import SamplingParams
from soloist.spec.costs import StepCosts
from soloist.spec.drafter import Drafter, NoDrafter
from soloist.spec.simulate import accept_by_lot, solve_acceptance
from soloist.spec.stats import DraftTotals
from soloist.spec.switch import DraftSwitch
from soloist.spec.verify import Rule, accept, finish
from soloist.spec.width import WidthRule

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


@dataclass(frozen=True, kw_only=True)
class RequestStats:
    """What a request took. Tokens are those the client was given."""

    prompt_tokens: int
    # Of them, those whose state was kept from earlier requests.
    cached_tokens: int
    completion_tokens: int
    # Of the random numbers; None for a greedy request, which draws none.
    seed: int | None
    # Name of the drafter and how widths are chosen; with the seed, what a sampled text depends on.
    drafter: str
    policy: str
    # Tokens of the answer after which drafting was turned off, because it lost; None: it was not.
    drafting_off_after: int | None
    # Whether drafts were kept by lot: the text is then not the model's.
    simulated: bool
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
        prefixes: what is kept for later requests. None: every prompt is read whole.
        execution: how steps are run. None: what is fastest on the model's device.
        simulated_acceptance: tokens that a step of full width shall commit on average, whatever the target says; for
            benchmarks. None: drafts are verified.

    Raises:
        UsageError: a simulated acceptance without drafts, or one that no step reaches.
        ContextLengthError: the drafter can follow fewer tokens than the context has room for.
    """

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None = None,
        *,
        eos_token_ids: Sequence[int] | None = None,
        rule: Rule = Rule.CHAIN,
        prefixes: PrefixStore | None = None,
        execution: Execution | None = None,
        simulated_acceptance: float | None = None,
    ) -> None:
        self.runner = runner
        self.prefixes = prefixes
        self.drafter = drafter or NoDrafter()
        self.eos_token_ids = tuple(runner.model.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.rule = rule
        buffers = runner.buffers
        assert buffers.max_width == 1 + self.drafter.max_drafts, "the buffers are of another width than the drafts"
        assert not self.drafter.has_draft_law or buffers.draft_probs is not None
        drafter_limit = self.drafter.max_context_len
        if drafter_limit is not None and drafter_limit < runner.max_context_len:
            raise ContextLengthError(
                f"the draft can follow {drafter_limit} tokens, the context has room for {runner.max_context_len}: ask"
                f" for a context of at most {drafter_limit} tokens"
            )
        device = buffers.input_ids.device
        self.execution = execution or Execution.best_for(device)
        # One slot is read while the steps ahead of it and the next one are written.
        self.ring = TokenRing(
            num_slots=self.execution.run_ahead + 2,
            max_width=buffers.max_width,
            num_tokens=buffers.num_tokens,
            device=device,
        )
        # Captured steps by plan; they share one memory pool, since one runs at a time.
        self._graphs: dict[tuple[SamplingPlan, bool], StepGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.execution.is_captured else None
        # On the CPU the width can be read for nothing, and padding rows would cost; a captured step has all rows.
        self._reads_width = device.type == "cpu"
        # Held by the request that is under way.
        self.in_use = threading.Lock()
        # Of the requests that have ended.
        self.totals = DraftTotals()
        # Set by `adapt_width`.
        self.width_rule: WidthRule | None = None
        self.switch: DraftSwitch | None = None
        # Of each draft, once it is reached.
        self._simulated_probability: float | None = None
        if simulated_acceptance is not None:
            if not self.drafter.max_drafts:
                raise UsageError("simulated acceptance needs a drafter: without drafts nothing is accepted")
            self._simulated_probability = solve_acceptance(simulated_acceptance, buffers.max_width)

    def adapt_width(self, costs: StepCosts) -> None:
        """From now on choose widths by what was kept and what rows cost, and turn drafting off where it loses.

        Between requests only.

        Args:
            costs: of this engine's steps.

        Raises:
            UsageError: acceptance is simulated, which is done for a fixed width.
        """
        buffers = self.runner.buffers
        assert len(costs.step_ms) == buffers.max_width > 1, "the costs are of steps of another width"
        if self._simulated_probability is not None:
            raise UsageError("a simulated acceptance length is that of a fixed width: leave adaptive width out")
        device, has_confidences = buffers.width.device, self.drafter.has_confidences
        self.width_rule = WidthRule(costs, has_confidences=has_confidences, device=device)
        self.drafter.width_rule = self.width_rule
        self.switch = DraftSwitch(costs)
        self._graphs.clear()

    @property
    def is_simulated(self) -> bool:
        """Whether drafts are kept by lot, whatever the model says."""
        return self._simulated_probability is not None

    @property
    def policy(self) -> str:
        """How widths are chosen, in words for the stats."""
        max_width = self.runner.buffers.max_width
        if self.switch is None:
            return f"fixed width {max_width}"
        return f"adaptive width 1..{max_width} by {self.switch.policy}"

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        on_prefill: Callable[[int, int], None] | None = None,
        turn_ends: Sequence[int] = (),
        constraint: Constraint | None = None,
        prompt_logprobs: int | None = None,
    ) -> "Generation":
        """Check a request; its work is done as the result is iterated over.

        Args:
            prompt_ids: at least one token.
            params: how to sample and when to end. Stop strings are not looked at here.
            on_prefill: called with (prompt tokens read, prompt tokens to read) while the prompt is read.
            turn_ends: lengths of beginnings of the prompt to which later prompts are likely to return.
            constraint: what the answer may say.
            prompt_logprobs: report the log probability of each prompt token, with this many of the likeliest, 0..20, in
                `Generation.prompt_logprobs`. The whole prompt is then read, whatever is kept of it.

        Raises:
            ContextLengthError: the prompt, or prompt and answer, do not fit into the context.
            UsageError: the prompt is empty, or a token id is not in the vocabulary.
        """
        self._check_ids("the prompt", prompt_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", tuple(params.logit_bias))
        max_tokens = self._max_tokens(len(prompt_ids), params)
        generation = Generation(self, list(prompt_ids), params, max_tokens, on_prefill)
        generation.turn_ends = tuple(turn_ends)
        generation.constraint = constraint
        generation.num_prompt_logprobs = prompt_logprobs
        return generation

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

    def prepare(self, plan: SamplingPlan) -> None:
        """Capture the step of requests with this plan, if steps are captured and this one is not yet.

        Between requests only: the buffers are then behind the end of one.
        """
        if not self.execution.is_captured or (plan, True) in self._graphs:
            return
        self.runner.buffers.end()
        with torch.inference_mode():
            # The drafter must know what is drawn; its state of the last request is still wanted.
            state = self.drafter.snapshot()
            self.drafter.begin(self.runner.buffers.input_ids[:1], plan)
            for is_drafting in (True,) if self.switch is None else (True, False):
                step = self.make_step(plan, is_drafting=is_drafting)
                graph = StepGraph(step, has_pdl=self.execution.has_pdl, pool=self._pool)
                self._graphs[plan, is_drafting] = graph
            if state is not None:
                self.drafter.restore(state)
        self.ring.reset()

    def open_queue(self, plan: SamplingPlan, constraint: Constraint | None, num_top: int | None) -> StepQueue:
        """Give the steps of a request whose buffers are set and whose prompt is read."""
        is_captured = constraint is None and self.execution.is_captured
        launches = [
            self._graphs[plan, is_drafting].replay
            if is_captured
            else self.make_step(plan, constraint, is_drafting=is_drafting)
            for is_drafting in ((True,) if self.switch is None else (True, False))
        ]
        launch = launches[0] if self.switch is None else self._switched(*launches)
        run_ahead = self.execution.run_ahead if is_captured else 0
        return StepQueue(launch, self.ring, run_ahead=run_ahead, num_top=num_top)

    def _switched(self, drafting: Callable[[], None], plain: Callable[[], None]) -> Callable[[], None]:
        """Let the switch choose each step as it is enqueued."""
        switch, rule = self.switch, self.width_rule
        assert switch is not None and rule is not None

        def launch() -> None:
            if switch.has_clock:
                rule.cap.fill_(1 if switch.is_probing else self.runner.buffers.max_width)
            (drafting if switch.is_on else plain)()

        return launch

    def make_step(
        self, plan: SamplingPlan, constraint: Constraint | None = None, *, is_drafting: bool = True
    ) -> Callable[[], None]:
        """Compose one step for requests with this plan: fixed shapes, no host decision, ready to be captured.

        A constraint is decided on the host between proposal and verification: such a step cannot be captured. A step
        without drafting leaves the drafter's state where it is.
        """
        runner, drafter, ring, rule = self.runner, self.drafter, self.ring, self.rule
        width_rule, probability = self.width_rule, self._simulated_probability
        buffers, context_len = runner.buffers, runner.cache.context_len
        may_read_width = self._reads_width and buffers.max_width > 1

        @torch.inference_mode()
        def step() -> None:
            if is_drafting:
                if width_rule is not None:
                    width_rule.limit(buffers.width)
                drafter.propose(buffers, context_len)
            else:
                buffers.width.clamp_max_(1)
            if drafter.max_drafts:
                # A draft behind the last token that was asked for is not verified.
                buffers.width.copy_(torch.minimum(buffers.width, buffers.num_left.clamp_min(1)))
            if constraint is not None:
                self._constrain(constraint, is_drawn=drafter.has_draft_law and not plan.is_greedy)
            num_rows = int(buffers.width) if may_read_width else buffers.max_width if is_drafting else 1
            hidden = runner.forward(num_rows)  # (T, D)
            logits = None
            if plan.needs_logits:
                logits = runner.compute_logits(hidden)  # (T, N)
                has_law = drafter.has_draft_law and num_rows > 1 and probability is None
                target = make_target(logits, buffers, context_len, plan, has_draft_law=has_law)
            else:
                tokens, highest = runner.model.pick_likeliest(hidden, buffers.num_tokens)  # (T,), (T,)
                target = Target(tokens=tokens, probs=None, highest=highest)
            if probability is None:
                verdict = accept(target, buffers, context_len, rule)
            else:
                verdict = accept_by_lot(target, buffers, context_len, probability)
            runner.commit(verdict.num_committed, num_rows)
            if is_drafting:
                if width_rule is not None:
                    width_rule.record(buffers.width, verdict.num_accepted)
                drafter.update(buffers, verdict, hidden, runner.captured(num_rows))
            logprobs = None
            if logits is not None and plan.has_logprobs:
                logprobs = top_logprobs(logits, verdict.committed_tokens)
            finish(verdict, buffers, ring, plan, logprobs=logprobs)

        return step

    def _constrain(self, constraint: Constraint, *, is_drawn: bool) -> None:
        """Cut the proposal at its first illegal token, and write down what every row may be followed by.

        An illegal token that was drawn from a law stays, as the last one, and is refused: a width that depended on what
        was drawn would favour what the draft likes.
        """
        buffers = self.runner.buffers
        drafts = buffers.input_ids[1 : int(buffers.width)].tolist()
        legal = drafts[: constraint.num_legal(drafts)]
        num_drafts = min(len(drafts), len(legal) + is_drawn)
        buffers.width.clamp_max_(1 + num_drafts)
        allowed = constraint.allowed(legal)  # (T, N)
        # Padding rows count for nothing, but their logits must stay numbers.
        buffers.is_allowed.fill_(True)
        buffers.is_allowed[: allowed.shape[0]].copy_(allowed)


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
        self._seed = secrets.randbits(63) if params.seed is None else params.seed
        self._is_cancelled = threading.Event()
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
            result = self._next_result()
        except BaseException:
            self._has_failed = True
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
            # Steps that were enqueued ahead do nothing behind the one under way, whose tokens nobody was given.
            self._engine.runner.buffers.is_stop_requested.fill_(True)
            unread = [token for record in self._drain() for token in record.token_ids]
            # A pass that broke off may have written state that belongs to no token.
            if self._engine.prefixes is not None and not self._has_failed:
                self._engine.prefixes.end([*self.prompt_ids, *self.token_ids, *unread])
            self._is_counted = True
            self._count(1)
            self._engine.in_use.release()

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
            seed=None if self._params.is_greedy else self._seed,
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
            if not self._engine.in_use.acquire(blocking=False):
                raise UsageError("the model is answering another request; finish or close that one first")
            self._is_running = True
            plan = self._begin()
            if not self._prefill(plan):
                return _end("cancelled")
            if self._max_tokens == 0:
                return _end("length")
            self._steps = self._engine.open_queue(plan, self.constraint, self._params.logprobs)
        if self._is_cancelled.is_set():
            return _end("cancelled")
        started_s = time.perf_counter()
        record = self._steps.next()
        if (switch := self._engine.switch) is not None:
            switch.note(record.num_drafted + 1, len(record.token_ids), 1000 * (time.perf_counter() - started_s))
            self._engine.drafter.is_following = switch.is_on
        return self._take_record(record)

    def _begin(self) -> SamplingPlan:
        engine, has_constraint = self._engine, self.constraint is not None
        self._start_s = self._prefilled_s = time.perf_counter()
        if not has_constraint:
            engine.prepare(SamplingPlan.of(self._params))
        if engine.width_rule is not None and engine.switch is not None:
            engine.width_rule.begin()
            # Steps that are enqueued ahead cannot be timed one by one, and timings would make the text differ.
            engine.switch.begin(has_clock=self._params.seed is None and not engine.execution.is_captured)
        engine.ring.reset()
        eos = () if self._params.ignore_eos else engine.eos_token_ids
        return engine.runner.buffers.begin(
            self.prompt_ids,
            self._params,
            seed=self._seed,
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

        return self._engine.runner.prefill(
            prompt[start:end], on_chunk=on_chunk, on_progress=on_progress, is_cancelled=self._is_cancelled.is_set
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
            self._raise_not_finite()
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
