"""The DSpark drafter: the network against a naive one in fp64, rounds against one shot, answers against plain ones."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.errors import UnsupportedError, UsageError
from soloist.hub import built_in_config
from soloist.kernels.sampling import Stream, draft_counter, target_probs, uniform
from soloist.models import load_model
from soloist.models.bailing_moe_v3 import BailingMoeV3Config
from soloist.models.causal_lm import CausalLM
from soloist.models.qwen3 import Qwen3Config
from soloist.models.weights import RecordingSource
from soloist.runtime.buffers import StepBuffers
from soloist.sampling_params import SamplingParams
from soloist.spec.costs import StepCosts
from soloist.spec.dspark import DSpark, make_random_dspark
from soloist.spec.dspark_checkpoint import load_dspark
from soloist.spec.dspark_config import random_config, spread_layers
from soloist.spec.dspark_model import DSparkModel
from soloist.spec.setup import DrafterSetup
from soloist.spec.verify import Verdict
from soloist.spec.width import WidthRule
from tests.miniature import write_checkpoint
from tests.spec.dspark_drafts import Draft, deepspec_json, dflash_json, draft_for, reference_of, write_draft
from tests.spec.dspark_reference import Reference

N, D = 67, 60


def i32(x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def target(folder: Path) -> CausalLM:
    return load_model(write_checkpoint(folder / "target", "llama", 3, vocab_size=N), dtype=torch.float32)


class Bench:
    """A drafter without an engine: hidden states are random, and the test says what is committed."""

    def __init__(self, folder: Path, target: CausalLM, *, options: dict[str, Any] | None = None, **overrides: Any):
        in_place = overrides.pop("in_place", False)
        self.draft: Draft = draft_for(target, **overrides)
        self.tensors = self.draft.draw(11)
        config = dflash_json(self.draft) if in_place else deepspec_json(self.draft)
        name = f"draft-{abs(hash((repr(self.draft), in_place)))}"
        setup = DrafterSetup(
            target=target,
            draft_path=write_draft(folder / name, config, self.tensors),
            max_context_len=64,
            num_tokens=N,
        )
        loaded = load_dspark(setup)
        self.drafter = DSpark(loaded.model, **(options or {}))
        self.reference: Reference = reference_of(self.draft, self.tensors, target)
        self.buffers = StepBuffers.allocate(max_width=1 + self.drafter.max_drafts, num_tokens=N, has_draft_probs=True)
        generator = torch.Generator().manual_seed(5)
        self.features = torch.randn(
            64, len(self.draft.target_layer_ids), target.config.hidden_size, generator=generator
        )
        self.generator = generator
        self.context_len = i32(0)

    def begin(self, pending: int = 1, **params: Any) -> None:
        defaults = {"max_tokens": 40}
        plan = self.buffers.begin(
            [pending], SamplingParams(**(defaults | params)), seed=params.get("seed", 9), max_tokens=40, stop_ids=()
        )
        self.drafter.begin(torch.tensor([pending]), plan)
        self.context_len.zero_()

    def prefill(self, num_tokens: int, chunk: int) -> None:
        rows = self.features[:num_tokens]
        for part in rows.split(chunk):
            self.drafter.prefill_chunk(torch.zeros(len(part), dtype=torch.int64), part[:, 0], part)
        self.context_len.add_(num_tokens)

    def propose(self) -> list[int]:
        self.buffers.width.fill_(self.buffers.max_width)
        self.drafter.propose(self.buffers, self.context_len)
        return self.buffers.input_ids[1:].tolist()

    def commit(self, num_committed: int, num_rows: int | None = None) -> None:
        """Commit some rows of a step; the others are noise, as the hidden states of rejected drafts are."""
        T = num_rows or self.buffers.max_width
        start = int(self.context_len)
        captured = 50 * torch.randn(T, *self.features.shape[1:], generator=self.generator)
        captured[:num_committed] = self.features[start : start + num_committed]
        verdict = Verdict(
            committed_tokens=torch.zeros(T, dtype=torch.int64),
            num_committed=i32(num_committed),
            num_accepted=i32(max(num_committed - 1, 0)),
            finish_code=i32(0),
        )
        # As in the engine, the target's cache has moved on by then.
        self.context_len.add_(num_committed)
        self.drafter.update(self.buffers, verdict, captured[:, 0], captured)

    @property
    def seen(self) -> torch.Tensor:
        return self.features[: int(self.context_len)]

    def hidden(self) -> torch.Tensor:
        own = self.drafter.buffers
        ids = torch.full((self.draft.block_size,), self.draft.mask_token_id)
        ids[0] = self.buffers.input_ids[0]
        return self.drafter.model.run_block(ids, own.context, self.context_len)


def greedy_walk(bench: Bench, first: int = 0) -> list[int]:
    """Draft by the reference, token by token."""
    pending = int(bench.buffers.input_ids[0])
    hidden = bench.reference.block(bench.seen, pending)
    return bench.reference.walk(hidden[first : first + bench.drafter.max_drafts], pending)


# --- the network ---


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn", None])
def test_rounds_with_partial_acceptance_are_one_shot_with_the_whole_context(folder, target, markov: str | None):
    bench = Bench(folder, target, markov=markov, confidence="hidden_and_markov" if markov else "hidden")
    bench.begin(pending=4)
    bench.prefill(7, chunk=3)
    for num_committed in (1, 6, 3, 2, 6):
        drafted = bench.propose()
        pending = int(bench.buffers.input_ids[0])
        hidden = bench.reference.block(bench.seen, pending)
        assert (bench.hidden().double() - hidden).abs().max() < 1e-5
        assert drafted == bench.reference.walk(hidden, pending)
        confidence = bench.reference.confidence(hidden, pending, drafted)
        assert (bench.drafter.buffers.confidence.double() - confidence).abs().max() < 1e-5
        bench.commit(num_committed)
        bench.buffers.input_ids[0] = (pending * 7 + 3) % N


@pytest.mark.parametrize("num_prompt", [0, 1, 2, 5, 6, 7])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_short_prompts_and_chunk_boundaries(folder, target, num_prompt: int, chunk: int):
    bench = Bench(folder, target)
    bench.begin(pending=9)
    bench.prefill(num_prompt, chunk)
    assert bench.propose() == greedy_walk(bench)
    assert (bench.hidden().double() - bench.reference.block(bench.seen, 9)).abs().max() < 1e-5


@pytest.mark.parametrize(("windows", "causal"), [((None, 4), (False, True)), ((3, None), (True, False))])
def test_windows_and_causal_layers(folder, target, windows, causal):
    bench = Bench(folder, target, windows=windows, causal=causal)
    bench.begin(pending=9)
    bench.prefill(11, 64)
    assert (bench.hidden().double() - bench.reference.block(bench.seen, 9)).abs().max() < 1e-5
    full = replace(bench.reference.shape, windows=(), causal=())
    assert (Reference(full, bench.reference.w).block(bench.seen, 9) - bench.hidden()).abs().max() > 1e-3


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_a_head_step_by_step_is_the_head_over_a_block(folder, target, markov: str):
    bench = Bench(folder, target, markov=markov)
    head = bench.drafter.model.markov
    hidden = torch.randn(5, D)
    before = [3, 1, 4, 1, 5]
    state, rows = head.start, []
    for slot, token in enumerate(before):
        bias, state = head.step(head.embed(torch.tensor([token])), hidden[slot : slot + 1], state)
        rows.append(bias)
    assert (torch.cat(rows).double() - bench.reference.biases(before, hidden.double())).abs().max() < 1e-5
    assert torch.equal(head.start, torch.zeros_like(head.start))


def test_in_place_drafts_skip_slot_0(folder, target):
    bench = Bench(folder, target, markov=None, confidence=None, in_place=True)
    assert bench.drafter.max_drafts == bench.draft.block_size - 1
    bench.begin(pending=9)
    bench.prefill(8, 64)
    assert bench.propose() == greedy_walk(bench, first=1)


def test_a_longer_block_is_run_whole_and_its_first_fifteen_drafts_are_verified(folder, target):
    bench = Bench(folder, target, block_size=18)
    assert bench.drafter.max_drafts == 15
    bench.begin(pending=9)
    bench.prefill(4, 64)
    assert bench.propose() == greedy_walk(bench)
    # A block cut to fifteen slots would be another one: its slots see each other.
    cut = Reference(replace(bench.reference.shape, block_size=15), bench.reference.w)
    assert (cut.block(bench.seen, 9) - bench.hidden()[:15]).abs().max() > 1e-3


def test_fewer_drafts_are_the_first_of_the_whole_block(folder, target):
    whole, cut = Bench(folder, target), Bench(folder, target, options={"max_drafts": 2})
    for bench in (whole, cut):
        bench.begin(pending=9)
        bench.prefill(4, 64)
    assert cut.propose() == whole.propose()[:2]
    for wrong in (0, 6):
        with pytest.raises(UsageError, match=f"max_drafts is {wrong}; a block of this draft gives 1 to 5"):
            DSpark(whole.drafter.model, max_drafts=wrong)


# --- sampling ---


def test_the_recorded_law_is_the_one_drafts_were_drawn_from(folder, target):
    bench = Bench(folder, target)
    params = {"temperature": 0.7, "top_k": 9, "top_p": 0.95, "seed": 21}
    bench.begin(pending=4, **params)
    bench.prefill(6, 64)
    drafted = bench.propose()
    laws = bench.buffers.draft_probs
    logits = bench.reference.logits(bench.reference.block(bench.seen, 4), 4, drafted).float()
    scalars = [torch.tensor(x) for x in (0.7, 9, 0.95, 0.0)]
    scalars[1] = scalars[1].int()
    assert (laws - target_probs(logits, *scalars)).abs().max() < 1e-5
    assert ((laws > 0).sum(1) <= 9).all()
    uniforms = uniform(torch.tensor(21), draft_counter(i32(6), torch.arange(1, 6)), Stream.DRAFT)
    for token, law, u in zip(drafted, laws, uniforms, strict=True):
        below = float(law[:token].sum())
        assert below <= u <= below + float(law[token]) + 1e-6


def test_another_seed_or_place_drafts_otherwise(folder, target):
    bench = Bench(folder, target)
    seen = set()
    for seed, num_prompt in ((1, 6), (2, 6), (1, 7)):
        bench.begin(pending=4, temperature=1.5, seed=seed)
        bench.prefill(num_prompt, 64)
        seen.add(tuple(bench.propose()))
        assert tuple(bench.propose()) in seen
    assert len(seen) == 3


def test_drafts_may_be_chosen_although_the_target_samples(folder, target):
    bench = Bench(folder, target, options={"draft_greedily": True})
    assert not bench.drafter.has_draft_law
    bench.buffers.draft_probs.fill_(math.nan)
    bench.begin(pending=4, temperature=1.0)
    bench.prefill(6, 64)
    assert bench.propose() == greedy_walk(bench)
    assert bench.buffers.draft_probs.isnan().all()


# --- width ---


def test_confidences_end_a_proposal(folder, target):
    bench = Bench(folder, target)
    # Rows cost nothing, or as much as a step.
    for row_ms, want in ((1e-6, 6), (1.0, 1)):
        costs = StepCosts(plain_ms=1.0, step_ms=tuple(1.0 + row_ms * w for w in range(6)))
        bench.drafter.width_rule = WidthRule(costs, has_confidences=True, device=torch.device("cpu"))
        bench.begin()
        bench.drafter.width_rule.begin()
        bench.prefill(6, 64)
        bench.propose()
        assert int(bench.buffers.width) == want
    bench.drafter.width_rule = None
    bench.propose()
    assert int(bench.buffers.width) == 6


def test_a_proposal_is_never_wider_than_the_step_can_use(folder, target):
    bench = Bench(folder, target)
    costs = StepCosts(plain_ms=1.0, step_ms=tuple(1.0 + 1e-6 * w for w in range(6)))
    bench.begin()
    bench.prefill(6, 64)
    for rule in (None, WidthRule(costs, has_confidences=True, device=torch.device("cpu"))):
        bench.drafter.width_rule = rule
        bench.buffers.width.fill_(3)
        bench.drafter.propose(bench.buffers, bench.context_len)
        assert int(bench.buffers.width) == 3


# --- state ---


def test_a_snapshot_brings_the_context_back(folder, target):
    bench = Bench(folder, target)
    bench.begin(pending=4)
    bench.prefill(9, 64)
    want = bench.propose()
    snapshot = bench.drafter.snapshot()
    # Another request in between.
    bench.begin(pending=5)
    bench.features.neg_()
    bench.prefill(20, 64)
    bench.propose()
    bench.features.neg_()
    bench.begin(pending=4)
    bench.drafter.restore(snapshot)
    bench.context_len.fill_(9)
    assert bench.propose() == want
    # And the rest of a prompt goes on behind it.
    bench.begin(pending=4)
    bench.drafter.restore(snapshot)
    part = bench.features[9:14]
    bench.drafter.prefill_chunk(torch.zeros(5, dtype=torch.int64), part[:, 0], part)
    bench.context_len.fill_(14)
    assert bench.propose() == greedy_walk(bench)


def test_nothing_of_a_broken_request_reaches_the_next(folder, target):
    bench = Bench(folder, target)
    bench.begin(pending=4)
    kept = bench.features.clone()
    bench.features[:] = math.nan
    bench.prefill(20, 64)
    bench.propose()
    bench.features.copy_(kept)
    bench.begin(pending=4)
    bench.prefill(5, 64)
    assert bench.drafter.buffers.context.k.isnan().any()
    assert bench.propose() == greedy_walk(bench)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_draft_proposes_tokens_and_laws_all_the_same(folder, target, temperature: float):
    bench = Bench(folder, target)
    model = bench.drafter.model
    model.norm = torch.full_like(model.norm, math.nan)
    bench.begin(pending=4, temperature=temperature)
    bench.prefill(6, 64)
    assert all(0 <= token < N for token in bench.propose())
    if temperature:
        assert bench.buffers.draft_probs.isfinite().all()
        assert bench.buffers.draft_probs.sum(1).sub(1).abs().max() < 1e-5


def test_a_step_of_fewer_rows_is_followed_too(folder, target):
    bench = Bench(folder, target)
    bench.begin(pending=4)
    bench.prefill(3, 64)
    for num_rows in (1, 2, 4):
        bench.propose()
        bench.commit(1, num_rows)
    # Behind the end of an answer nothing is committed.
    bench.commit(0)
    assert int(bench.drafter.buffers.context_len) == 6
    assert bench.propose() == greedy_walk(bench)


def test_the_context_is_as_long_as_the_targets(folder, target):
    # Who measures steps sets the target back between them, and tells the drafter nothing.
    bench = Bench(folder, target)
    bench.begin(pending=4)
    bench.prefill(9, 64)
    bench.propose()
    bench.commit(4)
    bench.context_len.fill_(6)
    assert bench.propose() == greedy_walk(bench)
    bench.commit(2)
    assert int(bench.drafter.buffers.context_len) == 8
    assert bench.propose() == greedy_walk(bench)


# --- random drafts and published sizes ---


def published(name: str) -> BailingMoeV3Config:
    return BailingMoeV3Config.from_dict(built_in_config(name))


def num_parameters(config) -> int:
    asked = RecordingSource()
    DSparkModel(config, asked, 1)
    return sum(torch.Size(shape).numel() for shape in asked.shapes.values())


def test_the_published_draft_of_ling_flash_has_the_published_parameters():
    config = random_config(published("ling-3.0-flash"))
    assert config.transformer.num_key_value_heads == config.transformer.num_attention_heads == 32
    assert num_parameters(config) == 1_363_707_905
    # Without the copies of embedding and head, of which the public conversions drop one.
    assert num_parameters(config) - config.transformer.vocab_size * 2560 == 961_316_865


def test_a_round_reads_what_the_specification_counts():
    model = DSparkModel(random_config(published("ling-3.0-flash")), RecordingSource(), 1)
    # Backbone, fc, head and eight times W2, in MB; and the context's keys and values, which it does not count.
    assert model.read_bytes(0, 8) / 1e6 == pytest.approx(891 + 66 + 805 + 80.5 * 8 + 210, rel=1e-3)
    assert model.read_bytes(8192, 8) - model.read_bytes(0, 8) == 8192 * 81_920


def test_the_published_draft_of_qwen3_4b_has_the_published_parameters():
    config = random_config(Qwen3Config.from_dict(built_in_config("qwen3-4b")), block_size=7)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert num_parameters(config) == 1_393_133_569


@pytest.mark.parametrize(("given", "want"), [(16, 32), (32, 32), (96, 128), (128, 128), (256, 128)])
def test_a_draft_of_a_hybrid_has_heads_that_a_gpu_attends_to(given: int, want: int):
    target = replace(published("ling-3.0-tiny"), head_dim=given)
    config = random_config(target)
    assert target.kda.head_dim == given and config.transformer.head_dim == want
    assert config.transformer.num_attention_heads == target.kda.num_heads


@pytest.mark.parametrize(
    ("depth", "num_layers", "want"),
    [
        (40, 5, (1, 10, 19, 28, 37)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 1, (18,)),
        (3, 5, (0, 1)),
        (7, 5, (1, 2, 3, 4, 5)),
    ],
)
def test_layers_are_spread_as_the_trainers_spread_them(depth: int, num_layers: int, want: tuple[int, ...]):
    assert spread_layers(depth, num_layers) == want


def test_a_random_draft_needs_no_checkpoint(target):
    setup = DrafterSetup(target=target, max_context_len=40, num_tokens=N, max_width=4, seed=3)
    drafter, again = (make_random_dspark(setup) for _ in range(2))
    assert drafter.max_drafts == 3
    assert drafter.model.embed_tokens is target.embed_tokens and drafter.model.lm_head is target.lm_head
    assert torch.equal(drafter.model.fc, again.model.fc) and drafter.model.fc.std() > 0
    assert drafter.model.max_positions == 40 + 16 and drafter.max_context_len == 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, the target's 60"),
        ({"vocab_size": 99}, "vocab_size is 99, the target's 67"),
    ],
)
def test_a_draft_for_another_target_is_refused(target, change: dict[str, int], message: str):
    config = random_config(target.config)
    other = replace(config, transformer=replace(config.transformer, **change))
    setup = DrafterSetup(target=target, max_context_len=40, num_tokens=N)
    with pytest.raises(UnsupportedError, match=message):
        make_random_dspark(setup, other)


def test_the_last_layer_is_refused_because_trainers_disagree_on_it(target):
    config = replace(random_config(target.config), target_layer_ids=(0, 2))
    with pytest.raises(UnsupportedError, match=r"reads target layers \[0, 2\]; allowed are layers below the last, 2"):
        config.check_target(target.config)
    with pytest.raises(UnsupportedError, match="num_target_layers is 4, the target's 3"):
        replace(config, num_target_layers=4, target_layer_ids=(0,)).check_target(target.config)
