"""From a model's name to an engine: weights, tokenizer, drafter, and the ranks that share them.

Owns what `LLM` does once. What it does with the result is `llm`'s; another rank's process does the same, in `follower`.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from soloist.config import user_cache_dir
from soloist.engine import Engine
from soloist.errors import ModelNotFoundError, UnsupportedError, UsageError
from soloist.hub import find_model
from soloist.kernels.compile_ahead import OnCompiled
from soloist.models import load_model
from soloist.models.loader import Progress, WeightsDtype
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
    device: torch.device | str | None,
    tensor_parallel_size: int,
    progress: Progress | None,
    on_compiled: OnCompiled | None,
) -> Loaded:
    """Load a model on this process's device, or start the other ranks and load it with them.

    Raises:
        SoloistError: as `LLM` says.
    """
    place = _as_device(device)
    check_tensor_parallel_size(tensor_parallel_size, place)
    if tensor_parallel_size == 1:
        return load_rank(options, Ranks(), place, progress, on_compiled)
    ranks = Leader(tensor_parallel_size, place, _FOLLOWER, options)
    try:
        loaded = load_rank(options, ranks, rank_device(place, 0), progress)
        ranks.wait_until_loaded(loaded.engine.runner.model.report.checksums)
    except BaseException as error:
        ranks.fail(error)
        raise
    return loaded


def load_rank(
    options: LoadOptions,
    ranks: Ranks,
    device: torch.device,
    progress: Progress | None = None,
    on_compiled: OnCompiled | None = None,
) -> Loaded:
    """Load what one rank has of a model."""
    found = find_model(options.model, with_weights=options.weights == "file")
    tokenizer = None if found.path is None else Tokenizer.load(found.path)
    source = found.path or found.config
    assert source is not None
    connect_gpus(ranks, source, device)
    target = load_model(
        source,
        device=device,
        dtype=_as_dtype(options.dtype),
        weights=options.weights,
        seed=options.seed,
        weights_dtype=options.weights_dtype,
        progress=progress,
        group=ranks.group,
    )
    if tokenizer is not None:
        tokenizer.check_vocab_size(target.config.vocab_size)
    limit = options.max_context_len
    if limit is None:
        limit = min(DEFAULT_CONTEXT_LEN, target.config.max_position_embeddings)
    setup = DrafterSetup(
        target=target,
        target_path=found.path if options.weights == "file" else None,
        max_context_len=limit,
        num_tokens=target.config.vocab_size if tokenizer is None else tokenizer.num_tokens,
        max_width=options.draft_width,
        weights_dtype=options.draft_weights_dtype,
        seed=options.seed,
    )
    own_draft = found.draft if options.weights == "file" else None
    drafter = _find_drafter(options.draft or own_draft or "off", setup, tokenizer)
    if not drafter.max_drafts and (options.draft_width or options.draft_weights_dtype or options.adaptive_width):
        raise UsageError("draft_width, draft_weights_dtype and adaptive_width are a drafter's: name one as draft")
    if options.max_context_len is None and drafter.max_context_len is not None:
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
    engine = Engine(runner, drafter, execution=options.execution, simulated_acceptance=options.simulated_acceptance)
    engine.ranks = ranks
    if target.device.type == "cpu":
        num_ranks = ranks.group.size
        # Steps of one rank cannot be timed alone.
        shared = max(1, torch.get_num_threads() // num_ranks) if num_ranks > 1 else 0
        torch.set_num_threads(options.num_threads or shared or measure_num_threads(runner))
    # Now rather than while somebody waits for an answer.
    if ranks.group.size == 1:
        # Side by side; ranks compile as they go, since what is only compiled gives no values to exchange.
        engine.compile_ahead([_GREEDY, _SAMPLED], on_compiled)
    engine.prepare(_GREEDY)
    if options.adaptive_width:
        engine.adapt_width(known_costs(engine, user_cache_dir()))
        engine.prepare(_GREEDY)
    return Loaded(engine=engine, tokenizer=tokenizer, name=found.name)


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
