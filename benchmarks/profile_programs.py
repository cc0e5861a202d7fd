"""Profile the programs with planted faults on a GPU, and judge whether the profiler names the right lines.

Run on a CUDA machine: `PYTHONPATH=src python3 benchmarks/profile_programs.py FOLDER`. It writes FOLDER/programs.tar.gz,
small traces that become the fixtures of the tests, and FOLDER/profile-programs.json, verdicts and times. The last line
is one JSON object.
"""

import argparse
import importlib.util
import io
import json
import statistics
import sys
import tarfile
import tempfile
import time
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from soloist.bench.results import commit, device_name, driver_version
from soloist.profiler import assert_returns_early, no_host_sync, watch
from soloist.profiler.analysis import Analysis, analyse
from soloist.profiler.command import find_program, run_program
from soloist.profiler.gaps import GapKind
from soloist.profiler.guards import HostSyncError
from soloist.profiler.kineto import save_trace
from soloist.profiler.report import as_json, in_words
from soloist.profiler.steps import Recording, find_steps
from soloist.profiler.trace import Trace

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "tests" / "profiler" / "programs"
WINDOW_S = 0.15
NUM_STEPS = 320
# A program is timed with its fault and without it.
TIMED_STEPS = 60
ROUNDS = 9
# Kept in a fixture: steps with Python lines, and steps without.
KEPT_STEPS = 10


