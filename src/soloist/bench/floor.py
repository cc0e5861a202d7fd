"""Pricing a model without its weights: what a step must move, and the time no machine of a bandwidth can go below."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soloist.errors import UsageError
from soloist.hub import BUILT_IN
from soloist.roofline import Footprint

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16)
# Chances that a draft token is kept, given that those before it were.
RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class FloorSettings:
    """What a model is priced for."""

    num_gpus: int
    # Of one GPU's memory, reading.
    bandwidth_gb_per_s: float
    # Of what device of this machine it was measured; None: it was given.
    measured_on: str | None
    context_len: int
    # Of one exchange between GPUs; 0: the floor of the bytes alone.
    all_reduce_us: float = 0.0
    # Read on one GPU to draft for one step.
    draft_bytes: float = 0.0
    # Experts read per layer by width, measured. Empty: uniform routing.
    distinct_experts: Mapping[int, float] = field(default_factory=dict)
    # Model they were measured with; None: not known.
    experts_of: str | None = None
    # Why this engine does not run the model on so many GPUs; None: it does.
    refusal: str | None = None

    def __post_init__(self) -> None:
        if self.context_len < 0:
            raise UsageError(f"--context is {self.context_len}; allowed: 0 and more")
        figures = {
            "--bandwidth": self.bandwidth_gb_per_s,
            "--all-reduce-us": self.all_reduce_us,
            "--draft-gb": self.draft_bytes,
        }
        for name, figure in figures.items():
            if not math.isfinite(figure):
                raise UsageError(f"{name} is {figure}; allowed: a finite number")


@dataclass(frozen=True, kw_only=True)
class WidthFloor:
    """One width of a step, on one GPU."""

    width: int
    gb_per_gpu: float
    weights_gb: float
    experts_gb: float
    state_gb: float
    kv_gb: float
    distinct_experts: float
    step_ms: float
    # Floor of the time per token by the chance that a draft token is kept, in the order of `RATES`.
    tpot_ms: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class FloorTable:
    """All widths of one model."""

    model: str
    settings: FloorSettings
    parameters: int
    weight_gb_per_gpu: float
    # Part, GB held, GB read per token; on one GPU that holds all.
    parts: tuple[tuple[str, float, float], ...]
    num_all_reduces: int
    widths: tuple[WidthFloor, ...]
    # By rate: the width with the lowest floor.
    best_widths: tuple[int, ...]


def acceptance_length(width: int, rate: float) -> float:
    """Expect the tokens a step commits if a draft is kept with chance r, given those before: (1 - r^T) / (1 - r).

    Args:
        width: rows of the step, T; one commits one token.
        rate: r, in [0, 1].
    """
    return float(width) if rate == 1 else (1 - rate**width) / (1 - rate)


def price(model: str, footprint: Footprint, settings: FloorSettings) -> FloorTable:
    """Price every width of a step.

    Raises:
        UsageError: the measured experts are not this model's, or of widths that are not priced.
    """
    measured = settings.distinct_experts
    if measured and max(measured.values()) > footprint.num_experts:
        has = f"{footprint.num_experts} in a layer" if footprint.num_experts else "none"
        raise UsageError(
            f"--experts has {max(measured.values()):g} experts in a step, and {model} has {has}: it was measured with"
            " another model"
        )
    known = {name.rpartition("/")[2].lower() for name in (model, settings.experts_of or model)} & BUILT_IN.keys()
    if len(known) > 1:
        raise UsageError(f"--experts was measured with {settings.experts_of}, and this is {model}")
    widths = []
    for width in WIDTHS:
        if measured and width not in measured:
            continue
        experts = measured.get(width)
        step = footprint.step_bytes(
            width, settings.context_len, tensor_parallel_size=settings.num_gpus, distinct_experts=experts
        )
        step_ms = footprint.step_floor_ms(
            width,
            settings.context_len,
            bandwidth_gb_per_s=settings.bandwidth_gb_per_s,
            tensor_parallel_size=settings.num_gpus,
            distinct_experts=experts,
            # Plain decoding drafts nothing.
            draft_bytes=settings.draft_bytes if width > 1 else 0.0,
            all_reduce_us=settings.all_reduce_us,
        )
        widths.append(
            WidthFloor(
                width=width,
                gb_per_gpu=step.total / 1e9,
                weights_gb=step.weights / 1e9,
                experts_gb=step.routed_experts / 1e9,
                state_gb=step.state / 1e9,
                kv_gb=step.kv / 1e9,
                distinct_experts=footprint.distinct_experts(width) if experts is None else experts,
                step_ms=step_ms,
                tpot_ms=tuple(step_ms / acceptance_length(width, rate) for rate in RATES),
            )
        )
    if not widths:
        raise UsageError(f"the measured widths {sorted(measured)} are none of {', '.join(map(str, WIDTHS))}")
    return FloorTable(
        model=model,
        settings=settings,
        parameters=footprint.parameters,
        weight_gb_per_gpu=sum(
            part.weight_bytes / (settings.num_gpus if part.is_sharded else 1) for part in footprint.parts
        )
        / 1e9,
        parts=_parts(footprint),
        num_all_reduces=footprint.num_all_reduces(settings.num_gpus),
        widths=tuple(widths),
        best_widths=tuple(min(widths, key=lambda floor: floor.tpot_ms[i]).width for i in range(len(RATES))),
    )


def _parts(footprint: Footprint) -> tuple[tuple[str, float, float], ...]:
    """List what is held and what one token reads of it."""
    rows = []
    for part in footprint.parts:
        read_bytes: float = part.read_bytes
        if part.num_choices > 1:
            # A row of a table, or the experts that one token chooses.
            chosen = footprint.num_experts_per_tok if part.reads.value == "experts" else 1
            read_bytes = part.read_bytes * chosen / part.num_choices
        rows.append((part.name, part.weight_bytes / 1e9, read_bytes / 1e9))
    return tuple(sorted(rows, key=lambda row: -row[2]))


def read_distinct_experts(path: Path) -> tuple[str | None, dict[int, float]]:
    """Read measured numbers of experts from a result file; give also the model's name.

    Raises:
        UsageError: it has none.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        by_width = result["distinct_experts_by_width"]
        return result.get("model"), {int(width): float(experts) for width, experts in by_width.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} has no distinct_experts_by_width ({type(error).__name__}: {error}); benchmarks/decode_gpu.py and"
            " decode_tp_gpu.py write it for models with experts"
        ) from None


