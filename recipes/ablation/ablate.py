"""What each part of the recipe for drafts is worth: the same data and steps without it, three seeds each.

    term         CE, L1 distance and confidence, at the end the acceptance length, on the target's answers; Muon
    no term      without the acceptance length
    CE alone     cross-entropy to the text and confidence, nothing of the target's law
    corpus text  as `term`, on what the corpus says behind the prompts instead of the target's own answers
    AdamW        as `term`, with AdamW for everything, at its own rate

All drafts are trained for the same number of steps, each in a process, as many at once as `--parallel` says. Each then
answers the same held-out prompts in the engine, greedily and at a
temperature of 0.7. A prompt of which any draft's answer repeats itself is left out for all of them, so that all are
compared on the same ones. Intervals are over prompts and seeds together.
"""

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.multiprocessing as mp

from soloist.bench.results import Result, device_name, machine_folder, write_result
from soloist.engine import Engine
from soloist.llm import LLM
from soloist.loading import choose_device
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.runtime.buffers import SamplingPlan
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from soloist.spec.drafter import Drafter
from soloist.spec.dspark import make_random_dspark
from soloist.spec.dspark_checkpoint import load_dspark
from soloist.spec.setup import DrafterSetup
from soloist.tokenizer import Tokenizer
from soloist.train.batches import Text
from soloist.train.capture import MemoryStore
from soloist.train.checkpoint import save_draft
from soloist.train.evaluate import distinct_ratio
from soloist.train.responses import OwnSource, collect_texts
from soloist.train.settings import DraftShape, ObjectiveSettings, TrainSettings
from soloist.train.trainer import Trainer

TERM = ObjectiveSettings(min_temperature=0.5)
NO_TERM = replace(TERM, length_weight=0.0)
# Objective, texts, optimiser, learning rate.
VARIANTS: dict[str, tuple[ObjectiveSettings, str, Literal["adamw", "muon"], float]] = {
    "term": (TERM, "own", "muon", 8e-3),
    "no term": (NO_TERM, "own", "muon", 8e-3),
    "CE alone": (replace(NO_TERM, ce_weight=1.0, l1_weight=0.0), "own", "muon", 8e-3),
    "corpus text": (TERM, "corpus", "muon", 8e-3),
    "AdamW": (TERM, "own", "adamw", 2e-3),
}
REFERENCE = "term"
SEEDS = (0, 1, 2)
# Of the answers that are trained on, taking turns; and of those that are measured.
TEMPERATURES, MEASURED = (0.0, 0.7, 1.0), (0.0, 0.7)
NUM_TOKENS, BATCH_SIZE, CONTEXT_LEN = 128, 2048, 512
MIN_DISTINCT = 0.6
NUM_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process is told."""

    variant: str
    seed: int
    options: argparse.Namespace

    @property
    def folder(self) -> Path:
        return self.options.out / f"{self.variant.replace(' ', '-')}-{self.seed}"


# Per temperature: of each prompt (tokens, steps), None where the answer repeats itself.
Counts = dict[str, list[tuple[int, int] | None]]


def say(*words: object) -> None:
    """Print a line with the time."""
    print(f"[{time.strftime('%H:%M:%S')}]", *words, flush=True)


def load_target(options: argparse.Namespace) -> CausalLM:
    """Load the target with weights that can be computed with as they are."""
    is_gpu = options.device != "cpu"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    return load_model(options.model, device=options.device, dtype=dtype, weights_dtype="bf16" if is_gpu else "fp32")


def make_settings(variant: str, seed: int, options: argparse.Namespace) -> TrainSettings:
    """Give the settings of one run: those of soloist-nano's drafts, apart from the objective."""
    is_gpu = options.device != "cpu"
    return TrainSettings(
        shape=DraftShape(block_size=8, num_hidden_layers=2, markov_rank=32),
        objective=VARIANTS[variant][0],
        num_steps=options.steps,
        documents_per_step=options.texts_per_step,
        anchors_per_document=options.anchors,
        learning_rate=VARIANTS[variant][3],
        optimizer=VARIANTS[variant][2],
        compute_dtype="bf16" if is_gpu else "fp32",
        loss_rows=8192,
        is_recorded=is_gpu,
        seed=seed,
        log_every=100,
        checkpoint_every=10**9,
        stores_heads=False,
    )


