"""Prompts from files: conversations and texts in JSONL, or a folder of source files, as token ids.

Owns the forms that a line may have. A conversation is written down by the target's own chat template, exactly as it is
when the model serves: a draft that was trained on another template drafts badly there.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soloist.errors import UnsupportedError, UsageError

# Of a folder, the files that are taken.
SOURCE_SUFFIXES = (
    ".c", ".cc", ".cpp", ".cs", ".go", ".h", ".hpp", ".java", ".js", ".jsx", ".kt", ".md", ".php", ".py", ".pyi", ".rb",
    ".rs", ".scala", ".sh", ".sql", ".swift", ".ts", ".tsx", ".txt",
)  # fmt: skip
# A text gives a prompt every so many tokens, of so many tokens at least and at most.
_STRIDE, _MIN_PROMPT, _MAX_PROMPT = 512, 16, 256
# Names of the sides of a conversation in ShareGPT's words.
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True, kw_only=True)
class Reader:
    """How text becomes token ids."""

    # A text, read as the model reads prompts.
    encode: Callable[[str], list[int]]
    # A conversation up to where the assistant answers, by the chat template. None: the model has no template.
    render: Callable[[Sequence[dict[str, Any]]], list[int]] | None


def check_data(path: Path) -> None:
    """Refuse what is neither a .jsonl file nor a folder.

    Raises:
        UsageError: it is not, or is not there.
    """
    if not path.exists():
        raise UsageError(f"--data is {path}: there is no such file or folder")
    if not path.is_dir() and not (path.suffix == ".jsonl" and path.is_file()):
        raise UsageError(f"--data is {path}: give a .jsonl file or a folder of source files")


def read_prompts(path: Path, reader: Reader, *, limit: int, max_prompt_tokens: int, seed: int) -> list[list[int]]:
    """Read prompts, in an order drawn from the seed.

    Args:
        path: a .jsonl file, or a folder of source files.
        reader: of the target.
        limit: most prompts.
        max_prompt_tokens: longer prompts are left out.
        seed: of the order, and of where texts are cut.

    Raises:
        UsageError: nothing is there, a line says nothing that is known, or no prompt is short enough.
        UnsupportedError: a conversation for a model without a chat template.
    """
    check_data(path)
    draw = random.Random(seed)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SOURCE_SUFFIXES and file.is_file())
        if not files:
            raise UsageError(f"{path} has no source files; known are {' '.join(SOURCE_SUFFIXES)}")
        draw.shuffle(files)
        prompts: list[list[int]] = []
        for file in files:
            if len(prompts) >= limit:
                break
            prompts += _cut(reader.encode(file.read_text(errors="ignore")), draw)
    else:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        draw.shuffle(lines)
        prompts = []
        for line in lines:
            if len(prompts) >= limit:
                break
            prompts += _read_line(line, path, reader, draw)
    short = [prompt for prompt in prompts if 0 < len(prompt) <= max_prompt_tokens]
    if not short:
        raise UsageError(f"{path} has {len(prompts)} prompts, none of at most {max_prompt_tokens} tokens")
    draw.shuffle(short)
    return short[:limit]


def _cut(ids: list[int], draw: random.Random) -> list[list[int]]:
    """Take beginnings of different lengths from along a text."""
    prompts = []
    for start in range(0, max(len(ids) - _MIN_PROMPT, 1), _STRIDE):
        prompts.append(ids[start : start + draw.randint(_MIN_PROMPT, _MAX_PROMPT)])
    return prompts


def _read_line(line: str, path: Path, reader: Reader, draw: random.Random) -> list[list[int]]:
    """Read one line; the forms are named in the message about others."""
    try:
        kept = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{path}: a line is not JSON ({error}): {line[:60]!r}") from None
    match kept:
        case {"messages": [*messages]}:
            return _converse([dict(message) for message in messages], path, reader)
        case {"conversations": [*turns]}:
            sides = [{"role": _ROLES.get(turn.get("from", ""), ""), "content": turn.get("value")} for turn in turns]
            return _converse(sides, path, reader)
        case {"prompt": str(text)}:
            return [reader.encode(text)]
        case {"text": str(text)}:
            return _cut(reader.encode(text), draw)
    raise UsageError(
        f'{path}: a line is none of {{"messages": [..]}}, {{"conversations": [..]}}, {{"prompt": ".."}},'
        f' {{"text": ".."}}: {line[:60]!r}'
    )


def _converse(messages: list[dict[str, Any]], path: Path, reader: Reader) -> list[list[int]]:
    """Write a conversation down up to its last question."""
    while messages and messages[-1].get("role") != "user":
        messages.pop()
    if not messages:
        raise UsageError(f"{path}: a conversation has no message of the user")
    if reader.render is None:
        raise UnsupportedError(f"{path} has conversations, and this model no chat template: give texts or prompts")
    return [reader.render(messages)]
