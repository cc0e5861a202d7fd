"""Text to token ids and back: vocabularies, the incremental detokenizer, stop strings.

Owns what a checkpoint says of its tokens: which are special, which end an answer, which mark a hole to fill. Renders no
template and knows nothing of steps.

A special token is one that text must not turn into: a control token, or an added token that looks like a tag, as
`<tool_call>`. Every supported vocabulary is byte-level BPE: a token is a string of bytes, so text
is always the UTF-8 decoding of the bytes so far and no window of tokens is ever decoded twice.
"""

import codecs
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import tokenizers

from soloist.errors import CheckpointError, UsageError
from soloist.vocabulary import Vocabulary, load_vocabulary

# Special tokens that end an answer wherever they exist: a file often names one end while its chats use another.
_END_TEXTS = frozenset(
    {
        "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|role_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
        "<end_of_turn>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>", "[EOS]", "[EOT]",
    }
)  # fmt: skip

# Part of what an answer says: shown even where a checkpoint calls them special, or nobody could find its reasoning.
ANSWER_MARKS = frozenset(
    {
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
        "</arg_key>", "<arg_value>", "</arg_value>",
    }
)  # fmt: skip

# An added token of this form is structure, whether or not the file calls it special; runs of white space are not.
_TAG = re.compile(r"<[^<>\s]+>")

