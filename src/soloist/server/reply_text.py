"""The text of an answer told apart as it arrives: reasoning, content, tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass

from soloist.chat import END_THINK, ReasoningParser
from soloist.server.tool_calls import OPEN, CallArguments, CallBegin, Event, Text, ToolParser


@dataclass(frozen=True)
class Reasoning:
    """Text inside the reasoning block."""

    text: str


Piece = Reasoning | Event


class TextSplitter:
    """Tells reasoning, content and tool calls apart in text that arrives in pieces; how it is cut makes no difference.

    Args:
        opens_reasoning: the prompt has opened the reasoning block already.
        splits_reasoning: whether there is one; raw completions have none.
        tool_parser: None: there are no tools, and nothing is taken for a call.
    """

    def __init__(
        self, *, opens_reasoning: bool, splits_reasoning: bool = True, tool_parser: ToolParser | None = None
    ) -> None:
        self._reasoning = ReasoningParser(is_open=opens_reasoning) if splits_reasoning else None
        self._tools = tool_parser
        # The end of the reasoning so far, which may begin a call.
        self._held = ""
        # All text until something stood behind the reasoning, for `num_reasoning_chars`.
        self._head: str | None = ""
        self._num_reasoning_chars = 0

    def push(self, text: str) -> list[Piece]:
        """Take more text; give what is certain, in order."""
        pieces = self._content(text) if self._reasoning is None else self._sort(self._reasoning.push(text))
        return self._counted(text, pieces)

    def finish(self) -> list[Piece]:
        """End the text; give what was held back."""
        pieces: list[Piece] = []
        if self._reasoning is not None:
            pieces += self._sort(self._reasoning.finish())
        if self._held:
            pieces.append(Reasoning(self._held))
            self._held = ""
        if self._tools is not None:
            pieces += self._tools.finish()
        return self._counted("", pieces)

    @property
    def num_reasoning_chars(self) -> int:
        """Characters of the answer, from its beginning, that were reasoning or its marks; 0 if there was none."""
        return self._num_reasoning_chars

    @property
    def is_behind_call(self) -> bool:
        """Whether a call has ended and no other has begun."""
        return self._tools is not None and self._tools.is_behind_call

    def _counted(self, text: str, pieces: list[Piece]) -> list[Piece]:
        if self._head is not None:
            self._head += text
            if any(isinstance(piece, Reasoning) for piece in pieces):
                self._num_reasoning_chars = len(self._head)
            if any(not isinstance(piece, Reasoning) for piece in pieces):
                if self._num_reasoning_chars:
                    self._num_reasoning_chars = self._reasoning_end(self._head)
                self._head = None
            elif self._num_reasoning_chars:
                # Marks and white space behind it, as long as nothing else has come.
                self._num_reasoning_chars = len(self._head)
        return pieces

    def _reasoning_end(self, text: str) -> int:
        """Give where the reasoning ends that text begins with: behind its mark, or where a call begins."""
        before, mark, _ = text.partition(END_THINK)
        if self._tools is not None and OPEN in before:
            return before.index(OPEN)
        return len(before) + len(mark)

    def _content(self, text: str) -> list[Piece]:
        if self._tools is not None:
            return list(self._tools.push(text))
        return [Text(text)] if text else []

    def _sort(self, parsed: Sequence[tuple[str, str]]) -> list[Piece]:
        pieces: list[Piece] = []
        for i, (kind, text) in enumerate(parsed):
            if kind == "content":
                if self._held:
                    pieces.append(Reasoning(self._held))
                    self._held = ""
                pieces += self._content(text)
            elif self._tools is None:
                pieces.append(Reasoning(text))
            else:
                before, mark, rest = (self._held + text).partition(OPEN)
                if mark:
                    # A call ends the reasoning, whether the model closed it or not.
                    self._held = ""
                    pieces += [Reasoning(before)] if before else []
                    assert self._reasoning is not None
                    behind = [*parsed[i + 1 :], *self._reasoning.finish()]
                    self._reasoning = None
                    return pieces + self._content(mark + rest + "".join(t for _, t in behind))
                num_held = next((n for n in range(len(OPEN) - 1, 0, -1) if before.endswith(OPEN[:n])), 0)
                ready = before[: len(before) - num_held]
                self._held = before[len(ready) :]
                pieces += [Reasoning(ready)] if ready else []
        return pieces


class FirstCallEnd:
    """Finds the end of the first call in an answer's text, for answers that may have one call only.

    Args:
        splitter: of the answer; used for this only.
    """

    def __init__(self, splitter: TextSplitter) -> None:
        self._splitter = splitter

    def __call__(self, text: str) -> int | None:
        """Take more text; give how much of it belongs to the answer, once that has ended."""
        for i, char in enumerate(text):
            self._splitter.push(char)
            if self._splitter.is_behind_call:
                return i + 1
        return None


@dataclass(kw_only=True)
class SplitText:
    """Everything an answer said, sorted."""

    reasoning: str = ""
    content: str = ""
    # (name, JSON text of the arguments) of each call.
    calls: list[tuple[str, str]]

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> "SplitText":
        """Put pieces together."""
        split = cls(calls=[])
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    split.reasoning += text
                case Text(text):
                    split.content += text
                case CallBegin(_, name):
                    split.calls.append((name, ""))
                case CallArguments(index, more):
                    name, arguments = split.calls[index]
                    split.calls[index] = (name, arguments + more)
        return split
