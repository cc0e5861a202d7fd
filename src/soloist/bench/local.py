"""Measuring this engine: requests under a stopwatch, cold and warm apart, against the floor of the same run."""

import gc
import itertools
import resource
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from soloist.answer import Stream
from soloist.bench.figures import RequestFigures, Spread, Summary, summarise
from soloist.bench.results import device_name, gpu_state
from soloist.bench.steps import StepFigures, has_room, measure_steps
from soloist.bench.workloads import BenchPrompt, Workload
from soloist.llm import LLM
from soloist.roofline import measure_bandwidth
from soloist.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What a step must move, and the time it takes at the bandwidth measured in the same run."""

    bandwidth_gb_per_s: float
    step_bytes: float
    step_ms: float
    # Of the measured step: by the GPU's clock, on a CPU between chunks, else by the mean over whole answers.
    share: float
    # Positions in the cache, and rows of a step, both means.
    context_len: int
    width: int

    def at(self, bandwidth_gb_per_s: float) -> Self:
        """Give the floor at a larger bandwidth."""
        factor = self.bandwidth_gb_per_s / bandwidth_gb_per_s
        return replace(
            self, bandwidth_gb_per_s=bandwidth_gb_per_s, step_ms=self.step_ms * factor, share=self.share * factor
        )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes held."""

    weight_bytes: int
    cache_bytes: int
    # Of the process on a CPU, of PyTorch on a GPU.
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One configuration under one workload."""

    # The switch that makes it differ from the rung before; empty: the first.
    name: str
    model: str
    device: str
    dtype: str
    drafter: str
    # Whether drafts were kept by lot.
    is_simulated: bool
    num_threads: int | None
    # That share the model.
    num_ranks: int
    # The first request after loading, and everything behind it.
    cold: RequestFigures
    warm: Summary
    floor: Floor
    # By the GPU's clock; None on a CPU, with several ranks, and where the context has no room for them.
    steps: StepFigures | None
    # From step to step; None on a GPU without `steps`: what it runs ahead reaches the host in bunches.
    step_ms: Spread | None
    memory: Memory
    # Clocks, power and temperature behind the last request.
    gpus: list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One step of a ladder: a switch, and what loads the engine with it."""

    name: str
    load: Callable[[], LLM]


def run_request(llm: LLM, prompt: BenchPrompt, workload: Workload) -> RequestFigures:
    """Answer one prompt under a stopwatch; what the engine kept of earlier prompts is forgotten first."""
    if llm.engine.prefixes is not None:
        llm.engine.prefixes.clear()
    params = SamplingParams(max_tokens=workload.max_tokens, ignore_eos=workload.ignore_eos)
    arrivals_s = []
    start_s = time.perf_counter()
    stream = _start(llm, prompt, params)
    for delta in stream:
        now_s = time.perf_counter()
        # The last delta may only say why the answer ended.
        if delta.token_ids or delta.text:
            arrivals_s.append(now_s)
    # The end token alone shows nothing.
    arrivals_s = arrivals_s or [time.perf_counter()]
    stats = stream.stats
    return RequestFigures(
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        completion_tokens=stats.completion_tokens,
        ttft_s=arrivals_s[0] - start_s,
        e2e_s=arrivals_s[-1] - start_s,
        chunk_gaps_s=tuple(b - a for a, b in itertools.pairwise(arrivals_s)),
        forwards=stats.forwards,
        drafted=stats.drafted,
        accepted=stats.accepted,
    )


def _start(llm: LLM, prompt: BenchPrompt, params: SamplingParams) -> Stream:
    if llm.tokenizer is None:
        # A config alone: any ids will do, as long as they repeat where the text does.
        vocab_size = llm.engine.runner.buffers.num_tokens
        return llm.stream([zlib.crc32(word.encode()) % vocab_size for word in prompt.text.split()], params)
    if prompt.is_chat:
        return llm.stream_chat([{"role": "user", "content": prompt.text}], params)
    return llm.stream(prompt.text, params)


