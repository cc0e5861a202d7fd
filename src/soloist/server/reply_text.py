"""The text of an answer told apart as it arrives: reasoning, content, tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass

from soloist.chat import ReasoningParser
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

    def push(self, text: str) -> list[Piece]:
        """Take more text; give what is certain, in order."""
        if self._reasoning is None:
            return self._content(text)
        return self._sort(self._reasoning.push(text))

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
        return pieces

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
