"""A drafter changes the speed of an answer and nothing else: every drafter on every family."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.engine import Engine
from soloist.kernels.sampling import target_probs
from soloist.models.cache import Cache, StepKind
from soloist.models.causal_lm import CausalLM
from soloist.prefix import PrefixStore
from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.sampling_params import SamplingParams
from soloist.spec.costs import StepCosts
from soloist.spec.drafter import Drafter
from tests.miniature import FAMILIES
from tests.scripted import KnownAnswer
from tests.spec.drafters import CASES, DRAFTERS, HYBRIDS, Setting, answer, load_small, make_engine, prompt_of, tamper

MAX_DRAFTS = 3
SHAPES = pytest.mark.parametrize("is_fixed_shape", [False, True], ids=["any shape", "fixed shape"])
ALL_CASES = pytest.mark.parametrize(("name", "family"), CASES)
# Steps of the long runs.
NUM_STEPS = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def targets(folder: Path) -> dict[str, CausalLM]:
    return {family: load_small(folder / family, family) for family in FAMILIES}


@dataclass
class Plain:
    """Answers without a draft, and recurrent states behind them; what was found before is remembered."""

    engines: dict[str, Engine]
    answers: dict[tuple, list[int]] = field(default_factory=dict)
    # State and conv by family and number of tokens, of the prompt of three tokens.
    states: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)

    def __call__(self, family: str, prompt: list[int], *, max_tokens: int, **params: Any) -> list[int]:
        key = (family, tuple(prompt), str(sorted(params.items())))
        known = self.answers.get(key, [])
        if len(known) >= max_tokens:
            return known[:max_tokens]
        cache, tokens = self.engines[family].runner.cache, self.answers.setdefault(key, [])
        tokens.clear()
        for result in self.engines[family].generate(prompt, SamplingParams(max_tokens=max_tokens, **params)):
            tokens += result.token_ids
            if len(prompt) == 3 and len(tokens) in (NUM_STEPS, 2 * NUM_STEPS) and cache.recurrent is not None:
                self.states[family, len(tokens)] = [cache.recurrent.state.clone(), cache.recurrent.conv.clone()]
        return list(tokens)


@pytest.fixture(scope="module")
def plain(targets: dict[str, CausalLM]) -> Plain:
    return Plain({family: make_engine(target) for family, target in targets.items()})


@pytest.fixture
def make(folder: Path, targets: dict[str, CausalLM]) -> Callable[..., Drafter]:
    def make_drafter(name: str, family: str, *, is_fixed_shape: bool = False, max_drafts: int = MAX_DRAFTS) -> Drafter:
        setting = Setting(
            target=targets[family],
            path=folder / family,
            scratch=folder,
            max_drafts=max_drafts,
            is_fixed_shape=is_fixed_shape,
        )
        return DRAFTERS[name][0](setting)

    return make_drafter


def poison(cache: Cache) -> None:
    """Make everything NaN that belongs to no token: rows behind the sequence, and what a verify step left."""
    n = int(cache.context_len)
    rows = [cache.latent.latent] if cache.latent is not None else []
    rows += [cache.kv.k, cache.kv.v] if cache.kv is not None else []
    for tensor in rows:
        tensor[..., n:, :] = torch.nan
    if cache.recurrent is not None:
        for tensor in (cache.recurrent.verify_k, cache.recurrent.verify_u, cache.recurrent.verify_g):
            tensor.fill_(torch.nan)
        cache.recurrent.verify_conv.fill_(torch.nan)


def poison_scratch(engine: Engine) -> None:
    """Have every step of an engine find NaN wherever it must not look."""
    drafter, forward = engine.drafter, engine.runner.forward
    propose = drafter.propose

    def poisoned_forward(num_rows: int):
        poison(engine.runner.cache)
        return forward(num_rows)

    def poisoned_propose(buffers: StepBuffers, context_len: torch.Tensor) -> None:
        if buffers.draft_probs is not None:
            buffers.draft_probs.fill_(torch.nan)
        for name in ("cache", "chain"):
            # The chain's rows are those of the cache, but its length is that of the last step.
            if isinstance(cache := getattr(drafter, name, None), Cache):
                cache.context_len.copy_(drafter.cache.context_len)
                poison(cache)
        propose(buffers, context_len)

    engine.runner.forward = poisoned_forward
    drafter.propose = poisoned_propose


@SHAPES
@ALL_CASES
def test_greedy_with_a_draft_is_greedy_without(make, targets, plain, name: str, family: str, is_fixed_shape: bool):
    target = targets[family]
    N, T = target.config.vocab_size, 1 + MAX_DRAFTS
    engine = make_engine(target, make(name, family, is_fixed_shape=is_fixed_shape), is_fixed_shape=is_fixed_shape)
    poison_scratch(engine)
    # Chunks of three tokens: prompts end before, at and behind their borders.
    for num_prompt in range(1, T + 3):
        prompt = prompt_of(num_prompt, N)
        assert answer(engine, prompt, max_tokens=8) == plain(family, prompt, max_tokens=8), num_prompt
        # A sampled request in between leaves no trace.
        answer(engine, prompt, max_tokens=3, temperature=1.0, seed=num_prompt)


@ALL_CASES
def test_greedy_stays_the_same_for_hundreds_of_steps(make, targets, plain, name: str, family: str):
    target = targets[family]
    prompt = prompt_of(3, target.config.vocab_size)
    # These two guess right so often that more drafts would reach the end of the context before the last step.
    engine = make_engine(target, make(name, family, max_drafts=1 if name in ("twin", "ngram") else 2))
    generation, tokens = engine.generate(prompt, SamplingParams(max_tokens=2 * NUM_STEPS)), []
    for result in generation:
        tokens += result.token_ids
        if generation.stats.forwards >= NUM_STEPS:
            break
    generation.close()
    assert generation.stats.forwards >= NUM_STEPS
    assert tokens == plain(family, prompt, max_tokens=2 * NUM_STEPS)[: len(tokens)]


@ALL_CASES
def test_steps_before_a_request_and_behind_its_end_change_nothing(make, targets, name: str, family: str):
    """A captured step is run before the first request, and enqueued behind the last token of a full context."""
    params = {"temperature": 0.9, "seed": 1}
    plan = SamplingPlan.of(SamplingParams(**params))
    drafter = make(name, family, is_fixed_shape=True)
    prompt, max_tokens = prompt_of(5, targets[family].config.vocab_size), 12
    limit = len(prompt) + max_tokens
    engine = make_engine(targets[family], drafter, is_fixed_shape=True, max_context_len=limit)
    buffers = engine.runner.buffers
    # The reference of the sampler, unlike its fixed shape, takes no filter of zeros.
    buffers.begin([1], SamplingParams(**params), seed=1, max_tokens=1, stop_ids=())
    buffers.end()
    drafter.begin(buffers.input_ids[:1], plan)
    for _ in range(2):
        engine.make_step(plan)()
    fresh = make_engine(targets[family], make(name, family, is_fixed_shape=True), is_fixed_shape=True)
    assert answer(engine, prompt, max_tokens=max_tokens, **params) == answer(
        fresh, prompt, max_tokens=max_tokens, **params
    )
    before = engine.runner.cache.snapshot()
    for _ in range(3):
        engine.make_step(plan)()
    behind = engine.runner.cache.snapshot()
    assert before.context_len == behind.context_len == limit - 1
    assert all(torch.equal(x, behind.tensors[key]) for key, x in before.tensors.items())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_drafts_of_any_luck_leave_the_state_of_plain_decoding(targets, plain, family: str, kind: str):
    target = targets[family]
    N, prompt = target.config.vocab_size, prompt_of(3, target.config.vocab_size)
    max_drafts = 1 if kind == "right" else 3
    num_tokens = NUM_STEPS if kind == "wrong" else 2 * NUM_STEPS
    wanted = plain(family, prompt, max_tokens=num_tokens)
    drafter = KnownAnswer({}, max_drafts=max_drafts, vocab_size=N)
    drafter.answers = {tuple(prompt): wanted}
    # One draft a step is kept on average.
    luck = torch.tensor([0, 0, 1, 1, 2, 3, 0])[torch.randperm(7)].tolist()
    tamper(drafter, wanted, 3, {"right": [1], "wrong": [0], "random": luck}[kind], N)
    engine = make_engine(target, drafter, is_fixed_shape=kind == "random")
    poison_scratch(engine)
    generation = engine.generate(prompt, SamplingParams(max_tokens=num_tokens))
    assert [token for result in generation for token in result.token_ids] == wanted
    assert generation.stats.forwards >= NUM_STEPS
    if family in HYBRIDS:
        recurrent = engine.runner.cache.recurrent
        for got, want in zip((recurrent.state, recurrent.conv), plain.states[family, num_tokens], strict=True):
            assert float((got - want).norm() / want.norm()) < 1e-6


def uniforms_of(target: CausalLM, prompt: list[int], tokens: list[int], temperature: float, top_k: int) -> torch.Tensor:
    """Map each token of an answer to a number that is uniform in 0..1 if the answer follows the target's law."""
    ids = torch.tensor(prompt + tokens)
    logits = target.compute_logits(target.forward(ids[:-1], target.make_cache(len(ids)), StepKind.PREFILL))
    rows = logits[len(prompt) - 1 :]
    filters = torch.tensor(temperature), torch.tensor(top_k, dtype=torch.int32), torch.tensor(1.0), torch.tensor(0.0)
    probs = target_probs(rows, *filters).double()
    chosen = probs.gather(1, ids[len(prompt) :, None])
    # Likely tokens first: a draft that is kept too often shows at one end.
    below = torch.where(probs > chosen, probs, 0.0).sum(1)
    return below + chosen[:, 0] * torch.rand(len(tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "family", "is_adaptive"),
    [(*case, False) for case in CASES] + [(name, "llama", True) for name, family in CASES if family == "llama"],
)
def test_sampling_with_a_draft_follows_the_targets_law(make, targets, plain, name: str, family: str, is_adaptive: bool):
    target = targets[family]
    prompt = prompt_of(4, target.config.vocab_size)
    engine = make_engine(target, make(name, family))
    if is_adaptive:
        engine.adapt_width(StepCosts(plain_ms=1.2, step_ms=(1.0, 1.1, 1.2, 1.4)))
    params = {"temperature": 0.7, "top_k": 12, "seed": 3}
    if not engine.drafter.has_draft_law:
        # A draft that is chosen, not drawn, changes not even the text.
        assert answer(engine, prompt, max_tokens=60, **params) == plain(family, prompt, max_tokens=60, **params)
        return
    tokens = answer(engine, prompt, max_tokens=180, **params)
    counts = (uniforms_of(target, prompt, tokens, 0.7, 12) * 10).long().clamp_max(9).bincount(minlength=10)
    # 9 degrees of freedom: beyond 28 once in a thousand.
    assert float(((counts - 18) ** 2 / 18).sum()) < 28, counts.tolist()


