"""Tool calls in the text of an answer, as it arrives: state machines over characters.

How the text is cut into pieces makes no difference to what they find, and nothing is lost: what begins like a call and
is none comes out as text. Three ways of writing a call are known; which one a model uses stands in its chat template.

    XML arguments   <tool_call>name <arg_key>k</arg_key> <arg_value>v</arg_value> ... </tool_call>     Ling-3.0, GLM
    JSON            <tool_call> {"name": ..., "arguments": {...}} </tool_call>                         Hermes, Qwen
    XML parameters  <tool_call> <function=name> <parameter=k> v </parameter> ... </function> </tool_call>   Qwen-Coder
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soloist.errors import UsageError

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Text:
    """Text of the answer outside of calls."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call began; its place among the answer's calls, and the name of its function."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments: together, all pieces of one call are its JSON text."""

    index: int
    json: str


Event = Text | CallBegin | CallArguments


class ToolParser(ABC):
    """Finds calls in text that arrives in pieces.

    Args:
        tools: the functions that may be called, in OpenAI's form; their schemas say which arguments are text.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._held = ""
        self._num_calls = 0
        self._state = self._outside
        # What has been taken of a call that may still turn out to be none.
        self._taken = ""
        self._name = ""
        self._num_arguments = 0
        # The argument that is being read is text by its schema, and streams.
        self._is_text = False

    @property
    def is_behind_call(self) -> bool:
        """Whether a call has ended and no other has begun."""
        return self._num_calls > 0 and self._state == self._outside

    def push(self, text: str) -> list[Event]:
        """Take more text; give what is certain."""
        self._held += text
        return list(self._drain())

    def finish(self) -> list[Event]:
        """End the text; what is left of an unfinished call is closed, or given as text if no call had begun."""
        events = list(self._drain())
        rest, self._held = self._taken + self._held, ""
        self._taken = ""
        if self._state == self._outside:
            return [*events, Text(rest)] if rest else events
        return events + self._cut_off(rest)

    def _drain(self) -> Iterator[Event]:
        """Run states until one of them needs more text."""
        while True:
            state = self._state
            events = state()
            if events is None:
                return
            yield from events

    def _take_to(self, mark: str) -> tuple[str, bool]:
        """Take held text up to and with `mark`; (text before it, True), or (what cannot begin it, False)."""
        before, found, rest = self._held.partition(mark)
        if found:
            self._held = rest
            return before, True
        safe = len(self._held) - _overlap(self._held, mark)
        text, self._held = self._held[:safe], self._held[safe:]
        return text, False

    def _outside(self) -> list[Event] | None:
        text, is_open = self._take_to(OPEN)
        if is_open:
            self._state, self._taken = self._inside, OPEN
            return [Text(text)] if text else []
        return [Text(text)] if text else None

    def _begin(self, name: str) -> CallBegin:
        self._name, self._num_arguments, self._taken = name, 0, ""
        self._num_calls += 1
        return CallBegin(self._num_calls - 1, name)

    def _more(self, text: str) -> CallArguments:
        return CallArguments(self._num_calls - 1, text)

    def _give_up(self) -> list[Event]:
        """Give what looked like a call as text."""
        text, self._taken = self._taken, ""
        self._state = self._outside
        return [Text(text)]

    @abstractmethod
    def _inside(self) -> list[Event] | None:
        """Read behind the opening mark: take some held text and give events, or None until there is more."""

    @abstractmethod
    def _cut_off(self, rest: str) -> list[Event]:
        """End a call that the answer does not end; `rest` was taken or held."""

    # What the two XML forms share: arguments by name, each text or JSON by its schema.

    def _key(self, key: str) -> str:
        head = "{" if self._num_arguments == 0 else ", "
        self._num_arguments += 1
        return f"{head}{json.dumps(key, ensure_ascii=False)}: "

    def _is_text_argument(self, key: str) -> bool:
        schema = self._parameters.get(self._name, {})
        kind = (schema.get("properties") or {}).get(key, {}).get("type")
        return kind == "string"

    def _value(self, text: str) -> str:
        """Write a whole value that is not known to be text: JSON where it is JSON."""
        try:
            return json.dumps(json.loads(text), ensure_ascii=False)
        except ValueError:
            return json.dumps(text, ensure_ascii=False)

    def _end_arguments(self) -> str:
        return "}" if self._num_arguments else "{}"


