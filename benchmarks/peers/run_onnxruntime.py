"""Times greedy decoding with onnxruntime-genai, int4 weights made from the same model. Prints one JSON line.

Runs in its own environment, after run_transformers.py has written the bfloat16 checkpoint.

Usage: run_onnxruntime.py MODEL.gguf WORK_DIR THREADS RUNS NEW_TOKENS PROMPT
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import onnxruntime_genai


def build(source: Path, folder: Path, cache: Path) -> None:
    """Write the int4 model, once."""
    if (folder / "genai_config.json").exists():
        return
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(folder)]
    command += ["-p", "int4", "-e", "cpu", "-c", str(cache)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def main() -> None:
    gguf, work_dir = Path(sys.argv[1]), Path(sys.argv[2])
    num_threads, num_runs, num_new = (int(word) for word in sys.argv[3:6])
    prompt = sys.argv[6]
    folder = work_dir / f"{gguf.stem}-onnx-int4"
    build(work_dir / f"{gguf.stem}-bf16", folder, work_dir / "onnx-cache")
    config_path = folder / "genai_config.json"
    config = json.loads(config_path.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = num_threads
    config_path.write_text(json.dumps(config, indent=1))
    if num_runs == 0:
        return
    model = onnxruntime_genai.Model(str(folder))
    tokenizer = onnxruntime_genai.Tokenizer(model)
    prompt_ids = tokenizer.encode(prompt)
    max_length = len(prompt_ids) + num_new
    runs, text = [], ""
    # The first run warms up.
    for run in range(num_runs + 1):
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=max_length, min_length=max_length, top_k=1)
        generator = onnxruntime_genai.Generator(model, params)
        start = time.perf_counter()
        generator.append_tokens(prompt_ids)
        generator.generate_next_token()
        first = time.perf_counter()
        for _ in range(num_new - 1):
            generator.generate_next_token()
        last = time.perf_counter()
        if run:
            runs.append({"ttft_ms": (first - start) * 1e3, "tpot_ms": (last - first) * 1e3 / (num_new - 1)})
        text = tokenizer.decode(generator.get_sequence(0)[len(prompt_ids) :])
    weight_bytes = sum(path.stat().st_size for path in folder.glob("*.onnx*"))
    print(
        json.dumps(
            {
                "version": onnxruntime_genai.__version__,
                "num_prompt_tokens": len(prompt_ids),
                "bytes_per_token": weight_bytes,
                "runs": runs,
                "text": text,
            }
        )
    )


if __name__ == "__main__":
    main()