@ALL_CASES
def test_what_a_request_asks_for_means_the_same_with_a_draft(make, targets, plain, name: str, family: str):
    # Field reports 49 and 52.
    target = targets[family]
    N = target.config.vocab_size
    prompt = prompt_of(5, N)
    engine = make_engine(target, make(name, family))
    params = {"max_tokens": 20, "repetition_penalty": 1.5, "frequency_penalty": 0.4, "logit_bias": {7: 2.0}}
    params |= {"min_tokens": 12, "stop_token_ids": range(0, N, 3)}
    wanted = plain(family, prompt, **params)
    assert answer(engine, prompt, **params) == wanted != plain(family, prompt, max_tokens=20)
    # And leaves no trace either.
    assert answer(engine, prompt, max_tokens=20) == plain(family, prompt, max_tokens=20)


@ALL_CASES
def test_logprobs_are_the_targets_own_with_a_draft(make, targets, name: str, family: str):
    target = targets[family]
    prompt = prompt_of(5, target.config.vocab_size)
    found = []
    for drafter in (None, make(name, family)):
        results = make_engine(target, drafter).generate(prompt, SamplingParams(max_tokens=12, logprobs=3))
        found.append([logprob for result in results for logprob in result.logprobs])
    for plainly, drafted in zip(*found, strict=True):
        assert plainly.token_id == drafted.token_id
        assert drafted.logprob == pytest.approx(plainly.logprob, abs=2e-4)
        assert [value for _, value in drafted.top] == pytest.approx([value for _, value in plainly.top], abs=2e-4)


