"""Measurements in plain words, as a `Result`, and beside each other."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from soloist.bench.chart import Bar
from soloist.bench.figures import FELT_TOKENS, RequestFigures, Summary
from soloist.bench.ladder import step_fields
from soloist.bench.local import Measurement
from soloist.bench.remote import RemoteMeasurement
from soloist.bench.results import SCHEMA, Peer, Result
from soloist.bench.steps import StepFigures
from soloist.bench.workloads import Workload
from soloist.errors import UsageError

# Another count of prompt tokens is another prompt: beyond this, a comparison says so.
_SAME_PROMPT = 0.02
_GIB = 2**30
# Repeats that differ by more are worth a word: what they are compared with may be chance.
_STEADY = 1.5
# What `--compare` shows, and whether more of it is better.
_COMPARED = {
    "ttft_ms": False,
    "tpot_ms_mean": False,
    "tpot_ms_median": False,
    "step_ms_median": False,
    "decode_tok_per_s": True,
    "output_tok_per_s": True,
    "acceptance_length": True,
    "share_of_floor": True,
    "peak_memory_bytes": False,
}
# What two results must share to be compared, at the top and in their details.
_SAME = (
    *("model", "device", "weights", "dtype", "context_len", "tensor_parallel_size", "width", "acceptance_simulated"),
    *("workload", "input_tokens", "output_tokens", "num_threads", "weights_dtype"),
)


def in_words(workload: Workload, measurements: Sequence[Measurement]) -> str:
    """Say what was measured, rung by rung."""
    first = measurements[0]
    threads = f", {first.num_threads} threads" if first.num_threads else ""
    lines = [f"{first.model}, {workload.name}, on {first.device}{threads}, {first.dtype}"]
    for i, m in enumerate(measurements):
        lines += ["", f"{m.name}:"] if m.name else [""]
        lines += _figures(m)
        if i:
            ratio = first.warm.tpot_ms.mean / m.warm.tpot_ms.mean
            lines.append(f"  that is {ratio:.2f} times the speed of {first.name or 'the first'}")
            if ratio < 1 and m.num_ranks > first.num_ranks and m.drafter == first.drafter:
                lines.append("  one is faster here than several that share the model: leave --tensor-parallel-size out")
    for gpu in measurements[-1].gpus:
        lines.append(f"GPU after the last request: {', '.join(f'{name} {value}' for name, value in gpu.items())}")
    return "\n".join(lines)


def _figures(m: Measurement) -> list[str]:
    w, tpot, gap = m.warm, m.warm.tpot_ms, m.warm.chunk_gap_ms
    low, high = w.decode_tok_per_s_range
    lines = [
        f"  cold   {_cold(m.cold)}, the first request after loading",
        f"  warm   TTFT {w.ttft_ms:.1f} ms for {w.prompt_tokens} tokens{_from_cache(w)},"
        f" {w.completion_tokens} tokens back, {w.num_requests} requests{_short(w)}",
        f"  TPOT   mean {tpot.mean:.3f} ms, median {tpot.median:.3f}, p10-p90 {tpot.p10:.3f}-{tpot.p90:.3f}",
        f"  decode {w.decode_tok_per_s:.1f} tok/s, repeats {low:.1f}-{high:.1f};"
        f" with prefill {w.output_tok_per_s:.1f} tok/s",
        f"  chunk gap median {gap.median:.3f} ms, p10-p90 {gap.p10:.3f}-{gap.p90:.3f}",
    ]
    if w.acceptance_rate is not None and w.acceptance_length is not None:
        lines.append(
            f"  draft  {m.drafter}: {w.acceptance_length:.2f} tokens per step, {w.acceptance_rate:.0%} of the drafts"
            f" kept, {w.mean_width:.2f} rows per step{', SIMULATED' if m.is_simulated else ''}"
        )
    if high > _STEADY * low:
        lines.append(
            f"  unsure: the fastest repeat is {high / low:.1f} times the slowest; something else may use this machine"
        )
    f = m.floor
    lines += [
        f"  floor  {f.step_ms:.3f} ms per step of {f.width} rows: {f.step_bytes / 1e9:.3f} GB at"
        f" {f.bandwidth_gb_per_s:.1f} GB/s, measured; {f.share:.0%} of it reached",
        *_step_figures(m.steps),
        f"  memory {m.memory.weight_bytes / 1e9:.3f} GB of weights, {m.memory.cache_bytes / 1e9:.3f} GB of cache, peak"
        f" {m.memory.peak_bytes / _GIB:.2f} GiB{f', each of {m.num_ranks}' if m.num_ranks > 1 else ''}",
        f"  what a person feels: {w.ttft_ms / 1e3:.1f} s to the first word, {w.felt_s:.0f} s for an answer of"
        f" {FELT_TOKENS:,} tokens",
    ]
    return lines


def _step_figures(steps: StepFigures | None) -> list[str]:
    if steps is None:
        return []
    gaps = "not seen" if steps.gap_share is None else f"{steps.gap_share:.1%}"
    return [
        f"  steps  {steps.step_ms.median:.3f} ms by the GPU's clock, {steps.launches_per_step:.0f} launches; idle"
        f" between steps {steps.idle_share:.1%}, within {gaps}; the host works {steps.host_us_per_step:.0f} us a step"
    ]


def _cold(cold: RequestFigures) -> str:
    tpot = "an answer of one token" if cold.tpot_ms is None else f"TPOT {cold.tpot_ms:.3f} ms"
    return f"TTFT {1e3 * cold.ttft_s:.1f} ms, {tpot}"


def _from_cache(summary: Summary) -> str:
    return f" (warm: {summary.cached_share:.1%} of them came from a cache)" if summary.cached_share else ""


def _short(summary: Summary) -> str:
    return f", {summary.num_short} answered with one token, of which TTFT alone counts" if summary.num_short else ""


def against_in_words(ours: Measurement, theirs: RemoteMeasurement) -> str:
    """Put another engine beside ours; ratios above 1 mean that ours is better."""
    a, b = ours.warm, theirs.warm
    rows = [
        ("TTFT, ms", a.ttft_ms, b.ttft_ms, b.ttft_ms / a.ttft_ms),
        ("TPOT mean, ms", a.tpot_ms.mean, b.tpot_ms.mean, b.tpot_ms.mean / a.tpot_ms.mean),
        ("TPOT median, ms", a.tpot_ms.median, b.tpot_ms.median, b.tpot_ms.median / a.tpot_ms.median),
        ("decode, tok/s", a.decode_tok_per_s, b.decode_tok_per_s, a.decode_tok_per_s / b.decode_tok_per_s),
        ("with prefill, tok/s", a.output_tok_per_s, b.output_tok_per_s, a.output_tok_per_s / b.output_tok_per_s),
        (f"{FELT_TOKENS:,} tokens, s", a.felt_s, b.felt_s, b.felt_s / a.felt_s),
    ]
    who = f"{theirs.model} at {theirs.url}" + (f" ({theirs.server})" if theirs.server else "")
    lines = [f"against {who}, the same prompts", f"{'':<22} {'soloist':>11} {'there':>11} {'ratio':>7}"]
    lines += [f"{name:<22} {mine:>11.3f} {other:>11.3f} {ratio:>7.2f}" for name, mine, other, ratio in rows]
    lines.append(f"{'chunk gap median, ms':<22} {a.chunk_gap_ms.median:>11.3f} {b.chunk_gap_ms.median:>11.3f}")
    lines += [f"note: {note}" for note in _differences(a, theirs)]
    return "\n".join(lines)


def _differences(ours: Summary, remote: RemoteMeasurement) -> list[str]:
    theirs, notes = remote.warm, []
    if abs(ours.prompt_tokens - theirs.prompt_tokens) > _SAME_PROMPT * ours.prompt_tokens:
        notes.append(f"the server counts {theirs.prompt_tokens} prompt tokens, we {ours.prompt_tokens}")
    if not remote.knows_ignore_eos:
        notes.append("the server refuses ignore_eos: its answers end where the model ends them")
    if not remote.has_usage_in_stream:
        notes.append("the server counts no tokens in its streams: they are those of the same answers in one piece")
    if ours.completion_tokens != theirs.completion_tokens:
        notes.append(f"the server's answers have {theirs.completion_tokens} tokens, ours {ours.completion_tokens}")
    if theirs.cached_share:
        notes.append(f"the server is warm: it took {theirs.cached_share:.1%} of the prompts' tokens from a cache")
    return notes


def make_result(
    workload: Workload,
    measurements: Sequence[Measurement],
    *,
    case: str,
    command: str,
    weights: Literal["real", "random"],
    weights_dtype: str | None = None,
    remote: RemoteMeasurement | None = None,
) -> Result:
    """Put a run into the form that all results share: the last rung's figures, with every rung in `rungs`."""
    last = measurements[-1]
    peers: tuple[Peer, ...] = ()
    details: dict[str, Any] = {
        "workload": workload.name,
        "run": workload.run,
        "input_tokens": last.warm.prompt_tokens,
        "output_tokens": last.warm.completion_tokens,
        "num_threads": last.num_threads,
        "weights_dtype": weights_dtype,
        "cold": {"ttft_ms": 1e3 * last.cold.ttft_s, "tpot_ms": last.cold.tpot_ms},
        "decode_tok_per_s_range": last.warm.decode_tok_per_s_range,
        "num_requests": last.warm.num_requests,
        "num_short": last.warm.num_short,
        "cached_share": last.warm.cached_share,
        "felt_s": last.warm.felt_s,
        "gpus": last.gpus,
    }
    if remote is not None:
        peers = (
            Peer(
                name=f"{remote.model} at {remote.url}",
                version=remote.server,
                tpot_ms_median=remote.warm.tpot_ms.median,
                ratio=remote.warm.tpot_ms.median / last.warm.tpot_ms.median,
            ),
        )
        details["against"] = asdict(remote.warm) | {"prompt_tokens_by_prompt": remote.prompt_tokens}
    rungs = tuple(_result(m, m.name or "plain", command, weights) for m in measurements)
    main = _result(last, case, command, weights)
    return replace(main, peers=peers, rungs=rungs if len(rungs) > 1 else (), details=details)


