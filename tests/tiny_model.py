"""A tiny model that answers: random weights, the vocabulary of `tests.tiny_vocabulary`, a plain chat template."""

from pathlib import Path
from typing import Any

from tests.miniature import write_checkpoint
from tests.tiny_vocabulary import make_backend, make_folder

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_model(
    folder: Path, family: str = "llama", *, chat_template: str | None = CHAT_TEMPLATE, **overrides: Any
) -> Path:
    """Write a checkpoint with its tokenizer and give the folder; `overrides` are config keys set otherwise."""
    backend = make_backend()
    end_id = backend.token_to_id("<|im_end|>")
    vocab_size = backend.get_vocab_size()
    write_checkpoint(folder, family, seed=1, vocab_size=vocab_size, eos_token_id=end_id, **overrides)
    config = {"eos_token": "<|im_end|>"} | ({"chat_template": chat_template} if chat_template else {})
    return make_folder(folder, backend, tokenizer_config=config)
