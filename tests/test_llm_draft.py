"""Drafts by name and by path, through the Python API."""

from pathlib import Path

import pytest
import torch

from soloist.errors import ContextLengthError, ModelNotFoundError, UnsupportedError, UsageError
from soloist.llm import LLM, SamplingParams
from soloist.spec.draft_model import DEFAULT_DRAFTS
from tests.tiny_model import write_tiny_model
from tests.tiny_vocabulary import make_backend

PARAMS = SamplingParams(max_tokens=20)
PROMPT = "one two one two one"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return write_tiny_model(folder / "target")


@pytest.fixture(scope="module")
def draft(folder: Path) -> Path:
    return write_tiny_model(folder / "draft", "qwen3")


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def make(target: Path, **kwargs) -> LLM:
    return LLM(target, **({"dtype": "float32", "max_context_len": 200, "num_threads": 1} | kwargs))


@pytest.fixture(scope="module")
def plain(target: Path):
    return make(target).generate(PROMPT, PARAMS)


def test_a_draft_by_name_and_by_path_changes_no_answer(target, draft, plain):
    for name, drafter in (("ngram", "ngram"), (str(draft), "model draft"), ("off", "off")):
        completion = make(target, draft=name).generate(PROMPT, PARAMS)
        assert (completion.text, completion.token_ids) == (plain.text, plain.token_ids)
        assert completion.stats.drafter == drafter
    assert plain.stats.drafter == "off" and plain.stats.policy == "fixed width 1"


def test_the_width_is_as_asked(target, draft, plain):
    llm = make(target, draft=str(draft), draft_width=3, draft_weights_dtype="fp32")
    completion = llm.generate(PROMPT, PARAMS)
    assert completion.token_ids == plain.token_ids
    assert (completion.stats.policy, len(completion.stats.drafted_histogram)) == ("fixed width 3", 3)
    assert completion.stats.drafter == "model draft fp32"


def test_adaptive_width_measures_once_and_changes_no_answer(target, plain, tmp_path: Path):
    digests = set()
    for _ in range(2):
        completion = make(target, draft="ngram", adaptive_width=True).generate(
            PROMPT, SamplingParams(max_tokens=20, seed=1)
        )
        assert completion.token_ids == plain.token_ids
        assert completion.stats.policy.startswith("adaptive width 1..8 by table ")
        digests.add(completion.stats.policy)
    assert len(digests) == 1 and len(list((tmp_path / "soloist" / "step-costs").iterdir())) == 1


def test_simulated_acceptance_is_marked(target):
    completion = make(target, draft="ngram", simulated_acceptance=2.0).generate(PROMPT, PARAMS)
    assert completion.stats.simulated


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"draft": "ngramm"}, ModelNotFoundError, "Drafters without a checkpoint: .*mtp, ngram, off"),
        ({"draft": "mtp"}, UnsupportedError, "a LlamaForCausalLM has no MTP layer"),
        ({"draft": "ngram", "draft_width": 17}, UsageError, "a draft width of 17 rows; allowed: 2 to 16"),
        ({"draft": "ngram", "draft_width": 1}, UsageError, "a draft width of 1 rows"),
        ({"draft": "ngram", "draft_weights_dtype": "int8"}, UsageError, "prompt lookup has no weights"),
        ({"draft_width": 4}, UsageError, "name one as draft"),
        ({"adaptive_width": True}, UsageError, "name one as draft"),
        ({"draft": "off", "adaptive_width": True}, UsageError, "name one as draft"),
        ({"simulated_acceptance": 2.0}, UsageError, "needs a drafter"),
    ],
)
def test_what_makes_no_sense_is_refused(target, kwargs, error, message: str):
    with pytest.raises(error, match=message):
        make(target, **kwargs)


def test_a_draft_with_another_vocabulary_is_refused_with_the_first_difference(target, folder: Path):
    path = write_tiny_model(folder / "other", "qwen3")
    tokens = make_backend().get_vocab()
    # The same number of tokens, two of them exchanged.
    text = (path / "tokenizer.json").read_text()
    first, second = sorted((token for token in tokens if len(token) == 1 and token.isalpha()), key=tokens.get)[:2]
    for a, b in ((f'"{first}": {tokens[first]}', f'"{first}": {tokens[second]}'),):
        assert a in text
        text = text.replace(f'"{second}": {tokens[second]}', f'"{second}": {tokens[first]}').replace(a, b)
    (path / "tokenizer.json").write_text(text)
    with pytest.raises(
        UnsupportedError, match=f"other cannot draft: its vocabulary is another, token {tokens[first]} is"
    ):
        make(target, draft=str(path))


def test_the_default_context_is_what_both_can_hold(target, folder: Path):
    short = write_tiny_model(folder / "short", "qwen3")
    config = (short / "config.json").read_text()
    (short / "config.json").write_text(
        config.replace('"max_position_embeddings": 1024', '"max_position_embeddings": 100')
    )
    room = 100 - DEFAULT_DRAFTS["cpu"]
    assert make(target, draft=str(short), max_context_len=None).max_context_len == room
    with pytest.raises(ContextLengthError, match=f"the draft can follow {room} tokens, the context has room for 99"):
        make(target, draft=str(short), max_context_len=99)
    assert torch.get_num_threads() == 1
