"""The collectives of a step between GPUs of one host, each rank held to the sums that it can form by itself.

`python -m tests.runtime.allreduce_gpu_program 2` starts a process for each of two GPUs, runs every check, and fails at
the first thing that does not hold.
"""

import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from allreduce_gpu import BF16, EPS, MAX_TOKENS, Bench, D, start_ranks
from soloist.errors import RankLostError
from soloist.kernels.allreduce_cuda import push_all_reduce_add, push_argmax
from soloist.kernels.norm import rms_norm_ref
from soloist.kernels.nvrtc import launch

# Calls of a graph; the graphs, and how often each is replayed.
NUM_CALLS, NUM_GRAPHS, NUM_REPLAYS = 100, 3, 20
# A producer that lets its consumer start 50 us before it writes, and a consumer.
COPY_LATE = r"""
extern "C" __global__ void copy_late(const uint4* from, uint4* to, int count, int delay_ns) {
    wait_for_producers();
    let_consumers_start();
    const unsigned long long started_ns = clock_ns();
    while (clock_ns() - started_ns < delay_ns) {}
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = from[i];
}
"""


def count(bench: Bench, name: str, num_calls: int, num_wrong: torch.Tensor | int) -> None:
    """Note a check; fails on every rank if it failed on one."""
    wrong = torch.tensor(int(num_wrong), device=bench.device)
    dist.all_reduce(wrong)
    bench.mailboxes.check()
    if int(wrong):
        raise AssertionError(f"{name}: {int(wrong)} wrong values in {num_calls} calls")
    bench.say(f"{name}: {num_calls} calls, all right")


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
    count(bench, "eager, T 1 to 16", num_calls, num_wrong)


def check_captured(bench: Bench, *, has_pdl: bool, num_graphs: int) -> None:
    """Graphs of calls of random T and width, with random delays on each rank; the data are new in every replay."""
    W, C = bench.world_size, NUM_CALLS
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
    count(bench, f"captured {kind}", num_graphs * (NUM_REPLAYS + 1) * C, num_wrong)


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
    copy = bench.load("copy_late", COPY_LATE)
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
    count(bench, "late producers", 4 * C, num_wrong)


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
    count(bench, "argmax", num_calls, num_wrong)


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
        # What is looked up with it must exist.
        value, ids = torch.ones(1, device=bench.device), torch.full((1,), 7 + bench.rank, device=bench.device)
        out_value, out_ids = torch.zeros_like(value), torch.zeros_like(ids)
        push_argmax(value, ids, out_value, out_ids, mailboxes)
        torch.cuda.synchronize()
        num_wrong += int(not out_value.isnan()) + (not 7 <= int(out_ids) < 7 + bench.world_size)
        num_wrong += not 0.1 <= waited_s < 1.0
        try:
            mailboxes.check()
            num_wrong += 1
        except RankLostError as error:
            bench.say(error)
        num_wrong += int(not out.isnan().all())
    count(bench, "a rank that does not come", 1, num_wrong)


def run_checks(bench: Bench) -> None:
    check_eager(bench)
    check_captured(bench, has_pdl=True, num_graphs=NUM_GRAPHS)
    check_captured(bench, has_pdl=False, num_graphs=1)
    check_late_producers(bench)
    check_argmax(bench)
    check_lost_rank(bench)


if __name__ == "__main__":
    start_ranks(run_checks, int(sys.argv[1]), limit_s=80)
