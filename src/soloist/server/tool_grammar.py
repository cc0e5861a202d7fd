"""Grammars of tool calls, for requests that say more of them than "if you like": in the form that the template teaches.

A grammar is text in llguidance's dialect of Lark. What stands behind a call's opening mark follows the schema of its
function; a schema that asks for what cannot be followed is refused where the tool is `strict`, and followed as far as
possible, with a warning, where it is not.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soloist.errors import UsageError
from soloist.server.tool_calls import CLOSE, OPEN, JsonParser, ToolParser, XmlArgumentsParser, XmlParametersParser

# White space between tokens of JSON, bounded: a model could otherwise go on with it for ever.
WHITE_SPACE = r"[\x20\x0A]{0,20}"
_OPEN = json.dumps(OPEN)
_TERMINALS = r"""
TEXT: /(.|\n)*/
WS: /[ \n]{1,4}/
KEY: /[^<>\n]{1,64}/
"""
# Keys of a text's schema that do not narrow it.
_PLAIN_TEXT_KEYS = frozenset({"type", "title", "description", "default", "examples", "enum", "const"})


@dataclass(frozen=True, kw_only=True)
class CallRule:
    """What a request says about calls."""

    # There must be one.
    is_required: bool = False
    # It must be of this function.
    name: str | None = None
    # There may be one at most.
    is_single: bool = False


def call_grammar(
    parser: type[ToolParser],
    tools: Sequence[Mapping[str, Any]],
    rule: CallRule,
    *,
    schema: dict[str, Any] | None = None,
    follows_reasoning: bool = False,
) -> str | None:
    """Write the grammar of an answer with tools; None: the answer is free.

    Args:
        parser: of the form in which calls are written.
        tools: functions, in OpenAI's form.
        rule: of the request. At most one call and nothing else to follow needs no grammar: the answer ends behind it.
        schema: of the answer, where it is no call.
        follows_reasoning: white space may stand in front.

    Raises:
        UsageError: a function that must be called is not among the tools, or its name cannot be written in this form.
    """
    if rule.is_required:
        tools = [tool for tool in tools if rule.name in (None, tool["function"]["name"])]
        if not tools:
            raise UsageError(f"tool_choice: there is no tool {rule.name!r} among the tools")
    elif schema is None and not any(is_strict(tool) for tool in tools):
        return None
    write = _FORMS[parser]
    rules = [line for i, tool in enumerate(tools) for line in write(f"f{i}", tool["function"], is_strict(tool))]
    behind = f"behind: ({' | '.join(f'f{i}' for i in range(len(tools)))})"
    space = "WS? " if follows_reasoning else ""
    calls = f"({_OPEN} behind)" + ("" if rule.is_single else f" (WS? {_OPEN} behind)*")
    if rule.is_required:
        start = f"start: {space}{calls}"
    elif schema is not None:
        start = f"start: {space}({_json(schema, is_strict=True)} | {calls})"
    elif rule.is_single:
        start = "start: TEXT | before behind"
    else:
        start = "start: (before behind)* TEXT"
    before = rf"before[lazy]: /(.|\n)*{OPEN}/"
    return "\n".join([start, before, behind, *rules]) + _TERMINALS


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Say whether calls of a tool must follow its schema to the letter."""
    return bool(tool["function"].get("strict"))


