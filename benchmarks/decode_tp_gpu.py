"""Time steps of Ling-3.0 at full size on several GPUs: random weights, spread routing, one graph a rank.

`PYTHONPATH=src python benchmarks/decode_tp_gpu.py --ranks 2 CASE [CASE ...]` starts a process per GPU, as `torchrun`
would; rank 0 writes `FOLDER/CASE.json`. The rows of a step are independent random ids, so that routing spreads as
uniform routing does, and the experts are counted; drafts are made, then replaced by such ids. Acceptance is simulated.
"""

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

from decode_gpu import CONTEXT_LEN, built_in, commit_id, count_distinct_experts, count_nodes
from soloist.config import disable_multicast
from soloist.engine import Engine
from soloist.kernels.allreduce import TensorParallel
from soloist.kernels.clock import stamp
from soloist.kernels.mailboxes import make_mailboxes
from soloist.models import load_model
from soloist.models.bailing_moe_v3 import BailingMoeV3MTP
from soloist.models.causal_lm import CausalLM
from soloist.models.footprint import CountingSource
from soloist.models.loader import RandomSource, choose_placement
from soloist.request_stats import RequestStats
from soloist.roofline import measure_bandwidth
from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.runtime.graph import StepGraph
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from soloist.spec.drafter import Drafter, NoDrafter
from soloist.spec.dspark import DSpark, make_random_dspark
from soloist.spec.dspark_config import random_config
from soloist.spec.mtp import MTPDrafter
from soloist.spec.setup import DrafterSetup
from soloist.spec.verify import Verdict

NUM_STEPS = 100
REPEATS = 3
# Tokens of an answer for TPOT; the published run has as many.
ANSWER_TOKENS = 1024
ROOM = CONTEXT_LEN + ANSWER_TOKENS + 64
# Acceptance lengths by width at which TPOT is quoted.
STANDARD_POINTS = {4: (2.0,), 6: (3.25,), 9: (4.7, 6.4), 16: (9.95,)}


# Built-in models, as cases call them.
NAMES = {"ling-3.0-flash": "ling3-flash", "ling-3.0-tiny": "ling3-tiny"}


@dataclass(frozen=True)
class Case:
    """What is measured under one name: widths, and the block of a DSpark draft by width."""

    drafter: str
    widths: tuple[int, ...]


CASES = {
    "nodraft": Case("off", (1,)),
    "mtp": Case("mtp", (6,)),
    "dspark": Case("dspark", (4, 9, 16)),
}


class RandomRows(Drafter):
    """Has another drafter draft, then fills the step with independent random ids, the same on every rank."""

    def __init__(self, drafter: Drafter, width: int, vocab_size: int, device: torch.device) -> None:
        self.inner, self.name, self.width = drafter, drafter.name, width
        self.max_drafts, self.has_draft_law = width - 1, drafter.has_draft_law
        self.capture_layers, self.max_context_len = drafter.capture_layers, drafter.max_context_len
        # (1024, T) int64, and the row that is next, (1,) int64.
        generator = torch.Generator().manual_seed(0)
        self._table = torch.randint(vocab_size, (1024, width), generator=generator).to(device)
        self._next = torch.zeros(1, dtype=torch.int64, device=device)
        self.begin, self.skip, self.prefill_chunk = drafter.begin, drafter.skip, drafter.prefill_chunk  # type: ignore[method-assign]
        self.snapshot, self.restore = drafter.snapshot, drafter.restore  # type: ignore[method-assign]

    def propose(self, buffers: StepBuffers, context_len: torch.Tensor) -> None:
        if self.inner.max_drafts:
            self.inner.propose(buffers, context_len)
        buffers.input_ids.copy_(self._table.index_select(0, self._next)[0])
        self._next.add_(1).remainder_(self._table.shape[0])

    def update(
        self, buffers: StepBuffers, verdict: Verdict, hidden: torch.Tensor, captured: torch.Tensor | None
    ) -> None:
        self.inner.update(buffers, verdict, hidden, captured)


