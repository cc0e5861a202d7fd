"""What steps cost is measured once for a machine, a model and a drafter, on steps that leave no trace."""

from pathlib import Path

import pytest
import torch

from soloist import step_costs
from soloist.models.causal_lm import CausalLM
from soloist.spec.drafter import Drafter
from soloist.spec.ngram import PromptLookup
from soloist.step_costs import known_costs, measure
from tests.spec.drafters import DRAFTERS, Setting, answer, load_small, make_engine, prompt_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def target(folder: Path) -> CausalLM:
    return load_small(folder / "bailing_moe_v3", "bailing_moe_v3")


def make(name: str, target: CausalLM, folder: Path, max_drafts: int = 3) -> Drafter:
    path = folder / "bailing_moe_v3"
    setting = Setting(target=target, path=path, scratch=folder, max_drafts=max_drafts, is_fixed_shape=False)
    return DRAFTERS[name][0](setting)


@pytest.mark.parametrize("name", ["ngram", "draft model", "mtp"])
def test_steps_of_every_width_are_timed_and_leave_no_trace(target, folder: Path, name: str):
    prompt = prompt_of(6, 71)
    wanted = answer(make_engine(target), prompt, max_tokens=12)
    engine = make_engine(target, make(name, target, folder))
    costs = measure(engine)
    assert len(costs.step_ms) == 4 and costs.plain_ms > 0
    assert list(costs.step_ms) == sorted(costs.step_ms)
    assert answer(engine, prompt, max_tokens=12) == wanted and engine.totals.requests == 1
    engine.adapt_width(costs)
    assert answer(engine, prompt, max_tokens=12) == wanted


def test_a_context_with_little_room_is_enough(target):
    drafter = PromptLookup(max_context_len=12, max_drafts=7, device=torch.device("cpu"))
    assert len(measure(make_engine(target, drafter, max_context_len=12)).step_ms) == 8


def test_a_table_is_measured_once_for_each_kind(target, folder: Path, tmp_path: Path, monkeypatch):
    measured = []
    monkeypatch.setattr(step_costs, "measure", lambda engine: measured.append(engine) or measure(engine))
    engine = make_engine(target, make("ngram", target, folder))
    first = known_costs(engine, tmp_path)
    assert known_costs(engine, tmp_path) == first
    assert known_costs(make_engine(target, make("ngram", target, folder)), tmp_path) == first
    assert len(measured) == 1
    known_costs(make_engine(target, make("ngram", target, folder, max_drafts=2)), tmp_path)
    known_costs(make_engine(target, make("mtp", target, folder)), tmp_path)
    assert len(measured) == 3 == len(list((tmp_path / "step-costs").iterdir()))


def test_steps_are_timed_behind_a_context_and_a_table_is_of_that_context(target, tmp_path: Path, monkeypatch):
    def lengths(tokens: int, room: int) -> set[int]:
        monkeypatch.setattr(step_costs, "_PROMPT_TOKENS", {"cpu": tokens})
        drafter = PromptLookup(max_context_len=room, max_drafts=3, device=torch.device("cpu"))
        engine, seen = make_engine(target, drafter, max_context_len=room), set()
        prefill = engine.runner.prefill
        engine.runner.prefill = lambda ids, **options: seen.add(ids.shape[0]) or prefill(ids, **options)
        known_costs(engine, tmp_path)
        return seen

    # But for the pending token.
    assert lengths(60, 200) == {59}
    assert lengths(60, 200) == set(), "there is a table"
    assert lengths(30, 200) == {29}
    assert lengths(60, 80) == {39}


@pytest.mark.parametrize("names", [("draft model", "recurrent draft model"), ("dspark", "dspark, chosen")])
def test_another_draft_of_the_same_kind_has_a_table_of_its_own(target, folder: Path, tmp_path: Path, names):
    drafters = [make(name, target, folder) for name in names]
    assert len({(drafter.name, drafter.max_drafts) for drafter in drafters}) == 1
    for drafter in drafters:
        known_costs(make_engine(target, drafter), tmp_path)
    assert len(list((tmp_path / "step-costs").iterdir())) == 2


def test_a_folder_that_cannot_be_written_costs_a_measurement(target, folder: Path, tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert known_costs(make_engine(target, make("ngram", target, folder)), blocked).plain_ms > 0
