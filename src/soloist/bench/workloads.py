"""What is asked: the prompts of a benchmark, the same for every engine.

Every repeat of every run gets its own variant of a prompt, which differs in its first words: an engine that keeps what
it has read would else read nothing the second time and look several times too fast.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from soloist.errors import UsageError

CountTokens = Callable[[str], int]

NAMES = ("looping", "code", "chat", "edit")
# Of the published comparison, and what a CPU does in the same time.
INPUT_TOKENS, OUTPUT_TOKENS = 8192, 1024
CPU_INPUT_TOKENS, CPU_OUTPUT_TOKENS = 128, 64

_PASSAGE = (
    "The harbour wakes before the town does. Ropes are loosened, engines cough, and the first boats slide past the "
    "lighthouse while the street lamps still burn. On the quay a woman counts crates of ice, a boy chases a gull from "
    "the scales, and the baker's van arrives with bread that is too hot to touch. By the time the church bell strikes "
    "seven the boats are dots on the horizon, and the harbour belongs to the tourists, the painters and the cats. "
)
_CODE = (
    '''import heapq
from collections import defaultdict


class Graph:
    """A directed graph with weighted edges."""

    def __init__(self):
        self.edges = defaultdict(list)

    def add_edge(self, start, end, weight):
        self.edges[start].append((end, weight))

    def shortest_path(self, start, goal):
        """Return the nodes of the shortest path from start to goal, or None."""
''',
    '''def parse_csv(text, separator=","):
    """Split CSV text into rows of fields. Quoted fields may hold separators and line breaks."""
''',
)
_CHAT = (
    "Why is the sky blue, and why is a sunset red? Explain it to a curious twelve-year-old.",
    "Plan a weekend in Lisbon for two people who like old trams, seafood and quiet museums.",
    "My tomato plants have yellow leaves at the bottom. What could it be, and what should I do first?",
)
_EDIT = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))

    def transfer(self, other, amount):
        self.withdraw(amount)
        other.deposit(amount)

    def report(self):
        lines = [f"Account of {self.owner}"]
        for kind, amount in self.history:
            lines.append(f"{kind}: {amount}")
        lines.append(f"balance: {self.balance}")
        return "\\n".join(lines)
"""


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """One prompt: text to continue, or a message to answer."""

    text: str
    is_chat: bool


def draw_run() -> int:
    """Draw the number of a run: six digits, which are as many tokens whatever they are."""
    return random.SystemRandom().randrange(100_000, 900_000)


# One token each in most vocabularies.
_ORDINALS = ("First", "Second", "Third", "Fourth", "Fifth", "Next", "Last", "Now", "Then", "Again")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts, and how much is asked for."""

    name: str
    prompts: tuple[BenchPrompt, ...]
    max_tokens: int
    # Whether an answer goes on behind its end, so that it has exactly `max_tokens`.
    ignore_eos: bool
    # See `draw_run`: a server has not read the prompts of another run.
    run: int

    def repeat(self, i: int) -> tuple[BenchPrompt, ...]:
        """Give the prompts of repeat i: as long, but different from their first words on."""
        words = _first_words(self.run, i)
        if self.name == "code":
            words = f"# {words.rstrip()}\n"
        return tuple(BenchPrompt(text=words + prompt.text, is_chat=prompt.is_chat) for prompt in self.prompts)


def _first_words(run: int, i: int) -> str:
    # The ordinal first: the number is a token a digit, and a server would keep them from repeat to repeat.
    return f"{_ORDINALS[i % len(_ORDINALS)]} {run + i // len(_ORDINALS)}. "


def make_workload(
    name: str, *, input_tokens: int | None, output_tokens: int, count_tokens: CountTokens | None, run: int
) -> Workload:
    """Make one of `NAMES`, or one of a file.

    Args:
        name: of `NAMES`, or a path: a text file is one prompt, a .jsonl file one per line with "prompt" or "message".
        input_tokens: length of the prompt of `looping`; None for the others.
        output_tokens: most tokens of an answer.
        count_tokens: counts tokens of a text. None: the model has no tokenizer, and a word counts as a token.
        run: number of this run, of `draw_run`.

    Raises:
        UsageError: there is no such workload, or `input_tokens` does not fit it.
    """
    prompts: tuple[BenchPrompt, ...]
    if name == "looping":
        count = count_tokens or (lambda text: len(text.split()))
        text = _looping_text((input_tokens or INPUT_TOKENS) - count(_first_words(run, 0)), count)
        prompts = (BenchPrompt(text=text, is_chat=False),)
        # It has no end that a model could find.
        return Workload(name=name, prompts=prompts, max_tokens=output_tokens, ignore_eos=True, run=run)
    if input_tokens is not None:
        raise UsageError(f"--input-tokens is for the workload looping; the prompts of {name} are as long as they are")
    if name == "code":
        prompts = tuple(BenchPrompt(text=text, is_chat=False) for text in _CODE)
    elif name == "chat":
        prompts = tuple(BenchPrompt(text=text, is_chat=True) for text in _CHAT)
    elif name == "edit":
        request = f"Rename `balance` to `funds` everywhere and change nothing else. Give the whole file.\n\n{_EDIT}"
        prompts = (BenchPrompt(text=request, is_chat=True),)
    else:
        prompts = _read_prompts(Path(name))
        name = Path(name).name
    return Workload(name=name, prompts=prompts, max_tokens=output_tokens, ignore_eos=False, run=run)


def _looping_text(num_tokens: int, count_tokens: CountTokens) -> str:
    """Repeat a passage until it has `num_tokens` tokens, to the word; at least one word."""
    words = _PASSAGE.split(" ")
    per_word = count_tokens(_PASSAGE * 4) / (4 * len(words))
    low, high = 1, max(2, int(2 * num_tokens / per_word))
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens(_words(words, middle)) <= num_tokens:
            low = middle
        else:
            high = middle - 1
    return _words(words, low)


def _words(words: list[str], number: int) -> str:
    repeats, rest = divmod(number, len(words) - 1)
    return " ".join([*words[:-1] * repeats, *words[:rest]])


def _read_prompts(path: Path) -> tuple[BenchPrompt, ...]:
    if not path.is_file():
        raise UsageError(
            f"there is no workload {str(path)!r}: it is none of {', '.join(NAMES)}, and no such file is here"
        )
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            return (BenchPrompt(text=text, is_chat=False),)
        entries = [json.loads(line) for line in text.splitlines() if line.strip()]
        return tuple(
            BenchPrompt(text=entry["message"] if "message" in entry else entry["prompt"], is_chat="message" in entry)
            for entry in entries
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f'{path}: allowed are UTF-8 text, or .jsonl with {{"prompt": ...}} or {{"message": ...}} in each line'
            f" ({type(error).__name__}: {error})"
        ) from None