def marked_lines(path: Path, mark: str) -> set[str]:
    """Lines of a program that end in a comment."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {f"{path.name}:{i + 1}" for i, line in enumerate(lines) if line.endswith(f"# {mark}")}


def run_plain(path: Path, num_steps: int, *words: str) -> float:
    """Run a program without a profiler; milliseconds per step."""
    command = [str(path), str(num_steps), *words]
    run_unwatched(command)
    return float(sys.modules["gpu_work"].step_ms)


def measure_loss(path: Path) -> dict[str, Any]:
    """Time a program with its fault and without, in turns; the first round loads kernels and is left out."""
    with_ms, without_ms = [], []
    for i in range(1 + ROUNDS):
        num_steps = TIMED_STEPS if i else 10
        with_ms.append(run_plain(path, num_steps))
        without_ms.append(run_plain(path, num_steps, "without"))
    losses = [a - b for a, b in zip(with_ms[1:], without_ms[1:], strict=True)]
    return {
        "unprofiled_step_ms": statistics.median(with_ms[1:]),
        "unprofiled_without_ms": statistics.median(without_ms[1:]),
        "real_loss_ms": statistics.median(losses),
        "real_loss_range_ms": [min(losses), max(losses)],
    }


def run_unwatched(words: list[str]) -> None:
    """Run a script in this process."""
    saved = sys.argv[:]
    sys.argv[:] = words
    try:
        spec = importlib.util.spec_from_file_location("__program__", words[0])
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    finally:
        sys.argv[:] = saved


def cut(trace: Trace) -> Trace:
    """Keep a few steps around the moment from which no Python line was recorded."""
    steps = find_steps(trace)
    switch = next((i for i, r in enumerate(steps.recordings) if r is Recording.MIXED), len(steps))
    first, last = max(0, switch - KEPT_STEPS), min(len(steps), switch + KEPT_STEPS + 1)
    # A little more on both sides, so that the first and the last step are found again.
    start_us = steps.host_us[first] - 50
    end_us = steps.host_us[last] + 50 if last < len(steps) else float("inf")
    calls = [call for call in trace.calls if start_us <= call.start_us < end_us]
    kept = {call.correlation for call in calls}
    return replace(
        trace,
        calls=calls,
        works=[work for work in trace.works if work.correlation in kept],
        samples={t: [s for s in ss if start_us <= s.time_us < end_us] for t, ss in trace.samples.items()},
        origin_ns=None,
    )


def judge(path: Path, analysis: Analysis) -> dict[str, Any]:
    """Compare what was found with what was planted."""
    faults, allowed, busy = (marked_lines(path, mark) for mark in ("fault", "allowed", "busy"))
    # A wait in fewer than half of the steps belongs to the program's start or end.
    named = {wait.place.where for wait in analysis.waits if wait.count >= 0.5}
    hosts = [gap.place.where for gap in analysis.gaps if gap.kind is GapKind.HOST]
    is_right = faults <= named <= faults | allowed and (not busy or hosts[:1] == sorted(busy))
    return {
        "program": path.name,
        "expected": sorted(faults | busy),
        "named": sorted(named),
        "host": hosts[:2],
        "is_right": is_right,
        "steps": analysis.num_steps,
        "origin": analysis.origin.value,
        "syncs_per_step": round(analysis.syncs_per_step, 3),
        "idle_share": round(analysis.idle_share, 4),
        "blocked_ms": round(analysis.blocked_ms, 4),
        "loss_ms": round(analysis.loss_ms, 4),
        "loss_range_ms": [round(ms, 4) for ms in analysis.loss_range_ms],
        "step_ms": round(analysis.step_ms, 4),
        "busy_ms": round(analysis.busy_ms, 4),
        "lead_us": None if analysis.lead is None else round(analysis.lead.median_us, 1),
        "named_step_ms": analysis.overhead.named_step_ms,
        "plain_step_ms": analysis.overhead.plain_step_ms,
    }


def profile_one(path: Path, loss: dict[str, Any] | None, traces: dict[str, bytes]) -> dict[str, Any]:
    """Record a program, judge what is found, and hold its price against the loss that was measured."""
    # Loads its kernels.
    run_plain(path, 10)
    program = find_program(["python", str(path), str(NUM_STEPS)])
    run = run_program(program, naming_s=WINDOW_S, plain_s=WINDOW_S)
    assert run.trace is not None and run.exit_code == 0, f"{path.name} left with {run.exit_code}"
    verdict = judge(path, analyse(run.trace))
    small = cut(run.trace)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json.gz"
        save_trace(small, file)
        traces[f"{path.stem}.json.gz"] = file.read_bytes()
    verdict["words"] = in_words(analyse(small)).splitlines()[:14]
    if loss is not None:
        verdict |= loss | {"loss_to_real_loss": verdict["loss_ms"] / loss["real_loss_ms"]}
    return verdict


def check_guards() -> dict[str, Any]:
    """Try the guards on the GPU itself."""
    gpu_work = sys.modules["gpu_work"]
    work, found = gpu_work.Work(), {}
    token = work.step()
    host = torch.empty(3072, dtype=torch.bfloat16)
    faults = {
        "item": lambda: token.item(),
        "truth": lambda: bool(token > 0),
        "mask": lambda: work.hidden[0][work.hidden[0] > 0],
        "cpu": lambda: token.cpu(),
        "pageable": lambda: host.copy_(work.hidden[0], non_blocking=True),
        "synchronize": lambda: torch.cuda.synchronize(),
        "inside an operator": lambda: torch.unique_consecutive(work.hidden[0]),
    }
    for name, fault in faults.items():
        for guard in ("no_host_sync", "assert_returns_early"):
            try:
                if guard == "no_host_sync":
                    with no_host_sync():
                        fault()
                else:
                    assert_returns_early(fault, seconds=0.1)
                found[f"{name}, {guard}"] = "missed"
            except HostSyncError as error:
                found[f"{name}, {guard}"] = str(error).replace(f"{ROOT.resolve()}/", "")
    with no_host_sync():
        work.step()
    assert_returns_early(work.step, seconds=0.1)
    found["clean"] = "passed"
    torch.cuda.synchronize()
    return found


def check_watch() -> dict[str, Any]:
    """Mark steps, and compare their time with and without the profiler."""
    work = sys.modules["gpu_work"].Work()
    with watch(num_steps=20) as watched:
        for _ in range(160):
            watched.step()
            work.step().item()
    analysis = watched.analysis
    return {
        "origin": analysis.origin.value,
        "waits": [(wait.place.where, wait.what, wait.count) for wait in analysis.waits],
        "overhead": as_json([analysis])["processes"][0]["overhead"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commit", default=commit(), help="where git is not there to ask")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    # Before minutes are spent.
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(PROGRAMS))
    traces: dict[str, bytes] = {}
    verdicts: list[dict[str, Any]] = []
    names = [path for path in sorted(PROGRAMS.glob("*.py")) if path.name != "gpu_work.py"]
    start_s = time.perf_counter()
    # Before anything is recorded: a profiler may leave something behind.
    losses = {path: measure_loss(path) for path in names if "has_fault" in path.read_text(encoding="utf-8")}
    print(f"losses measured in {time.perf_counter() - start_s:.0f} s", flush=True)
    for path in names:
        try:
            verdicts.append(profile_one(path, losses.get(path), traces))
        # One program that fails must not cost the others' traces.
        except Exception as error:  # noqa: BLE001
            verdicts.append({"program": path.name, "is_right": False, "error": f"{type(error).__name__}: {error}"})
            traceback.print_exc()
        print(json.dumps(verdicts[-1]), flush=True)
    checks: dict[str, Any] = {}
    for check in (check_guards, check_watch):
        try:
            checks[check.__name__] = check()
        except Exception as error:  # noqa: BLE001
            checks[check.__name__] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        print(check.__name__, json.dumps(checks[check.__name__]), flush=True)
    wrong = [verdict["program"] for verdict in verdicts if not verdict["is_right"]]
    ratios = [verdict["loss_to_real_loss"] for verdict in verdicts if "loss_to_real_loss" in verdict]
    num_close = sum(0.7 <= ratio <= 1.3 for ratio in ratios)
    summary = {"programs": len(verdicts), "wrong": wrong, "priced": len(ratios), "within_30_percent": num_close}
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": arguments.commit,
        "command": "python benchmarks/profile_programs.py FOLDER",
        "device": device_name(torch.device("cuda")),
        "driver": driver_version(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "seconds": time.perf_counter() - start_s,
        "summary": summary,
        "verdicts": verdicts,
        "checks": checks,
    }
    with tarfile.open(folder / "programs.tar.gz", "w:gz") as archive:
        for name, data in traces.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    (folder / "profile-programs.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
