"""Text in, text out: the Python API.

Owns turning prompts and messages into requests. What becomes of the tokens of an answer is in `answer`, where they come
from in `engine`; loading is in `loading`.
"""

import contextlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import torch

from soloist.answer import Completion, Delta, Stream
from soloist.chat import ChatTemplate, Prompt
from soloist.engine import Engine
from soloist.errors import UsageError
from soloist.kernels.compile_ahead import OnCompiled
from soloist.loading import AUTO, LoadOptions, load
from soloist.models.loader import Progress, WeightsDtype
from soloist.request_stats import RequestStats
from soloist.runtime.graph import Execution
from soloist.sampling_params import SamplingParams
from soloist.tokenizer import Tokenizer

__all__ = ["LLM", "Completion", "Delta", "RequestStats", "SamplingParams", "Stream"]

OnPrefill = Callable[[int, int], None]


class LLM:
    """A loaded model that answers one request at a time.

    The models that one process has on one GPU take turns there: while one answers, the others refuse to, and to be
    loaded. In several processes each works by itself.

    Args:
        model: a folder, a .gguf file, a hub id (`org/name[@revision]`) or a built-in name. None: the default model.
        draft: name of a drafter, or where a draft's checkpoint is, in the forms of `model`; "off" for plain decoding.
            None: the draft that comes with the model, if one does.
        draft_width: most rows of a step, the pending token included: 2..16. None: what suits the drafter.
        draft_weights_dtype: how the draft's linear maps are held; see `load_model`. A draft that is rounded more drafts
            worse and faster, and changes no answer.
        adaptive_width: choose each step's width by what was kept before and what rows cost here, and stop drafting
            where it loses. What steps cost is measured the first time.
        simulated_acceptance: tokens that a step of full width shall commit on average, whatever the model says; for
            benchmarks.
        device: where it runs: "cpu", "cuda", or "auto": the first GPU if kernels run there and no argument is for a CPU
            alone (`num_threads`, float32, weights in int8 or int4), else the CPU. A warning says why it is the CPU
            where there is a GPU. CUDA_VISIBLE_DEVICES says which GPU is the first.
        dtype: of activations and caches: "bfloat16", "float16" or "float32". None: bfloat16.
        weights: "file", or "random" to measure speed without a checkpoint.
        seed: of random weights.
        weights_dtype: how linear maps are held; see `load_model`.
        max_context_len: most tokens of prompt and answer together. None: what the model allows, up to 32768.
        num_threads: CPU threads, of each rank. None: measured in a few steps, starting from what torch would take;
            several ranks share what it would take.
        tensor_parallel_size: ranks that share the model: 1, 2, 4 or 8 processes, each with a GPU of its own or all on
            the CPU.
        execution: how steps are run. None: what is fastest on the device.
        progress: called with (bytes read, bytes to read) while the weights are read.
        on_compiled: called with (kernels compiled, kernels to compile), on a GPU, behind that.

    Raises:
        ModelNotFoundError: there is no such model.
        UnsupportedError: the model, a format, or a drafter that is not known.
        CheckpointError: its files are incomplete, damaged or contradict each other.
        DoesNotFitError: weights or context are larger than the free memory.
        ContextLengthError: the model, or the draft, does not allow `max_context_len` tokens; it names how many.
        RankLostError: a rank did not start, or ended.
        UsageError: an argument is out of range, or another model of this process is at work on the same GPU.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        draft: str | None = None,
        draft_width: int | None = None,
        draft_weights_dtype: WeightsDtype | None = None,
        adaptive_width: bool = False,
        simulated_acceptance: float | None = None,
        device: torch.device | str = AUTO,
        dtype: torch.dtype | str | None = None,
        weights: Literal["file", "random"] = "file",
        seed: int = 0,
        weights_dtype: WeightsDtype | None = None,
        max_context_len: int | None = None,
        num_threads: int | None = None,
        tensor_parallel_size: int = 1,
        execution: Execution | None = None,
        progress: Progress | None = None,
        on_compiled: OnCompiled | None = None,
    ) -> None:
        options = LoadOptions(
            model=None if model is None else str(model),
            draft=draft,
            draft_width=draft_width,
            draft_weights_dtype=draft_weights_dtype,
            adaptive_width=adaptive_width,
            simulated_acceptance=simulated_acceptance,
            dtype=dtype,
            weights=weights,
            seed=seed,
            weights_dtype=weights_dtype,
            max_context_len=max_context_len,
            num_threads=num_threads,
            execution=execution,
        )
        loaded = load(options, device, tensor_parallel_size, progress, on_compiled)
        self._assemble(loaded.engine, loaded.tokenizer, loaded.name)

    @classmethod
    def of(cls, engine: Engine, tokenizer: Tokenizer | None, name: str) -> Self:
        """Put an LLM together from parts that are loaded already.

        Args:
            engine: gets the end tokens of the tokenizer and the template, besides its own.
            tokenizer: None: prompts are token ids, and answers have no text.
            name: what the model is called.
        """
        llm = cls.__new__(cls)
        llm._assemble(engine, tokenizer, name)
        return llm

    def _assemble(self, engine: Engine, tokenizer: Tokenizer | None, name: str) -> None:
        self.engine = engine
        # None for a packaged config with random weights: prompts are token ids then, and answers have no text.
        self.tokenizer = tokenizer
        self.name = name
        self._template: ChatTemplate | None = None
        if tokenizer is not None and (tokenizer.chat_templates or _has_template(tokenizer, self.architecture)):
            self._template = ChatTemplate(tokenizer, self.architecture)
        known = {*engine.eos_token_ids, *(() if tokenizer is None else tokenizer.stop_ids)}
        engine.eos_token_ids = tuple(sorted(known | set(self._template.stop_ids if self._template else ())))

    @property
    def architecture(self) -> str:
        """`architectures[0]` of the checkpoint."""
        return self.engine.runner.model.architecture

    @property
    def max_context_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.engine.runner.max_context_len

    @property
    def chat_template(self) -> ChatTemplate | None:
        """What writes messages down; None for a base model."""
        return self._template

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, on_prefill: OnPrefill | None = None
    ) -> Completion:
        """Continue a prompt; see `stream`."""
        return self.stream(prompt, params, on_prefill=on_prefill).completion

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        on_prefill: OnPrefill | None = None,
        turn_ends: Sequence[int] = (),
    ) -> Stream:
        """Continue a prompt, step by step.

        Args:
            prompt: token ids, taken as they are; or text, in which special tokens count as such and to which BOS is
                added if the checkpoint's prompts begin with it. For what a user wrote, use `stream_chat`.
            params: None: greedy, to the end of the context.
            on_prefill: called with (prompt tokens read, prompt tokens to read) while the prompt is read.
            turn_ends: lengths of beginnings of the prompt to which later prompts are likely to return.

        Raises:
            ContextLengthError: prompt and answer do not fit into the context.
            UsageError: the prompt is empty, or something is not in the vocabulary.
        """
        params = params or SamplingParams()
        if params.stop_strings and self.tokenizer is None:
            raise UsageError("stop strings need text, and this model came without a tokenizer")
        generation = self.engine.generate(self.encode(prompt), params, on_prefill=on_prefill, turn_ends=turn_ends)
        return Stream(generation, self.tokenizer, params)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        on_prefill: OnPrefill | None = None,
    ) -> Completion:
        """Answer the last of `messages`; see `stream_chat`."""
        stream = self.stream_chat(messages, params, tools=tools, template_kwargs=template_kwargs, on_prefill=on_prefill)
        return stream.completion

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        on_prefill: OnPrefill | None = None,
    ) -> Stream:
        """Answer the last of `messages`, step by step.

        Args:
            messages: role and content, in OpenAI's words.
            params: None: greedy, to the end of the context.
            tools: function descriptions, in OpenAI's form.
            template_kwargs: variables of the template, such as `enable_thinking`.
            on_prefill: as in `stream`.

        Raises:
            ContextLengthError: prompt and answer do not fit into the context.
            UsageError: the model has no chat template, or the messages cannot be written down.
        """
        prompt = self.render(messages, tools=tools, template_kwargs=template_kwargs)
        turn_ends = self.turn_ends(messages, prompt.ids, tools=tools, template_kwargs=template_kwargs)
        return self.stream(prompt.ids, params, on_prefill=on_prefill, turn_ends=turn_ends)

    def stream_infill(
        self, prefix: str, suffix: str, params: SamplingParams | None = None, *, on_prefill: OnPrefill | None = None
    ) -> Stream:
        """Fill in what stands between `prefix` and `suffix`; the model's markers end the answer and never show.

        Raises:
            ContextLengthError: prompt and answer do not fit into the context.
            UsageError: the model has no tokens for filling in the middle.
        """
        tokenizer, params = self._need_tokenizer(), params or SamplingParams()
        prompt_ids = tokenizer.encode_infill(prefix, suffix)
        assert tokenizer.fim is not None
        ends = (*params.stop_token_ids, *tokenizer.fim.end_ids)
        stops = (*params.stop_strings, *tokenizer.fim.stop_strings)
        return self.stream(prompt_ids, replace(params, stop_token_ids=ends, stop=stops), on_prefill=on_prefill)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Write messages down as the prompt that `stream_chat` would use.

        Raises:
            UsageError: the model has no chat template, or the messages cannot be written down.
        """
        template = self._template or ChatTemplate(self._need_tokenizer(), self.architecture)
        return template.render(messages, tools=tools, template_kwargs=template_kwargs)

    def turn_ends(
        self,
        messages: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Find where the system message and the last turn end in the prompt that `messages` became.

        Empty where it is of no use: nothing is kept between requests, or a kept state can be cut back anywhere.
        """
        template = self._template
        if template is None or self.engine.prefixes is None or self.engine.runner.cache.can_rollback:
            return ()
        beginnings = [(messages, False)]
        if messages[0].get("role") in ("system", "developer"):
            beginnings.append(([messages[0], {"role": "user", "content": "?"}], True))
        ends = set()
        for beginning, is_open in beginnings:
            # A template may refuse to stop there; then there is one place less to return to.
            with contextlib.suppress(UsageError):
                prompt = template.render(
                    beginning, tools=tools, template_kwargs=template_kwargs, add_generation_prompt=is_open
                )
                pairs = enumerate(zip(prompt.ids, prompt_ids, strict=False))
                ends.add(next((i for i, (a, b) in pairs if a != b), min(len(prompt.ids), len(prompt_ids))))
        return tuple(sorted(ends))

    def encode(self, prompt: str | Iterable[int]) -> list[int]:
        """Turn a prompt into token ids, as `stream` does.

        Raises:
            UsageError: it is neither text nor token ids.
        """
        if isinstance(prompt, str):
            return self._need_tokenizer().encode(prompt, allow_special=True, add_bos=True)
        try:
            return [operator.index(token_id) for token_id in prompt]
        except TypeError as error:
            raise UsageError(
                f"the prompt is a {type(prompt).__name__}; allowed: text, or token ids ({error})"
            ) from None

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UsageError(f"{self.name} is a config without a tokenizer: give token ids")
        return self.tokenizer


def _has_template(tokenizer: Tokenizer, architecture: str) -> bool:
    try:
        ChatTemplate(tokenizer, architecture)
    except UsageError:
        return False
    return True