class JsonParser(ToolParser):
    """A call is one JSON object, name first; its arguments are passed on as the model writes them."""

    _HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._depth = 0
        self._is_string = self._is_escaped = False

    def _inside(self) -> list[Event] | None:
        head, close = self._HEAD.match(self._held), self._held.find(CLOSE)
        if head is not None and not 0 <= close < head.end():
            self._held = self._held[head.end() :]
            self._depth, self._is_string, self._is_escaped = 0, False, False
            self._state = self._arguments
            return [self._begin(json.loads(head[1], strict=False))]
        if close < 0:
            return None
        # Another order of keys: whole, once it is there.
        body, _, self._held = self._held.partition(CLOSE)
        call = _parsed_call(body)
        if call is None:
            self._taken += body + CLOSE
            return self._give_up()
        self._state = self._outside
        return [self._begin(call[0]), self._more(call[1])]

    def _arguments(self) -> list[Event] | None:
        for i, char in enumerate(self._held):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped, self._is_string = char == "\\", char != '"'
            elif char == '"':
                self._is_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    text, self._held = self._held[: i + 1], self._held[i + 1 :]
                    self._state = self._behind
                    return [self._more(text)]
        text, self._held = self._held, ""
        return [self._more(text)] if text else None

    def _behind(self) -> list[Event] | None:
        # A brace too many is a common slip, and no text.
        self._held = self._held.lstrip(" \t\r\n}")
        if self._held.startswith(CLOSE):
            self._held = self._held[len(CLOSE) :]
        elif CLOSE.startswith(self._held):
            return None
        self._state = self._outside
        return []

    def _cut_off(self, rest: str) -> list[Event]:
        if self._state == self._inside:
            # The mark itself was taken; a whole call whose closing mark is missing still counts.
            call = _parsed_call(rest.removeprefix(OPEN))
            return [Text(rest)] if call is None else [self._begin(call[0]), self._more(call[1])]
        return []


def _parsed_call(body: str) -> tuple[str, str] | None:
    """Give name and arguments of a call that is one JSON object; None if it is none."""
    try:
        call = json.loads(body, strict=False)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class _XmlParser(ToolParser):
    """What both XML forms do with values: text streams with its JSON escapes, the rest is written when it is whole."""

    # Behind a value.
    value_close: str
    # A line break at either end of a value belongs to the form, not to the value.
    trims_line_breaks: bool

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._pending = ""
        self._is_first = True

    def _start_value(self, key: str) -> list[Event]:
        self._is_text, self._is_first, self._pending = self._is_text_argument(key), True, ""
        self._state = self._in_value
        return [self._more(self._key(key) + ('"' if self._is_text else ""))]

    def _in_value(self) -> list[Event] | None:
        text, is_closed = self._take_to(self.value_close)
        if not text and not is_closed:
            return None
        self._pending += text
        if self.trims_line_breaks and self._is_first and self._pending:
            self._pending, self._is_first = self._pending.removeprefix("\n"), False
        if is_closed:
            self._state = self._between
            value = self._pending.removesuffix("\n") if self.trims_line_breaks else self._pending
            self._pending = ""
            return [self._more(_escaped(value) + '"' if self._is_text else self._value(value))]
        if not self._is_text:
            return []
        # The last line break may be the form's.
        num_held = int(self.trims_line_breaks and self._pending.endswith("\n"))
        ready = self._pending[: len(self._pending) - num_held]
        self._pending = self._pending[len(ready) :]
        return [self._more(_escaped(ready))] if ready else []

    @abstractmethod
    def _between(self) -> list[Event] | None:
        """Read between two arguments."""

    def _cut_off(self, rest: str) -> list[Event]:
        if self._state == self._inside:
            return [Text(rest)]
        if self._state == self._in_value:
            value = self._pending + rest
            tail = _escaped(value) + '"' if self._is_text else self._value(value)
            return [self._more(tail + self._end_arguments())]
        return [self._more(self._end_arguments())]