def read_texts(options: argparse.Namespace, target: CausalLM, tokenizer: Tokenizer) -> dict[str, list[Text]]:
    """Have the prompts answered by the target, and put what the corpus says behind the same ones."""
    lines = [json.loads(line) for line in (options.data / "trained.jsonl").read_text().splitlines()]
    lines = lines[: options.num_prompts]
    prompts = [tokenizer.encode(line["prompt"]) for line in lines]
    source = OwnSource(
        model=target,
        max_new_tokens=options.tokens,
        num_tokens=tokenizer.num_tokens,
        eos_token_ids=tuple(sorted({*target.config.eos_token_ids, *tokenizer.stop_ids})),
        batch_size=BATCH_SIZE,
    )
    own = collect_texts(source, prompts, TEMPERATURES, seed=0, file=options.out / "texts.jsonl")
    corpus = []
    for prompt, line in zip(prompts, lines, strict=True):
        rest = tokenizer.encode(line["rest"])[: options.tokens]
        corpus.append(Text(token_ids=(*prompt, *rest), num_prompt=len(prompt), temperature=1.0))
    return {"own": own, "corpus": corpus}


def make_engine(target: CausalLM, tokenizer: Tokenizer, folder: Path | None, settings: TrainSettings) -> Engine:
    """Put the target and a draft together; without a folder one with random weights, to compile what all will run."""
    setup = DrafterSetup(target=target, draft_path=folder, max_context_len=CONTEXT_LEN, num_tokens=tokenizer.num_tokens)
    drafter: Drafter
    if folder is None:
        drafter = make_random_dspark(setup, settings.shape.config_for(target.config))
    else:
        drafter = load_dspark(setup)
    runner = ModelRunner(
        target,
        max_context_len=CONTEXT_LEN,
        max_width=1 + drafter.max_drafts,
        num_tokens=tokenizer.num_tokens,
        has_draft_probs=drafter.has_draft_law,
        capture_layers=drafter.capture_layers,
    )
    engine = Engine(runner, drafter)
    LLM.of(engine, tokenizer, "target")
    engine.compile_ahead([SamplingPlan.of(SamplingParams(temperature=t)) for t in MEASURED])
    return engine


def roll_out(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> Counts:
    """Answer prompts with the draft and count."""
    found: Counts = {}
    for temperature in MEASURED:
        rows = found[f"{temperature:g}"] = []
        for seed, prompt in enumerate(prompts):
            generation = engine.generate(
                prompt, SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=seed)
            )
            for _ in generation:
                pass
            is_varied = distinct_ratio(generation.token_ids) >= MIN_DISTINCT
            stats = generation.stats
            rows.append((stats.completion_tokens, stats.forwards) if is_varied else None)
    return found


def read_held_out(options: argparse.Namespace, tokenizer: Tokenizer) -> list[list[int]]:
    """Read the prompts that are measured on."""
    lines = (options.data / "held-out.jsonl").read_text().splitlines()
    return [tokenizer.encode(json.loads(line)["prompt"]) for line in lines[: options.num_held_out]]


