"""Reuse of what was read before: exact prefixes only, at places whose state exists, with a cold run's answers."""

import pytest
import torch

from soloist.engine import Engine
from soloist.generation import Generation
from soloist.models import load_model
from soloist.models.cache import StepKind
from soloist.models.causal_lm import CausalLM
from soloist.prefix import MIN_WORTH_TOKENS, PrefixStore, _common
from soloist.sampling_params import SamplingParams
from soloist.spec.drafter import Drafter
from tests.miniature import write_checkpoint
from tests.scripted import make_engine

FAMILIES = ("llama", "bailing_moe_v3", "kimi_linear")
N = 131


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CausalLM]:
    folder = tmp_path_factory.mktemp("models")
    paths = {family: write_checkpoint(folder / family, family, seed=3, vocab_size=N) for family in FAMILIES}
    return {family: load_model(path, dtype=torch.float32) for family, path in paths.items()}


def ids_of(num_tokens: int, seed: int) -> list[int]:
    return torch.randint(N, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def ask(
    engine: Engine, prompt: list[int], *, turn_ends: tuple[int, ...] = (), **params
) -> tuple[list[int], Generation]:
    given = {"max_tokens": 6, "ignore_eos": True} | params
    generation = engine.generate(prompt, SamplingParams(**given), turn_ends=turn_ends)
    return [token for result in generation for token in result.token_ids], generation


def warm_engine(model: CausalLM, host_bytes: int = 1 << 26, drafter: Drafter | None = None) -> Engine:
    engine = make_engine(model, drafter, chunk_tokens=16)
    engine.prefixes = PrefixStore(host_bytes=host_bytes)
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_without_being_read_again(models, family: str):
    # Field report 79.
    engine, cold = warm_engine(models[family]), make_engine(models[family], chunk_tokens=16)
    prompt = ids_of(70, 1)
    for turn in range(3):
        answer, generation = ask(engine, prompt)
        assert answer == ask(cold, prompt)[0]
        assert generation.stats.cached_tokens == (0 if turn == 0 else len(prompt) - 10)
        prompt = [*prompt, *answer, *ids_of(9, 10 + turn)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_prompt_twice_gives_the_same_answer(models, family: str):
    # Field reports 73, 82 and 97: A, B, A, A.
    engine, cold = warm_engine(models[family]), make_engine(models[family], chunk_tokens=16)
    first, second = ids_of(60, 1), ids_of(50, 2)
    for prompt in (first, second, first, first):
        answer, _ = ask(engine, prompt, temperature=0.9, seed=1, turn_ends=(len(prompt) - 4,))
        assert answer == ask(cold, prompt, temperature=0.9, seed=1)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edited_message_returns_to_the_nearest_kept_state(models, family: str):
    # Field report 76.
    engine, cold = warm_engine(models[family]), make_engine(models[family], chunk_tokens=16)
    head, first, second = ids_of(64, 1), ids_of(20, 2), ids_of(20, 3)
    assert first[0] != second[0]
    ask(engine, [*head, *first], turn_ends=(64,))
    answer, generation = ask(engine, [*head, *second], turn_ends=(64,))
    assert answer == ask(cold, [*head, *second])[0]
    assert generation.reuse.num_tokens == 64
    assert generation.reuse.reason == "the prompt leaves the nearest kept conversation at token 64"
    assert generation.reuse.kept_ids[:3] == tuple(first[:3])


def test_a_recurrent_state_is_never_used_between_two_snapshots(models):
    engine, cold = warm_engine(models["bailing_moe_v3"]), make_engine(models["bailing_moe_v3"], chunk_tokens=16)
    head, first, second = ids_of(64, 1), ids_of(20, 2), ids_of(20, 3)
    ask(engine, [*head, *first], turn_ends=(30,))
    answer, generation = ask(engine, [*head, *second])
    assert answer == ask(cold, [*head, *second])[0]
    assert generation.reuse.num_tokens == 30
    assert "at token 64; the nearest earlier state that is kept is at token 30" in generation.reuse.reason
    # The place where two prompts parted was kept for the third.
    answer, generation = ask(engine, [*head, *ids_of(20, 4)])
    assert generation.reuse.num_tokens == 64
    assert answer == ask(cold, [*head, *ids_of(20, 4)])[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_several_conversations_are_kept_and_continued(models, family: str):
    engine, cold = warm_engine(models[family]), make_engine(models[family], chunk_tokens=16)
    prompts = [ids_of(40 + i, i) for i in range(3)]
    for _ in range(2):
        for i, prompt in enumerate(prompts):
            answer, generation = ask(engine, prompt)
            assert answer == ask(cold, prompt)[0]
            prompts[i] = [*prompt, *answer, 5, 6, 7]
    for prompt in prompts:
        _, generation = ask(engine, prompt)
        assert generation.reuse.num_tokens == len(prompt) - 4


@pytest.mark.parametrize("family", ["llama", "bailing_moe_v3"])
def test_a_cancelled_prompt_keeps_what_was_read(models, family: str):
    engine, cold = warm_engine(models[family]), make_engine(models[family], chunk_tokens=16)
    prompt = ids_of(80, 1)

    def stop(done: int, total: int) -> None:
        if done >= 32:
            generation.cancel()

    generation = engine.generate(prompt, SamplingParams(max_tokens=3), on_prefill=stop)
    assert next(generation).finish_reason == "cancelled"
    answer, generation = ask(engine, prompt)
    assert generation.reuse.num_tokens == 32
    assert answer == ask(cold, prompt)[0]


def test_a_request_that_breaks_leaves_nothing_to_reuse(models, monkeypatch):
    engine = warm_engine(models["bailing_moe_v3"])
    prompt = ids_of(40, 1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "commit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(engine, prompt)
    assert ask(engine, prompt)[1].reuse.num_tokens == 0


def test_the_oldest_conversation_leaves_when_the_budget_is_full(models):
    engine = warm_engine(models["llama"])
    ask(engine, ids_of(40, 1))
    ask(engine, ids_of(40, 2))
    size = engine.prefixes.counts.host_bytes
    assert size > 0
    engine = warm_engine(models["llama"], host_bytes=2 * size)
    for seed in (1, 2, 3, 4):
        ask(engine, ids_of(40, seed))
        assert engine.prefixes.counts.host_bytes <= 2 * size
    assert [ask(engine, ids_of(40, seed))[1].reuse.num_tokens > 30 for seed in (2, 3, 1)] == [True, True, False]


def test_without_a_budget_only_the_last_conversation_is_used_again(models):
    engine = warm_engine(models["llama"], host_bytes=0)
    ask(engine, ids_of(40, 1))
    assert ask(engine, ids_of(40, 1))[1].reuse.num_tokens == 39
    ask(engine, ids_of(40, 2))
    assert ask(engine, ids_of(40, 1))[1].reuse.num_tokens <= MIN_WORTH_TOKENS


def test_a_store_forgets_on_request_and_counts(models):
    engine = warm_engine(models["llama"])
    ask(engine, ids_of(40, 1))
    ask(engine, ids_of(40, 1))
    counts = engine.prefixes.counts
    assert (counts.num_lookups, counts.num_lookup_tokens, counts.num_reused_tokens) == (2, 80, 39)
    engine.prefixes.clear()
    assert ask(engine, ids_of(40, 1))[1].reuse.reason == "no conversation is kept yet"
    assert ask(engine, ids_of(1, 1))[1].reuse.reason.startswith("the prompt is one token")


class Counting(Drafter):
    """Drafts nothing, but has a state that must follow the sequence: the tokens it was shown."""

    name = "counting"
    max_drafts = 1

    def __init__(self) -> None:
        self.seen: list[int] = []

    def begin(self, prompt_ids, plan) -> None:
        self.seen = []

    def prefill_chunk(self, input_ids, hidden, captured) -> None:
        self.seen += input_ids.tolist()

    def propose(self, buffers, context_len) -> None:
        assert len(self.seen) == int(context_len)
        buffers.width.fill_(1)

    def update(self, buffers, verdict, hidden, captured) -> None:
        self.seen += buffers.input_ids[: int(verdict.num_committed)].tolist()

    def snapshot(self) -> object:
        return list(self.seen)

    def restore(self, snapshot) -> None:
        self.seen = list(snapshot)


@pytest.mark.parametrize("family", ["llama", "bailing_moe_v3"])
def test_a_drafters_state_is_kept_and_restored_with_the_targets(models, family: str):
    engine = warm_engine(models[family], drafter=Counting())
    first, second = ids_of(40, 1), ids_of(50, 2)
    for prompt in (first, second, first, second):
        answer, generation = ask(engine, prompt, turn_ends=(33,))
        assert engine.drafter.seen == [*prompt, *answer][:-1]
    assert generation.reuse.num_tokens == 33


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
@pytest.mark.parametrize("num_prompt", [1, 2, 7, 8, 9])
def test_prompt_logprobs_do_not_depend_on_chunks(models, chunk_tokens: int, num_prompt: int):
    # Field report 58.
    model = models["llama"]
    engine = make_engine(model, chunk_tokens=chunk_tokens)
    engine.prefixes = PrefixStore(host_bytes=1 << 20)
    prompt = ids_of(num_prompt, 1)
    for _ in range(2):
        generation = engine.generate(prompt, SamplingParams(max_tokens=1), prompt_logprobs=2)
        list(generation)
        assert [entry.token_id for entry in generation.prompt_logprobs] == prompt[1:]

    hidden = model.forward(torch.tensor(prompt), model.make_cache(16), StepKind.PREFILL)
    wanted = model.compute_logits(hidden).log_softmax(-1)
    for i, entry in enumerate(generation.prompt_logprobs):
        assert entry.logprob == pytest.approx(float(wanted[i, prompt[i + 1]]), abs=1e-4)
        assert entry.top[0][0] == int(wanted[i].argmax()) and len(entry.top) == 2


def test_common_counts_the_first_tokens_that_agree():
    for n in range(9):
        for m in range(9):
            for at in range(min(n, m) + 1):
                first, second = [1] * at + [2] * (n - at), [1] * at + [3] * (m - at)
                assert _common(first, second) == at
