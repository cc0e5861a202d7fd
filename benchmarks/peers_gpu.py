"""Time a token of Qwen2.5-1.5B shapes on one GPU: this engine, and PyTorch and transformers beside it in the same run.

`PYTHONPATH=src python benchmarks/peers_gpu.py [--out FOLDER]` writes `FOLDER/qwen2-1.5b-peers.json`. Random weights,
bf16, greedy, behind a context of 8192 tokens; each peer has a process of its own, between two measurements of ours.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import soloist
from decode_gpu import time_answer
from model_bench import CONTEXT_LEN, built_in
from soloist.bench.results import Peer, Result, write_result
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.roofline import measure_bandwidth
from soloist.runtime.graph import Execution

CONFIG = "qwen2.5-coder-1.5b-instruct"
NEW_TOKENS = 256
PEERS = Path(__file__).parent / "peers"
CONFIG_PATH = Path(soloist.__file__).parent / "configs" / f"{CONFIG}.json"
# Tokens of the plain eager peer, 8 of them before its clock: it launches every kernel from Python and hardly varies.
EAGER_TOKENS = 24
# Name, program, its words; the nearest peers first.
RUNS = (
    ("repeat", "run_torch_gpu.py", ("repeat", str(CONTEXT_LEN), str(NEW_TOKENS))),
    ("sdpa", "run_torch_gpu.py", ("sdpa", str(CONTEXT_LEN), str(NEW_TOKENS))),
    ("transformers", "run_transformers_gpu.py", (str(CONTEXT_LEN), "128")),
    ("eager", "run_torch_gpu.py", ("eager", str(CONTEXT_LEN), str(EAGER_TOKENS))),
    ("flex", "run_torch_gpu.py", ("flex", str(CONTEXT_LEN), str(NEW_TOKENS))),
)


def run_peer(program: str, words: tuple[str, ...], timeout_s: float) -> dict[str, Any] | None:
    """Run one peer; None if it fails, with its last words on stderr."""
    command = [sys.executable, "-W", "ignore", str(PEERS / program), str(CONFIG_PATH), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        print(f"{program} {words[0]}: not done after {timeout_s:.0f} s", file=sys.stderr)
        return None
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="default: the folder of this kind of machine")
    parser.add_argument("--commit", help="where git is not there to ask")
    parser.add_argument("--timeout", type=float, default=100.0, help="seconds of one peer")
    parser.add_argument("--only", nargs="+", choices=[name for name, *_ in RUNS], default=[name for name, *_ in RUNS])
    arguments = parser.parse_args()
    device = torch.device("cuda")
    bandwidth = measure_bandwidth(device)
    model = load_model(built_in(CONFIG), device=device, weights="random")
    execution = Execution.best_for(device)
    ours = [time_answer(model, execution)]
    print("soloist", ours[-1], flush=True)
    found: list[dict[str, Any]] = []
    for name, program, words in RUNS:
        if name not in arguments.only or (peer := run_peer(program, words, arguments.timeout)) is None:
            continue
        found.append(peer)
        print(json.dumps(peer), flush=True)
        ours.append(time_answer(model, execution))
        print("soloist", ours[-1], flush=True)
        # A measurement may be disturbed, the memory is not.
        bandwidth = max(bandwidth, measure_bandwidth(device))
        write_result(make_result(model, bandwidth, ours, found), arguments.out, arguments.commit)


def make_result(model: CausalLM, bandwidth: float, ours: list[dict[str, float]], found: list[dict[str, Any]]) -> Result:
    """Put our requests, and the peers so far, into the form that all results share."""
    tpot_ms = statistics.median(run["tpot_ms_median"] for run in ours)
    floor_ms = model.footprint.step_floor_ms(1, CONTEXT_LEN, bandwidth_gb_per_s=bandwidth)
    return Result(
        case="qwen2-1.5b-peers",
        model=CONFIG,
        device=torch.cuda.get_device_name(),
        command=" ".join(["python", *sys.argv]),
        weights="random",
        dtype="bfloat16",
        context_len=CONTEXT_LEN,
        width=1,
        tpot_ms_median=tpot_ms,
        ttft_ms=1e3 * statistics.median(run["ttft_s"] for run in ours),
        bandwidth_gb_per_s=bandwidth,
        floor_step_ms=floor_ms,
        share_of_floor=floor_ms / tpot_ms,
        peers=tuple(
            Peer(
                name=peer["name"],
                version=peer["version"],
                tpot_ms_median=peer["tpot_ms_median"],
                ratio=peer["tpot_ms_median"] / tpot_ms,
            )
            for peer in found
        ),
        details={"ours": ours, "peers": found},
    )


if __name__ == "__main__":
    main()
