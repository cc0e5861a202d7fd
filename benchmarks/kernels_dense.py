"""Time the dense step's kernels by width against the bytes they read, after checking them against fp32.

Run on a CUDA machine: `PYTHONPATH=src python3 benchmarks/kernels_dense.py [--tune] [--json FILE]`. Every call of a
captured chain reads other weights, more than 200 MB in all, so nothing comes out of the L2. `--tune` also times other
launch settings.
"""

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton

from chains import rand, time_chain
from dense_maps import BF16, EPS, PROBLEMS, Problem, Weights, apply, short
from soloist.kernels import attention_triton, linear_triton
from soloist.kernels.attention_triton import SplitSettings
from soloist.kernels.compile_ahead import compiling_ahead
from soloist.kernels.launch import programmatic_launch
from soloist.kernels.linear_triton import StripSettings
from soloist.roofline import measure_bandwidth

WIDTHS = (1, 2, 4, 8, 9, 16)
CONTEXT_LEN = 8192

QWEN_HEADS, QWEN_GROUPS, HEAD_DIM, QWEN_LAYERS = 12, 2, 128, 28
# The linear maps of one layer, in the order in which their settings are chosen.
STEP_ORDER = ("qwen gate_up", "qwen down", "qwen qkv", "qwen o")
SPLITS = attention_triton.settings_for(QWEN_GROUPS)
OTHER_SPLITS = (
    replace(SPLITS, stages=2),
    replace(SPLITS, splits=32),
    replace(SPLITS, block_s=128),
    replace(SPLITS, splits=128),
)
PROMPT_BLOCKS = ((128, 128), (128, 64))


