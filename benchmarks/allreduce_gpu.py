"""Check and time the collectives of a step between GPUs of one host, against NCCL and PyTorch's symmetric memory.

`PYTHONPATH=src python benchmarks/allreduce_gpu.py [--ranks 2] [--out FOLDER]` starts a process per GPU, runs every
check, then times, and writes `FOLDER/allreduce-tp2.json`. The floor of a call is a launch that does nothing, a store's
way to the peer, and the bytes over the links' bandwidth, each measured in the same run.
"""

import argparse
import faulthandler
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.multiprocessing
import triton

from soloist.config import disable_multicast
from soloist.errors import RankLostError
from soloist.kernels.allreduce_cuda import push_all_reduce_add, push_argmax
from soloist.kernels.launch import programmatic_launch
from soloist.kernels.mailboxes import Mailboxes, make_mailboxes
from soloist.kernels.norm import rms_norm, rms_norm_ref
from soloist.kernels.nvrtc import launch, load_kernel

D = 2560
EPS = 1e-6
MAX_TOKENS = 16
TIMED_TOKENS = (1, 2, 4, 8, 12, 16)
TARGET_US = 5.0
REPEATS = 5
NUM_TIMED_CALLS = 1000
# Of a graph of checks; the graphs, and how often each is replayed.
NUM_CHECKED_CALLS, NUM_GRAPHS, NUM_REPLAYS = 100, 5, 20
BF16 = torch.bfloat16

# A producer that lets its consumer start 50 us before it writes, a consumer, a launch that does nothing, and words that
# two ranks send each other in turn.
_SOURCE = r"""
__device__ unsigned long long clock_ns() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}
__device__ void begin() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
extern "C" __global__ void copy_late(const uint4* from, uint4* to, int count, int delay_ns) {
    begin();
    const unsigned long long started_ns = clock_ns();
    while (clock_ns() - started_ns < delay_ns) {}
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = from[i];
}
extern "C" __global__ void nothing() { begin(); }
extern "C" __global__ void ping_pong(int* own, int* peer, int is_first, int count) {
    const unsigned long long started_ns = clock_ns();
    for (int n = 1; n <= count; ++n) {
        if (is_first) asm volatile("st.relaxed.sys.global.s32 [%0], %1;" :: "l"(peer), "r"(n) : "memory");
        int got = 0;
        while (got < n && clock_ns() - started_ns < 2000000000ull)
            asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(got) : "l"(own) : "memory");
        if (!is_first) asm volatile("st.relaxed.sys.global.s32 [%0], %1;" :: "l"(peer), "r"(n) : "memory");
    }
}
"""


class Bench:
    """One rank: its mailboxes, its numbers, what it found wrong."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.group = rank, world_size, dist.group.WORLD
        self.device = torch.device("cuda", rank)
        self.mailboxes = self.make_mailboxes()
        self.stream = torch.cuda.Stream()
        self.checked: dict[str, int] = {}
        self.started_s = time.perf_counter()

    def make_mailboxes(self, timeout_s: float = 10.0) -> Mailboxes:
        return make_mailboxes(self.group, hidden_size=D, device=self.device, max_tokens=MAX_TOKENS, timeout_s=timeout_s)

    def say(self, *words: object) -> None:
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.started_s:5.1f} s]", *words, flush=True)

    def load(self, name: str) -> Any:
        return load_kernel(_SOURCE, name, (), self.device)

    def meet(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()

    def capture(self, step: Callable[[], None], *, has_pdl: bool = True) -> Callable[[], None]:
        """Run a step once, then capture it; call what this gives to replay it."""
        graph = torch.cuda.CUDAGraph()
        self.meet()
        with programmatic_launch(has_pdl), torch.cuda.stream(self.stream):
            step()
            self.meet()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                step()
        self.meet()

        def replay() -> None:
            with torch.cuda.stream(self.stream):
                graph.replay()

        return replay

    def count(self, name: str, num_calls: int, num_wrong: torch.Tensor | int) -> None:
        """Note a check; fails on every rank if it failed on one."""
        wrong = torch.tensor(int(num_wrong), device=self.device)
        dist.all_reduce(wrong)
        self.mailboxes.check()
        if int(wrong):
            raise AssertionError(f"{name}: {int(wrong)} wrong values in {num_calls} calls")
        self.checked[name] = num_calls
        self.say(f"{name}: {num_calls} calls, all right")


def count_different(y: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Count values whose bits differ; one NaN is like another."""
    bits, expected_bits = (x.nan_to_num(nan=3e38).view(torch.int16) for x in (y, expected))
    return (bits != expected_bits).sum() + (y.isnan() != expected.isnan()).sum()


