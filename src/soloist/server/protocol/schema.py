"""What all request schemas share: unknown fields are refused by name, sampling fields become `SamplingParams`."""

from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from soloist.sampling_params import SamplingParams

# Of fields that clients send and that mean nothing to a server with one model and one listener.
NO_EFFECT = "Accepted; has no effect here."


def no_effect() -> Any:
    """Declare a field that is accepted and changes nothing."""
    return Field(default=None, description=NO_EFFECT)


class Schema(BaseModel):
    """A JSON object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict) or cls.model_config.get("extra") == "allow":
            return data
        known = set(cls.model_fields) | {f.alias for f in cls.model_fields.values() if f.alias}
        for name in data:
            if name not in known:
                nearest = get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
                raise PydanticCustomError(
                    "unknown_field",
                    "{name} is not a field that this server knows{hint}",
                    {"name": str(name), "hint": hint},
                )
        return data


class SamplingFields(Schema):
    """Sampling parameters under the names that OpenAI's API and its extensions share."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, description="0 and -1 keep all tokens.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None

    def sampling_params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """Give the parameters: what was sent, else the server's defaults.

        Args:
            defaults: of the server.
            more: fields that the API names in its own way; None means not sent.
        """
        names = SamplingFields.model_fields
        sent = {name: value for name in names if (value := getattr(self, name)) is not None}
        sent |= {name: value for name, value in more.items() if value is not None}
        changes = {name: value for name, value in sent.items() if name != "top_k" or value > 0}
        if sent.get("top_k", 1) <= 0:
            changes["top_k"] = None
        return replace(defaults, **changes)


class StreamOptions(Schema):
    """What a stream reports besides text."""

    include_usage: bool | None = Field(default=None, description="End with an event that holds the usage.")
    continuous_usage_stats: bool | None = Field(default=None, description="Put the usage so far into every event.")
    include_obfuscation: bool | None = no_effect()
