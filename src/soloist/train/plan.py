"""What a run will take, said before it starts: time, disk, and what to expect of the draft.

Times are of one batch of answers and a few steps on this machine, scaled.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from soloist.models.causal_lm import CausalLM
from soloist.models.weights import RecordingSource
from soloist.spec.dspark_config import DSparkConfig
from soloist.spec.dspark_model import DSparkModel
from soloist.train.batches import Text
from soloist.train.capture import Store
from soloist.train.settings import TrainSettings
from soloist.train.trainer import Trainer

# Steps before those that are timed, and those: for a forecast, and where the number of steps follows from it.
_FORECAST, _CHOICE = (1, 2), (3, 8)
# Rows of context at which steps with and without a draft are compared.
_CONTEXT_LEN = 1024
# The parameter and Adam's two moments in fp32, and the draft in bf16.
_BYTES_PER_PARAMETER = 3 * 4 + 2
# Bytes of a token in the file of texts.
_TEXT_BYTES = 6
EXPECTATION = (
    "what to expect: published drafts of small runs (5,000 conversations) were accepted at lengths of 2.3 for chat to"
    " 3.2 for mathematics with blocks of 8, those of a million conversations at 3.5 to 6. More texts help more than"
    " more passes over the same"
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the steps of a run take, once there are texts."""

    num_steps: int
    train_s: float
    # Of texts, checkpoint and draft; and of hidden states, 0 unless they are stored.
    disk_bytes: int
    stored_bytes: int
    num_parameters: int
    # Of text, and passes over it.
    num_tokens: int
    epochs: float

    def describe(self) -> str:
        """Say it in words."""
        return "\n".join(
            (
                f"{self.num_parameters / 1e6:.1f} M parameters to train, {self.num_tokens / 1e6:.2f} M tokens of text"
                f" to be read {self.epochs:.1f} times",
                f"training in {self.num_steps} steps takes about {in_words(self.train_s)}, disk"
                f" {(self.disk_bytes + self.stored_bytes) / 1e9:.2f} GB",
                EXPECTATION,
            )
        )


def in_words(seconds: float) -> str:
    """Give a time in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def make_plan(
    target: CausalLM,
    texts: Sequence[Text],
    settings: TrainSettings,
    num_tokens: int,
    *,
    stored_bytes: int,
    store: Store | None = None,
    seconds: float | None = None,
    num_ranks: int = 1,
) -> Plan:
    """Time a few steps on the texts, and count.

    Args:
        target: the model that the draft is for.
        texts: all of them.
        settings: of the run.
        num_tokens: ids that may be drawn.
        stored_bytes: that hidden states will take on disk.
        store: of hidden states, as the run will read them.
        seconds: that the steps shall take together. None: there shall be as many as the settings say.
        num_ranks: processes that share the texts of a step.
    """
    share = replace(settings, documents_per_step=settings.documents_per_step // num_ranks)
    trainer = Trainer(target, texts, share, num_tokens=num_tokens, store=store, is_alone=True)
    # The first steps allocate and compile.
    num_untimed, num_timed = _FORECAST if seconds is None else _CHOICE
    trainer.run(num_untimed)
    start_s = time.perf_counter()
    trainer.run(num_untimed + num_timed)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    step_s = (time.perf_counter() - start_s) / num_timed
    num_steps = settings.num_steps if seconds is None else max(int(seconds / step_s), 1)
    num_parameters = sum(p.numel() for p in trainer.parameters.values())
    text_tokens = sum(len(text.token_ids) for text in texts)
    return Plan(
        num_steps=num_steps,
        train_s=step_s * num_steps,
        disk_bytes=num_parameters * _BYTES_PER_PARAMETER + text_tokens * _TEXT_BYTES,
        stored_bytes=stored_bytes,
        num_parameters=num_parameters,
        num_tokens=text_tokens,
        epochs=num_steps * settings.documents_per_step / len(trainer.trained),
    )


def bytes_ratio(target: CausalLM, config: DSparkConfig) -> float:
    """Divide the bytes of a plain step by those of one that drafts a block and verifies it.

    Times the acceptance length it is the speed-up where memory is the limit, as on a GPU.
    """
    draft = DSparkModel(
        config, RecordingSource(target.dtype), 1, embed_tokens=target.embed_tokens, lm_head=target.lm_head
    )
    drafted = draft.read_bytes(_CONTEXT_LEN, config.num_drafts)
    plain = target.footprint.step_bytes(1, _CONTEXT_LEN).total
    return plain / (target.footprint.step_bytes(1 + config.num_drafts, _CONTEXT_LEN).total + drafted)