@dataclass
class Rank:
    """One rank at work."""

    group: TensorParallel
    device: torch.device
    bandwidth: float
    target: CausalLM
    max_context_len: int

    def setup(self, width: int) -> DrafterSetup:
        return DrafterSetup(
            target=self.target,
            max_context_len=self.max_context_len,
            num_tokens=self.target.config.vocab_size,
            max_width=width,
        )

    def make_drafter(self, name: str, width: int) -> tuple[Drafter, Callable[[float | None], float]]:
        """Make a drafter, and what gives the bytes that one rank reads to draft, by the experts of an update."""
        if name == "mtp":
            source = RandomSource(0, choose_placement(self.device, self.target.dtype, None, self.group))
            counted = CountingSource(source)
            mtp = BailingMoeV3MTP(self.target, counted)
            drafter = MTPDrafter(mtp, max_context_len=self.max_context_len, max_drafts=width - 1)
            footprint = counted.footprint(mtp.make_cache(1), self.target.config, num_layers=1)
            head_bytes = self.target.lm_head.numel() * self.target.lm_head.element_size()

            def mtp_bytes(experts: float | None) -> float:
                chain = (width - 2) * footprint.step_bytes(1, CONTEXT_LEN).total
                update = footprint.step_bytes(width, CONTEXT_LEN, distinct_experts=experts).total
                return chain + update + (width - 1) * head_bytes

            return drafter, mtp_bytes
        if name == "dspark":
            config = random_config(self.target.config, block_size=15 if width == 16 else 8)
            drafter = make_random_dspark(self.setup(width), config)
            assert isinstance(drafter, DSpark)
            return drafter, lambda experts: drafter.model.read_bytes(CONTEXT_LEN, width - 1)
        return NoDrafter(), lambda experts: 0.0

    def barrier(self) -> None:
        """Let all ranks go on together."""
        torch.cuda.synchronize()
        dist.barrier(self.group.process_group, device_ids=[self.device.index])
        torch.cuda.synchronize()


def make_runner(rank: Rank, drafter: Drafter, width: int) -> ModelRunner:
    return ModelRunner(
        rank.target,
        max_context_len=rank.max_context_len,
        max_width=width,
        has_draft_probs=drafter.has_draft_law,
        capture_layers=drafter.capture_layers,
    )


