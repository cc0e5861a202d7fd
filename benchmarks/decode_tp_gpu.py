"""Ling-3.0 at full size on several GPUs: steps by width, the time per token, the prompt, what each switch gives.

`PYTHONPATH=src python benchmarks/decode_tp_gpu.py --ranks 2 CASE [CASE ...]` starts a process per GPU, as `torchrun`
would; rank 0 writes `FOLDER/h200x2/CASE.json`, anew with each part of a case. Weights and rows are those of
`model_bench`. No rank leads the others here; `product_tp_gpu.py` measures requests as users send them.
"""

import argparse
import gc
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from ladder_gpu import measure_rungs
from model_bench import Bench, built_in, by_width, step_row
from soloist.bench.figures import spread
from soloist.bench.ladder import ladder
from soloist.bench.prefill import measure_prompt
from soloist.bench.results import Result, commit, device_name, machine_folder
from soloist.config import disable_multicast
from soloist.engine import Engine
from soloist.kernels.allreduce import MAX_PUSHED_ROWS, TensorParallel, all_gather_columns
from soloist.kernels.mailboxes import make_mailboxes
from soloist.models.memory import free_bytes
from soloist.request_stats import RequestStats
from soloist.runtime.graph import Execution, StepGraph
from soloist.sampling_params import SamplingParams
from soloist.spec.setup import DraftLayers

# Tokens of an answer; the published run has as many.
ANSWER_TOKENS = 1024
# Answers at each point, each with its own lots by which drafts are kept, so that their mean is the one asked for.
NUM_ANSWERS = 3
# Steps of a repeat.
MOST_STEPS = 160
# A request that draws its tokens, and gathers of rows of logits that are timed in one chain.
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
NUM_GATHERS = 20
# How long a rank waits for another: some compile longer.
WAIT_S = 60.0
# Acceptance lengths by width at which TPOT is quoted.
STANDARD_POINTS = {1: (None,), 4: (2.0,), 6: (3.25,), 9: (4.7, 6.4), 16: (9.95,)}
# Of the drafts of the ladder.
LADDER_WIDTH, LADDER_ACCEPTANCE = 16, 9.95
# Built-in models, as cases call them.
NAMES = {"ling-3.0-flash": "ling3-flash", "ling-3.0-tiny": "ling3-tiny"}
# What was published for Ling-3.0-flash on four Blackwell GPUs, 32 TB/s together, at the same sizes.
REFERENCE = {
    "nodraft": {"tpot_ms": 3.33, "output_tok_per_s": 288, "acceptance_length": 3.14, "drafter": "mtp, not tuned"},
    "mtp": {"tpot_ms": 1.53, "output_tok_per_s": 606, "acceptance_length": 3.25},
    "dspark": {"tpot_ms": 0.78, "output_tok_per_s": 1120, "acceptance_length": 9.95},
}


@dataclass(frozen=True)
class Case:
    """What is measured under one name."""

    drafter: str | None
    widths: tuple[int, ...]


CASES = {
    "nodraft": Case(None, (1,)),
    "mtp": Case("mtp", (6,)),
    "dspark": Case("dspark", (4, 9, 16)),
    "ladder": Case("dspark", (LADDER_WIDTH,)),
}


class RankBench(Bench):
    """A bench whose measurements all ranks begin together."""

    def make_engine(self, *args: Any, **kwargs: Any) -> Engine:
        clear()
        self.meet()
        return super().make_engine(*args, **kwargs)

    def meet(self) -> None:
        """Let all ranks go on together, with empty queues."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            dist.barrier(self.group.process_group, device_ids=[self.device.index])
            torch.cuda.synchronize()
        else:
            dist.barrier(self.group.process_group)

    @property
    def best(self) -> Execution:
        """The engine's own way to run steps."""
        return Execution.best_for(self.device)


def clear() -> None:
    """Give back what the last measurement held."""
    gc.collect()
    torch.cuda.empty_cache()


