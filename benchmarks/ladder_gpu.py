"""What each switch of a step gives on one GPU, and what drafting costs by width: full-size models, random weights.

`PYTHONPATH=src python benchmarks/ladder_gpu.py CASE [CASE ...] [--out FOLDER]` writes `FOLDER/CASE.json` per case. The
rows of a step are independent random ids; drafts are made, thrown away and kept by lot.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import soloist.kernels.moe as kernels_moe
from decode_gpu import CONTEXT_LEN, built_in, commit_id, count_distinct_experts
from soloist.bench.ladder import RungSettings, ladder, step_fields
from soloist.bench.results import Result
from soloist.bench.steps import SpreadRows, StepFigures, measure_steps
from soloist.engine import Engine
from soloist.kernels.norm import rms_norm
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.roofline import measure_bandwidth
from soloist.runtime.graph import Execution
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from soloist.spec.draft_model import DraftModel
from soloist.spec.drafter import Drafter, NoDrafter
from soloist.spec.dspark import DSpark, make_random_dspark
from soloist.spec.ngram import PromptLookup
from soloist.spec.setup import DrafterSetup
from soloist.step_costs import measure

MAX_CONTEXT_LEN = CONTEXT_LEN + 4096
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
    original = kernels_moe.norm_linear

    def in_fp32(
        x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, *, out_dtype: torch.dtype
    ) -> torch.Tensor:
        # (E, D), made where the step runs first, before it is captured.
        copy = copies.get(weight.data_ptr())
        if copy is None:
            copy = copies[weight.data_ptr()] = weight.float()
        return F.linear(rms_norm(x, norm, eps).float(), copy).to(out_dtype)  # (T, E)

    kernels_moe.norm_linear = in_fp32
    try:
        yield
        assert copies, "no router was called"
    finally:
        kernels_moe.norm_linear = original


class Bench:
    """One model on the GPU, and what its steps are measured with."""

    def __init__(self, config: str, *, device: str = "cuda", context_len: int = CONTEXT_LEN) -> None:
        started_s = time.perf_counter()
        self.device, self.context_len = torch.device(device), context_len
        self.bandwidth = measure_bandwidth(self.device)
        self.name, self.target = config, load_model(built_in(config), device=self.device, weights="random")
        self._draft_model: CausalLM | None = None
        print(f"{config}: loaded in {time.perf_counter() - started_s:.1f} s; {self.bandwidth:.0f} GB/s", flush=True)

    def make_drafter(self, name: str, width: int) -> tuple[Drafter, float]:
        """Make a drafter for steps of `width` rows; give also the bytes it reads for a step."""
        setup = DrafterSetup(
            target=self.target,
            max_context_len=MAX_CONTEXT_LEN,
            num_tokens=self.target.config.vocab_size,
            max_width=width,
        )
        if name == "ngram":
            lookup = PromptLookup(max_context_len=MAX_CONTEXT_LEN, max_drafts=width - 1, device=self.device)
            return lookup, 0.0
        if name == "dspark":
            dspark = make_random_dspark(setup)
            assert isinstance(dspark, DSpark)
            return dspark, dspark.model.read_bytes(self.context_len, width - 1)
        if self._draft_model is None:
            config = built_in("qwen2.5-coder-0.5b-instruct")
            self._draft_model = load_model(config, device=self.device, weights="random")
        draft = DraftModel(
            self._draft_model,
            max_context_len=MAX_CONTEXT_LEN,
            num_tokens=setup.num_tokens,
            max_drafts=width - 1,
        )
        # One pass over what is unread, and one for each draft behind the first.
        return draft, (width - 1) * self._draft_model.footprint.step_bytes(1, self.context_len).total

    def measure(
        self,
        execution: Execution,
        *,
        drafter: str | None = None,
        width: int = 1,
        acceptance_length: float | None = None,
        is_adaptive: bool = False,
        params: SamplingParams | None = None,
    ) -> tuple[StepFigures, dict[str, Any]]:
        """Measure one form of the step; give also its floor."""
        inner, draft_bytes = (NoDrafter(), 0.0) if drafter is None else self.make_drafter(drafter, width)
        spread = SpreadRows(inner, self.target.config.vocab_size, self.device)
        runner = ModelRunner(
            self.target,
            max_context_len=MAX_CONTEXT_LEN,
            max_width=width,
            has_draft_probs=inner.has_draft_law,
            capture_layers=inner.capture_layers,
        )
        engine = Engine(
            runner,
            spread,
            eos_token_ids=(),
            execution=execution,
            simulated_acceptance=acceptance_length if drafter else None,
        )
        if is_adaptive:
            engine.adapt_width(measure(engine))
        figures = measure_steps(engine, context_len=self.context_len, params=params or SamplingParams())
        with torch.inference_mode():
            experts = count_distinct_experts(self.target, runner)
        mean_width = round(figures.mean_width)
        floor_ms = self.target.footprint.step_floor_ms(
            mean_width,
            self.context_len,
            bandwidth_gb_per_s=self.bandwidth,
            # Counted at the full width.
            distinct_experts=experts if mean_width == width else None,
            draft_bytes=draft_bytes * (mean_width - 1) / max(width - 1, 1),
        )
        floor = {"floor_step_ms": floor_ms, "share_of_floor": floor_ms / figures.step_ms.median}
        if experts is not None:
            floor["distinct_experts_by_width"] = {str(width): experts}
        return figures, floor

    def result(self, case: str, figures: StepFigures, floor: dict[str, Any], **more: Any) -> Result:
        """Put one form of the step into the form that all results share."""
        return Result(
            case=case,
            model=self.name,
            device=torch.cuda.get_device_name(self.device),
            command=" ".join(["python", *sys.argv]),
            weights="random",
            dtype="bfloat16",
            context_len=self.context_len,
            bandwidth_gb_per_s=self.bandwidth,
            acceptance_length=figures.acceptance_length,
            tpot_ms_mean=figures.tpot_ms,
            step_ms_median=figures.step_ms.median,
            step_ms_p10=figures.step_ms.p10,
            step_ms_p90=figures.step_ms.p90,
            details={
                "step_ms_range": figures.step_ms_range,
                "mean_width": figures.mean_width,
                "programmatic_edges": figures.programmatic_edges,
            },
            **step_fields(figures),
            **floor,
            **more,
        )


def climb(bench: Bench, name: str, case: Case) -> Iterator[Result]:
    """Measure every rung, then what stands beside them; gives what is measured so far."""
    (drafter,), width = case.drafters, case.width
    assert width is not None
    settings = ladder(
        has_experts=bench.target.footprint.num_experts > 0, run_ahead=2, draft=f"{drafter}", is_adaptive=True
    )
    rungs = []
    for rung in settings:
        figures, floor = measure_rung(bench, rung, drafter, case)
        rungs.append(
            bench.result(
                rung.switch,
                figures,
                floor,
                width=width if rung.has_draft else 1,
                acceptance_simulated=rung.has_draft,
            )
        )
        print(
            f"{name} {rung.switch}: step {figures.step_ms.median:.3f} ms, TPOT {figures.tpot_ms:.3f}, floor"
            f" {floor['share_of_floor']:.0%}, {figures.launches_per_step} launches, idle {figures.idle_share:.2%},"
            f" gaps {figures.gap_share}, host {figures.host_us_per_step:.0f} us, {figures.syncs_per_step:.2f} waits,"
            f" range {figures.step_ms_range}",
            flush=True,
        )
        # A graph and its memory belong to one rung.
        gc.collect()
        torch.cuda.empty_cache()
    last = bench.result(name, figures, floor, width=width, acceptance_simulated=True, rungs=tuple(rungs))
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


def measure_rung(bench: Bench, rung: RungSettings, drafter: str, case: Case) -> tuple[StepFigures, dict[str, Any]]:
    """Measure the step of one rung."""
    assert rung.execution is not None
    if not rung.has_draft:
        return bench.measure(rung.execution)
    assert case.width is not None
    return bench.measure(
        rung.execution,
        drafter=drafter,
        width=case.width,
        acceptance_length=case.acceptance_length,
        is_adaptive=rung.is_adaptive,
    )


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
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--commit", default=commit_id(), help="where git is not there to ask")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    benches: dict[str, Bench] = {}
    for name in arguments.cases:
        case = CASES[name]
        if case.config not in benches:
            benches.clear()
            benches[case.config] = Bench(case.config)
        bench, started_s = benches[case.config], time.perf_counter()
        for result in (sweep if case.width is None else climb)(bench, name, case):
            text = json.dumps(result.to_json() | {"commit": arguments.commit}, indent=1)
            (arguments.out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{name}: {time.perf_counter() - started_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
