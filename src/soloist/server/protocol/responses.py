"""OpenAI's responses: items in, items out."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from soloist.errors import UsageError
from soloist.sampling_params import SamplingParams
from soloist.server.protocol.schema import SamplingFields, Schema, StreamOptions, no_effect
from soloist.server.tool_grammar import CallRule

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"})


class Item(Schema):
    """One item of a conversation: a message, reasoning, a call, a result. The fields depend on the type."""

    model_config = ConfigDict(extra="allow")

    type: str = "message"


class ToolItem(Schema):
    """A tool; `function` and `custom` ones can be called here."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Schema):
    """What form the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Schema):
    """Form and length of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = no_effect()


class ReasoningOptions(Schema):
    """How much to think."""

    effort: str | None = None
    summary: str | None = no_effect()
    generate_summary: str | None = no_effect()
    context: str | None = no_effect()


class ResponsesRequest(SamplingFields):
    """A request to `/v1/responses`."""

    model: str | None = None
    input: str | list[Item]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    tools: list[ToolItem] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    store: bool | None = Field(default=None, description="Nothing is stored here.")
    include: list[str] | None = no_effect()
    metadata: dict[str, Any] | None = no_effect()
    client_metadata: dict[str, Any] | None = no_effect()
    truncation: str | None = None
    user: str | None = no_effect()
    prompt_cache_key: str | None = no_effect()
    prompt_cache_retention: str | None = no_effect()
    safety_identifier: str | None = no_effect()
    service_tier: str | None = no_effect()

    def check(self) -> None:
        """Refuse what is not done here.

        Raises:
            UsageError: by name.
        """
        if self.previous_response_id is not None:
            raise UsageError("previous_response_id: nothing is stored here; send the whole conversation as input")
        if self.background:
            raise UsageError("background: answers are not made behind a client's back here; leave it out")
        if self.truncation not in (None, "disabled"):
            raise UsageError("truncation: nothing is dropped from a conversation here; leave it out")

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """Give the sampling parameters."""
        return self.sampling_params(defaults, max_tokens=self.max_output_tokens)

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must satisfy; None for free text."""
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return {"type": "object"}
        if form.schema_ is None:
            raise UsageError("text.format.schema is missing; type json_schema needs one")
        return form.schema_

    @property
    def call_rule(self) -> CallRule:
        """What the request says about calls.

        Raises:
            UsageError: a choice that is not known, or one that needs tools where there are none.
        """
        choice, is_single = self.tool_choice, self.parallel_tool_calls is False
        if choice in (None, "auto", "none"):
            return CallRule(is_single=is_single)
        name = choice.get("name") if isinstance(choice, dict) and choice.get("type") in ("function", "custom") else None
        if choice != "required" and not isinstance(name, str):
            raise UsageError(
                "tool_choice: allowed are 'auto', 'none', 'required', and a function or custom tool with its name"
            )
        if not self.functions:
            raise UsageError("tool_choice asks for a call, but there are no tools that can be called here")
        return CallRule(is_required=True, name=name, is_single=is_single or name is not None)

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of the tools that take text instead of arguments."""
        return frozenset(tool.name for tool in self.tools or () if tool.type == "custom" and tool.name)

    @property
    def skipped_tools(self) -> list[str]:
        """What of the tools cannot be called here."""
        return [tool.name or tool.type for tool in self.tools or () if tool.type not in ("function", "custom")]

    @property
    def functions(self) -> list[dict[str, Any]] | None:
        """The tools in the form of chat completions; a custom tool becomes a function of one text."""
        if self.tool_choice == "none":
            return None
        functions = []
        for tool in self.tools or ():
            if tool.type not in ("function", "custom") or not tool.name:
                continue
            parameters = tool.parameters or {"type": "object", "properties": {}}
            description = tool.description or ""
            if tool.type == "custom":
                parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
                grammar = ((tool.model_extra or {}).get("format") or {}).get("definition")
                description += f"\nThe input follows this grammar:\n{grammar}" if grammar else ""
            function: dict[str, Any] = {"name": tool.name, "description": description, "parameters": parameters}
            if tool.strict:
                function["strict"] = True
            functions.append({"type": "function", "function": function})
        return functions or None

    @property
    def openai_messages(self) -> list[dict[str, Any]]:
        """The conversation in the words of chat completions."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for i, item in enumerate(self.input):
            _add(messages, item, f"input[{i}]")
        return messages


def _add(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """Append one item; parts of one turn of the assistant become one message."""
    fields = item.model_extra or {}
    match item.type:
        case "message":
            role, text = fields.get("role"), _text(fields.get("content"), where)
            role = "system" if role == "developer" else role
            if role == "assistant":
                _assistant(messages)["content"] += text
            elif role == "system" and messages and messages[-1]["role"] == "system":
                # Most templates take one system message.
                messages[-1]["content"] += f"\n\n{text}"
            else:
                messages.append({"role": role, "content": text})
        case "reasoning":
            parts = fields.get("content") or fields.get("summary") or []
            message = _assistant(messages)
            message["reasoning_content"] = message.get("reasoning_content", "") + _text(parts, where)
        case "function_call" | "custom_tool_call":
            is_custom = item.type == "custom_tool_call"
            arguments = {"input": fields.get("input", "")} if is_custom else fields.get("arguments") or "{}"
            function = {"name": str(fields.get("name", "")), "arguments": arguments}
            call = {"id": str(fields.get("call_id", "")), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output" | "custom_tool_call_output":
            text = _text(fields.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": str(fields.get("call_id", "")), "content": text})
        case _:
            raise UsageError(f"{where} is a {item.type!r}; messages, reasoning, calls and their results are understood")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXT_PARTS:
            raise UsageError(f"{where} holds a part of type {kind!r}; only text is understood")
        texts.append(str(part.get("text", part.get("refusal", ""))))
    return "".join(texts)
