"""A drafter changes the speed of an answer and nothing else: every drafter on every family."""

from collections.abc import Callable
from pathlib import Path

import pytest

from soloist.models.causal_lm import CausalLM
from soloist.spec.drafter import Drafter
from tests.miniature import FAMILIES
from tests.spec.drafters import CASES, DRAFTERS, Setting, answer, load_small, make_engine, prompt_of

MAX_DRAFTS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def targets(folder: Path) -> dict[str, CausalLM]:
    return {family: load_small(folder / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def plain(targets: dict[str, CausalLM]) -> Callable[..., list[int]]:
    """Answer without a draft; what was answered before is remembered."""
    engines = {family: make_engine(target) for family, target in targets.items()}
    known: dict[tuple, list[int]] = {}

    def answer_plainly(family: str, prompt: list[int], **params) -> list[int]:
        key = (family, tuple(prompt), *sorted(params.items()))
        if key not in known:
            known[key] = answer(engines[family], prompt, **params)
        return known[key]

    return answer_plainly


@pytest.fixture
def make(folder: Path, targets: dict[str, CausalLM]) -> Callable[..., Drafter]:
    def make_drafter(name: str, family: str, *, is_fixed_shape: bool, max_drafts: int = MAX_DRAFTS) -> Drafter:
        setting = Setting(
            target=targets[family],
            path=folder / family,
            scratch=folder,
            max_drafts=max_drafts,
            is_fixed_shape=is_fixed_shape,
        )
        return DRAFTERS[name][0](setting)

    return make_drafter


@pytest.mark.parametrize("is_fixed_shape", [False, True], ids=["any shape", "fixed shape"])
@pytest.mark.parametrize(("name", "family"), CASES)
def test_greedy_with_a_draft_is_greedy_without(make, targets, plain, name: str, family: str, is_fixed_shape: bool):
    target = targets[family]
    N, T = target.config.vocab_size, 1 + MAX_DRAFTS
    engine = make_engine(target, make(name, family, is_fixed_shape=is_fixed_shape), is_fixed_shape=is_fixed_shape)
    for num_prompt in range(1, T + 3):
        prompt = prompt_of(num_prompt, N)
        assert answer(engine, prompt, max_tokens=9) == plain(family, prompt, max_tokens=9), num_prompt
        # A sampled request in between leaves no trace.
        answer(engine, prompt, max_tokens=4, temperature=1.0, seed=num_prompt)
