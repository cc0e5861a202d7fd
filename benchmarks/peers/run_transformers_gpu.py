"""Times greedy decoding with transformers and its static cache, which compiles the step by itself.

Usage: run_transformers_gpu.py CONFIG.json CONTEXT_LEN NEW_TOKENS [DEVICE]; prints one JSON line. Weights are random;
the time is that of `NEW_TOKENS` tokens behind the first few.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

REPEATS = 3
SKIPPED_TOKENS = 8


class Stopwatch(BaseStreamer):
    """Notes when each token has arrived on the host; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        pass


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    context_len, num_new = int(sys.argv[2]), int(sys.argv[3])
    device = sys.argv[4] if len(sys.argv) > 4 else "cuda"
    transformers.logging.set_verbosity_error()
    config = {key: value for key, value in config.items() if key not in ("architectures", "torch_dtype", "use_cache")}
    with torch.device(device):
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config)).to(torch.bfloat16).eval()
    prompt = torch.randint(config["vocab_size"], (1, context_len), device=device)
    num_tokens = num_new + SKIPPED_TOKENS + 1
    started_s = time.perf_counter()
    tpot_ms = []
    for _ in range(REPEATS + 1):
        stopwatch = Stopwatch()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
            streamer=stopwatch,
        )
        times_s = stopwatch.times_s[-num_new - 1 :]
        tpot_ms.append(1e3 * (times_s[-1] - times_s[0]) / num_new)
        if len(tpot_ms) == 1:
            warm_up_s = time.perf_counter() - started_s
    result = {
        "name": "transformers, generate with a static cache",
        "version": transformers.__version__,
        "tpot_ms_median": statistics.median(tpot_ms[1:]),
        "tpot_ms_range": [min(tpot_ms[1:]), max(tpot_ms[1:])],
        "warm_up_s": warm_up_s,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
