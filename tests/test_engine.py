"""The generation loop: one token or sixteen a step, the answer is the target's."""

import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.engine import Engine
from soloist.errors import ContextLengthError, NumericsError, UsageError
from soloist.generation import StepResult
from soloist.models import load_model
from soloist.models.cache import StepKind
from soloist.models.causal_lm import CausalLM, HiddenCapture
from soloist.runtime import sampler
from soloist.sampling_params import SamplingParams
from soloist.spec.verify import Rule
from tests.miniature import write_checkpoint
from tests.scripted import KnownAnswer, RandomDrafter, Script, TableModel, make_engine

FAMILIES = ("llama", "qwen2", "bailing_moe_v3", "kimi_linear")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CausalLM]:
    folder = tmp_path_factory.mktemp("models")
    return {
        family: load_model(write_checkpoint(folder / family, family, seed=3), dtype=torch.float32)
        for family in FAMILIES
    }


@pytest.fixture(scope="module")
def llama(models: dict[str, CausalLM]) -> CausalLM:
    return models["llama"]


def answer(engine: Engine, prompt: list[int], **params) -> list[int]:
    return [token for result in engine.generate(prompt, SamplingParams(**params)) for token in result.token_ids]


def results(engine: Engine, prompt: list[int], **params) -> list[StepResult]:
    return list(engine.generate(prompt, SamplingParams(**params)))


def logits_of(model: CausalLM, token_ids: list[int]) -> torch.Tensor:
    """Give the logits behind every token of a sequence, in one pass."""
    cache = model.make_cache(len(token_ids))
    return model.compute_logits(model.forward(torch.tensor(token_ids), cache, StepKind.PREFILL))


