"""Anthropic's messages."""

from dataclasses import replace
from typing import Any, Literal

from pydantic import ConfigDict, Field

from soloist.errors import UsageError
from soloist.sampling_params import SamplingParams
from soloist.server.protocol.schema import Schema, no_effect
from soloist.server.tool_grammar import CallRule

# What coding agents put in front of every system prompt, with another value each time.
BILLING_LINE = "x-anthropic-billing-header:"


class Block(Schema):
    """One block of a message: text, thinking, a call, a result. The fields depend on the type."""

    model_config = ConfigDict(extra="allow")

    type: str


class Message(Schema):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Schema):
    """A tool: a function with a schema, or one that only Anthropic's own servers run."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Schema):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Schema):
    """Whether the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = no_effect()
    display: str | None = no_effect()


class CountRequest(Schema):
    """A request to `/v1/messages/count_tokens`, and what it shares with `/v1/messages`."""

    model: str | None = None
    messages: list[Message]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    metadata: dict[str, Any] | None = no_effect()
    context_management: dict[str, Any] | None = no_effect()
    output_config: dict[str, Any] | None = no_effect()
    cache_control: dict[str, Any] | None = no_effect()
    betas: list[str] | None = no_effect()

    @property
    def functions(self) -> list[dict[str, Any]] | None:
        """The tools in OpenAI's form; those without a schema run on Anthropic's servers only and are left out."""
        if not self.tools or (self.tool_choice is not None and self.tool_choice.type == "none"):
            return None
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "parameters": tool.input_schema}
                | ({"description": tool.description} if tool.description else {})
                | ({"strict": True} if tool.strict else {}),
            }
            for tool in self.tools
            if tool.input_schema is not None
        ] or None

    @property
    def call_rule(self) -> CallRule:
        """What the request says about calls.

        Raises:
            UsageError: a tool shall be called that is not there, or that no name is given of.
        """
        choice = self.tool_choice
        if choice is None or choice.type == "none":
            return CallRule()
        is_required = choice.type in ("any", "tool")
        if is_required and not self.functions:
            raise UsageError("tool_choice asks for a call, but there are no tools that can be called here")
        if (choice.type == "tool") != (choice.name is not None):
            raise UsageError("tool_choice: name belongs to type tool, which needs it")
        is_single = choice.type == "tool" or bool(choice.disable_parallel_tool_use)
        return CallRule(is_required=is_required, name=choice.name, is_single=is_single)

    @property
    def skipped_tools(self) -> list[str]:
        """Names of the tools that were left out."""
        return [tool.name for tool in self.tools or () if tool.input_schema is None]

    def openai_messages(self, *, strips_billing_line: bool) -> list[dict[str, Any]]:
        """Give the conversation in OpenAI's words.

        Args:
            strips_billing_line: leave out the line that agents change in every request.

        Raises:
            UsageError: a block that cannot be written down.
        """
        messages: list[dict[str, Any]] = []
        if self.system:
            texts = [self.system] if isinstance(self.system, str) else [_text(block) for block in self.system]
            if strips_billing_line:
                texts = [_without_billing_line(text) for text in texts]
            if system := "\n\n".join(text for text in texts if text):
                messages.append({"role": "system", "content": system})
        for message in self.messages:
            messages += _openai_messages(message)
        if self.messages and self.messages[-1].role == "assistant":
            raise UsageError("the last message is the assistant's; continuing its words is not done here")
        return messages


class MessagesRequest(CountRequest):
    """A request to `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    service_tier: str | None = no_effect()
    container: str | None = no_effect()
    inference_geo: str | None = no_effect()
    speed: str | None = no_effect()

    def sampling_params(self, defaults: SamplingParams, room: int) -> SamplingParams:
        """Give the parameters; `room` is what the context leaves, as agents always ask for their own model's most."""
        sent: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
        }
        changes = {name: value for name, value in sent.items() if value is not None}
        return replace(defaults, max_tokens=max(1, min(self.max_tokens, room)), **changes)


def _without_billing_line(text: str) -> str:
    lines = text.split("\n")
    return "\n".join(line for line in lines if not line.startswith(BILLING_LINE)) if BILLING_LINE in text else text


def _text(block: Block) -> str:
    text = getattr(block, "text", None)
    if block.type != "text" or not isinstance(text, str):
        raise UsageError(f"a block of type {block.type!r} cannot be read here; text can")
    return text


def _openai_messages(message: Message) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content)]
    results, texts = [], []
    for block in message.content:
        if block.type == "tool_result":
            results.append(_tool_result(block))
        else:
            texts.append(_text(block))
    # A turn of results alone has no words of the user.
    words = [{"role": message.role, "content": "\n".join(texts)}] if texts or not results else []
    return [*results, *words]


def _tool_result(block: Block) -> dict[str, Any]:
    fields = block.model_extra or {}
    content = fields.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(_text(Block.model_validate(part)) for part in content)
    return {"role": "tool", "tool_call_id": str(fields.get("tool_use_id", "")), "content": content}


def _assistant(blocks: list[Block]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        fields = block.model_extra or {}
        if block.type == "thinking":
            thoughts.append(str(fields.get("thinking", "")))
        elif block.type == "tool_use":
            function = {"name": str(fields.get("name", "")), "arguments": fields.get("input") or {}}
            calls.append({"id": str(fields.get("id", "")), "type": "function", "function": function})
        elif block.type != "redacted_thinking":
            texts.append(_text(block))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