def _result(m: Measurement, case: str, command: str, weights: Literal["real", "random"]) -> Result:
    w = m.warm
    return Result(
        case=case,
        model=m.model,
        device=m.device,
        command=command,
        weights=weights,
        dtype=m.dtype,
        tensor_parallel_size=m.num_ranks,
        context_len=m.floor.context_len,
        width=m.floor.width,
        acceptance_length=w.acceptance_length,
        acceptance_simulated=m.is_simulated,
        acceptance_rate=w.acceptance_rate,
        ttft_ms=w.ttft_ms,
        tpot_ms_mean=w.tpot_ms.mean,
        tpot_ms_median=w.tpot_ms.median,
        tpot_ms_p10=w.tpot_ms.p10,
        tpot_ms_p90=w.tpot_ms.p90,
        step_ms_median=None if m.step_ms is None else m.step_ms.median,
        step_ms_p10=None if m.step_ms is None else m.step_ms.p10,
        step_ms_p90=None if m.step_ms is None else m.step_ms.p90,
        output_tok_per_s=w.output_tok_per_s,
        decode_tok_per_s=w.decode_tok_per_s,
        bandwidth_gb_per_s=m.floor.bandwidth_gb_per_s,
        floor_step_ms=m.floor.step_ms,
        share_of_floor=m.floor.share,
        weight_bytes=m.memory.weight_bytes,
        cache_bytes=m.memory.cache_bytes,
        peak_memory_bytes=m.memory.peak_bytes,
        **({} if m.steps is None else step_fields(m.steps)),
    )