def work(job: Job, texts: list[Text]) -> None:
    """Train one draft and measure it: a process."""
    options = job.options
    torch.set_num_threads(1)
    target, tokenizer = load_target(options), Tokenizer.load(options.model)
    # Written by this program's first process.
    store = torch.load(states_file(options, job.variant), map_location=options.device, mmap=True, weights_only=False)
    settings = make_settings(job.variant, job.seed, options)
    trainer = Trainer(
        target, texts, settings, num_tokens=tokenizer.num_tokens, folder=job.folder / "training", store=store
    )
    start_s = time.perf_counter()
    trainer.run()
    figures = trainer.measure()
    train_s = time.perf_counter() - start_s
    save_draft(job.folder, trainer.network, lm_head=None)
    del trainer, store
    engine = make_engine(target, tokenizer, job.folder, settings)
    counts = roll_out(engine, read_held_out(options, tokenizer), options.tokens)
    result = {
        "variant": job.variant,
        "seed": job.seed,
        "device": device_name(target.device),
        "num_texts": len(texts),
        "train_s": train_s,
        "settings": settings.to_json(),
        "along_the_text": asdict(figures),
        "counts": counts,
    }
    (job.folder / "result.json").write_text(json.dumps(result))
    lengths = {t: round(length(rows), 3) for t, rows in counts.items()}
    say(f"{job.variant}, seed {job.seed}: {train_s:.0f} s, acceptance length {lengths}")


def states_file(options: argparse.Namespace, variant: str) -> Path:
    """Say where the hidden states of a variant's texts are kept."""
    return options.out / f"states-{VARIANTS[variant][1]}.pt"


def length(rows: Sequence[tuple[int, int] | None]) -> float:
    """Give tokens per step over the answers that do not repeat themselves."""
    counted = [row for row in rows if row is not None]
    return sum(tokens for tokens, _ in counted) / max(sum(steps for _, steps in counted), 1)


def interval(values: list[float]) -> tuple[float, float]:
    """Give the bounds of the middle 95 %."""
    ordered = sorted(values)
    return ordered[round(0.025 * (len(ordered) - 1))], ordered[round(0.975 * (len(ordered) - 1))]


