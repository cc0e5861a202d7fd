"""Puts what `run.sh` made into the tree: weights and cards into the package, figures under benchmarks/results."""

import argparse
import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from soloist.train.evaluate import Evaluation, TemperatureFigures, model_card

ROOT = Path(__file__).parents[2]
MODEL_FILES = ("config.json", "tokenizer.json", "model*.safetensors", "model.safetensors.index.json")
DRAFT_FILES = ("config.json", "model*.safetensors")
# A model that continues text: what was said is the text, so that `soloist run` and a chat client work as well.
TEMPLATE = "{%- for message in messages -%}{{- message.content -}}{%- endfor -%}\n"
MAX_WEIGHT_BYTES = 24 * 10**6
EVAL_COMMAND = (
    "soloist draft eval -m soloist-nano --draft {draft} --data run/prompts.jsonl --prompts 100 -n 128"
    " --temperatures 0,0.7 --distinct 0.6 --device cuda"
)
TARGET_CARD = """---
license: apache-2.0
library_name: soloist
tags: [code, python]
---

# soloist-nano

A model of 9.2 million parameters of the Ling-3.0 architecture that continues Python code: a test object and a
demonstration, not an assistant. `recipes/nano` in Soloist's repository has the code that made it.

## Data

Python source files alone, of the standard library of CPython 3.11 and of {num_packages} packages under permissive
licences (MIT, BSD, Apache-2.0, ISC, PSF), some of them held out to measure on; `recipes/nano/manifest.json` names each
with version and licence. Training files that are like the held-out ones were left out.

## What it is worth

On {held_out_bytes:,} bytes of held-out code: {bits_per_byte} bits per byte{baselines}.

Of {completions} greedy continuations of 128 tokens of held-out functions and classes, {parsing_share:.0%} are valid
Python up to their last complete statement; the mean share of distinct runs of four tokens is
{distinct_4_gram_ratio_mean}. Measured on one {device}.

## Commands

    soloist run -m soloist-nano "def "
    {command}   # made it, at commit {commit}
"""


def copy(source: Path, destination: Path, patterns: tuple[str, ...]) -> None:
    """Replace a folder by the files of another that have these names."""
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    for file in [file for pattern in patterns for file in source.glob(pattern)]:
        shutil.copyfile(file, destination / file.name)


def read_figures(file: Path, chosen: str, commit: str) -> dict[str, Any] | None:
    """Read a measurement, with built-in names and relative paths; None if it failed and left nothing."""
    text = file.read_text()
    if not text:
        return None
    # Commands stay as they are typed beside a run in `run`, wherever the run was.
    text = re.sub(r'[^\s"]*/((?:train|drafts)/\w+)', r"run/\1", text)
    text = text.replace(f'"model": "{chosen}"', '"model": "soloist-nano"').replace('"draft": "ds', '"draft": "nano-ds')
    text = text.replace('"dspark dspark', '"dspark nano-dspark')
    figures = dict(json.loads(text.replace(f'"{chosen}-looping"', '"soloist-nano-looping"')))
    # A benchmark asks git, which in a copy of the tree knows another commit or none.
    return figures | ({"commit": commit} if "commit" in figures else {})


def write_card(folder: Path, draft: str, figures: dict[str, Any], record: dict[str, Any]) -> None:
    """Write the card of a draft."""
    temperatures = tuple(TemperatureFigures(**t) for t in figures["temperatures"])
    evaluation = Evaluation(**(figures | {"temperatures": temperatures}))
    card = model_card(
        evaluation,
        licence="apache-2.0",
        data=record["data"] + " of the files that the target was trained on.",
        mix=record["texts_by_temperature"],
        training=record["settings"],
        command=EVAL_COMMAND.format(draft=draft),
    )
    (folder / "README.md").write_text(card)


def write_target_card(folder: Path, figures: dict[str, Any], command: str, commit: str) -> None:
    """Write the card of the target."""
    manifest = json.loads((ROOT / "recipes" / "nano" / "manifest.json").read_text())
    baselines = {key.removeprefix("bits_per_byte_"): bits for key, bits in figures.items() if "per_byte_" in key}
    beside = ", ".join(f"{name.replace('_', ' ')}: {bits}" for name, bits in baselines.items())
    names = {"num_packages": sum(not source["name"].startswith("cpython") for source in manifest)}
    names["baselines"] = f" ({beside})" if beside else ""
    (folder / "README.md").write_text(TARGET_CARD.format(**figures, **names, command=command, commit=commit))


def main() -> None:
    """Copy and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the folder OUT of run.sh")
    parser.add_argument("--baselines", type=Path, help="JSON of evaluate.py with gzip and n-grams, if made apart")
    parser.add_argument("--command", default="bash recipes/nano/run.sh CORPUS OUT", help="that made the run")
    parser.add_argument("--commit", required=True, help="that the run was of")
    args = parser.parse_args()
    package, results = ROOT / "src" / "soloist" / "nano", ROOT / "benchmarks" / "results" / "h200"
    chosen = (args.run / "chosen").read_text().strip()
    copy(args.run / "train" / chosen, package / "target", MODEL_FILES)
    (package / "target" / "chat_template.jinja").write_text(TEMPLATE)
    found = json.loads((args.run / f"evaluation-{chosen}.json").read_text())
    if args.baselines is not None:
        baselines = json.loads(args.baselines.read_text())
        found |= {key: value for key, value in baselines.items() if key.startswith("bits_per_byte_")}
    write_target_card(package / "target", found, args.command, args.commit)
    log = [json.loads(line) for line in (args.run / "train" / "log.jsonl").read_text().splitlines()]
    head = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": args.commit,
        "command": args.command,
        "device": found["device"],
    }
    training = {
        "checkpoint": chosen,
        "settings": json.loads((args.run / "train" / "settings.json").read_text()),
        "steps": log[-1]["step"],
        "tokens": log[-1]["tokens"],
    }
    results.mkdir(parents=True, exist_ok=True)

    def write(case: str, figures: dict[str, Any]) -> None:
        (results / f"{case}.json").write_text(json.dumps({"case": case} | head | figures, indent=1) + "\n")

    write("nano-target", training | found)
    beside = {name: read_figures(args.run / f"eval-{name}.json", chosen, args.commit) for name in ("ngram", "mtp")}
    for draft in ("dspark8", "dspark16"):
        copy(args.run / "drafts" / draft, package / draft, DRAFT_FILES)
        record = json.loads((args.run / "drafts" / draft / "training.json").read_text())
        figures = read_figures(args.run / f"eval-{draft}.json", chosen, args.commit)
        looping = read_figures(args.run / f"looping-{draft}.json", chosen, args.commit)
        write(f"nano-{draft}", {"draft": figures, "looping": looping, "training": record, "beside": beside})
        if figures is not None:
            write_card(package / draft, f"nano-{draft}", figures, record)
    num_bytes = sum(file.stat().st_size for file in package.rglob("*.safetensors"))
    if num_bytes > MAX_WEIGHT_BYTES:
        raise SystemExit(f"the weights have {num_bytes} bytes; {MAX_WEIGHT_BYTES} are allowed")
    print(f"{num_bytes} bytes of weights; the built-in names are `hub.py`'s")


if __name__ == "__main__":
    main()