# (before the hole, after it, the hole itself) of the families Qwen, StarCoder, SantaCoder, DeepSeek and CodeLlama.
_FIM_TEXTS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
# A model that writes one of these has filled the hole and goes on with another file.
_FIM_END_TEXTS = (
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<fim_pad>", "<fim-pad>", "<repo_name>", "<reponame>", "<file_sep>",
    "<filename>", "▁<EOT>",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FimTokens:
    """The tokens with which a model is asked to fill a hole, and those with which it says that it is done."""

    prefix_id: int
    suffix_id: int
    middle_id: int
    # Ids that end a completion, besides the tokenizer's stop ids.
    end_ids: tuple[int, ...]
    # All these markers as text: a model that spells one out in ordinary tokens is done too.
    stop_strings: tuple[str, ...]


class Tokenizer:
    """Encodes and decodes text for one checkpoint.

    Raises:
        CheckpointError: a named token is not in the vocabulary, or BOS is wanted and none is named.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._backend = vocabulary.backend
        # The file it comes from, for errors.
        self.source = vocabulary.source
        # Ids that name a token end here; the model's head may have more rows, as padding.
        self.num_tokens = vocabulary.num_tokens
        # Role, as templates call it ("bos_token"), -> the token's text.
        self.named_tokens = dict(vocabulary.named_tokens)
        # Whether a prompt begins with BOS.
        self.adds_bos = vocabulary.adds_bos
        # Name -> Jinja source; empty for a base model.
        self.chat_templates = dict(vocabulary.chat_templates)
        named_ids = {role: self._known_id(role, text) for role, text in self.named_tokens.items()}
        self.bos_id: int | None = named_ids.get("bos_token")
        self.eos_id: int | None = named_ids.get("eos_token")
        if self.adds_bos and self.bos_id is None:
            raise CheckpointError(
                f"{self.source}: prompts shall begin with BOS (add_bos_token), but no BOS token is named"
            )
        self._special = self._make_special(self.named_tokens.values())
        self.special_ids = frozenset(self._special.values())
        # Special tokens are text unless `encode` is asked; other added tokens are ordinary vocabulary.
        self._backend.encode_special_tokens = True
        added = self._backend.get_added_tokens_decoder()
        self._added_texts = {i: token.content for i, token in added.items()}
        self._special_pattern = _special_pattern([added[i] for i in self._special.values()])
        self._byte_of_char = _byte_alphabet()
        # Token id -> its bytes; filled as tokens are met.
        self._bytes: dict[int, bytes] = {}
        # Every id that ends an answer, ascending: the union of what configs, tokenizer and custom say.
        self.stop_ids = self._all_stop_ids(vocabulary.end_ids)
        self.fim = self._find_fim()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the tokenizer of a checkpoint: a folder, or a GGUF file.

        Raises:
            CheckpointError: files are missing, damaged or contradict each other.
            UnsupportedError: a kind of tokenizer that Soloist does not have, by name.
        """
        return cls(load_vocabulary(path))

    def _known_id(self, role: str, text: str) -> int:
        token_id = self._backend.token_to_id(text)
        if token_id is None:
            raise CheckpointError(f"{self.source}: {role} is {text!r}, which is not in the vocabulary")
        return token_id

    def _make_special(self, named: Iterable[str]) -> dict[str, int]:
        """Find every special token, text -> id, and have the library treat it as one."""
        added = self._backend.get_added_tokens_decoder().values()
        control = {token.content for token in added if token.special} | set(named)
        # Ids that are no text.
        self._hidden_ids = frozenset(self._backend.token_to_id(text) for text in control - ANSWER_MARKS)
        special = control | {token.content for token in added if _TAG.fullmatch(token.content)}
        missing = sorted(special - {token.content for token in added if token.special})
        self._backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in missing])
        return {t.content: i for i, t in self._backend.get_added_tokens_decoder().items() if t.special}

    def _all_stop_ids(self, end_ids: Iterable[int]) -> tuple[int, ...]:
        by_name = {i for text, i in self._special.items() if text in _END_TEXTS}
        stop_ids = {*end_ids, *by_name, *(() if self.eos_id is None else (self.eos_id,))}
        if unknown := sorted(i for i in stop_ids if not 0 <= i < self.num_tokens):
            raise CheckpointError(
                f"{self.source}: eos_token_id {unknown[0]} is named, but the vocabulary has {self.num_tokens} tokens:"
                " a tokenizer or config of another model?"
            )
        return tuple(sorted(stop_ids))

    def _find_fim(self) -> FimTokens | None:
        ids = {text: i for i, text in self._added_texts.items()}
        for texts in _FIM_TEXTS:
            if all(text in ids for text in texts):
                ends = tuple(text for text in _FIM_END_TEXTS if text in ids)
                prefix_id, suffix_id, middle_id = (ids[text] for text in texts)
                return FimTokens(
                    prefix_id=prefix_id,
                    suffix_id=suffix_id,
                    middle_id=middle_id,
                    end_ids=tuple(sorted({prefix_id, suffix_id, middle_id, *(ids[text] for text in ends)})),
                    stop_strings=(*texts, *ends),
                )
        return None

    def check_vocab_size(self, vocab_size: int) -> None:
        """Refuse a tokenizer that a model with `vocab_size` head rows cannot belong to.

        Raises:
            CheckpointError: it has more tokens than the model has rows. (Fewer is common: rows are padded.)
        """
        if self.num_tokens > vocab_size:
            raise CheckpointError(
                f"{self.source}: the vocabulary has {self.num_tokens} tokens, the model only {vocab_size} rows:"
                " a tokenizer of another model?"
            )

    def difference(self, other: "Tokenizer") -> str | None:
        """Say which id first means another token in another vocabulary; None: those that both have agree."""
        mine, theirs = ({i: text for text, i in t._backend.get_vocab().items()} for t in (self, other))
        for i in range(min(self.num_tokens, other.num_tokens)):
            if mine.get(i) != theirs.get(i):
                return f"token {i} is {mine.get(i)!r} in {self.source} and {theirs.get(i)!r} in {other.source}"
        return None

    def encode(self, text: str, *, allow_special: bool = False, add_bos: bool = False) -> list[int]:
        """Turn text into token ids.

        Args:
            text: any valid Unicode.
            allow_special: whether the text of a special token becomes that token; never for text that a user wrote.
            add_bos: begin with BOS if the checkpoint's prompts do; one that `text` brings along is not doubled.

        Raises:
            UsageError: `text` holds a lone surrogate, as bytes that are not UTF-8 become.
        """
        ids: list[int] = []
        if allow_special:
            for piece, special_id in self.split_special(text):
                ids += self._encode_text(piece)
                if special_id is not None:
                    ids.append(special_id)
        else:
            ids = self._encode_text(text)
        return self.with_bos(ids) if add_bos else ids

    def with_bos(self, ids: list[int]) -> list[int]:
        """Begin a prompt's ids with BOS if the checkpoint's prompts do and these do not yet."""
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def _encode_text(self, text: str) -> list[int]:
        try:
            # Only to find surrogates: the library would speak of types.
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text is not valid Unicode: character {error.start} is a lone surrogate; was the input not UTF-8?"
            ) from error
        return self._backend.encode(text, add_special_tokens=False).ids if text else []

    def split_special(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Cut text behind each special token: yields (text before it, its id), and last (the rest, None)."""
        start = 0
        for match in self._special_pattern.finditer(text):
            yield text[start : match.start()], self._special[match[match.lastindex or 0]]
            start = match.end()
        yield text[start:], None

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Every special token as text."""
        return tuple(self._special)

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Make the prompt that asks for what stands between `prefix` and `suffix`; nothing in them becomes special.

        Raises:
            UsageError: the vocabulary has no tokens for filling in the middle.
        """
        if self.fim is None:
            raise UsageError(
                f"{self.source}: this model has no fill-in-the-middle tokens; use a coder model, or a plain prompt"
            )
        before = [self.fim.prefix_id, *self.encode(prefix)]
        return self.with_bos([*before, self.fim.suffix_id, *self.encode(suffix), self.fim.middle_id])

    def token_bytes(self, token_id: int, *, show_special: bool = False) -> bytes:
        """Give the bytes a token stands for: none for padding rows and, unless `show_special`, for control tokens."""
        text = self._added_texts.get(token_id)
        if text is not None:
            return b"" if token_id in self._hidden_ids and not show_special else text.encode()
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spelled_bytes(token_id)
        return known

    def _spelled_bytes(self, token_id: int) -> bytes:
        spelling = self._backend.id_to_token(token_id) if 0 <= token_id < self.num_tokens else None
        if spelling is None:
            return b""
        if all(char in self._byte_of_char for char in spelling):
            return bytes(self._byte_of_char[char] for char in spelling)
        return spelling.encode()

    def decode(self, ids: Iterable[int], *, show_special: bool = False) -> str:
        """Turn token ids into text; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(i, show_special=show_special) for i in ids).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """Give the id of the token that is spelled `text` in the vocabulary."""
        return self._backend.token_to_id(text)


