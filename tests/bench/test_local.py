"""This engine under a stopwatch: tokens are the engine's, chunks are steps, nothing is read from an earlier request."""

import time
from dataclasses import replace

import pytest
import torch

from soloist.bench import local
from soloist.bench.figures import spread
from soloist.bench.local import Rung, measure, measure_ladder, run_request
from soloist.bench.report import in_words, make_result
from soloist.bench.steps import StepFigures
from soloist.bench.workloads import BenchPrompt, Workload
from soloist.engine import Engine
from soloist.errors import UsageError
from soloist.kernels.allreduce import TensorParallel
from soloist.llm import LLM
from soloist.models import load_model
from soloist.prefix import PrefixStore
from soloist.roofline import Footprint, Reads, WeightPart
from soloist.runtime.runner import ModelRunner
from soloist.spec import make_drafter
from soloist.spec.draft_model import DraftModel
from soloist.spec.drafter import Drafter
from soloist.spec.ngram import PromptLookup
from soloist.spec.setup import DrafterSetup
from tests.miniature import miniature_config
from tests.scripted import Script

PROMPT = BenchPrompt(text="one two three four five six seven", is_chat=False)
GROUPS = [[3], [4, 5, 6], [7], [8, 9], [1, 2, 3, 4]]


def workload(max_tokens: int) -> Workload:
    return Workload(name="test", prompts=(PROMPT,), max_tokens=max_tokens, ignore_eos=True, run=123456)


def scripted(groups: list[list[int]] = GROUPS) -> LLM:
    llm = LLM.of(Script(groups, vocab_size=11).engine(), None, "script")
    part = WeightPart(
        name="all", parameters=10, weight_bytes=20, read_bytes=20, reads=Reads.ALL, num_choices=1, is_sharded=True
    )
    llm.engine.runner.model.footprint = Footprint(
        parts=(part,),
        num_layers=1,
        num_experts_per_tok=0,
        state_bytes=6,
        conv_state_bytes=2,
        kv_bytes_per_position=4,
        num_kv_shards=1,
    )
    return llm


def test_tokens_are_counted_by_the_engine_and_gaps_by_steps():
    figures = run_request(scripted(), PROMPT, workload(11))
    assert (figures.prompt_tokens, figures.completion_tokens) == (7, 11)
    # Five steps have four gaps between them; the time to the first token is none of them.
    assert len(figures.chunk_gaps_s) == len(GROUPS) - 1
    assert sum(figures.chunk_gaps_s) == pytest.approx(figures.e2e_s - figures.ttft_s)
    assert (figures.forwards, figures.drafted, figures.accepted) == (5, 6, 6)
    assert figures.tpot_ms == pytest.approx(1e3 * (figures.e2e_s - figures.ttft_s) / 10)


def test_an_answer_of_two_tokens_has_one_gap():
    figures = run_request(scripted([[3], [4]]), PROMPT, workload(2))
    assert len(figures.chunk_gaps_s) == 1


def test_figures_agree_with_an_independent_stopwatch(monkeypatch: pytest.MonkeyPatch):
    llm = scripted([[1]] * 24)
    forward = llm.engine.runner.model.forward

    def slow_forward(*args, **kwargs):
        time.sleep(0.004)
        return forward(*args, **kwargs)

    monkeypatch.setattr(llm.engine.runner.model, "forward", slow_forward)
    times_s = [time.perf_counter()]
    step = llm.engine.ring.publish

    def publish(*args, **kwargs):
        step(*args, **kwargs)
        times_s.append(time.perf_counter())

    monkeypatch.setattr(llm.engine.ring, "publish", publish)
    figures = run_request(llm, PROMPT, workload(24))
    # From the first step's end to the last one's, over the tokens behind the first.
    tpot_ms = 1e3 * (times_s[24] - times_s[1]) / 23
    assert figures.tpot_ms == pytest.approx(tpot_ms, rel=0.03)
    assert figures.ttft_s == pytest.approx(times_s[1] - times_s[0], rel=0.03, abs=0.002)


def test_every_repeat_reads_its_prompt_anew_even_with_a_store():
    """One prompt five times must not look faster the second time."""
    llm = LLM.of(Script([[1]] * 8, vocab_size=11).engine(), None, "script")
    llm.engine.prefixes = PrefixStore()
    # Long enough to be worth keeping.
    prompt = BenchPrompt(text="word " * 40, is_chat=False)
    reused = []
    for _ in range(5):
        reused.append(run_request(llm, prompt, workload(8)).cached_tokens)
    assert reused == [0] * 5
    # Without that care the store would help.
    for _ in range(2):
        next(stream := llm.stream([1] * 40))
        stream.close()
    assert stream.stats.cached_tokens > 0