def check_eager(bench: Bench) -> None:
    """T = 1..16, with and without residual and norm; one call in four has any bits there are."""
    W = bench.world_size
    generator = torch.Generator(bench.device)
    weight = torch.rand(D, device=bench.device, generator=generator.manual_seed(1)).to(BF16)
    num_wrong = torch.zeros((), dtype=torch.int64, device=bench.device)
    num_calls = 0
    for seed in range(4):
        for T in range(1, MAX_TOKENS + 1):
            generator.manual_seed(100 * seed + T)
            partials = torch.randn(W, T, D, device=bench.device, generator=generator).to(BF16)
            if seed == 3:
                words = (W, T, D // 2)
                bits = torch.randint(-(1 << 31), 1 << 31, words, device=bench.device, generator=generator)
                bits[torch.rand(words, device=bench.device, generator=generator) < 0.1] = -1
                partials = bits.to(torch.int32).view(BF16)
            residual = torch.randn(T, D, device=bench.device, generator=generator).to(BF16) if seed else None
            total = partials[0].float()
            for partial in partials[1:]:
                total = total + partial.float()
            expected = (total if residual is None else total + residual.float()).to(BF16)
            out, normed = (torch.full((T, D), torch.nan, dtype=BF16, device=bench.device) for _ in range(2))
            norm = {"norm_weight": weight, "norm_out": normed, "eps": EPS} if seed % 2 else {}
            push_all_reduce_add(partials[bench.rank], residual, out, bench.mailboxes, **norm)
            num_wrong += count_different(out, expected)
            if seed == 1:
                expected_norm = rms_norm_ref(out, weight, EPS).float()
                num_wrong += ((normed.float() - expected_norm).norm() > 4e-3 * expected_norm.norm()).long()
            if norm:
                everyones = torch.empty(W * T, D, dtype=BF16, device=bench.device)
                dist.all_gather_into_tensor(everyones.view(torch.uint8), normed.view(torch.uint8))
                num_wrong += count_different(everyones, normed.repeat(W, 1))
            num_calls += 1
    bench.count("eager, T 1 to 16", num_calls, num_wrong)


def check_captured(bench: Bench, *, has_pdl: bool, num_graphs: int) -> None:
    """Graphs of calls of random T and width, with random delays on each rank; the data are new in every replay."""
    W, C = bench.world_size, NUM_CHECKED_CALLS
    everyones, own = random.Random(5), random.Random(bench.rank)
    num_wrong = torch.zeros((), dtype=torch.int64, device=bench.device)
    counter = torch.zeros((), dtype=torch.int32, device=bench.device)
    places = torch.arange(MAX_TOKENS * D, dtype=torch.int32, device=bench.device)
    seeds = 31 * torch.arange(C, dtype=torch.int32, device=bench.device)[:, None] + 3 * places
    partials, residuals, outs = (torch.empty(C, MAX_TOKENS * D, dtype=BF16, device=bench.device) for _ in range(3))

    def integers(who: int) -> torch.Tensor:
        return ((seeds + 7 * counter + 13 * who) % 251 - 125).to(BF16)

    for _ in range(num_graphs):
        shapes = [(everyones.randint(1, MAX_TOKENS), everyones.choice((D, D, D, 1024))) for _ in range(C)]
        delays = [own.randint(0, 60_000) if own.random() < 0.2 else 0 for _ in range(C)]
        lengths = torch.tensor([T * width for T, width in shapes], dtype=torch.int32, device=bench.device)
        is_written = places < lengths[:, None]

        def step(shapes=shapes, delays=delays, is_written=is_written) -> None:
            counter.add_(1)
            partials.copy_(integers(bench.rank))
            residuals.copy_(integers(W))
            outs.fill_(torch.nan)
            for i, ((T, width), delay) in enumerate(zip(shapes, delays, strict=True)):
                if delay:
                    torch.cuda._sleep(delay)
                rows = [x[i, : T * width].view(T, width) for x in (partials, residuals, outs)]
                push_all_reduce_add(*rows, bench.mailboxes)
            total = sum(integers(who).float() for who in range(W + 1))
            num_wrong.add_(((outs != total.to(BF16)) & is_written).sum())
            num_wrong.add_((~outs.isnan() & ~is_written).sum())

        replay = bench.capture(step, has_pdl=has_pdl)
        for _ in range(NUM_REPLAYS):
            if own.random() < 0.3:
                time.sleep(own.random() * 2e-3)
            replay()
        torch.cuda.synchronize()
    kind = "with PDL" if has_pdl else "without PDL"
    bench.count(f"captured {kind}", num_graphs * (NUM_REPLAYS + 1) * C, num_wrong)


def check_late_producers(bench: Bench) -> None:
    """Every partial sum is written 50 us after its consumer may start; every result is read by the next launch."""
    W, C, T = bench.world_size, 50, 9
    generator = torch.Generator(bench.device).manual_seed(7)
    partials = torch.randn(C, W, T, D, device=bench.device, generator=generator).to(BF16)
    residual = torch.randn(T, D, device=bench.device, generator=generator).to(BF16)
    total = sum(partials[:, who].float() for who in range(W))
    expected = (total + residual.float()).to(BF16)
    own = partials[:, bench.rank].contiguous()
    partial, out, outs = torch.empty_like(own[0]), torch.empty_like(own[0]), torch.empty_like(own)
    copy = bench.load("copy_late")
    packets = T * D // 8

    def step() -> None:
        for i in range(C):
            launch(copy, (16, 1, 1), 128, own[i], partial, packets, 50_000)
            push_all_reduce_add(partial, residual, out, bench.mailboxes)
            launch(copy, (16, 1, 1), 128, out, outs[i], packets, 0)

    replay = bench.capture(step)
    num_wrong = torch.zeros((), dtype=torch.int64, device=bench.device)
    for _ in range(4):
        outs.fill_(torch.nan)
        bench.meet()
        replay()
        torch.cuda.synchronize()
        num_wrong += count_different(outs, expected)
    bench.count("late producers", 4 * C, num_wrong)


def check_argmax(bench: Bench) -> None:
    """Values with many ties, ids of the whole vocabulary; one call in eight has a NaN."""
    W = bench.world_size
    generator = torch.Generator(bench.device)
    num_wrong = torch.zeros((), dtype=torch.int64, device=bench.device)
    num_calls = 1000
    for i in range(num_calls):
        T = 1 + i % MAX_TOKENS
        generator.manual_seed(i)
        values = torch.randint(-2, 3, (W, T), device=bench.device, generator=generator).float()
        values[i % W, 0] += torch.nan if i % 8 == 0 else 0.0
        ids = torch.randint(1 << 17, (W, T), device=bench.device, generator=generator)
        highest = values.max(dim=0).values
        expected = torch.where((values == highest) | values.isnan(), ids, 1 << 20).min(dim=0).values
        out_values, out_ids = torch.empty_like(highest), torch.empty_like(expected)
        push_argmax(values[bench.rank], ids[bench.rank], out_values, out_ids, bench.mailboxes)
        num_wrong += (out_ids != expected).sum() + (out_values.nan_to_num(9) != highest.nan_to_num(9)).sum()
    bench.count("argmax", num_calls, num_wrong)


def check_lost_rank(bench: Bench) -> None:
    """The last rank does not come: the others say so in time."""
    mailboxes = bench.make_mailboxes(timeout_s=0.1)
    bench.meet()
    num_wrong = 0
    if bench.rank < bench.world_size - 1:
        x, out = torch.ones(3, D, dtype=BF16, device=bench.device), torch.empty(3, D, dtype=BF16, device=bench.device)
        started_s = time.perf_counter()
        for _ in range(100):
            push_all_reduce_add(x, None, out, mailboxes)
        torch.cuda.synchronize()
        waited_s = time.perf_counter() - started_s
        bench.say(f"a rank that does not come: {waited_s:.3f} s for 100 calls")
        num_wrong += not 0.1 <= waited_s < 1.0
        try:
            mailboxes.check()
            num_wrong += 1
        except RankLostError as error:
            bench.say(error)
        num_wrong += int(not out.isnan().all())
    bench.count("a rank that does not come", 1, num_wrong)


def time_us(bench: Bench, step: Callable[[], None], num_calls: int) -> dict[str, float]:
    """Capture a step of many calls and time its replays: of each the slowest rank, of these the median."""
    replay = bench.capture(step)
    times = []
    for i in range(REPEATS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        bench.meet()
        with torch.cuda.stream(bench.stream):
            start.record()
            replay()
            end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(1e3 * start.elapsed_time(end) / num_calls, device=bench.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if i:
            times.append(float(slowest))
    bench.mailboxes.check()
    return {"us": round(statistics.median(times), 3), "spread_us": round(max(times) - min(times), 3)}


def time_links(bench: Bench) -> dict[str, float]:
    """Measure what the floor is made of: a launch, a store's way to the peer, bandwidth while all ranks send."""
    nothing, ping_pong = bench.load("nothing"), bench.load("ping_pong")

    def launch_nothing() -> None:
        for _ in range(NUM_TIMED_CALLS):
            launch(nothing, (1, 1, 1), 32)

    launch_us = time_us(bench, launch_nothing, NUM_TIMED_CALLS)["us"]
    count = 2000
    words = symm_mem.empty(64, dtype=torch.int32, device=bench.device)
    handle = symm_mem.rendezvous(words, bench.group.group_name)
    ways = []
    for _ in range(3):
        words.zero_()
        bench.meet()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if bench.rank < 2:
            peer = handle.get_buffer(1 - bench.rank, (64,), torch.int32)
            start.record()
            with programmatic_launch(False):
                launch(ping_pong, (1, 1, 1), 1, words, peer, int(bench.rank == 0), count)
            end.record()
            torch.cuda.synchronize()
            ways.append(1e3 * start.elapsed_time(end) / (2 * count))
            assert int(words[0]) == count, "a word was lost"
    big = symm_mem.empty(1 << 26, dtype=torch.int32, device=bench.device)
    handle = symm_mem.rendezvous(big, bench.group.group_name)
    peer = handle.get_buffer((bench.rank + 1) % bench.world_size, (1 << 26,), torch.int32)
    mine = torch.ones(1 << 26, dtype=torch.int32, device=bench.device)
    speeds = []
    for _ in range(4):
        bench.meet()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(4):
            peer.copy_(mine)
        end.record()
        torch.cuda.synchronize()
        speeds.append(16 * mine.numel() / (1e6 * start.elapsed_time(end)))
    return {
        "empty_launch_us": launch_us,
        "one_way_us": round(statistics.median(ways), 3) if ways else 0.0,
        "link_gb_per_s": round(max(speeds[1:]), 1),
    }


def time_tokens(bench: Bench, T: int, links: dict[str, float]) -> dict[str, Any]:
    """Time a number of rows, ours and the others'."""
    generator = torch.Generator(bench.device).manual_seed(bench.rank)
    partial, residual = (torch.randn(T, D, device=bench.device, generator=generator).to(BF16) for _ in range(2))
    weight = torch.rand(D, device=bench.device, generator=generator).to(BF16)
    out, normed, summed = (torch.empty_like(partial) for _ in range(3))
    small = partial * 2.0**-60
    symmetric = symm_mem.empty(T, D, dtype=BF16, device=bench.device)
    symm_mem.rendezvous(symmetric, bench.group.group_name)
    symmetric.copy_(partial)
    num_others = NUM_TIMED_CALLS // 10

    def ours(**norm: Any) -> Callable[[], None]:
        def step() -> None:
            for _ in range(NUM_TIMED_CALLS):
                push_all_reduce_add(partial, residual, out, bench.mailboxes, **norm)

        return step

    def add_and_norm(x: torch.Tensor) -> None:
        torch.add(x, residual, out=out)
        rms_norm(out, weight, EPS)

    def nccl(then: Callable[[torch.Tensor], None] | None) -> Callable[[], None]:
        def step() -> None:
            # Sums of sums stay finite.
            summed.copy_(small)
            for _ in range(num_others):
                dist.all_reduce(summed)
                if then is not None:
                    then(summed)

        return step

    def one_shot(then: Callable[[torch.Tensor], None] | None) -> Callable[[], None]:
        def step() -> None:
            for _ in range(num_others):
                total = torch.ops.symm_mem.one_shot_all_reduce(symmetric, "sum", bench.group.group_name)
                if then is not None:
                    then(total)

        return step

    num_bytes = T * D * 2
    floor_us = (
        links["empty_launch_us"]
        + links["one_way_us"]
        + (bench.world_size - 1) * num_bytes / (1e3 * links["link_gb_per_s"])
    )
    times = {
        "all_reduce_add": time_us(bench, ours(), NUM_TIMED_CALLS),
        "all_reduce_add_norm": time_us(bench, ours(norm_weight=weight, norm_out=normed, eps=EPS), NUM_TIMED_CALLS),
        "one_shot_all_reduce": time_us(bench, one_shot(None), num_others),
        "one_shot_all_reduce_then_add_norm": time_us(bench, one_shot(add_and_norm), num_others),
        "nccl_all_reduce": time_us(bench, nccl(None), num_others),
        "nccl_all_reduce_then_add_norm": time_us(bench, nccl(add_and_norm), num_others),
    }
    ours_us = times["all_reduce_add_norm"]["us"]
    row = {
        "tokens": T,
        "kib": num_bytes / 1024,
        "floor_us": round(floor_us, 3),
        "share_of_floor": round(floor_us / ours_us, 3),
        "nccl_ratio": round(times["nccl_all_reduce_then_add_norm"]["us"] / ours_us, 2),
        "one_shot_ratio": round(times["one_shot_all_reduce_then_add_norm"]["us"] / ours_us, 2),
        **times,
    }
    bench.say(T, {name: t["us"] for name, t in times.items()}, f"floor {floor_us:.2f} us")
    return row


def time_argmax(bench: Bench) -> dict[str, float]:
    values = torch.randn(MAX_TOKENS, device=bench.device)
    ids = torch.arange(MAX_TOKENS, device=bench.device)
    out_values, out_ids = torch.empty_like(values), torch.empty_like(ids)

    def step() -> None:
        for _ in range(NUM_TIMED_CALLS):
            push_argmax(values, ids, out_values, out_ids, bench.mailboxes)

    return time_us(bench, step, NUM_TIMED_CALLS)


def run_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    faulthandler.dump_traceback_later(arguments.limit_s, exit=True)
    disable_multicast()
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=arguments.ranks, device_id=device
    )
    bench = Bench(rank, arguments.ranks)
    bench.say("connected")
    check_eager(bench)
    check_captured(bench, has_pdl=True, num_graphs=NUM_GRAPHS)
    check_captured(bench, has_pdl=False, num_graphs=1)
    check_late_producers(bench)
    check_argmax(bench)
    links = time_links(bench)
    bench.say(links)
    rows = [time_tokens(bench, T, links) for T in TIMED_TOKENS]
    argmax = time_argmax(bench)
    bench.say("argmax", argmax)
    check_lost_rank(bench)
    if rank == 0:
        write(arguments, links | {"argmax_us": argmax["us"], "checked_calls": bench.checked, "rows": rows})
    bench.meet()
    dist.destroy_process_group()


def write(arguments: argparse.Namespace, measured: dict[str, Any]) -> None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    slowest_us = max(row["all_reduce_add_norm"]["us"] for row in measured["rows"])
    result = {
        "case": f"allreduce-tp{arguments.ranks}",
        "date": date.today().isoformat(),
        "commit": arguments.commit,
        "command": " ".join(["python", *sys.argv]),
        "device": f"{arguments.ranks} x {torch.cuda.get_device_name()}",
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "tensor_parallel_size": arguments.ranks,
        "dtype": "bfloat16",
        "hidden_size": D,
        "target_us": TARGET_US,
        "slowest_us": slowest_us,
        **measured,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{result['case']}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("case", "slowest_us", "target_us", "checked_calls")}), flush=True)


def commit_id() -> str:
    """The commit, or what the environment of a machine without git says."""
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return answer.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/h200x<ranks>")
    parser.add_argument("--commit", default=commit_id(), help="where git is not there to ask")
    parser.add_argument("--limit-s", type=float, default=85.0, help="seconds after which every process ends itself")
    arguments = parser.parse_args()
    arguments.out = arguments.out or Path(f"benchmarks/results/h200x{arguments.ranks}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.multiprocessing.spawn(run_rank, (arguments, port), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
