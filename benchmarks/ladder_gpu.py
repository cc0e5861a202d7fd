"""What each switch of a step gives on one GPU, and what drafting costs by width: full-size models, random weights.

`PYTHONPATH=src python benchmarks/ladder_gpu.py CASE [CASE ...] [--out FOLDER]` writes `FOLDER/CASE.json` per case. The
rows of a step are independent random ids; drafts are made, thrown away and kept by lot.
"""

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

import soloist.kernels.moe as kernels_moe
from model_bench import Bench
from soloist.bench.ladder import RungSettings, ladder
from soloist.bench.results import Result
from soloist.kernels import moe_step_cuda
from soloist.kernels.norm import rms_norm
from soloist.runtime.graph import Execution
from soloist.sampling_params import SamplingParams

# Steps of a rung that several ranks launch from Python.
FEW_STEPS = 24
# Of the drafts' sweep over widths.
WIDTHS = (2, 4, 6, 9)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A ladder, or a sweep of drafters over widths."""

    config: str
    # Drafters: of a ladder one.
    drafters: tuple[str, ...]
    # Rows of a step, and tokens it commits by lot; a sweep has none.
    width: int | None = None
    acceptance_length: float | None = None


@dataclass(frozen=True, kw_only=True)
class Alone:
    """A form of the step beside the rungs, without a draft."""

    execution: Execution
    params: SamplingParams = field(default_factory=SamplingParams)
    has_fp32_router: bool = False


# What the last rung is held against, a head and a router in fp32, the device loop alone, and what drawing costs.
_CAPTURED = Execution(is_captured=True, run_ahead=2, has_pdl=True)
_GRAPH_ONLY = "graph only"
ALONE = {
    _GRAPH_ONLY: Alone(
        execution=replace(_CAPTURED, run_ahead=0, has_pdl=False, has_fused_moe=False, has_bf16_head=False)
    ),
    "head in fp32": Alone(execution=replace(_CAPTURED, has_bf16_head=False)),
    "head and router in fp32": Alone(execution=replace(_CAPTURED, has_bf16_head=False), has_fp32_router=True),
    "device loop without a draft": Alone(execution=replace(_CAPTURED, run_ahead=0, has_device_loop=True)),
    "sampled from all tokens": Alone(execution=_CAPTURED, params=SamplingParams(temperature=0.8)),
    "sampled from top-k and top-p": Alone(
        execution=_CAPTURED, params=SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
    ),
}
CASES = {
    "ling3-tiny-ladder": Case(config="ling-3.0-tiny", drafters=("dspark",), width=9, acceptance_length=4.7),
    "qwen2-1.5b-ladder": Case(
        config="qwen2.5-coder-1.5b-instruct", drafters=("ngram",), width=4, acceptance_length=2.0
    ),
    "qwen2-1.5b-drafts": Case(config="qwen2.5-coder-1.5b-instruct", drafters=("ngram", "qwen2.5-0.5b")),
}


@contextmanager
def fp32_router() -> Iterator[None]:
    """Route by products with a copy of the router in fp32 inside the block, as published code does."""
    copies: dict[int, torch.Tensor] = {}

    def in_fp32(
        x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, *, out_dtype: torch.dtype
    ) -> torch.Tensor:
        # (E, D), made where the step runs first, before it is captured.
        copy = copies.get(weight.data_ptr())
        if copy is None:
            copy = copies[weight.data_ptr()] = weight.float()
        return F.linear(rms_norm(x, norm, eps).float(), copy).to(out_dtype)  # (T, E)

    with (
        patch.object(kernels_moe, "norm_linear", in_fp32),
        # Not in bf16 within the experts' launch.
        patch.object(moe_step_cuda, "takes_router", lambda *_: False),
    ):
        yield
        assert copies, "no router was called"


def measure_rungs(
    bench: Bench, name: str, settings: list[RungSettings], *, drafter: str, width: int, acceptance_length: float | None
) -> list[Result]:
    """Measure the step of every rung."""
    rungs = []
    for rung in settings:
        assert rung.execution is not None
        draft = {"drafter": drafter, "width": width, "acceptance_length": acceptance_length} if rung.has_draft else {}
        # Ranks take as many steps each, however long they are.
        is_slow = bench.group.size > 1 and not rung.execution.is_captured
        limits = {"repeats": 1, "most_steps": FEW_STEPS} if is_slow else {}
        figures, floor = bench.measure(rung.execution, is_adaptive=rung.is_adaptive, **draft, **limits)
        rungs.append(
            bench.result(
                rung.switch,
                figures,
                floor,
                width=width if rung.has_draft else 1,
                acceptance_simulated=rung.has_draft,
            )
        )
        bench.say(
            f"{name} {rung.switch}: step {figures.step_ms.median:.3f} ms, TPOT {figures.tpot_ms:.3f}, floor"
            f" {floor['share_of_floor']:.0%}, {figures.launches_per_step} launches, idle {figures.idle_share:.2%},"
            f" gaps {figures.gap_share}, host {figures.host_us_per_step:.0f} us, {figures.syncs_per_step:.2f} waits,"
            f" range {figures.step_ms_range}"
        )
        # A graph and its memory belong to one rung.
        gc.collect()
        torch.cuda.empty_cache()
    return rungs


def climb(bench: Bench, name: str, case: Case) -> Iterator[Result]:
    """Measure every rung, then what stands beside them; gives what is measured so far."""
    (drafter,), width = case.drafters, case.width
    assert width is not None
    settings = ladder(has_experts=bench.target.footprint.num_experts > 0, run_ahead=2, draft=drafter, is_adaptive=True)
    rungs = measure_rungs(bench, name, settings, drafter=drafter, width=width, acceptance_length=case.acceptance_length)
    last = replace(rungs[-1], case=name, rungs=tuple(rungs), details=dict(rungs[-1].details))
    yield last
    last.details.update(measure_alone(bench, name))
    base_ms = last.details[_GRAPH_ONLY]["step_ms_median"]
    # By tokens, so that drafts count.
    last.details["times_faster_than_graph_only"] = {
        rung.case: round(base_ms / rung.tpot_ms_mean, 3) for rung in rungs if rung.tpot_ms_mean
    }
    print(f"{name}: {last.details['times_faster_than_graph_only']}", flush=True)
    yield last


def measure_alone(bench: Bench, name: str) -> dict[str, Any]:
    """Measure the forms beside the rungs."""
    found: dict[str, Any] = {}
    for title, alone in ALONE.items():
        if alone.has_fp32_router and not bench.target.footprint.num_experts:
            continue
        with fp32_router() if alone.has_fp32_router else nullcontext():
            figures, _ = bench.measure(alone.execution, params=alone.params)
        found[title] = {
            "step_ms_median": figures.step_ms.median,
            "step_ms_range": figures.step_ms_range,
            "launches_per_step": figures.launches_per_step,
            "idle_share": figures.idle_share,
            "host_us_per_step": figures.host_us_per_step,
            "syncs_per_step": figures.syncs_per_step,
        }
        print(f"{name} {title}: {found[title]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return found


def sweep(bench: Bench, name: str, case: Case) -> Iterator[Result]:
    """Measure steps of several widths with every drafter; gives what is measured so far."""
    best = Execution.best_for(bench.device)
    plain, floor = bench.measure(best)
    result = bench.result(name, plain, floor, width=1)
    for drafter in case.drafters:
        by_width: dict[str, dict[str, float]] = {"step_ms": {}, "floor_step_ms": {}, "step_ms_p90": {}, "launches": {}}
        for width in WIDTHS:
            figures, width_floor = bench.measure(best, drafter=drafter, width=width, acceptance_length=1.0)
            by_width["step_ms"][str(width)] = figures.step_ms.median
            by_width["step_ms_p90"][str(width)] = figures.step_ms.p90
            by_width["floor_step_ms"][str(width)] = width_floor["floor_step_ms"]
            by_width["launches"][str(width)] = figures.launches_per_step
            print(f"{name} {drafter} width {width}: step {figures.step_ms.median:.3f} ms", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
        result.details[drafter] = by_width
        yield result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--out", type=Path, help="default: the folder of this kind of machine")
    parser.add_argument("--commit", help="where git is not there to ask")
    arguments = parser.parse_args()
    benches: dict[str, Bench] = {}
    for name in arguments.cases:
        case = CASES[name]
        if case.config not in benches:
            benches.clear()
            benches[case.config] = Bench(case.config)
        bench, started_s = benches[case.config], time.perf_counter()
        for result in (sweep if case.width is None else climb)(bench, name, case):
            bench.write(result, arguments.out, arguments.commit)
        print(f"{name}: {time.perf_counter() - started_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