@ALL_CASES
def test_the_same_seed_gives_the_same_text_whatever_ran_before(make, targets, name: str, family: str):
    # Field reports 55 and 82.
    target = targets[family]
    N = target.config.vocab_size
    engine = make_engine(target, make(name, family))
    params = {"max_tokens": 12, "temperature": 1.0, "seed": 7}
    first = answer(engine, prompt_of(5, N), **params)
    answer(engine, prompt_of(9, N, seed=1), max_tokens=40, temperature=1.3)
    assert answer(engine, prompt_of(5, N), **params) == first
    # Greedy requests draw no number, with a draft as without.
    generation = engine.generate(prompt_of(5, N), SamplingParams(max_tokens=4))
    assert len([token for result in generation for token in result.token_ids]) == 4
    assert generation.stats.seed is None and generation.stats.drafter == engine.drafter.name


@ALL_CASES
def test_what_is_kept_of_a_conversation_changes_no_answer(make, targets, plain, name: str, family: str):
    # Field reports 73 and 79.
    target = targets[family]
    N = target.config.vocab_size
    engine = make_engine(target, make(name, family))
    engine.prefixes = PrefixStore(host_bytes=2**24)
    first = prompt_of(20, N)
    second = [*first, *plain(family, first, max_tokens=6), *prompt_of(5, N, seed=1)]
    third = [*second[:23], *prompt_of(4, N, seed=2)]
    reused, kept = [], []
    for prompt in (first, first, second, third, first):
        generation = engine.generate(prompt, SamplingParams(max_tokens=6))
        assert [t for result in generation for t in result.token_ids] == plain(family, prompt, max_tokens=6)
        reused.append(generation.stats.cached_tokens)
        kept.append(generation.stats.accepted)
    assert reused[0] == 0 and reused[2] >= 20 and reused[4] >= 0
    # The drafter is as good as before: the same prompt, cold and warm.
    assert kept[0] == kept[1] == kept[4]


@pytest.mark.parametrize("name", ["ngram", "mtp"])
def test_prompt_logprobs_are_the_same_with_a_draft(make, targets, name: str):
    # Field report 58: around the borders of chunks of three.
    target = targets["bailing_moe_v3"]
    engines = [make_engine(target), make_engine(target, make(name, "bailing_moe_v3"))]
    for num_prompt in (2, 3, 4, 5, 6, 7, 8):
        prompt, found = prompt_of(num_prompt, 71), []
        for engine in engines:
            generation = engine.generate(prompt, SamplingParams(max_tokens=1), prompt_logprobs=1)
            list(generation)
            found.append([logprob.logprob for logprob in generation.prompt_logprobs])
        assert found[0] == found[1] and len(found[0]) == num_prompt - 1
