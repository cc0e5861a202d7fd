"""Profile greedy generation by `transformers` on a GPU: is the line named that reads the stop condition in every token?

`PYTHONPATH=src python3 benchmarks/profile_generate.py [--out FOLDER]` decodes with two models of random weights: one
that is wide and shallow, so that a token is more work for the GPU than for the host, and one of common shape, which a
host cannot feed. What the read is said to cost is compared with what leaving it out saves: the same tokens, counted on
the host. Up to transformers 5.16 the loop reads, from 5.17 on a class of its own. The last line is one JSON object; the
folder gets it too as profile-generate.json, with the recordings.
"""

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation.utils import GenerationMixin

from soloist.bench.results import commit, device_name, driver_version
from soloist.profiler import in_words, watch
from soloist.profiler.kineto import save_trace
from soloist.profiler.report import as_json

try:
    from transformers.generation.utils import StopCheck
except ImportError:
    # Before 5.17 the loop itself reads.
    READER, READING = GenerationMixin._has_unfinished_sequences, "elif this_peer_finished:"
else:
    READER, READING = StopCheck.__call__, "return bool("

PROMPT_TOKENS = 16
NUM_TOKENS = 60
ROUNDS = 11
WATCHED_STEPS = 24
COMMON = {"vocab_size": 32000, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "wide": {"hidden_size": 8192, "intermediate_size": 57344, "num_hidden_layers": 4, "num_attention_heads": 64},
    "common": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16},
    "tiny": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
}


def make_model(shape: str, device: str) -> LlamaForCausalLM:
    """Make a model with random weights, fp32."""
    torch.manual_seed(0)
    with torch.device(device):
        # An end that no row of the head can be.
        return LlamaForCausalLM(LlamaConfig(**COMMON, **SHAPES[shape], eos_token_id=99_999)).eval()


class Mark(LogitsProcessor):
    """Says where a step is, and changes nothing."""

    def __init__(self, watched: Any) -> None:
        self._watched = watched

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._watched.step()
        return scores


def generate(model: LlamaForCausalLM, num_tokens: int, processors: list[LogitsProcessor] | None = None) -> float:
    """Decode greedily; milliseconds per token, the prompt's included."""
    ids = torch.ones(1, PROMPT_TOKENS, dtype=torch.int64, device=model.device)
    synchronize(model)
    start_s = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        logits_processor=LogitsProcessorList(processors or []),
    )
    synchronize(model)
    assert out.shape[1] == PROMPT_TOKENS + num_tokens
    return 1e3 * (time.perf_counter() - start_s) / num_tokens


def synchronize(model: LlamaForCausalLM) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def stop_line() -> str:
    """Find the line of the library that reads whether all sequences have ended."""
    lines, first = inspect.getsourcelines(READER)
    (place,) = (i for i, line in enumerate(lines) if READING in line)
    return f"transformers/generation/utils.py:{first + place}"


@contextmanager
def counting_on_the_host(num_tokens: int) -> Iterator[None]:
    """Leave the read out: the loop ends when it has made so many tokens."""
    num_made = 0

    def is_over(self: Any, unfinished_sequences: torch.Tensor, tokens: torch.Tensor, length: int) -> bool:
        return length >= PROMPT_TOKENS + num_tokens

    def has_unfinished(self: Any, this_peer_finished: Any, synced_gpus: bool, device: torch.device) -> bool:
        nonlocal num_made
        # Python's own False before the first token.
        num_made = 0 if this_peer_finished is False else num_made + 1
        return num_made < num_tokens

    if READER.__name__ == "__call__":
        owner, name, replacement = StopCheck, "__call__", is_over
    else:
        owner, name, replacement = GenerationMixin, "_has_unfinished_sequences", has_unfinished
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, READER)


def measure_loss(model: LlamaForCausalLM, num_tokens: int) -> dict[str, Any]:
    """Time decoding with the read and without, in turns."""
    with_ms, without_ms = [], []
    for _ in range(ROUNDS):
        with_ms.append(generate(model, num_tokens))
        with counting_on_the_host(num_tokens):
            without_ms.append(generate(model, num_tokens))
    losses = [a - b for a, b in zip(with_ms, without_ms, strict=True)]
    return {
        "step_ms": statistics.median(with_ms),
        "step_without_ms": statistics.median(without_ms),
        "real_loss_ms": statistics.median(losses),
        "real_loss_range_ms": [min(losses), max(losses)],
    }


def profile(model: LlamaForCausalLM, trace: Path | None) -> dict[str, Any]:
    """Record decoding and say what it waits for; `trace` is where the recording is kept."""
    with watch(num_steps=WATCHED_STEPS) as watched:
        generate(model, 4 * WATCHED_STEPS, [Mark(watched)])
    analysis = watched.analysis
    if trace is not None:
        save_trace(watched.trace, trace)
    print(in_words(analysis), flush=True)
    figures = as_json([analysis])["processes"][0]
    keys = ("origin", "num_steps", "step_ms", "busy_ms", "idle_share", "syncs_per_step", "blocked_ms")
    keys += ("loss_ms", "loss_range_ms")
    starved_ms = sum(gap["idle_ms"] for gap in figures["gaps"] if gap["kind"] != "queued")
    return {
        **{key: figures[key] for key in keys},
        "starved_ms": starved_ms,
        "overhead": figures["overhead"],
        "lead": figures["lead"],
        "waits": [
            {key: wait[key] for key in ("what", "count", "blocked_ms", "idle_ms", "loss_ms")}
            | {"where": wait["place"]["where"]}
            for wait in figures["waits"]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["wide", "common"])
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=commit(), help="where git is not there to ask")
    arguments = parser.parse_args()
    if arguments.out is not None:
        # Before minutes are spent.
        arguments.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = ["python", "benchmarks/profile_generate.py", "--shapes", *arguments.shapes, "--tokens", arguments.tokens]
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": arguments.commit,
        "command": " ".join(map(str, words)),
        "device": device_name(torch.device(device)),
        "driver": driver_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "stop_line": stop_line(),
    }
    for shape in arguments.shapes:
        model = make_model(shape, device)
        generate(model, 8)
        with counting_on_the_host(8):
            generate(model, 8)
        found: dict[str, Any] = measure_loss(model, arguments.tokens)
        if device == "cuda":
            found["profile"] = profile(model, arguments.out and arguments.out / f"generate-{shape}.json.gz")
            waits = {wait["where"]: wait for wait in found["profile"]["waits"] if wait["count"] >= 0.5}
            found["is_named"] = result["stop_line"] in waits
            if found["is_named"]:
                # Of this line alone: the library also reads its mask, behind which the host waits without it.
                found["loss_ms"] = waits[result["stop_line"]]["loss_ms"]
                found["loss_to_real_loss"] = found["loss_ms"] / found["real_loss_ms"]
                found["is_within_30_percent"] = 0.7 <= found["loss_to_real_loss"] <= 1.3
        result[shape] = found
        print(json.dumps({shape: found}), flush=True)
        del model
    if arguments.out is not None:
        (arguments.out / "profile-generate.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
