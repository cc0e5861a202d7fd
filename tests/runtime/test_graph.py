"""Steps on their way: refused settings, the order of records, and on a GPU that a replayed step is the eager one."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from soloist.errors import UsageError
from soloist.models import load_model
from soloist.models.cache import StepKind
from soloist.models.causal_lm import CausalLM
from soloist.runtime import graph
from soloist.runtime.buffers import FinishCode, SamplingPlan
from soloist.runtime.graph import Execution, StepQueue
from soloist.runtime.ring import TokenRing
from soloist.sampling_params import SamplingParams
from tests.miniature import write_checkpoint
from tests.runtime.gpu_models import BEST, CAPTURED, EAGER, PARAMS, make_engine, needs_gpu, prompt_of, state_of


def i32(x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"is_captured": True, "run_ahead": -1, "has_pdl": True}, "run_ahead is -1; allowed: 0 and more"),
        ({"is_captured": False, "run_ahead": 1, "has_pdl": False}, "need captured steps: add --graph"),
        ({"is_captured": False, "run_ahead": 0, "has_pdl": True}, "need captured steps: add --graph"),
        ({"is_captured": False, "run_ahead": 0, "has_pdl": False, "has_device_loop": True}, "need captured steps"),
        ({"is_captured": True, "run_ahead": 2, "has_pdl": True, "has_device_loop": True}, "leave --run-ahead out"),
    ],
)
def test_what_needs_a_graph_is_refused_without_one(settings: dict, message: str):
    with pytest.raises(UsageError, match=message):
        Execution(**settings)


def test_a_gpu_runs_ahead_of_the_host_and_a_cpu_is_called():
    assert Execution.best_for(torch.device("cuda", 1)) == BEST
    assert Execution.best_for(torch.device("cpu")) == EAGER


class ScriptedDevice:
    """Steps whose records appear when they are let: record i holds token i."""

    def __init__(self, num_slots: int) -> None:
        self.ring = TokenRing(num_slots=num_slots, max_width=1, num_tokens=100)
        self.num_launched = self.num_finished = 0

    def launch(self) -> None:
        self.num_launched += 1

    def finish(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.num_finished < self.num_launched
            self.ring.publish(torch.tensor([self.num_finished]), i32(1), i32(0), i32(0), i32(0), None)
            self.num_finished += 1

    def finish_at_once(self) -> None:
        self.launch()
        self.finish()

    def queue(self, run_ahead: int, launch: Callable[[], None] | None = None) -> StepQueue:
        return StepQueue(launch or self.finish_at_once, self.ring, run_ahead=run_ahead, num_top=None)


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 5])
def test_records_come_in_order_with_as_many_steps_ahead_as_allowed(run_ahead: int):
    device = ScriptedDevice(num_slots=run_ahead + 2)
    queue = device.queue(run_ahead)
    for i in range(20):
        assert queue.next().token_ids == [i]
        assert device.num_launched == i + 1 + run_ahead
    assert [record.token_ids for record in queue.drain()] == [[20 + i] for i in range(run_ahead)]
    assert queue.drain() == [] and device.num_launched == 20 + run_ahead


def test_a_queue_that_was_drained_goes_on():
    device = ScriptedDevice(num_slots=4)
    queue = device.queue(2)
    queue.next()
    queue.drain()
    assert queue.next().token_ids == [3] and device.num_launched == 6


def test_the_host_waits_for_a_record_that_is_late():
    device = ScriptedDevice(num_slots=4)
    queue = device.queue(2, device.launch)

    def run() -> None:
        for _ in range(5):
            time.sleep(0.005)
            device.finish()

    def launch_and_start() -> None:
        device.launch()
        if device.num_launched == 3:
            threading.Thread(target=run).start()

    queue = device.queue(2, launch_and_start)
    assert [queue.next().token_ids for _ in range(3)] == [[0], [1], [2]]
    assert [record.token_ids for record in queue.drain()] == [[3], [4]]


@pytest.mark.parametrize("overshoot_s", [0.0, 0.0004])
@pytest.mark.parametrize("prompt_s", [0.0, 0.08])
def test_a_host_whose_sleeps_overshoot_does_not_fall_behind(
    monkeypatch: pytest.MonkeyPatch, overshoot_s: float, prompt_s: float
):
    """On a clock of its own: steps of 1.3 ms follow each other while one is enqueued, the first behind a prompt."""
    device, step_s = ScriptedDevice(num_slots=4), 1.3e-3
    now_s, ends_s = [0.0], []

    def launch() -> None:
        device.launch()
        ends_s.append(max(now_s[0], ends_s[-1] if ends_s else prompt_s) + step_s)

    def sleep(seconds: float) -> None:
        now_s[0] += seconds + overshoot_s
        device.finish(sum(end_s <= now_s[0] for end_s in ends_s) - device.num_finished)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    queue = device.queue(2, launch)
    for _ in range(300):
        queue.next()
    # The device was never without a step.
    assert ends_s[-1] == pytest.approx(prompt_s + len(ends_s) * step_s)


def test_a_ring_in_which_records_would_be_overwritten_is_refused():
    device = ScriptedDevice(num_slots=3)
    device.queue(1)
    with pytest.raises(AssertionError, match="may not be overwritten"):
        device.queue(2)


class Stream:
    """What the device answers when it is asked whether it is done."""

    def __init__(self, query: Callable[[], bool]) -> None:
        self.query = query


def test_a_device_that_fails_is_asked_for_its_error(monkeypatch: pytest.MonkeyPatch):
    def query() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    device = ScriptedDevice(num_slots=4)
    monkeypatch.setattr(graph, "_DOUBT_S", 0.01)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(query))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.queue(2, device.launch).next()


def test_a_device_that_is_done_without_a_record_is_a_mistake_of_ours(monkeypatch: pytest.MonkeyPatch):
    device = ScriptedDevice(num_slots=4)
    monkeypatch.setattr(graph, "_DOUBT_S", 0.01)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(lambda: True))
    with pytest.raises(AssertionError, match="ended and published nothing"):
        device.queue(2, device.launch).next()


def test_a_record_that_appears_while_the_device_is_asked_is_taken(monkeypatch: pytest.MonkeyPatch):
    device = ScriptedDevice(num_slots=4)

    def query() -> bool:
        device.finish()
        return True

    monkeypatch.setattr(graph, "_DOUBT_S", 0.01)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(query))
    assert device.queue(2, device.launch).next().token_ids == [0]


# --- models ---


@needs_gpu
@pytest.mark.parametrize("has_draft_law", [False, True], ids=["chosen drafts", "drawn drafts"])
@pytest.mark.parametrize("max_drafts", [0, 4, 15])
@pytest.mark.parametrize("kind", PARAMS)
def test_a_replayed_step_is_the_eager_one_bit_for_bit(model: CausalLM, kind: str, max_drafts: int, has_draft_law: bool):
    """Log probabilities and the whole state are compared with `torch.equal`."""
    if has_draft_law and not (max_drafts and kind == "everything"):
        pytest.skip("a law is compared where something is drafted and drawn")
    texts, logprobs, states = [], [], []
    for execution in (EAGER, CAPTURED, BEST):
        engine = make_engine(model, execution, max_drafts, has_draft_law=has_draft_law)
        # The second request replays what the first one captured.
        for prompt in (prompt_of(model, 1), prompt_of(model)):
            results = list(engine.generate(prompt, PARAMS[kind]))
        texts.append([token for result in results for token in result.token_ids])
        logprobs.append([logprob for result in results for logprob in result.logprobs])
        states.append(state_of(engine))
    assert len(texts[0]) == 40 and texts[0] == texts[1] == texts[2]
    assert logprobs[0] == logprobs[1] == logprobs[2]
    for captured in states[1:]:
        assert all(torch.equal(x, y) for x, y in zip(captured, states[0], strict=True))


@pytest.fixture
def _refuse_to_wait() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.usefixtures("_refuse_to_wait")
@pytest.mark.parametrize("max_drafts", [0, 4])
@pytest.mark.parametrize("kind", PARAMS)
def test_decoding_never_waits_for_the_device(model: CausalLM, kind: str, max_drafts: int):
    engine = make_engine(model, BEST, max_drafts)
    generation = engine.generate(prompt_of(model), PARAMS[kind])
    # The prompt is read and the step captured on the way to the first token.
    first = next(generation)
    torch.cuda.set_sync_debug_mode("error")
    rest = list(generation)
    torch.cuda.set_sync_debug_mode("default")
    assert sum(len(result.token_ids) for result in [first, *rest]) == 40


@needs_gpu
@pytest.mark.usefixtures("_refuse_to_wait")
@pytest.mark.parametrize("max_drafts", [0, 4])
@pytest.mark.parametrize("kind", PARAMS)
def test_an_eager_step_never_waits_for_the_device(model: CausalLM, kind: str, max_drafts: int):
    """What a step does is what is captured: a wait would show here first."""
    engine = make_engine(model, EAGER, max_drafts)
    next(engine.generate(prompt_of(model), PARAMS[kind]))
    step = engine.make_step(SamplingPlan.of(PARAMS[kind]))
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step()


@needs_gpu
def test_steps_are_enqueued_while_the_device_is_busy(model: CausalLM):
    engine = make_engine(model, BEST)
    generation = engine.generate(prompt_of(model), PARAMS["greedy"])
    next(generation)
    generation.close()
    torch.cuda.synchronize()
    replay = engine._graphs[SamplingPlan.of(PARAMS["greedy"]), True].replay
    replay()
    torch.cuda.synchronize()
    is_done = torch.cuda.Event()
    started_s = time.perf_counter()
    # At least 0.2 s at any clock.
    torch.cuda._sleep(400_000_000)
    is_done.record()
    for _ in range(4):
        replay()
    took_s = time.perf_counter() - started_s
    assert not is_done.query(), f"enqueuing four steps took {took_s:.3f} s and waited for the device"
    torch.cuda.synchronize()


@needs_gpu
@pytest.mark.parametrize("max_drafts", [0, 4])
def test_a_cancelled_request_leaves_a_state_that_belongs_to_its_tokens(model: CausalLM, max_drafts: int):
    """Steps are ahead of the host when it gives up; what they did is what `unread` tokens say, and nothing else."""
    engine = make_engine(model, BEST, max_drafts)
    prompt = prompt_of(model)
    want = [t for r in engine.generate(prompt, PARAMS["greedy"]) for t in r.token_ids]
    generation = engine.generate(prompt, PARAMS["greedy"])
    for _ in range(5):
        next(generation)
    unread: list[int] = []
    drain = generation._drain

    def note() -> list:
        records = drain()
        unread.extend(token for record in records for token in record.token_ids)
        return records

    generation._drain = note
    generation.close()
    torch.cuda.synchronize()
    committed = generation.token_ids + unread
    assert committed == want[: len(committed)]
    assert int(engine.runner.buffers.num_left) == 0
    context_len = len(prompt) - 1 + len(committed)
    assert int(engine.runner.cache.context_len) == context_len
    kept = state_of(engine)
    # Uncancelled, in as many tokens.
    again = make_engine(model, EAGER, max_drafts)
    list(again.generate(prompt, SamplingParams(max_tokens=len(committed), seed=5)))
    for x, y in zip(kept[1:], state_of(again)[1:], strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=0.05, atol=0.05)
    for _ in range(2):
        engine._graphs[SamplingPlan.of(PARAMS["greedy"]), True].replay()
    assert all(torch.equal(x, y) for x, y in zip(state_of(engine), kept, strict=True)), "a step behind the end wrote"


@needs_gpu
def test_the_end_of_an_answer_is_seen_on_the_device(model: CausalLM):
    engine = make_engine(model, BEST)
    prompt = prompt_of(model)
    # A miniature's likeliest token may be one and the same.
    law = {"max_tokens": 30, "temperature": 2.0, "seed": 7, "repetition_penalty": 100.0}
    text = [t for r in engine.generate(prompt, SamplingParams(**law)) for t in r.token_ids]
    stop = next(t for i, t in enumerate(text) if i >= 4 and t not in text[:i])
    results = list(engine.generate(prompt, SamplingParams(**law, stop_token_ids=(stop,))))
    assert [t for r in results for t in r.token_ids] == text[: text.index(stop) + 1]
    assert results[-1].finish_reason == "stop"
    assert int(engine.runner.buffers.finish_code) == FinishCode.STOP
    # Steps that were enqueued ahead did nothing.
    assert int(engine.runner.cache.context_len) == len(prompt) + text.index(stop)


@needs_gpu
def test_kernels_of_a_captured_step_start_before_the_one_before_them_ends(model: CausalLM):
    runtime = pytest.importorskip("cuda.bindings.runtime")

    def count_edges(execution: Execution) -> tuple[int, int]:
        """Edges of the captured step, and of them the programmatic ones."""
        engine = make_engine(model, execution)
        plan = SamplingPlan.of(PARAMS["greedy"])
        engine.prepare(plan)
        raw = engine._graphs[plan, True].raw_graph
        status, *_, count = runtime.cudaGraphGetEdges(raw)
        assert int(status) == 0 and count > 0
        status, _, _, edges, count = runtime.cudaGraphGetEdges(raw, count)
        assert int(status) == 0
        programmatic = runtime.cudaGraphDependencyType.cudaGraphDependencyTypeProgrammatic
        return count, sum(edge.type == programmatic for edge in edges)

    num_edges, num_programmatic = count_edges(BEST)
    # Embedding, norms of heads and what ends a step are PyTorch's own: as many at 28 layers as at 3.
    num_plain = num_edges - num_programmatic
    norms = 2 * model.config.num_hidden_layers * getattr(model, "has_qk_norm", False)
    assert num_plain <= 15 + norms, f"{num_programmatic} of {num_edges} edges let a kernel start early"
    assert count_edges(CAPTURED)[1] == 0


def test_a_stop_that_comes_within_a_step_leaves_a_state_that_belongs_to_its_tokens(folder: Path):
    """On a CPU, with the steps that a GPU would have ahead; a recurrent state cannot be cut back."""
    path = write_checkpoint(folder / "stopped", "bailing_moe_v3", seed=3)
    engine = make_engine(load_model(path, dtype=torch.float32), EAGER)
    prompt = prompt_of(engine.runner.model)
    generation = engine.generate(prompt, SamplingParams(max_tokens=9))
    token_ids = [*next(generation).token_ids]
    steps = generation._steps
    assert steps is not None
    # Raised while a step is under way: its forward pass has run, its end has not.
    runner, forward = engine.runner, engine.runner.forward

    def forward_and_stop(num_rows: int) -> torch.Tensor:
        result = forward(num_rows)
        runner.buffers.is_stop_requested.fill_(True)
        return result

    runner.forward = forward_and_stop
    for _ in range(3):
        token_ids += steps.next().token_ids
    model, cache = runner.model, runner.model.make_cache(100)
    sequence = torch.tensor([*prompt, *token_ids][:-1])
    model.forward(sequence, cache, StepKind.PREFILL)
    assert int(runner.cache.context_len) == len(sequence)
    torch.testing.assert_close(runner.cache.recurrent.state, cache.recurrent.state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(runner.cache.recurrent.conv, cache.recurrent.conv, rtol=1e-4, atol=1e-4)


def test_what_is_alive_is_taken_out_of_the_collectors_sight():
    graph.freeze_garbage()
    try:
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_what_is_garbage_stays_until_a_capture_is_over(was_enabled: bool):
    (gc.enable if was_enabled else gc.disable)()
    try:
        gc.collect()
        garbage = make_garbage(None)
        with graph.without_collection():
            fill_the_heap()
            assert garbage() is not None
        assert gc.isenabled() == was_enabled
        fill_the_heap()
        assert (garbage() is None) == was_enabled
    finally:
        gc.enable()


@needs_gpu
def test_a_graph_that_is_garbage_does_not_break_off_the_capture_of_another():
    number = torch.zeros(1, device="cuda")
    kept = []

    def step() -> None:
        number.add_(1)
        if torch.cuda.is_current_stream_capturing():
            fill_the_heap()
            kept.append(garbage() is not None)

    unused = graph.StepGraph(lambda: number.zero_())
    gc.collect()
    garbage = make_garbage(unused)
    del unused
    again = graph.StepGraph(step)
    number.zero_()
    again.replay()
    assert kept == [True] and float(number) == 1


class Garbage:
    """What holds itself, and something else."""

    def __init__(self, held: object) -> None:
        self.itself, self.held = self, held


def make_garbage(held: object) -> weakref.ref[Garbage]:
    """Let go of what only the collector frees."""
    return weakref.ref(Garbage(held))


def fill_the_heap() -> None:
    """Have the collector run, unless it is off."""
    for _ in range(10_000):
        Garbage(None)
