"""What drafts gain on one model: a DSpark draft, a draft model and prompt lookup beside plain decoding, greedily.

    python benchmarks/drafts.py --model M --set NAME=FILE [--dspark FOLDER --widths 5 8 --adaptive]
        [--draft-model D --draft-model-widths 4] [--lookup-width 8] --device cuda --case CASE --out FOLDER

writes `FOLDER/<machine>/CASE.json` and prints a table. Files hold prompts as `soloist draft` reads them. Each prompt is
answered in all settings, one behind the other. Per setting and set:

    acceptance   tokens of the answers per step, the target's own included
    step, TPOT   time behind the first step over the steps, and over the tokens, that came in it
    text         answers that are those of plain decoding; that part from it at a near-tie of the fp32 logits; others

A draft may change a text only at a near-tie, where the two likeliest logits are closer than twice their rounding error.
Answers that repeat themselves are easy to draft: figures without them stand beside those of all.
"""

import argparse
import gc
import json
import random
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from soloist.bench.results import Result, device_name, gpu_state, machine_folder, write_result
from soloist.draft_check import judge_tie, read_sequence
from soloist.engine import Engine
from soloist.hub import find_model
from soloist.llm import LLM
from soloist.loading import choose_device
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.runtime.buffers import SamplingPlan
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from soloist.spec.draft_model import DraftModel
from soloist.spec.drafter import Drafter
from soloist.spec.dspark_checkpoint import load_dspark
from soloist.spec.ngram import PromptLookup
from soloist.spec.setup import DrafterSetup
from soloist.step_costs import measure
from soloist.tokenizer import Tokenizer
from soloist.train.documents import Documents
from soloist.train.evaluate import distinct_ratio
from soloist.train.packed import dense, final_norm_packed, forward_packed
from soloist.train.prompts import Reader, read_prompts

CONTEXT_LEN = 2048
PLAIN = "no draft"
# Answers of which fewer of the runs of four tokens are distinct count as loops.
MIN_DISTINCT = 0.6
NUM_RESAMPLES = 1000
GREEDY = SamplingPlan.of(SamplingParams())


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One prompt answered in one setting."""

    token_ids: list[int]
    # Of the first step, and of all steps.
    num_first: int
    num_steps: int
    drafted: int
    accepted: int
    # From the end of the first step to that of the last.
    decode_s: float
    # Tokens after which drafting was turned off; None: it was not.
    off_after: int | None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to answer."""

    name: str
    engine: Engine
    is_adaptive: bool = False


def say(*words: object) -> None:
    print(f"[{time.strftime('%H:%M:%S')}]", *words, flush=True)


def answer(engine: Engine, prompt: Sequence[int], max_tokens: int) -> Answer:
    """Answer a prompt greedily under a stopwatch."""
    generation = engine.generate(prompt, SamplingParams(max_tokens=max_tokens))
    times, counts = [], []
    for result in generation:
        times.append(time.perf_counter())
        counts.append(len(result.token_ids))
    stats = generation.stats
    return Answer(
        token_ids=generation.token_ids,
        num_first=counts[0],
        num_steps=stats.forwards,
        drafted=stats.drafted,
        accepted=stats.accepted,
        decode_s=times[-1] - times[0],
        off_after=stats.drafting_off_after,
    )


def pool(answers: Sequence[Answer]) -> dict[str, float]:
    """Put answers together: each token, and each step, counts once."""
    seconds = sum(a.decode_s for a in answers)
    num_tokens = sum(len(a.token_ids) - a.num_first for a in answers)
    num_steps = sum(a.num_steps - 1 for a in answers)
    return {
        "acceptance_length": sum(len(a.token_ids) for a in answers) / sum(a.num_steps for a in answers),
        "step_ms": 1e3 * seconds / max(num_steps, 1),
        "tpot_ms": 1e3 * seconds / max(num_tokens, 1),
    }


def interval(values: list[float]) -> tuple[float, float]:
    """Give the bounds of the middle 95 %."""
    ordered = sorted(values)
    return ordered[round(0.025 * (len(ordered) - 1))], ordered[round(0.975 * (len(ordered) - 1))]


