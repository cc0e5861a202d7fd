"""From a model's name to an engine: where it runs, weights, tokenizer, drafter, and the ranks that share them.

Owns what `LLM` does once, and the choice of a device for every command. What it does with the result is `llm`'s;
another rank's process does the same, in `follower`.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import soloist
from soloist.config import user_cache_dir
from soloist.engine import Engine
from soloist.errors import ModelNotFoundError, UnsupportedError, UsageError
from soloist.hub import ModelFiles, find_model
from soloist.kernels.compile_ahead import OnCompiled
from soloist.kernels.requirements import find_lack
from soloist.models import find_model_class, load_model, open_model, read_config
from soloist.models.file_marks import mark_files
from soloist.models.loader import DENSE_DTYPES, PACKED_BYTES_PER_VALUE, Progress, WeightsDtype, check_num_ranks
from soloist.runtime.buffers import SamplingPlan
from soloist.runtime.comm import Leader, Ranks, check_tensor_parallel_size, connect_gpus, rank_device
from soloist.runtime.graph import Execution
from soloist.runtime.runner import ModelRunner, measure_num_threads
from soloist.sampling_params import SamplingParams
from soloist.spec import DRAFTERS, make_drafter
from soloist.spec.draft_model import DraftModel
from soloist.spec.drafter import Drafter
from soloist.spec.setup import DrafterSetup
from soloist.step_costs import known_costs
from soloist.tokenizer import Tokenizer

# Tokens of context that room is made for unless asked otherwise; less where the model allows less.
DEFAULT_CONTEXT_LEN = 32768
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# What most requests need of the sampler.
_GREEDY, _SAMPLED = (SamplingPlan.of(SamplingParams(temperature=temperature)) for temperature in (0.0, 1.0))
# What Python runs as another rank.
_FOLLOWER = "from soloist.follower import main; main()"

# The device that leaves it to `choose_device`.
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What every rank of a model is loaded with: the arguments of `LLM`, whose docstring says what they mean.

    Raises:
        UsageError: one is out of range.
    """

    model: str | None
    draft: str | None
    draft_width: int | None
    draft_weights_dtype: WeightsDtype | None
    adaptive_width: bool
    simulated_acceptance: float | None
    dtype: torch.dtype | str | None
    weights: Literal["file", "random"]
    seed: int
    weights_dtype: WeightsDtype | None
    max_context_len: int | None
    num_threads: int | None
    execution: Execution | None

    def __post_init__(self) -> None:
        if self.num_threads is not None and self.num_threads < 1:
            raise UsageError(f"num_threads is {self.num_threads}; allowed: at least 1, or None for a measurement")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What loading gives."""

    engine: Engine
    # None for a packaged config with random weights.
    tokenizer: Tokenizer | None
    # What the model is called.
    name: str


def load(
    options: LoadOptions,
    device: torch.device | str,
    tensor_parallel_size: int,
    progress: Progress | None,
    on_compiled: OnCompiled | None,
) -> Loaded:
    """Load a model on this process's device, or start the other ranks and load it with them.

    Raises:
        SoloistError: as `LLM` says.
    """
    choice = choose_device(
        device,
        num_ranks=tensor_parallel_size,
        dtype=options.dtype,
        weights_dtype=options.weights_dtype,
        draft_weights_dtype=options.draft_weights_dtype,
        num_threads=options.num_threads,
    )
    if choice.remark is not None:
        # The caller of `LLM`.
        warnings.warn(choice.remark, stacklevel=3)
    place = choice.device
    check_tensor_parallel_size(tensor_parallel_size, place)
    if options.execution is not None:
        options.execution.check_num_ranks(tensor_parallel_size)
    if tensor_parallel_size == 1:
        return load_rank(options, Ranks(), place, progress, on_compiled)
    _check_shares(options, tensor_parallel_size)
    ranks = Leader(tensor_parallel_size, place, _FOLLOWER, options)
    try:
        return load_rank(options, ranks, rank_device(place, 0), progress, on_compiled)
    except BaseException as error:
        ranks.fail(error)
        raise


def _check_shares(options: LoadOptions, num_ranks: int) -> None:
    """Find a model and refuse ranks that cannot share it, rather than behind the start of all of them.

    Raises:
        SoloistError: it is not there, or cannot be shared.
    """
    found = find_model(options.model, with_weights=options.weights == "file")
    config = found.config
    if config is None:
        assert found.path is not None
        config = read_config(open_model(found.path))
    model_class = find_model_class(config)
    check_num_ranks(model_class, model_class.config_class.from_dict(config), num_ranks)


def load_rank(
    options: LoadOptions,
    ranks: Ranks,
    device: torch.device,
    progress: Progress | None = None,
    on_compiled: OnCompiled | None = None,
) -> Loaded:
    """Load what one rank has of a model.

    What can fail on one rank alone comes before a meeting, and what is an exchange behind it.
    """
    has_files = options.weights == "file"
    found = find_model(options.model, with_weights=has_files)
    tokenizer = None if found.path is None else Tokenizer.load(found.path)
    source = found.path or found.config
    assert source is not None
    draft_name = options.draft or (found.draft if has_files else None) or "off"
    draft = _find_draft(draft_name)
    if ranks.group.size > 1:
        ranks.meet(_mark_files(found.path if has_files else None, draft))
    with ranks.at_work():
        connect_gpus(ranks, source, device)

    def on_progress(done: int, total: int) -> None:
        # Rather than behind minutes of reading.
        ranks.check()
        if progress is not None:
            progress(done, total)

    target = load_model(
        source,
        device=device,
        dtype=_as_dtype(options.dtype),
        weights=options.weights,
        seed=options.seed,
        weights_dtype=options.weights_dtype,
        progress=on_progress,
        group=ranks.group,
    )
    if tokenizer is not None:
        tokenizer.check_vocab_size(target.config.vocab_size)
    limit = options.max_context_len
    if limit is None:
        limit = min(DEFAULT_CONTEXT_LEN, target.config.max_position_embeddings)
    setup = DrafterSetup(
        target=target,
        target_path=found.path if has_files else None,
        draft_path=None if draft is None else draft.path,
        max_context_len=limit,
        num_tokens=target.config.vocab_size if tokenizer is None else tokenizer.num_tokens,
        max_width=options.draft_width,
        weights_dtype=options.draft_weights_dtype,
        seed=options.seed,
    )
    drafter = _make_drafter(draft_name if draft is None else draft.name, setup, tokenizer)
    if not drafter.max_drafts and (options.draft_width or options.draft_weights_dtype or options.adaptive_width):
        raise UsageError("draft_width, draft_weights_dtype and adaptive_width are a drafter's: name one as draft")
    if options.max_context_len is None:
        # Nobody asked for the last few tokens, for which the draft, or a step's rows, have no room.
        limit = min(limit, target.config.max_position_embeddings - drafter.max_drafts)
        limit = limit if drafter.max_context_len is None else min(limit, drafter.max_context_len)
    runner = ModelRunner(
        target,
        max_context_len=limit,
        max_width=1 + drafter.max_drafts,
        num_tokens=setup.num_tokens,
        has_draft_probs=drafter.has_draft_law,
        capture_layers=drafter.capture_layers,
    )
    engine = Engine(runner, drafter, execution=options.execution, simulated_acceptance=options.simulated_acceptance)
    engine.ranks = ranks
    if target.device.type == "cpu":
        num_ranks = ranks.group.size
        # Steps of one rank cannot be timed alone.
        shared = max(1, torch.get_num_threads() // num_ranks) if num_ranks > 1 else 0
        torch.set_num_threads(options.num_threads or shared or measure_num_threads(runner))
    with engine.alone():
        # Now rather than while somebody waits for an answer.
        engine.compile_ahead([_GREEDY, _SAMPLED], on_compiled)
        ranks.meet(_describe(engine))
        with ranks.at_work():
            engine.prepare(_GREEDY)
            if options.adaptive_width:
                engine.adapt_width(known_costs(engine, user_cache_dir()))
                engine.prepare(_GREEDY)
        ranks.meet({})
    return Loaded(engine=engine, tokenizer=tokenizer, name=found.name)


def _mark_files(target: Path | None, draft: ModelFiles | None) -> dict[str, object]:
    """Say what files a rank has, before it reads them."""
    marks: dict[str, object] = {"soloist": soloist.__version__, "torch": torch.__version__}
    if target is not None:
        marks |= mark_files(open_model(target))
    if draft is not None:
        assert draft.path is not None
        marks |= {f"{name} of the draft": mark for name, mark in mark_files(open_model(draft.path)).items()}
    return marks


def _describe(engine: Engine) -> dict[str, object]:
    """Say what a rank holds that all ranks must hold alike: what they exchange has its shape, and is made from it."""
    runner, drafter = engine.runner, engine.drafter
    return {
        "the number of tokens": runner.buffers.num_tokens,
        "the context": runner.max_context_len,
        "the draft": (drafter.name, drafter.max_drafts, drafter.has_draft_law, drafter.capture_layers),
        **runner.model.report.checksums,
    }


def _find_draft(draft: str) -> ModelFiles | None:
    """Find the checkpoint that `draft` names; None if it is the name of a drafter."""
    if draft in DRAFTERS:
        return None
    try:
        return find_model(draft)
    except ModelNotFoundError as error:
        names = ", ".join(sorted(DRAFTERS))
        raise ModelNotFoundError(f"{error}. Drafters without a checkpoint: {names}") from None


def _make_drafter(name: str, setup: DrafterSetup, tokenizer: Tokenizer | None) -> Drafter:
    """Make a drafter, and see to it that a model of its own has the target's tokens."""
    drafter = make_drafter(name, setup)
    if isinstance(drafter, DraftModel) and tokenizer is not None:
        assert setup.draft_path is not None
        difference = tokenizer.difference(Tokenizer.load(setup.draft_path))
        if difference is not None:
            raise UnsupportedError(f"{name} cannot draft: its vocabulary is another, {difference}")
    return drafter


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    """Where a model runs."""

    device: torch.device
    # Why that is the CPU although there is a GPU, and what to do. None: there is none, or it was asked for.
    remark: str | None = None


