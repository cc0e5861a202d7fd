"""A whole run: answers, their check, hidden states, training, and the draft's folder.

Owns what lies where in that folder:

    config.json model.safetensors     the draft
    held-out.jsonl                    prompts that it was not trained on, for `soloist draft eval`
    training.json                     settings, data, the mix of temperatures, figures
    training/                         texts, metrics and the state that a stopped run goes on with
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from soloist.engine import Engine
from soloist.errors import UsageError
from soloist.models.causal_lm import CausalLM
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from soloist.spec.dspark_checkpoint import load_dspark
from soloist.spec.setup import DrafterSetup
from soloist.train.batches import Text
from soloist.train.capture import MemoryStore, StateStore, Store, bytes_per_token, fits_in_memory
from soloist.train.checkpoint import save_draft
from soloist.train.packed import dense
from soloist.train.plan import Plan, make_plan
from soloist.train.responses import FILE_NAME, Source, check_ownership, collect_texts, describe_mix, require_own
from soloist.train.settings import TrainSettings
from soloist.train.trainer import DTYPES, Figures, OnStep, Trainer, read_num_steps

HELD_OUT_NAME = "held-out.jsonl"
RECORD_NAME = "training.json"
# Folder of a dry run in that of the draft; its steps, prompts and tokens of an answer.
DRY_NAME = "dry-run"
DRY_STEPS, DRY_PROMPTS, DRY_TOKENS = 2, 6, 16


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Who hears how a run goes on."""

    # (answers there, answers to come).
    on_answer: Callable[[int, int], None] = lambda done, total: None
    # Once, before the first step.
    on_plan: Callable[[Plan], None] = lambda plan: None
    on_step: OnStep = lambda figures, num_steps, tok_per_s: None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run left."""

    folder: Path
    # On held-out texts, along the text.
    figures: Figures
    num_texts: int
    mix: dict[str, int]


def dry(settings: TrainSettings) -> TrainSettings:
    """Give settings that show within two minutes that everything fits together; the draft is worth nothing."""
    return replace(
        settings,
        num_steps=DRY_STEPS,
        documents_per_step=min(settings.documents_per_step, 2),
        anchors_per_document=min(settings.anchors_per_document, 4),
        log_every=1,
        checkpoint_every=DRY_STEPS,
    )


def train_draft(
    target: CausalLM,
    prompts: Sequence[Sequence[int]],
    source: Source,
    settings: TrainSettings,
    folder: Path,
    *,
    temperatures: Sequence[float],
    num_tokens: int,
    data: str,
    texts_file: Path | None = None,
    store_budget_bytes: int | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Train a draft; in a folder where this was begun before it goes on.

    Under `torchrun`, rank 0 asks for the answers and writes the files.

    Args:
        target: dense weights.
        prompts: token ids.
        source: of the answers.
        settings: of the run.
        folder: of the draft.
        temperatures: of the answers, taking turns.
        num_tokens: ids that may be drawn.
        data: what the prompts are, in words, for the card.
        texts_file: keeps the answers, so that several drafts can share them. None: one in the folder.
        store_budget_bytes: keep hidden states on disk, in at most so many bytes. None: in memory where they fit, else
            they are computed in every step.
        seconds: take as many steps as fit into this time here, behind answers and hidden states, instead of
            `settings.num_steps`; a run that goes on keeps the number it began with.
        progress: who hears of it.

    Raises:
        UsageError: the answers are not the target's own, or too few; or a time is given to several processes.
        CheckpointError: the folder holds another run.
    """
    progress = progress or Progress()
    if seconds is not None and dist.is_initialized():
        raise UsageError("seconds are counted by one process: give several of them a number of steps")
    working = folder / "training"
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    file = texts_file or working / FILE_NAME

    def collect() -> list[Text]:
        return collect_texts(
            source, prompts, temperatures, seed=settings.seed, file=file, on_progress=progress.on_answer
        )

    texts: list[Text] = []
    if is_first:
        working.mkdir(parents=True, exist_ok=True)
        texts = collect()
    if dist.is_initialized():
        dist.barrier()
        if not is_first:
            # All of them are in the file by now.
            texts = collect()
    if len(texts) < 2:
        raise UsageError(f"{len(texts)} of {len(prompts)} prompts were answered: a run needs two texts at least")
    if is_first:
        require_own(check_ownership(target, texts, num_tokens, DTYPES[settings.compute_dtype]))
    store = _make_store(target, texts, settings, working, store_budget_bytes)
    if seconds is not None and (known := read_num_steps(working)) is not None:
        settings, seconds = replace(settings, num_steps=known), None
    if is_first:
        stored_bytes = 0 if store_budget_bytes is None else _state_bytes(target, texts, settings)
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        sizes = {"stored_bytes": stored_bytes, "num_ranks": num_ranks}
        plan = make_plan(target, texts, settings, num_tokens, store=store, seconds=seconds, **sizes)
        settings = replace(settings, num_steps=plan.num_steps)
        progress.on_plan(plan)
    trainer = Trainer(target, texts, settings, num_tokens=num_tokens, folder=working, store=store)
    trainer.run(on_step=progress.on_step if is_first else None)
    figures = trainer.measure()
    outcome = Outcome(folder=folder, figures=figures, num_texts=len(texts), mix=describe_mix(texts))
    if is_first:
        head = dense(target.lm_head) if settings.stores_heads else None
        save_draft(folder, trainer.network, lm_head=head)
        held_out = [texts[i].token_ids[: texts[i].num_prompt] for i in trainer.held_out]
        (folder / HELD_OUT_NAME).write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in held_out))
        record = _record(target, settings, outcome, data)
        (folder / RECORD_NAME).write_text(json.dumps(record, indent=1) + "\n")
    if dist.is_initialized():
        dist.barrier()
    return outcome


