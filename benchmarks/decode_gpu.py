"""Time decode and verify steps of full-size models on one GPU: random weights, spread routing, the engine's own loop.

`PYTHONPATH=src python benchmarks/decode_gpu.py CASE [CASE ...] [--out FOLDER]` writes `FOLDER/CASE.json` per case. The
rows of a step are independent random ids, so that routing spreads as uniform routing does; the experts are counted.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

import soloist.models.feed_forward as feed_forward
from soloist.engine import Engine
from soloist.kernels.clock import stamp
from soloist.kernels.moe import route_ref
from soloist.kernels.norm import rms_norm_ref
from soloist.models import load_model
from soloist.models.cache import StepKind
from soloist.models.causal_lm import CausalLM
from soloist.roofline import measure_bandwidth
from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.runtime.graph import Execution, StepGraph, count_nodes
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from soloist.spec.drafter import Drafter

CONTEXT_LEN = 8192
NUM_STEPS = 150
REPEATS = 3
# A public engine's step is compared at these widths.
VERIFY_WIDTHS = (4, 9, 16)


class RandomRows(Drafter):
    """Fills a step with independent random ids, the pending token included: for timing only."""

    name = "random rows"

    def __init__(self, width: int, vocab_size: int, device: torch.device) -> None:
        self.max_drafts = width - 1
        # (1024, T) int64, and the row that is next, () int64.
        self._table = torch.randint(vocab_size, (1024, width), device=device)
        self._next = torch.zeros(1, dtype=torch.int64, device=device)

    def propose(self, buffers: StepBuffers, context_len: torch.Tensor) -> None:
        buffers.input_ids.copy_(self._table.index_select(0, self._next)[0])
        self._next.add_(1).remainder_(self._table.shape[0])


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured under one name."""

    config: dict[str, Any]
    widths: tuple[int, ...]
    weights: str = "random"
    # Tokens in the cache; of several, all are measured and the last one is the case's.
    context_lens: tuple[int, ...] = (CONTEXT_LEN,)


def built_in(name: str) -> dict[str, Any]:
    """Read a packaged config."""
    return json.loads((files("soloist") / "configs" / f"{name}.json").read_text())


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
    flash, tiny = built_in("ling-3.0-flash"), built_in("ling-3.0-tiny")
    return {
        "qwen2-1.5b-nodraft": Case(config=built_in("qwen2.5-coder-1.5b-instruct"), widths=(1, *VERIFY_WIDTHS)),
        "ling3-tiny-nodraft": Case(config=tiny, widths=(1,)),
        "ling3-tiny-verify": Case(config=tiny, widths=VERIFY_WIDTHS),
        "ling3-tiny-long": Case(config=tiny, widths=(1,), context_lens=(CONTEXT_LEN, 65536)),
        "ling3-flash-shard2-nodraft": Case(config=shard(flash, 2), widths=(1,), weights="shard"),
        "ling3-flash-shard2-verify": Case(config=shard(flash, 2), widths=VERIFY_WIDTHS, weights="shard"),
    }


def count_distinct_experts(model: CausalLM, runner: ModelRunner) -> float | None:
    """Run one step's forward pass eagerly and count the experts that each layer reads: the mean."""
    counts: list[int] = []
    original = feed_forward.moe

    def counting(
        x: torch.Tensor, norm: torch.Tensor, eps: float, gate: torch.Tensor, bias: torch.Tensor, *args, **kwargs
    ):
        h = rms_norm_ref(x, norm, eps)
        chosen, _ = route_ref(h.float() @ gate.float().T, bias, args[4])
        counts.append(chosen.unique().numel())
        return original(x, norm, eps, gate, bias, *args, **kwargs)

    feed_forward.moe = counting
    try:
        width = runner.buffers.max_width
        for _ in range(4):
            ids = torch.randint(model.config.vocab_size, (width,), device=model.device)
            model.forward(ids, runner.cache, StepKind.DECODE if width == 1 else StepKind.VERIFY)
    finally:
        feed_forward.moe = original
    return statistics.mean(counts) if counts else None


