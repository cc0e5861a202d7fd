"""Steps in a loop on the device: the same answers as step by step, one launch for many steps, an end in time."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from soloist.engine import Engine
from soloist.errors import UnsupportedError, UsageError
from soloist.models.causal_lm import CausalLM
from soloist.runtime import device_loop
from soloist.runtime.buffers import SamplingPlan
from soloist.runtime.device_loop import check_device_loop
from soloist.runtime.graph import StepQueue
from soloist.runtime.ring import TokenRing
from soloist.sampling_params import SamplingParams
from soloist.spec.costs import StepCosts
from tests.runtime.gpu_models import BEST, LOOPED, PARAMS, make_engine, needs_gpu, prompt_of, state_of
from tests.scripted import TableModel
from tests.scripted import make_engine as make_plain_engine

SOURCE = Path(device_loop.__file__).parent / "cuda" / "while_setter.cu"


def i32(x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


class ScriptedLoop:
    """A device that runs `steps` steps in each launch, the last launch fewer; record i holds token i."""

    def __init__(self, steps: int, last_steps: int, num_launches: int) -> None:
        self.ring = TokenRing(num_slots=2 * steps + 1, max_width=1, num_tokens=1000)
        self.sizes = [steps] * (num_launches - 1) + [last_steps]
        self.num_launched = self.num_steps = 0

    def launch(self) -> None:
        # Behind the end of an answer a launch runs one step that commits nothing.
        size = self.sizes[self.num_launched] if self.num_launched < len(self.sizes) else 1
        for _ in range(size):
            is_over = self.num_launched >= len(self.sizes)
            self.ring.publish(torch.tensor([self.num_steps]), i32(not is_over), i32(0), i32(0), i32(0), None)
            self.num_steps += 1
        self.num_launched += 1

    def query(self) -> bool:
        return True


def test_the_next_loop_is_launched_when_the_one_before_it_begins(monkeypatch: pytest.MonkeyPatch):
    device = ScriptedLoop(steps=5, last_steps=3, num_launches=4)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device)
    queue = StepQueue(device.launch, device.ring, run_ahead=5, num_top=None, steps_per_launch=5)
    for i in range(18):
        assert queue.next().token_ids == [i]
        assert device.num_launched == 2 + i // 5
    # The launch behind the end has run one step, and the queue is empty then.
    assert [record.token_ids for record in queue.drain()] == [[]]
    assert queue.drain() == []


def test_what_a_loop_has_run_is_taken_when_it_has_ended(monkeypatch: pytest.MonkeyPatch):
    device = ScriptedLoop(steps=5, last_steps=2, num_launches=1)
    answers = iter([False, False, True])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device)
    monkeypatch.setattr(device, "query", lambda: next(answers))
    queue = StepQueue(device.launch, device.ring, run_ahead=0, num_top=None, steps_per_launch=5)
    assert queue.next().token_ids == [0]
    assert [record.token_ids for record in queue.drain()] == [[1]]
    assert next(answers, None) is None, "the device was not asked until it was done"


def test_a_ring_that_two_loops_would_overrun_is_refused():
    ring = TokenRing(num_slots=10, max_width=1, num_tokens=10)
    with pytest.raises(AssertionError, match="may not be overwritten"):
        StepQueue(lambda: None, ring, run_ahead=5, num_top=None, steps_per_launch=5)


def test_devices_without_a_loop_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UnsupportedError, match="needs an NVIDIA GPU, not cpu: leave --device-loop out"):
        check_device_loop(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(UnsupportedError, match=r"capability 9\.x and 10\.x, this one has 8\.9"):
        check_device_loop(torch.device("cuda", 0))


def test_a_grammar_is_refused_beside_a_loop():
    model = TableModel(7, lambda positions, input_ids: torch.zeros(len(positions), 7), max_context_len=20)
    engine = make_plain_engine(model)
    engine.execution = LOOPED
    with pytest.raises(UsageError, match=r"decided on the host between steps.*without --device-loop"):
        engine.generate([1, 2], SamplingParams(), constraint=object())


def disassemble(cubin: Path) -> str:
    """Give the instructions of a cubin, without where it was built."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    return subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler")