@pytest.mark.parametrize("draft", ["ngram", "twin"])
def test_what_a_draft_saw_of_an_earlier_repeat_helps_none(draft: str):
    """Five times one prompt: a draft that kept the answer would have every later token of it accepted."""
    model = load_model(miniature_config("llama"), dtype=torch.float32, weights="random")
    N, device = model.config.vocab_size, model.device
    drafter: Drafter = PromptLookup(max_context_len=120, max_drafts=3, device=device)
    if draft == "twin":
        drafter = DraftModel(model, max_context_len=120, num_tokens=N, max_drafts=3)
    runner = ModelRunner(model, max_context_len=120, max_width=4, has_draft_probs=drafter.has_draft_law)
    llm = LLM.of(Engine(runner, drafter, eos_token_ids=()), None, "miniature")
    llm.engine.prefixes = PrefixStore()
    prompt = BenchPrompt(text=" ".join(f"word{i % 7}" for i in range(40)), is_chat=False)
    runs = [run_request(llm, prompt, workload(24)) for _ in range(5)]
    assert len({(run.cached_tokens, run.forwards, run.drafted, run.accepted) for run in runs}) == 1
    assert runs[0].cached_tokens == 0 and runs[0].drafted


def test_repeats_that_differ_much_are_no_firm_ground_for_a_comparison(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("soloist.bench.local.measure_bandwidth", lambda device: 100.0)
    measured = measure(scripted(), workload(11), repeats=1)
    texts = [
        in_words(workload(11), [replace(measured, warm=replace(measured.warm, decode_tok_per_s_range=range_))])
        for range_ in ((10.0, 14.0), (10.0, 23.0))
    ]
    assert "unsure" not in texts[0] and "the fastest repeat is 2.3 times the slowest" in texts[1]


def test_a_measurement_knows_its_floor_and_keeps_cold_and_warm_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("soloist.bench.local.measure_bandwidth", lambda device: 100.0)
    llm = scripted()
    m = measure(llm, workload(11), repeats=3)
    assert m.warm.num_requests == 3 and m.cold.completion_tokens == 11
    assert m.warm.acceptance_length == pytest.approx(11 / 5)
    # Rows: 6 drafts in 5 steps, and a pending token in each; the middle of the answer lies 5 tokens behind the prompt.
    assert (m.floor.width, m.floor.context_len) == (2, 9 + 5)
    assert m.floor.step_bytes == 20 + 2 * 8 + 14 * 4
    assert m.floor.step_ms == pytest.approx(92 / 100 / 1e6)
    assert m.step_ms == m.warm.chunk_gap_ms
    assert m.floor.share == pytest.approx(m.floor.step_ms / m.warm.chunk_gap_ms.median)
    assert m.memory.cache_bytes == llm.max_context_len * 4 + 8
    assert m.memory.peak_bytes > 2**26
    assert m.num_threads == torch.get_num_threads() and m.gpus == []


def test_steps_by_the_gpus_clock_go_before_gaps_of_chunks(monkeypatch: pytest.MonkeyPatch):
    """A GPU that runs ahead gives its records in bunches: gaps between them are no steps."""
    figures = StepFigures(
        step_ms=spread([2.0, 2.0, 2.5]),
        step_ms_range=(2.0, 2.5),
        tpot_ms=2.0,
        acceptance_length=1.0,
        mean_width=3.9,
        launches_per_step=180,
        programmatic_edges=172,
        idle_share=0.0,
        gap_share=0.0,
        host_us_per_step=41.0,
        syncs_per_step=0,
    )
    monkeypatch.setattr(local, "measure_bandwidth", lambda device: 100.0)
    monkeypatch.setattr(local, "_steps", lambda llm, warm: figures)
    m = measure(scripted(), workload(11), repeats=1)
    assert m.step_ms == figures.step_ms and (m.floor.width, m.floor.context_len) == (4, 9)
    assert m.floor.share == pytest.approx(m.floor.step_ms / 2.0)
    result = make_result(workload(11), [m], case="c", command="x", weights="random")
    assert result.step_ms_median == 2.0 and result.share_of_floor == m.floor.share
    # Without them the whole answer's time is divided by its steps.
    floor = local._floor(scripted(), m.warm, None, None)
    assert floor.share == pytest.approx(floor.step_ms / (m.warm.tpot_ms.mean * 11 / 5))


def test_a_floor_counts_what_is_read_to_draft(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "measure_bandwidth", lambda device: 100.0)
    llm = scripted()
    monkeypatch.setattr(llm.engine.drafter, "read_bytes", lambda width, context_len: 1000 * width + context_len)
    m = measure(llm, workload(11), repeats=1)
    assert m.floor.step_bytes == 20 + 2 * 8 + 14 * 4 + 2014
    assert m.floor.step_ms == pytest.approx(m.floor.step_bytes / 100 / 1e6)


def test_drafters_know_what_they_read():
    config = miniature_config("bailing_moe_v3")
    target = load_model(config, dtype=torch.float32, weights="random")
    setup = DrafterSetup(target=target, max_context_len=100, num_tokens=131, max_width=4)
    lookup, mtp = make_drafter("ngram", setup), make_drafter("mtp", setup)
    assert lookup.read_bytes(4, 50) == mtp.read_bytes(1, 50) == 0
    head_bytes = target.lm_head.numel() * 4
    one, rows = (mtp.footprint.step_bytes(width, 50).total for width in (1, 4))
    assert mtp.read_bytes(4, 50) == 2 * one + rows + 3 * head_bytes and rows > one > 0
    # A layer of its own, with the few experts that are counted.
    counted = mtp.read_bytes(4, 50, distinct_experts=1.0)
    assert 0 < counted < mtp.read_bytes(4, 50)
    model = load_model(miniature_config("llama"), dtype=torch.float32, weights="random")
    twin = DraftModel(model, max_context_len=120, num_tokens=100, max_drafts=3)
    assert twin.read_bytes(4, 50) == 3 * model.footprint.step_bytes(1, 50).total


def test_an_answer_without_a_second_token_has_a_time_to_the_first_alone():
    figures = run_request(scripted([[3]]), PROMPT, workload(1))
    assert figures.tpot_ms is None and figures.ttft_s == figures.e2e_s > 0
    with pytest.raises(UsageError, match="a time per token needs two"):
        measure(scripted([[3]]), workload(1), repeats=1)


def test_a_ladder_measures_rung_by_rung_with_one_workload(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("soloist.bench.local.measure_bandwidth", lambda device: 100.0)
    loaded = []

    def load(name: str, groups: list[list[int]]):
        loaded.append(name)
        return scripted(groups)

    rungs = [
        Rung(name="plain", load=lambda: load("plain", [[1]] * 11)),
        Rung(name="--draft x", load=lambda: load("draft", GROUPS)),
    ]
    plain, draft = measure_ladder(rungs, lambda llm: workload(11), repeats=1)
    assert loaded == ["plain", "draft"]
    assert (plain.name, draft.name) == ("plain", "--draft x")
    assert (plain.warm.acceptance_length, draft.warm.acceptance_length) == (1.0, pytest.approx(2.2))


def test_the_rungs_of_a_ladder_have_the_largest_bandwidth_of_the_run(monkeypatch: pytest.MonkeyPatch):
    found = iter([50.0, 100.0, 80.0])
    monkeypatch.setattr("soloist.bench.local.measure_bandwidth", lambda device: next(found))
    rungs = [Rung(name=str(i), load=lambda: scripted([[1]] * 11)) for i in range(3)]
    for m in measure_ladder(rungs, lambda llm: workload(11), repeats=1):
        assert m.floor.bandwidth_gb_per_s == 100.0
        assert m.floor.step_ms == pytest.approx(m.floor.step_bytes / 100.0 / 1e6)
        assert m.floor.share == pytest.approx(m.floor.step_ms / m.step_ms.median)


def test_a_config_without_tokenizer_is_measured_with_token_ids():
    model = load_model(miniature_config("llama"), dtype=torch.float32, weights="random")
    llm = LLM.of(Engine(ModelRunner(model, max_context_len=64)), None, "config")
    figures = run_request(llm, PROMPT, workload(5))
    assert (figures.prompt_tokens, figures.completion_tokens) == (7, 5)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_reads_its_own_heads_of_a_drafts_context(num_ranks: int):
    config = miniature_config("llama", num_attention_heads=8, num_key_value_heads=4, hidden_size=64, vocab_size=256)
    group = TensorParallel(rank=0, size=num_ranks)
    target = load_model(config, dtype=torch.float32, weights="random", group=group)
    setup = DrafterSetup(target=target, max_context_len=100, num_tokens=256, max_width=4)
    draft = make_drafter("dspark", setup)
    k, v = draft.buffers.context.k, draft.buffers.context.v
    # (layers, heads, positions, K): of one position.
    row_bytes = (k[:, :, 0].numel() + v[:, :, 0].numel()) * k.element_size()
    assert draft.read_bytes(4, 50) - draft.read_bytes(4, 20) == 30 * row_bytes > 0
