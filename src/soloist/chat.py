"""Messages to token ids through the checkpoint's own template, and reasoning told from answer on the way back.

Owns the sandbox in which templates run and the rule that only a template's own text makes special tokens. A checkpoint
without a template is not guessed at: a wrong template gives wrong answers without a word. The one packaged template is
for Ling-3.0. Tool calls in answers are not parsed here.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from importlib.resources import files
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from soloist.errors import CheckpointError, UsageError
from soloist.tokenizer import ANSWER_MARKS, Tokenizer

ROLES = ("system", "user", "assistant", "tool")
# A later name of "system" that no template knows.
_ROLE_ALIASES = {"developer": "system"}
_MESSAGE_KEYS = frozenset({"role", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id", "name"})
# What the renderer sets itself.
_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# Architecture -> file in `templates`.
_PACKAGED_TEMPLATES = {"BailingMoeV3ForCausalLM": "ling3.jinja"}

THINK, END_THINK = "<think>", "</think>"

Kind = Literal["reasoning", "content"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Rendered messages."""

    text: str
    ids: list[int]
    # The prompt ends inside a reasoning block, so that the answer begins there.
    opens_reasoning: bool


class ChatTemplate:
    """A checkpoint's way of writing messages down.

    Args:
        tokenizer: of the checkpoint; it brings the templates.
        architecture: `architectures[0]` of the checkpoint; finds the packaged template where there is no other.

    Raises:
        UsageError: the checkpoint has no template.
        CheckpointError: its template is not valid Jinja.
    """

    def __init__(self, tokenizer: Tokenizer, architecture: str | None = None) -> None:
        self._tokenizer = tokenizer
        sources = tokenizer.chat_templates
        if not sources and architecture in _PACKAGED_TEMPLATES:
            sources = {"default": packaged_template(architecture)}
        if not sources:
            raise UsageError(
                f"{tokenizer.source}: the checkpoint has no chat template, so it is a base model that continues text;"
                " give it a prompt (`soloist run --raw`, or the completions endpoint) instead of messages"
            )
        self._templates = {name: _Template(text, tokenizer.source) for name, text in sources.items()}
        # Every id that ends an answer: the tokenizer's, and the token with which the template ends an assistant's turn.
        self.stop_ids = tuple(sorted({*tokenizer.stop_ids, *self._turn_end_ids()}))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """Write messages down and turn them into token ids.

        Special tokens come from the template's text only: whatever messages, tools or arguments say stays text. The ids
        begin with BOS once if the checkpoint's prompts do.

        Args:
            messages: role, content (text, or a list of text parts), and what tool use needs, in OpenAI's words. A tool
                call's arguments may be JSON text or an object.
            tools: function descriptions, in OpenAI's form.
            template_kwargs: variables of the template, such as `enable_thinking`.
            add_generation_prompt: whether to open the assistant's turn at the end.

        Raises:
            UsageError: messages that cannot be written down, or something that the template would ignore.
        """
        checked = _checked_messages(messages)
        template = self._pick_template(tools)
        template.check_reads(checked, tools, template_kwargs or {})
        inputs = {**(template_kwargs or {}), "messages": checked, "tools": list(tools) if tools else None}
        fixed = {**self._tokenizer.named_tokens, "documents": None, "add_generation_prompt": add_generation_prompt}
        text, ids = self._tokenize(inputs, lambda given: template.render({**fixed, **given}))
        is_open = add_generation_prompt and text.rstrip().endswith(THINK)
        return Prompt(text=text, ids=self._tokenizer.with_bos(ids), opens_reasoning=is_open)

    @property
    def variables(self) -> frozenset[str]:
        """What the template reads besides messages and tools: names for `template_kwargs`."""
        return frozenset(self._pick_template(None).variables)

    def text_for(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Give the source of the template that writes these tools down."""
        return self._pick_template(tools).text

    def _pick_template(self, tools: Sequence[Mapping[str, Any]] | None) -> "_Template":
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))

    def _tokenize(self, inputs: dict[str, Any], write: Callable[[dict[str, Any]], str]) -> tuple[str, list[int]]:
        """Write `inputs` down and encode them, without letting their own text become special tokens.

        A mark behind every character that could begin a special token keeps one from arising, whatever the template
        cuts away or joins. A template that looks for the marks of an answer would not find them, and would write
        something else; only then those are left as they are.
        """
        text = write(inputs)
        given = "".join(_texts(inputs))
        beginnings = "".join(sorted({special[0] for special in self._tokenizer.special_texts}))
        if not any(char in given for char in beginnings):
            return text, self._tokenizer.encode(text, allow_special=True)
        mark = next(char for char in map(chr, range(0xFDD0, 0x110000)) if char not in text and char not in given)
        beginning = f"([{re.escape(beginnings)}])"
        marked = write(_change_inputs(inputs, lambda value: re.sub(beginning, rf"\1{mark}", value)))
        if marked.replace(mark, "") != text:
            beginning = f"(?!{'|'.join(map(re.escape, ANSWER_MARKS))}){beginning}"
            marked = write(_change_inputs(inputs, lambda value: re.sub(beginning, rf"\1{mark}", value)))
        ids: list[int] = []
        for piece, special_id in self._tokenizer.split_special(marked):
            ids += self._tokenizer.encode(piece.replace(mark, ""))
            if special_id is not None:
                ids.append(special_id)
        return marked.replace(mark, ""), ids

    def _turn_end_ids(self) -> list[int]:
        """Find the special token behind an assistant's words by letting the template write some."""
        answer = "Good day to you too."
        try:
            text = self.render(
                [{"role": "user", "content": "Good day."}, {"role": "assistant", "content": answer}],
                add_generation_prompt=False,
            ).text
        except UsageError:
            # A template may ask for more than a greeting; the tokenizer's own stop ids remain.
            return []
        behind = text[text.rfind(answer) + len(answer) :] if answer in text else ""
        piece, special_id = next(self._tokenizer.split_special(behind))
        return [special_id] if special_id is not None and not piece.strip() else []


def packaged_template(architecture: str) -> str:
    """Give the template that ships for checkpoints of `architecture` without one of their own."""
    return (files("soloist") / "templates" / _PACKAGED_TEMPLATES[architecture]).read_text(encoding="utf-8")


class _GenerationBlocks(jinja2.ext.Extension):
    """Lets templates mark the assistant's text for training with `{% generation %}`; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as templates expect it: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Template:
    """One Jinja template, compiled, and the variables it reads."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self._source = source
        extensions = (_GenerationBlocks, jinja2.ext.loopcontrols)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            found = jinja2.meta.find_undeclared_variables(environment.parse(text))
            self._compiled = environment.from_string(text)
            # What a caller may set.
            self.variables = found - _OWN_VARIABLES
            self._reads_tools = "tools" in found
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{source}: the chat template is not valid Jinja: {error}") from error

    def check_reads(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        """Refuse what the template would leave out without a word."""
        if tools and not self._reads_tools:
            raise UsageError(f"{self._source}: the chat template takes no tools; this model was not made to call any")
        if any("tool_calls" in message for message in messages) and "tool_calls" not in self.text:
            raise UsageError(f"{self._source}: the chat template writes no tool calls; leave them out of the messages")
        allowed = sorted(self.variables)
        for name in template_kwargs:
            if name not in self.variables:
                raise UsageError(
                    f"the chat template has no variable {name!r}; "
                    + (f"it reads {', '.join(allowed)}" if allowed else "it reads none")
                )

    def render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._compiled.render(variables)
        # Whatever a foreign program may do to the messages it is given.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise UsageError(f"{self._source}: the chat template refuses these messages: {error}") from error


def _change_inputs(inputs: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Apply `change` to every string of a template's inputs but the roles, which are checked and compared."""
    changed = _change_text(inputs, change)
    for before, after in zip(inputs["messages"], changed["messages"], strict=True):
        after["role"] = before["role"]
    return changed


def _change_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_change_text(key, change): _change_text(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_change_text(item, change) for item in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    """Yield every string in `value`, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (*_texts(key), *_texts(item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise UsageError(f"messages is a {type(messages).__name__}; it is a list of {{'role': ..., 'content': ...}}")
    if not messages:
        raise UsageError("messages is empty; give at least one, such as {'role': 'user', 'content': 'Hello'}")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} is a {type(message).__name__}; a message is {{'role': ..., 'content': ...}}")
    if unknown := sorted(map(str, message.keys() - _MESSAGE_KEYS)):
        raise UsageError(f"{where} has an unknown key {unknown[0]!r}; allowed: {', '.join(sorted(_MESSAGE_KEYS))}")
    role = message.get("role")
    role = _ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        nearest = get_close_matches(str(role), ROLES, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise UsageError(f"{where}.role is {role!r}; allowed: {', '.join((*ROLES, *_ROLE_ALIASES))}{hint}")
    checked: dict[str, Any] = {"role": role, "content": _joined_text(message.get("content"), f"{where}.content")}
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list | tuple):
        raise UsageError(f"{where}.tool_calls is a {type(calls).__name__}; it is a list of calls")
    if calls:
        checked["tool_calls"] = [_checked_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    elif message.get("content") is None:
        raise UsageError(f"{where}.content is missing; only an assistant's message with tool calls may have none")
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        checked["reasoning_content"] = _joined_text(reasoning, f"{where}.reasoning_content")
    return checked | {key: message[key] for key in ("tool_call_id", "name") if message.get(key) is not None}


def _joined_text(content: Any, where: str) -> str:
    """Give a message's text; text parts are joined as they are, nothing is put between them."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise UsageError(f"{where} is a {type(content).__name__}; it is text or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UsageError(
                f"{where}[{i}] is {kind!r}; only text parts are understood: {{'type': 'text', 'text': ...}}"
            )
        texts.append(part["text"])
    return "".join(texts)


def _checked_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where} is no tool call; one is {{'function': {{'name': ..., 'arguments': ...}}}}")
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str | Mapping):
        raise UsageError(
            f"{where}.function.arguments is a {type(arguments).__name__}; it is an object, or its JSON text"
        )
    return {**call, "function": {**function, "arguments": _parsed_arguments(arguments)}}


def _parsed_arguments(arguments: str | Mapping[str, Any]) -> Any:
    """Give a call's arguments as the object that templates write down; text would be quoted once more.

    What a model once wrote wrongly stays text, or a conversation could never go on.
    """
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments


class ReasoningParser:
    """Tells reasoning from answer in text that arrives in pieces; how it is cut makes no difference.

    Reasoning stands in `<think>...</think>` at the very beginning; later marks are part of the answer. Nothing but
    those two marks is left out, and white space stays where it was.

    Args:
        is_open: the prompt has opened the reasoning already (`Prompt.opens_reasoning`).
    """

    def __init__(self, *, is_open: bool) -> None:
        # None: not known yet, all text so far may be the beginning of the mark.
        self._kind: Kind | None = "reasoning" if is_open else None
        self._held = ""

    def push(self, text: str) -> list[tuple[Kind, str]]:
        """Take more text; give what is certain, in order, in at most two pieces."""
        self._held += text
        pieces: list[tuple[Kind, str]] = []
        if self._kind is None:
            begun = self._held.lstrip()
            if begun.startswith(THINK):
                self._kind = "reasoning"
                self._held = self._held.replace(THINK, "", 1)
            elif not THINK.startswith(begun):
                self._kind = "content"
        if self._kind == "reasoning":
            reasoning, mark, rest = self._held.partition(END_THINK)
            num_held = 0 if mark else _overlap(reasoning, END_THINK)
            pieces.append(("reasoning", reasoning[: len(reasoning) - num_held]))
            self._held = rest if mark else reasoning[len(reasoning) - num_held :]
            if mark:
                self._kind = "content"
        if self._kind == "content":
            pieces.append(("content", self._held))
            self._held = ""
        return [piece for piece in pieces if piece[1]]

    def finish(self) -> list[tuple[Kind, str]]:
        """End the text: give what was held back as the beginning of a mark."""
        held, self._held = self._held, ""
        return [(self._kind or "content", held)] if held else []


def _overlap(text: str, mark: str) -> int:
    """Count the characters at the end of `text` that may begin `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
