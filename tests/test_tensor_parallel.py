"""Ranks that share a model answer as one rank does: every family with every drafter, over gloo."""

from pathlib import Path

import pytest

from tests.miniature import FAMILIES
from tests.rank_program import MAX_TOKENS, Case, run_alone, run_on_ranks, write_checkpoints
from tests.spec.drafters import CASES

# Layers that each rank holds whole: with a Markov head of every rank's tokens, with a state, and with none.
REPLICATED: list[Case] = [
    ("qwen3", "dspark", "replicated"),
    ("llama", "dspark, chosen", "replicated"),
    ("qwen3", "dflash", "replicated"),
    ("bailing_moe_v3", "mtp", "replicated"),
]
TWO_RANKS: list[Case] = [(family, None, "sharded") for family in FAMILIES]
TWO_RANKS += [(family, name, "sharded") for name, family in CASES] + REPLICATED
# Fewer key/value heads than ranks, biases, a vocabulary that does not divide.
FOUR_RANKS: list[Case] = [("qwen2", name, "sharded") for name in (None, "ngram", "draft model", "dspark")]
FOUR_RANKS.append(("qwen2", "dspark", "replicated"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_checkpoints(folder, set(FAMILIES))
    return folder


@pytest.mark.parametrize(("num_ranks", "cases"), [(2, TWO_RANKS), (4, FOUR_RANKS)], ids=["2 ranks", "4 ranks"])
def test_ranks_answer_as_one_does(folder: Path, num_ranks: int, cases: list[Case]) -> None:
    by_rank = run_on_ranks(num_ranks, folder, cases)
    alone = run_alone(folder, folder / "scratch", cases)
    for case, wanted, *answers in zip(cases, alone, *by_rank, strict=True):
        assert len(wanted["greedy"]) == MAX_TOKENS
        assert all(answer == wanted for answer in answers), f"{case}: {wanted} became {answers}"
