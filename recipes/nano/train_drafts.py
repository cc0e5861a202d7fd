"""Trains DSpark drafts of soloist-nano, all on the same answers, each for about so many seconds.

The parts are those of `soloist draft train`, but answers are asked for once, by whichever process is the first, and the
number of steps is what the time allows. `training.json` in a draft's folder says which it was.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.tokenizer import Tokenizer
from soloist.train.batches import Text
from soloist.train.capture import MemoryStore
from soloist.train.checkpoint import save_draft
from soloist.train.prompts import Reader, read_prompts
from soloist.train.responses import OwnSource, collect_texts, describe_mix
from soloist.train.settings import DraftShape, ObjectiveSettings, TrainSettings
from soloist.train.trainer import DTYPES, Figures, Trainer

# Half of the answers are greedy: of those an engine is asked for most.
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
# Laws are compared at an answer's own temperature down to this: greedy ones ask for the likeliest token alone.
OBJECTIVE = ObjectiveSettings(min_temperature=0.5)
# Longest answer, and answers generated at once.
NUM_TOKENS, BATCH_SIZE = 128, 2048
# Steps that are not typical, steps that are timed, and texts they draw from.
WARM_STEPS, TIMED_STEPS, NUM_TIMED_TEXTS = 20, 80, 4096
# Steps between two looks at the clock.
CHUNK_STEPS = 50
SAVE_EVERY_S = 60
# Drafts have to fit into the repository beside the target. The last layer knows most of what comes: the MTP layer reads
# it, and taught it to.
SHAPE = DraftShape(num_hidden_layers=2, markov_rank=32, target_layer_ids=(1, 3, 5, 6, 7))


def main() -> None:
    """Answer, time, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the target's folder")
    parser.add_argument("--prompts", type=Path, required=True, help="what prompts.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="gets dspark8/ for block 8, dspark16/ for block 15")
    parser.add_argument("--blocks", type=int, nargs="*", default=[8, 15], help="none: only ask for the answers")
    parser.add_argument("--seconds", type=float, required=True, help="of training, for each draft")
    parser.add_argument("--num-prompts", type=int, default=36000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    is_gpu = args.device != "cpu"
    weights_dtype = "bf16" if is_gpu else "fp32"
    dtype = DTYPES[weights_dtype]
    # Without an engine: nothing compiles or is recorded.
    target = load_model(args.model, device=torch.device(args.device), dtype=dtype, weights_dtype=weights_dtype)
    tokenizer = Tokenizer.load(args.model)
    num_ids = tokenizer.num_tokens
    reader = Reader(encode=tokenizer.encode, render=None)
    prompts = read_prompts(args.prompts, reader, limit=args.num_prompts, max_prompt_tokens=512, seed=0)
    source = OwnSource(
        model=target,
        max_new_tokens=NUM_TOKENS,
        num_tokens=num_ids,
        eos_token_ids=tuple(sorted(tokenizer.stop_ids)),
        batch_size=BATCH_SIZE,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    file, start = args.out / "texts.jsonl", time.perf_counter()
    texts = collect_texts(source, prompts, TEMPERATURES, seed=0, file=file)
    print(f"{len(texts)} answers in {time.perf_counter() - start:.0f} s", flush=True)

    for block in args.blocks:
        settings = TrainSettings(
            shape=replace(SHAPE, block_size=block),
            objective=OBJECTIVE,
            documents_per_step=64 if is_gpu else 4,
            anchors_per_document=32 if is_gpu else 4,
            learning_rate=4e-3,
            optimizer="muon",
            compute_dtype=weights_dtype,
            log_every=CHUNK_STEPS,
            stores_heads=False,
        )
        make = partial(make_trainer, target, settings=settings, num_ids=num_ids)
        is_fused = is_gpu and time_step(make(texts[:NUM_TIMED_TEXTS], is_fused=True)) < time_step(
            make(texts[:NUM_TIMED_TEXTS], is_fused=False)
        )
        trainer = make(texts, is_fused=is_fused)
        folder = args.out / ("dspark16" if block == 15 else f"dspark{block}")
        train_for(trainer, args.seconds, folder)
        figures = trainer.measure()
        print(f"block {block}: {figures}", flush=True)
        save_draft(folder, trainer.network, lm_head=None)
        record = {
            "data": f"{len(prompts)} beginnings of functions and classes",
            "num_texts": len(texts),
            "texts_by_temperature": describe_mix(texts),
            "settings": trainer.settings.to_json(),
            "seconds": args.seconds,
            "held_out": asdict(figures),
            "torch": torch.__version__,
        }
        (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def make_trainer(
    target: CausalLM, texts: Sequence[Text], *, settings: TrainSettings, num_ids: int, is_fused: bool
) -> Trainer:
    """Make a trainer that keeps the target's states of all texts on the device."""
    layers = settings.shape.config_for(target.config).target_layer_ids
    store = MemoryStore(texts, target, layers, DTYPES[settings.compute_dtype])
    own = replace(settings, is_compiled=is_fused)
    return Trainer(target, texts, own, num_tokens=num_ids, folder=None, store=store)


def time_step(trainer: Trainer) -> float:
    """Give the seconds of a step; infinite where it fails: not everything compiles everywhere."""
    try:
        trainer.run(WARM_STEPS)
        start = time.perf_counter()
        trainer.run(WARM_STEPS + TIMED_STEPS)
        step_s = (time.perf_counter() - start) / TIMED_STEPS
    except Exception as error:  # noqa: BLE001 - compilers raise many kinds
        print(f"is_compiled={trainer.settings.is_compiled}: {type(error).__name__}: {error}", flush=True)
        return math.inf
    print(f"is_compiled={trainer.settings.is_compiled}: {step_s * 1e3:.1f} ms a step", flush=True)
    return step_s


def train_for(trainer: Trainer, seconds: float, folder: Path) -> None:
    """Train until the time is over; the number of steps, and with it the schedule, follows from what the last took.

    What there is goes to the folder every minute.
    """

    def say(figures: Figures, num_steps: int, tok_per_s: float) -> None:
        print(json.dumps(asdict(figures) | {"of": num_steps, "tok_per_s": round(tok_per_s)}), flush=True)

    trainer.run(WARM_STEPS)
    start_s = last_save_s = time.perf_counter()
    step_s = seconds / trainer.settings.num_steps
    while True:
        chunk_s, first = time.perf_counter(), trainer.step
        num_left = int((start_s + seconds - chunk_s) / step_s)
        if num_left < 1:
            return
        trainer.settings = replace(trainer.settings, num_steps=first + num_left)
        trainer.run(min(first + CHUNK_STEPS, trainer.settings.num_steps), on_step=say)
        step_s = (time.perf_counter() - chunk_s) / (trainer.step - first)
        if time.perf_counter() - last_save_s > SAVE_EVERY_S:
            save_draft(folder, trainer.network, lm_head=None)
            last_save_s = time.perf_counter()


if __name__ == "__main__":
    main()
