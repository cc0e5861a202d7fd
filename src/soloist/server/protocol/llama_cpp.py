"""llama.cpp's own routes, as editors use them: `/infill`, `/completion`, and text to tokens and back."""

from typing import Any

from pydantic import Field

from soloist.sampling_params import SamplingParams
from soloist.server.protocol.schema import SamplingFields, Schema, no_effect


class NativeFields(SamplingFields):
    """What `/infill` and `/completion` share."""

    model: str | None = None
    n_predict: int | None = Field(
        default=None, ge=-1, description="-1: what the context holds; 0: only read the prompt."
    )
    max_tokens: int | None = Field(default=None, ge=-1)
    repeat_penalty: float | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    response_fields: list[str] | None = Field(
        default=None, description="Only these fields; a/b is field b of a, flattened."
    )
    t_max_predict_ms: int | None = Field(default=None, description="End behind the first line break after so long.")
    id_slot: int | None = Field(default=None, description="A newer /infill of a slot replaces the one under way.")
    json_schema: dict[str, Any] | None = None
    n_indent: int | None = no_effect()
    t_max_prompt_ms: int | None = no_effect()
    cache_prompt: bool | None = no_effect()
    timings_per_token: bool | None = no_effect()
    samplers: list[str] | str | None = no_effect()
    n_keep: int | None = no_effect()
    penalty_last_n: int | None = Field(default=None, description="Has no effect: penalties see the whole text.")
    repeat_last_n: int | None = Field(default=None, description="Has no effect: penalties see the whole text.")

    def native_params(self, defaults: SamplingParams) -> SamplingParams:
        """Give the parameters under this API's names."""
        limit = self.n_predict if self.n_predict is not None else self.max_tokens
        # A seed of -1 is this API's word for none.
        seed = None if self.seed == -1 else self.seed
        wanted = self.model_copy(update={"seed": seed})
        return SamplingFields.sampling_params(
            wanted,
            defaults,
            max_tokens=None if limit is None or limit < 0 else limit,
            repetition_penalty=self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty,
        )


class ExtraFile(Schema):
    """Text of another file, for context."""

    filename: str = ""
    text: str
    time: Any = no_effect()


class InfillRequest(NativeFields):
    """A request to `/infill`."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] | None = None
    prompt: str = Field(default="", description="Goes behind the prefix: the line up to the cursor.")


class NativeCompletionRequest(NativeFields):
    """A request to `/completion`."""

    prompt: str | list[int | str]


class TokenizeRequest(Schema):
    """A request to `/tokenize`, in llama.cpp's words or in vLLM's."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Schema):
    """A request to `/detokenize`."""

    model: str | None = None
    tokens: list[int]


class TemplateRequest(Schema):
    """A request to `/apply-template`."""

    model: str | None = None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
