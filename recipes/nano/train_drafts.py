"""Trains DSpark drafts of soloist-nano on its own continuations of training code.

Prompts begin at lines of training documents; the target continues them at the temperatures 0, 0.7 and 1 in turn. All
drafts share these texts. `--steps` steps of the optimiser each, so that a run can be repeated.
"""

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch

from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.tokenizer import Tokenizer
from soloist.train.responses import OwnSource
from soloist.train.run import Progress, train_draft
from soloist.train.settings import DraftShape, ObjectiveSettings, TrainSettings

TEMPERATURES = (0.0, 0.7, 1.0)
MIN_PROMPT, MAX_PROMPT = 16, 128


def cut_prompts(tokens: np.ndarray, end: int, is_line_start: np.ndarray, count: int, seed: int = 0) -> list[list[int]]:
    """Take beginnings of code from along the documents.

    Args:
        tokens: documents, each closed by `end`.
        end: the end token.
        is_line_start: (vocabulary,) whether a token ends a line, so that a prompt can begin behind it.
        count: prompts.
        seed: of the choice.
    """
    draw = random.Random(seed)
    starts = np.flatnonzero(is_line_start[tokens] | (tokens == end)) + 1
    prompts = []
    while len(prompts) < count:
        start = int(starts[draw.randrange(len(starts))])
        prompt = tokens[start : start + draw.randint(MIN_PROMPT, MAX_PROMPT)]
        if len(prompt) >= MIN_PROMPT and not (prompt == end).any():
            prompts.append([int(token) for token in prompt])
    return prompts


def make_settings(block: int, args: argparse.Namespace) -> TrainSettings:
    """Give the settings of one draft."""
    return TrainSettings(
        shape=DraftShape(block_size=block, num_hidden_layers=args.layers, markov_rank=args.markov_rank),
        objective=ObjectiveSettings(min_temperature=0.5),
        num_steps=args.steps,
        documents_per_step=args.texts_per_step,
        anchors_per_document=32,
        learning_rate=2e-3,
        held_out_share=0.02,
        log_every=50,
        checkpoint_every=args.steps,
        compute_dtype="bf16" if args.device == "cuda" else "fp32",
        stores_heads=False,
    )


def load_target(path: Path, device: str) -> CausalLM:
    """Load the target with dense weights."""
    is_gpu = device == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    return load_model(path, device=device, dtype=dtype, weights_dtype="bf16" if is_gpu else "fp32")


def main() -> None:
    """Have the texts written, then train a draft for each block size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the target's folder")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.npy")
    parser.add_argument("--out", type=Path, required=True, help="gets texts.jsonl and a folder for each draft")
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 15])
    parser.add_argument("--prompts", type=int, default=12288)
    parser.add_argument("--tokens", type=int, default=256, help="longest continuation")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--texts-per-step", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--markov-rank", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    target, tokenizer = load_target(args.model, args.device), Tokenizer.load(args.model)
    end = json.loads((args.model / "config.json").read_text())["eos_token_id"]
    ends_line = np.array(
        [i < tokenizer.num_tokens and tokenizer.token_bytes(i)[-1:] == b"\n" for i in range(target.config.vocab_size)]
    )
    prompts = cut_prompts(np.load(args.data / "train.npy"), end, ends_line, args.prompts)
    source = OwnSource(
        model=target,
        max_new_tokens=args.tokens,
        num_tokens=tokenizer.num_tokens,
        eos_token_ids=(end,),
        batch_size=2048,
    )
    start = time.perf_counter()

    def say(*words: object) -> None:
        print(f"[{time.perf_counter() - start:6.1f}]", *words, flush=True)

    for block in args.blocks:
        outcome = train_draft(
            target,
            prompts,
            source,
            make_settings(block, args),
            args.out / f"nano-dspark{block if block < 15 else block + 1}",
            temperatures=TEMPERATURES,
            num_tokens=tokenizer.num_tokens,
            data=f"{args.prompts} beginnings of lines of the target's own training code",
            texts_file=args.out / "texts.jsonl",
            progress=Progress(
                on_answer=lambda done, total: say(f"{done} of {total} texts"),
                on_plan=lambda plan: say(plan.describe().replace("\n", "; ")),
                on_step=lambda figures, num_steps, tok_per_s: (
                    say(
                        f"step {figures.step} of {num_steps}: loss {figures.loss:.3f}, acceptance length"
                        f" {figures.acceptance_length:.2f}, greedy {figures.greedy_acceptance_length:.2f}"
                    )
                    if figures.step % 200 == 0
                    else None
                ),
            ),
        )
        say(f"block {block}: {outcome.figures}")


if __name__ == "__main__":
    main()