def _state_bytes(target: CausalLM, texts: Sequence[Text], settings: TrainSettings) -> int:
    layers = settings.shape.config_for(target.config).target_layer_ids
    return bytes_per_token(target, layers) * sum(len(text.token_ids) for text in texts)


def _make_store(
    target: CausalLM, texts: Sequence[Text], settings: TrainSettings, working: Path, budget_bytes: int | None
) -> Store | None:
    """Choose where hidden states come from."""
    layers = settings.shape.config_for(target.config).target_layer_ids
    if budget_bytes is not None:
        if dist.is_initialized() and dist.get_rank() != 0:
            dist.barrier()
        store = StateStore(working / "states", texts, target, layers, budget_bytes)
        if dist.is_initialized() and dist.get_rank() == 0:
            dist.barrier()
        return store
    dtype = DTYPES[settings.compute_dtype]
    if fits_in_memory(target, texts, layers, dtype):
        return MemoryStore(texts, target, layers, dtype)
    return None


def _record(target: CausalLM, settings: TrainSettings, outcome: Outcome, data: str) -> dict[str, Any]:
    return {
        "target": target.architecture,
        "data": data,
        "num_texts": outcome.num_texts,
        "texts_by_temperature": outcome.mix,
        "settings": settings.to_json(),
        "held_out": vars(outcome.figures),
        "torch": torch.__version__,
    }


def try_draft(target: CausalLM, folder: Path, prompt_ids: Sequence[int], num_tokens: int) -> float:
    """Load a draft as the engine does and answer a prompt with it; give the tokens of a step.

    Args:
        target: the model that it is for.
        folder: of the draft.
        prompt_ids: of a prompt.
        num_tokens: ids that may be drawn.
    """
    max_context_len = len(prompt_ids) + DRY_TOKENS
    setup = DrafterSetup(target=target, draft_path=folder, max_context_len=max_context_len, num_tokens=num_tokens)
    drafter = load_dspark(setup)
    runner = ModelRunner(
        target,
        max_context_len=max_context_len,
        max_width=1 + drafter.max_drafts,
        num_tokens=num_tokens,
        has_draft_probs=drafter.has_draft_law,
        capture_layers=drafter.capture_layers,
    )
    generation = Engine(runner, drafter, eos_token_ids=()).generate(prompt_ids, SamplingParams(max_tokens=DRY_TOKENS))
    for _ in generation:
        pass
    return generation.stats.acceptance_length