def _byte_alphabet() -> dict[str, int]:
    """Map the 256 printable characters in which byte-level vocabularies spell bytes to those bytes.

    Source: GPT-2, `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _special_pattern(tokens: Iterable[tokenizers.AddedToken]) -> re.Pattern[str]:
    """Make a pattern that finds special tokens, the longest at each place, with the white space that they swallow."""
    longest_first = sorted(tokens, key=lambda token: -len(token.content))
    if not longest_first:
        return re.compile(r"(?!)")
    words = []
    for token in longest_first:
        word = f"({re.escape(token.content)})"
        if token.single_word:
            word = rf"(?<!\w){word}(?!\w)"
        words.append((r"\s*" if token.lstrip else "") + word + (r"\s*" if token.rstrip else ""))
    return re.compile("|".join(words))


class Detokenizer:
    """Turns the ids of one answer into text as they arrive; never gives out half a character.

    The texts of all `push` calls and of `finish`, joined, are `Tokenizer.decode` of all ids.

    Args:
        tokenizer: whose ids they are.
        show_special: whether control tokens appear in the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, show_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._show_special = show_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0
        # Characters of text that are complete once token i is pushed; one split over tokens belongs to its last token.
        self.text_ends: list[int] = []

    def push(self, token_id: int) -> str:
        """Take one token and give the text that it completes."""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id, show_special=self._show_special))
        self._num_chars += len(text)
        self.text_ends.append(self._num_chars)
        return text

    def finish(self) -> str:
        """End the answer: give a U+FFFD for a character that was begun and never completed."""
        text = self._decoder.decode(b"", final=True)
        self._num_chars += len(text)
        if text:
            self.text_ends[-1] = self._num_chars
        return text

    def num_tokens_at(self, num_chars: int) -> int:
        """Say how many tokens it took to make the first `num_chars` characters.

        Where an answer is cut at a stop string, ids, logprobs and usage end with this many tokens: a token that brought
        text before the stop string counts, one that brought nothing but stop string does not.
        """
        assert num_chars <= self._num_chars, "asked beyond the text"
        return bisect_left(self.text_ends, num_chars) + 1 if num_chars else 0


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces, and holds back what may be the beginning of one.

    The first stop string to be complete wins; of several that end at the same character, the longest. How the text is
    cut into pieces makes no difference. One Aho-Corasick step per character, however many strings there are.

    Args:
        stops: the strings.

    Raises:
        UsageError: one of them is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # Node 0 is the root; a node stands for the beginning of a stop string.
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._matches: list[str | None] = [None]
        for stop in stops:
            if not stop:
                raise UsageError("a stop string is empty; leave it out")
            self._add(stop)
        # The node of the longest proper ending that begins a stop string too.
        self._fallback = [0] * len(self._children)
        self._link()
        self._node = 0
        self._held = ""
        # The stop string found; nothing is given out after it.
        self.matched: str | None = None
        # Characters given out so far.
        self.num_chars = 0

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._children[node]:
                self._children[node][char] = len(self._children)
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._matches.append(None)
            node = self._children[node][char]
        self._matches[node] = stop

    def _link(self) -> None:
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._children[node].items():
                self._fallback[child] = self._step(self._fallback[node], char)
                self._matches[child] = self._matches[child] or self._matches[self._fallback[child]]
                queue.append(child)

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(char, 0)

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take more text; give what is safe to show, and the stop string if this text completed one."""
        if self.matched is not None:
            return "", self.matched
        for i, char in enumerate(text):
            self._node = self._step(self._node, char)
            self.matched = self._matches[self._node]
            if self.matched is not None:
                safe = self._give(self._held + text[: i + 1], num_held=len(self.matched))
                self._held = ""
                return safe, self.matched
        return self._give(self._held + text, num_held=self._depth[self._node]), None

    def flush(self) -> str:
        """End the text: give what was held back, unless a stop string was found."""
        return self._give(self._held, num_held=0)

    def _give(self, text: str, *, num_held: int) -> str:
        num_given = len(text) - num_held
        self.num_chars += num_given
        self._held = text[num_given:]
        return text[:num_given]
