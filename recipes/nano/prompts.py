"""Prompts cut from files of the corpus: to measure on, from held-out files; to train drafts on, from training files."""

import argparse
import ast
import gzip
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import Tokenizer

# Of a prompt, and least tokens of the function or class behind it.
MIN_TOKENS, MAX_TOKENS, MIN_REST = 48, 192, 128


def make_prompts(documents: Iterable[dict], num_prompts: int, encode: Callable[[str], list[int]]) -> list[dict]:
    """Cut one prompt from each of some files: whole lines from the start of a function or class, the longest that fits.

    Args:
        documents: as `prepare_data.py` wrote them; taken in the order of their hashes.
        num_prompts: most prompts.
        encode: text to token ids.
    """
    prompts: list[dict] = []
    for document in sorted(documents, key=lambda d: hashlib.sha256(d["text"].encode()).digest()):
        if len(prompts) == num_prompts:
            break
        lines = document["text"].split("\n")
        nodes = [n for n in ast.parse(document["text"]).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        for node in sorted(nodes, key=lambda n: n.lineno - n.end_lineno):
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
            sizes = [len(encode(line)) + 1 for line in lines[start : node.end_lineno]]
            end = next((i + 1 for i, size in enumerate(itertools.accumulate(sizes)) if size >= MIN_TOKENS), len(sizes))
            # A prompt ends with code, not with a blank line.
            while end < len(sizes) and not lines[start + end - 1].strip():
                end += 1
            if sum(sizes[:end]) <= MAX_TOKENS and sum(sizes[end:]) >= MIN_REST:
                text = "\n".join(lines[start : start + end])
                prompts.append({"source": document["source"], "path": document["path"], "text": text})
                break
    return prompts


def write_prompts(prompts: list[dict], path: Path) -> None:
    """Write prompts as `soloist draft` reads them."""
    path.write_text("".join(json.dumps({"prompt": prompt["text"]}) + "\n" for prompt in prompts))


def main() -> None:
    """Cut prompts from training files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl.gz and tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="the .jsonl file")
    parser.add_argument("--num-prompts", type=int, default=12000)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    with gzip.open(args.data / "train.jsonl.gz", "rt") as file:
        # A third of the files, from all sources, gives enough.
        documents = [json.loads(line) for line in itertools.islice(file, 0, None, 3)]
    prompts = make_prompts(documents, args.num_prompts, lambda text: tokenizer.encode(text).ids)
    write_prompts(prompts, args.out)
    print(f"{len(prompts)} prompts")


if __name__ == "__main__":
    main()
