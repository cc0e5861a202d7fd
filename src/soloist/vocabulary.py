"""Reading a checkpoint's vocabulary: from the files of a Hugging Face folder, or from the metadata of a GGUF file.

Owns which kinds of tokenizer there are and refuses the others by name. What tokens mean in use is `tokenizer`'s.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from soloist.errors import CheckpointError, UnsupportedError
from soloist.models.gguf import GGUFFile


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What a checkpoint says of its tokens."""

    backend: tokenizers.Tokenizer
    # The file that holds it, for errors.
    source: str
    # Ids that name a token end here; the model's head may have more rows, as padding.
    num_tokens: int
    # By role, as templates call them: "bos_token", "eos_token", "pad_token", "unk_token" -> the token's text.
    named_tokens: Mapping[str, str]
    # Whether a prompt begins with the BOS token.
    adds_bos: bool
    # Ids that end an answer according to the checkpoint's configs.
    end_ids: tuple[int, ...]
    # Chat templates by name; the plain one is "default".
    chat_templates: Mapping[str, str]


_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_vocabulary(path: Path) -> Vocabulary:
    """Read the vocabulary of a checkpoint: a folder, or a GGUF file."""
    if path.is_dir():
        return _folder_vocabulary(path)
    return gguf_vocabulary(GGUFFile(path).metadata, str(path))


