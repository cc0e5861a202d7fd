"""Small targets and drafts that the tests of training share."""

from pathlib import Path
from typing import Any

import torch

from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.train.batches import Text
from soloist.train.settings import DraftShape, ObjectiveSettings, TrainSettings
from tests.miniature import write_checkpoint


def load_target(folder: Path, family: str = "qwen3", **overrides: Any) -> CausalLM:
    write_checkpoint(folder, family, seed=3, **overrides)
    return load_model(folder, dtype=torch.float32, weights_dtype="fp32")


def make_texts(target: CausalLM, count: int, seed: int = 0) -> list[Text]:
    """Random texts of different lengths, the shortest with an answer of one token."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for i in range(count):
        num_prompt, num_answer = 1 + (3 * i) % 7, 1 + (11 * i) % 29
        ids = torch.randint(target.config.vocab_size, (num_prompt + num_answer,), generator=generator)
        texts.append(Text(token_ids=tuple(ids.tolist()), num_prompt=num_prompt, temperature=(0.0, 0.7, 1.0)[i % 3]))
    return texts


def make_settings(**overrides: Any) -> TrainSettings:
    fields: dict[str, Any] = {
        "shape": DraftShape(block_size=5, num_hidden_layers=2, markov_rank=6, target_layer_ids=(-1, 0, 1)),
        "objective": ObjectiveSettings(),
        "num_steps": 8,
        "documents_per_step": 4,
        "anchors_per_document": 6,
        "learning_rate": 3e-3,
        # Muon rounds to bf16, and would tell apart what is compared to the last bits.
        "optimizer": "adamw",
        "loss_rows": 37,
        "compute_dtype": "fp32",
        "log_every": 2,
        "checkpoint_every": 4,
    }
    return TrainSettings(**(fields | overrides))
