"""Trains DSpark drafts of soloist-nano on the same answers, one after the other, all within so many seconds.

The parts are those of `soloist draft train`, but steps are CUDA graphs, and there are as many as the time allows.
`training.json` in a draft's folder says how many; a draft that has it is not trained again.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from soloist.loading import choose_device
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.tokenizer import Tokenizer
from soloist.train.batches import Text
from soloist.train.capture import MemoryStore
from soloist.train.checkpoint import save_draft
from soloist.train.evaluate import distinct_ratio
from soloist.train.prompts import Reader, read_prompts
from soloist.train.responses import OwnSource, collect_texts, describe_mix
from soloist.train.settings import DraftShape, ObjectiveSettings, TrainSettings
from soloist.train.trainer import DTYPES, Figures, Trainer

# Every prompt is answered twice, greedily and drawn: of greedy answers an engine is asked for most.
TEMPERATURES = (0.0, 0.7, 0.0, 0.7, 0.0, 1.0)
ANSWERS = 2
# Answers that repeat themselves are not measured, and teach nothing.
MIN_DISTINCT = 0.6
# Laws are compared at an answer's own temperature down to this: greedy ones ask for the likeliest token alone.
OBJECTIVE = ObjectiveSettings(min_temperature=0.5)
# Longest answer, and answers generated at once.
NUM_TOKENS, BATCH_SIZE = 128, 8192
# Steps that are not typical, and steps that are timed.
WARM_STEPS, TIMED_STEPS = 6, 30
# Steps between two looks at the clock.
CHUNK_STEPS = 200
# Only for the first few steps.
GUESSED_STEPS_PER_S = 100
SAVE_EVERY_S = 60
# For measuring and writing the last one.
MEASURE_S = 6
# Drafts have to fit into the repository beside the target. The last layer knows most of what comes: the MTP layer reads
# it, and taught it to.
SHAPE = DraftShape(num_hidden_layers=2, markov_rank=32, target_layer_ids=(1, 3, 5, 6, 7))


def main() -> None:
    """Answer, time, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the target's folder")
    parser.add_argument("--prompts", type=Path, required=True, help="what prompts.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="gets dspark8/ for block 8, dspark16/ for block 15")
    parser.add_argument("--blocks", type=int, nargs="*", default=[8, 15])
    parser.add_argument("--seconds", type=float, required=True, help="of everything, answers included")
    parser.add_argument("--num-prompts", type=int, default=60000)
    parser.add_argument("--no-graphs", action="store_true", help="launch the operations of a step one by one")
    parser.add_argument("--fuse", choices=["auto", "always", "never"], default="auto", help="the loss; auto: try both")
    parser.add_argument("--device", default=str(choose_device().device))
    args = parser.parse_args()
    start_s = time.perf_counter()
    is_gpu = args.device != "cpu"
    weights_dtype = "bf16" if is_gpu else "fp32"
    dtype = DTYPES[weights_dtype]
    # Without an engine: nothing compiles or is recorded.
    target = load_model(args.model, device=torch.device(args.device), dtype=dtype, weights_dtype=weights_dtype)
    num_ids = Tokenizer.load(args.model).num_tokens
    args.out.mkdir(parents=True, exist_ok=True)
    num_prompts, texts = read_texts(args, target)
    store = MemoryStore(texts, target, SHAPE.config_for(target.config).target_layer_ids, dtype)
    print(f"[{time.perf_counter() - start_s:.0f} s] the states of {len(store.ids)} tokens are kept", flush=True)

    form: dict[str, bool] | None = None
    blocks = [block for block in args.blocks if not (folder_of(args.out, block) / "training.json").is_file()]
    for i, block in enumerate(blocks):
        settings = TrainSettings(
            shape=replace(SHAPE, block_size=block),
            objective=OBJECTIVE,
            documents_per_step=64 if is_gpu else 4,
            anchors_per_document=32 if is_gpu else 4,
            # For tens of thousands of steps; hundreds bear twice as much.
            learning_rate=3e-3,
            weight_decay=0.1,
            optimizer="muon",
            compute_dtype=weights_dtype,
            log_every=CHUNK_STEPS,
            stores_heads=False,
            is_recorded=not args.no_graphs,
            is_compiled=args.fuse == "always",
        )
        if form is None:
            form = choose_form(target, texts, settings, num_ids, store) if args.fuse == "auto" else {}
        settings = replace(settings, **form)
        # Blocks twice as long take about twice the time.
        left_s = args.seconds - MEASURE_S - (time.perf_counter() - start_s)
        seconds = left_s * block / sum(blocks[i:])
        trainer = Trainer(target, texts, settings, num_tokens=num_ids, store=store)
        folder = folder_of(args.out, block)
        train_for(trainer, seconds, folder)
        save_draft(folder, trainer.network, lm_head=None)
        figures = trainer.measure()
        print(f"[{time.perf_counter() - start_s:.0f} s] block {block}: {figures}", flush=True)
        record = {
            "data": f"{num_prompts} beginnings, each answered {ANSWERS} times, of functions and classes",
            "num_texts": len(texts),
            "texts_by_temperature": describe_mix(texts),
            "settings": trainer.settings.to_json(),
            "seconds": round(seconds, 1),
            "held_out": asdict(figures),
            "torch": torch.__version__,
        }
        (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def folder_of(out: Path, block: int) -> Path:
    """Say where a draft goes."""
    return out / ("dspark16" if block == 15 else f"dspark{block}")


def read_texts(args: argparse.Namespace, target: CausalLM) -> tuple[int, list[Text]]:
    """Have the prompts answered; give their number, and the answers that do not repeat themselves."""
    tokenizer = Tokenizer.load(args.model)
    reader = Reader(encode=tokenizer.encode, render=None)
    prompts = read_prompts(args.prompts, reader, limit=args.num_prompts, max_prompt_tokens=512, seed=0)
    source = OwnSource(
        model=target,
        max_new_tokens=NUM_TOKENS,
        num_tokens=tokenizer.num_tokens,
        eos_token_ids=tuple(sorted(tokenizer.stop_ids)),
        batch_size=BATCH_SIZE,
    )
    start_s = time.perf_counter()
    asked = [prompt for prompt in prompts for _ in range(ANSWERS)]
    found = collect_texts(source, asked, TEMPERATURES, seed=0, file=args.out / "texts.jsonl")
    texts = [text for text in found if distinct_ratio(text.token_ids[text.num_prompt :]) >= MIN_DISTINCT]
    took_s = time.perf_counter() - start_s
    print(f"{len(found)} answers in {took_s:.0f} s, {len(texts)} that do not repeat themselves", flush=True)
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
    return len(prompts), texts


def choose_form(
    target: CausalLM, texts: Sequence[Text], settings: TrainSettings, num_ids: int, store: MemoryStore
) -> dict[str, bool]:
    """Give the settings of the quickest form of a step; where no graph can be made, of one that is launched."""
    times = [time_step(target, texts, replace(settings, is_compiled=c), num_ids, store) for c in (False, True)]
    return {"is_compiled": times[1] < times[0], "is_recorded": settings.is_recorded and min(times) < math.inf}


def time_step(
    target: CausalLM, texts: Sequence[Text], settings: TrainSettings, num_ids: int, store: MemoryStore
) -> float:
    """Give the seconds of a step; infinite where it fails: not everything compiles everywhere."""
    start_s = time.perf_counter()
    try:
        trainer = Trainer(target, texts, settings, num_tokens=num_ids, store=store)
        trainer.run(WARM_STEPS)
        warm_s = time.perf_counter()
        trainer.run(WARM_STEPS + TIMED_STEPS)
        step_s = (time.perf_counter() - warm_s) / TIMED_STEPS
    except Exception as error:  # noqa: BLE001 - compilers raise many kinds
        print(f"is_compiled={settings.is_compiled}: {type(error).__name__}: {error}", flush=True)
        return math.inf
    print(
        f"is_compiled={settings.is_compiled}: {step_s * 1e3:.1f} ms a step, {warm_s - start_s:.0f} s first", flush=True
    )
    return step_s


def train_for(trainer: Trainer, seconds: float, folder: Path) -> None:
    """Train until the time is over; the number of steps, and with it the schedule, follows from what the last took.

    What there is goes to the folder every minute.
    """

    def say(figures: Figures, num_steps: int, tok_per_s: float) -> None:
        print(json.dumps(asdict(figures) | {"of": num_steps, "tok_per_s": round(tok_per_s)}), flush=True)

    last_save_s = start_s = time.perf_counter()
    # A guess of how many there will be, for the rate at first.
    trainer.settings = replace(trainer.settings, num_steps=max(int(seconds * GUESSED_STEPS_PER_S), 1))
    trainer.run(WARM_STEPS)
    chunk_s, first = time.perf_counter(), trainer.step
    trainer.run(first + TIMED_STEPS)
    step_s = (time.perf_counter() - chunk_s) / (trainer.step - first)
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
            print(f"held out: {trainer.measure()}", flush=True)
            last_save_s = time.perf_counter()


if __name__ == "__main__":
    main()