@torch.inference_mode()
def time_prompt(bench: RankBench) -> dict[str, Any]:
    """Read a prompt of as many tokens as the context."""
    engine = bench.make_engine(bench.best)
    prompt = torch.randint(engine.runner.buffers.num_tokens, (bench.context_len,), device=bench.device)
    figures = asdict(measure_prompt(engine.runner, prompt, meet=bench.meet))
    bench.say(f"prompt {json.dumps(figures)}")
    return figures


def time_answers(bench: RankBench, drafter: str | None, width: int, acceptance: float | None) -> dict[str, Any]:
    """Read a prompt and answer through the engine, tokens taken from the ring; drafts are kept by lot."""
    engine = bench.make_engine(bench.best, drafter=drafter, width=width, acceptance_length=acceptance)
    prompt = torch.randint(engine.runner.buffers.num_tokens, (bench.context_len,), device=bench.device).tolist()
    # The first captures the step.
    answer(bench, engine, prompt, seed=0, max_tokens=2 * width)
    runs = [answer(bench, engine, prompt, seed=seed, max_tokens=ANSWER_TOKENS) for seed in range(NUM_ANSWERS)]
    bench.check()
    gaps = sorted(gap for _, _, run_gaps in runs for gap in run_gaps)
    total_s, stats = sum(total_s for _, total_s, _ in runs), [stats for stats, _, _ in runs]
    num_tokens = sum(one.completion_tokens for one in stats)
    requests = spread([one.tpot_ms for one in stats if one.tpot_ms is not None])
    return {
        "tpot_ms_median": round(requests.median, 4),
        "tpot_ms_p10": round(requests.p10, 4),
        "tpot_ms_p90": round(requests.p90, 4),
        "tpot_ms": round(1e3 * sum(one.decode_s for one in stats) / (num_tokens - len(runs)), 4),
        "acceptance_length": round(num_tokens / sum(one.forwards for one in stats), 3),
        "num_tokens": num_tokens,
        "step_gap_ms_p10": round(gaps[len(gaps) // 10], 4),
        "step_gap_ms_p90": round(gaps[9 * len(gaps) // 10], 4),
        "ttft_ms": round(1e3 * statistics.median(one.ttft_s or 0.0 for one in stats), 1),
        # The prompt included.
        "output_tok_per_s": round(num_tokens / total_s, 1),
    }


def answer(
    bench: RankBench, engine: Engine, prompt: list[int], *, seed: int, max_tokens: int
) -> tuple[RequestStats, float, list[float]]:
    """Answer once: the stats, the seconds with the prompt included, and the ms between steps' tokens."""
    bench.meet()
    generation = engine.generate(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed))
    # Not in step with rank 0 by words: every rank decides the same from the same tokens.
    started_s = time.perf_counter()
    times_s = [time.perf_counter() for result in generation if result.token_ids]
    total_s = time.perf_counter() - started_s
    assert generation.stats.completion_tokens == max_tokens
    return generation.stats, total_s, [1e3 * (b - a) for a, b in itertools.pairwise(times_s)]


def time_sampled(bench: RankBench) -> dict[str, Any]:
    """Measure the step of a request that draws its tokens, which gathers whole rows of logits, and that exchange."""
    figures, _ = bench.measure(bench.best, params=SAMPLED, most_steps=MOST_STEPS)
    bench.check()
    return {
        "temperature": SAMPLED.temperature,
        "top_p": SAMPLED.top_p,
        "step_ms_median": figures.step_ms.median,
        "step_ms_range": figures.step_ms_range,
        "launches_per_step": figures.launches_per_step,
        "gather_us_by_width": {str(width): time_gather(bench, width) for width in (1, MAX_PUSHED_ROWS)},
    }


@torch.inference_mode()
def time_gather(bench: RankBench, width: int) -> float:
    """Time the exchange of `width` rows of logits as a step makes it, in a chain of its own: us, the median."""
    num_columns = -(-bench.target.config.vocab_size // bench.group.size)
    logits = torch.zeros(width, num_columns, device=bench.device)  # (T, N / ranks)

    def gather() -> None:
        for _ in range(NUM_GATHERS):
            all_gather_columns(logits, bench.group)

    launch = StepGraph(gather).replay if bench.best.is_captured else gather
    times_us = []
    for _ in range(6):
        bench.meet()
        started_s = time.perf_counter()
        launch()
        torch.cuda.synchronize()
        times_us.append(1e6 * (time.perf_counter() - started_s) / NUM_GATHERS)
    return round(statistics.median(times_us[1:]), 2)


def measure_case(bench: RankBench, name: str, case: Case) -> Iterator[Result]:
    """Measure steps of every width, then answers at the standard points; gives what is measured so far."""
    rows, answers, last = [], {}, None
    for width in case.widths:
        figures, floor = bench.measure(bench.best, drafter=case.drafter, width=width, most_steps=MOST_STEPS)
        rows.append(step_row(width, figures, floor))
        bench.check()
        bench.say(f"{name} {json.dumps(rows[-1])}")
        last = bench.result(name, figures, floor, width=width)
    assert last is not None
    # TPOT is of requests.
    last = replace(last, acceptance_length=None, tpot_ms_mean=None, **by_width(rows))
    last.details["rows"] = rows
    yield last
    for width in case.widths:
        for acceptance in STANDARD_POINTS[width]:
            point = f"{acceptance or 1:g}@{width}"
            answers[point] = time_answers(bench, case.drafter, width, acceptance)
            bench.say(f"{name} {point} {json.dumps(answers[point])}")
            best = min(answers.values(), key=lambda found: found["tpot_ms"])
            last.details["answers"] = answers
            yield replace(
                last,
                acceptance_simulated=case.drafter is not None,
                acceptance_length=best["acceptance_length"],
                tpot_ms_mean=best["tpot_ms"],
                tpot_ms_median=best["tpot_ms_median"],
                tpot_ms_p10=best["tpot_ms_p10"],
                tpot_ms_p90=best["tpot_ms_p90"],
                ttft_ms=best["ttft_ms"],
                output_tok_per_s=best["output_tok_per_s"],
                tpot_ms_at={point: found["tpot_ms"] for point, found in answers.items()},
            )


def climb(bench: RankBench, name: str) -> Iterator[Result]:
    """Measure what each switch gives."""
    settings = ladder(has_experts=True, run_ahead=2, draft="dspark", is_adaptive=False, num_ranks=bench.group.size)
    if bench.device.type != "cuda":
        settings = [replace(rung, execution=bench.best) for rung in settings]
    draft = {"drafter": "dspark", "width": LADDER_WIDTH, "acceptance_length": LADDER_ACCEPTANCE}
    rungs = measure_rungs(bench, name, settings, **draft)
    yield replace(rungs[-1], case=name, rungs=tuple(rungs), details=dict(rungs[-1].details))


def beside_one_gpu(bench: RankBench, step_ms: float) -> dict[str, Any] | None:
    """Measure the same model whole on each GPU, if it fits: whether sharing it is worth it. None: it does not fit."""
    whole_bytes = bench.target.report.weight_bytes * bench.group.size
    has_room = bench.device.type != "cuda" or free_bytes(bench.device) >= 1.2 * whole_bytes
    # The GPU with the least room decides for all.
    fits = torch.tensor(int(has_room), device=bench.device)
    dist.all_reduce(fits, dist.ReduceOp.MIN, group=bench.group.process_group)
    if not fits:
        return None
    alone = Bench(bench.name, bench.config, device=str(bench.device), context_len=bench.context_len, room=bench.room)
    figures, _ = alone.measure(bench.best, most_steps=MOST_STEPS)
    one_ms = figures.step_ms.median
    advice = f"{bench.group.size} GPUs" if step_ms < one_ms else "one GPU: sharing it costs more than it saves"
    return {"step_ms_median": one_ms, "times_faster_shared": round(one_ms / step_ms, 3), "take": advice}


def run_case(bench: RankBench, case: str, prompt: dict[str, Any]) -> Iterator[Result]:
    """Measure one case on every rank; the figures are this rank's."""
    name = f"{NAMES.get(bench.name, bench.name)}-tp{bench.group.size}-{case}"
    if bench.draft_layers != "sharded":
        name += f"-{bench.draft_layers}"
    results = climb(bench, name) if case == "ladder" else measure_case(bench, name, CASES[case])
    is_plain = case == "nodraft"
    for i, result in enumerate(results):
        result.details["prompt"] = prompt
        if CASES[case].drafter is not None:
            result.details["draft_layers"] = bench.draft_layers
        if bench.name == "ling-3.0-flash" and case in REFERENCE:
            result.details["reference"] = REFERENCE[case]
        yield result
        # Steps are measured, answers are not yet.
        if is_plain and i == 0 and result.step_ms_median is not None:
            one = beside_one_gpu(bench, result.step_ms_median)
            if one is not None:
                bench.say(f"{name} beside one GPU: {one}")
                result.details["one_gpu"] = one
                yield result
    if is_plain:
        sampled = result.details["sampled"] = time_sampled(bench)
        bench.say(f"{name} sampled: {json.dumps(sampled)}")
        yield result


def connect(rank: int, size: int, hidden_size: int, device_type: str) -> tuple[TensorParallel, torch.device]:
    """Join the other ranks, on the GPU of this rank's number."""
    if device_type == "cpu":
        dist.init_process_group("gloo", rank=rank, world_size=size)
        return TensorParallel(rank=rank, size=size, process_group=dist.group.WORLD), torch.device("cpu")
    disable_multicast()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    mailboxes = make_mailboxes(dist.group.WORLD, hidden_size=hidden_size, device=device, timeout_s=WAIT_S)
    return TensorParallel(rank=rank, size=size, process_group=dist.group.WORLD, mailboxes=mailboxes), device


def run_rank(arguments: argparse.Namespace, config: dict[str, Any], device_type: str = "cuda", **sizes: int) -> None:
    """Be one rank.

    Args:
        arguments: of the command line.
        config: of the model.
        device_type: "cpu" is for tests.
        sizes: `context_len` and `room` of the bench, where they are not the usual ones.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group, device = connect(rank, size, config["hidden_size"], device_type)
    bench = RankBench(arguments.model, config, device=str(device), group=group, **sizes)
    folder = arguments.out / machine_folder(device_name(device), size)
    prompt = time_prompt(bench)
    for case in arguments.cases:
        for form in arguments.draft_layers if case in ("mtp", "dspark") else ["sharded"]:
            bench.draft_layers = form
            started_s = time.perf_counter()
            for result in run_case(bench, case, prompt):
                if rank == 0:
                    bench.write(result, folder, arguments.commit)
            bench.say(f"{case}, draft layers {form}: {time.perf_counter() - started_s:.1f} s")
    bench.meet()
    dist.destroy_process_group()


def start_ranks(size: int, command: list[str], *, limit_s: float) -> int:
    """Run a program once per rank; the first that fails ends all, and so does the limit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    deadline_s = time.monotonic() + limit_s
    ranks = [subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank)}) for rank in range(size)]
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):
                break
            if time.monotonic() > deadline_s:
                print(f"not done after {limit_s:g} s: the ranks are ended", file=sys.stderr, flush=True)
                break
            time.sleep(0.2)
    finally:
        for rank in ranks:
            rank.kill()
    return max(abs(rank.wait()) for rank in ranks)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2, help="GPUs; under torchrun it says how many")
    parser.add_argument("--model", choices=list(NAMES), default="ling-3.0-flash")
    parser.add_argument(
        "--draft-layers",
        nargs="+",
        choices=get_args(DraftLayers),
        default=["sharded"],
        help="how ranks hold the draft's layers in mtp and dspark; of several each is measured in each, in one run",
    )
    parser.add_argument("--layers", type=int, help="fewer than the model has, to try this program")
    parser.add_argument("--limit-s", type=float, default=580.0, help="seconds after which all ranks are ended")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--commit", default=commit(), help="where git is not there to ask")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if "RANK" not in os.environ:
        sys.exit(start_ranks(arguments.ranks, [sys.executable, *sys.argv], limit_s=arguments.limit_s))
    config = built_in(arguments.model)
    run_rank(arguments, config | {"num_hidden_layers": arguments.layers or config["num_hidden_layers"]})


if __name__ == "__main__":
    main()
