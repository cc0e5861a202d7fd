"""`soloist run`: one answer."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soloist.cli import options
from soloist.cli.answer import bandwidth_share, checked_text, load, make_params, show_answer, speed_line, write_text
from soloist.cli.terminal import print_dim
from soloist.errors import UsageError

if TYPE_CHECKING:
    from soloist.answer import Completion, Delta, Stream
    from soloist.llm import LLM, OnPrefill

EXIT_INTERRUPTED = 130


def run(
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer; without it, stdin is read.", metavar="PROMPT")
    ] = None,
    model: options.Model = None,
    system: options.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    prefix: Annotated[
        Path | None, typer.Option("--prefix", help="Fill a hole: a file with what stands before it.", metavar="FILE")
    ] = None,
    suffix: Annotated[
        Path | None, typer.Option("--suffix", help="Fill a hole: a file with what stands behind it.", metavar="FILE")
    ] = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    context: options.Context = None,
    threads: options.Threads = None,
    device: options.Device = "auto",
    tensor_parallel_size: options.TensorParallelSize = 1,
    weights: options.Weights = "file",
    weights_dtype: options.WeightsDtype = None,
    dtype: options.Dtype = None,
    draft: options.Draft = None,
    draft_width: options.DraftWidth = None,
    draft_weights_dtype: options.DraftWeightsDtype = None,
    adaptive_width: options.AdaptiveWidth = False,
    simulate_acceptance: options.SimulateAcceptance = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Answer one prompt, streamed to stdout; the speed goes to stderr as one line.

    The last line is ended, except with --raw and with --prefix and --suffix, where the text is exactly the model's.
    """
    params = make_params(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    is_hole = prefix is not None or suffix is not None
    if is_hole and (prompt is not None or system is not None or raw):
        raise UsageError("--prefix and --suffix stand alone: no PROMPT, no --system, no --raw")
    if raw and system is not None:
        raise UsageError("--system needs the chat template, which --raw leaves out")
    sides = _read_sides(prefix, suffix) if is_hole else ("", "")
    text = "" if is_hole else _read_prompt(prompt, is_exact=raw)
    llm = load(
        model,
        context=context,
        threads=threads,
        device=device,
        tensor_parallel_size=tensor_parallel_size,
        weights=weights,
        weights_dtype=weights_dtype,
        dtype=dtype,
        draft=draft,
        draft_width=draft_width,
        draft_weights_dtype=draft_weights_dtype,
        adaptive_width=adaptive_width,
        simulate_acceptance=simulate_acceptance,
    )

    def start(on_prefill: "OnPrefill") -> "Stream":
        if is_hole:
            return llm.stream_infill(*sides, params, on_prefill=on_prefill)
        if llm.tokenizer is None:
            return llm.stream(_token_ids(text, llm.name), params, on_prefill=on_prefill)
        if raw:
            return llm.stream(text, params, on_prefill=on_prefill)
        return llm.stream_chat(_messages(system, text), params, on_prefill=on_prefill)

    write = _write_nothing if as_json else _write_ids if llm.tokenizer is None else write_text
    completion = show_answer(start, write)
    if as_json:
        print(json.dumps(_as_json(llm, completion), ensure_ascii=False))
    else:
        if not (is_hole or raw or completion.text.endswith("\n")):
            print(flush=True)
        print_dim(speed_line(llm, completion))
    return EXIT_INTERRUPTED if completion.finish_reason == "cancelled" else 0


def _messages(system: str | None, text: str) -> list[dict[str, str]]:
    head = [] if system is None else [{"role": "system", "content": checked_text(system, "--system")}]
    return [*head, {"role": "user", "content": text}]


def _read_prompt(prompt: str | None, *, is_exact: bool) -> str:
    """Give the prompt, from stdin if none was typed.

    Args:
        prompt: what was typed.
        is_exact: keep the line break that ends a piped text.

    Raises:
        UsageError: it is empty, or not UTF-8.
    """
    if prompt is not None:
        text = checked_text(prompt, "the prompt")
    elif sys.stdin.isatty():
        raise UsageError('no prompt: type one, as in soloist run "Why is the sky blue?", or pipe one in')
    else:
        text = _decode(sys.stdin.buffer.read(), "stdin")
        text = text if is_exact else text.removesuffix("\n").removesuffix("\r")
    if not text if is_exact else not text.strip():
        raise UsageError("the prompt is empty")
    return text


def _read_sides(prefix: Path | None, suffix: Path | None) -> tuple[str, str]:
    """Read what stands around the hole."""
    if prefix is None or suffix is None:
        raise UsageError("a hole has two sides: give --prefix and --suffix, both as files")
    texts = []
    for option, path in (("--prefix", prefix), ("--suffix", suffix)):
        try:
            texts.append(_decode(path.read_bytes(), str(path)))
        except OSError as error:
            raise UsageError(f"{option} wants a file; {path} cannot be read ({error.strerror})") from None
    return texts[0], texts[1]


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        byte = f"0x{data[error.start]:02x}"
        raise UsageError(
            f"{source} is not UTF-8: byte {byte} at offset {error.start}; convert it first, as iconv does"
        ) from None


def _token_ids(text: str, name: str) -> list[int]:
    """Read a prompt of token ids, for a model that has no tokenizer."""
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise UsageError(
            f'{name} is a config without a tokenizer: its prompts are token ids, as in "17 4 256"'
        ) from None


def _write_nothing(delta: "Delta") -> None:
    """Keep still: the whole answer is printed at its end."""


def _write_ids(delta: "Delta") -> None:
    sys.stdout.write("".join(f"{token_id} " for token_id in delta.token_ids))
    sys.stdout.flush()


def _as_json(llm: "LLM", completion: "Completion") -> dict[str, Any]:
    """Put an answer and its figures into one object; units are in the names."""
    stats = completion.stats
    share = bandwidth_share(llm, completion)
    return {
        "model": llm.name,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_match": completion.stop_match,
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "seed": stats.seed,
        "ttft_s": stats.ttft_s,
        "tpot_ms": stats.tpot_ms,
        "decode_tok_per_s": stats.decode_tok_per_s,
        "bandwidth_share": share and share[0],
        "bandwidth_gb_per_s": share and share[1],
        "drafter": stats.drafter,
        "policy": stats.policy,
        "drafting_off_after": stats.drafting_off_after,
        "simulated": stats.simulated,
        "forwards": stats.forwards,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_by_position": stats.acceptance_by_position,
        "drafted_histogram": stats.drafted_histogram,
        "accepted_histogram": stats.accepted_histogram,
        "weight_bytes": llm.engine.runner.model.report.weight_bytes,
    }
