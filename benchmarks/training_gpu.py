"""Draft training on one GPU from nothing: a small target, its answers, drafts, what the engine accepts of them.

The target has the architecture of `recipes/nano/config.json` and learns the Python standard library of this machine for
`--seconds`; the drafts learn the target for as long, each. Held-out files give the prompts that are measured on. Prints
what each part takes; the last line is one JSON object.
"""

import argparse
import json
import random
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from soloist.engine import Engine
from soloist.loading import choose_device
from soloist.models import find_model_class, load_model
from soloist.models.causal_lm import CausalLM
from soloist.models.loader import Placement, RandomSource
from soloist.runtime.runner import ModelRunner
from soloist.spec.dspark_checkpoint import load_dspark
from soloist.spec.setup import DrafterSetup
from soloist.train.batches import Text
from soloist.train.capture import MemoryStore
from soloist.train.checkpoint import save_draft
from soloist.train.documents import Documents
from soloist.train.evaluate import evaluate, table
from soloist.train.packed import final_norm_packed, forward_packed
from soloist.train.parameters import TrainableSource
from soloist.train.responses import OwnSource, check_ownership, collect_texts
from soloist.train.settings import DraftShape, ObjectiveSettings, TrainSettings
from soloist.train.trainer import Trainer

CONFIG = Path(__file__).parents[1] / "recipes" / "nano" / "config.json"
# Ids that are drawn; the last row of the vocabulary is the draft's mask.
NUM_TOKENS, END = 4090, 0
TIMED_STEPS = 10


class Clock:
    """Says things with the seconds since it was made."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._start = device, time.perf_counter()

    def now(self) -> float:
        """Wait for the device and give the time."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - self._start

    def say(self, *words: object) -> None:
        """Print a line."""
        print(f"[{self.now():6.1f}]", *words, flush=True)


