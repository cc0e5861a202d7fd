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
# Prompts of a training file.
PER_DOCUMENT = 12


def cut(lines: list[str], encode: Callable[[str], list[int]]) -> str | None:
    """Cut the beginning of a function or class, given as lines; None if its first lines or the rest do not fit."""
    sizes = []
    for line in lines:
        sizes.append(len(encode(line)) + 1)
        if sum(sizes) >= MAX_TOKENS + MIN_REST:
            break
    end = next((i + 1 for i, size in enumerate(itertools.accumulate(sizes)) if size >= MIN_TOKENS), len(sizes))
    # A prompt ends with code, not with a blank line.
    while end < len(sizes) and not lines[end - 1].strip():
        end += 1
    is_fit = sum(sizes[:end]) <= MAX_TOKENS and sum(sizes[end:]) >= MIN_REST
    return "\n".join(lines[:end]) if is_fit else None


def make_prompts(
    documents: Iterable[dict], num_prompts: int, encode: Callable[[str], list[int]], per_document: int = 1
) -> list[dict]:
    """Cut prompts from files: whole lines from the start of a function or class, the longest ones that fit.

    Args:
        documents: as `prepare_data.py` wrote them; taken in the order of their hashes.
        num_prompts: most prompts.
        encode: text to token ids.
        per_document: most prompts of a file.
    """
    prompts: list[dict] = []
    for document in sorted(documents, key=lambda d: hashlib.sha256(d["text"].encode()).digest()):
        lines = document["text"].split("\n")
        nodes = [n for n in ast.parse(document["text"]).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        nodes.sort(key=lambda n: n.lineno - n.end_lineno)
        starts = (min([n.lineno, *(d.lineno for d in n.decorator_list)]) - 1 for n in nodes)
        found = (cut(lines[start : n.end_lineno], encode) for n, start in zip(nodes, starts, strict=True))
        for text in itertools.islice(filter(None, found), per_document):
            prompts.append({"source": document["source"], "path": document["path"], "text": text})
        if len(prompts) >= num_prompts:
            break
    return prompts[:num_prompts]


def write_prompts(prompts: list[dict], path: Path) -> None:
    """Write prompts as `soloist draft` reads them."""
    path.write_text("".join(json.dumps({"prompt": prompt["text"]}) + "\n" for prompt in prompts))


def main() -> None:
    """Cut prompts from training files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl.gz and tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="the .jsonl file")
    parser.add_argument("--num-prompts", type=int, default=60000)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    with gzip.open(args.data / "train.jsonl.gz", "rt") as file:
        documents = [json.loads(line) for line in file]
    prompts = make_prompts(documents, args.num_prompts, lambda text: tokenizer.encode(text).ids, PER_DOCUMENT)
    write_prompts(prompts, args.out)
    print(f"{len(prompts)} prompts")


if __name__ == "__main__":
    main()
