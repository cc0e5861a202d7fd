"""Case `cpu-peers`: decode speed of the default model on this CPU, beside other engines, in one run.

Every engine runs alone, in its own environment and process; rounds are interleaved, and read bandwidth is measured in
each. Environments and converted models are kept under the user's cache folder, not in the repository. An engine that
cannot be installed is reported as absent. `make bench-cpu` runs it; building llama.cpp takes some minutes and a C++
compiler.
"""

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from soloist.config import Environment
from soloist.doctor import cpu_name
from soloist.hub import find_model
from soloist.roofline import measure_bandwidth

HERE = Path(__file__).parent
RESULT = HERE / "results" / "cpu" / "cpu-peers.json"
# 33 tokens in the default model's vocabulary.
PROMPT = (
    "The history of computing is a story of people who wanted machines to do the boring part of thinking. "
    "In the early days, engineers wired each program by hand, and"
)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine and how to run it."""

    name: str
    script: str
    # What its environment holds; None: the environment this runs in.
    requirements: tuple[str, ...] | None
    # Environment variables its installation needs.
    build_environment: tuple[tuple[str, str], ...] = ()


OURSELVES = Engine(name="soloist", script="run_soloist.py", requirements=None)
# transformers comes first: it writes the checkpoint that onnxruntime converts.
PEERS = (
    Engine(
        name="transformers bf16",
        script="run_transformers.py",
        requirements=("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "gguf==0.19.0", "numpy<2.4"),
    ),
    Engine(
        name="onnxruntime-genai int4",
        script="run_onnxruntime.py",
        requirements=(
            "onnxruntime-genai==0.18.0",
            "onnxruntime",
            "torch==2.13.0",
            "transformers==5.24.0",
            "onnx",
            "onnx-ir",
        ),
    ),
    Engine(
        name="llama.cpp, same file",
        script="run_llama_cpp.py",
        requirements=("llama-cpp-python==0.3.36",),
        build_environment=(("CMAKE_ARGS", "-DGGML_NATIVE=ON"),),
    ),
)


class AbsentError(Exception):
    """An engine cannot be had on this machine."""


def say(text: str) -> None:
    """Tell what is going on, on stderr."""
    print(text, file=sys.stderr, flush=True)


def make_environment(engine: Engine, work_dir: Path) -> Path:
    """Make an engine's environment, once, and give its interpreter.

    Raises:
        AbsentError: it cannot be installed.
    """
    if engine.requirements is None:
        return Path(sys.executable)
    key = hashlib.sha256("\n".join((sys.version, *engine.requirements)).encode()).hexdigest()[:12]
    folder = work_dir / f"{engine.script.removeprefix('run_').removesuffix('.py')}-{key}"
    python = folder / "bin" / "python"
    stamp = folder / "complete"
    if not stamp.exists():
        say(f"{engine.name}: installing {', '.join(engine.requirements)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, stdout=sys.stderr)
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *engine.requirements]
        environment = os.environ | dict(engine.build_environment)
        if subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode:
            raise AbsentError("its packages could not be installed")
        stamp.touch()
    return python


def run_engine(
    engine: Engine, python: Path, model: Path, work_dir: Path, options: argparse.Namespace, num_runs: int
) -> str:
    """Run an engine's script; `num_runs` 0 only prepares its model. Gives the last line it printed.

    Raises:
        AbsentError: it failed.
    """
    words = [str(model), str(work_dir), str(options.threads), str(num_runs), str(options.tokens), PROMPT]
    command = [str(python), str(HERE / "peers" / engine.script), *words]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise AbsentError(f"its script ended with exit code {done.returncode}")
    return (done.stdout.splitlines() or [""])[-1]


def percentile(values: list[float], share: float) -> float:
    """Give the value below which `share` of the values lie, the nearest of them."""
    return sorted(values)[min(len(values) - 1, round(share * (len(values) - 1)))]


def summarise(name: str, outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Put an engine's runs of all rounds together."""
    tpot = [run["tpot_ms"] for output in outputs for run in output["runs"]]
    return {
        "name": name,
        "version": outputs[0]["version"],
        "tpot_ms_median": statistics.median(tpot),
        "tpot_ms_p10": percentile(tpot, 0.1),
        "tpot_ms_p90": percentile(tpot, 0.9),
        "tpot_ms_mean": statistics.fmean(tpot),
        "tok_per_s_median": 1e3 / statistics.median(tpot),
        "ttft_ms": statistics.median(run["ttft_ms"] for output in outputs for run in output["runs"]),
        "num_prompt_tokens": outputs[0]["num_prompt_tokens"],
        "bytes_per_token": outputs[0]["bytes_per_token"],
        "num_runs": len(tpot),
        "text": outputs[0]["text"],
    }