def read_corpus(num_files: int) -> tuple[list[list[int]], list[list[int]]]:
    """Encode standard modules with a vocabulary of their own; give those to train on and one in twenty held out."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    paths = [p for p in paths if not {"test", "tests", "site-packages"} & set(p.parts) and p.stat().st_size < 100_000]
    random.Random(0).shuffle(paths)
    texts = [path.read_text(errors="ignore") for path in paths[:num_files]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    encoded = [[*e.ids, END] for e in tokenizer.encode_batch(texts)]
    return encoded[len(encoded) // 20 + 1 :], encoded[: len(encoded) // 20 + 1]


def train_target(corpus: list[list[int]], seconds: float, device: torch.device, shape: tuple[int, int]) -> CausalLM:
    """Train a target for some seconds and load it as it is served."""
    config = json.loads(CONFIG.read_text())
    model_class = find_model_class(config)
    source = TrainableSource(RandomSource(0, Placement(device=device, dtype=torch.float32)))
    model = model_class(model_class.config_class.from_dict(config), source)
    parameters = source.parameters(model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    stream, draw = torch.tensor([token for ids in corpus for token in ids]), torch.Generator().manual_seed(0)
    n, S = shape
    documents, start, steps, loss = Documents([S] * n, device), time.perf_counter(), 0, torch.zeros(())
    while (share := (time.perf_counter() - start) / seconds) < 1:
        optimizer.param_groups[0]["lr"] = 3e-3 * min((steps + 1) / 50, 1, 2 - 2 * share)
        at = torch.randint(len(stream) - S - 1, (n,), generator=draw)
        rows = torch.stack([stream[a : a + S + 1] for a in at]).to(device)
        hidden, _ = forward_packed(model, rows[:, :-1].flatten(), documents, dtype=torch.bfloat16)
        logits = F.linear(final_norm_packed(model, hidden), model.lm_head.to(hidden.dtype))
        loss = F.cross_entropy(logits.float(), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        steps += 1
    print(f"target: {steps} steps, loss {loss.item():.3f}, {steps * n * S / seconds / 1e6:.2f} M tokens/s", flush=True)
    folder = Path(tempfile.mkdtemp())
    source.save(folder, torch.bfloat16)
    (folder / "config.json").write_text(json.dumps(config))
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    return load_model(folder, device=device, dtype=dtype, weights_dtype="bf16" if is_gpu else "fp32")


def cut_prompts(documents: list[list[int]], count: int, seed: int) -> list[list[int]]:
    """Take pieces of 16 to 96 tokens from anywhere."""
    draw = random.Random(seed)
    long = [ids for ids in documents if len(ids) > 130]
    prompts = []
    for _ in range(count):
        ids = draw.choice(long)
        start = draw.randrange(len(ids) - 100)
        prompts.append(ids[start : start + draw.randint(16, 96)])
    return prompts


def train_one(
    target: CausalLM, texts: list[Text], block: int, seconds: float, per_step: tuple[int, int], clock: Clock
) -> tuple[Path, dict[str, Any]]:
    """Train a draft for as many steps as fit into some seconds."""

    def make(num_steps: int) -> TrainSettings:
        return TrainSettings(
            shape=DraftShape(block_size=block, markov_rank=128),
            objective=ObjectiveSettings(),
            num_steps=num_steps,
            documents_per_step=per_step[0],
            anchors_per_document=per_step[1],
            learning_rate=2e-3,
            log_every=100,
            checkpoint_every=10**9,
            compute_dtype="bf16" if target.device.type == "cuda" else "fp32",
            stores_heads=False,
        )

    layers = make(1).shape.config_for(target.config).target_layer_ids
    start = clock.now()
    store = MemoryStore(texts, target, layers, target.dtype)
    states_s = clock.now() - start
    timed = Trainer(target, texts, make(10**6), num_tokens=NUM_TOKENS, store=store)
    timed.run(3)
    start = clock.now()
    timed.run(3 + TIMED_STEPS)
    step_ms = (clock.now() - start) / TIMED_STEPS * 1e3
    trainer = Trainer(target, texts, make(max(int(seconds * 1e3 / step_ms), 2)), num_tokens=NUM_TOKENS, store=store)
    trainer.run(on_step=lambda f, n, _: clock.say(f"block {block} step {f.step}/{n}: length {f.acceptance_length:.2f}"))
    figures = trainer.measure()
    folder = Path(tempfile.mkdtemp())
    save_draft(folder, trainer.network, lm_head=None)
    found = {"step_ms": step_ms, "states_s": states_s, "steps": trainer.step, "held_out": vars(figures)}
    clock.say(f"block {block}:", found)
    return folder, found


def measure(target: CausalLM, folder: Path, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Roll a draft out through the engine."""
    drafter = load_dspark(DrafterSetup(target=target, draft_path=folder, max_context_len=512, num_tokens=NUM_TOKENS))
    runner = ModelRunner(
        target,
        max_context_len=512,
        max_width=1 + drafter.max_drafts,
        num_tokens=NUM_TOKENS,
        has_draft_probs=True,
        capture_layers=drafter.capture_layers,
    )
    found = evaluate(
        Engine(runner, drafter, eos_token_ids=(END,)),
        prompts,
        model="pilot",
        draft=folder.name,
        temperatures=(0.0, 0.7),
        max_tokens=max_tokens,
    )
    print(table(found), flush=True)
    return found.to_json()


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=50.0, help="of the target, and half of it for each draft")
    parser.add_argument("--quick", action="store_true", help="small parts: to see on a CPU that everything runs")
    args = parser.parse_args()
    device = choose_device().device
    torch.set_float32_matmul_precision("high")
    clock, is_quick = Clock(device), args.quick
    trained, held_out = read_corpus(60 if is_quick else 900)
    clock.say(f"{sum(map(len, trained)) / 1e6:.2f} M tokens to train on")
    target = train_target(trained, args.seconds, device, (2, 64) if is_quick else (64, 512))
    source = OwnSource(
        model=target,
        max_new_tokens=24 if is_quick else 192,
        num_tokens=NUM_TOKENS,
        eos_token_ids=(END,),
        batch_size=2048,
    )
    start = clock.now()
    texts = collect_texts(source, cut_prompts(trained, 24 if is_quick else 4096, 1), (0.0, 0.7, 1.0), seed=0)
    tok_per_s = sum(text.num_candidates for text in texts) / (clock.now() - start)
    clock.say(
        f"{len(texts)} answers, {tok_per_s:.0f} tokens/s;", check_ownership(target, texts, NUM_TOKENS, target.dtype)
    )
    result: dict[str, Any] = {"torch": torch.__version__, "device": str(device), "answer_tok_per_s": tok_per_s}
    if device.type == "cuda":
        result["device"] = torch.cuda.get_device_name()
    prompts = cut_prompts(held_out, 3 if is_quick else 24, 2)
    for block in (8, 15):
        folder, found = train_one(target, texts, block, args.seconds / 2, (4, 8) if is_quick else (128, 32), clock)
        found["engine"] = measure(target, folder, prompts, 24 if is_quick else 128)
        result[f"block_{block}"] = found
    print(json.dumps(result))


if __name__ == "__main__":
    main()