@torch.inference_mode()
def time_steps(rank: Rank, name: str, width: int) -> dict[str, Any]:
    """Time captured steps of one width behind a filled context."""
    inner, draft_bytes = rank.make_drafter(name, width)
    drafter = RandomRows(inner, width, rank.target.config.vocab_size, rank.device)
    runner = make_runner(rank, drafter, width)
    engine = Engine(runner, drafter)
    buffers, plan = runner.buffers, SamplingPlan.of(SamplingParams())
    prompt = random_prompt(rank)
    prefill_ms = []
    for _ in range(3):
        runner.cache.reset()
        drafter.begin(prompt, plan)
        rank.barrier()
        started_s = time.perf_counter()
        runner.prefill(prompt[:-1], on_chunk=drafter.prefill_chunk)
        torch.cuda.synchronize()
        prefill_ms.append(1e3 * (time.perf_counter() - started_s))
    rank.barrier()
    experts = count_distinct_experts(rank.target, runner)
    times = torch.zeros(NUM_STEPS, 2, dtype=torch.int64, device=rank.device)
    counter = torch.zeros((), dtype=torch.int64, device=rank.device)
    step_of_engine = engine.make_step(plan)

    def step() -> None:
        stamp(times, counter, is_end=False)
        step_of_engine()
        stamp(times, counter, is_end=True)

    buffers.end()
    graph = StepGraph(step)
    step_ms, host_us, idle, committed = [], [], [], 0
    for _ in range(REPEATS):
        runner.cache.context_len.fill_(CONTEXT_LEN)
        engine.ring.reset()
        buffers.begin([1], SamplingParams(), seed=0, max_tokens=16 * NUM_STEPS, stop_ids=[])
        counter.zero_()
        rank.barrier()
        graph.replay()
        torch.cuda.synchronize()
        counter.zero_()
        rank.barrier()
        started_s = time.perf_counter()
        for _ in range(NUM_STEPS):
            graph.replay()
        host_us.append(1e6 * (time.perf_counter() - started_s) / NUM_STEPS)
        torch.cuda.synchronize()
        starts, ends = times.T.tolist()
        wall_ns = ends[-1] - starts[0]
        step_ms.append(wall_ns / NUM_STEPS / 1e6)
        idle.append(1 - sum(e - s for s, e in zip(starts, ends, strict=True)) / wall_ns)
        committed += int(runner.cache.context_len) - CONTEXT_LEN
    assert committed >= REPEATS * NUM_STEPS, "steps committed nothing"
    rank.group.mailboxes.check()
    num_nodes, num_programmatic = count_nodes(graph)
    floor_ms = rank.target.footprint.step_floor_ms(
        width,
        CONTEXT_LEN,
        bandwidth_gb_per_s=rank.bandwidth,
        distinct_experts=experts,
        draft_bytes=draft_bytes(experts),
    )
    median = statistics.median(step_ms)
    return {
        "width": width,
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


def random_prompt(rank: Rank) -> torch.Tensor:
    """Draw a prompt, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(rank.target.config.vocab_size, (CONTEXT_LEN,), generator=generator).to(rank.device)


def time_answer(rank: Rank, name: str, width: int, acceptance: float | None) -> dict[str, Any]:
    """Read a prompt and answer through the engine, tokens taken from the ring; acceptance by lot."""
    inner, _ = rank.make_drafter(name, width)
    drafter = RandomRows(inner, width, rank.target.config.vocab_size, rank.device)
    engine = Engine(make_runner(rank, drafter, width), drafter, simulated_acceptance=acceptance)
    prompt = random_prompt(rank).tolist()
    # The first captures the step. Of lots there are several, so that their mean is the one asked for.
    answer(rank, engine, prompt, seed=0, max_tokens=2 * width)
    runs = [answer(rank, engine, prompt, seed=seed, max_tokens=ANSWER_TOKENS) for seed in range(3 if acceptance else 1)]
    rank.group.mailboxes.check()
    gaps = sorted(gap for _, _, run_gaps in runs for gap in run_gaps)
    total_s, stats = sum(total_s for _, total_s, _ in runs), [stats for stats, _, _ in runs]
    num_tokens = sum(one.completion_tokens for one in stats)
    return {
        "tpot_ms": round(1e3 * sum(one.decode_s for one in stats) / (num_tokens - len(runs)), 4),
        "acceptance_length": round(num_tokens / sum(one.forwards for one in stats), 3),
        "num_tokens": num_tokens,
        "step_gap_ms_p10": round(gaps[len(gaps) // 10], 4),
        "step_gap_ms_p90": round(gaps[9 * len(gaps) // 10], 4),
        "ttft_ms": round(1e3 * statistics.median(one.ttft_s or 0.0 for one in stats), 1),
        "output_tok_per_s": round(num_tokens / total_s, 1),
    }


def answer(
    rank: Rank, engine: Engine, prompt: list[int], *, seed: int, max_tokens: int
) -> tuple[RequestStats, float, list[float]]:
    """Answer once: the stats, the seconds with the prompt included, and the ms between steps' tokens."""
    rank.barrier()
    generation = engine.generate(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed))
    # Not in step with rank 0 by words: every rank decides the same from the same tokens.
    gaps, last_s, started_s = [], None, time.perf_counter()
    for result in generation:
        now_s = time.perf_counter()
        if result.token_ids and last_s is not None:
            gaps.append(1e3 * (now_s - last_s))
        last_s = now_s
    stats = generation.stats
    assert stats.completion_tokens == max_tokens
    return stats, time.perf_counter() - started_s, gaps


