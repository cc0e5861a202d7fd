"""Prompts for drafts of instruction-tuned models, half of them code: from Python's standard library and word lists.

    python recipes/real_models/prompts.py --out FOLDER [--count 10000]

writes `train.jsonl` and `held-out.jsonl`, as `soloist draft` reads them. Modules of the standard library (PSF-2.0) and
topics are either trained on or held out, by the hash of their name. No benchmark's questions are among them.
"""

import argparse
import ast
import hashlib
import inspect
import json
import pydoc_data.topics
import random
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import words

# Of modules and topics, one in so many is held out.
HELD_OUT_PART = 10
MAX_FILE_BYTES = 150_000
# Of a function's source, in characters.
MIN_SOURCE, MAX_SOURCE = 120, 900
# Of a beginning that is continued as it is.
MIN_BEGINNING, MAX_BEGINNING = 120, 500


@dataclass(frozen=True, kw_only=True)
class Function:
    """A documented function of the standard library."""

    module: str
    name: str
    # From `def` on, without indentation.
    source: str
    # Up to the end of its docstring.
    head: str
    # First paragraph of the docstring.
    summary: str


def is_held_out(name: str) -> bool:
    """Say on which side a module or a topic is."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_PART == 0


def read_functions() -> Iterator[Function]:
    """Find the documented functions and methods of this Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(inside.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > MAX_FILE_BYTES:
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        lines = text.split("\n")
        module = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (documentation := ast.get_docstring(node)):
                source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                end = node.body[0].end_lineno
                assert end is not None
                head = textwrap.dedent("\n".join(lines[node.lineno - 1 : end]))
                if MIN_SOURCE <= len(source) <= MAX_SOURCE and len(node.body) > 1:
                    summary = " ".join(documentation.split("\n\n")[0].split())
                    yield Function(module=module, name=node.name, source=source, head=head, summary=summary)


def read_paragraphs() -> dict[str, list[str]]:
    """Take paragraphs of prose from the language reference that Python carries, by topic."""
    found = {}
    for topic, text in pydoc_data.topics.topics.items():
        paragraphs = [" ".join(p.split()) for p in inspect.cleandoc(text).split("\n\n")]
        found[topic] = [p for p in paragraphs if 200 <= len(p) <= 900 and p[0].isupper() and "::" not in p]
    return found


def ask(text: str) -> dict[str, Any]:
    """Make a line of a question."""
    return {"messages": [{"role": "user", "content": text}]}


class Writer:
    """Draws prompts of one side.

    Args:
        functions: of that side.
        paragraphs: of that side.
        topics: of that side.
        draw: the generator.
    """

    def __init__(
        self, functions: list[Function], paragraphs: list[str], topics: list[str], draw: random.Random
    ) -> None:
        self._functions, self._paragraphs, self._topics, self._draw = functions, paragraphs, topics, draw
        code = (self.beginning, self.completion, self.question_on_code, self.description, self.use, self.task)
        talk = (self.topic, self.topic, self.comparison, self.story, self.advice, self.letter, self.sum, self.summary)
        # Half code.
        self.kinds: tuple[tuple[Callable[[], dict[str, Any]], ...], ...] = (code, talk)

    def write(self) -> dict[str, Any]:
        """Draw a prompt."""
        return self._draw.choice(self._draw.choice(self.kinds))()

    def beginning(self) -> dict[str, Any]:
        """Code to be continued as it is."""
        source = self._draw.choice(self._functions).source
        limit, taken = self._draw.randint(MIN_BEGINNING, MAX_BEGINNING), ""
        for line in source.splitlines(keepends=True):
            if taken and len(taken) + len(line) > limit:
                break
            taken += line
        return {"prompt": taken}

    def completion(self) -> dict[str, Any]:
        head = self._draw.choice(self._functions).head
        words_before = self._draw.choice(
            ("Complete this function:", "Write the body of this Python function.", "Implement the following function.")
        )
        return ask(f"{words_before}\n```python\n{head}\n```")

    def question_on_code(self) -> dict[str, Any]:
        source = self._draw.choice(self._functions).source
        wish = self._draw.choice(
            (
                "Explain what this function does.",
                "Write unit tests for this function.",
                "Add type hints to this function.",
                "Rewrite this function so that it is easier to read.",
                "Translate this function to JavaScript.",
                "Translate this function to Go.",
                "What could go wrong in this code?",
                "Write a better docstring for this function and show the whole function.",
                "Add error handling to this code.",
            )
        )
        return ask(f"{wish}\n```python\n{source}\n```")

    def description(self) -> dict[str, Any]:
        f = self._draw.choice(self._functions)
        return ask(f"Write a Python function called `{f.name}`. It should do this: {f.summary}")

    def use(self) -> dict[str, Any]:
        f = self._draw.choice(self._functions)
        return ask(f"How do I use `{f.name}` of Python's module `{f.module}`? Show a short example.")

    def task(self) -> dict[str, Any]:
        language, task = self._draw.choice(words.LANGUAGES), self._draw.choice(words.TASKS)
        form = self._draw.choice(("Write {l} code that {t}.", "Write a program in {l} that {t}, with comments."))
        return ask(form.format(l=language, t=task))

    def topic(self) -> dict[str, Any]:
        topic, audience = self._draw.choice(self._topics), self._draw.choice(words.AUDIENCES)
        form = self._draw.choice(
            (
                "What is {t}?",
                "Explain {t} to {a}.",
                "Write a short essay about {t}.",
                "What are the most common misunderstandings about {t}?",
                "Give me five interesting facts about {t}.",
                "Why does {t} matter today?",
                "Write a dialogue between a teacher and {a} about {t}.",
                "How did {t} change over time?",
                "Make a plan to learn about {t} in four weeks.",
            )
        )
        return ask(form.format(t=topic, a=audience))

    def comparison(self) -> dict[str, Any]:
        one, other = self._draw.sample(self._topics, 2)
        return ask(f"What do {one} and {other} have in common, and how do they differ?")

    def story(self) -> dict[str, Any]:
        (one, other), place = self._draw.sample(words.NOUNS, 2), self._draw.choice(words.PLACES)
        kind = self._draw.choice(("short story", "poem", "fairy tale", "scene of a play", "diary entry"))
        return ask(f"Write a {kind} about a {one} and a {other} in {place}.")

    def advice(self) -> dict[str, Any]:
        activity, count = self._draw.choice(words.ACTIVITIES), self._draw.choice(("three", "five", "seven", "ten"))
        topic = self._draw.choice(self._topics)
        return ask(f"Give me {count} tips for {activity}, for someone who is interested in {topic}.")

    def letter(self) -> dict[str, Any]:
        person, matter = self._draw.choice(words.PEOPLE), self._draw.choice(words.MATTERS)
        tone = self._draw.choice(("polite", "short", "friendly", "formal", "firm"))
        topic = self._draw.choice(self._topics)
        return ask(f"Write a {tone} email to {person} about {matter}. We both work on {topic}.")

    def sum(self) -> dict[str, Any]:
        goods, other = self._draw.sample(words.GOODS, 2)
        a, b, c, d = (self._draw.randint(2, 60) for _ in range(4))
        form = self._draw.choice(
            (
                f"A shop sells {a} {goods} a day at {b} dollars each and {c} {other} at {d} dollars each. How much does"
                " it earn in a week? Work it out step by step.",
                f"Tom has {a + b} {goods}. He gives {a} of them away and buys {c} times as many as he has left. How"
                " many does he have then? Explain each step.",
                f"What is {a * 7} plus {b} times {c}, minus {d}? Show the steps.",
            )
        )
        return ask(form)

    def summary(self) -> dict[str, Any]:
        wish = self._draw.choice(("Summarise this text in two sentences:", "Rewrite this in simple words:"))
        return ask(f"{wish}\n\n{self._draw.choice(self._paragraphs)}")


def make_writer(functions: list[Function], paragraphs: dict[str, list[str]], *, held_out: bool, seed: int) -> Writer:
    """Take one side of everything."""
    return Writer(
        [f for f in functions if is_held_out(f.module) is held_out],
        [p for topic, own in paragraphs.items() if is_held_out(topic) is held_out for p in own],
        [topic for topic in words.TOPICS if is_held_out(topic) is held_out],
        random.Random(seed),
    )


def draw_prompts(writer: Writer, count: int, taken: set[str]) -> list[dict[str, Any]]:
    """Draw prompts that are not among those in `taken`, and add them to it."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        prompt = writer.write()
        key = json.dumps(prompt)
        if key not in taken:
            taken.add(key)
            found.append(prompt)
    return found


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--count", type=int, default=10000, help="of prompts to train on")
    parser.add_argument("--held-out", type=int, default=200, help="of prompts to measure on")
    args = parser.parse_args()
    functions, paragraphs = list(read_functions()), read_paragraphs()
    args.out.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for name, count, held_out in (("held-out", args.held_out, True), ("train", args.count, False)):
        writer = make_writer(functions, paragraphs, held_out=held_out, seed=int(held_out))
        prompts = draw_prompts(writer, count, taken)
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
        print(f"{name}: {count} prompts")


if __name__ == "__main__":
    main()
