"""One answer that is wanted, on its way, and whole; with the figures and the receipt of what it took."""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from soloist.answer import Delta, Stream
from soloist.generation import Constraint, Generation
from soloist.request_stats import RequestStats
from soloist.runtime.ring import TokenLogprob
from soloist.sampling_params import SamplingParams
from soloist.server.queue import Job, NeverBegun
from soloist.server.rendering import Rendered
from soloist.server.reply_text import Piece, SplitText, TextSplitter

if TYPE_CHECKING:
    from soloist.server.service import Service


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How much of a prompt has been read."""

    num_done: int
    num_total: int


@dataclass(kw_only=True)
class Ask:
    """One answer that is wanted."""

    route: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    # Lengths of beginnings of the prompt to which later prompts are likely to return.
    turn_ends: Sequence[int] = ()
    constraint: Constraint | None = None
    # Likeliest tokens to report beside each prompt token; None: the prompt is not scored.
    prompt_logprobs: int | None = None
    # A newer answer with the same key replaces this one.
    key: str | None = None
    # Whether `Progress` is among the parts.
    wants_progress: bool = False
    # Making the prompt of messages.
    template_s: float = 0.0
    # Given the text piece by piece, says how much of a piece belongs to the answer once that has ended.
    find_end: Callable[[str], int | None] | None = None


@dataclass(kw_only=True)
class Gaps:
    """When the parts of an answer came."""

    first_s: float | None = None
    last_s: float = 0.0
    longest_s: float = 0.0

    def note(self, now_s: float) -> None:
        """Count one more part."""
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.longest_s = max(self.longest_s, now_s - self.last_s)
        self.last_s = now_s


class Reply:
    """One answer on its way: iterate for its parts; made by `Service.ask`.

    Parts are `Delta`, one for every step, `Progress` while the prompt is read, and None after a silence.
    """

    def __init__(self, service: "Service", ask: Ask, generation: Generation, stream: Stream) -> None:
        self.id = f"{next(service.numbers):x}-{time.time_ns() & 0xFFFFFFFFFF:010x}"
        self.ask = ask
        self.created = int(time.time())
        self._service = service
        self._generation = generation
        self._stream = stream
        self._gaps = Gaps()
        # Text tokens come at once; the first may be of a step that is still held back.
        self.num_tokens = 0
        self.delta: Delta | None = None
        self._num_reasoning_chars = 0
        self._job: Job = service.queue.submit(self._work, stream.cancel, key=ask.key)
        self._is_over = False

    def _work(self) -> Iterator[Delta]:
        self._generation.on_prefill = self._note_prefill
        try:
            for delta in self._stream:
                self._service.last_token_s = time.monotonic()
                yield delta
        finally:
            self._stream.close()

    def _note_prefill(self, num_done: int, num_total: int) -> None:
        self._service.queue.note_progress()
        if self.ask.wants_progress:
            self._job.put(Progress(num_done=num_done, num_total=num_total))

    async def parts(self, silence_s: float | None = None) -> AsyncIterator[Delta | Progress | None]:
        """Give the answer's parts, and end its work when the reader stops reading.

        Args:
            silence_s: give None whenever nothing came for so long.
        """
        error: BaseException | None = None
        try:
            async for part in self._job.items(silence_s=silence_s):
                if isinstance(part, Delta):
                    self._gaps.note(time.perf_counter())
                    self.num_tokens += len(part.token_ids)
                    self.delta = part
                yield part
        except NeverBegun:
            self.delta = Delta(
                text="", token_ids=(), logprobs=(), finish_reason="cancelled", stop_match=None, stats=self.stats
            )
            yield self.delta
        except BaseException as caught:
            error = caught
            raise
        finally:
            if not self.is_complete:
                self._job.cancel()
            self._finish(error)

    async def whole(self) -> "Answer":
        """Wait for the whole answer."""
        answer = Answer()
        async for part in self.parts():
            if isinstance(part, Delta):
                answer.add(part)
        return answer

    async def split(self, rendered: Rendered) -> tuple["Answer", SplitText]:
        """Wait for the whole answer; its text is told apart as well."""
        answer, splitter, pieces = Answer(), rendered.splitter(), list[Piece]()
        async for part in self.parts():
            if isinstance(part, Delta):
                answer.add(part)
                pieces += self.pieces(splitter, part)
        return answer, SplitText.of(pieces)

    def cancel(self) -> None:
        """End the work within one step; the last part then says so."""
        self._job.cancel()

    def pieces(self, splitter: TextSplitter, delta: Delta) -> list[Piece]:
        """Tell the parts of a delta's text apart, and count what was reasoning."""
        pieces = splitter.push(delta.text)
        if delta.finish_reason is not None:
            pieces += splitter.finish()
        self._num_reasoning_chars = splitter.num_reasoning_chars
        return pieces

    @property
    def is_complete(self) -> bool:
        """Whether the last part was given."""
        return self.delta is not None and self.delta.finish_reason is not None

    @property
    def is_replaced(self) -> bool:
        """Whether a newer request with the same key ended this one."""
        return self._job.is_replaced

    @property
    def stats(self) -> RequestStats:
        """What the answer took so far; tokens are those that were given out."""
        return self._stream.stats

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Of every prompt token but the first, once the prompt has been read."""
        return self._generation.prompt_logprobs

    @property
    def age_s(self) -> float:
        """Time since the request came."""
        return time.perf_counter() - self._job.submitted_s + self.ask.template_s

    @property
    def finish_reason(self) -> str:
        """How the answer ended: stop, length, cancelled, or error."""
        if self.delta is None or self.delta.finish_reason is None:
            return "cancelled" if self._job.is_cancelled else "error"
        return self.delta.finish_reason

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens, in OpenAI's words."""
        stats = self.stats
        num_answer = stats.completion_tokens if self.is_complete else self.num_tokens
        return {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": num_answer,
            "total_tokens": stats.prompt_tokens + num_answer,
            "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the answer that were reasoning or its marks, as far as `pieces` has seen it."""
        num_chars = self._num_reasoning_chars
        return min(self._stream.num_tokens_at(num_chars), self.num_tokens) if num_chars else 0

    @property
    def timings(self) -> dict[str, Any]:
        """Times in llama.cpp's words. Prompt tokens are those really read, not those kept."""
        stats = self.stats
        num_new = stats.prompt_tokens - stats.cached_tokens
        prompt_ms, decode_ms = 1000 * (stats.ttft_s or stats.prefill_s), 1000 * stats.decode_s
        num_behind = max(stats.completion_tokens - 1, 0)
        return {
            "cache_n": stats.cached_tokens,
            "prompt_n": num_new,
            "prompt_ms": round(prompt_ms, 3),
            "prompt_per_token_ms": round(prompt_ms / num_new, 3) if num_new else 0.0,
            "prompt_per_second": round(1000 * num_new / prompt_ms, 2) if prompt_ms else 0.0,
            "predicted_n": stats.completion_tokens,
            "predicted_ms": round(decode_ms, 3),
            "predicted_per_token_ms": round(decode_ms / num_behind, 3) if num_behind else 0.0,
            "predicted_per_second": round(1000 * num_behind / decode_ms, 2) if decode_ms else 0.0,
            "draft_n": stats.drafted,
            "draft_n_accepted": stats.accepted,
        }

    @property
    def speculation(self) -> dict[str, Any]:
        """What the drafter did: drafted tokens are those really verified."""
        stats = self.stats
        rate = stats.acceptance_rate
        return {
            "drafter": stats.drafter,
            "steps": stats.forwards,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "acceptance_rate": None if rate is None else round(rate, 4),
            "mean_accepted_per_step": round(stats.accepted / stats.forwards, 4) if stats.forwards else 0.0,
            "tokens_per_step": round(stats.acceptance_length, 4),
            "accepted_histogram": list(stats.accepted_histogram),
            "drafted_histogram": list(stats.drafted_histogram),
        }

    @property
    def receipt(self) -> dict[str, Any]:
        """What the answer took, and why it was not less."""
        stats, ask = self.stats, self.ask
        ttft_s = None if self._gaps.first_s is None else self._gaps.first_s - self._job.submitted_s + ask.template_s
        return {
            "id": self.id,
            "route": ask.route,
            "queue_ms": round(1000 * self._job.waited_s, 3),
            "template_ms": round(1000 * ask.template_s, 3),
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "prefix": self._service.explain(self._generation),
            "prefill_ms": round(1000 * stats.prefill_s, 3),
            "ttft_ms": None if ttft_s is None else round(1000 * ttft_s, 3),
            "completion_tokens": stats.completion_tokens,
            "decode_tok_per_s": None if stats.decode_tok_per_s is None else round(stats.decode_tok_per_s, 2),
            "tpot_ms": None if stats.tpot_ms is None else round(stats.tpot_ms, 4),
            "tokens_per_step": round(stats.acceptance_length, 3),
            "share_of_floor": self._service.share_of_floor(stats),
            "longest_gap_ms": round(1000 * self._gaps.longest_s, 3),
            "seed": stats.seed,
            "finish_reason": self.finish_reason,
        }

    @property
    def figures(self) -> dict[str, Any]:
        """What goes into every answer besides its text."""
        return {"timings": self.timings, "speculation": self.speculation, "receipt": self.receipt}

    def _finish(self, error: BaseException | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        is_failed = error is not None and isinstance(error, Exception)
        self._service.note(self, "error" if is_failed else self.finish_reason, self._job.waited_s, self._gaps)


@dataclass(kw_only=True)
class Answer:
    """A whole answer put together again."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    stop_match: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Append one part."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_match = delta.finish_reason, delta.stop_match
