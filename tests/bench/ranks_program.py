"""The benchmark of several GPUs on ranks of a CPU: a miniature model, a made-up clock, a few steps of every part.

`python -m tests.bench.ranks_program FOLDER CASE ...` is one rank, which `RANK` and `WORLD_SIZE` number.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import decode_tp_gpu
import model_bench
from soloist.bench import prefill, steps
from tests.miniature import miniature_config

CONTEXT_LEN, ROOM = 40, 900


def stamp(times: torch.Tensor, num_steps: torch.Tensor, *, is_end: bool) -> None:
    times[int(num_steps) % len(times), int(is_end)] = time.perf_counter_ns()
    num_steps += is_end


def main() -> None:
    folder, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.set_sync_debug_mode = lambda mode: None
    steps.stamp, steps._trace = stamp, lambda meter: (0.0, 1)
    prefill.stamp = stamp
    events = [(0, 9, "nccl"), (9, 1, "stamp_kernel"), (10, 3, "nccl"), (12, 2, "grouped_down_kernel")]
    prefill.trace_gpu = lambda run: run() or events
    steps._TOKENS, steps._FEWEST_STEPS = 30, 12
    model_bench.measure_bandwidth = lambda device: 100.0
    model_bench.load_model = partial(model_bench.load_model, dtype=torch.float32)
    decode_tp_gpu.MOST_STEPS, decode_tp_gpu.ANSWER_TOKENS, decode_tp_gpu.NUM_ANSWERS = 14, 40, 2
    # Of sizes that 4 ranks can share.
    sizes = {"moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 24}
    config = miniature_config("bailing_moe_v3", num_attention_heads=4, num_key_value_heads=4, **sizes)
    options = {"out": Path(folder), "commit": "none", "draft_layers": ["sharded", "replicated"]}
    arguments = argparse.Namespace(model="miniature", cases=cases, **options)
    decode_tp_gpu.run_rank(arguments, config, "cpu", context_len=CONTEXT_LEN, room=ROOM)


if __name__ == "__main__":
    main()
