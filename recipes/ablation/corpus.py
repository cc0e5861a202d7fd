"""What the corpus itself says behind the prompts of soloist-nano's drafts, and prompts from held-out files.

    python recipes/ablation/corpus.py --corpus CORPUS --prompts CORPUS/draft_prompts.jsonl --out FOLDER

writes `trained.jsonl`, lines of {"prompt", "rest"}, and `held-out.jsonl`, lines of {"prompt"}. CORPUS is what
scripts in `recipes/nano` wrote.
"""

import argparse
import gzip
import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "nano"))
from prompts import make_prompts

# Characters of text that are kept behind a prompt: more than an answer has.
REST_CHARS = 900
NUM_HELD_OUT = 120


def find_rests(documents: Iterable[dict[str, Any]], prompts: Iterable[str]) -> dict[str, str]:
    """Find prompts, which are whole lines of documents, and give what stands behind each."""
    by_first_line: dict[str, list[str]] = {}
    for prompt in prompts:
        by_first_line.setdefault(prompt.split("\n", 1)[0], []).append(prompt)
    found: dict[str, str] = {}
    for document in documents:
        text, start = document["text"], 0
        for line in text.split("\n"):
            for prompt in by_first_line.get(line, ()):
                end = start + len(prompt)
                if prompt not in found and text.startswith(prompt, start) and text[end : end + 1] == "\n":
                    found[prompt] = text[end : end + REST_CHARS]
            start += len(line) + 1
    return found


def read_documents(path: Path) -> Iterable[dict[str, Any]]:
    """Read documents one by one."""
    with gzip.open(path, "rt") as file:
        yield from map(json.loads, file)


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of train.jsonl.gz and tokenizer.json")
    parser.add_argument("--prompts", type=Path, required=True, help="what recipes/nano/prompts.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--count", type=int, default=4000, help="most prompts to train on, as many as ablate.py reads")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]
    # From all over the file.
    prompts = prompts[:: max(len(prompts) // args.count, 1)][: args.count]
    rests = find_rests(read_documents(args.corpus / "train.jsonl.gz"), prompts)
    lines = [{"prompt": prompt, "rest": rests[prompt]} for prompt in prompts if prompt in rests]
    (args.out / "trained.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = Tokenizer.from_file(str(args.corpus / "tokenizer.json"))
    documents = list(itertools.islice(read_documents(args.corpus / "held_out.jsonl.gz"), 4 * NUM_HELD_OUT))
    held_out = make_prompts(documents, NUM_HELD_OUT, lambda text: tokenizer.encode(text).ids)
    (args.out / "held-out.jsonl").write_text("".join(json.dumps({"prompt": p["text"]}) + "\n" for p in held_out))
    print(f"{len(lines)} prompts with what follows them, {len(held_out)} held out")


if __name__ == "__main__":
    main()
