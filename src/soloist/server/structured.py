"""Answers of a given form: JSON of a schema, or tool calls, decided token by token with llguidance. Fails closed.

A schema that cannot be followed to the letter is refused before a token is made. Reasoning in front of the answer is
free; the form begins behind it.
"""

from typing import Any

import torch

from soloist.chat import END_THINK
from soloist.errors import SoloistError, UnsupportedError, UsageError
from soloist.server.tool_grammar import WHITE_SPACE
from soloist.tokenizer import ANSWER_MARKS, Detokenizer, Tokenizer


class GrammarError(SoloistError):
    """An answer cannot go on within its grammar."""


class Grammars:
    """Makes the constraints of one model; the vocabulary is read once.

    Raises:
        UnsupportedError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, num_tokens: int, end_ids: tuple[int, ...]) -> None:
        try:
            import llguidance
        except ImportError:
            raise UnsupportedError("response_format needs llguidance: pip install 'soloist[server]'") from None
        self._library = llguidance
        self.tokenizer = tokenizer
        self.num_tokens = num_tokens
        self.end_ids = [i for i in end_ids if i < num_tokens]
        if not self.end_ids:
            raise UnsupportedError("response_format needs a model with an end token")
        self._vocabulary = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, num_tokens, self.end_ids)),
            n_vocab=num_tokens,
            eos_token=self.end_ids,
        )

    def schema_constraint(self, schema: dict[str, Any], *, opens_reasoning: bool) -> "GrammarConstraint":
        """Make what holds one answer to JSON of a schema.

        Raises:
            UsageError: the schema is not valid, or asks for what cannot be checked token by token.
        """
        options: Any = {"whitespace_pattern": WHITE_SPACE}
        try:
            grammar = self._library.LLMatcher.grammar_from_json_schema(schema, overrides=options)
        except ValueError as error:
            raise UsageError(f"response_format: the schema is not valid: {_in_one_line(error)}") from None
        return GrammarConstraint(self, self._matcher(grammar, "response_format"), opens_reasoning=opens_reasoning)

    def call_constraint(self, grammar: str, to_the_letter: str | None, *, opens_reasoning: bool) -> "GrammarConstraint":
        """Make what holds one answer to a grammar of calls.

        Args:
            grammar: in Lark; schemas in it may be followed as far as possible only.
            to_the_letter: the part of it that must be followed whole; None: there is none.
            opens_reasoning: reasoning stands in front.

        Raises:
            UsageError: a schema is not valid, or one that must be followed to the letter cannot be.
        """
        library = self._library.LLMatcher
        if to_the_letter is not None:
            self._matcher(library.grammar_from_lark(to_the_letter), "tools")
        matcher = self._matcher(library.grammar_from_lark(grammar), "tools", may_warn=True)
        return GrammarConstraint(self, matcher, opens_reasoning=opens_reasoning)

    def _matcher(self, grammar: str, field: str, *, may_warn: bool = False) -> Any:
        matcher = self._library.LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise UsageError(f"{field}: the schema cannot be followed: {_in_one_line(matcher.get_error())}")
        if not _leads_on(matcher.deep_copy()):
            raise UsageError(f"{field}: the schema cannot be followed: no JSON text fits it")
        if (warnings := matcher.get_grammar_warnings()) and not may_warn:
            raise UsageError(f"{field}: the schema cannot be followed to the letter: {warnings[0]}")
        return matcher


class _Vocabulary:
    """A vocabulary as llguidance wants to see it: bytes of every token, and an encoder of text."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int, end_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        # What a model writes as part of an answer is text to a grammar, however it is spelled.
        self._marks = tokenizer.special_ids & {tokenizer.token_id(text) for text in ANSWER_MARKS}
        special = tokenizer.special_ids - self._marks
        # Special tokens get a name that no text can be, in the library's own marking.
        self.tokens = [
            b"\xff" + f"[{i}]".encode() if i in special else tokenizer.token_bytes(i) or b"\xff" + f"[{i}]".encode()
            for i in range(num_tokens)
        ]
        self.special_token_ids = sorted(special)
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = end_ids[0]

    def __call__(self, text: bytes | str) -> list[int]:
        # Where only one text is possible the library allows only these tokens for it: those that the model would take.
        ids: list[int] = []
        plain = ""
        for before, special_id in self._tokenizer.split_special(
            text if isinstance(text, str) else text.decode("utf-8", "replace")
        ):
            plain += before
            if special_id in self._marks:
                ids += [*self._tokenizer.encode(plain), special_id]
                plain = ""
            elif special_id is not None:
                plain += self._tokenizer.decode([special_id], show_special=True)
        return ids + self._tokenizer.encode(plain)


