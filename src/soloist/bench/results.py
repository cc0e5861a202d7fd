"""Result files: one per case and kind of machine, the same fields whoever measured.

Benchmarks fill in a `Result` and hand it to `write_result`; `soloist bench --json` prints one.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

import soloist
from soloist.doctor import cpu_name

SCHEMA = 1
# From the root of a source tree: a folder for every kind of machine.
RESULTS = Path("benchmarks/results")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another engine, measured in the same run."""

    name: str
    version: str | None
    tpot_ms_median: float
    # Its time per token over ours: above 1, ours is faster.
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one case measured; units are in the names, None is what was not measured.

    `tpot_ms_*` are of requests, `step_ms_*` of steps. Keys of the mappings are widths or acceptance lengths, as text.
    """

    case: str
    model: str
    device: str
    command: str
    weights: Literal["real", "random", "shard"]
    dtype: str
    tensor_parallel_size: int = 1
    # Positions in the cache in the middle of an answer.
    context_len: int | None = None
    # Rows of a step, the pending token included; for adaptive width the most.
    width: int | None = None
    acceptance_length: float | None = None
    acceptance_simulated: bool = False
    acceptance_rate: float | None = None
    ttft_ms: float | None = None
    tpot_ms_mean: float | None = None
    tpot_ms_median: float | None = None
    tpot_ms_p10: float | None = None
    tpot_ms_p90: float | None = None
    step_ms_median: float | None = None
    step_ms_p10: float | None = None
    step_ms_p90: float | None = None
    # Prefill included.
    output_tok_per_s: float | None = None
    # Behind the first token.
    decode_tok_per_s: float | None = None
    bandwidth_gb_per_s: float | None = None
    floor_step_ms: float | None = None
    share_of_floor: float | None = None
    launches_per_step: float | None = None
    syncs_per_step: float | None = None
    # GPU time in which nothing ran: between replays, and between nodes of one.
    idle_share: float | None = None
    gap_share: float | None = None
    host_us_per_step: float | None = None
    weight_bytes: int | None = None
    cache_bytes: int | None = None
    peak_memory_bytes: int | None = None
    distinct_experts_by_width: dict[str, float] | None = None
    step_ms_by_width: dict[str, float] | None = None
    floor_step_ms_by_width: dict[str, float] | None = None
    tpot_ms_at: dict[str, float] | None = None
    peers: tuple[Peer, ...] = ()
    # A ladder: the same fields for every rung, with the switch that changed in `case`.
    rungs: tuple["Result", ...] = ()
    # Whatever else a case wants to keep, by name.
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Give what a file holds: the fields that were measured, with when, where and of what version."""
        fields = dataclasses.asdict(self)
        fields["rungs"] = [_measured(dataclasses.asdict(rung)) for rung in self.rungs]
        return make_stamp() | _measured(fields)


def make_stamp() -> dict[str, Any]:
    """Say when a result was measured, and with which versions; of this checkout's commit."""
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "soloist": soloist.__version__,
        "driver": driver_version(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "python": sys.version.split()[0],
    }


def _measured(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, (), [], {})}


def at_bandwidth(result: Result, bandwidth_gb_per_s: float) -> Result:
    """Price a result anew, where its run has measured a larger bandwidth later: floors are bytes over it.

    Args:
        result: with floors at its own bandwidth.
        bandwidth_gb_per_s: the larger one; a smaller one changes nothing.
    """
    if result.bandwidth_gb_per_s is None or result.bandwidth_gb_per_s >= bandwidth_gb_per_s:
        return result
    factor = result.bandwidth_gb_per_s / bandwidth_gb_per_s
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    fields = _scale_floors(fields, factor) | {
        "bandwidth_gb_per_s": bandwidth_gb_per_s,
        "rungs": tuple(at_bandwidth(rung, bandwidth_gb_per_s) for rung in result.rungs),
    }
    return Result(**fields)


def _scale_floors(value: Any, factor: float, *, is_floor: bool = False) -> Any:
    """Multiply what is a floor, or a share of one, wherever it stands."""
    if isinstance(value, dict):
        floors = {name for name in value if str(name).startswith("floor_step_ms") or name == "share_of_floor"}
        return {name: _scale_floors(x, factor, is_floor=is_floor or name in floors) for name, x in value.items()}
    if isinstance(value, list):
        return [_scale_floors(x, factor) for x in value]
    return value * factor if is_floor and isinstance(value, float) else value


def write_result(result: Result, folder: Path | None = None, commit_id: str | None = None) -> Path:
    """Write a result file, over the one of the case's last run.

    Args:
        result: to write.
        folder: used as it is, and made. None: this kind of machine's, under `RESULTS`.
        commit_id: of the source tree, where git is not there to ask. None: it is asked.
    """
    folder = folder or RESULTS / machine_folder(result.device, result.tensor_parallel_size)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.case}.json"
    content = result.to_json() | ({} if commit_id is None else {"commit": commit_id})
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def machine_folder(device: str, num_gpus: int) -> str:
    """Name the folder of a kind of machine, as in "h200x2" for two NVIDIA H200, and "cpu" for every processor."""
    maker, *words = device.split()
    if maker != "NVIDIA":
        return "cpu"
    # Up to the word with the number; memory and socket stand behind it, and "GeForce" is on the box only.
    number = next((i for i, word in enumerate(words) if any(map(str.isdigit, word))), len(words) - 1)
    name = "".join(word for word in words[: number + 1] if word != "GeForce").split("-")[0].lower()
    return name if num_gpus == 1 else f"{name}x{num_gpus}"


def device_name(device: torch.device) -> str:
    """Name a device as its maker does."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def commit() -> str | None:
    """Give the commit of the source tree, with a plus sign if tracked files differ; None outside of a checkout."""
    root = Path(soloist.__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    head = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    is_changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return head and head + ("+" if is_changed else "")


def driver_version() -> str | None:
    """Give the version of the NVIDIA driver; None without one."""
    lines = query_gpus("driver_version")
    return lines[0][0] if lines else None


def query_gpus(*fields: str) -> list[list[str]]:
    """Ask nvidia-smi for some fields of every GPU; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    text = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    return [line.split(", ") for line in (text or "").splitlines()]


def gpu_state() -> list[dict[str, str]]:
    """Note clocks, power and temperature of every GPU: they decide what a figure can be compared with."""
    fields = ("name", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    return [dict(zip(fields, values, strict=True)) for values in query_gpus(*fields)]


def _output(*words: str) -> str | None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
