"""Choose the launch settings of the dense step's kernels on a GPU, by themselves and within a whole step.

`PYTHONPATH=src python benchmarks/tune_dense.py` prints what every other setting takes beside those in use, and the best
ones as a JSON object in its last line. What the settings in use take is measured by `kernels.py`.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

import torch

from chains import rand, time_chain
from dense_maps import BF16, EPS, PROBLEMS, Problem, Weights, apply, short
from kernel_rows import CONTEXT_LEN
from kernels_dense import NUM_GROUPS, NUM_HEADS, NUM_LAYERS, AttentionInputs
from soloist.kernels import attention_triton, linear_triton
from soloist.kernels.attention_triton import SplitSettings
from soloist.kernels.compile_ahead import compiling_ahead
from soloist.kernels.linear_triton import StripSettings

# The linear maps of one layer, in the order in which their settings are chosen.
STEP_ORDER = ("qwen gate_up", "qwen down", "qwen qkv", "qwen o")
SPLITS = attention_triton.settings_for(NUM_GROUPS)
OTHER_SPLITS = (
    replace(SPLITS, stages=2),
    replace(SPLITS, splits=32),
    replace(SPLITS, block_s=128),
    replace(SPLITS, splits=128),
)
PROMPT_BLOCKS = ((128, 128), (128, 64))


def make_inputs(num_layers: int = NUM_LAYERS) -> AttentionInputs:
    return AttentionInputs(16, num_layers, context_len=CONTEXT_LEN, room=256)


def attend(inputs: AttentionInputs, layer: int, settings: SplitSettings, T: int) -> torch.Tensor:
    """Launch a step's attention with the settings that are tried."""
    i = inputs
    return attention_triton.attend_step(
        i.qkv[:T], i.k[layer], i.v[layer], i.context_len, i.cos, i.sin, NUM_HEADS, None, None, EPS, settings
    )


def compile_all(launches: Iterable[Callable[[], object]]) -> None:
    """Fill Triton's cache, side by side."""
    start_s, num_launches = time.perf_counter(), 0
    with compiling_ahead(os.cpu_count() or 1):
        for launch in launches:
            launch()
            num_launches += 1
    print(f"compiled {num_launches} launches in {time.perf_counter() - start_s:.0f} s", flush=True)


def linear_launches(problem: Problem, all_settings: Iterable[StripSettings]) -> list[Callable[[], object]]:
    """Launches of one linear map with each of some settings, at the least and the largest width."""
    p = problem
    num_outputs = p.O // 2 if p.kind == "swiglu" else p.O
    tensors = [torch.empty(shape, dtype=BF16, device="cuda") for shape in ((p.I,), (p.O, p.I), (16, num_outputs))]
    x = torch.empty(16, p.I, dtype=BF16, device="cuda")
    norm, weight, residual = tensors
    return [
        lambda s=s, T=T: apply(p, s, x[:T], norm, weight, residual[:T])  # type: ignore[misc]
        for s in all_settings
        for T in (1, 16)
    ]


def attention_launches(all_splits: Iterable[SplitSettings]) -> list[Callable[[], object]]:
    """Launches of a step's attention with each of some settings."""
    inputs = make_inputs(1)
    return [
        lambda s=s, T=T: attend(inputs, 0, s, T)  # type: ignore[misc]
        for s in all_splits
        for T in (1, 2, 4, 9, 16)
    ]


class QwenStep:
    """All launches of one decode or verify step of Qwen2.5-1.5B but the embedding."""

    def __init__(self, best: dict[str, StripSettings], splits: SplitSettings) -> None:
        self.problems = {p.name.split()[1]: p for p in PROBLEMS if p.name.startswith("qwen")}
        self.best, self.splits = best, splits
        self.layers = [
            {n: rand(p.O, p.I, scale=p.I**-0.5) for n, p in self.problems.items() if n != "head"}
            | {"norm_1": rand(1536) + 1, "norm_2": rand(1536) + 1, "bias": rand(2048)}
            for _ in range(NUM_LAYERS)
        ]
        self.head = rand(self.problems["head"].O, 1536, scale=0.02)
        self.norm = rand(1536) + 1
        self.inputs = make_inputs()
        self.x = rand(16, 1536)

    def run(self, T: int) -> torch.Tensor:
        """Launch it with T rows."""
        x, i, chosen = self.x[:T], self.inputs, {n: self.best[p.name] for n, p in self.problems.items()}
        for n, w in enumerate(self.layers):
            qkv = linear_triton.linear_step(x, w["norm_1"], EPS, w["qkv"], w["bias"], None, BF16, chosen["qkv"])
            heads = attention_triton.attend_step(
                qkv, i.k[n], i.v[n], i.context_len, i.cos, i.sin, NUM_HEADS, None, None, EPS, self.splits
            )
            x = linear_triton.linear_step(heads, None, 0.0, w["o"], None, x, BF16, chosen["o"])
            h = linear_triton.swiglu_step(x, w["norm_2"], EPS, w["gate_up"], None, chosen["gate_up"])
            x = linear_triton.linear_step(h, None, 0.0, w["down"], None, x, BF16, chosen["down"])
        return linear_triton.argmax_step(x, self.norm, EPS, self.head, self.problems["head"].O, chosen["head"])[0]