class XmlArgumentsParser(_XmlParser):
    """Ling-3.0 and GLM: the name, then pairs of key and value; the line break behind the name may be missing."""

    value_close = "</arg_value>"
    trims_line_breaks = False

    def _inside(self) -> list[Event] | None:
        places = [(at, mark) for mark in ("<arg_key>", CLOSE) if (at := self._held.find(mark)) >= 0]
        if not places:
            return None
        at, mark = min(places)
        name = self._held[:at].strip()
        if not re.fullmatch(r"[\w.:/-]+", name):
            self._taken += self._held[: at + len(mark)]
            self._held = self._held[at + len(mark) :]
            return self._give_up()
        self._held = self._held[at:]
        self._state = self._between
        return [self._begin(name)]

    def _between(self) -> list[Event] | None:
        self._held = self._held.lstrip()
        if self._held.startswith(CLOSE):
            self._held = self._held[len(CLOSE) :]
            self._state = self._outside
            return [self._more(self._end_arguments())]
        key = re.match(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>", self._held)
        if key is None:
            # Whatever else a model puts between two arguments belongs to neither.
            at = min((p for mark in ("<arg_key>", CLOSE) if (p := self._held.find(mark)) > 0), default=0)
            self._held = self._held[at:]
            return [] if at else None
        self._held = self._held[key.end() :]
        return self._start_value(key[1].strip())


class XmlParametersParser(_XmlParser):
    """Qwen-Coder: `<function=name>` with `<parameter=key>` blocks, each value on lines of its own."""

    value_close = "</parameter>"
    trims_line_breaks = True

    def _inside(self) -> list[Event] | None:
        head = re.match(r"\s*<function=([^>\n]+)>", self._held)
        if head is None:
            if CLOSE not in self._held:
                return None
            body, _, self._held = self._held.partition(CLOSE)
            self._taken += body + CLOSE
            return self._give_up()
        self._held = self._held[head.end() :]
        self._state = self._between
        return [self._begin(head[1].strip())]

    def _between(self) -> list[Event] | None:
        self._held = self._held.lstrip()
        if self._held.startswith(CLOSE):
            self._held = self._held[len(CLOSE) :]
            self._state = self._outside
            return [self._more(self._end_arguments())]
        key = re.match(r"<parameter=([^>\n]+)>", self._held)
        if key is None:
            at = min((p for mark in ("<parameter=", CLOSE) if (p := self._held.find(mark)) > 0), default=0)
            self._held = self._held[at:]
            return [] if at else None
        self._held = self._held[key.end() :]
        return self._start_value(key[1].strip())


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _overlap(text: str, mark: str) -> int:
    """Count the characters at the end of `text` that may begin `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def parser_class(template: str) -> type[ToolParser]:
    """Choose the way of writing calls that a chat template teaches.

    Raises:
        UsageError: it is none that Soloist reads.
    """
    if "<arg_key>" in template:
        return XmlArgumentsParser
    if "<function=" in template and "<parameter=" in template:
        return XmlParametersParser
    if OPEN in template:
        return JsonParser
    raise UsageError(
        "the chat template writes tool calls in a form that is not read here; known are the forms of Ling-3.0 and GLM"
        " (<arg_key>), Qwen-Coder (<function=) and Hermes (<tool_call> with JSON)"
    )