def compare(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Give each variant's acceptance length, and how far it is from the reference's, by temperature.

    Near-ties send drafts different ways, so which greedy answers repeat themselves differs from run to run.
    """
    found: dict[str, Any] = {}
    for temperature in (f"{t:g}" for t in MEASURED):
        runs: dict[str, list[list[tuple[int, int] | None]]] = {}
        for result in results:
            runs.setdefault(result["variant"], []).append(result["counts"][temperature])
        answers = list(zip(*(rows for seeds in runs.values() for rows in seeds), strict=True))
        counted = [i for i, own in enumerate(answers) if None not in own]
        if not counted:
            say(f"at {temperature} every prompt has an answer that repeats itself: nothing is compared")
            continue
        draw = random.Random(0)
        samples: dict[str, list[float]] = {variant: [] for variant in runs}
        for _ in range(NUM_RESAMPLES):
            prompts = draw.choices(counted, k=len(counted))
            for variant, seeds in runs.items():
                chosen = draw.choices(seeds, k=len(seeds))
                samples[variant].append(length([rows[i] for rows in chosen for i in prompts]))
        lengths = {v: length([rows[i] for rows in seeds for i in counted]) for v, seeds in runs.items()}
        for variant, seeds in runs.items():
            figures: dict[str, Any] = {
                "acceptance_length": lengths[variant],
                "interval": interval(samples[variant]),
                "by_seed": [length([rows[i] for i in counted]) for rows in seeds],
                "num_prompts": len(counted),
                "repeating_share": sum(row is None for rows in seeds for row in rows) / (len(seeds) * len(answers)),
            }
            if variant != REFERENCE and REFERENCE in runs:
                pairs = zip(samples[variant], samples[REFERENCE], strict=True)
                figures |= {
                    "minus_reference": lengths[variant] - lengths[REFERENCE],
                    "minus_reference_interval": interval([a - b for a, b in pairs]),
                }
            found.setdefault(variant, {})[temperature] = figures
    return found


def in_words(rows: Sequence[tuple[int, int] | None]) -> str:
    """Write counts on one line: tokens/steps of each prompt, a dash where the answer repeats itself."""
    return " ".join("-" if row is None else f"{row[0]}/{row[1]}" for row in rows)


def table(compared: dict[str, Any]) -> str:
    """Write the comparison as Markdown."""
    temperatures = next(iter(compared.values()), {})
    rows = [["", *(f"{what} at {t}" for t in temperatures for what in ("acceptance length", f"minus `{REFERENCE}`"))]]
    rows.append(["---", *["---:"] * (len(rows[0]) - 1)])
    for variant, by_temperature in compared.items():
        row = [variant]
        for f in by_temperature.values():
            low, high = f["interval"]
            row.append(f"{f['acceptance_length']:.2f} ({low:.2f}-{high:.2f})")
            least, most = f.get("minus_reference_interval", (0, 0))
            row.append(f"{f['minus_reference']:+.2f} ({least:+.2f} to {most:+.2f})" if "minus_reference" in f else "")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of soloist-nano")
    parser.add_argument("--data", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="working folder")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--steps", type=int, default=1330, help="of every draft")
    parser.add_argument("--parallel", type=int, default=len(VARIANTS) * len(SEEDS), help="drafts trained at once")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--num-prompts", type=int, default=4000)
    parser.add_argument("--num-held-out", type=int, default=100)
    parser.add_argument("--texts-per-step", type=int, default=64)
    parser.add_argument("--anchors", type=int, default=32, help="places of a text that a step drafts from")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="of an answer")
    parser.add_argument("--compare", action="store_true", help="train nothing: compare what is there")
    parser.add_argument("--device", default=str(choose_device().device))
    return parser.parse_args()


def train_all(options: argparse.Namespace, jobs: list[Job]) -> None:
    """Train and measure every draft, each in a process."""
    target, tokenizer = load_target(options), Tokenizer.load(options.model)
    start_s = time.perf_counter()
    texts = read_texts(options, target, tokenizer)
    say(f"{len(texts['own'])} answers in {time.perf_counter() - start_s:.0f} s")
    layers = make_settings(REFERENCE, 0, options).shape.config_for(target.config).target_layer_ids
    for variant in ("term", "corpus text"):
        own = texts[VARIANTS[variant][1]]
        torch.save(MemoryStore(own, target, layers, target.dtype), states_file(options, variant))
    say("hidden states are kept")
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
    context = mp.get_context("spawn")
    waiting = [context.Process(target=work, args=(job, texts[VARIANTS[job.variant][1]]), daemon=True) for job in jobs]
    running: list[Any] = []
    is_compiled = False
    while waiting or running:
        while waiting and len(running) < options.parallel:
            running.append(waiting.pop(0))
            running[-1].start()
        if not is_compiled:
            # While they train: they find compiled what they will run.
            make_engine(target, tokenizer, None, make_settings(REFERENCE, 0, options))
            is_compiled = True
        running[0].join(1)
        running = [process for process in running if process.is_alive()]


def main() -> None:
    """Train, compare, write."""
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    # Seed by seed, so that what is there early has all variants.
    jobs = [Job(variant=v, seed=s, options=options) for s in SEEDS[: options.seeds] for v in VARIANTS]
    if not options.compare:
        train_all(options, jobs)
    files = [job.folder / "result.json" for job in jobs]
    results = [json.loads(file.read_text()) for file in files if file.is_file()]
    say(f"{len(results)} of {len(jobs)} drafts are measured")
    if not results:
        raise SystemExit("there is nothing to compare; if drafts were trained, what went wrong stands above")
    compared = compare(results)
    result = Result(
        case="nano-ablation",
        model="soloist-nano",
        device=results[0]["device"],
        command=shlex.join(["python", "recipes/ablation/ablate.py", *sys.argv[1:]]),
        weights="real",
        dtype=results[0]["settings"]["compute_dtype"],
        width=1 + results[0]["settings"]["shape"]["block_size"],
        details={
            "num_held_out": options.num_held_out,
            "max_tokens": options.tokens,
            "min_distinct_ratio": MIN_DISTINCT,
            "variants": compared,
            "runs": [run | {"counts": {t: in_words(rows) for t, rows in run["counts"].items()}} for run in results],
        },
    )
    write_result(result, options.results / machine_folder(result.device, 1))
    print(table(compared), flush=True)


if __name__ == "__main__":
    main()