def choose_device(
    device: torch.device | str = AUTO,
    *,
    num_ranks: int = 1,
    dtype: torch.dtype | str | None = None,
    weights_dtype: WeightsDtype | None = None,
    draft_weights_dtype: WeightsDtype | None = None,
    num_threads: int | None = None,
) -> DeviceChoice:
    """Decide where a model runs: the one place that does, for every command and for `LLM`.

    "auto" is the first GPU if kernels run there and nothing was asked for that only a CPU has, else the CPU. Ranks do
    not change that: too few GPUs for them are refused, by `check_tensor_parallel_size`.

    Args:
        device: what was asked for.
        num_ranks: that share the model.
        dtype: this and the others as `LLM` takes them.

    Raises:
        UsageError: there is no such device, or it is another GPU than this process is on.
        UnsupportedError: a GPU was asked for that no kernel runs on.
    """
    if device == AUTO:
        return _choose_best(_name_wish(dtype, weights_dtype, draft_weights_dtype, num_threads), num_ranks)
    try:
        named = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device is {device!r}; allowed: auto, cpu or cuda") from None
    if named.type == "cuda":
        # Those that its driver lets PyTorch use.
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (named.index or 0) >= num_gpus:
            raise UsageError(
                f"device is {str(device)!r}, and PyTorch sees {num_gpus} CUDA devices; see `soloist doctor`"
            )
        if named.index is not None and named.index != (current := torch.cuda.current_device()):
            # Kernels are launched, and steps captured, on the GPU that a thread is on.
            raise UsageError(
                f"device is {str(device)!r}, and models of this process run on GPU {current}: say cuda, and choose"
                " another one by CUDA_VISIBLE_DEVICES"
            )
        _refuse_lacks([named.index] if named.index is not None else range(min(num_ranks, num_gpus)), str(device))
    return DeviceChoice(device=named)