def run_case(rank: Rank, case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one case on every rank; the figures are this rank's."""
    known, rows, points = CASES[case], [], {}
    full_name = f"{NAMES[arguments.model]}-tp{rank.group.size}-{case}"
    for width in known.widths:
        rows.append(time_steps(rank, known.drafter, width))
        report(rank, full_name, rows[-1])
        clear()
        for acceptance in STANDARD_POINTS.get(width, (None,)):
            point = "1@1" if acceptance is None else f"{acceptance:g}@{width}"
            points[point] = time_answer(rank, known.drafter, width, acceptance)
            report(rank, full_name, {point: points[point]})
            clear()
    best = min(points.values(), key=lambda point: point["tpot_ms"])
    return {
        "case": full_name,
        "date": date.today().isoformat(),
        "commit": arguments.commit,
        "command": " ".join(["python", "benchmarks/decode_tp_gpu.py", *arguments.words]),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "model": arguments.model,
        "weights": "random",
        "tensor_parallel_size": rank.group.size,
        "dtype": "bfloat16",
        "context_len": CONTEXT_LEN,
        "acceptance_simulated": known.drafter != "off",
        "bandwidth_gb_per_s": round(rank.bandwidth),
        "step_ms_by_width": {row["width"]: row["step_ms_median"] for row in rows},
        "floor_step_ms_by_width": {row["width"]: row["floor_step_ms"] for row in rows},
        "distinct_experts_by_width": {row["width"]: row["distinct_experts"] for row in rows},
        "prefill_ms": min(row["prefill_ms"] for row in rows),
        "tpot_ms_at": {point: answer["tpot_ms"] for point, answer in points.items()},
        "output_tok_per_s": best["output_tok_per_s"],
        "answers": points,
        "rows": rows,
    }


def clear() -> None:
    """Give back what the last measurement held."""
    gc.collect()
    torch.cuda.empty_cache()


def report(rank: Rank, name: str, figures: dict[str, Any]) -> None:
    if rank.group.rank == 0:
        print(name, json.dumps(figures), flush=True)


def connect(rank: int, size: int, hidden_size: int) -> tuple[TensorParallel, torch.device]:
    """Join the other ranks, on the GPU of this rank's number."""
    disable_multicast()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    # Long enough for a rank whose kernels take longer to compile than another's.
    mailboxes = make_mailboxes(dist.group.WORLD, hidden_size=hidden_size, device=device, timeout_s=20.0)
    return TensorParallel(rank=rank, size=size, process_group=dist.group.WORLD, mailboxes=mailboxes), device


def run_rank(arguments: argparse.Namespace) -> None:
    """Be one rank."""
    config = built_in(arguments.model)
    config["num_hidden_layers"] = arguments.layers or config["num_hidden_layers"]
    group, device = connect(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), config["hidden_size"])
    # Every rank draws the same ids.
    torch.manual_seed(0)
    bandwidth = measure_bandwidth(device)
    torch.cuda.empty_cache()
    started_s = time.perf_counter()
    target = load_model(config, device=device, weights="random", group=group)
    torch.cuda.synchronize()
    rank = Rank(group=group, device=device, bandwidth=bandwidth, target=target, max_context_len=ROOM)
    held = f"{target.report.weight_bytes / 2**30:.1f} GiB in {time.perf_counter() - started_s:.1f} s"
    report(rank, "loaded", {"rank 0": held, "bandwidth_gb_per_s": round(bandwidth)})
    arguments.out.mkdir(parents=True, exist_ok=True)
    for case in arguments.cases:
        result = run_case(rank, case, arguments)
        if group.rank == 0:
            (arguments.out / f"{result['case']}.json").write_text(json.dumps(result, indent=1) + "\n")
    rank.barrier()
    dist.destroy_process_group()


def start_ranks(size: int) -> int:
    """Run this program once per rank; the first that fails ends all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = os.environ | shared
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=environment | {"RANK": str(r)}) for r in range(size)]
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):
                break
            time.sleep(0.2)
    finally:
        for rank in ranks:
            rank.kill()
    return max(abs(rank.wait()) for rank in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--ranks", type=int, default=2, help="GPUs; under torchrun it says how many")
    parser.add_argument("--model", choices=list(NAMES), default="ling-3.0-flash")
    parser.add_argument("--layers", type=int, help="fewer than the model has, to try this program")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default=commit_id(), help="where git is not there to ask")
    arguments = parser.parse_args()
    arguments.words = sys.argv[1:]
    size = int(os.environ.get("WORLD_SIZE", arguments.ranks))
    arguments.out = arguments.out or Path(f"benchmarks/results/h200x{size}")
    if "RANK" in os.environ:
        run_rank(arguments)
    else:
        sys.exit(start_ranks(size))


if __name__ == "__main__":
    main()