def tune_map(problem: Problem, weights: Weights) -> StripSettings:
    """Time all settings at T = 1 and T = 16 and give the best of both."""
    times: dict[StripSettings, list[float]] = {}
    reference = weights.reference(16)
    for settings in (problem.settings, *problem.others):
        error = max(weights.error(T, settings, reference) for T in (1, 16))
        if not error < 0.02:
            print(f"  WRONG {problem.name} {settings}: {error:.3g}")
            continue
        times[settings] = [time_chain(weights.calls(T, settings), 5)[0] for T in (1, 16)]
    fastest = [min(t[i] for t in times.values()) for i in range(2)]
    ranked = sorted(times, key=lambda s: times[s][0] / fastest[0] + times[s][1] / fastest[1])
    for s in ranked:
        print(f"  {problem.name:14} {short(s)!s:32} T=1 {times[s][0]:7.2f} us  T=16 {times[s][1]:7.2f} us")
    return ranked[0]


def tune_attention() -> None:
    """Time a step's attention with every cut, and a prompt's with every tile."""
    inputs = make_inputs()
    for splits in (SPLITS, *OTHER_SPLITS):
        for T in (1, 16):
            calls = [lambda i=i: attend(inputs, i, splits, T) for i in range(NUM_LAYERS)]  # type: ignore[misc]
            print(f"  attention {splits} T={T:<2d} {time_chain(calls, 5)[0]:7.2f} us")
    p = AttentionInputs(CONTEXT_LEN, 1, context_len=0, room=CONTEXT_LEN)
    args = (p.qkv, p.k[0], p.v[0], p.context_len, p.cos, p.sin, NUM_HEADS, None, None, EPS)
    for block_t, block_s in PROMPT_BLOCKS:
        us, _ = time_chain([lambda: attention_triton.attend_prompt(*args, block_t=block_t, block_s=block_s)], 5)
        print(f"  prompt of {CONTEXT_LEN}, {block_t} x {block_s}: {us:.0f} us", flush=True)


class StepTuner:
    """Keeps the settings with which a whole step is fastest at widths 1 and 16 together."""

    def __init__(self, step: QwenStep) -> None:
        self.step, self.score = step, float("inf")

    def run(self) -> None:
        """Choose each operator's settings, one after the other."""
        for name in STEP_ORDER:
            problem = next(p for p in PROBLEMS if p.name == name)
            for settings in (problem.settings, *problem.others):
                self._try(f"{name} {short(settings)}", self.step.best | {name: settings}, self.step.splits)
        for splits in OTHER_SPLITS:
            self._try(str(splits), self.step.best, splits)

    def _try(self, name: str, best: dict[str, StripSettings], splits: SplitSettings) -> None:
        step = self.step
        old = step.best, step.splits
        step.best, step.splits = best, splits
        times = [time_chain([lambda T=T: step.run(T)], 5)[0] for T in (1, 16)]  # type: ignore[misc]
        is_better = sum(times) < self.score
        print(f"  step with {name:60} T=1 {times[0]:7.1f} T=16 {times[1]:7.1f} {'*' if is_better else ''}", flush=True)
        if is_better:
            self.score = sum(times)
        else:
            step.best, step.splits = old


def main() -> None:
    torch.manual_seed(0)
    for p in PROBLEMS:
        compile_all(linear_launches(p, (p.settings, *p.others)))
    compile_all(attention_launches((SPLITS, *OTHER_SPLITS)))
    step = QwenStep({p.name: p.settings for p in PROBLEMS}, SPLITS)
    for p in PROBLEMS:
        best = tune_map(p, Weights(p))
        if p.name not in STEP_ORDER:
            step.best[p.name] = best
    tune_attention()
    StepTuner(step).run()
    print(json.dumps({name: asdict(s) for name, s in step.best.items()} | {"attention": asdict(step.splits)}))


if __name__ == "__main__":
    main()
