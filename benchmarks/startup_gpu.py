"""Time the way to the first token on one GPU: `soloist run` on a config with random weights, cold and from its cache.

`PYTHONPATH=src python benchmarks/startup_gpu.py [--out FOLDER]` writes `FOLDER/startup.json`: the first start finds no
compiled kernel, three more find those of the first, and their median counts. A second program then says what the time
goes into, and what is compiled for prompts of other lengths and other ways of sampling.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = "qwen2.5-coder-1.5b-instruct"
# Starts that find compiled kernels. The cold one is measured once: the page cache of its files is cold once as well.
WARM_STARTS = 3
# What the installed command runs.
MAIN = "import sys; from soloist.cli import main; sys.exit(main())"
PROMPT = " ".join(str(17 * i % 1000) for i in range(1, 101))
# Lengths of prompts: one row, a step's rows, more than those, several chunks.
LENGTHS = (1, 2, 5, 16, 17, 100, 129, 1000, 2049, 5000)


def in_cache(cache: Path) -> dict[str, str]:
    """Give an environment in which every compiler keeps its code in a folder."""
    return os.environ | {"TRITON_CACHE_DIR": str(cache / "triton"), "XDG_CACHE_HOME": str(cache)}


def start(cache: Path, model: str) -> dict[str, float]:
    """Run the command once: seconds to the first token, and to the end."""
    words = ["-c", MAIN, "run", "-m", model, "--weights", "random", "--device", "cuda", "-n", "16", PROMPT]
    begin_s = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, env=in_cache(cache))
    assert process.stdout is not None
    first = process.stdout.read(1)
    first_s = time.perf_counter() - begin_s
    process.stdout.read()
    assert process.wait() == 0 and first, "the command failed"
    return {"first_token_s": round(first_s, 2), "end_s": round(time.perf_counter() - begin_s, 2)}


def summarise(starts: list[dict[str, float]]) -> dict[str, Any]:
    """Tell the first start, of which there is one, from the median of those that find its kernels."""
    cold, *warm = (run["first_token_s"] for run in starts)
    return {
        "cold_first_token_s": cold,
        "warm_first_token_s_median": statistics.median(warm),
        "warm_first_token_s_range": (min(warm), max(warm)),
        "starts": starts,
    }


def phases(cache: Path, model: str) -> dict[str, Any]:
    """Run the second program."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--phases", model],
        capture_output=True,
        text=True,
        env=in_cache(cache),
    )
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def print_phases(model: str) -> None:
    """Load and answer, with a stopwatch and an ear on the compiler; prints one JSON object."""
    begin_s = last_s = time.perf_counter()
    result: dict[str, Any] = {}

    def note(name: str) -> None:
        nonlocal last_s
        now_s = time.perf_counter()
        result[f"{name}_s"] = round(now_s - last_s, 2)
        last_s = now_s

    import torch

    note("import_torch")
    import triton

    from soloist.kernels import nvrtc
    from soloist.llm import LLM
    from soloist.sampling_params import SamplingParams

    note("import_soloist")
    compiled: list[dict[str, Any]] = []

    def listen(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        stages = {name: round(us / 1e3) for name, us in times.lowering_stages}
        compiled.append({"name": src.name, "hit": cache_hit, "ms": round(times.total / 1e3), "stages": stages})

    def take() -> list[dict[str, Any]]:
        taken = compiled[:]
        compiled.clear()
        return taken

    triton.knobs.compilation.listener = listen
    find_cubin = nvrtc._find_cubin

    def find_and_note(source: str, name: str, *what: Any) -> bytes:
        started_s = time.perf_counter()
        cubin = find_cubin(source, name, *what)
        compiled.append({"name": name, "ms": round(1e3 * (time.perf_counter() - started_s)), "stages": {}})
        return cubin

    nvrtc._find_cubin = find_and_note
    torch.zeros(1, device="cuda")
    note("cuda")
    llm = LLM(model, weights="random", device="cuda")
    torch.cuda.synchronize()
    note("load")
    result["compiled_at_load"] = take()
    prompt = [int(word) for word in PROMPT.split()]
    stream = llm.stream(prompt, SamplingParams(max_tokens=16, ignore_eos=True))
    next(stream)
    note("first_token")
    result["total_s"] = round(last_s - begin_s, 2)
    result["compiled_before_first_token"] = take()
    list(stream)
    result["compiled_while_streaming"] = take()
    later: dict[str, Any] = {}
    for length in LENGTHS:
        started_s = time.perf_counter()
        list(llm.stream([17 * i % 1000 for i in range(length)], SamplingParams(max_tokens=4, ignore_eos=True)))
        later[str(length)] = [round(time.perf_counter() - started_s, 3), [kernel["name"] for kernel in take()]]
    result["by_prompt_length"] = later
    for name, params in {
        "sampled": SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9, seed=1),
        "penalised": SamplingParams(max_tokens=4, temperature=0.7, presence_penalty=0.5, seed=1),
    }.items():
        started_s = time.perf_counter()
        list(llm.stream(prompt, params))
        result[name] = [round(time.perf_counter() - started_s, 3), [kernel["name"] for kernel in take()]]
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="default: the folder of this kind of machine")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--commit", help="where git is not there to ask")
    parser.add_argument("--phases", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.phases:
        print_phases(arguments.phases)
        return
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        starts = []
        for _ in range(1 + WARM_STARTS):
            starts.append(start(Path(first), arguments.model))
            print("cold" if len(starts) == 1 else "warm", starts[-1], flush=True)
        details: dict[str, Any] = summarise(starts)
        write(arguments, details)
        for name in ("cold", "warm"):
            details[name] = phases(Path(second), arguments.model)
            short = {key: value for key, value in details[name].items() if not key.startswith("compiled_")}
            print(name, json.dumps(short), flush=True)
            write(arguments, details)


def write(arguments: argparse.Namespace, details: dict[str, Any]) -> None:
    """Write what is measured so far in the form that all results share."""
    import torch

    from soloist.bench.results import Result, write_result

    result = Result(
        case="startup",
        model=arguments.model,
        device=torch.cuda.get_device_name(),
        command=" ".join(["python", *sys.argv]),
        weights="random",
        dtype="bfloat16",
        details=details,
    )
    write_result(result, arguments.out, arguments.commit)


if __name__ == "__main__":
    main()
