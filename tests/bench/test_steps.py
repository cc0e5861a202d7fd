"""Steps by the GPU's clock: what is counted, what is left out, and gaps in a trace made by hand."""

import itertools
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from soloist.bench import steps
from soloist.bench.ladder import EAGER, ladder
from soloist.bench.steps import SpreadRows, gaps, measure_steps
from soloist.engine import Engine
from soloist.runtime.graph import Execution
from soloist.runtime.runner import ModelRunner
from soloist.spec.drafter import NoDrafter
from tests.scripted import RandomDrafter, TableModel

ROOT = Path(__file__).parents[2]
N = 11
# A step takes 7 ms, and 1 ms later the next one begins.
STEP_NS, IDLE_NS = 7_000_000, 1_000_000


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's clock that is made up, on a machine without a GPU."""
    now = itertools.accumulate(itertools.cycle([IDLE_NS, STEP_NS]))

    def stamp(times: torch.Tensor, num_steps: torch.Tensor, *, is_end: bool) -> None:
        times[int(num_steps) % len(times), int(is_end)] = next(now)
        num_steps += is_end

    monkeypatch.setattr(steps, "stamp", stamp)
    # As many steps as there are tokens asked for, however slow this machine is.
    monkeypatch.setattr(steps, "_SECONDS", float("inf"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(steps, "_trace", lambda meter: (0.25, 42))


def make_engine(max_drafts: int, acceptance_length: float | None = None) -> Engine:
    def logits(positions: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(input_ids, N).float()

    inner = NoDrafter()
    if max_drafts:
        inner = RandomDrafter(max_drafts=max_drafts, vocab_size=N, has_draft_law=False)
    spread = SpreadRows(inner, N, torch.device("cpu"))
    runner = ModelRunner(TableModel(N, logits, max_context_len=4000), max_width=1 + max_drafts)
    return Engine(runner, spread, eos_token_ids=(), simulated_acceptance=acceptance_length)


@pytest.mark.usefixtures("_clock")
def test_a_step_is_timed_from_begin_to_begin_and_idles_between_end_and_begin():
    figures = measure_steps(make_engine(0), context_len=20, repeats=2)
    assert figures.step_ms.median == figures.step_ms.p90 == 8 == figures.tpot_ms
    assert figures.step_ms_range == (8, 8)
    # 512 steps of 7 ms, with 511 pauses between them.
    assert figures.idle_share == pytest.approx(511 / (511 * 8 + 7))
    assert figures.acceptance_length == figures.mean_width == 1
    assert (figures.gap_share, figures.launches_per_step, figures.syncs_per_step) == (0.25, 42, 1)


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_filling_rows_takes_as_many_launches_as_is_said(max_drafts: int):
    launched: list[str] = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            name = operator.overloadpacket.__name__
            # A view is no launch.
            launched.extend([name] if name not in ("select", "slice") else [])
            return operator(*args, **(kwargs or {}))

    engine = make_engine(max_drafts)
    spread, buffers = engine.drafter, engine.runner.buffers
    spread._drafter = NoDrafter()
    with Listen():
        spread.propose(buffers, engine.runner.cache.context_len)
    assert len(launched) == 6, launched
    assert "up to six of its launches do that" in (ROOT / "docs/bench.md").read_text()


@pytest.mark.usefixtures("_clock")
def test_tokens_of_a_step_are_counted_from_its_records():
    figures = measure_steps(make_engine(3, acceptance_length=2.0), context_len=20)
    assert figures.mean_width == 4
    assert figures.acceptance_length == pytest.approx(2.0, abs=0.2)
    assert figures.tpot_ms == pytest.approx(8 / figures.acceptance_length)


@pytest.mark.usefixtures("_clock")
def test_blocking_reads_are_counted_by_what_pytorch_warns_of(monkeypatch: pytest.MonkeyPatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    engine = make_engine(0)
    forward = engine.runner.forward

    def forward_and_read(num_rows: int) -> torch.Tensor:
        for _ in range(3 * (modes[-1:] == ["warn"])):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return forward(num_rows)

    engine.runner.forward = forward_and_read
    # Beside the three, the host waits for each step.
    assert measure_steps(engine, context_len=20, repeats=2).syncs_per_step == 4
    assert modes == ["warn", "default"] * 2


@pytest.mark.usefixtures("_clock")
def test_rows_are_spread_over_the_vocabulary():
    engine, seen = make_engine(2, acceptance_length=1.5), []
    forward = engine.runner.forward
    engine.runner.forward = lambda num_rows: (seen.append(engine.runner.buffers.input_ids.clone()), forward(num_rows))[
        1
    ]
    measure_steps(engine, context_len=20, repeats=1)
    ids = torch.stack(seen)
    assert all(ids[:, row].unique().numel() == N for row in range(3))


def test_gaps_within_steps_are_told_from_those_between_them():
    trace = [
        (0, 500, "a prompt's kernel"),
        (1000, 2, "stamp_kernel"),
        (1012, 100, "gemm"),
        # Begins before the one before it has ended.
        (1100, 40, "attention"),
        (1150, 10, "gemm"),
        (1160, 2, "stamp_kernel"),
        (1500, 2, "stamp_kernel"),
        (1502, 150, "gemm"),
        (1652, 2, "stamp_kernel"),
        (9999, 1, "copy"),
    ]
    # 10 behind the first stamp, 10 before the second product; of 654 from the first stamp to the last.
    assert gaps(trace[::-1]) == (20 / 654, 2)


def test_every_rung_adds_one_switch_to_those_before_it():
    rungs = ladder(has_experts=True, run_ahead=2, draft="ngram", is_adaptive=True)
    switches = ["--fused-moe", "--bf16-head", "--graph", "--run-ahead 2", "--pdl", "--draft ngram", "--adaptive-width"]
    assert [rung.switch for rung in rungs] == [EAGER, *switches, "--device-loop"]
    assert rungs[0].execution == Execution(
        is_captured=False, run_ahead=0, has_pdl=False, has_fused_moe=False, has_bf16_head=False
    )
    assert rungs[5].execution == Execution.best_for(torch.device("cuda"))
    assert [rung.has_draft for rung in rungs] == [False] * 6 + [True] * 3
    last = rungs[-1]
    assert last.is_adaptive and last.execution.has_device_loop and last.execution.run_ahead == 0
    dense = ladder(has_experts=False, run_ahead=3, draft=None, is_adaptive=False)
    assert [rung.switch for rung in dense] == [
        EAGER,
        "--bf16-head",
        "--graph",
        "--run-ahead 3",
        "--pdl",
        "--device-loop",
    ]
    assert all(rung.execution.has_fused_moe for rung in dense)