def measure(llm: LLM, workload: Workload, *, repeats: int, name: str = "") -> Measurement:
    """Run a workload: one cold request, then `repeats` times every prompt.

    Args:
        llm: fresh, or the cold request is none.
        workload: what to ask.
        repeats: at least 1; each has its own variants of the prompts.
        name: of the rung.
    """
    device = llm.engine.runner.model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    cold = run_request(llm, workload.repeat(0)[0], workload)
    warm = summarise(
        [[run_request(llm, prompt, workload) for prompt in workload.repeat(i + 1)] for i in range(repeats)]
    )
    gpus = gpu_state() if device.type == "cuda" else []
    steps = _steps(llm, warm)
    step_ms = warm.chunk_gap_ms if device.type == "cpu" else None
    if steps is not None:
        step_ms = steps.step_ms
    return Measurement(
        name=name,
        model=llm.name,
        device=device_name(device),
        dtype=str(llm.engine.runner.model.dtype).removeprefix("torch."),
        drafter=llm.engine.drafter.name,
        is_simulated=llm.engine.is_simulated,
        num_threads=torch.get_num_threads() if device.type == "cpu" else None,
        num_ranks=llm.engine.runner.model.group.size,
        cold=cold,
        warm=warm,
        floor=_floor(llm, warm, steps, step_ms),
        steps=steps,
        step_ms=step_ms,
        memory=_memory(llm),
        gpus=gpus,
    )


def _floor(llm: LLM, warm: Summary, steps: StepFigures | None, step_ms: Spread | None) -> Floor:
    """Price the steps that were measured: those by the GPU's clock begin behind the prompt."""
    model = llm.engine.runner.model
    bandwidth = measure_bandwidth(model.device)
    width, context_len = round(warm.mean_width or 1), warm.prompt_tokens + warm.completion_tokens // 2
    if steps is not None:
        width, context_len = round(steps.mean_width), warm.prompt_tokens
    draft_bytes = llm.engine.drafter.read_bytes(width, context_len)
    step_bytes = model.footprint.step_bytes(width, context_len).total + draft_bytes
    floor_ms = model.footprint.step_floor_ms(width, context_len, bandwidth_gb_per_s=bandwidth, draft_bytes=draft_bytes)
    took_ms = warm.tpot_ms.mean * (warm.acceptance_length or 1) if step_ms is None else step_ms.median
    return Floor(
        bandwidth_gb_per_s=bandwidth,
        step_bytes=step_bytes,
        step_ms=floor_ms,
        share=floor_ms / took_ms,
        context_len=context_len,
        width=width,
    )


def _steps(llm: LLM, warm: Summary) -> StepFigures | None:
    model = llm.engine.runner.model
    # Ranks take requests together, and nothing else.
    if model.device.type != "cuda" or model.group.size > 1 or not has_room(llm.engine, warm.prompt_tokens):
        return None
    with llm.engine.alone():
        return measure_steps(llm.engine, context_len=warm.prompt_tokens, repeats=1)


def _memory(llm: LLM) -> Memory:
    model, footprint = llm.engine.runner.model, llm.engine.runner.model.footprint
    cache_bytes = llm.max_context_len * footprint.kv_bytes_per_position
    if model.device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(model.device)
    else:
        # In kB, but on macOS.
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Memory(
        weight_bytes=footprint.weight_bytes,
        cache_bytes=cache_bytes + footprint.state_bytes + footprint.conv_state_bytes,
        peak_bytes=peak_bytes,
    )


def measure_ladder(
    rungs: Sequence[Rung], make_workload: Callable[[LLM], Workload], *, repeats: int
) -> list[Measurement]:
    """Measure configurations one after the other; each is gone before the next is loaded.

    Args:
        rungs: in the order in which switches are added.
        make_workload: gives what to ask, once there is a model that can count tokens.
        repeats: as in `measure`.
    """
    measurements = []
    for rung in rungs:
        llm = rung.load()
        measurements.append(measure(llm, make_workload(llm), repeats=repeats, name=rung.name))
        del llm
        # Loading for a GPU took it out of the collector's sight.
        gc.unfreeze()
        gc.collect()
    # One machine has one bandwidth: the largest that was seen, also for the rungs before it.
    bandwidth = max(measurement.floor.bandwidth_gb_per_s for measurement in measurements)
    return [replace(measurement, floor=measurement.floor.at(bandwidth)) for measurement in measurements]
