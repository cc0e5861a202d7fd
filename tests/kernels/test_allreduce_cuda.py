"""Collectives through mailboxes: every rank has the sum's bits, whatever the order of threads, stores and ranks."""

import dataclasses
import random

import pytest
import torch

from soloist.errors import RankLostError
from soloist.kernels import allreduce_cuda, nvrtc
from soloist.kernels.allreduce_cuda import push_all_reduce_add, push_argmax
from soloist.kernels.norm import rms_norm_ref
from tests.kernels.compile_only import Compiled, read_cubin
from tests.kernels.device import DEVICE
from tests.kernels.limits import assert_near
from tests.kernels.ranks_on_cpu import Ranks

BF16 = torch.bfloat16
EPS = 1e-5
MAX_TOKENS, D = 3, 264


def make_ranks(monkeypatch: pytest.MonkeyPatch, world_size: int, **settings) -> Ranks:
    settings = {"max_tokens": MAX_TOKENS, "hidden_size": D, "replaced": {"SPINS_PER_LOOK": 8}} | settings
    return Ranks(monkeypatch, allreduce_cuda, world_size=world_size, **settings)


def nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=BF16, device=DEVICE)


def any_bits(*shape: int) -> torch.Tensor:
    """Draw every pattern of 16 bits, pairs of 0xffff above all."""
    bits = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device=DEVICE)
    bits[torch.rand(*shape[:-1], shape[-1] // 2, device=DEVICE).repeat_interleave(2, -1) < 0.1] = -1
    return bits.view(BF16)


def expected_sum(partials: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return (total if residual is None else total + residual.float()).to(BF16)


def assert_same_bits(y: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num().view(torch.int16), expected.nan_to_num().view(torch.int16))


def sum_often(ranks: Ranks, num_calls: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run sums of 1 to 3 rows, wide and narrow; give what came out on all ranks, and what should."""
    torch.manual_seed(seed)
    generator = random.Random(seed)
    W = len(ranks.mailboxes)
    results = []
    for i in range(num_calls):
        T = generator.randint(1, MAX_TOKENS)
        width, has_residual = generator.choice(((D, True), (D, False), (40, True)))
        partials = any_bits(W, T, width) if i % 4 == 3 else torch.randn(W, T, width, device=DEVICE).to(BF16)
        residual = torch.randn(T, width, device=DEVICE).to(BF16) if has_residual else None
        out = nan(W, T, width)
        for rank, mailboxes in enumerate(ranks.mailboxes):
            push_all_reduce_add(partials[rank], residual, out[rank], mailboxes)
        results.append((out, expected_sum(partials, residual)))
    ranks.run(seed)
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_has_the_bits_of_the_sum_in_rank_order(monkeypatch: pytest.MonkeyPatch, world_size: int):
    ranks = make_ranks(monkeypatch, world_size)
    for seed in range(8):
        for out, expected in sum_often(ranks, 16, seed):
            for y in out:
                assert_same_bits(y, expected)
    for mailboxes in ranks.mailboxes:
        mailboxes.check()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU's ranks are too much alike")
def test_two_generations_would_lose_packets(monkeypatch: pytest.MonkeyPatch):
    replaced = {"SPINS_PER_LOOK": 8, "GENERATIONS": 2}
    lost = 0
    for seed in range(4):
        ranks = make_ranks(monkeypatch, 2, replaced=replaced, timeout_s=0.02)
        sum_often(ranks, 12, seed)
        lost += any(int(mailboxes.error) for mailboxes in ranks.mailboxes)
    assert lost


def test_the_norm_is_that_of_the_rounded_row(monkeypatch: pytest.MonkeyPatch):
    W, T = 2, 3
    ranks = make_ranks(monkeypatch, W)
    weight = torch.randn(D, device=DEVICE).to(BF16)
    for seed in range(3):
        residual = torch.randn(T, D, device=DEVICE).to(BF16)
        partials, normed, stream = torch.randn(W, T, D, device=DEVICE).to(BF16), nan(W, T, D), []
        for rank, mailboxes in enumerate(ranks.mailboxes):
            # The residual stream may be written in place.
            stream.append(residual.clone())
            norm = {"norm_weight": weight, "norm_out": normed[rank], "eps": EPS}
            push_all_reduce_add(partials[rank], stream[rank], stream[rank], mailboxes, **norm)
        ranks.run(seed)
        for y, h in zip(stream, normed, strict=True):
            assert_same_bits(y, expected_sum(partials, residual))
            assert_near(h, rms_norm_ref(y, weight, EPS))
            assert torch.equal(h, normed[0])


@pytest.mark.parametrize("world_size", [2, 8])
def test_the_largest_value_wins_and_of_equals_the_lowest_id(monkeypatch: pytest.MonkeyPatch, world_size: int):
    torch.manual_seed(world_size)
    ranks = make_ranks(monkeypatch, world_size)
    cases = []
    for i in range(12):
        T = 1 + i % MAX_TOKENS
        values = torch.randint(-2, 3, (world_size, T), device=DEVICE).float()
        if i % 4 == 3:
            # One that looks like an empty mailbox.
            values[i % world_size, 0] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
        ids = torch.stack([torch.randperm(1 << 17, device=DEVICE)[:T] for _ in range(world_size)])
        out_values, out_ids = torch.zeros_like(values), torch.zeros_like(ids)
        for rank, mailboxes in enumerate(ranks.mailboxes):
            push_argmax(values[rank], ids[rank], out_values[rank], out_ids[rank], mailboxes)
        cases.append((values, ids, out_values, out_ids))
    ranks.run(7)
    for values, ids, out_values, out_ids in cases:
        highest = values.max(dim=0).values
        is_highest = (values == highest) | values.isnan()
        expected = torch.where(is_highest, ids, 1 << 20).min(dim=0).values
        for rank in range(world_size):
            torch.testing.assert_close(out_values[rank], highest, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(out_ids[rank], expected)


def test_a_rank_that_does_not_come_ends_the_wait_with_its_name(monkeypatch: pytest.MonkeyPatch):
    ranks = make_ranks(monkeypatch, 4, timeout_s=0.02)
    partial, out = torch.ones(1, D, dtype=BF16, device=DEVICE), nan(4, 2, D)
    values, out_values = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    ids, out_ids = torch.arange(10, 14, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    for rank, mailboxes in enumerate(ranks.mailboxes):
        if rank != 2:
            for i in range(2):
                push_all_reduce_add(partial, None, out[rank, i : i + 1], mailboxes)
            one = slice(rank, rank + 1)
            push_argmax(values[one], ids[one], out_values[one], out_ids[one], mailboxes)
    ranks.run()
    for rank in (0, 1, 3):
        assert out[rank].isnan().all()
        # What is looked up with it must exist.
        assert out_values[rank].isnan() and out_ids[rank] == ids[rank]
        with pytest.raises(RankLostError, match=rf"rank {rank} waited 0.02 s for rank 2"):
            ranks.mailboxes[rank].check()
    ranks.mailboxes[2].check()


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch):
    mailboxes = make_ranks(monkeypatch, 2).mailboxes[0]
    rows = nan(MAX_TOKENS + 1, D)
    for x in (rows, nan(1, D + 8), nan(1, 12), nan(1, 2 * D)[:, ::2], nan(1, D + 1)[:, 1:], nan(1, D).float()):
        with pytest.raises(AssertionError):
            push_all_reduce_add(x, None, torch.empty_like(x), mailboxes)
    with pytest.raises(AssertionError, match="a norm has a weight and a result"):
        push_all_reduce_add(rows[:1], None, nan(1, D), mailboxes, norm_weight=rows[0])
    assert dataclasses.replace(mailboxes, timeout_s=2.0).world_size == 2


@pytest.mark.skipif(not nvrtc.HAS_NVRTC, reason="NVRTC comes with CUDA builds of PyTorch")
@pytest.mark.parametrize("arch", [90, 100])
def test_a_kernel_waits_once_and_spills_nothing(monkeypatch: pytest.MonkeyPatch, arch: int):
    pytest.importorskip("triton", reason="its wheel brings the tools that read machine code")
    W, hidden_size = 2, 2560
    compiled: list[Compiled] = []
    mailboxes = make_ranks(monkeypatch, W, hidden_size=hidden_size).mailboxes[0]

    def load_kernel(source: str, name: str, definitions: tuple[tuple[str, str], ...], device: torch.device) -> None:
        definitions = tuple((dict(definitions) | {"HAS_PDL": "1"}).items())
        compiled.append(read_cubin(name, nvrtc._compile(source, name, definitions, divmod(arch, 10))))

    monkeypatch.setattr(allreduce_cuda, "load_kernel", load_kernel)
    monkeypatch.setattr(allreduce_cuda, "launch", lambda *_: None)
    x, weight = nan(1, hidden_size), nan(hidden_size)
    push_all_reduce_add(x, x, x, mailboxes)
    push_all_reduce_add(x, x, x, mailboxes, norm_weight=weight, norm_out=x)
    push_argmax(torch.empty(1), torch.empty(1).long(), torch.empty(1), torch.empty(1).long(), mailboxes)
    for kernel in compiled:
        assert kernel.waits == 1 and kernel.stack_bytes == 0 and kernel.registers <= 48, kernel
    add, add_norm, _ = compiled
    # Partial sum, residual and two looks at the peer's packet; the weight of the norm comes before the wait.
    assert (add.wide_loads, add.wide_loads_before_wait) == (4, 0), add
    assert (add_norm.wide_loads, add_norm.wide_loads_before_wait) == (5, 1), add_norm
