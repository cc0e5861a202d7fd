"""Trains DSpark drafts of soloist-nano, all on the same answers, each for about so many seconds.

The same as one `soloist draft train` for each block, but that answers are asked for once, by whichever process is the
first, and that the number of steps is chosen by what a few of them take here. `training.json` in a draft's folder says
which it was.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from soloist.models import load_model
from soloist.tokenizer import Tokenizer
from soloist.train.capture import MemoryStore
from soloist.train.prompts import Reader, read_prompts
from soloist.train.responses import OwnSource, collect_texts
from soloist.train.run import Progress, train_draft
from soloist.train.settings import DraftShape, ObjectiveSettings, TrainSettings
from soloist.train.trainer import DTYPES, Trainer

# Half of the answers are greedy: of those an engine is asked for most.
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
# Laws are compared at an answer's own temperature down to this: greedy ones ask for the likeliest token alone.
OBJECTIVE = ObjectiveSettings(min_temperature=0.5)
# Longest answer, and answers generated at once.
NUM_TOKENS, BATCH_SIZE = 128, 2048
# Steps that are not typical, steps that are timed, and texts they draw from.
WARM_STEPS, TIMED_STEPS, NUM_TIMED_TEXTS = 20, 80, 4096
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

    def time_step(settings: TrainSettings) -> float:
        """Give the seconds of a step; infinite where a step fails."""
        some = texts[:NUM_TIMED_TEXTS]
        layers = settings.shape.config_for(target.config).target_layer_ids
        try:
            store = MemoryStore(some, target, layers, dtype)
            trial = Trainer(target, some, settings, num_tokens=num_ids, folder=None, store=store)
            trial.run(WARM_STEPS)
            start = time.perf_counter()
            trial.run(WARM_STEPS + TIMED_STEPS)
        except Exception as error:  # noqa: BLE001 - what compiles here and not there is many kinds of error
            print(f"is_compiled={settings.is_compiled}: {error}", flush=True)
            return math.inf
        return (time.perf_counter() - start) / TIMED_STEPS

    for block in args.blocks:
        settings = TrainSettings(
            shape=replace(SHAPE, block_size=block),
            objective=OBJECTIVE,
            documents_per_step=64 if is_gpu else 4,
            anchors_per_document=32 if is_gpu else 4,
            learning_rate=2e-3,
            optimizer="muon",
            compute_dtype=weights_dtype,
            log_every=50,
            checkpoint_every=100_000,
            stores_heads=False,
        )
        ways = (False, True) if is_gpu else (False,)
        found = {fused: time_step(replace(settings, is_compiled=fused)) for fused in ways}
        fused = min(found, key=found.__getitem__)
        step_s = found[fused]
        settings = replace(settings, num_steps=max(int(args.seconds / step_s), 10), is_compiled=fused)
        print(f"block {block}: seconds a step, fused or not: {found}; {settings.num_steps} steps", flush=True)
        outcome = train_draft(
            target,
            prompts,
            source,
            settings,
            args.out / ("dspark16" if block == 15 else f"dspark{block}"),
            temperatures=TEMPERATURES,
            num_tokens=num_ids,
            data=f"{len(prompts)} beginnings of functions and classes",
            texts_file=file,
            progress=Progress(
                on_step=lambda figures, total, speed: print(json.dumps(asdict(figures) | {"of": total}), flush=True)
            ),
        )
        print(f"block {block}: {outcome.figures}", flush=True)


if __name__ == "__main__":
    main()
