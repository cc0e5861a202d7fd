"""Puts what `run.sh` made into the tree: weights into the package, figures under benchmarks/results."""

import argparse
import json
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL_FILES = ("config.json", "tokenizer.json", "model*.safetensors", "model.safetensors.index.json")
DRAFT_FILES = ("config.json", "model*.safetensors")
# A model that continues text: what was said is the text, so that `soloist run` and a chat client work as well.
TEMPLATE = "{%- for message in messages -%}{{- message.content -}}{%- endfor -%}\n"
MAX_WEIGHT_BYTES = 24 * 10**6


def copy(source: Path, destination: Path, patterns: tuple[str, ...]) -> None:
    """Replace a folder by the files of another that have these names."""
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    for file in [file for pattern in patterns for file in source.glob(pattern)]:
        shutil.copyfile(file, destination / file.name)


def main() -> None:
    """Copy and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the folder OUT of run.sh")
    parser.add_argument("--baselines", type=Path, help="JSON of evaluate.py with gzip and n-grams, if made apart")
    args = parser.parse_args()
    package, results = ROOT / "src" / "soloist" / "nano", ROOT / "benchmarks" / "results" / "h200"
    chosen = (args.run / "chosen").read_text().strip()
    copy(args.run / "train" / chosen, package / "target", MODEL_FILES)
    (package / "target" / "chat_template.jinja").write_text(TEMPLATE)
    for draft in sorted((args.run / "drafts").glob("dspark*")):
        copy(draft, package / draft.name, DRAFT_FILES)
    num_bytes = sum(file.stat().st_size for file in package.rglob("*.safetensors"))
    if num_bytes > MAX_WEIGHT_BYTES:
        raise SystemExit(f"the weights have {num_bytes} bytes; {MAX_WEIGHT_BYTES} are allowed")
    found = json.loads((args.run / f"evaluation-{chosen}.json").read_text())
    if args.baselines is not None:
        baselines = json.loads(args.baselines.read_text())
        found |= {key: value for key, value in baselines.items() if key.startswith("bits_per_byte_")}
    log = [json.loads(line) for line in (args.run / "train" / "log.jsonl").read_text().splitlines()]
    head = {
        "case": "nano-target",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip(),
        "command": "bash recipes/nano/run.sh CORPUS OUT",
        "checkpoint": chosen,
        "settings": json.loads((args.run / "train" / "settings.json").read_text()),
        "steps": log[-1]["step"],
        "tokens": log[-1]["tokens"],
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / "nano-target.json").write_text(json.dumps(head | found, indent=1) + "\n")
    # A measurement that failed leaves an empty file.
    drafters = [json.loads(text) for file in sorted(args.run.glob("eval-*.json")) if (text := file.read_text())]
    (results / "nano-drafts.json").write_text(
        json.dumps(head | {"case": "nano-drafts", "drafters": drafters}, indent=1) + "\n"
    )
    print(f"{num_bytes} bytes of weights; the built-in name is `hub.py`'s")


if __name__ == "__main__":
    main()