@torch.inference_mode()
def time_width(
    model: CausalLM, width: int, execution: Execution, bandwidth: float, context_len: int = CONTEXT_LEN
) -> dict[str, Any]:
    """Time steps of one width behind a filled context."""
    drafter = RandomRows(width, model.config.vocab_size, torch.device("cuda"))
    runner = ModelRunner(model, max_context_len=context_len + 4096, max_width=width)
    engine = Engine(runner, drafter, execution=execution)
    buffers = runner.buffers
    plan = SamplingPlan.of(SamplingParams())
    times = torch.zeros(NUM_STEPS, 2, dtype=torch.int64, device="cuda")
    counter = torch.zeros((), dtype=torch.int64, device="cuda")
    inner = engine.make_step(plan)

    def step() -> None:
        stamp(times, counter, is_end=False)
        inner()
        stamp(times, counter, is_end=True)

    buffers.end()
    graph = StepGraph(step)
    prompt = torch.randint(model.config.vocab_size, (context_len,), device="cuda")
    prefill_ms = []
    for _ in range(2):
        runner.cache.reset()
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        runner.prefill(prompt, on_chunk=lambda *_: None)
        torch.cuda.synchronize()
        prefill_ms.append(1e3 * (time.perf_counter() - started_s))
    experts = count_distinct_experts(model, runner)
    step_ms, host_us, idle, committed = [], [], [], 0
    for _ in range(REPEATS):
        runner.cache.context_len.fill_(context_len)
        engine.ring.reset()
        buffers.begin([1], SamplingParams(), seed=0, max_tokens=16 * NUM_STEPS, stop_ids=[])
        counter.zero_()
        graph.replay()
        torch.cuda.synchronize()
        counter.zero_()
        torch.cuda.set_sync_debug_mode("error")
        started_s = time.perf_counter()
        for _ in range(NUM_STEPS):
            graph.replay()
        host_us.append(1e6 * (time.perf_counter() - started_s) / NUM_STEPS)
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        starts, ends = times.T.tolist()
        wall_ns = ends[-1] - starts[0]
        step_ms.append(wall_ns / NUM_STEPS / 1e6)
        idle.append(1 - sum(e - s for s, e in zip(starts, ends, strict=True)) / wall_ns)
        committed += int(runner.cache.context_len) - context_len
    assert committed >= REPEATS * NUM_STEPS, "steps committed nothing"
    num_nodes, num_programmatic = count_nodes(graph.raw_graph)
    floor_ms = model.footprint.step_floor_ms(width, context_len, bandwidth_gb_per_s=bandwidth, distinct_experts=experts)
    median = statistics.median(step_ms)
    return {
        "width": width,
        "context_len": context_len,
        "step_ms_median": round(median, 4),
        "step_ms_spread": round(max(step_ms) - min(step_ms), 4),
        "floor_step_ms": round(floor_ms, 4),
        "share_of_floor": round(floor_ms / median, 3),
        "launches_per_step": num_nodes,
        "programmatic_edges": num_programmatic,
        "idle_share": round(statistics.median(idle), 4),
        "host_us_per_step": round(statistics.median(host_us), 1),
        "syncs_per_step": 0,
        "distinct_experts": None if experts is None else round(experts, 1),
        "prefill_ms": round(min(prefill_ms), 1),
    }


@torch.inference_mode()
def time_answer(model: CausalLM, execution: Execution, context_len: int = CONTEXT_LEN) -> dict[str, float]:
    """Read a prompt and decode 512 tokens through the engine, tokens drained from the ring: TTFT and TPOT."""
    engine = Engine(ModelRunner(model, max_context_len=context_len + 1024), execution=execution)
    prompt = torch.randint(model.config.vocab_size, (context_len,)).tolist()
    params = SamplingParams(max_tokens=512, ignore_eos=True)
    tpot, ttft = [], []
    for _ in range(REPEATS):
        generation = engine.generate(prompt, params)
        gaps, last_s = [], None
        for result in generation:
            now_s = time.perf_counter()
            if result.token_ids and last_s is not None:
                gaps.append(1e3 * (now_s - last_s))
            last_s = now_s
        stats = generation.stats
        assert stats.tpot_ms is not None and stats.ttft_s is not None
        tpot.append(stats.tpot_ms)
        ttft.append(stats.ttft_s)
    gaps.sort()
    return {
        "tpot_ms_median": round(statistics.median(tpot), 4),
        "tpot_ms_mean": round(statistics.mean(tpot), 4),
        "gap_ms_p10": round(gaps[len(gaps) // 10], 4),
        "gap_ms_p90": round(gaps[9 * len(gaps) // 10], 4),
        "ttft_s": round(statistics.median(ttft[1:]), 4),
    }


def commit_id() -> str:
    """The commit, or what the environment of a machine without git says."""
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return answer.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = cases()
    parser.add_argument("cases", nargs="+", choices=list(known))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--commit", default=commit_id(), help="where git is not there to ask")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda")
    bandwidth = measure_bandwidth(device)
    print(f"read bandwidth {bandwidth:.0f} GB/s", flush=True)
    execution = Execution.best_for(device)
    for _, group in itertools.groupby(arguments.cases, key=lambda name: json.dumps(known[name].config, sort_keys=True)):
        names = list(group)
        started_s = time.perf_counter()
        model = load_model(known[names[0]].config, device=device, weights="random")
        torch.cuda.synchronize()
        print(f"{names}: loaded in {time.perf_counter() - started_s:.1f} s", flush=True)
        for name in names:
            rows, context_lens = [], known[name].context_lens
            for context_len, width in itertools.product(context_lens, known[name].widths):
                rows.append(time_width(model, width, execution, bandwidth, context_len))
                print(name, json.dumps(rows[-1]), flush=True)
            result: dict[str, Any] = {
                "case": name,
                "date": date.today().isoformat(),
                "commit": arguments.commit,
                "command": " ".join(["python", *sys.argv]),
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "triton": version("triton"),
                "model": names[0].rsplit("-", 1)[0],
                "weights": known[name].weights,
                "tensor_parallel_size": 1,
                "dtype": "bfloat16",
                "context_len": context_lens[-1],
                "bandwidth_gb_per_s": round(bandwidth),
                "step_ms_by_width": {row["width"]: row["step_ms_median"] for row in rows},
                "floor_step_ms_by_width": {row["width"]: row["floor_step_ms"] for row in rows},
                "distinct_experts_by_width": {row["width"]: row["distinct_experts"] for row in rows},
                "rows": rows,
            }
            if rows[0]["width"] == 1:
                answers = {context_len: time_answer(model, execution, context_len) for context_len in context_lens}
                result |= answers[context_lens[-1]]
                if len(answers) > 1:
                    result["tpot_ms_by_context_len"] = {n: answer["tpot_ms_median"] for n, answer in answers.items()}
                print(name, {key: result[key] for key in ("tpot_ms_median", "ttft_s")}, flush=True)
            (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
