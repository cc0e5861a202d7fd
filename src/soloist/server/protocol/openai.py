"""OpenAI's chat completions and completions, with the extensions that local clients send."""

from typing import Any, Literal

from pydantic import Field

from soloist.errors import UsageError
from soloist.server.protocol.schema import SamplingFields, Schema, StreamOptions, no_effect
from soloist.server.tool_grammar import CallRule


class Function(Schema):
    """A function that the model may call."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Schema):
    """A tool; only functions exist here."""

    type: Literal["function"]
    function: Function


class FunctionName(Schema):
    """The name of one function."""

    name: str


class NamedTool(Schema):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Schema):
    """A schema that the answer must satisfy."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Schema):
    """What form the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must satisfy; None for free text.

        Raises:
            UsageError: the schema is missing.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        if self.json_schema is None:
            raise UsageError("response_format.json_schema is missing; type json_schema needs one")
        return self.json_schema.schema_


class CommonFields(SamplingFields):
    """What chat and plain completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = Field(default=None, ge=1, le=16, description="Answers, made one after the other.")
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = Field(default=None, description="Add `token_ids` to each choice.")
    return_progress: bool | None = Field(default=None, description="Stream events while the prompt is read.")
    session_id: str | None = Field(
        default=None, description="A newer request with the same session id replaces the one under way."
    )
    user: str | None = no_effect()
    metadata: dict[str, Any] | None = no_effect()
    store: bool | None = no_effect()
    service_tier: str | None = no_effect()
    prompt_cache_key: str | None = no_effect()
    prompt_cache_retention: str | None = no_effect()
    safety_identifier: str | None = no_effect()
    timings_per_token: bool | None = no_effect()
    cache_prompt: bool | None = no_effect()

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must satisfy; None for free text."""
        return None if self.response_format is None else self.response_format.schema_wanted


class ChatRequest(CommonFields):
    """A request to `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(default=None, description="The later name of `max_tokens`.")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = no_effect()
    modalities: list[Literal["text"]] | None = no_effect()

    @property
    def call_rule(self) -> CallRule:
        """What the request says about calls."""
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return CallRule(
            is_required=name is not None or self.tool_choice == "required",
            name=name,
            is_single=name is not None or self.parallel_tool_calls is False,
        )


class CompletionRequest(CommonFields):
    """A request to `/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    suffix: str | None = Field(default=None, description="What stands behind the hole that is to be filled.")
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = Field(default=None, description="Only as many as `n`.")
    add_special_tokens: bool | None = Field(default=None, description="Begin with BOS where the model wants it.")
