"""One full-size model with random weights on a GPU, or a rank's part of it: its steps, their floor, drafts by name.

The rows of a step are independent random ids, so that routing spreads as uniform routing does, and the experts are
counted; drafts are made, then thrown away, and kept by lot where acceptance is simulated.
"""

import copy
import json
import statistics
import sys
import time
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import torch

import soloist.models.feed_forward as feed_forward
from soloist.bench.ladder import step_fields
from soloist.bench.results import Result, at_bandwidth, device_name, write_result
from soloist.bench.steps import SpreadRows, StepFigures, measure_steps
from soloist.engine import Engine
from soloist.kernels.allreduce import ALONE, TensorParallel
from soloist.kernels.moe import route_ref
from soloist.kernels.norm import rms_norm_ref
from soloist.models import load_model
from soloist.models.cache import StepKind
from soloist.models.causal_lm import CausalLM
from soloist.roofline import measure_bandwidth
from soloist.runtime.graph import Execution
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from soloist.spec.draft_model import DraftModel
from soloist.spec.drafter import Drafter, NoDrafter
from soloist.spec.dspark import make_random_dspark
from soloist.spec.dspark_config import random_config
from soloist.spec.mtp import load_mtp
from soloist.spec.ngram import PromptLookup
from soloist.spec.setup import DrafterSetup, DraftLayers
from soloist.step_costs import measure

# Tokens in the cache before a step.
CONTEXT_LEN = 8192
# Tokens of context behind those that are there before a step.
ROOM = 4096


def built_in(name: str) -> dict[str, Any]:
    """Read a packaged config."""
    return json.loads((files("soloist") / "configs" / f"{name}.json").read_text())


def count_distinct_experts(model: CausalLM, runner: ModelRunner) -> float | None:
    """Run one step's forward pass eagerly and count the experts that each layer reads: the mean."""
    counts: list[int] = []
    original = feed_forward.moe

    def counting(
        x: torch.Tensor, norm: torch.Tensor, eps: float, gate: torch.Tensor, bias: torch.Tensor, *args, **kwargs
    ):
        h = rms_norm_ref(x, norm, eps)
        chosen, _ = route_ref(h.float() @ gate.float().T, bias, args[4])
        counts.append(chosen.unique().numel())
        return original(x, norm, eps, gate, bias, *args, **kwargs)

    feed_forward.moe = counting
    try:
        width = runner.buffers.max_width
        for _ in range(4):
            ids = torch.randint(model.config.vocab_size, (width,), device=model.device)
            model.forward(ids, runner.cache, StepKind.DECODE if width == 1 else StepKind.VERIFY)
    finally:
        feed_forward.moe = original
    return statistics.mean(counts) if counts else None


def step_row(width: int, figures: StepFigures, floor: dict[str, Any]) -> dict[str, Any]:
    """Put down the steps of one width."""
    return {"width": width} | asdict(figures) | floor


