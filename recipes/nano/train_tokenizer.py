"""Trains the byte-level BPE vocabulary of soloist-nano on its training documents and encodes them.

A token may end in a space, never begin with one, so that a prompt like "def " ends where a token ends; a line break
takes the next line's indentation with it.
"""

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END = "<|endoftext|>"
# A draft's slots behind the anchor; no text holds it.
MASK = "<|mask|>"
# Line break with indentation; letters; up to three digits; underscores; signs. All but the first may end in a space.
PATTERN = r"\n+ *|_*[^\W\d_]+ ?|\d{1,3} ?|_+ ?|[^\w\s]+ ?|\s"
TRAINING_BYTES = 20_000_000
BATCH = 512


def texts(path: Path) -> Iterator[str]:
    """Give the documents of a file that `prepare_data.py` wrote."""
    with gzip.open(path, "rt") as file:
        for line in file:
            yield json.loads(line)["text"]


def train(documents: list[str]) -> Tokenizer:
    """Learn the merges; the two special tokens are the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in (END, MASK)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens(special)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Iterator[str]) -> np.ndarray:
    """Encode documents one behind the other, each closed by the end token: (T,) uint16."""
    end = tokenizer.token_to_id(END)
    pieces: list[np.ndarray] = []
    batch: list[str] = []

    def flush() -> None:
        pieces.extend(np.array([*e.ids, end], dtype=np.uint16) for e in tokenizer.encode_batch_fast(batch))
        batch.clear()

    for text in documents:
        batch.append(text)
        if len(batch) == BATCH:
            flush()
    flush()
    return np.concatenate(pieces)


def main() -> None:
    """Train, save, encode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that prepare_data.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="gets tokenizer.json, train.npy and held_out.npy")
    parser.add_argument("--tokenizer", type=Path, help="encode with this tokenizer.json instead of training one")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.tokenizer is None:
        # Every n-th document, so that all sources have their share.
        sizes = [len(text) for text in texts(args.data / "train.jsonl.gz")]
        step = max(sum(sizes) // TRAINING_BYTES, 1)
        documents = [t for i, t in enumerate(texts(args.data / "train.jsonl.gz")) if i % step == 0]
        tokenizer = train(documents)
    else:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    tokenizer.save(str(args.out / "tokenizer.json"))
    for split in ("train", "held_out"):
        tokens = encode(tokenizer, texts(args.data / f"{split}.jsonl.gz"))
        num_bytes = sum(len(text.encode()) for text in texts(args.data / f"{split}.jsonl.gz"))
        np.save(args.out / f"{split}.npy", tokens)
        print(f"{split}: {len(tokens)} tokens, {num_bytes / len(tokens):.3f} bytes a token")


if __name__ == "__main__":
    main()