def git_commit() -> str:
    """Name the commit that is measured; a `+` marks changes on top of it."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True
    ).stdout.strip()
    status = ["git", "status", "--porcelain", "--untracked-files=no"]
    is_changed = subprocess.run(status, cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()
    return commit + ("+" if is_changed else "")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a .gguf file; default: Soloist's default model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="times every engine is started")
    parser.add_argument("--runs", type=int, default=3, help="measured answers per start")
    parser.add_argument("--tokens", type=int, default=128, help="length of an answer")
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peers", nargs="*", choices=names, default=names, help="default: all of them")
    parser.add_argument("--output", type=Path, default=RESULT, help="where the result goes")
    return parser.parse_args()


def prepare(names: list[str], model: Path, work_dir: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Install the peers and convert the model for them; gives their interpreters, or why one is absent."""
    found: dict[str, Any] = {}
    for peer in PEERS:
        if peer.name in names:
            try:
                python = make_environment(peer, work_dir)
                run_engine(peer, python, model, work_dir, options, num_runs=0)
                found[peer.name] = python
            except AbsentError as error:
                say(f"{peer.name}: absent, {error}")
                found[peer.name] = str(error)
    return found


def measure(
    engines: list[tuple[Engine, Path]], model: Path, work_dir: Path, options: argparse.Namespace
) -> tuple[dict[str, list[dict[str, Any]]], list[float]]:
    """Run every engine once a round; gives their outputs by name, and the read bandwidth of each round."""
    outputs: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine, _ in engines}
    bandwidths = []
    for i in range(options.rounds):
        bandwidths.append(measure_bandwidth("cpu"))
        say(f"round {i + 1} of {options.rounds}: read bandwidth {bandwidths[-1]:.1f} GB/s")
        for engine, python in engines:
            output = json.loads(run_engine(engine, python, model, work_dir, options, options.runs))
            outputs[engine.name].append(output)
            speeds = ", ".join(f"{1e3 / run['tpot_ms']:.1f}" for run in output["runs"])
            say(f"  {engine.name}: {speeds} tok/s")
    return outputs, bandwidths


def main() -> None:
    options = parse_options()
    work_dir = Environment.read().cache_dir / "peers"
    work_dir.mkdir(parents=True, exist_ok=True)
    model = options.model or find_model().path
    assert model.is_file(), f"{model} is not a GGUF file, which all engines can read"
    torch.set_num_threads(options.threads)

    peers_found = prepare(options.peers, model, work_dir, options)
    engines = [(OURSELVES, Path(sys.executable))]
    engines += [(peer, peers_found[peer.name]) for peer in PEERS if isinstance(peers_found.get(peer.name), Path)]
    outputs, bandwidths = measure(engines, model, work_dir, options)

    summaries = {name: summarise(name, runs) for name, runs in outputs.items()}
    ours = summaries.pop(OURSELVES.name)
    # A ratio above 1: Soloist is faster.
    peers: list[dict[str, Any]] = [
        peer | {"ratio": peer["tpot_ms_median"] / ours["tpot_ms_median"]} for peer in summaries.values()
    ]
    peers += [{"name": n, "version": None, "absent": why} for n, why in peers_found.items() if isinstance(why, str)]
    bandwidth = statistics.median(bandwidths)
    floor_ms = ours["bytes_per_token"] / bandwidth / 1e6
    result = {
        "case": "cpu-peers",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": git_commit(),
        "command": " ".join(["python", "benchmarks/cpu_peers.py", *sys.argv[1:]]),
        "device": f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {options.threads} threads",
        "driver": platform.release(),
        "torch": torch.__version__,
        "triton": None,
        "model": model.name,
        "weights": "real",
        "tensor_parallel_size": 1,
        "dtype": outputs[OURSELVES.name][0]["weights_held"],
        "context_len": ours["num_prompt_tokens"] + options.tokens,
        "width": 1,
        "acceptance_length": 1.0,
        "acceptance_simulated": False,
        **{key: value for key, value in ours.items() if key not in ("name", "version")},
        "step_ms_median": ours["tpot_ms_median"],
        "floor_step_ms": floor_ms,
        "share_of_floor": floor_ms / ours["tpot_ms_median"],
        "bandwidth_gb_per_s": bandwidth,
        "bandwidth_gb_per_s_by_round": bandwidths,
        "peers": peers,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    main()
