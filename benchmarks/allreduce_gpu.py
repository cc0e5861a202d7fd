"""Time the collectives of a step between GPUs of one host, against NCCL and PyTorch's symmetric memory.

`PYTHONPATH=src python benchmarks/allreduce_gpu.py [--ranks 2] [--out FOLDER]` starts a process per GPU and writes
`FOLDER/h200x2/allreduce-tp2.json`. The floor of a call is a launch that does nothing, a store's way to the peer, and
the bytes over the links' bandwidth, each measured in the same run. What the collectives give is checked by
`tests/runtime/allreduce_gpu_program.py`.
"""

import argparse
import faulthandler
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.multiprocessing

from soloist.bench.results import commit, machine_folder, make_stamp
from soloist.config import disable_multicast
from soloist.kernels.allreduce_cuda import push_all_reduce_add, push_argmax
from soloist.kernels.launch import programmatic_launch
from soloist.kernels.mailboxes import Mailboxes, make_mailboxes
from soloist.kernels.norm import rms_norm
from soloist.kernels.nvrtc import PRELUDE, launch, load_kernel

D = 2560
EPS = 1e-6
MAX_TOKENS = 16
TIMED_TOKENS = (1, 2, 4, 8, 12, 16)
TARGET_US = 5.0
REPEATS = 5
NUM_TIMED_CALLS = 1000
BF16 = torch.bfloat16

# A launch that does nothing, and words that two ranks send each other in turn.
_SOURCE = r"""
extern "C" __global__ void nothing() {
    wait_for_producers();
    let_consumers_start();
}
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
_CLOCK = r"""
__device__ unsigned long long clock_ns() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}
"""


class Bench:
    """One rank: its mailboxes, and graphs of what it launches."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.group = rank, world_size, dist.group.WORLD
        self.device = torch.device("cuda", rank)
        self.mailboxes = self.make_mailboxes()
        self.stream = torch.cuda.Stream()
        self.started_s = time.perf_counter()

    def make_mailboxes(self, timeout_s: float = 10.0) -> Mailboxes:
        return make_mailboxes(self.group, hidden_size=D, device=self.device, max_tokens=MAX_TOKENS, timeout_s=timeout_s)

    def say(self, *words: object) -> None:
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.started_s:5.1f} s]", *words, flush=True)

    def load(self, name: str, source: str = _SOURCE) -> Any:
        return load_kernel(PRELUDE + _CLOCK + source, name, (("HAS_PDL", "1"),), self.device)

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


def time_all(bench: Bench, arguments: argparse.Namespace) -> None:
    links = time_links(bench)
    bench.say(links)
    rows = [time_tokens(bench, T, links) for T in TIMED_TOKENS]
    argmax = time_argmax(bench)
    bench.say("argmax", argmax)
    if bench.rank == 0:
        write(arguments, links | {"argmax_us": argmax["us"], "rows": rows})


def write(arguments: argparse.Namespace, measured: dict[str, Any]) -> None:
    slowest_us = max(row["all_reduce_add_norm"]["us"] for row in measured["rows"])
    device = torch.cuda.get_device_name()
    result = {
        **make_stamp(),
        "commit": arguments.commit,
        "case": f"allreduce-tp{arguments.ranks}",
        "command": " ".join(["python", *sys.argv]),
        "device": f"{arguments.ranks} x {device}",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "tensor_parallel_size": arguments.ranks,
        "dtype": "bfloat16",
        "hidden_size": D,
        "target_us": TARGET_US,
        "slowest_us": slowest_us,
        **measured,
    }
    folder = arguments.out / machine_folder(device, arguments.ranks)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result['case']}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("case", "slowest_us", "target_us")}), flush=True)


def run_rank(
    rank: int, size: int, port: int, limit_s: float, run: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    faulthandler.dump_traceback_later(limit_s, exit=True)
    disable_multicast()
    torch.cuda.set_device(rank)
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "nccl", init_method=method, rank=rank, world_size=size, device_id=torch.device("cuda", rank)
    )
    bench = Bench(rank, size)
    bench.say("connected")
    run(bench, *arguments)
    bench.meet()
    dist.destroy_process_group()


def start_ranks(run: Callable[..., None], size: int, *arguments: Any, limit_s: float) -> None:
    """Run a function of a bench on every rank, a process each, which end themselves after `limit_s`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.multiprocessing.spawn(run_rank, (size, port, limit_s, run, arguments), nprocs=size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--commit", default=commit() or "unknown", help="where git is not there to ask")
    parser.add_argument("--limit-s", type=float, default=85.0, help="seconds after which every process ends itself")
    arguments = parser.parse_args()
    start_ranks(time_all, arguments.ranks, arguments, limit_s=arguments.limit_s)


if __name__ == "__main__":
    main()
