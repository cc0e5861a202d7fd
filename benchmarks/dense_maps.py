"""The linear maps of dense models that are timed: shapes, launch settings, inputs, and what each should give."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from chains import rand
from soloist.kernels import linear_triton
from soloist.kernels.head import norm_argmax
from soloist.kernels.linear import linear_residual, norm_linear, norm_swiglu
from soloist.kernels.linear_triton import StripSettings

COLD_BYTES = 200e6
EPS = 1e-6
BF16 = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One linear map of a model."""

    name: str
    # "norm", "residual", "swiglu" or "argmax".
    kind: str
    # Rows and columns of the weight.
    O: int
    I: int
    settings: StripSettings
    # Other settings to try.
    others: tuple[StripSettings, ...]

    @property
    def weight_bytes(self) -> int:
        return 2 * self.O * self.I

    @property
    def num_copies(self) -> int:
        return max(1, math.ceil(COLD_BYTES / self.weight_bytes))


def make_problem(name: str, kind: str, O: int, I: int, *rows: tuple[int, ...]) -> Problem:
    """Take the settings in use, and others as (warps, run, tiles, ahead, outputs[, splits])."""
    names = ("warps", "run", "tiles", "ahead", "outputs", "splits")
    others = tuple(StripSettings(**dict(zip(names, row, strict=False))) for row in rows)
    settings = linear_triton.settings_for(O, I, has_gate=kind == "swiglu")
    return Problem(name=name, kind=kind, O=O, I=I, settings=settings, others=others)


PROBLEMS = (
    make_problem(
        "qwen qkv", "norm", 2048, 1536, (4, 4, 1, 3, 8), (8, 2, 1, 3, 8), (8, 2, 2, 3, 16), (4, 4, 2, 1, 16)
    ),
    make_problem(
        "qwen o", "residual", 1536, 1536, (4, 4, 2, 3, 12), (8, 2, 2, 3, 16), (4, 4, 1, 3, 8), (4, 4, 2, 1, 16)
    ),
    make_problem(
        "qwen gate_up", "swiglu", 17920, 1536, (4, 4, 2, 1, 8), (4, 4, 4, 1, 16), (2, 8, 4, 1, 16), (4, 2, 2, 4, 8)
    ),
    make_problem(
        "qwen down", "residual", 1536, 8960, (4, 4, 1, 4, 6), (4, 4, 1, 3, 6), (8, 4, 2, 2, 12), (8, 2, 2, 3, 12),
        (4, 4, 2, 3, 12, 2),
    ),
    make_problem(
        "qwen head", "argmax", 151936, 1536, (4, 4, 4, 1, 32), (4, 4, 2, 1, 16), (4, 2, 4, 3, 32)
    ),
    make_problem(
        "ling kda_in", "norm", 20512, 2560, (4, 2, 2, 6, 16), (2, 8, 2, 2, 16), (4, 4, 2, 5, 16), (4, 4, 2, 1, 16)
    ),
    make_problem(
        "ling o", "residual", 2560, 4096, (4, 4, 1, 4, 5), (4, 4, 1, 6, 5), (4, 4, 1, 8, 10), (4, 4, 2, 3, 16)
    ),
    make_problem("ling head", "argmax", 157184, 2560, (4, 4, 4, 1, 32), (4, 4, 2, 1, 16)),
)  # fmt: skip


def short(s: StripSettings) -> tuple[int | None, ...]:
    return s.warps, s.run, s.tiles, s.ahead, s.outputs, s.splits


def apply(
    problem: Problem,
    settings: StripSettings | None,
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
) -> Any:
    """Launch one linear map with some settings; None: as the engine runs it."""
    if settings is None:
        return apply_as_engine(problem, x, norm, weight, residual)
    if problem.kind == "swiglu":
        return linear_triton.swiglu_step(x, norm, EPS, weight, None, settings)
    if problem.kind == "argmax":
        return linear_triton.argmax_step(x, norm, EPS, weight, problem.O, settings)
    if problem.kind == "norm":
        return linear_triton.linear_step(x, norm, EPS, weight, residual[0], None, BF16, settings)
    return linear_triton.linear_step(x, None, 0.0, weight, None, residual, BF16, settings)


def apply_as_engine(
    problem: Problem, x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor
) -> Any:
    """Run one linear map by the launcher that models call, which chooses the kernel."""
    if problem.kind == "swiglu":
        return norm_swiglu(x, norm, EPS, weight)
    if problem.kind == "argmax":
        return norm_argmax(x, norm, EPS, weight, problem.O)
    if problem.kind == "norm":
        return norm_linear(x, norm, EPS, weight, residual[0])
    return linear_residual(x, weight, residual)


class Weights:
    """Copies of one problem's weight, and what else it needs."""

    def __init__(self, problem: Problem) -> None:
        p = problem
        self.problem = p
        self.copies = [rand(p.O, p.I, scale=p.I**-0.5) for _ in range(p.num_copies)]
        self.norm = rand(p.I, scale=0.1) + 1
        self.x = rand(16, p.I)
        self.residual = rand(16, p.O)

    def calls(self, T: int, settings: StripSettings | None) -> list[Callable[[], object]]:
        x, residual = self.x[:T], self.residual[:T]
        num_calls = max(len(self.copies), 4)
        cycle = itertools.islice(itertools.cycle(self.copies), num_calls)
        return [
            lambda w=w: apply(self.problem, settings, x, self.norm, w, residual)  # type: ignore[misc]
            for w in cycle
        ]

    def reference(self, T: int) -> torch.Tensor:
        x = self.x[:T].float()
        if self.problem.kind != "residual":
            x = F.rms_norm(x, (self.problem.I,), self.norm.float(), EPS)
        y = x @ self.copies[0].float().T
        if self.problem.kind == "residual":
            y = y + self.residual[:T].float()
        if self.problem.kind == "norm":
            y = y + self.residual[0].float()
        if self.problem.kind == "swiglu":
            gate, up = y.chunk(2, dim=1)
            y = F.silu(gate) * up
        return y

    def error(self, T: int, settings: StripSettings | None, reference: torch.Tensor) -> float:
        """Relative RMS error; for an argmax the worst distance of the chosen logit from the best."""
        out = apply(self.problem, settings, self.x[:T], self.norm, self.copies[0], self.residual[:T])
        reference = reference[:T]
        if self.problem.kind == "argmax":
            ids, best = out
            chosen = reference.gather(1, ids[:, None])[:, 0]
            return max((reference.amax(1) - chosen).max().item(), (best - chosen).abs().max().item())
        return ((out.float() - reference).norm() / reference.norm()).item()