@pytest.mark.parametrize("arch", [90, 100])
def test_the_machine_code_is_that_of_the_source(arch: int, tmp_path: Path):
    pytest.importorskip("triton")
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    if "V13.0.88" not in version:
        pytest.skip("another compiler gives other code")
    # As the source says.
    name = f"-arch=sm_{arch}"
    for words in (
        ["nvcc", name, "-rdc=true", "-cubin", "-o", tmp_path / "setter.cubin", SOURCE.name],
        ["nvcc", name, "-dlink", "-cubin", "-o", tmp_path / "linked.cubin", tmp_path / "setter.cubin", "-lcudadevrt"],
    ):
        subprocess.run(words, cwd=SOURCE.parent, check=True)
    built = disassemble(tmp_path / "linked.cubin")
    assert "set_while" in built
    assert built == disassemble(SOURCE.parent / f"while_setter_sm{arch}.cubin")


# --- on a GPU ---


def answer(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[torch.Tensor]]:
    results = list(engine.generate(prompt, params))
    return [token for result in results for token in result.token_ids], state_of(engine)


@needs_gpu
@pytest.mark.parametrize("max_drafts", [0, 4])
@pytest.mark.parametrize("kind", PARAMS)
def test_a_looped_answer_is_the_one_step_by_step_bit_for_bit(model: CausalLM, kind: str, max_drafts: int):
    engines = [make_engine(model, execution, max_drafts) for execution in (BEST, LOOPED)]
    for seed in (1, 0):
        (want, want_state), (got, got_state) = (answer(e, prompt_of(model, seed), PARAMS[kind]) for e in engines)
        assert got == want and len(want) > 1
        assert all(torch.equal(x, y) for x, y in zip(got_state, want_state, strict=True))


@needs_gpu
def test_a_long_answer_takes_few_launches(model: CausalLM):
    params = SamplingParams(max_tokens=150)
    want, _ = answer(make_engine(model, BEST), prompt_of(model), params)
    engine = make_engine(model, LOOPED)
    engine.prepare(SamplingPlan.of(params))
    (loop,) = engine._graphs.values()
    launches = []
    replay = loop.replay
    loop.replay = lambda: launches.append(replay())
    got, _ = answer(engine, prompt_of(model), params)
    # 64 steps each, and one behind the end at most.
    assert got == want and len(launches) in (3, 4)


@needs_gpu
@pytest.mark.parametrize("max_drafts", [0, 4])
def test_a_loop_ends_with_the_step_in_which_the_host_asks(model: CausalLM, max_drafts: int):
    engine = make_engine(model, LOOPED, max_drafts)
    prompt, params = prompt_of(model), SamplingParams(max_tokens=160, seed=5)
    want, _ = answer(engine, prompt, params)
    generation = engine.generate(prompt, params)
    for _ in range(3):
        next(generation)
    unread = []
    drain = generation._drain

    def drain_and_look() -> list:
        unread.extend(drain())
        # Behind it only the buffers are put to an end.
        assert torch.cuda.current_stream().query(), "the loop goes on behind a request that was closed"
        return []

    generation._drain = drain_and_look
    generation.close()
    committed = generation.token_ids + [token for record in unread for token in record.token_ids]
    assert committed == want[: len(committed)]
    assert int(engine.runner.cache.context_len) == len(prompt) - 1 + len(committed)
    # The engine answers on.
    assert answer(engine, prompt, params)[0] == want


@needs_gpu
def test_a_switch_decides_between_loops(model: CausalLM):
    """Drafts of a random law lose, so they are turned off behind the first window, in a loop as without."""
    texts, ends = [], []
    for execution in (BEST, LOOPED):
        engine = make_engine(model, execution, 4)
        engine.adapt_width(StepCosts(plain_ms=1.0, step_ms=(1.5, 1.6, 1.7, 1.8, 1.9)))
        generation = engine.generate(prompt_of(model), SamplingParams(max_tokens=120, seed=5))
        texts.append([token for result in generation for token in result.token_ids])
        ends.append(generation.stats.drafting_off_after)
    assert len(texts[0]) == len(texts[1]) == 120
    assert all(end is not None for end in ends)
