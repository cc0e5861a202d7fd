"""DSpark in the loop: its context follows the target through cuts, reuse and failures; answers stay the target's."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from soloist.engine import Engine
from soloist.models.cache import StepKind
from soloist.models.causal_lm import CausalLM, HiddenCapture
from soloist.prefix import PrefixStore
from soloist.sampling_params import SamplingParams
from soloist.spec.dspark import DSpark
from soloist.spec.dspark_checkpoint import load_dspark
from soloist.spec.dspark_layout import read_draft_config
from soloist.spec.dspark_model import DSparkModel
from soloist.spec.setup import DrafterSetup
from soloist.spec.verify import Rule
from tests.miniature import FAMILIES
from tests.scripted import TableModel
from tests.scripted import make_engine as make_scripted_engine
from tests.spec.drafters import answer, load_small, make_engine, prompt_of
from tests.spec.dspark_drafts import Draft, deepspec_json, draft_for, write_draft
from tests.spec.dspark_right import (
    BLOCK,
    DictSource,
    PlanningTarget,
    make_text,
    right_config,
    right_model,
    right_tensors,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def targets(folder: Path) -> dict[str, CausalLM]:
    return {family: load_small(folder / family, family) for family in FAMILIES}


def load_draft(folder: Path, target: CausalLM) -> DSpark:
    draft = draft_for(target, block_size=4)
    name = f"draft-{target.config.hidden_size}-{target.config.vocab_size}"
    path = write_draft(folder / name, deepspec_json(draft), draft.draw(8))
    limit = target.config.max_position_embeddings - 16
    drafter = load_dspark(
        DrafterSetup(target=target, draft_path=path, max_context_len=limit, num_tokens=target.config.vocab_size)
    )
    return drafter


class Helped(DSpark):
    """Is right about as many drafts as a list says, over and over, and wrong about the next."""

    def __init__(self, model: DSparkModel, num_right: list[int]) -> None:
        super().__init__(model)
        self.num_right, self.sequence, self.num_steps = num_right, [0], 0
        self.accepted: list[int] = []

    def propose(self, buffers, context_len) -> None:
        super().propose(buffers, context_len)
        at, n = int(context_len) + 1, self.num_right[self.num_steps % len(self.num_right)]
        told = torch.tensor(self.sequence[at : at + n + 1][: self.max_drafts], dtype=torch.int64)
        told[n:] = (told[n:] + 1) % buffers.num_tokens
        buffers.input_ids[1 : 1 + len(told)] = told
        self.num_steps += 1

    def update(self, buffers, verdict, hidden, captured) -> None:
        self.accepted.append(int(verdict.num_accepted))
        super().update(buffers, verdict, hidden, captured)


def context_in_one_shot(drafter: DSpark, target: CausalLM, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Give keys and values (L, G, n, K) of a text that was read at once."""
    n, layers = len(token_ids), drafter.capture_layers
    capture = HiddenCapture(layers=layers, hidden=torch.zeros(n, len(layers), target.config.hidden_size))
    target.forward(torch.tensor(token_ids), target.make_cache(n), StepKind.PREFILL, capture=capture)
    context = drafter.model.make_context()
    drafter.model.read_context(capture.hidden, context, torch.zeros((), dtype=torch.int32))
    return context.k[:, :, :n], context.v[:, :, :n]