# --- results that are there already


def read_result(path: Path) -> dict[str, Any]:
    """Read a result file.

    Raises:
        UsageError: it is none.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a result ({error})") from None
    if not isinstance(result, dict) or "case" not in result or result.get("schema") != SCHEMA:
        raise UsageError(
            f"{path} is no result of schema {SCHEMA}: allowed is what `soloist bench --json` prints of a measurement,"
            " and files with that schema under benchmarks/results"
        )
    return result


def compared(first: dict[str, Any], second: dict[str, Any]) -> dict[str, list[float]]:
    """Give the figures that two results share: the first's, the second's, and by how much the second is better.

    Raises:
        UsageError: they share none.
    """
    rows = {}
    for name, is_more_better in _COMPARED.items():
        a, b = first.get(name), second.get(name)
        if a and b:
            rows[name] = [a, b, b / a if is_more_better else a / b]
    if not rows:
        raise UsageError("the two results have no figure in common")
    return rows


def compare_in_words(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Put two results beside each other; a ratio above 1 means that the second is better."""
    lines = [f"{'':<20} {'A':>14} {'B':>14} {'B better by':>12}"]
    lines += [f"{name:<20} {a:>14.4g} {b:>14.4g} {r:>12.3f}" for name, (a, b, r) in compared(first, second).items()]
    for name in _SAME:
        a, b = (result.get(name, result.get("details", {}).get(name)) for result in (first, second))
        if a != b:
            lines.append(f"note: {name} differs: {a} and {b}")
    for letter, result in (("A", first), ("B", second)):
        lines.append(f"{letter}: {result.get('date')}, commit {result.get('commit')}, {result.get('command')}")
    return "\n".join(lines)


def bars_of(result: dict[str, Any]) -> list[Bar]:
    """Give a chart's bars for a result: its rungs, or itself.

    Raises:
        UsageError: it has no time per token.
    """
    bars = [
        Bar(
            name=rung["case"],
            tpot_ms=rung["tpot_ms_mean"],
            floor_tpot_ms=_floor_tpot_ms(rung),
        )
        for rung in result.get("rungs") or [result]
        if rung.get("tpot_ms_mean")
    ]
    if not bars:
        raise UsageError(f"{result['case']} cannot be drawn: it has no tpot_ms_mean")
    return bars


def _floor_tpot_ms(rung: dict[str, Any]) -> float | None:
    floor_ms = rung.get("floor_step_ms")
    return floor_ms / rung.get("acceptance_length", 1.0) if floor_ms else None
