"""Text in, text out: the Python API.

Owns loading a model with everything around it, and turning prompts and messages into requests. What becomes of the
tokens of an answer is in `answer`, where they come from in `engine`.
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
from soloist.config import user_cache_dir
from soloist.engine import Engine
from soloist.errors import ModelNotFoundError, UnsupportedError, UsageError
from soloist.generation import RequestStats
from soloist.hub import find_model
from soloist.kernels.compile_ahead import OnCompiled
from soloist.models import load_model
from soloist.models.loader import Progress, WeightsDtype
from soloist.runtime.buffers import SamplingPlan
from soloist.runtime.comm import Follower, Leader, Ranks, check_tensor_parallel_size, connect_gpus, rank_device
from soloist.runtime.graph import Execution
from soloist.runtime.runner import ModelRunner, measure_num_threads
from soloist.sampling_params import SamplingParams
from soloist.spec import DRAFTERS, make_drafter
from soloist.spec.draft_model import DraftModel
from soloist.spec.drafter import Drafter
from soloist.spec.setup import DrafterSetup
from soloist.step_costs import known_costs
from soloist.tokenizer import Tokenizer

__all__ = ["LLM", "Completion", "Delta", "RequestStats", "SamplingParams", "Stream"]

# Tokens of context that room is made for unless asked otherwise; less where the model allows less.
DEFAULT_CONTEXT_LEN = 32768
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

OnPrefill = Callable[[int, int], None]
# What most requests need of the sampler.
_GREEDY = SamplingPlan.of(SamplingParams())


class LLM:
    """A loaded model that answers one request at a time.

    Args:
        model: a folder, a .gguf file, a hub id (`org/name[@revision]`) or a built-in name. None: the default model.
        draft: name of a drafter, or where a draft's checkpoint is, in the forms of `model`. None: plain decoding.
        draft_width: most rows of a step, the pending token included: 2..16. None: what suits the drafter.
        draft_weights_dtype: how the draft's linear maps are held; see `load_model`. A draft that is rounded more drafts
            worse and faster, and changes no answer.
        adaptive_width: choose each step's width by what was kept before and what rows cost here, and stop drafting
            where it loses. What steps cost is measured the first time.
        simulated_acceptance: tokens that a step of full width shall commit on average, whatever the model says; for
            benchmarks.
        device: where it runs. None: the CPU.
        dtype: of activations and caches: "bfloat16", "float16" or "float32". None: bfloat16.
        weights: "file", or "random" to measure speed without a checkpoint.
        seed: of random weights.
        weights_dtype: how linear maps are held; see `load_model`.
        max_context_len: most tokens of prompt and answer together. None: what the model allows, up to 32768.
        num_threads: CPU threads, of each rank. None: measured in a few steps, starting from what torch would take;
            several ranks share what it would take.
        tensor_parallel_size: ranks that share the model: 1, 2, 4 or 8 processes, each with a GPU if `device` is "cuda".
        execution: how steps are run. None: what is fastest on the device.
        progress: called with (bytes read, bytes to read) while the weights are read.
        on_compiled: called with (kernels compiled, kernels to compile), on a GPU, behind that.

    Raises:
        ModelNotFoundError: there is no such model.
        UnsupportedError: the model, a format, or a drafter that is not known.
        CheckpointError: its files are incomplete, damaged or contradict each other.
        DoesNotFitError: weights or context are larger than the free memory.
        ContextLengthError: the model does not allow `max_context_len` tokens.
        RankLostError: a rank did not start, or ended.
        UsageError: an argument is out of range.
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
        device: torch.device | str | None = None,
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
        if num_threads is not None and num_threads < 1:
            raise UsageError(f"num_threads is {num_threads}; allowed: at least 1, or None for a measurement")
        if adaptive_width and tensor_parallel_size > 1:
            raise UnsupportedError("adaptive_width is timed and decided by one rank: leave it out, or take one rank")
        arguments: dict[str, Any] = {
            "model": None if model is None else str(model),
            "draft": draft,
            "draft_width": draft_width,
            "draft_weights_dtype": draft_weights_dtype,
            "adaptive_width": adaptive_width,
            "simulated_acceptance": simulated_acceptance,
            "dtype": dtype,
            "weights": weights,
            "seed": seed,
            "weights_dtype": weights_dtype,
            "max_context_len": max_context_len,
            "num_threads": num_threads,
            "execution": execution,
        }
        place = _as_device(device)
        check_tensor_parallel_size(tensor_parallel_size, place)
        if tensor_parallel_size == 1:
            self._load(Ranks(), place, progress, on_compiled=on_compiled, **arguments)
            return
        ranks = Leader(tensor_parallel_size, place, "from soloist.follower import main; main()", arguments)
        try:
            self._load(ranks, rank_device(place, 0), progress, **arguments)
            ranks.wait_until_loaded(self.engine.runner.model.report.checksums)
        except BaseException as error:
            ranks.fail(error)
            raise

    @classmethod
    def of_rank(cls, ranks: Follower, arguments: dict[str, Any]) -> Self:
        """Load what one of several ranks has, in the process that rank 0 started for it."""
        llm = cls.__new__(cls)
        llm._load(ranks, ranks.device, None, **arguments)
        return llm

    def _load(
        self,
        ranks: Ranks,
        device: torch.device,
        progress: Progress | None,
        *,
        model: str | None,
        draft: str | None,
        draft_width: int | None,
        draft_weights_dtype: WeightsDtype | None,
        adaptive_width: bool,
        simulated_acceptance: float | None,
        dtype: torch.dtype | str | None,
        weights: Literal["file", "random"],
        seed: int,
        weights_dtype: WeightsDtype | None,
        max_context_len: int | None,
        num_threads: int | None,
        execution: Execution | None,
        on_compiled: OnCompiled | None = None,
    ) -> None:
        """Load everything on one rank; arguments are those of the constructor."""
        found = find_model(model, with_weights=weights == "file")
        tokenizer = None if found.path is None else Tokenizer.load(found.path)
        source = found.path or found.config
        assert source is not None
        connect_gpus(ranks, source, device)
        target = load_model(
            source,
            device=device,
            dtype=_as_dtype(dtype),
            weights=weights,
            seed=seed,
            weights_dtype=weights_dtype,
            progress=progress,
            group=ranks.group,
        )
        if tokenizer is not None:
            tokenizer.check_vocab_size(target.config.vocab_size)
        limit = max_context_len
        if limit is None:
            limit = min(DEFAULT_CONTEXT_LEN, target.config.max_position_embeddings)
        setup = DrafterSetup(
            target=target,
            target_path=found.path if weights == "file" else None,
            max_context_len=limit,
            num_tokens=target.config.vocab_size if tokenizer is None else tokenizer.num_tokens,
            max_width=draft_width,
            weights_dtype=draft_weights_dtype,
            seed=seed,
        )
        drafter = _find_drafter(draft or "off", setup, tokenizer)
        if not drafter.max_drafts and (draft_width or draft_weights_dtype or adaptive_width):
            raise UsageError("draft_width, draft_weights_dtype and adaptive_width are a drafter's: name one as draft")
        if max_context_len is None and drafter.max_context_len is not None:
            # Nobody asked for the last few tokens that the draft has no room for.
            limit = min(limit, drafter.max_context_len)
        runner = ModelRunner(
            target,
            max_context_len=limit,
            max_width=1 + drafter.max_drafts,
            num_tokens=setup.num_tokens,
            has_draft_probs=drafter.has_draft_law,
            capture_layers=drafter.capture_layers,
        )
        engine = Engine(runner, drafter, execution=execution, simulated_acceptance=simulated_acceptance)
        engine.ranks = ranks
        self._assemble(engine, tokenizer, found.name)
        if target.device.type == "cpu":
            num_ranks = ranks.group.size
            # Steps of one rank cannot be timed alone.
            shared = max(1, torch.get_num_threads() // num_ranks) if num_ranks > 1 else 0
            torch.set_num_threads(num_threads or shared or measure_num_threads(runner))
        if ranks.group.size == 1:
            # Now rather than while somebody waits for an answer. Several ranks capture together, with a request.
            engine.compile_ahead(_GREEDY, on_compiled)
            engine.prepare(_GREEDY)
        if adaptive_width:
            engine.adapt_width(known_costs(engine, user_cache_dir()))
            engine.prepare(_GREEDY)

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


def _find_drafter(draft: str, setup: DrafterSetup, tokenizer: Tokenizer | None) -> Drafter:
    """Make the drafter that `draft` names, from a checkpoint if it is no name."""
    if draft in DRAFTERS:
        return make_drafter(draft, setup)
    try:
        found = find_model(draft)
    except ModelNotFoundError as error:
        names = ", ".join(sorted(DRAFTERS))
        raise ModelNotFoundError(f"{error}. Drafters without a checkpoint: {names}") from None
    assert found.path is not None
    drafter = make_drafter(found.name, replace(setup, draft_path=found.path))
    if isinstance(drafter, DraftModel) and tokenizer is not None:
        difference = tokenizer.difference(Tokenizer.load(found.path))
        if difference is not None:
            raise UnsupportedError(f"{found.name} cannot draft: its vocabulary is another, {difference}")
    return drafter


def _has_template(tokenizer: Tokenizer, architecture: str) -> bool:
    try:
        ChatTemplate(tokenizer, architecture)
    except UsageError:
        return False
    return True


def _as_device(device: torch.device | str | None) -> torch.device:
    try:
        parsed = torch.device(device or "cpu")
    except RuntimeError:
        raise UsageError(f"device is {device!r}; allowed: cpu, cuda, or one GPU as in cuda:1") from None
    num_gpus = torch.cuda.device_count()
    if parsed.type == "cuda" and (parsed.index or 0) >= num_gpus:
        raise UsageError(f"device is {str(device)!r}, and PyTorch sees {num_gpus} CUDA devices; see `soloist doctor`")
    return parsed


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype:
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise UsageError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
        return DTYPES[dtype]
    return dtype or torch.bfloat16
