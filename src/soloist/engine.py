"""The one generation loop: token ids in, committed tokens out, 1..16 a step.

Owns the step (draft, verify, accept, commit, extend, publish) and what requests have in common; a request under way is
`generation`'s. Knows no text: stop strings and characters are `llm`'s. The first token of an answer comes from an
ordinary step, whose pending token is the prompt's last: a cold prompt and one whose prefix is in the cache run the same
passes from there on.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from soloist.errors import ContextLengthError, UsageError
from soloist.generation import Constraint, Generation
from soloist.kernels.allreduce import broadcast
from soloist.kernels.compile_ahead import OnCompiled
from soloist.kernels.sampling import top_logprobs
from soloist.prefix import PrefixStore
from soloist.runtime.buffers import SamplingPlan
from soloist.runtime.comm import Ranks
from soloist.runtime.device_loop import DeviceLoop, check_device_loop
from soloist.runtime.graph import Execution, StepGraph, StepQueue, compile_ahead
from soloist.runtime.ring import TokenRing
from soloist.runtime.runner import ModelRunner
from soloist.runtime.sampler import Target, make_target
from soloist.runtime.turn import turn_of
from soloist.sampling_params import SamplingParams
from soloist.spec.costs import StepCosts
from soloist.spec.drafter import Drafter, NoDrafter
from soloist.spec.simulate import accept_by_lot, solve_acceptance
from soloist.spec.stats import DraftTotals
from soloist.spec.switch import WINDOW_STEPS, DraftSwitch
from soloist.spec.verify import Rule, accept, finish
from soloist.spec.width import WidthRule

# Steps of one launch of a device loop: few enough for a small ring, so many that the next launch costs nothing.
_LOOP_STEPS = 64


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
            benchmarks. A narrower step keeps each draft with the same probability. None: drafts are verified.

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
        # Keeps the ranks of the model in step; set by who started them.
        self.ranks = Ranks()
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
        if self.execution.has_device_loop:
            check_device_loop(device)
        if device.type != "cuda" and self.execution != Execution.best_for(device):
            raise UsageError(f"steps on {device} have one form: --graph and the other switches are those of a GPU's")
        self.execution.check_num_ranks(runner.model.group.size)
        if not self.execution.has_bf16_head:
            runner.widen_head()
        # One slot is read while the steps ahead of it and the next one, or two loops, are written.
        self.ring = TokenRing(
            num_slots=2 * _LOOP_STEPS + 1 if self.execution.has_device_loop else self.execution.run_ahead + 2,
            max_width=buffers.max_width,
            num_tokens=buffers.num_tokens,
            device=device,
        )
        # Captured steps by plan; they share one memory pool, since one runs at a time.
        self._graphs: dict[tuple[SamplingPlan, bool], StepGraph | DeviceLoop] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.execution.is_captured else None
        # On the CPU the width can be read for nothing, and padding rows would cost; a captured step has all rows.
        self._reads_width = device.type == "cpu"
        # Both are held by the request that is under way: the engine itself, and on a GPU that of all its engines.
        self._in_use = threading.Lock()
        self._turn = turn_of(device)
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

    def take(self) -> None:
        """Begin to step: nobody else does so with this engine, or on its GPU, until it is given back.

        Raises:
            UsageError: somebody else does.
        """
        if not self._in_use.acquire(blocking=False):
            raise UsageError("the model is answering another request; finish or close that one first")
        if not self._turn.take():
            self._in_use.release()
            raise UsageError(
                f"another model of this process is at work on {self._turn.device}, where one works at a time: finish or"
                " close its request first, or give each model a process of its own"
            )

    def give_back(self) -> None:
        """Let others step; by who took the engine, in any thread."""
        try:
            self._turn.give_back()
        finally:
            self._in_use.release()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Take the engine inside the block, for what steps without a request.

        Raises:
            UsageError: as `take` says.
        """
        self.take()
        try:
            yield
        finally:
            self.give_back()

    def adapt_width(self, costs: StepCosts) -> None:
        """From now on choose widths by what was kept and what rows cost, and turn drafting off where it loses.

        Between requests only.

        Args:
            costs: of this engine's steps.
        """
        buffers = self.runner.buffers
        assert len(costs.step_ms) == buffers.max_width > 1, "the costs are of steps of another width"
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
    ) -> Generation:
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
            UsageError: the prompt is empty, a token id is not in the vocabulary, or a constraint is asked of steps in a
                device loop.
        """
        if constraint is not None and self.execution.has_device_loop:
            raise UsageError(
                "a grammar is decided on the host between steps, and a device loop has no such place: load the model"
                " without --device-loop"
            )
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

    def compile_ahead(self, plans: Sequence[SamplingPlan], on_compiled: OnCompiled | None = None) -> None:
        """Compile what reads prompts, and the steps of requests with these plans, side by side; for what is captured.

        By who has taken the engine, as `prepare`.

        Args:
            plans: of the requests.
            on_compiled: called with (kernels compiled, kernels to compile), for each plan.
        """
        if not self.execution.is_captured:
            return
        passes = self.runner.prompt_passes()
        for plan in plans:
            with self._behind_the_end(plan):
                steps = [self.make_step(plan, is_drafting=is_drafting) for is_drafting in self._kinds]
                compile_ahead([*passes, *steps], on_compiled)
            passes = []

    def prepare(self, plan: SamplingPlan) -> None:
        """Capture the step of requests with this plan, if steps are captured and this one is not yet.

        By who has taken the engine, before its first step: the buffers are behind the end of a request.
        """
        if not self.execution.is_captured or (plan, True) in self._graphs:
            return
        with self._behind_the_end(plan):
            for is_drafting in self._kinds:
                self._graphs[plan, is_drafting] = self.capture(self.make_step(plan, is_drafting=is_drafting))
        self.ring.reset()

    @property
    def _kinds(self) -> tuple[bool, ...]:
        """Whether steps draft: all of them, or as the switch says."""
        return (True,) if self.switch is None else (True, False)

    @contextmanager
    def _behind_the_end(self, plan: SamplingPlan) -> Iterator[None]:
        """Have steps change nothing inside the block."""
        self.runner.buffers.end()
        with torch.inference_mode():
            # The drafter must know what is drawn; its state of the last request is still wanted.
            state = self.drafter.snapshot()
            self.drafter.begin(self.runner.buffers.input_ids[:1], plan)
            yield
            if state is not None:
                self.drafter.restore(state)

    def capture(self, step: Callable[[], None]) -> StepGraph | DeviceLoop:
        """Capture a step of this engine, which changes nothing now, in the form that the execution replays."""
        graph = StepGraph(step, pool=self._pool)
        if not self.execution.has_device_loop:
            return graph
        return DeviceLoop(graph, self.runner.buffers.num_left, max_steps=self._steps_per_launch)

    def open_queue(self, plan: SamplingPlan, constraint: Constraint | None, num_top: int | None) -> StepQueue:
        """Give the steps of a request whose buffers are set and whose prompt is read."""
        is_captured = constraint is None and self.execution.is_captured
        launches = [
            self._graphs[plan, is_drafting].replay
            if is_captured
            else self.make_step(plan, constraint, is_drafting=is_drafting)
            for is_drafting in self._kinds
        ]
        launch = launches[0] if self.switch is None else self._switched(*launches)
        return self.queue(launch, num_top=num_top, is_captured=is_captured)

    def queue(self, launch: Callable[[], None], *, num_top: int | None, is_captured: bool) -> StepQueue:
        """Enqueue what `launch` does as the execution says, and take its records."""
        run_ahead = self.execution.run_ahead if is_captured else 0
        if self.execution.has_device_loop and self.switch is None:
            # The next loop waits behind the one that runs.
            run_ahead = self._steps_per_launch
        return StepQueue(
            launch, self.ring, run_ahead=run_ahead, num_top=num_top, steps_per_launch=self._steps_per_launch
        )

    @property
    def _steps_per_launch(self) -> int:
        """Steps of one launch; a loop ends where the switch decides."""
        if not self.execution.has_device_loop:
            return 1
        return _LOOP_STEPS if self.switch is None else WINDOW_STEPS

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
        @self.execution.switches()
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
            if plan.needs_logits or not self.execution.has_bf16_head:
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
        buffers, group = self.runner.buffers, self.runner.model.group
        if group.rank > 0:
            broadcast(buffers.width, group)
            broadcast(buffers.is_allowed, group)
            return
        drafts = buffers.input_ids[1 : int(buffers.width)].tolist()
        legal = drafts[: constraint.num_legal(drafts)]
        num_drafts = min(len(drafts), len(legal) + is_drawn)
        buffers.width.clamp_max_(1 + num_drafts)
        allowed = constraint.allowed(legal)  # (T, N)
        # Padding rows count for nothing, but their logits must stay numbers.
        buffers.is_allowed.fill_(True)
        buffers.is_allowed[: allowed.shape[0]].copy_(allowed)
        broadcast(buffers.width, group)
        broadcast(buffers.is_allowed, group)