class GrammarConstraint:
    """Follows one answer: free until its reasoning ends, then within a grammar, then the end."""

    def __init__(self, grammars: Grammars, matcher: Any, *, opens_reasoning: bool) -> None:
        self._grammars = grammars
        self._matcher = matcher
        # What of a schema is not followed, in words.
        self.warnings = [f"tools: {warning}" for warning in matcher.get_grammar_warnings()]
        self._ends = frozenset(grammars.end_ids)
        self._reasoning = _ReasoningEnd(grammars.tokenizer) if opens_reasoning else None

    def num_legal(self, draft_tokens: list[int]) -> int:
        """Count the leading drafts that may follow. The step in which reasoning ends has no draft behind that."""
        if self._reasoning is not None:
            return self._reasoning.num_before_end(draft_tokens)
        # The end is never drafted: there is nothing behind it to verify.
        num_before_end = next((i for i, t in enumerate(draft_tokens) if t in self._ends), len(draft_tokens))
        return int(self._matcher.validate_tokens(draft_tokens[:num_before_end]))

    def allowed(self, draft_tokens: list[int]) -> torch.Tensor:
        """Give what may follow, row by row: (T, N) bool."""
        N = self._grammars.num_tokens
        if self._reasoning is not None:
            rows = torch.ones(1 + len(draft_tokens), N, dtype=torch.bool)  # (T, N)
            # An answer that ends within its reasoning would have no form at all.
            rows[:, self._grammars.end_ids] = False
            return rows
        rows = torch.stack([self._mask(), *(self._after(token) for token in draft_tokens)])  # (T, N)
        if draft_tokens:
            self._matcher.rollback(len(draft_tokens))
        return rows

    def advance(self, token_ids: list[int]) -> None:
        """Follow the answer by committed tokens."""
        if self._reasoning is not None:
            if self._reasoning.push(token_ids):
                self._reasoning = None
            return
        # The answer ends with an end token, which a complete grammar does not take.
        inner = token_ids[:-1] if token_ids and token_ids[-1] in self._ends else token_ids
        if inner and not self._matcher.consume_tokens(inner):
            raise GrammarError(f"the answer left its grammar: {_in_one_line(self._matcher.get_error())}")

    def _mask(self) -> torch.Tensor:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {_in_one_line(self._matcher.get_error())}")
        mask = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        if self._matcher.is_error():
            # The library would let an answer end in a dead end; one that is cut short is not of its form.
            raise GrammarError("the grammar allows no token here, and the answer is not complete")
        bits = (mask[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1  # (N/8, 8)
        allowed = bits.reshape(-1)[: self._grammars.num_tokens].bool()  # (N)
        if not allowed.any():
            raise GrammarError("the grammar allows no token here, and the answer is not complete")
        return allowed

    def _after(self, token_id: int) -> torch.Tensor:
        self._matcher.consume_token(token_id)
        return self._mask()


class _ReasoningEnd:
    """Watches for the end of the reasoning in an answer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._tail = ""

    def push(self, token_ids: list[int]) -> bool:
        """Take committed tokens; says whether the reasoning has ended with them."""
        for token_id in token_ids:
            self._tail = (self._tail + self._detokenizer.push(token_id))[-64:]
        _, mark, rest = self._tail.partition(END_THINK)
        if rest.strip():
            raise GrammarError("the token that ended the reasoning began the answer, outside of its grammar")
        return bool(mark)

    def num_before_end(self, draft_tokens: list[int]) -> int:
        """Count the drafts before the one that ends the reasoning: behind that one the grammar begins."""
        text = self._tail
        for i, token_id in enumerate(draft_tokens):
            text += self._tokenizer.decode([token_id])
            if END_THINK in text:
                return i
        return len(draft_tokens)


def _leads_on(matcher: Any) -> bool:
    matcher.compute_bitmask()
    return not matcher.is_error()


def _in_one_line(error: object) -> str:
    """Give an error of the library without the dump of its state behind it."""
    return " ".join(str(error).partition("<state>")[0].split())[:300]
