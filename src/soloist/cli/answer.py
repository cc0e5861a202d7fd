"""What `run` and `chat` share: loading a model, showing an answer as it comes, the speed line."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from soloist.cli.interrupt import Interrupt
from soloist.cli.terminal import Bar, print_dim
from soloist.config import Environment
from soloist.errors import UsageError
from soloist.sampling_params import SamplingParams

if TYPE_CHECKING:
    from soloist.answer import Completion, Delta, Stream
    from soloist.llm import LLM, OnPrefill
    from soloist.runtime.graph import Execution


def checked_text(text: str, what: str) -> str:
    """Give `text` back.

    Raises:
        UsageError: it holds bytes that are not UTF-8, as arguments may.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not UTF-8: there is a stray byte behind {error.start} characters") from None
    return text


def make_params(**given: Any) -> SamplingParams:
    """Make sampling parameters of the options that were given; the others keep their defaults."""
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def place(
    device: str,
    *,
    tensor_parallel_size: int = 1,
    threads: int | None = None,
    weights_dtype: Any = None,
    dtype: str | None = None,
    draft_weights_dtype: Any = None,
) -> str:
    """Say where a model runs that may run anywhere; a device that was named is given back, and looked at later.

    On a terminal, where that is the CPU beside a GPU, says why.
    """
    from soloist.loading import AUTO, choose_device

    if device != AUTO:
        return device
    choice = choose_device(
        num_ranks=tensor_parallel_size,
        dtype=dtype,
        weights_dtype=weights_dtype,
        draft_weights_dtype=draft_weights_dtype,
        num_threads=threads,
    )
    if choice.remark is not None and sys.stderr.isatty():
        print_dim(choice.remark)
    return str(choice.device)


def load(
    model: str | None,
    *,
    context: int | None,
    threads: int | None,
    device: str,
    tensor_parallel_size: int = 1,
    weights: Literal["file", "random"],
    weights_dtype: Any,
    dtype: str | None,
    draft: str | None,
    draft_width: int | None = None,
    draft_weights_dtype: Any = None,
    adaptive_width: bool = False,
    simulate_acceptance: float | None = None,
    execution: "Execution | None" = None,
) -> "LLM":
    """Load a model, with a bar while it takes long.

    Says what rounding costs where weights are held in another form, and on a terminal why a GPU is left alone.
    """
    from soloist.llm import LLM
    from soloist.runtime.graph import freeze_garbage

    device = place(
        device,
        tensor_parallel_size=tensor_parallel_size,
        threads=threads,
        weights_dtype=weights_dtype,
        dtype=dtype,
        draft_weights_dtype=draft_weights_dtype,
    )
    with Bar("reading weights") as bar, Bar("compiling kernels") as compiling:
        llm = LLM(
            model,
            draft=draft,
            draft_width=draft_width,
            draft_weights_dtype=draft_weights_dtype,
            adaptive_width=adaptive_width,
            simulated_acceptance=simulate_acceptance,
            device=device,
            tensor_parallel_size=tensor_parallel_size,
            weights=weights,
            weights_dtype=weights_dtype,
            dtype=dtype,
            max_context_len=context,
            num_threads=threads,
            execution=execution,
            progress=bar,
            on_compiled=compiling,
        )
    if llm.engine.execution.is_captured:
        print_dim(memory_line(llm))
        freeze_garbage()
    report = llm.engine.runner.model.report
    if weights_dtype is not None:
        held = ", ".join(f"{num_bytes / 1e6:.0f} MB {kind}" for kind, num_bytes in report.bytes_by_format.items())
        errors = ", ".join(f"{kind} {error:.2%}" for kind, error in report.packing_error.items())
        print_dim(f"weights: {held}" + (f"; rounded by (relative RMS, worst matrix): {errors}" if errors else ""))
    return llm


def memory_line(llm: "LLM") -> str:
    """Say what of a GPU's memory is taken, and for what: there is one sequence, so nothing is taken in advance."""
    import torch

    runner, device = llm.engine.runner, llm.engine.runner.model.device
    # Of this rank: so is everything else that the line says.
    footprint = runner.model.footprint
    weights = runner.model.report.weight_bytes
    cache = runner.cache.max_context_len * footprint.kv_bytes_per_position
    cache += footprint.state_bytes + footprint.conv_state_bytes
    scratch = torch.cuda.memory_reserved(device) - weights - cache
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"memory of {device}: {weights / 1e9:.2f} GB weights, {cache / 1e9:.2f} GB cache and state for"
        f" {runner.max_context_len} tokens, {scratch / 1e9:.2f} GB steps and drafts; {free / 1e9:.1f} of"
        f" {total / 1e9:.1f} GB free"
    )


def show_answer(start: "Callable[[OnPrefill], Stream]", write: "Callable[[Delta], None]") -> "Completion":
    """Start an answer, write each piece as it comes, and give the whole. Ctrl-C ends it within one step.

    Args:
        start: makes the stream, given what is to be called while the prompt is read.
        write: called with every piece.
    """
    bar = Bar("reading the prompt")
    stream = start(bar)
    with Interrupt(stream.cancel):
        try:
            with bar:
                first = next(stream)
            write(first)
            for delta in stream:
                write(delta)
        finally:
            stream.close()
    return stream.completion


def write_text(delta: "Delta") -> None:
    """Write a piece of text to stdout at once."""
    if delta.text:
        sys.stdout.write(delta.text)
        sys.stdout.flush()


def bandwidth_share(llm: "LLM", completion: "Completion") -> tuple[float, float] | None:
    """Give the share of the read bandwidth that decoding used, and that bandwidth in GB/s; None without timed steps."""
    from soloist.doctor import known_bandwidth

    stats = completion.stats
    # The first step belongs to the time to the first token.
    num_steps = stats.forwards - 1
    if num_steps < 1 or not stats.decode_s:
        return None
    model = llm.engine.runner.model
    mean_width = round(1 + stats.drafted / stats.forwards)
    mean_context_len = stats.prompt_tokens + stats.completion_tokens // 2
    moved = model.footprint.step_bytes(mean_width, mean_context_len).total * num_steps
    if model.device.type == "cpu":
        # Its ranks read from one memory; GPUs have one each.
        moved *= model.group.size
    used = moved / stats.decode_s / 1e9
    bandwidth = known_bandwidth(model.device, Environment.read().cache_dir, seen_gb_per_s=used)
    return used / bandwidth, bandwidth


def speed_line(llm: "LLM", completion: "Completion") -> str:
    """Say in one line what an answer took."""
    stats = completion.stats
    words = [f"{stats.prompt_tokens} prompt tokens", f"{stats.completion_tokens} tokens"]
    if stats.ttft_s is not None:
        words.append(f"TTFT {stats.ttft_s:.2f} s")
    if stats.tpot_ms is not None and stats.decode_tok_per_s is not None:
        words += [f"TPOT {stats.tpot_ms:.1f} ms", f"{stats.decode_tok_per_s:.0f} tok/s"]
    if stats.drafted:
        words.append(f"{stats.acceptance_length:.2f} tokens per step")
    if stats.simulated:
        words.append("SIMULATED acceptance, the text is not the model's")
    if stats.drafting_off_after is not None:
        words.append(f"drafting off after {stats.drafting_off_after} tokens, it lost")
    if share := bandwidth_share(llm, completion):
        processor = "CPU" if llm.engine.runner.model.device.type == "cpu" else "GPU"
        words.append(f"{share[0]:.0%} of this {processor}'s {share[1]:.0f} GB/s")
    return " · ".join([*words, completion.finish_reason])
