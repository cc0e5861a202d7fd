"""The kernels that end a step decide and write what `spec.verify`, `StepBuffers`, `TokenRing` say, on random cases."""

import dataclasses
import random

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import step_end_triton
from soloist.kernels.launch import IS_INTERPRETED
from soloist.runtime.buffers import FinishCode, SamplingPlan, StepBuffers
from soloist.runtime.ring import HEADER_WORDS, TokenRing
from soloist.runtime.sampler import Target
from soloist.sampling_params import SamplingParams
from soloist.spec import verify
from soloist.spec.verify import Rule, Verdict
from tests.kernels.device import DEVICE, launch_kernels, nan_in_fresh_memory

N = 6
PLAN = SamplingPlan.of(SamplingParams())
NUM_CASES = 100 if IS_INTERPRETED else 1000


@pytest.fixture(autouse=True)
def _memory_of_nan():
    with nan_in_fresh_memory():
        yield


def i32(x: int, device: torch.device | str = DEVICE) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32, device=device)


def copy_to_device(buffers: StepBuffers) -> StepBuffers:
    """The same request on the device; the stop flag where the host reaches it."""
    copy = {field.name: getattr(buffers, field.name) for field in dataclasses.fields(StepBuffers)}
    copy = {name: x if x is None else x.to(DEVICE, copy=True) for name, x in copy.items()}
    if DEVICE.type == "cuda":
        copy["is_stop_requested"] = buffers.is_stop_requested.pin_memory()
    return StepBuffers(**copy)


class Case:
    """A step of `T` rows somewhere within an answer, on the CPU and on the device."""

    def __init__(self, seed: int, *, T_min: int = 1, T_max: int = 16, ends: bool = True) -> None:
        draw = random.Random(seed)
        self.T = T = draw.choice([T_min, T_max, draw.randint(T_min, T_max)])
        self.cpu = StepBuffers.allocate(max_width=T_max, num_tokens=N, has_draft_probs=True)
        stop_ids = draw.sample(range(N), draw.randint(0, 2)) if ends else []
        num_left = draw.randint(1, 20) if ends else 100
        self.cpu.begin([1], SamplingParams(min_tokens=3), seed=seed, max_tokens=num_left, stop_ids=stop_ids)
        self.cpu.width.fill_(draw.randint(1, T))
        self.target_tokens = torch.tensor([draw.randrange(N) for _ in range(T)])
        # Mostly right drafts, padding included.
        for t in range(1, T_max):
            is_right = t < T and draw.random() < 0.8
            self.cpu.input_ids[t] = self.target_tokens[t - 1] if is_right else draw.randrange(N)
        self.highest = torch.randn(T)
        if ends and draw.random() < 0.3:
            bad = draw.choice([float("nan"), float("inf"), -float("inf")])
            self.highest[draw.randrange(T)] = bad
        # Read behind the verdict.
        self.cpu.is_stop_requested.fill_(ends and draw.random() < 0.3)
        self.gpu = copy_to_device(self.cpu)


def assert_same_verdict(got: Verdict, expected: Verdict) -> None:
    counts = ("num_committed", "num_accepted", "finish_code")
    assert [int(getattr(got, name)) for name in counts] == [int(getattr(expected, name)) for name in counts]
    assert all(getattr(got, name).dtype is torch.int32 and getattr(got, name).shape == () for name in counts)
    n = int(expected.num_committed)
    assert got.committed_tokens[:n].tolist() == expected.committed_tokens[:n].tolist()
    # What lies behind is read, and must be ids.
    assert ((got.committed_tokens >= 0) & (got.committed_tokens < N)).all()
    assert got.committed_tokens.dtype is torch.int64 and got.committed_tokens.shape == expected.committed_tokens.shape


def test_matching_steps_are_concluded_as_by_the_reference(monkeypatch: pytest.MonkeyPatch):
    for seed in range(NUM_CASES):
        case = Case(seed)
        context_len = i32(9, "cpu")
        target = Target(tokens=case.target_tokens, probs=None, highest=case.highest)
        expected = verify.accept(target, case.cpu, context_len, Rule.CHAIN)
        before = copy_to_device(case.gpu)
        with monkeypatch.context() as patch:
            launch_kernels(patch, verify)
            target = Target(tokens=case.target_tokens.to(DEVICE), probs=None, highest=case.highest.to(DEVICE))
            got = verify.accept(target, case.gpu, context_len.to(DEVICE), Rule.CHAIN)
        assert_same_verdict(got, expected)
        for field in dataclasses.fields(StepBuffers):
            now, old = getattr(case.gpu, field.name), getattr(before, field.name)
            assert now is None or torch.equal(now, old), f"{field.name} was written"


