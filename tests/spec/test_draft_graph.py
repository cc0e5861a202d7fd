"""Drafters in captured steps, on a GPU: replayed they say what they say step by step, nobody waits, answers stay."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from soloist.draft_check import check_draft
from soloist.engine import Engine
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from soloist.spec.costs import StepCosts
from soloist.spec.draft_model import DraftModel
from soloist.spec.drafter import Drafter
from soloist.spec.dspark import DSpark, make_random_dspark
from soloist.spec.dspark_config import random_config
from soloist.spec.mtp import load_mtp
from soloist.spec.ngram import PromptLookup
from soloist.spec.setup import DrafterSetup
from soloist.step_costs import measure
from tests.miniature import write_checkpoint
from tests.runtime.gpu_models import BEST, EAGER, GPU_SIZES, prepare_delayed
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
    ("dspark", "qwen3"),
    ("dspark", "bailing_moe_v3"),
    ("dspark, chosen", "qwen3"),
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
    setup = DrafterSetup(target=target, target_path=path, max_context_len=200, num_tokens=131, max_width=1 + MAX_DRAFTS)
    if name == "ngram":
        drafter = PromptLookup(max_context_len=200, max_drafts=MAX_DRAFTS, device=target.device)
    elif name == "mtp":
        drafter = load_mtp(setup)
    elif name.startswith("dspark"):
        depth = target.config.num_hidden_layers
        shape = random_config(
            target.config, block_size=6, num_hidden_layers=2, markov_rank=16, target_layer_ids=(0, depth - 2)
        )
        drafter = make_random_dspark(setup, shape)
        if name == "dspark, chosen":
            assert isinstance(drafter, DSpark)
            drafter = DSpark(drafter.model, max_drafts=MAX_DRAFTS, draft_greedily=True)
    else:
        draft = target if name == "twin" else load(folder, name, 9)[0]
        drafter = DraftModel(draft, max_context_len=200, num_tokens=131, max_drafts=MAX_DRAFTS)
    runner = ModelRunner(
        target,
        max_context_len=200,
        max_width=1 + MAX_DRAFTS,
        has_draft_probs=drafter.has_draft_law,
        capture_layers=drafter.capture_layers,
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
            # Drafting is turned off by what the host has read, a few steps later where steps are ahead of it.
            engine.switch = None
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
    assert texts[:2] == texts[2:]
    assert kept[:2] == kept[2:]
    assert all(len(text) == 40 for text in texts)
    if name == "twin" and not is_adaptive:
        assert min(kept) > 20


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize(("name", "family"), CASES)
def test_no_kernel_of_a_draft_reads_before_it_has_waited(folder: Path, name: str, family: str, kind: str, phase: int):
    """As `tests/runtime/test_waits.py` holds of the target's. A draft that was read too early is kept less often."""
    found = []
    for execution in (EAGER, BEST):
        engine = make_engine(folder, name, family, execution)
        engine.adapt_width(StepCosts(plain_ms=1.0, step_ms=(1.0, 1.2, 1.4, 1.6)))
        engine.switch = None
        if execution is BEST:
            prepare_delayed(engine, PARAMS[kind], phase)
        generation = engine.generate([5, 6, 7, 8, 9] * 6, PARAMS[kind])
        tokens = [t for result in generation for t in result.token_ids]
        found.append((tokens, generation.stats.drafted_histogram, generation.stats.accepted_histogram))
    assert found[0] == found[1]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_captured_steps_of_every_width_are_timed(folder: Path, name: str, family: str):
    engine = make_engine(folder, name, family, BEST)
    costs = measure(engine)
    assert len(costs.step_ms) == 4 and 0 < costs.plain_ms < 1000
    engine.adapt_width(costs)
    assert len([t for r in engine.generate([1, 2, 3], PARAMS["greedy"]) for t in r.token_ids]) == 40


@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_draft_changes_no_answer_but_at_near_ties(folder: Path, name: str, family: str):
    """Greedy answers and drawn ones, with every kernel of a GPU, against the same model without the draft."""
    _, path = load(folder, family, 3)
    prompts = [prompt_of(n, 131, seed=n) for n in (1, 4, 5, 23, 24, 25, 37, 90)]
    report = check_draft(
        make_engine(folder, name, family, BEST),
        prompts,
        model=family,
        max_tokens=60,
        load_reference=lambda: load_model(path, dtype=torch.float32),
    )
    print({check.name: check.summary for check in report.checks})
    checks = {check.name: check for check in report.checks}
    assert checks["greedy"].passed, checks["greedy"]
    assert checks["sampling"].passed, checks["sampling"]
    assert name != "twin" or report.acceptance_length > 2
