"""What every protocol asks of the model: answers that can be waited for, cancelled and counted.

Owns the line of requests, the figures and the receipt of each answer. Knows token ids and text, no protocol.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from soloist.answer import Delta, Stream
from soloist.errors import SoloistError, UsageError
from soloist.generation import Constraint, Generation
from soloist.llm import LLM
from soloist.request_stats import RequestStats
from soloist.sampling_params import SamplingParams
from soloist.server.metrics import Metrics
from soloist.server.queue import WorkQueue
from soloist.server.rendering import Rendered
from soloist.server.reply import Ask, Gaps, Reply
from soloist.server.settings import ServerSettings
from soloist.server.structured import Grammars
from soloist.server.telemetry import Tracer

logger = logging.getLogger("soloist.server")

# Requests whose receipts are kept for the page and for `/props`.
_NUM_RECEIPTS = 50


class Service:
    """One model behind one line of requests.

    Args:
        llm: the model; nothing else may use it meanwhile.
        settings: of the server.
    """

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.queue = WorkQueue(settings.max_waiting)
        self.metrics = Metrics(self)
        self.numbers = itertools.count(1)
        self._tracer = Tracer(settings.model_name) if settings.sends_traces else None
        self._grammars: Grammars | None = None
        self.started_s = time.monotonic()
        # When the engine last made a token; None: it has made none yet.
        self.last_token_s: float | None = None
        # Of the last request, prompt and answer.
        self.num_context_tokens = 0
        # Of the last requests, newest last.
        self.receipts: deque[dict[str, Any]] = deque(maxlen=_NUM_RECEIPTS)

    def ask(self, ask: Ask) -> Reply:
        """Check a request and put it in line; from the event loop.

        Raises:
            SoloistError: the request cannot be answered as it is.
        """
        generation = self.llm.engine.generate(
            ask.prompt_ids,
            ask.params,
            turn_ends=ask.turn_ends,
            constraint=ask.constraint,
            prompt_logprobs=ask.prompt_logprobs,
        )
        find_end = {} if ask.find_end is None else {"find_end": ask.find_end}
        return Reply(self, ask, generation, Stream(generation, self.llm.tokenizer, ask.params, **find_end))

    def constraint(
        self, schema: dict[str, Any] | None, params: SamplingParams, rendered: Rendered | None = None
    ) -> Constraint | None:
        """Make what holds one answer to a JSON schema, or to what its request says of calls; None for free text.

        Args:
            schema: of the answer, where it is no call.
            params: of the request.
            rendered: the prompt of a chat; gets a warning for what of a tool's schema is not followed.

        Raises:
            SoloistError: the schema cannot be followed, or a parameter would break it.
        """
        calls, to_the_letter = (None, None) if rendered is None else rendered.grammars(schema)
        if schema is None and calls is None:
            return None
        if self.llm.tokenizer is None:
            raise UsageError("a format needs text, and this model came without a tokenizer")
        if params.ignore_eos or params.min_tokens:
            raise UsageError("ignore_eos and min_tokens would go on behind the end of the format; leave them out")
        if self._grammars is None:
            engine = self.llm.engine
            self._grammars = Grammars(self.llm.tokenizer, engine.runner.buffers.num_tokens, engine.eos_token_ids)
        opens_reasoning = rendered is not None and rendered.opens_reasoning
        if calls is None:
            assert schema is not None
            return self._grammars.schema_constraint(schema, opens_reasoning=opens_reasoning)
        assert rendered is not None
        # Reasoning is part of a grammar that allows any text.
        is_free = schema is None and not rendered.rule.is_required
        constraint = self._grammars.call_constraint(
            calls, to_the_letter, opens_reasoning=opens_reasoning and not is_free
        )
        rendered.warnings.extend(w for w in constraint.warnings if w not in rendered.warnings)
        return constraint

    async def warm_up(self) -> None:
        """Make one token, so that readiness means that tokens are made."""
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        stream = self.llm.stream([0], params)

        def work() -> Iterator[Delta]:
            yield from stream
            if self.llm.engine.prefixes is not None:
                self.llm.engine.prefixes.forget_live()

        async for _ in self.queue.submit(work, stream.cancel).items():
            self.last_token_s = time.monotonic()

    async def clear_prefixes(self) -> None:
        """Forget what is kept of earlier requests, between two requests."""

        def work() -> Iterator[None]:
            if self.llm.engine.prefixes is not None:
                self.llm.engine.prefixes.clear()
            yield None

        async for _ in self.queue.submit(work).items():
            pass

    @property
    def status(self) -> str:
        """Whether requests are worked on: ok, stuck (the running one does not get on), or failed."""
        if not self.queue.is_alive or self.failure is not None:
            return "failed"
        return "stuck" if self.queue.silent_s > self.settings.stuck_after_s else "ok"

    @property
    def failure(self) -> SoloistError | None:
        """What no request can be answered after: one of the ranks that share the model is lost."""
        return self.llm.engine.ranks.loss

    def explain(self, generation: Generation) -> str:
        """Say in words how much of a prompt was kept and why not more, with the text where it leaves what is kept."""
        reuse, tokenizer = generation.reuse, self.llm.tokenizer
        if not reuse.kept_ids or tokenizer is None:
            return reuse.reason
        start = max(0, reuse.num_common - 4)
        given = generation.prompt_ids[start : reuse.num_common + len(reuse.kept_ids)]
        before = generation.prompt_ids[start : reuse.num_common]
        kept = tokenizer.decode([*before, *reuse.kept_ids], show_special=True)
        now = tokenizer.decode(given, show_special=True)
        return f"{reuse.reason}: kept {kept!r}, now {now!r}"

    def share_of_floor(self, stats: RequestStats) -> float | None:
        """Give the share of decoding time that moving the bytes must take; None if it is not known."""
        bandwidth, model = self.settings.bandwidth_gb_per_s, self.llm.engine.runner.model
        footprint = getattr(model, "footprint", None)
        num_steps = stats.forwards - 1
        if bandwidth is None or footprint is None or num_steps < 1 or not stats.decode_s:
            return None
        width = round(1 + stats.drafted / stats.forwards)
        context_len = stats.prompt_tokens + stats.completion_tokens // 2
        floor_ms = footprint.step_floor_ms(width, context_len, bandwidth_gb_per_s=bandwidth)
        return round(num_steps * floor_ms / (1000 * stats.decode_s), 4)

    def note(self, reply: Reply, finish_reason: str, waited_s: float, gaps: Gaps) -> None:
        """Count, log and keep a request that is over."""
        receipt = reply.receipt | {"finish_reason": finish_reason, "created": reply.created}
        self.receipts.append(receipt)
        self.num_context_tokens = receipt["prompt_tokens"] + receipt["completion_tokens"]
        if self._tracer is not None:
            self._tracer.note(reply, receipt)
        self.metrics.note(reply.stats, finish_reason, waited_s, receipt["ttft_ms"], gaps)
        speed = receipt["decode_tok_per_s"]
        logger.info(
            "%s %s: %d prompt tokens (%d kept), TTFT %s, %d tokens%s, %.2f a step, %s; prefix: %s",
            receipt["id"],
            receipt["route"],
            receipt["prompt_tokens"],
            receipt["cached_tokens"],
            "-" if receipt["ttft_ms"] is None else f"{receipt['ttft_ms']:.0f} ms",
            receipt["completion_tokens"],
            "" if speed is None else f" at {speed:.1f} tok/s",
            receipt["tokens_per_step"],
            f"cancelled after {reply.num_tokens} tokens" if finish_reason == "cancelled" else finish_reason,
            receipt["prefix"],
        )

    def close(self) -> None:
        """End all work; what is kept in files is written to its end."""
        self.queue.close()
        if self._tracer is not None:
            self._tracer.close()
            self._tracer = None
        prefixes = self.llm.engine.prefixes
        if prefixes is not None and prefixes.disk is not None:
            prefixes.disk.close()