def _choose_best(wish: str | None, num_ranks: int) -> DeviceChoice:
    """Choose for whoever did not.

    Args:
        wish: what was asked for that only a CPU has.
        num_ranks: that share the model.
    """
    cpu = torch.device("cpu")
    if not torch.cuda.is_available():
        return DeviceChoice(device=cpu)
    lack = find_lack(0)
    if lack is not None:
        return DeviceChoice(device=cpu, remark=f"on the CPU: {lack.in_words}")
    if wish is not None:
        name = torch.cuda.get_device_properties(0).name
        return DeviceChoice(
            device=cpu, remark=f"on the CPU, the only place for {wish}: without that the {name} is used"
        )
    _refuse_lacks(range(1, min(num_ranks, torch.cuda.device_count())), AUTO)
    return DeviceChoice(device=torch.device("cuda"))


def _name_wish(
    dtype: torch.dtype | str | None,
    weights_dtype: WeightsDtype | None,
    draft_weights_dtype: WeightsDtype | None,
    num_threads: int | None,
) -> str | None:
    """Name what was asked for that only a CPU has."""
    activations = _as_dtype(dtype)

    def is_packed(kind: WeightsDtype | None) -> bool:
        return kind in PACKED_BYTES_PER_VALUE and kind != DENSE_DTYPES.get(activations)

    # Neither attention nor experts have a kernel for it.
    if activations is torch.float32:
        return "activations in float32"
    if is_packed(weights_dtype):
        return f"weights held as {weights_dtype}"
    if is_packed(draft_weights_dtype):
        return f"a draft held as {draft_weights_dtype}"
    return None if num_threads is None else "a number of threads"


def _refuse_lacks(indices: Iterable[int], device: str) -> None:
    """Refuse GPUs that no kernel runs on.

    Raises:
        UnsupportedError: the message says what is missing, and what to do.
    """
    for index in indices:
        lack = find_lack(index)
        if lack is not None and lack.is_fatal:
            raise UnsupportedError(f"device is {device!r}, and {lack.in_words}, or device cpu")


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype:
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise UsageError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
        return DTYPES[dtype]
    return dtype or torch.bfloat16
