"""A tiny byte-level vocabulary in every form a checkpoint brings one, and real model files where there are any."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from soloist.config import model_dirs

CORPUS = [
    "the quick brown fox jumps over the lazy dog " * 5,
    "안녕하세요 세계 그리고 그리고 안녕",
    "naïve café naïve café 👩‍👩‍👧 🎉🎉 1234 1234 don't don't",
    "def f(x):\n    return x\n\n\ndef g(y):\n    return y\n",
]
SPECIAL = ("<|bos|>", "<|im_end|>", "<|endoftext|>", "<think>")
USER_DEFINED = ("<tool_call>",)
FILES = (
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
)


def make_backend(special=SPECIAL, user_defined=USER_DEFINED) -> tokenizers.Tokenizer:
    """Train byte-level BPE on `CORPUS`: 320 tokens, then `special`, then `user_defined`."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in user_defined])
    return backend


def make_folder(folder: Path, backend: tokenizers.Tokenizer | None = None, **files: dict) -> Path:
    """Write tokenizer.json and, by their stems, other JSON files."""
    (backend or make_backend()).save(str(folder / "tokenizer.json"))
    files.setdefault("tokenizer_config", {"eos_token": "<|im_end|>"})
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def make_metadata(**changes) -> dict:
    """Metadata of a GGUF file that holds the vocabulary of `make_backend`, and three padding rows."""
    backend = make_backend()
    model = json.loads(backend.to_str())["model"]
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    types = [3 if token in SPECIAL else 4 if token in USER_DEFINED else 1 for token in tokens]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(3)],
        "tokenizer.ggml.token_type": types + [5] * 3,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<|bos|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
    }
    changed = metadata | {f"tokenizer.{key}": value for key, value in changes.items()}
    return {key: value for key, value in changed.items() if value is not None}


def model_file(name: str) -> Path:
    """Find a real model file, or skip the test."""
    for folder in model_dirs():
        if (folder / name).is_file():
            return folder / name
    pytest.skip(f"{name} is in none of {', '.join(map(str, model_dirs()))}")
