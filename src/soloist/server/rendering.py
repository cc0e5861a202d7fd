"""Messages and tools of a request to a prompt, and the text of its answer to pieces; the same for every protocol."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from soloist.errors import UsageError
from soloist.llm import LLM
from soloist.server.reply_text import FirstCallEnd, TextSplitter
from soloist.server.tool_calls import ToolParser, parser_class
from soloist.server.tool_grammar import CallRule, call_grammar, is_strict

# Keys of messages that clients send back as they got them, and that say nothing to a model.
_SILENT_KEYS = frozenset({"refusal", "annotations", "audio", "function_call", "id", "status"})


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A prompt, and how its answer is read."""

    text: str
    ids: list[int]
    opens_reasoning: bool
    turn_ends: tuple[int, ...]
    template_s: float
    rule: CallRule
    tools: Sequence[Mapping[str, Any]] = ()
    parser: type[ToolParser] | None = None
    # What of the request could not be followed, in words.
    warnings: list[str] = field(default_factory=list)

    def splitter(self) -> TextSplitter:
        """Make what tells the parts of one answer apart."""
        parser = None if self.parser is None else self.parser(self.tools)
        return TextSplitter(opens_reasoning=self.opens_reasoning, tool_parser=parser)

    def call_end(self) -> FirstCallEnd | None:
        """Make what finds the end of one answer behind its first call; None: it may have several."""
        return FirstCallEnd(self.splitter()) if self.parser is not None and self.rule.is_single else None

    def grammars(self, schema: dict[str, Any] | None) -> tuple[str | None, str | None]:
        """Write the grammar of calls, and the part of it that is followed to the letter; None for what there is not.

        Args:
            schema: of the answer, where it is no call.

        Raises:
            UsageError: the rule names a function that is not among the tools.
        """
        if self.parser is None:
            return None, None
        strict = [tool for tool in self.tools if is_strict(tool)]
        whole = call_grammar(self.parser, self.tools, self.rule, schema=schema, follows_reasoning=self.opens_reasoning)
        letter = call_grammar(self.parser, strict, CallRule(is_required=True)) if strict else None
        return whole, letter


def render_chat(
    llm: LLM,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    reasoning_effort: str | None = None,
    rule: CallRule | None = None,
) -> Rendered:
    """Write the messages of a request down.

    Args:
        llm: the model.
        messages: in OpenAI's words.
        tools: functions, in OpenAI's form.
        template_kwargs: variables of the template.
        reasoning_effort: how much to think; what the template knows of it is set.
        rule: what the request says of calls.

    Raises:
        UsageError: the model has no template, or the messages cannot be written down.
    """
    begin_s = time.perf_counter()
    template = llm.chat_template
    if template is None:
        raise UsageError(f"{llm.name} has no chat template, so it cannot chat; /v1/completions continues a text")
    cleaned = [_cleaned(message) for message in messages]
    kwargs = dict(template_kwargs or {})
    warnings = [] if reasoning_effort is None else _set_effort(kwargs, reasoning_effort, template.variables)
    parser = parser_class(template.text_for(tools)) if tools else None
    prompt = template.render(cleaned, tools=tools, template_kwargs=kwargs)
    turn_ends = llm.turn_ends(cleaned, prompt.ids, tools=tools, template_kwargs=kwargs)
    return Rendered(
        text=prompt.text,
        ids=prompt.ids,
        opens_reasoning=prompt.opens_reasoning,
        turn_ends=turn_ends,
        template_s=time.perf_counter() - begin_s,
        tools=tools or (),
        parser=parser,
        rule=rule or CallRule(),
        warnings=warnings,
    )


def _cleaned(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None and key not in _SILENT_KEYS} | (
        {"content": None} if message.get("content") is None else {}
    )


def _set_effort(kwargs: dict[str, Any], effort: str, variables: frozenset[str]) -> list[str]:
    if "reasoning_effort" in variables:
        kwargs.setdefault("reasoning_effort", effort)
    elif "enable_thinking" in variables:
        kwargs.setdefault("enable_thinking", effort not in ("none", "minimal"))
    else:
        return [f"reasoning effort {effort!r} has no effect: the chat template of this model knows no such thing"]
    return []
