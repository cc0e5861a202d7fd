"""Drafters in captured steps, on a GPU: replayed they say what they say step by step, and nobody waits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from soloist.engine import Engine
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from soloist.spec.costs import StepCosts
from soloist.spec.draft_model import DraftModel
from soloist.spec.drafter import Drafter
from soloist.spec.mtp import load_mtp
from soloist.spec.ngram import PromptLookup
from soloist.spec.setup import DrafterSetup
from soloist.step_costs import measure
from tests.miniature import write_checkpoint
from tests.runtime.gpu_models import BEST, EAGER, GPU_SIZES
from tests.spec.drafters import prompt_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are a GPU's")

MAX_DRAFTS = 3
CASES = [
    ("ngram", "llama"),
    ("twin", "llama"),
    ("llama", "llama"),
    ("kimi_linear", "llama"),
    ("twin", "kimi_linear"),
    ("mtp", "bailing_moe_v3"),
]
PARAMS = {
    "greedy": SamplingParams(max_tokens=40),
    "sampled": SamplingParams(max_tokens=40, temperature=0.8, top_k=30, top_p=0.95, seed=5),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(folder: Path, family: str, seed: int) -> tuple[CausalLM, Path]:
    path = folder / f"{family}-{seed}"
    if not path.exists():
        write_checkpoint(path, family, seed=seed, **(GPU_SIZES[family] | {"vocab_size": 131}))
    return load_model(path, dtype=torch.bfloat16, device="cuda"), path


def make_engine(folder: Path, name: str, family: str, execution) -> Engine:
    target, path = load(folder, family, 3)
    drafter: Drafter
    if name == "ngram":
        drafter = PromptLookup(max_context_len=200, max_drafts=MAX_DRAFTS, device=target.device)
    elif name == "mtp":
        setup = DrafterSetup(target=target, target_path=path, max_context_len=200, num_tokens=131, max_width=4)
        drafter = load_mtp(setup)
    else:
        draft = target if name == "twin" else load(folder, name, 9)[0]
        drafter = DraftModel(draft, max_context_len=200, num_tokens=131, max_drafts=MAX_DRAFTS)
    runner = ModelRunner(
        target,
        max_context_len=200,
        max_width=1 + MAX_DRAFTS,
        has_draft_probs=drafter.has_draft_law,
        chunk_tokens=24,
    )
    return Engine(runner, drafter, eos_token_ids=(), execution=execution)


@pytest.fixture
def _refuse_to_wait() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_refuse_to_wait")
@pytest.mark.parametrize("is_adaptive", [False, True], ids=["fixed width", "adaptive width"])
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize(("name", "family"), CASES)
def test_replayed_drafts_are_those_of_eager_steps(folder: Path, name: str, family: str, kind: str, is_adaptive: bool):
    texts, kept = [], []
    for execution in (EAGER, BEST):
        engine = make_engine(folder, name, family, execution)
        if is_adaptive:
            engine.adapt_width(StepCosts(plain_ms=1.0, step_ms=(1.0, 1.2, 1.4, 1.6)))
        # The second request replays what the first one captured; its prompt repeats itself.
        for prompt in (prompt_of(37, 131, seed=1), [5, 6, 7, 8, 9] * 6):
            generation = engine.generate(prompt, PARAMS[kind])
            first = next(generation)
            if execution is BEST:
                torch.cuda.set_sync_debug_mode("error")
            tokens = [t for result in [first, *generation] for t in result.token_ids]
            torch.cuda.set_sync_debug_mode("default")
            texts.append(tokens)
            kept.append(generation.stats.accepted)
    assert texts[:2] == texts[2:] and kept[:2] == kept[2:]
    assert all(len(text) == 40 for text in texts)
    if name == "twin" and not is_adaptive:
        assert min(kept) > 20


@pytest.mark.parametrize(("name", "family"), CASES)
def test_captured_steps_of_every_width_are_timed(folder: Path, name: str, family: str):
    engine = make_engine(folder, name, family, BEST)
    costs = measure(engine)
    assert len(costs.step_ms) == 4 and 0 < costs.plain_ms < 1000
    engine.adapt_width(costs)
    assert len([t for r in engine.generate([1, 2, 3], PARAMS["greedy"]) for t in r.token_ids]) == 40
