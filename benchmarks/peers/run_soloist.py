"""Times greedy decoding with Soloist, through its public API. Prints one JSON line.

Usage: run_soloist.py MODEL.gguf WORK_DIR THREADS RUNS NEW_TOKENS PROMPT
"""

import json
import sys
import time

import torch

from soloist import LLM, SamplingParams, __version__


def main() -> None:
    model = sys.argv[1]
    num_threads, num_runs, num_new = (int(word) for word in sys.argv[3:6])
    prompt = sys.argv[6]
    if num_runs == 0:
        return
    llm = LLM(model, device="cpu", num_threads=num_threads, max_context_len=512)
    params = SamplingParams(max_tokens=num_new, ignore_eos=True)
    runs, text, num_prompt = [], "", 0
    # The first run warms up.
    for run in range(num_runs + 1):
        times = []
        start = time.perf_counter()
        stream = llm.stream(prompt, params)
        for _ in stream:
            times.append(time.perf_counter())
        assert len(times) == num_new, "a step gave more or less than one token"
        if run:
            tpot_ms = (times[-1] - times[0]) * 1e3 / (num_new - 1)
            runs.append({"ttft_ms": (times[0] - start) * 1e3, "tpot_ms": tpot_ms})
        text = stream.completion.text
        num_prompt = stream.completion.stats.prompt_tokens
    report = llm.engine.runner.model.report
    held = ", ".join(f"{num_bytes / 1e6:.0f} MB {kind}" for kind, num_bytes in report.bytes_by_format.items())
    print(
        json.dumps(
            {
                "version": __version__,
                "torch": torch.__version__,
                "weights_held": held,
                "num_prompt_tokens": num_prompt,
                "bytes_per_token": llm.engine.runner.model.footprint.bytes_per_token,
                "runs": runs,
                "text": text,
            }
        )
    )


if __name__ == "__main__":
    main()