def by_width(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Give the fields of a `Result` that sum rows up."""
    experts = [row["distinct_experts_by_width"] for row in rows if "distinct_experts_by_width" in row]
    return {
        "step_ms_by_width": {str(row["width"]): row["step_ms"]["median"] for row in rows},
        "floor_step_ms_by_width": {str(row["width"]): row["floor_step_ms"] for row in rows},
        "distinct_experts_by_width": {width: count for found in experts for width, count in found.items()},
    }


class Bench:
    """One model on a GPU, or a rank's part of it, and what its steps are measured with.

    Args:
        name: of the model.
        config: its config. None: the packaged one of that name.
        device: where it is.
        context_len: tokens in the cache before a step.
        room: tokens of context behind them.
        group: the ranks that share it.
    """

    def __init__(
        self,
        name: str,
        config: dict[str, Any] | None = None,
        *,
        device: str = "cuda",
        context_len: int = CONTEXT_LEN,
        room: int = ROOM,
        group: TensorParallel = ALONE,
    ) -> None:
        started_s = time.perf_counter()
        self.name, self.config, self.device, self.group = name, config, torch.device(device), group
        self.context_len, self.room, self.max_context_len = context_len, room, context_len + room
        # How ranks hold the layers of drafts that are made from now on.
        self.draft_layers: DraftLayers = "sharded"
        # What floors are priced with until they are written.
        self.bandwidth = measure_bandwidth(self.device)
        # All that this run has measured, behind every context; what it has written, by case, and with which of them.
        self._bandwidths = [self.bandwidth]
        self._written: dict[str, Result] = {}
        self._written_at = self.bandwidth
        self.target = load_model(config or built_in(name), device=self.device, weights="random", group=group)
        self._draft_model: CausalLM | None = None
        took_s, gib = time.perf_counter() - started_s, self.target.report.weight_bytes / 2**30
        self.say(f"{name}: {gib:.1f} GiB loaded in {took_s:.1f} s; {self.bandwidth:.0f} GB/s")

    def behind(self, context_len: int) -> Self:
        """Give the same model behind another context."""
        other = copy.copy(self)
        other.context_len, other.max_context_len = context_len, context_len + self.room
        return other

    def write(self, result: Result, folder: Path | None, commit: str | None) -> None:
        """Write a result with floors of the largest bandwidth of this run, and anew those of a smaller one.

        A measurement of the bandwidth may be disturbed; the memory is not.
        """
        self._bandwidths.append(measure_bandwidth(self.device))
        self._written[result.case] = result
        largest = max(self._bandwidths)
        is_larger, self._written_at = largest > self._written_at, largest
        for earlier in self._written.values() if is_larger else [result]:
            write_result(at_bandwidth(earlier, largest), folder, commit)

    def say(self, words: str) -> None:
        """Print, for all ranks once."""
        if self.group.rank == 0:
            print(words, flush=True)

    def check(self) -> None:
        """See whether every rank came to every exchange.

        Raises:
            RankLostError: one did not.
        """
        if self.group.mailboxes is not None:
            self.group.mailboxes.check()

    def make_drafter(self, name: str, width: int) -> Drafter:
        """Make a drafter for steps of `width` rows."""
        setup = DrafterSetup(
            target=self.target,
            max_context_len=self.max_context_len,
            num_tokens=self.target.config.vocab_size,
            max_width=width,
            draft_layers=self.draft_layers,
        )
        if name == "ngram":
            return PromptLookup(max_context_len=self.max_context_len, max_drafts=width - 1, device=self.device)
        if name == "dspark":
            # Blocks of the published sizes.
            return make_random_dspark(setup, random_config(self.target.config, block_size=15 if width > 9 else 8))
        if name == "mtp":
            return load_mtp(setup)
        if self._draft_model is None:
            config = built_in("qwen2.5-coder-0.5b-instruct")
            self._draft_model = load_model(config, device=self.device, weights="random")
        return DraftModel(
            self._draft_model,
            max_context_len=self.max_context_len,
            num_tokens=setup.num_tokens,
            max_drafts=width - 1,
        )

    def make_engine(
        self,
        execution: Execution,
        *,
        drafter: str | None = None,
        width: int = 1,
        acceptance_length: float | None = None,
    ) -> Engine:
        """Make an engine whose steps have random rows."""
        # On every rank the same.
        torch.manual_seed(0)
        inner: Drafter = NoDrafter()
        # Without a drafter rows are filled all the same.
        inner.max_drafts = width - 1
        if drafter is not None:
            inner = self.make_drafter(drafter, width)
        spread = SpreadRows(inner, self.target.config.vocab_size, self.device)
        runner = ModelRunner(
            self.target,
            max_context_len=self.max_context_len,
            max_width=width,
            has_draft_probs=inner.has_draft_law,
            capture_layers=inner.capture_layers,
        )
        return Engine(
            runner,
            spread,
            eos_token_ids=(),
            execution=execution,
            simulated_acceptance=acceptance_length if drafter else None,
        )

    def measure(
        self,
        execution: Execution,
        *,
        drafter: str | None = None,
        width: int = 1,
        acceptance_length: float | None = None,
        is_adaptive: bool = False,
        params: SamplingParams | None = None,
        repeats: int = 3,
        most_steps: int | None = None,
    ) -> tuple[StepFigures, dict[str, Any]]:
        """Measure one form of the step; give also its floor."""
        self._bandwidths.append(measure_bandwidth(self.device))
        engine = self.make_engine(execution, drafter=drafter, width=width, acceptance_length=acceptance_length)
        if is_adaptive:
            engine.adapt_width(measure(engine))
        limits = {"repeats": repeats} | ({} if most_steps is None else {"most_steps": most_steps})
        figures = measure_steps(engine, context_len=self.context_len, params=params or SamplingParams(), **limits)
        with torch.inference_mode():
            experts = count_distinct_experts(self.target, engine.runner)
        mean_width = round(figures.mean_width)
        # Counted at the full width.
        known = experts if mean_width == width else None
        floor_ms = self.target.footprint.step_floor_ms(
            mean_width,
            self.context_len,
            bandwidth_gb_per_s=self.bandwidth,
            distinct_experts=known,
            draft_bytes=engine.drafter.read_bytes(mean_width, self.context_len, distinct_experts=known),
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
            device=device_name(self.device),
            tensor_parallel_size=self.group.size,
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