@pytest.mark.parametrize("rule", Rule)
def test_steps_with_a_law_are_concluded_as_by_the_reference(rule: Rule, monkeypatch: pytest.MonkeyPatch):
    """Only the end is a kernel of its own; laws and draws are given."""
    for seed in range(NUM_CASES // 2):
        case = Case(1000 + seed, T_min=2, T_max=5)
        T = case.T
        torch.manual_seed(seed)
        probs = torch.rand(T, N).softmax(-1)
        num_accepted, bonus = i32(seed % int(case.cpu.width), "cpu"), torch.tensor([seed % N])
        expected = verify.conclude(case.cpu, case.cpu.input_ids[1:T], num_accepted, bonus, case.highest)
        with monkeypatch.context() as patch:
            launch_kernels(patch, verify)
            for name in ("count_chain", "count_block"):
                patch.setattr(verify, name, lambda *_, count=num_accepted: count.to(DEVICE))
            patch.setattr(verify, "draw", lambda *_, token=bonus: token.to(DEVICE))
            target = Target(tokens=None, probs=probs.to(DEVICE), highest=case.highest.to(DEVICE))
            got = verify.accept(target, case.gpu, i32(3), rule)
        assert_same_verdict(got, expected)


@pytest.mark.parametrize("code", [FinishCode.LENGTH, FinishCode.STOP, FinishCode.NOT_FINITE])
@pytest.mark.parametrize("width", [0, 1])
def test_a_step_behind_the_end_commits_nothing_whatever_it_holds(
    code: FinishCode, width: int, monkeypatch: pytest.MonkeyPatch
):
    """Without drafts its width is 0, with a drafter 1."""
    for seed in range(4):
        case = Case(seed)
        highest = case.highest.nan_to_num(0, 0, 0)
        for buffers, device in ((case.cpu, torch.device("cpu")), (case.gpu, DEVICE)):
            buffers.end()
            buffers.width.fill_(width)
            buffers.finish_code.fill_(code)
            target = Target(tokens=case.target_tokens.to(device), probs=None, highest=highest.to(device))
            with monkeypatch.context() as patch:
                if buffers is case.gpu:
                    launch_kernels(patch, verify)
                verdict = verify.accept(target, buffers, i32(9, device), Rule.CHAIN)
            assert (int(verdict.num_committed), int(verdict.num_accepted), int(verdict.finish_code)) == (0, 0, code)


def finish_by_kernels(
    verdict: Verdict, buffers: StepBuffers, ring: TokenRing, logprobs: tuple[torch.Tensor, ...] | None
) -> None:
    """What `verify.finish` launches on a GPU."""
    if logprobs is not None:
        for rows, slots in zip(logprobs, (ring.logprobs, ring.top_ids, ring.top_logprobs), strict=True):
            step_end_triton.copy_to_slot(rows, slots, ring.num_published)
    names = ("input_ids", "width", "num_left", "num_unstoppable", "finish_code", "is_stop_requested")
    step_end_triton.finish(
        verdict.committed_tokens,
        verdict.num_committed,
        verdict.num_accepted,
        verdict.finish_code,
        **{name: getattr(buffers, name) for name in names},
        num_published=ring.num_published,
        records=ring.records,
        header=HEADER_WORDS,
    )


def make_ring(T: int, device: torch.device | str) -> TokenRing:
    ring = TokenRing(num_slots=3, max_width=T, num_tokens=N, device=device)
    # What a slot held before, as a full ring has it.
    for slots in (ring.records, ring.logprobs, ring.top_ids, ring.top_logprobs):
        slots.fill_(77)
    ring.reset()
    return ring


def draw_logprobs(T: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(T), torch.randint(N, (T, N)), torch.randn(T, N)


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_records_and_progress_are_the_references(has_logprobs: bool):
    """Several steps go round the ring; the host polls between them."""
    for seed in range(NUM_CASES // 8):
        T_max = 1 + seed % 16
        cpu_ring, gpu_ring = make_ring(T_max, "cpu"), make_ring(T_max, DEVICE)
        cpu, gpu = None, None
        for step in range(5):
            case = Case(100 * seed + step, T_max=T_max, ends=step == 4)
            target = Target(tokens=case.target_tokens, probs=None, highest=case.highest)
            if cpu is None or gpu is None:
                cpu, gpu = case.cpu, case.gpu
            else:
                for buffers in (cpu, gpu):
                    buffers.input_ids[1:] = case.cpu.input_ids[1:]
                    buffers.width.copy_(case.cpu.width)
                    buffers.stop_mask.copy_(case.cpu.stop_mask)
                    buffers.is_stop_requested.copy_(case.cpu.is_stop_requested)
            verdict = verify.accept(target, cpu, i32(3, "cpu"), Rule.CHAIN)
            logprobs = draw_logprobs(case.T) if has_logprobs else None
            verify.finish(verdict, cpu, cpu_ring, PLAN, logprobs=logprobs)
            finish_by_kernels(
                Verdict(**{f.name: getattr(verdict, f.name).to(DEVICE) for f in dataclasses.fields(Verdict)}),
                gpu,
                gpu_ring,
                None if logprobs is None else tuple(x.to(DEVICE) for x in logprobs),
            )
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            for name in ("input_ids", "width", "num_left", "num_unstoppable", "finish_code"):
                assert torch.equal(getattr(gpu, name).cpu(), getattr(cpu, name)), name
            for name in ("records", "logprobs", "top_ids", "top_logprobs", "num_published"):
                assert torch.equal(getattr(gpu_ring, name).cpu(), getattr(cpu_ring, name)), name
            num_top = 2 if has_logprobs else None
            record = gpu_ring.poll(num_top)
            assert record is not None and record == cpu_ring.poll(num_top) and gpu_ring.poll(num_top) is None
            if step == 4:
                assert record.finish_code == int(verdict.finish_code)


def test_a_step_behind_the_end_publishes_an_empty_record_and_keeps_the_end():
    case, ring = Case(3), make_ring(16, DEVICE)
    buffers = case.gpu
    buffers.end()
    pending = buffers.input_ids.clone()
    for code in (FinishCode.STOP, FinishCode.RUNNING):
        verdict = Verdict(
            committed_tokens=torch.zeros(16, dtype=torch.int64, device=DEVICE),
            num_committed=i32(0),
            num_accepted=i32(0),
            finish_code=i32(code),
        )
        finish_by_kernels(verdict, buffers, ring, None)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        record = ring.poll()
        assert record is not None
        assert (record.token_ids, record.num_drafted, record.finish_code) == ([], 0, code)
        assert (int(buffers.num_left), int(buffers.width), int(buffers.finish_code)) == (0, 0, code)
        assert torch.equal(buffers.input_ids, pending)
