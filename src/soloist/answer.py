"""The text side of an answer: tokens in as steps commit them, text out, cut where a stop string begins.

Text, ids, log probabilities and usage end at the same token:

* A stop token (the model's end tokens, `stop_token_ids`) is the last of the answer's ids and counts; it has no text.
* A stop string ends the text before it. The ids end with the token that completed the last character of that text: a
  token that brought text before the stop string counts, one that brought nothing but stop string does not.
* An answer cut by `max_tokens` inside a character ends with one U+FFFD; the token counts.

While an answer streams, a token is given out together with the last character of its text, so ids never run ahead of
what may still be cut off. How tokens are grouped into steps makes no difference to any of this.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from soloist.generation import FinishReason, Generation, StepResult
from soloist.request_stats import RequestStats
from soloist.runtime.ring import TokenLogprob
from soloist.sampling_params import SamplingParams
from soloist.tokenizer import Detokenizer, StopMatcher, Tokenizer


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What one step added to an answer; there is one for every step, even if its text is still held back."""

    text: str
    # Tokens whose text is complete with `text`.
    token_ids: tuple[int, ...]
    # One per token if they were asked for, else none.
    logprobs: tuple[TokenLogprob, ...]
    # In the last delta only:
    finish_reason: FinishReason | None
    # The stop string or the id of the stop token that ended the answer.
    stop_match: str | int | None
    stats: RequestStats | None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    # One per token if they were asked for, else none.
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    # The stop string or the id of the stop token that ended the answer.
    stop_match: str | int | None
    stats: RequestStats

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.stats.prompt_tokens


class AnswerText:
    """The text side of one answer: takes tokens, gives text, finds the first stop string.

    Args:
        tokenizer: None: there is no text.
        stops: stop strings.
        min_tokens: tokens whose text is not searched.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._num_pushed = self._num_given = self._num_unsearched = 0

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Take a token; give the text that is safe to show, and the stop string if there is one now."""
        self._num_pushed += 1
        text = "" if self._detokenizer is None else self._detokenizer.push(token_id)
        if self._num_pushed <= self._min_tokens:
            self._num_unsearched += len(text)
            return text, None
        return self._matcher.feed(text)

    def finish(self) -> tuple[str, str | None]:
        """End the answer; give what was held back."""
        tail, match = self._matcher.feed("" if self._detokenizer is None else self._detokenizer.finish())
        return tail + self._matcher.flush(), match

    @property
    def num_chars(self) -> int:
        """Characters of the text given so far."""
        return self._num_unsearched + self._matcher.num_chars

    @property
    def num_complete(self) -> int:
        """Tokens that the text given so far took."""
        return self.num_tokens_at(self.num_chars)

    def num_tokens_at(self, num_chars: int) -> int:
        """Count the tokens that the first `num_chars` characters took; without text, all tokens."""
        return self._num_pushed if self._detokenizer is None else self._detokenizer.num_tokens_at(num_chars)


class Stream:
    """An answer under way: an iterator of `Delta`, of which the last has a finish reason. Made by `LLM.stream`.

    Iterating raises `NumericsError` where the model's output is not finite, and `UsageError` while the model is
    answering another request, or on a GPU another model of this process is.

    Args:
        generation: of the token ids.
        tokenizer: None: there is no text.
        params: of the request.
        find_end: given the text piece by piece, says how much of a piece belongs to the answer once that has ended.
    """

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        find_end: Callable[[str], int | None] = lambda text: None,
    ) -> None:
        self._generation = generation
        self._find_end = find_end
        self._text = AnswerText(tokenizer, params.stop_strings, params.min_tokens)
        # What the model has said, and how much of it the client was given.
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_given = 0
        self._given_text: list[str] = []
        self._last: Delta | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if self._last is not None:
            raise StopIteration
        delta = self._take(next(self._generation))
        if delta.finish_reason is not None:
            self._last = delta
        return delta

    def cancel(self) -> None:
        """End the answer within one step, or one chunk of the prompt; may be called from any thread."""
        self._generation.cancel()

    def close(self) -> None:
        """End the answer at once and let the model go; from the thread that iterates."""
        self._generation.close()

    def num_tokens_at(self, num_chars: int) -> int:
        """Count the tokens that the first `num_chars` characters of the answer took."""
        return self._text.num_tokens_at(num_chars)

    @property
    def stats(self) -> RequestStats:
        """What the answer took so far."""
        return self._generation.stats

    @property
    def completion(self) -> Completion:
        """The whole answer, read to its end first if it is still under way."""
        for _ in self:
            pass
        assert self._last is not None and self._last.finish_reason is not None and self._last.stats is not None
        return Completion(
            text="".join(self._given_text),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=self._last.finish_reason,
            stop_match=self._last.stop_match,
            stats=self._last.stats,
        )

    def _take(self, result: StepResult) -> Delta:
        reason, match = result.finish_reason, None
        stop_token = result.token_ids[-1] if reason == "stop" else None
        pieces, end = [], None
        # A stop token is not text; nothing stands behind it.
        for token_id in result.token_ids if stop_token is None else result.token_ids[:-1]:
            text, match = self._text.push(token_id)
            end = self._find_end(text)
            pieces.append(text[:end])
            if end is not None or match is not None:
                break
        if end is None and match is None and reason is not None:
            text, match = self._text.finish()
            pieces.append(text)
        self._token_ids += result.token_ids
        self._logprobs += result.logprobs
        if end is not None:
            num_chars = self._text.num_chars - len(text) + end
            return self._end("".join(pieces), "stop", None, self._text.num_tokens_at(num_chars))
        if match is not None:
            return self._end("".join(pieces), "stop", match, self._text.num_complete)
        if reason is not None:
            return self._end("".join(pieces), reason, stop_token, len(self._token_ids))
        return self._give("".join(pieces), self._text.num_complete)

    def _end(self, text: str, reason: FinishReason, match: str | int | None, num_kept: int) -> Delta:
        """Cut the answer to its first `num_kept` tokens and give the last delta."""
        self._generation.close()
        self._generation.keep(num_kept)
        del self._token_ids[num_kept:], self._logprobs[num_kept:]
        delta = self._give(text, num_kept)
        return replace(delta, finish_reason=reason, stop_match=match, stats=self._generation.stats)

    def _give(self, text: str, num_complete: int) -> Delta:
        new = slice(self._num_given, num_complete)
        self._num_given = max(self._num_given, num_complete)
        self._given_text.append(text)
        return Delta(
            text=text,
            token_ids=tuple(self._token_ids[new]),
            logprobs=tuple(self._logprobs[new]),
            finish_reason=None,
            stop_match=None,
            stats=None,
        )
