"""Time decode and verify steps of full-size models on one GPU: random weights, spread routing, the engine's own loop.

`PYTHONPATH=src python benchmarks/decode_gpu.py CASE [CASE ...] [--out FOLDER]` writes `FOLDER/CASE.json` per case:
steps of every width, a prompt's time by kind, and answers of 512 tokens. The rows of a step are independent random ids,
so that routing spreads as uniform routing does; the experts are counted.
"""

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from model_bench import CONTEXT_LEN, Bench, built_in, by_width, step_row
from soloist.bench.figures import spread
from soloist.bench.prefill import measure_prompt
from soloist.bench.results import Result
from soloist.engine import Engine
from soloist.models.causal_lm import CausalLM
from soloist.runtime.graph import Execution, freeze_garbage
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams

# Steps of a repeat, and tokens of an answer.
NUM_STEPS, ANSWER_TOKENS = 160, 512
REPEATS = 3
# A public engine's step is compared at these widths.
VERIFY_WIDTHS = (4, 9, 16)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured under one name."""

    model: str
    config: dict[str, Any]
    widths: tuple[int, ...]
    weights: Literal["random", "shard"] = "random"
    # Tokens in the cache; of several, all are measured and the last one is the case's.
    context_lens: tuple[int, ...] = (CONTEXT_LEN,)


def shard(config: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Give the sizes that one of `ranks` GPUs holds: heads, expert width, vocabulary."""
    split = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")
    return (
        config
        | {key: config[key] // ranks for key in split}
        | {"moe_shared_expert_intermediate_size": config["moe_shared_expert_intermediate_size"] // ranks}
        | {"num_nextn_predict_layers": 0, "eos_token_id": 1, "pad_token_id": 0}
    )


def cases() -> dict[str, Case]:
    qwen, tiny, flash = (built_in(n) for n in ("qwen2.5-coder-1.5b-instruct", "ling-3.0-tiny", "ling-3.0-flash"))
    of_tiny: dict[str, Any] = {"model": "ling-3.0-tiny", "config": tiny}
    of_shard: dict[str, Any] = {"model": "ling-3.0-flash", "config": shard(flash, 2), "weights": "shard"}
    return {
        "qwen2-1.5b-nodraft": Case(model="qwen2.5-coder-1.5b-instruct", config=qwen, widths=(1, *VERIFY_WIDTHS)),
        "ling3-tiny-nodraft": Case(widths=(1,), **of_tiny),
        "ling3-tiny-verify": Case(widths=VERIFY_WIDTHS, **of_tiny),
        "ling3-tiny-long": Case(widths=(1,), context_lens=(CONTEXT_LEN, 65536), **of_tiny),
        "ling3-flash-shard2-nodraft": Case(widths=(1,), **of_shard),
        "ling3-flash-shard2-verify": Case(widths=VERIFY_WIDTHS, **of_shard),
    }


def measure_case(bench: Bench, name: str, case: Case) -> Iterator[Result]:
    """Measure steps of every width, then answers, behind each context; gives what is measured so far."""
    best = Execution.best_for(bench.device)
    tpot_ms: dict[str, float] = {}
    for behind in (bench.behind(context_len) for context_len in case.context_lens):
        measured = []
        for width in case.widths:
            measured.append((width, *behind.measure(best, width=width, most_steps=NUM_STEPS)))
            bench.say(f"{name} {json.dumps(step_row(*measured[-1]))}")
            # A graph and its memory belong to one width.
            clear()
        rows = [step_row(*row) for row in measured]
        # Steps of one row are those of the answers below; without them the case is about its widest steps.
        width, figures, floor = measured[0] if case.widths[0] == 1 else measured[-1]
        result = replace(
            behind.result(name, figures, floor, width=width),
            weights=case.weights,
            # Of requests, where they are measured; random rows commit one token a step.
            tpot_ms_mean=None,
            acceptance_length=None,
            **by_width(rows),
        )
        result.details["rows"] = rows
        yield result
        if case.widths[0] == 1:
            answers = time_answer(bench.target, best, behind.context_len)
            tpot_ms[str(behind.context_len)] = answers["tpot_ms_median"]
            result = replace(
                result,
                tpot_ms_median=answers["tpot_ms_median"],
                tpot_ms_mean=answers["tpot_ms_mean"],
                tpot_ms_p10=answers["tpot_ms_p10"],
                tpot_ms_p90=answers["tpot_ms_p90"],
                ttft_ms=1e3 * answers["ttft_s"],
            )
            result.details.update(answers=answers, tpot_ms_by_context_len=tpot_ms)
            bench.say(f"{name} {answers}")
            yield result
        prompt = result.details["prompt"] = time_prompt(behind)
        bench.say(f"{name} prompt of {behind.context_len}: {prompt['prefill_ms_median']} ms")
        yield result


def clear() -> None:
    """Give back what the last measurement held."""
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


@torch.inference_mode()
def time_prompt(bench: Bench) -> dict[str, Any]:
    """Read a prompt of as many tokens as the context."""
    engine = bench.make_engine(Execution.best_for(bench.device))
    prompt = torch.randint(engine.runner.buffers.num_tokens, (bench.context_len,), device=bench.device)
    return asdict(measure_prompt(engine.runner, prompt))


@torch.inference_mode()
def time_answer(model: CausalLM, execution: Execution, context_len: int = CONTEXT_LEN) -> dict[str, float]:
    """Read a prompt and decode through the engine, tokens drained from the ring: TTFT and TPOT."""
    engine = Engine(ModelRunner(model, max_context_len=context_len + 2 * ANSWER_TOKENS), execution=execution)
    # As whoever loads a model to be served does: a full collection takes 50 ms of an answer.
    freeze_garbage()
    prompt = torch.randint(model.config.vocab_size, (context_len,)).tolist()
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    tpot, ttft, gaps = [], [], []
    for _ in range(REPEATS):
        generation = engine.generate(prompt, params)
        times_s = [time.perf_counter() for result in generation if result.token_ids]
        gaps += [1e3 * (b - a) for a, b in itertools.pairwise(times_s)]
        stats = generation.stats
        assert stats.tpot_ms is not None and stats.ttft_s is not None
        tpot.append(stats.tpot_ms)
        ttft.append(stats.ttft_s)
    gaps.sort()
    requests = spread(tpot)
    return {
        "tpot_ms_median": round(requests.median, 4),
        "tpot_ms_mean": round(requests.mean, 4),
        "tpot_ms_p10": round(requests.p10, 4),
        "tpot_ms_p90": round(requests.p90, 4),
        "gap_ms_p10": round(gaps[len(gaps) // 10], 4),
        "gap_ms_p90": round(gaps[9 * len(gaps) // 10], 4),
        # The first one captures the step.
        "ttft_s": round(statistics.median(ttft[1:]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = cases()
    parser.add_argument("cases", nargs="+", choices=list(known))
    parser.add_argument("--out", type=Path, help="default: the folder of this kind of machine")
    parser.add_argument("--commit", help="where git is not there to ask")
    arguments = parser.parse_args()
    run([(name, known[name]) for name in arguments.cases], arguments.out, arguments.commit)


def run(
    named: list[tuple[str, Case]], out: Path | None, commit: str | None, device: str = "cuda", **sizes: int
) -> None:
    """Measure cases, each model loaded once for those of it that stand together."""
    for _, group in itertools.groupby(named, key=lambda one: json.dumps(one[1].config, sort_keys=True)):
        of_model = list(group)
        first = of_model[0][1]
        bench = Bench(first.model, first.config, device=device, **sizes)
        for name, case in of_model:
            for result in measure_case(bench, name, case):
                bench.write(result, out, commit)
        del bench
        clear()


if __name__ == "__main__":
    main()