@pytest.mark.parametrize("is_fixed_shape", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_context_is_the_texts_whatever_was_rejected(folder, targets, family: str, is_fixed_shape: bool):
    target = targets[family]
    drafter = Helped(load_draft(folder, target).model, [0, 3, 1, 4, 2, 4])
    drafter.is_fixed_shape = is_fixed_shape
    engine = make_engine(target, drafter, is_fixed_shape=is_fixed_shape)
    prompt = prompt_of(7, target.config.vocab_size)
    want = answer(make_engine(target), prompt, max_tokens=60)
    drafter.sequence = [*prompt, *want]
    assert answer(engine, prompt, max_tokens=60) == want
    assert drafter.accepted[:12] == [0, 3, 1, 4, 2, 4] * 2
    n = int(drafter.buffers.context_len)
    assert n == int(engine.runner.cache.context_len) == 66
    own = drafter.buffers.context
    for got, shot in zip((own.k, own.v), context_in_one_shot(drafter, target, [*prompt, *want][:n]), strict=True):
        assert (got[:, :, :n] - shot).abs().max() < 2e-4


def test_nothing_drifts_in_hundreds_of_steps(folder, targets):
    target = targets["llama"]
    drafter = Helped(load_draft(folder, target).model, [1, 0, 0, 2])
    engine, prompt = make_engine(target, drafter), prompt_of(3, 67)
    want = answer(make_engine(target), prompt, max_tokens=900)
    drafter.sequence = [*prompt, *want]
    assert answer(engine, prompt, max_tokens=900) == want
    assert drafter.num_steps >= 500
    n, own = int(drafter.buffers.context_len), drafter.buffers.context
    k, v = context_in_one_shot(drafter, target, [*prompt, *want][:n])
    assert (own.k[:, :, :n] - k).abs().max() < 1e-3 and (own.v[:, :, :n] - v).abs().max() < 1e-3


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_same_seed_gives_the_same_text_whatever_ran_before(folder, targets, temperature: float):
    # Field reports 55 and 82.
    target = targets["kimi_linear"]
    engine = make_engine(target, load_draft(folder, target))
    first, other = prompt_of(6, 53), prompt_of(40, 53, seed=4)
    params = {"max_tokens": 20, "temperature": temperature, "seed": 5}
    want = answer(engine, first, **params)
    answer(engine, other, max_tokens=50, temperature=1.3, seed=1)
    assert answer(engine, first, **params) == want
    assert temperature == 0 or answer(engine, first, **(params | {"seed": 6})) != want


@pytest.mark.parametrize("is_fixed_shape", [False, True])
def test_a_broken_draft_breaks_no_answer(folder, targets, is_fixed_shape: bool):
    target = targets["qwen2"]
    drafter = load_draft(folder, target)
    drafter.is_fixed_shape = is_fixed_shape
    model, prompt = drafter.model, prompt_of(6, 61)
    model.fc, model.norm = torch.full_like(model.fc, math.nan), torch.full_like(model.norm, math.inf)
    engine = make_engine(target, drafter, is_fixed_shape=is_fixed_shape)
    assert answer(engine, prompt, max_tokens=20) == answer(make_engine(target), prompt, max_tokens=20)
    assert len(answer(engine, prompt, max_tokens=20, temperature=1.0, seed=2)) == 20


# --- the law ---


def tiny_engine(rule: Rule, is_broken: bool = False) -> tuple[Engine, torch.Tensor]:
    """A target whose next token depends on the last of four, and a draft of random weights."""
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(7)) * 1.5
    target = TableModel(4, lambda positions, input_ids: table[input_ids])
    draft = Draft(
        hidden_size=2,
        vocab_size=4,
        target_layer_ids=(-1,),
        num_target_layers=1,
        block_size=2,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        intermediate_size=3,
        rank=2,
    )
    generator = torch.Generator().manual_seed(1)
    tensors = draft.draw(2) | {
        name: torch.randn(4, 2, generator=generator) for name in ("embed_tokens.weight", "lm_head.weight")
    }
    model = DSparkModel(read_draft_config(deepspec_json(draft)), DictSource(tensors), 448)
    if is_broken:
        model.norm = torch.full_like(model.norm, math.nan)
    return make_scripted_engine(target, DSpark(model), rule=rule, max_context_len=416), table.double().softmax(-1)


@pytest.mark.parametrize(("rule", "is_broken"), [(Rule.CHAIN, False), (Rule.BLOCK, False), (Rule.CHAIN, True)])
def test_drawn_drafts_leave_the_targets_law(rule: Rule, is_broken: bool):
    engine, law = tiny_engine(rule, is_broken)
    counts = torch.zeros(4, 4)
    for seed in range(2):
        generation = engine.generate([1], SamplingParams(max_tokens=400, temperature=1.0, seed=seed))
        tokens = [1, *(token for result in generation for token in result.token_ids)]
        for before, token in itertools.pairwise(tokens):
            counts[before, token] += 1
        # A test of verification, not of its absence.
        assert generation.stats.acceptance_rate is not None and 0.2 < generation.stats.acceptance_rate < 0.95
    expected = law * counts.sum(1, keepdim=True)
    # 12 degrees of freedom: beyond 33 once in a thousand.
    assert float(((counts - expected) ** 2 / expected).sum()) < 33


# --- reuse of prefixes ---


def test_a_context_beyond_what_the_host_saw_is_not_used_again():
    text = make_text(160)
    target = PlanningTarget(text)
    drafter = DSpark(right_model(target, right_config(), right_tensors()))
    engine = make_scripted_engine(target, drafter, max_context_len=110)
    engine.prefixes = PrefixStore(host_bytes=1 << 24)
    assert answer(engine, text[:30], max_tokens=20) == text[30:50]
    # A step that was enqueued ahead of a stop string commits, and nobody hears of it.
    engine.runner.cache.context_len.add_(3)
    drafter.buffers.context_len.add_(3)
    generation = engine.generate(text[:60], SamplingParams(max_tokens=20))
    assert [token for result in generation for token in result.token_ids] == text[60:80]
    assert generation.stats.forwards == 20 // (1 + BLOCK)


def test_the_context_comes_back_with_a_kept_prefix():
    # With a hole in its context, or rows of another text, this draft is wrong.
    text = make_text(280)
    target = PlanningTarget(text)
    drafter = DSpark(right_model(target, right_config(), right_tensors()))
    engine = make_scripted_engine(target, drafter, max_context_len=220, chunk_tokens=7)
    engine.prefixes = PrefixStore(host_bytes=1 << 24)
    end = 30
    for turn in range(3):
        generation = engine.generate(text[:end], SamplingParams(max_tokens=25))
        assert [token for result in generation for token in result.token_ids] == text[end : end + 25]
        assert generation.stats.forwards == 25 // (1 + BLOCK)
        # Of the last answer all but the last token, which no step has read.
        assert generation.stats.cached_tokens == (0 if turn == 0 else end - 11)
        end += 35
        # Another conversation in between.
        other = [3] * 40
        assert len([t for r in engine.generate(other, SamplingParams(max_tokens=5)) for t in r.token_ids]) == 5