class AttentionInputs:
    """Caches of many layers and one step's rows, at Qwen2.5-1.5B's shapes."""

    def __init__(self, T: int, num_layers: int, context_len: int = CONTEXT_LEN) -> None:
        H, G, K = QWEN_HEADS, QWEN_GROUPS, HEAD_DIM
        S = context_len + 256
        shape = (num_layers, G, S, K)
        self.k, self.v, self.qkv = rand(*shape), rand(*shape), rand(T, (H + 2 * G) * K)
        self.cos, self.sin = torch.ones(S, K // 2, device="cuda"), torch.zeros(S, K // 2, device="cuda")
        self.context_len = torch.tensor(context_len, dtype=torch.int32, device="cuda")

    def reference(self, T: int) -> torch.Tensor:
        """Plain attention in fp32 of layer 0, without the identity rotation."""
        H, G, K = QWEN_HEADS, QWEN_GROUPS, HEAD_DIM
        n = int(self.context_len)
        q, k, v = self.qkv[:T].float().view(T, -1, K).split((H, G, G), dim=1)
        keys = torch.cat([self.k[0, :, :n].float(), k.transpose(0, 1)], 1).repeat_interleave(H // G, 0)
        values = torch.cat([self.v[0, :, :n].float(), v.transpose(0, 1)], 1).repeat_interleave(H // G, 0)
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) * K**-0.5
        scores.masked_fill_(torch.ones(T, n + T, dtype=torch.bool, device="cuda").triu(n + 1), -torch.inf)
        return (scores.softmax(-1) @ values).transpose(0, 1).reshape(T, -1)


def attend(inputs: AttentionInputs, layer: int, settings: SplitSettings, T: int | None = None) -> torch.Tensor:
    i = inputs
    return attention_triton.attend_step(
        i.qkv[:T], i.k[layer], i.v[layer], i.context_len, i.cos, i.sin, QWEN_HEADS, None, None, EPS, settings
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
    inputs = AttentionInputs(16, 1)
    return [
        lambda s=s, T=T: attend(inputs, 0, s, T)  # type: ignore[misc]
        for s in all_splits
        for T in (1, 2, 4, 9, 16)
    ]


class Bench:
    """All measurements of one run."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self.results: dict[str, Any] = {"bandwidth_gb_per_s": bandwidth, "linear": [], "attention": [], "step": []}

    def line(self, name: str, T: int, us: float, spread: float, num_bytes: float, note: str = "") -> dict[str, Any]:
        speed = num_bytes / us / 1e3
        share = speed / self.bandwidth
        print(f"{name:14} T={T:2} {us:8.2f} us +-{spread:5.2f} {speed:6.0f} GB/s {share:5.0%}  {note}", flush=True)
        return {
            "name": name,
            "width": T,
            "us": us,
            "spread_us": spread,
            "gb_per_s": speed,
            "share": share,
            "note": note,
        }

    def tune(self, problem: Problem, weights: Weights) -> StripSettings:
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
            key = short(s)
            print(f"  {problem.name:14} {key!s:32} T=1 {times[s][0]:7.2f} us  T=16 {times[s][1]:7.2f} us")
            self.results["linear"].append({"name": problem.name, "settings": asdict(s), "us_1_16": times[s]})
        return ranked[0]

    def linear(self, problem: Problem, weights: Weights, settings: StripSettings) -> None:
        """Check and time one problem at every width, with and without PDL, beside cuBLAS."""
        reference = weights.reference(16)
        for T in WIDTHS:
            error = weights.error(T, settings, reference)
            assert error < 0.02, f"{problem.name} at width {T}: error {error}"
            us, spread = time_chain(weights.calls(T, settings))
            with programmatic_launch(False):
                us_plain, _ = time_chain(weights.calls(T, settings))
            note = f"no pdl {us_plain:.2f}, error {error:.1e}"
            if T in (1, 16):
                x = weights.x[:T]
                cublas = [lambda w=w: F.linear(x, w) for w in weights.copies]  # type: ignore[misc]
                note += f", cublas {time_chain(cublas * 4 if len(cublas) < 4 else cublas)[0]:.2f}"
            self.results["linear"].append(self.line(problem.name, T, us, spread, problem.weight_bytes, note))

    def attention(self, settings: tuple[SplitSettings, ...]) -> None:
        inputs = AttentionInputs(16, QWEN_LAYERS)
        for T, s in itertools.product((1, 4, 9, 16), settings):
            reference = inputs.reference(T)
            error = ((attend(inputs, 0, s, T).float() - reference).norm() / reference.norm()).item()
            assert error < 0.02, f"attention {s} at width {T}: error {error}"
            calls = [lambda i=i: attend(inputs, i, s, T) for i in range(QWEN_LAYERS)]  # type: ignore[misc]
            us, spread = time_chain(calls)
            note = f"splits {s.splits} block {s.block_s} stages {s.stages}, error {error:.1e}"
            num_bytes = 4 * QWEN_GROUPS * HEAD_DIM * CONTEXT_LEN
            self.results["attention"].append(self.line("attention 8k", T, us, spread, num_bytes, note))

    def prompt(self) -> None:
        """Flash attention of 8192 tokens, one layer, beside PyTorch's."""
        inputs = AttentionInputs(8192, 1, context_len=0 + 8192)
        inputs.context_len.zero_()
        H, G, K = QWEN_HEADS, QWEN_GROUPS, HEAD_DIM
        args = (inputs.qkv, inputs.k[0], inputs.v[0], inputs.context_len, inputs.cos, inputs.sin, H, None, None, EPS)
        q, k, v = inputs.qkv.view(8192, -1, K).transpose(0, 1)[None].split((H, G, G), dim=1)
        ref = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        for block_t, block_s in PROMPT_BLOCKS:
            out = attention_triton.attend_prompt(*args, block_t=block_t, block_s=block_s)
            error = ((out.view(8192, H, K).transpose(0, 1) - ref[0]).float().norm() / ref.float().norm()).item()
            us, _ = time_chain([lambda: attention_triton.attend_prompt(*args, block_t=block_t, block_s=block_s)])
            tflops = 2 * 8192 * 8192 * H * K / us / 1e6
            print(f"prompt 8192     {block_t} x {block_s}: {us:.0f} us = {tflops:.0f} TFLOP/s, error {error:.1e}")
        us, _ = time_chain([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)])
        print(f"prompt 8192     PyTorch: {us:.0f} us", flush=True)

    def step_tune(self, step: "QwenStep") -> None:
        """Choose each operator's settings within the whole step."""
        for name in STEP_ORDER:
            problem = next(p for p in PROBLEMS if p.name == name)
            for settings in (problem.settings, *problem.others):
                self.try_settings(step, f"{name} {short(settings)}", step.best | {name: settings}, step.splits)
        for splits in OTHER_SPLITS:
            self.try_settings(step, str(splits), step.best, splits)

    def step(self, step: "QwenStep") -> None:
        """Time a whole step at every width."""
        for T in WIDTHS:
            us, spread = time_chain([lambda T=T: step.run(T)])  # type: ignore[misc]
            with programmatic_launch(False):
                us_plain, _ = time_chain([lambda T=T: step.run(T)])  # type: ignore[misc]
            note = f"no pdl {us_plain:.1f}"
            self.results["step"].append(self.line("qwen step 8k", T, us, spread, step.num_bytes, note))

    def try_settings(self, step: "QwenStep", name: str, best: dict[str, StripSettings], splits: SplitSettings) -> None:
        """Keep settings that make the step faster at widths 1 and 16 together."""
        old = step.best, step.splits
        step.best, step.splits = best, splits
        times = [time_chain([lambda T=T: step.run(T)], 5)[0] for T in (1, 16)]  # type: ignore[misc]
        score = sum(times)
        is_better = score < step.score
        print(f"  step with {name:60} T=1 {times[0]:7.1f} T=16 {times[1]:7.1f} {'*' if is_better else ''}", flush=True)
        if is_better:
            step.score = score
        else:
            step.best, step.splits = old


class QwenStep:
    """All launches of one decode or verify step of Qwen2.5-1.5B but the embedding."""

    def __init__(self, best: dict[str, StripSettings], splits: SplitSettings) -> None:
        self.problems = {p.name.split()[1]: p for p in PROBLEMS if p.name.startswith("qwen")}
        self.best, self.splits, self.score = best, splits, math.inf
        self.layers = [
            {n: rand(p.O, p.I, scale=p.I**-0.5) for n, p in self.problems.items() if n != "head"}
            | {"norm_1": rand(1536) + 1, "norm_2": rand(1536) + 1, "bias": rand(2048)}
            for _ in range(QWEN_LAYERS)
        ]
        self.head = rand(self.problems["head"].O, 1536, scale=0.02)
        self.norm = rand(1536) + 1
        self.inputs = AttentionInputs(16, QWEN_LAYERS)
        self.x = rand(16, 1536)
        self.num_bytes = (
            sum(p.weight_bytes * (1 if n == "head" else QWEN_LAYERS) for n, p in self.problems.items())
            + QWEN_LAYERS * 4 * QWEN_GROUPS * HEAD_DIM * CONTEXT_LEN
        )

    def run(self, T: int) -> torch.Tensor:
        x, i, chosen = self.x[:T], self.inputs, {n: self.best[p.name] for n, p in self.problems.items()}
        for n, w in enumerate(self.layers):
            qkv = linear_triton.linear_step(x, w["norm_1"], EPS, w["qkv"], w["bias"], None, BF16, chosen["qkv"])
            heads = attention_triton.attend_step(
                qkv, i.k[n], i.v[n], i.context_len, i.cos, i.sin, QWEN_HEADS, None, None, EPS, self.splits
            )
            x = linear_triton.linear_step(heads, None, 0.0, w["o"], None, x, BF16, chosen["o"])
            h = linear_triton.swiglu_step(x, w["norm_2"], EPS, w["gate_up"], None, chosen["gate_up"])
            x = linear_triton.linear_step(h, None, 0.0, w["down"], None, x, BF16, chosen["down"])
        return linear_triton.argmax_step(x, self.norm, EPS, self.head, self.problems["head"].O, chosen["head"])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="time other launch settings too")
    out = os.environ.get("OUT")
    parser.add_argument("--json", type=Path, default=Path(out) / "kernels_dense.json" if out else None)
    parser.add_argument("--commit", default="", help="of the tree that is measured, where git is not there to ask")
    args = parser.parse_args()

    splits = (SPLITS, *OTHER_SPLITS) if args.tune else (SPLITS,)
    for p in PROBLEMS:
        compile_all(linear_launches(p, (p.settings, *(p.others if args.tune else ()))))
    compile_all(attention_launches(splits))
    bench = Bench(measure_bandwidth(torch.device("cuda")))
    print(f"{torch.cuda.get_device_name()}: read bandwidth {bench.bandwidth:.0f} GB/s", flush=True)
    step = QwenStep({p.name: p.settings for p in PROBLEMS}, SPLITS)
    if args.tune:
        for p in PROBLEMS:
            best = bench.tune(p, Weights(p))
            if p.name not in STEP_ORDER:
                step.best[p.name] = best
        bench.step_tune(step)
    with programmatic_launch(False):
        for p in PROBLEMS:
            compile_all(linear_launches(p, (step.best[p.name],)))
        compile_all(attention_launches((step.splits,)))
    bench.step(step)
    for p in PROBLEMS:
        weights = Weights(p)
        bench.linear(p, weights, step.best[p.name])
        del weights
    bench.attention(splits)
    bench.prompt()
    best = step.best
    results = bench.results | {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": args.commit,
        "best": {name: asdict(s) for name, s in best.items()},
    }
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