def in_words(table: FloorTable) -> str:
    """Lay a table out for reading."""
    s = table.settings
    gpus = "one GPU" if s.num_gpus == 1 else f"{s.num_gpus} GPUs"
    how = "given" if s.measured_on is None else f"measured on {s.measured_on}"
    lines = [
        f"{table.model} on {gpus}: {table.parameters / 1e9:.3f} B parameters,"
        f" {table.weight_gb_per_gpu:.2f} GB of weights per GPU in bfloat16",
        f"{s.bandwidth_gb_per_s:.0f} GB/s ({how}), {s.context_len} tokens of context,"
        f" {table.num_all_reduces} all-reduces per step of {s.all_reduce_us:g} us",
        f"drafting reads {s.draft_bytes / 1e9:.3f} GB per step and GPU" if s.draft_bytes else "drafting is not priced",
        *_experts_in_words(table),
        *([] if s.refusal is None else [f"note: priced, but this engine refuses it: {s.refusal}"]),
        "",
        f"{'part':<28} {'GB':>9} {'GB per token':>13}",
    ]
    lines += [
        f"{name:<28} {held:>9.3f} {read:>13.3f}" for name, held, read in table.parts if held >= 5e-4 or read >= 5e-4
    ]
    lines += ["", _header()]
    for floor in table.widths:
        experts = f"{floor.distinct_experts:>8.1f}" if floor.distinct_experts else f"{'':>8}"
        rates = " ".join(f"{tpot_ms:>7.3f}" for tpot_ms in floor.tpot_ms)
        lines.append(f"{floor.width:>5} {experts} {floor.gb_per_gpu:>8.3f} {floor.step_ms:>9.3f}   {rates}")
    best = " ".join(f"{width:>7}" for width in table.best_widths)
    lines.append(f"{'best width':<33}   {best}")
    return "\n".join(lines)


def _experts_in_words(table: FloorTable) -> list[str]:
    if not table.widths[0].distinct_experts:
        return []
    s = table.settings
    measured = f"experts of a layer as measured with {s.experts_of or 'a model without a name'}"
    return [measured if s.distinct_experts else "experts chosen uniformly"]


def _header() -> str:
    rates = " ".join(f"{f'r={rate:g}':>7}" for rate in RATES)
    return (
        "Floors: ms per step, and per token if each draft is kept with chance r\n"
        f"{'width':>5} {'experts':>8} {'GB/GPU':>8} {'step ms':>9}   {rates}"
    )


def as_json(table: FloorTable) -> dict[str, Any]:
    """Give a table as one JSON object; docs/bench.md describes it."""
    s = table.settings
    return {
        "schema": 1,
        "model": table.model,
        "num_gpus": s.num_gpus,
        "refusal": s.refusal,
        "bandwidth_gb_per_s": s.bandwidth_gb_per_s,
        "bandwidth_is_measured": s.measured_on is not None,
        "context_len": s.context_len,
        "all_reduce_us": s.all_reduce_us,
        "draft_bytes": s.draft_bytes,
        "parameters": table.parameters,
        "weight_gb_per_gpu": table.weight_gb_per_gpu,
        "parts_gb": {name: {"held": held, "read_per_token": read} for name, held, read in table.parts},
        "num_all_reduces": table.num_all_reduces,
        "distinct_experts_by_width": {str(f.width): f.distinct_experts for f in table.widths if f.distinct_experts},
        "step_gb_by_width": {str(f.width): f.gb_per_gpu for f in table.widths},
        "state_gb": table.widths[0].state_gb,
        "kv_gb": table.widths[0].kv_gb,
        "floor_step_ms_by_width": {str(f.width): f.step_ms for f in table.widths},
        "floor_tpot_ms_by_rate": {
            str(rate): {str(f.width): f.tpot_ms[i] for f in table.widths} for i, rate in enumerate(RATES)
        },
        "best_width_by_rate": {str(rate): width for rate, width in zip(RATES, table.best_widths, strict=True)},
    }
