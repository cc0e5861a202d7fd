"""Requests to a model that several GPUs share, as users send them: `soloist bench`, with random weights.

`PYTHONPATH=src python benchmarks/product_tp_gpu.py [--ranks 2] [--model NAME]` runs the command and writes its result,
`FOLDER/h200x2/ling3-flash-tp2-product.json`. Rank 0 leads here: it starts the others and says a word to each before
every chunk of a prompt and every step. The steps of `decode_tp_gpu.py`, which ranks take without a word, are put beside
the time per token where its nodraft case has been written to the same folder.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode_tp_gpu import NAMES
from soloist.bench.results import commit, machine_folder

SOLOIST = [sys.executable, "-c", "import sys; from soloist.cli import main; sys.exit(main(sys.argv[1:]))"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is measured."""

    model: str
    num_ranks: int
    device: str = "cuda"
    input_tokens: int = 8192
    output_tokens: int = 512
    repeats: int = 3
    # Other words of the command line.
    more: Sequence[str] = ()

    @property
    def words(self) -> list[str]:
        """The command line, behind `soloist`."""
        sizes = {
            "--tensor-parallel-size": self.num_ranks,
            "--input-tokens": self.input_tokens,
            "--output-tokens": self.output_tokens,
            "--repeats": self.repeats,
        }
        numbers = [str(word) for pair in sizes.items() for word in pair]
        return ["bench", "-m", self.model, "--weights", "random", "--device", self.device, *numbers, *self.more]


def measure(asked: Asked, out: Path, commit: str, *, limit_s: float) -> Path:
    """Run the command and write what it says."""
    command = [*SOLOIST, *asked.words, "--json"]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=True)
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    name = f"{NAMES.get(asked.model, Path(asked.model).name)}-tp{asked.num_ranks}"
    folder = out / machine_folder(result["device"], asked.num_ranks)
    nodraft = folder / f"{name}-nodraft.json"
    if nodraft.is_file():
        steps = json.loads(nodraft.read_text(encoding="utf-8"))
        result["details"]["nodraft"] = {key: steps[key] for key in ("commit", "step_ms_median", "tpot_ms_mean")}
        over_ms = result["tpot_ms_median"] - steps["step_ms_median"]
        result["details"]["nodraft"]["tpot_over_step_ms"] = round(over_ms, 4)
    path = folder / f"{name}-product.json"
    folder.mkdir(parents=True, exist_ok=True)
    result |= {"case": path.stem, "commit": commit}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    figures = ("case", "tpot_ms_median", "ttft_ms", "output_tok_per_s")
    print(json.dumps({key: result[key] for key in figures} | result["details"].get("nodraft", {})), flush=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--model", choices=list(NAMES), default="ling-3.0-flash")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--commit", default=commit(), help="where git is not there to ask")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds after which the command is ended")
    arguments = parser.parse_args()
    asked = Asked(model=arguments.model, num_ranks=arguments.ranks)
    measure(asked, arguments.out, arguments.commit, limit_s=arguments.limit_s)


if __name__ == "__main__":
    main()
