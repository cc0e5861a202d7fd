"""Times greedy decoding with transformers in bfloat16. Runs in its own environment; prints one JSON line.

Usage: run_transformers.py MODEL.gguf WORK_DIR THREADS RUNS NEW_TOKENS PROMPT
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers.generation.streamers import BaseStreamer


class Stopwatch(BaseStreamer):
    """Notes when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def dequantise(gguf: Path, folder: Path) -> None:
    """Write the GGUF file as an ordinary bfloat16 checkpoint, once."""
    if (folder / "config.json").exists():
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def main() -> None:
    gguf, work_dir = Path(sys.argv[1]), Path(sys.argv[2])
    num_threads, num_runs, num_new = (int(word) for word in sys.argv[3:6])
    prompt = sys.argv[6]
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(num_threads)
    folder = work_dir / f"{gguf.stem}-bf16"
    dequantise(gguf, folder)
    if num_runs == 0:
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    input_ids = tokenizer(prompt, return_tensors="pt").input_ids
    runs, text = [], ""
    # The first run warms up.
    for run in range(num_runs + 1):
        stopwatch = Stopwatch()
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                input_ids,
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                eos_token_id=None,
                streamer=stopwatch,
            )
        # The streamer is given the prompt first.
        first, last = stopwatch.times[1], stopwatch.times[-1]
        if run:
            runs.append({"ttft_ms": (first - start) * 1e3, "tpot_ms": (last - first) * 1e3 / (num_new - 1)})
        text = tokenizer.decode(output[0, input_ids.shape[1] :])
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    print(
        json.dumps(
            {
                "version": f"{transformers.__version__} with torch {torch.__version__}",
                "num_prompt_tokens": input_ids.shape[1],
                "bytes_per_token": weight_bytes,
                "runs": runs,
                "text": text,
            }
        )
    )


if __name__ == "__main__":
    main()