def prompt_of(num_tokens: int, vocab_size: int, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy_by_hand(model: CausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(logits_of(model, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


# --- the plain loop ---


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_prompt", [1, 2, 7])
def test_greedy_takes_the_argmax_of_the_whole_sequence_every_time(models, family: str, num_prompt: int):
    model = models[family]
    prompt = prompt_of(num_prompt, model.config.vocab_size)
    assert answer(make_engine(model), prompt, max_tokens=12) == greedy_by_hand(model, prompt, 12)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 64])
def test_the_chunks_of_a_prompt_do_not_show(llama, chunk_tokens: int):
    prompt = prompt_of(13, 257)
    seen: list[tuple[int, int]] = []
    engine = make_engine(llama, chunk_tokens=chunk_tokens)
    generation = engine.generate(prompt, SamplingParams(max_tokens=8), on_prefill=lambda *at: seen.append(at))
    assert [t for r in generation for t in r.token_ids] == greedy_by_hand(llama, prompt, 8)
    assert seen == [(done, 12) for done in (*range(0, 12, chunk_tokens), 12)]


def test_greedy_draws_no_random_number(llama, monkeypatch):
    # Field report 49.
    def fail(*_):
        raise AssertionError("a random number was drawn")

    monkeypatch.setattr(sampler, "uniform", fail)
    engine = make_engine(llama)
    assert answer(engine, [1, 2], max_tokens=5) == answer(engine, [1, 2], max_tokens=5)
    assert engine.generate([1], SamplingParams()).stats.seed is None


def test_padding_rows_of_the_vocabulary_are_never_drawn():
    def logits(positions, input_ids):
        row = torch.zeros(len(positions), 10)
        row[:, 7] = 5.0
        row[:, 3] = 4.0
        return row

    model = TableModel(10, logits)
    engine = Script([[1]], vocab_size=10).engine(num_tokens=6)
    engine.runner.model = model
    assert answer(engine, [0], max_tokens=3) == [3, 3, 3]
    assert set(answer(engine, [0], max_tokens=40, temperature=5.0, seed=1)) <= set(range(6))
    with pytest.raises(UsageError, match="no token 6; the vocabulary has ids 0 to 5"):
        engine.generate([6], SamplingParams())


# --- drafts change nothing ---


def make_drafter(kind: str, answers: dict, vocab_size: int, max_drafts: int):
    if kind == "random":
        return RandomDrafter(max_drafts=max_drafts, vocab_size=vocab_size, has_draft_law=False)
    widths = {"varying": [1 + max_drafts, 2, 1, max_drafts]}.get(kind)
    offset = 1 if kind == "wrong" else 0
    return KnownAnswer(answers, max_drafts=max_drafts, vocab_size=vocab_size, offset=offset, widths=widths)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["right", "wrong", "random", "varying"])
def test_greedy_with_drafts_is_greedy_without(models, family: str, kind: str):
    model = models[family]
    N, max_drafts = model.config.vocab_size, 4
    prompts = [prompt_of(n, N) for n in ((1, 2, 4, 7) if model.config.num_hidden_layers > 3 else range(1, 8))]
    plain = make_engine(model, chunk_tokens=3)
    answers = {tuple(prompt): answer(plain, prompt, max_tokens=14) for prompt in prompts}
    engine = make_engine(model, make_drafter(kind, answers, N, max_drafts), chunk_tokens=3)
    for prompt in prompts:
        assert answer(engine, prompt, max_tokens=14) == answers[tuple(prompt)]
        # A sampled request in between leaves no trace.
        answer(engine, prompt, max_tokens=3, temperature=1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_fifteen_drafts_run_to_the_end_of_the_context(models, family: str):
    model = models[family]
    prompt = prompt_of(5, model.config.vocab_size)
    want = answer(make_engine(model, max_context_len=60), prompt)
    assert len(want) == 55
    drafter = KnownAnswer({tuple(prompt): want}, max_drafts=15, vocab_size=model.config.vocab_size)
    engine = make_engine(model, drafter, max_context_len=60)
    generation = engine.generate(prompt, SamplingParams())
    assert [token for result in generation for token in result.token_ids] == want
    assert generation.stats.forwards == 4 and generation.stats.accepted == 51


@pytest.mark.parametrize("kind", ["right", "random", "varying"])
def test_sampling_with_chosen_drafts_gives_the_text_it_gives_without(llama, kind: str):
    prompt = prompt_of(6, 257)
    params = {"max_tokens": 30, "temperature": 0.9, "top_p": 0.9, "seed": 11, "repetition_penalty": 1.2}
    want = answer(make_engine(llama), prompt, **params)
    assert want != answer(make_engine(llama), prompt, **(params | {"seed": 12}))
    engine = make_engine(llama, make_drafter(kind, {tuple(prompt): want}, 257, 5))
    assert answer(engine, prompt, **params) == want


def markov_model(N: int, seed: int) -> tuple[TableModel, torch.Tensor]:
    table = torch.randn(N, N, generator=torch.Generator().manual_seed(seed)) * 1.5
    return TableModel(N, lambda positions, input_ids: table[input_ids]), table.double().softmax(-1)


@pytest.mark.parametrize("rule", Rule)
def test_drawn_drafts_leave_the_targets_law(rule: Rule):
    N, num_requests = 4, 700
    model, law = markov_model(N, 7)
    engine = make_engine(model, RandomDrafter(max_drafts=2, vocab_size=N, has_draft_law=True), rule=rule)
    counts = torch.zeros(N, N, N)
    for seed in range(num_requests):
        a, b, c = answer(engine, [1], max_tokens=3, temperature=1.0, seed=seed)
        counts[a, b, c] += 1
    for marginal, want in (
        (counts.sum(2), law[1, :, None] * law),
        (counts.sum(0), torch.einsum("a,ab,bc->bc", law[1], law, law)),
    ):
        expected = want * num_requests
        # 15 degrees of freedom: beyond 38 once in a thousand.
        assert float(((marginal - expected) ** 2 / expected).sum()) < 38


@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_penalties_bias_and_bans_mean_the_same_with_drafts(llama, kind: str):
    prompt = prompt_of(4, 257)
    params = {
        "max_tokens": 24,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.9,
        "logit_bias": {3: 1.5, 250: 2.0},
        "min_tokens": 10,
        "stop_token_ids": range(0, 257, 2),
    }
    want = answer(make_engine(llama), prompt, **params)
    engine = make_engine(llama, make_drafter(kind, {tuple(prompt): want}, 257, 3))
    assert answer(engine, prompt, **params) == want


# --- what the fields do ---


def penalised_by_hand(model: CausalLM, prompt: list[int], num_tokens: int, r: float, p: float, f: float) -> list[int]:
    out: list[int] = []
    for _ in range(num_tokens):
        row = logits_of(model, prompt + out)[-1].tolist()
        for v in set(prompt + out):
            row[v] = row[v] / r if row[v] > 0 else row[v] * r
        for v in set(out):
            row[v] -= p + f * out.count(v)
        out.append(max(range(len(row)), key=row.__getitem__))
    return out


@pytest.mark.parametrize("penalties", [(1.5, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, 1.5), (0.8, 0.3, 0.4)])
def test_penalties_act_on_prompt_and_answer_as_documented(llama, penalties: tuple[float, float, float]):
    prompt = prompt_of(5, 257)
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    got = answer(make_engine(llama), prompt, max_tokens=16, **dict(zip(names, penalties, strict=True)))
    assert got == penalised_by_hand(llama, prompt, 16, *penalties)


def test_a_repetition_penalty_is_not_ignored(models):
    # Field report 52.
    engine = make_engine(models["qwen2"])
    prompt = prompt_of(5, 211)
    assert answer(engine, prompt, max_tokens=20, repetition_penalty=1.5) != answer(engine, prompt, max_tokens=20)


def test_a_logit_bias_decides():
    engine = Script([[1, 2, 3]], vocab_size=9).engine()
    assert answer(engine, [5], max_tokens=3, logit_bias={7: 100.0}) == [7, 7, 7]
    # And is forgotten by the next request.
    assert answer(engine, [5], max_tokens=3) == [1, 2, 3]


@pytest.mark.parametrize("groups", [[[1], [2], [3]], [[1, 2, 3]], [[1, 2], [3]]])
def test_log_probabilities_are_the_models_own(groups):
    script = Script(groups, vocab_size=30)
    engine = script.engine()
    got = [
        logprob
        for result in results(
            engine, [4, 4], max_tokens=3, logprobs=2, temperature=0.5, top_k=1, logit_bias={9: -3.0}, presence_penalty=1
        )
        for logprob in result.logprobs
    ]
    assert [logprob.token_id for logprob in got] == [1, 2, 3]
    rows = script.model.compute_logits(torch.tensor([[1.0, 4], [2, 1], [3, 2]])).log_softmax(-1)
    for row, logprob in zip(rows, got, strict=True):
        assert logprob.logprob == pytest.approx(float(row[logprob.token_id]), abs=1e-5)
        top = row.topk(2)
        assert [token for token, _ in logprob.top] == top.indices.tolist()
        assert [value for _, value in logprob.top] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_log_probabilities_of_a_real_model_are_its_log_softmax(llama):
    prompt = prompt_of(5, 257)
    got = [lp for r in results(make_engine(llama), prompt, max_tokens=6, logprobs=0) for lp in r.logprobs]
    rows = logits_of(llama, prompt + [lp.token_id for lp in got]).log_softmax(-1)[4:]
    assert [lp.logprob for lp in got] == pytest.approx(
        [float(rows[t, lp.token_id]) for t, lp in enumerate(got)], abs=1e-4
    )
    assert all(lp.top == () for lp in got)


def test_the_same_seed_gives_the_same_tokens_whatever_ran_before(llama):
    # Field reports 55 and 82.
    engine = make_engine(llama)
    a, b = prompt_of(5, 257), prompt_of(9, 257, seed=1)
    params = {"max_tokens": 20, "temperature": 1.0}
    first = answer(engine, a, seed=7, **params)
    answer(engine, b, seed=7, **params)
    for _ in range(3):
        answer(engine, b, max_tokens=60, temperature=1.3)
    assert answer(engine, a, seed=7, **params) == first == answer(make_engine(llama), a, seed=7, **params)
    assert answer(engine, a, seed=8, **params) != first


def test_without_a_seed_every_request_draws_one_and_says_which(llama):
    engine = make_engine(llama)
    generation = engine.generate([1, 2, 3], SamplingParams(max_tokens=20, temperature=1.5))
    tokens = [token for result in generation for token in result.token_ids]
    seed = generation.stats.seed
    assert answer(engine, [1, 2, 3], max_tokens=20, temperature=1.5, seed=seed) == tokens
    assert answer(engine, [1, 2, 3], max_tokens=20, temperature=1.5) != tokens


# --- where an answer ends ---

END = 8


@st.composite
def grouped(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Give the same ids in groups of one and in groups of 1..16."""
    ids = draw(st.lists(st.integers(1, 9), min_size=1, max_size=30))
    groups, at = [], 0
    while at < len(ids):
        size = draw(st.integers(1, 16))
        groups.append(ids[at : at + size])
        at += size
    return [[token] for token in ids], groups


@settings(deadline=None, max_examples=60)
@given(groups=grouped(), data=st.data())
def test_no_grouping_shows(groups, data: st.DataObject):
    singly, grouped_ids = groups
    params = {
        "max_tokens": data.draw(st.integers(1, 40)),
        "stop_token_ids": data.draw(st.lists(st.integers(1, 9), max_size=2)),
        "ignore_eos": data.draw(st.booleans()),
        "logprobs": data.draw(st.sampled_from([None, 0, 3])),
        "temperature": data.draw(st.sampled_from([0.0, 1.0])),
        "frequency_penalty": data.draw(st.sampled_from([0.0, 0.5])),
        "seed": 3,
    }
    params["min_tokens"] = data.draw(st.integers(0, params["max_tokens"]))
    seen = []
    for script in (Script(singly, vocab_size=12), Script(grouped_ids, vocab_size=12)):
        found = results(script.engine(eos_token_ids=(END,)), [1, 2], **params)
        assert all(result.finish_reason is None for result in found[:-1])
        assert len(found) <= 1 or all(result.token_ids for result in found[:-1])
        tokens = [token for result in found for token in result.token_ids]
        logprobs = [(lp.token_id, round(lp.logprob, 4)) for result in found for lp in result.logprobs]
        assert [token for token, _ in logprobs] == (tokens if params["logprobs"] is not None else [])
        seen.append((tokens, logprobs, found[-1].finish_reason))
    assert seen[0] == seen[1]


def test_a_stop_token_inside_a_step_ends_it_there():
    engine = Script([[1, 2, END, 3, 4]], vocab_size=12).engine(eos_token_ids=(END,))
    (result,) = results(engine, [5], max_tokens=10)
    assert (result.token_ids, result.finish_reason) == ([1, 2, END], "stop")
    assert int(engine.runner.cache.context_len) == 3


def test_ignoring_eos_goes_on_but_stop_token_ids_still_stop():
    engine = Script([[1, END, 3, 4, 5]], vocab_size=12).engine(eos_token_ids=(END,))
    assert answer(engine, [5], max_tokens=10, ignore_eos=True, stop_token_ids=[4]) == [1, END, 3, 4]


def test_min_tokens_bans_stop_tokens_and_then_allows_them():
    script = Script([[END], [END], [END], [END]], vocab_size=12)
    tokens = answer(script.engine(eos_token_ids=(END,)), [5], min_tokens=3, max_tokens=10)
    assert len(tokens) == 4 and END not in tokens[:3] and tokens[3] == END


def test_the_last_token_may_be_both_the_stop_and_the_limit():
    engine = Script([[1, END]], vocab_size=12).engine(eos_token_ids=(END,))
    assert results(engine, [5], max_tokens=2)[-1].finish_reason == "stop"


def test_no_draft_behind_the_last_token_is_verified():
    generation = Script([[1] * 16, [2] * 16], vocab_size=12).engine().generate([5], SamplingParams(max_tokens=19))
    assert [len(result.token_ids) for result in generation] == [16, 3]
    assert generation.stats.drafted == 15 + 2


def test_no_tokens_asked_for_reads_the_prompt_only(llama):
    engine = make_engine(llama)
    assert results(engine, [1, 2, 3], max_tokens=0) == [StepResult(token_ids=[], logprobs=[], finish_reason="length")]
    assert int(engine.runner.cache.context_len) == 2


# --- refusals ---


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], {}, UsageError, "the prompt is empty"),
        ([1, 300], {}, UsageError, "the prompt: there is no token 300; the vocabulary has ids 0 to 256"),
        ([-1], {}, UsageError, "no token -1"),
        ([1], {"stop_token_ids": [257]}, UsageError, "stop_token_ids: there is no token 257"),
        ([1], {"logit_bias": {999: 1.0}}, UsageError, "logit_bias: there is no token 999"),
        ([1] * 50, {}, ContextLengthError, "the prompt has 50 tokens; the context holds 50"),
        ([1] * 51, {"max_tokens": 0}, ContextLengthError, "the prompt has 51 tokens"),
        ([1] * 40, {"max_tokens": 11}, ContextLengthError, "ask for at most 10 tokens"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(llama, prompt, params, error, message):
    with pytest.raises(error, match=message):
        make_engine(llama, max_context_len=50).generate(prompt, SamplingParams(**params))


def test_the_context_may_be_filled_to_the_last_token(llama):
    engine = make_engine(llama, max_context_len=50)
    assert len(answer(engine, [1] * 49)) == 1
    assert len(answer(engine, [1] * 40, max_tokens=10)) == 10
    found = results(engine, [1] * 30)
    assert len(found) == 20 and found[-1].finish_reason == "length"


def test_a_context_beyond_the_models_is_refused(llama):
    with pytest.raises(ContextLengthError):
        make_engine(llama, max_context_len=1025)


# --- cancelling ---


def test_a_cancel_ends_the_answer_at_the_next_step(llama):
    engine = make_engine(llama)
    want = answer(engine, [1, 2, 3], max_tokens=20)
    generation = engine.generate([1, 2, 3], SamplingParams(max_tokens=20))
    tokens = [next(generation).token_ids[0] for _ in range(3)]
    generation.cancel()
    rest = list(generation)
    assert (tokens, [r.finish_reason for r in rest], rest[0].token_ids) == (want[:3], ["cancelled"], [])
    assert answer(engine, [1, 2, 3], max_tokens=20) == want


def test_a_cancel_in_prefill_ends_it_within_one_chunk(llama):
    engine = make_engine(llama, chunk_tokens=4)
    seen = []

    def on_prefill(done: int, total: int) -> None:
        seen.append(done)
        if done == 8:
            generation.cancel()

    generation = engine.generate([1] * 30, SamplingParams(), on_prefill=on_prefill)
    assert [result.finish_reason for result in generation] == ["cancelled"]
    assert seen == [0, 4, 8] and generation.stats.ttft_s is None and generation.stats.completion_tokens == 0


def test_a_cancel_comes_from_any_thread(llama):
    generation = make_engine(llama).generate([1, 2], SamplingParams(max_tokens=900, ignore_eos=True))
    next(generation)
    threading.Timer(0.02, generation.cancel).start()
    assert list(generation)[-1].finish_reason == "cancelled"


def test_one_request_at_a_time(llama):
    engine = make_engine(llama)
    first = engine.generate([1, 2], SamplingParams(max_tokens=3))
    next(first)
    with pytest.raises(UsageError, match="answering another request"):
        next(engine.generate([1, 2], SamplingParams(max_tokens=3)))
    assert len(list(first)) == 2
    assert len(answer(engine, [1, 2], max_tokens=3)) == 3


def test_an_abandoned_request_lets_the_engine_go(llama):
    engine = make_engine(llama)
    for _ in engine.generate([1, 2], SamplingParams(max_tokens=30)):
        break
    assert len(answer(engine, [1, 2], max_tokens=3)) == 3
    closed = engine.generate([1, 2], SamplingParams(max_tokens=30))
    next(closed)
    closed.close()
    assert list(closed) == []
    assert len(answer(engine, [1, 2], max_tokens=3)) == 3


# --- values that are not finite ---


def broken_llama(tmp_path, break_weights) -> CausalLM:
    model = load_model(write_checkpoint(tmp_path / "llama", "llama", seed=3), dtype=torch.float32)
    break_weights(model)
    return model


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_layer_that_breaks_is_named_and_nothing_is_streamed(tmp_path, bad: float, drafts: int):
    # Field report 94.
    def break_layer(model):
        model.layers[1][1].down[5, 7] = bad

    model = broken_llama(tmp_path, break_layer)
    drafter = RandomDrafter(max_drafts=drafts, vocab_size=257, has_draft_law=False) if drafts else None
    engine = make_engine(model, drafter)
    for params in ({}, {"temperature": 1.0}):
        with pytest.raises(NumericsError, match="layer 1 is the first whose output is not finite, at position 0"):
            results(engine, [1, 2, 3], max_tokens=5, **params)
    # The engine goes on.
    with pytest.raises(NumericsError):
        results(engine, [1, 2, 3], max_tokens=5)


def test_a_row_that_breaks_late_names_its_position_and_keeps_what_was_said(tmp_path):
    def break_embedding(model):
        model.embed_tokens[want[4]] = math.nan

    engine = make_engine(load_model(write_checkpoint(tmp_path / "llama", "llama", seed=3), dtype=torch.float32))
    prompt = [1, 2, 3]
    want = answer(engine, prompt, max_tokens=8, repetition_penalty=1.5)
    assert want[4] not in prompt + want[:4]
    break_embedding(engine.runner.model)
    generation = engine.generate(prompt, SamplingParams(max_tokens=8, repetition_penalty=1.5))
    with pytest.raises(NumericsError, match="the embedding is the first whose output is not finite, at position 7"):
        list(generation)
    assert generation.token_ids == want[:5]


def test_a_head_that_breaks_is_told_from_the_layers(tmp_path):
    def break_head(model):
        model.lm_head[9] = math.inf

    with pytest.raises(NumericsError, match="every layer's output is finite, the output head's is not"):
        results(make_engine(broken_llama(tmp_path, break_head)), [1, 2, 3], max_tokens=5)


# --- figures ---


@pytest.mark.parametrize("widths", [[4], [1], [2, 4, 1, 3]])
def test_the_figures_add_up(llama, widths: list[int]):
    # Field report 61.
    prompt = prompt_of(4, 257)
    want = answer(make_engine(llama), prompt, max_tokens=26)
    drafter = KnownAnswer({tuple(prompt): want}, max_drafts=3, vocab_size=257, widths=widths)
    generation = make_engine(llama, drafter).generate(prompt, SamplingParams(max_tokens=26))
    steps = list(generation)
    stats = generation.stats
    assert stats.forwards == len(steps) == sum(stats.accepted_histogram) == sum(stats.drafted_histogram)
    assert stats.accepted == sum(j * n for j, n in enumerate(stats.accepted_histogram))
    assert stats.drafted == sum(j * n for j, n in enumerate(stats.drafted_histogram))
    assert stats.completion_tokens == 26 == sum(len(step.token_ids) for step in steps)
    assert stats.acceptance_length == pytest.approx(26 / len(steps))
    # Every step adds one token of the target's own.
    assert stats.accepted == 26 - stats.forwards
    assert (stats.prompt_tokens, stats.drafter) == (4, "known")
    assert 0 < stats.prefill_s < stats.ttft_s and stats.decode_s > 0
    assert stats.tpot_ms == pytest.approx(1000 * stats.decode_s / 25)


def test_acceptance_by_position_counts_the_steps_that_reached_it():
    # Groups of 3, 1 and 2 tokens of which all drafts are right.
    generation = Script([[1, 2, 3], [4], [5, 6]], vocab_size=9).engine().generate([7], SamplingParams(max_tokens=6))
    list(generation)
    stats = generation.stats
    assert stats.drafted_histogram == stats.accepted_histogram == (1, 1, 1)
    assert stats.acceptance_by_position == (1.0, 1.0) and stats.acceptance_rate == 1.0


def test_an_answer_the_client_saw_less_of_counts_less():
    generation = Script([[1, 2, 3]], vocab_size=9).engine().generate([7], SamplingParams(max_tokens=3))
    list(generation)
    generation.keep(2)
    assert generation.stats.completion_tokens == 2 and generation.stats.acceptance_length == 2


def test_a_recurrent_state_after_drafts_is_that_of_plain_decoding(models):
    model = models["kimi_linear"]
    N = model.config.vocab_size
    prompt = prompt_of(3, N)
    plain = make_engine(model)
    want = answer(plain, prompt, max_tokens=120)
    for kind in ("right", "wrong", "varying"):
        engine = make_engine(model, make_drafter(kind, {tuple(prompt): want}, N, 6))
        assert answer(engine, prompt, max_tokens=120) == want
        for name in ("state", "conv"):
            got, expected = (getattr(e.runner.cache.recurrent, name) for e in (engine, plain))
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_drafters_see_hidden_states_of_every_committed_row_once(llama):
    class Watcher(KnownAnswer):
        capture_layers = (0, 2)

        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self.ids: list[int] = []
            self.rows: list[torch.Tensor] = []

        def prefill_chunk(self, input_ids, hidden, captured):
            self.ids += input_ids.tolist()
            self.rows += captured.flatten(1).clone().unbind()
            assert torch.equal(captured[:, 1], hidden)

        def update(self, buffers, verdict, hidden, captured):
            n = int(verdict.num_committed)
            self.ids += buffers.input_ids[:n].tolist()
            self.rows += captured[:n].flatten(1).clone().unbind()

    prompt = prompt_of(11, 257)
    want = answer(make_engine(llama), prompt, max_tokens=12)
    drafter = Watcher({tuple(prompt): want}, max_drafts=3, vocab_size=257, widths=[4, 1, 2])
    engine = make_engine(llama, drafter, chunk_tokens=4)
    assert answer(engine, prompt, max_tokens=12) == want
    sequence = prompt + want[:-1]
    assert drafter.ids == sequence
    capture = HiddenCapture(layers=(0, 2), hidden=torch.zeros(len(sequence), 2, 60))
    llama.forward(torch.tensor(sequence), llama.make_cache(len(sequence)), StepKind.PREFILL, capture=capture)
    torch.testing.assert_close(torch.stack(drafter.rows), capture.hidden.flatten(1), rtol=1e-4, atol=1e-4)