def _folder_vocabulary(folder: Path) -> Vocabulary:
    path = folder / "tokenizer.json"
    backend = _read_backend(path)
    config = _read_json(folder / "tokenizer_config.json")
    named_tokens = _named_tokens(_read_json(folder / "special_tokens_map.json") | config)
    adds_bos = config.get("add_bos_token")
    if adds_bos is None:
        # Without a word of the config, it is what the file's post-processor does to an empty text.
        begins_with = backend.encode("", add_special_tokens=True).tokens[:1]
        adds_bos = bool(begins_with) and begins_with == [named_tokens.get("bos_token")]
    return Vocabulary(
        backend=backend,
        source=str(path),
        num_tokens=1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
        named_tokens=named_tokens,
        adds_bos=adds_bos,
        end_ids=_config_end_ids(folder),
        chat_templates=_folder_templates(folder, config),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        others = [
            name for name in ("tokenizer.model", "tiktoken.model", "vocab.json") if (path.parent / name).is_file()
        ]
        instead = f"; {others[0]} cannot be read: save the tokenizer with transformers first" if others else ""
        raise CheckpointError(f"{path}: no such file{instead}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    # The library raises nothing more specific.
    except Exception as error:
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
    if not isinstance(backend.decoder, decoders.ByteLevel):
        given = type(backend.decoder).__name__ if backend.decoder is not None else "none"
        raise UnsupportedError(
            f"{path}: decoder {given}, model {type(backend.model).__name__}; only byte-level BPE vocabularies are"
            " supported (decoder ByteLevel), not SentencePiece"
        )
    # A file may carry the settings of a training run that would cut or fill up every text.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not an object")
    return content


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for role in _ROLES:
        token = config.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        if text:
            named[role] = text
    return named


def _config_end_ids(folder: Path) -> tuple[int, ...]:
    end_ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        given = _read_json(folder / name).get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if not all(type(i) is int for i in ids):
            raise CheckpointError(f"{folder / name}: eos_token_id is {given!r}; it is a number or a list of numbers")
        end_ids.update(ids)
    return tuple(sorted(end_ids))


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Collect chat templates from every place where they are kept; files win over the config."""
    given = config.get("chat_template") or {}
    if isinstance(given, str):
        templates = {"default": given}
    elif isinstance(given, list):
        templates = {item["name"]: item["template"] for item in given}
    else:
        templates = dict(given)
    named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {"default": folder / "chat_template.jinja"} | {path.stem: path for path in named}
    return templates | {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}


# Token types of the format; the other types are ordinary tokens.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, kw_only=True)
class _Family:
    """How a family of byte-level vocabularies treats text before it merges; a GGUF file only names it."""

    # None: single digits are cut out, and the rest is cut as GPT-2 does.
    split: str | None
    # Text is brought to normal form C first.
    is_nfc: bool = False
    # A piece that is a token is that token, whatever the merges would make of it.
    ignores_merges: bool = False
    # What add_bos_token is where the file does not say.
    adds_bos: bool = False


_LLAMA_3 = _Family(
    split=rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", ignores_merges=True, adds_bos=True
)
_FAMILIES = {
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "qwen2": _Family(split=rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}", is_nfc=True),
    "smollm": _Family(split=None),
}


def gguf_vocabulary(metadata: Mapping[str, Any], source: str) -> Vocabulary:
    """Make a vocabulary of a GGUF file's metadata.

    Args:
        metadata: keys as in the file.
        source: the file's name, for errors.

    Raises:
        CheckpointError: tokens are there twice, an id is out of range, merges do not fit the tokens.
        UnsupportedError: not a byte-level BPE vocabulary, or of an unknown family.
    """
    family = _gguf_family(metadata, source)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{source}: no tokenizer.ggml.tokens: the file holds no vocabulary")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{source}: {len(tokens)} tokens, but {len(types)} token types")
    ids = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    if len(ids) != len(tokens) - types.count(_UNUSED):
        twice = next(token for i, token in enumerate(tokens) if types[i] != _UNUSED and ids[token] != i)
        raise CheckpointError(f"{source}: token {twice!r} is in the vocabulary twice")
    named_tokens = _gguf_named_tokens(metadata, tokens, source)
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if adds_bos is None:
        adds_bos = family.adds_bos and "bos_token" in named_tokens
    return Vocabulary(
        backend=_gguf_backend(family, ids, types, metadata.get("tokenizer.ggml.merges") or [], source),
        source=source,
        num_tokens=1 + max(ids.values()),
        named_tokens=named_tokens,
        adds_bos=adds_bos,
        end_ids=tuple(
            metadata[key] for word in ("eot", "eom") if (key := f"tokenizer.ggml.{word}_token_id") in metadata
        ),
        chat_templates=_gguf_templates(metadata),
    )


def _gguf_family(metadata: Mapping[str, Any], source: str) -> _Family:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedError(
            f"{source}: tokenizer.ggml.model is {model!r}; only 'gpt2' (byte-level BPE) is supported, not SentencePiece"
        )
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _FAMILIES:
        raise UnsupportedError(
            f"{source}: tokenizer.ggml.pre is {name!r}; supported: {', '.join(_FAMILIES)}. A guess would give other ids"
            " than the model was trained on"
        )
    return _FAMILIES[name]


def _gguf_named_tokens(metadata: Mapping[str, Any], tokens: list[str], source: str) -> dict[str, str]:
    named = {}
    for role, word in zip(_ROLES, ("bos", "eos", "padding", "unknown"), strict=True):
        token_id = metadata.get(f"tokenizer.ggml.{word}_token_id")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise CheckpointError(
                f"{source}: tokenizer.ggml.{word}_token_id is {token_id}, but the vocabulary has {len(tokens)} tokens"
            )
        named[role] = tokens[token_id]
    return named


def _gguf_backend(
    family: _Family, ids: dict[str, int], types: list[int], merges: list[str], source: str
) -> tokenizers.Tokenizer:
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        first, _, second = merge.partition(" ")
        pairs.append((first, second))
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=family.ignores_merges))
    # The library raises nothing more specific.
    except Exception as error:
        raise CheckpointError(f"{source}: tokens and merges do not fit each other: {error}") from error
    if family.is_nfc:
        backend.normalizer = normalizers.NFC()
    if family.split is None:
        split: Any = pre_tokenizers.Digits(individual_digits=True)
    else:
        split = pre_tokenizers.Split(Regex(family.split), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family.split is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    for token_type, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, i in ids.items() if types[i] == token_type]
        backend.add_tokens([AddedToken(token, special=is_special, normalized=False) for token in added])
    return backend


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")}
    return named | ({"default": metadata[key]} if metadata.get(key) else {})