def summarise(plain: list[Answer], drafted: list[Answer]) -> dict[str, Any]:
    """Compare a setting with plain decoding on the same prompts, with 95 % intervals over prompts."""
    draw = random.Random(0)
    own, other = pool(drafted), pool(plain)
    lengths, gains = [], []
    for _ in range(NUM_RESAMPLES):
        chosen = draw.choices(range(len(plain)), k=len(plain))
        resampled = pool([drafted[i] for i in chosen])
        lengths.append(resampled["acceptance_length"])
        gains.append(pool([plain[i] for i in chosen])["tpot_ms"] / resampled["tpot_ms"])
    num_drafted = sum(a.drafted for a in drafted)
    return own | {
        "acceptance_length_interval": interval(lengths),
        "acceptance_rate": sum(a.accepted for a in drafted) / num_drafted if num_drafted else None,
        "gain": other["tpot_ms"] / own["tpot_ms"],
        "gain_interval": interval(gains),
        "num_answers": len(drafted),
        "num_tokens": sum(len(a.token_ids) for a in drafted),
        "num_turned_off": sum(a.off_after is not None for a in drafted),
    }


class Target:
    """A model whose weights are read once for all settings."""

    def __init__(self, path: Path, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if is_gpu else torch.float32
        self.path, self.device = path, device
        self.model = load_model(path, device=device, dtype=self.dtype, weights_dtype="bf16" if is_gpu else "fp32")
        self.tokenizer = Tokenizer.load(path)
        self.num_tokens = self.tokenizer.num_tokens

    def engine(self, drafter: Drafter | None, *, is_adaptive: bool = False) -> Engine:
        """Put the target and a drafter together, ready to answer greedily."""
        runner = ModelRunner(
            self.model,
            max_context_len=CONTEXT_LEN,
            max_width=1 + (drafter.max_drafts if drafter else 0),
            num_tokens=self.num_tokens,
            has_draft_probs=bool(drafter and drafter.has_draft_law),
            capture_layers=drafter.capture_layers if drafter else (),
        )
        engine = Engine(runner, drafter)
        # Gives it the end tokens of tokenizer and template.
        LLM.of(engine, self.tokenizer, self.path.name)
        engine.compile_ahead([GREEDY])
        engine.prepare(GREEDY)
        if is_adaptive:
            engine.adapt_width(measure(engine))
            engine.prepare(GREEDY)
        return engine

    def dspark(self, folder: Path, width: int) -> Drafter:
        return load_dspark(self._setup(folder, width))

    def draft_model(self, model: CausalLM, width: int) -> Drafter:
        return DraftModel(model, max_context_len=CONTEXT_LEN, num_tokens=self.num_tokens, max_drafts=width - 1)

    def _setup(self, folder: Path, width: int) -> DrafterSetup:
        return DrafterSetup(
            target=self.model,
            draft_path=folder,
            max_context_len=CONTEXT_LEN,
            num_tokens=self.num_tokens,
            max_width=width,
        )

    @torch.inference_mode()
    def near_tie(self, ids: Sequence[int]) -> dict[str, Any]:
        """Say whether the token behind a sequence is a near-tie of the same weights computed with in fp32."""
        tokens = torch.tensor(ids, device=self.device)
        documents = Documents([len(ids)], self.device)
        hidden, _ = forward_packed(self.model, tokens, documents, dtype=torch.float32)
        last = final_norm_packed(self.model, hidden)
        wanted = F.linear(last, dense(self.model.lm_head)[: self.num_tokens].float())  # (T, N)
        return judge_tie(wanted, read_sequence(self.model, ids)[0][:, : self.num_tokens])


def differences(target: Target, prompts: list[list[int]], plain: list[Answer], drafted: list[Answer]) -> dict[str, Any]:
    """Count the answers that are plain decoding's, and look at where the others part from it."""
    found: list[dict[str, Any]] = []
    for i, (prompt, one, other) in enumerate(zip(prompts, plain, drafted, strict=True)):
        if one.token_ids == other.token_ids:
            continue
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        at = next((t for t, (a, b) in enumerate(pairs) if a != b), None)
        tie = {"is_near_tie": False} if at is None else target.near_tie([*prompt, *one.token_ids[:at]])
        found.append({"prompt": i, "at": at} | tie)
    num_ties = sum(difference["is_near_tie"] for difference in found)
    return {
        "num_same": len(prompts) - len(found),
        "num_near_ties": num_ties,
        "num_wrong": len(found) - num_ties,
        "differences": found,
    }


def make_settings(target: Target, options: argparse.Namespace) -> list[Setting]:
    """Build every setting that was asked for, plain decoding first."""
    settings = [Setting(name=PLAIN, engine=target.engine(None))]

    def add(name: str, drafter: Drafter, *, is_adaptive: bool = False) -> None:
        start_s = time.perf_counter()
        engine = target.engine(drafter, is_adaptive=is_adaptive)
        settings.append(Setting(name=name, engine=engine, is_adaptive=is_adaptive))
        say(f"{name}: ready in {time.perf_counter() - start_s:.1f} s")

    if options.dspark:
        for width in options.widths:
            add(f"DSpark, {width} rows", target.dspark(options.dspark, width))
        if options.adaptive:
            width = max(options.widths)
            add(f"DSpark, up to {width} rows", target.dspark(options.dspark, width), is_adaptive=True)
    if options.draft_model:
        is_gpu = target.device.type == "cuda"
        weights_dtype = "bf16" if is_gpu else "fp32"
        path = find_path(options.draft_model)
        model = load_model(path, device=target.device, dtype=target.dtype, weights_dtype=weights_dtype)
        for width in options.draft_model_widths:
            add(f"draft model, {width} rows", target.draft_model(model, width))
    if options.lookup_width:
        lookup = PromptLookup(max_context_len=CONTEXT_LEN, max_drafts=options.lookup_width - 1, device=target.device)
        add(f"prompt lookup, {options.lookup_width} rows", lookup)
    return settings


def find_path(name: str) -> Path:
    path = find_model(name).path
    assert path is not None, f"{name} has no weights"
    return path


def table(sets: dict[str, Any]) -> str:
    """Write the figures as Markdown."""
    rows = [["prompts", "setting", "acceptance (95 %)", "step, ms", "TPOT, ms", "gain (95 %)", "without loops", "text"]]
    rows.append(["---", "---", "---:", "---:", "---:", "---:", "---:", "---"])
    for name, found in sets.items():
        for setting, f in found["settings"].items():
            (low, high), (least, most) = f["acceptance_length_interval"], f["gain_interval"]
            text = f"{f['num_same']} same, {f['num_near_ties']} near-ties, {f['num_wrong']} other"
            rows.append(
                [
                    f"{name} ({f['num_answers']})",
                    setting,
                    f"{f['acceptance_length']:.2f} ({low:.2f}-{high:.2f})",
                    f"{f['step_ms']:.3f}",
                    f"{f['tpot_ms']:.3f}",
                    f"{f['gain']:.2f} ({least:.2f}-{most:.2f})",
                    "-" if f["varied"] is None else f"{f['varied']['gain']:.2f} of {f['varied']['num_answers']}",
                    "" if setting == PLAIN else text,
                ]
            )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def measure_set(
    target: Target, settings: list[Setting], prompts: list[list[int]], max_tokens: int, stop_s: float
) -> dict[str, Any] | None:
    """Answer prompts in all settings, as many as the time allows; None: there was nothing to time."""
    answers: dict[str, list[Answer]] = {setting.name: [] for setting in settings}
    for i, prompt in enumerate(prompts):
        if i > 2 and time.perf_counter() > stop_s:
            say(f"time is up behind {i} of {len(prompts)} prompts")
            break
        # Another order each time, so that none always comes behind the same one.
        for setting in [*settings[i % len(settings) :], *settings[: i % len(settings)]]:
            answers[setting.name].append(answer(setting.engine, prompt, max_tokens))
    # An answer that ends in its first step has no time.
    timed = [i for i in range(len(answers[PLAIN])) if all(own[i].num_steps > 1 for own in answers.values())]
    if not timed:
        return None
    prompts = [prompts[i] for i in timed]
    answers = {name: [own[i] for i in timed] for name, own in answers.items()}
    plain = answers[PLAIN]
    varied = [i for i, a in enumerate(plain) if distinct_ratio(a.token_ids) >= MIN_DISTINCT]
    found: dict[str, Any] = {}
    for setting in settings:
        own = answers[setting.name]
        found[setting.name] = summarise(plain, own) | {
            "policy": setting.engine.policy,
            "varied": summarise([plain[i] for i in varied], [own[i] for i in varied]) if varied else None,
            "step_costs_ms": None if setting.engine.width_rule is None else setting.engine.width_rule.costs.step_ms,
            "plain_cost_ms": None if setting.engine.width_rule is None else setting.engine.width_rule.costs.plain_ms,
        }
        found[setting.name] |= differences(target, prompts, plain, own)
    return {"num_prompts": len(plain), "loops": len(plain) - len(varied), "settings": found}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as `soloist run -m`")
    parser.add_argument("--set", action="append", required=True, metavar="NAME=FILE", help="the first one decides")
    parser.add_argument("--dspark", type=Path, help="folder of a draft")
    parser.add_argument("--widths", type=int, nargs="+", default=[5, 8], help="rows of its steps")
    parser.add_argument("--adaptive", action="store_true", help="adaptive width too, up to the largest")
    parser.add_argument("--draft-model", help="a smaller model with the same vocabulary")
    parser.add_argument("--draft-model-widths", type=int, nargs="+", default=[4])
    parser.add_argument("--lookup-width", type=int, default=0, help="rows of prompt lookup; 0: none")
    parser.add_argument("--prompts", type=int, default=24, help="of each set")
    parser.add_argument("--tokens", type=int, default=128, help="most of an answer")
    parser.add_argument("--seconds", type=float, default=600.0, help="of answering, shared by the sets")
    parser.add_argument("--device", default=str(choose_device().device))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--case", required=True, help="name of the result")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    target = Target(find_path(options.model), device)
    say("target loaded")
    settings = make_settings(target, options)
    llm = LLM.of(settings[0].engine, target.tokenizer, target.path.name)
    render = None if llm.chat_template is None else lambda messages: llm.render(messages).ids
    reader = Reader(encode=llm.encode, render=render)
    for setting in settings:
        # The first request of an engine is not like the others.
        answer(setting.engine, llm.encode("def f(x):\n"), 16)
    say(f"{len(settings)} settings are warm")
    sets: dict[str, Any] = {}
    for i, words in enumerate(options.set):
        name, _, file = words.partition("=")
        limit = CONTEXT_LEN - options.tokens
        prompts = read_prompts(Path(file), reader, limit=options.prompts, max_prompt_tokens=limit, seed=0)
        gc.collect()
        stop_s = time.perf_counter() + options.seconds * (0.5 if i == 0 else 0.5 / max(len(options.set) - 1, 1))
        if (found := measure_set(target, settings, prompts, options.tokens, stop_s)) is None:
            say(f"{name}: every answer ends in its first step, nothing to time")
            continue
        sets[name] = found
        say(f"{name}: measured")
        write(options, target, settings, sets)
        print(table({name: sets[name]}), flush=True)


def write(options: argparse.Namespace, target: Target, settings: list[Setting], sets: dict[str, Any]) -> None:
    """Write what is known so far: the fields are those of the best setting with a draft on the first set."""
    first = next(iter(sets.values()))["settings"]
    best = min((name for name in first if name != PLAIN), key=lambda name: first[name]["tpot_ms"], default=PLAIN)
    engine = next(setting.engine for setting in settings if setting.name == best)
    record = options.dspark and options.dspark / "training.json"
    result = Result(
        case=options.case,
        model=target.path.name,
        device=device_name(target.device),
        command=shlex.join(["python", "benchmarks/drafts.py", *sys.argv[1:]]),
        weights="real",
        dtype=str(target.dtype).removeprefix("torch."),
        width=engine.runner.buffers.max_width,
        acceptance_length=first[best]["acceptance_length"],
        acceptance_rate=first[best]["acceptance_rate"],
        tpot_ms_mean=first[best]["tpot_ms"],
        details={
            "best": best,
            "gain": first[best]["gain"],
            "max_tokens": options.tokens,
            "min_distinct_ratio": MIN_DISTINCT,
            "sets": sets,
            "training": json.loads(record.read_text()) if record and record.is_file() else None,
            "gpus": gpu_state() if target.device.type == "cuda" else [],
        },
    )
    write_result(result, options.out / machine_folder(result.device, 1))


if __name__ == "__main__":
    main()