def _json(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    guidance = {"whitespace_pattern": WHITE_SPACE} | ({} if is_strict else {"lenient": True})
    return f"%json {json.dumps({**schema, 'x-guidance': guidance})}"


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Give what references of a schema point to, for where a part of it stands alone."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _hermes(rule: str, function: Mapping[str, Any], is_strict: bool) -> Iterator[str]:
    parameters = function.get("parameters") or {"type": "object"}
    call = {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": {"type": "object", **parameters}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        **_definitions(parameters),
    }
    yield f"{rule}: WS? {_json(call, is_strict=is_strict)} WS? {json.dumps(CLOSE)}"


def _xml_arguments(rule: str, function: Mapping[str, Any], is_strict: bool) -> Iterator[str]:
    def head(key: str) -> str:
        return f'{key} "</arg_key>" "\\n"? "<arg_value>"'

    arguments = _Arguments(
        rule, function, is_strict, head=lambda key: head(json.dumps(f"<arg_key>{key}")), end="</arg_value>"
    )
    yield f'{rule}: {_name(function)} "\\n"? {arguments.sequence} {json.dumps(CLOSE)}'
    yield from arguments.rules(f'"<arg_key>" {head("KEY")}', tail='"\\n"?')


def _xml_parameters(rule: str, function: Mapping[str, Any], is_strict: bool) -> Iterator[str]:
    arguments = _Arguments(
        rule,
        function,
        is_strict,
        head=lambda key: json.dumps(f"<parameter={key}>\n"),
        end="\n</parameter>",
    )
    opening = json.dumps(f"<function={function['name']}>\n")
    _name(function)
    yield f'{rule}: "\\n" {opening} {arguments.sequence} "</function>\\n" {json.dumps(CLOSE)}'
    yield from arguments.rules('"<parameter=" KEY ">\\n"', tail='"\\n"')


def _name(function: Mapping[str, Any]) -> str:
    """Write a function's name, which stands in these forms without quotes."""
    if not re.fullmatch(r"[\w.:/-]+", function["name"]):
        raise UsageError(f"a call of {function['name']!r} cannot be forced: allowed are letters, digits and _ . : / -")
    return json.dumps(function["name"], ensure_ascii=False)


class _Arguments:
    """The rules of a function's arguments in one of the forms that name each: in order, those that may miss optional.

    Args:
        rule: name of the function's rule.
        function: with its schema.
        is_strict: whether the schema is followed to the letter.
        head: writes what opens the argument with a key.
        end: what ends a value.
    """

    def __init__(
        self, rule: str, function: Mapping[str, Any], is_strict: bool, *, head: Callable[[str], str], end: str
    ) -> None:
        self._rule, self._is_strict, self._head, self._end = rule, is_strict, head, end
        self._schema: Mapping[str, Any] = function.get("parameters") or {}
        self._properties: Mapping[str, Any] = self._schema.get("properties") or {}
        self._is_open = not self._properties and self._schema.get("additionalProperties") is not False
        if self._is_open and is_strict:
            raise UsageError(f"tools: {function['name']} is strict, and its schema does not say what it takes")

    @property
    def sequence(self) -> str:
        """What the function's rule says of its arguments."""
        if self._is_open:
            return f"{self._rule}any*"
        required = self._schema.get("required") or ()
        names = enumerate(self._properties)
        return " ".join(f"{self._rule}a{i}" + ("" if key in required else "?") for i, key in names)

    def rules(self, any_head: str, *, tail: str) -> Iterator[str]:
        """Write a rule for each argument."""
        end = json.dumps(self._end)
        yield rf"{self._rule}text[suffix={end}]: /(.|\n)*/"
        if self._is_open:
            yield f"{self._rule}any: {any_head} {self._rule}text {tail}"
            return
        for i, (key, schema) in enumerate(self._properties.items()):
            yield f"{self._rule}a{i}: {self._head(key)} {self._value(key, schema, end)} {tail}"

    def _value(self, key: str, schema: Any, end: str) -> str:
        """Write a value and what ends it: text as it is, anything else as JSON."""
        if not isinstance(schema, dict) or schema.get("type") != "string":
            inner = {**schema, **_definitions(self._schema)} if isinstance(schema, dict) else {}
            return f"{_json(inner, is_strict=self._is_strict)} {end}"
        if self._is_strict and (wrong := sorted(set(schema) - _PLAIN_TEXT_KEYS)):
            raise UsageError(f"tools: {wrong[0]} of {key!r} cannot be followed in the form in which this model calls")
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is None:
            return f"{self._rule}text"
        words = (json.dumps(str(value), ensure_ascii=False) for value in values)
        return f"({' | '.join(words)}) {end}"


_FORMS: dict[type[ToolParser], Callable[[str, Mapping[str, Any], bool], Iterator[str]]] = {
    JsonParser: _hermes,
    XmlArgumentsParser: _xml_arguments,
    XmlParametersParser: _xml_parameters,
}
