"""Engines of one process step on a GPU one after the other; on several devices each by itself."""

import contextlib
import threading
import time

import pytest
import torch

from soloist.engine import Engine
from soloist.errors import UsageError
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.runtime.graph import Execution
from soloist.runtime.turn import Turn, turn_of
from soloist.sampling_params import SamplingParams
from tests.miniature import write_checkpoint
from tests.runtime.gpu_models import BEST, EAGER, make_engine, needs_gpu, prompt_of

CPU, GPU, OTHER_GPU = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
PARAMS = SamplingParams(max_tokens=3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load_model(write_checkpoint(tmp_path_factory.mktemp("turn") / "llama", "llama", seed=3), dtype=torch.float32)


@pytest.fixture
def engines(llama: CausalLM) -> tuple[Engine, Engine]:
    """Two engines that share a turn, as on a GPU, of a CPU."""
    first, second = (make_engine(llama, EAGER) for _ in range(2))
    second._turn = first._turn
    return first, second


def test_engines_of_a_gpu_share_a_turn_and_others_do_not():
    assert turn_of(GPU) is turn_of(torch.device("cuda:0"))
    assert turn_of(GPU) is not turn_of(OTHER_GPU)
    assert turn_of(CPU) is not turn_of(CPU)


def test_threads_that_ask_at_once_get_one_turn(monkeypatch: pytest.MonkeyPatch):
    inside, go = threading.Event(), threading.Event()
    make, found = Turn.__init__, []

    def slow(self: Turn, device: torch.device) -> None:
        inside.set()
        go.wait(10)
        make(self, device)

    monkeypatch.setattr(Turn, "__init__", slow)
    device = torch.device("cuda", 97)
    threads = [threading.Thread(target=lambda: found.append(turn_of(device))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert inside.wait(10)
    go.set()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(map(id, found))) == 1


def test_while_one_engine_answers_another_on_its_gpu_refuses_to(engines: tuple[Engine, Engine]):
    first, second = engines
    answering = first.generate([1, 2], PARAMS)
    next(answering)
    with pytest.raises(UsageError, match=r"another model of this process is at work on cpu.*finish or close"):
        next(second.generate([1, 2], PARAMS))
    with pytest.raises(UsageError, match="another model"), second.alone():
        raise AssertionError("it was let in")
    # Its own request is named as such.
    with pytest.raises(UsageError, match="the model is answering another request"):
        next(first.generate([1, 2], PARAMS))
    answering.close()
    assert len([t for r in second.generate([1, 2], PARAMS) for t in r.token_ids]) == 3
    # And the other way round.
    with second.alone(), pytest.raises(UsageError, match="another model"):
        next(first.generate([1, 2], PARAMS))
    assert len(list(first.generate([1, 2], PARAMS))) == 3


def test_a_request_that_breaks_off_lets_the_gpu_go(engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch):
    first, second = engines

    def break_off(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(first.runner, "forward", break_off)
    with pytest.raises(RuntimeError, match="broken"):
        next(first.generate([1, 2], PARAMS))
    # What winds a request up may break as well.
    monkeypatch.setattr(first.runner.buffers.__class__, "end", break_off)
    with pytest.raises(RuntimeError, match="broken"):
        next(first.generate([1, 2], PARAMS))
    monkeypatch.undo()
    assert len(list(second.generate([1, 2], PARAMS))) == 3
    assert len(list(first.generate([1, 2], PARAMS))) == 3


def test_who_takes_a_gpu_on_another_stream_runs_behind_who_had_it(monkeypatch: pytest.MonkeyPatch):
    done: list[tuple[str, object]] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def record_event(self) -> str:
            return f"event of {self.name}"

        def wait_event(self, event: str) -> None:
            done.append((self.name, event))

    streams = iter("abcd")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(f"{device} {next(streams)}"))
    turn = Turn(GPU)
    # Nobody had it.
    assert turn.take() and not turn.take() and done == []
    turn.give_back()
    assert turn.take() and done == [("cuda:0 b", "event of cuda:0 a")]
    turn.give_back()
    assert turn.take() and done[1:] == [("cuda:0 d", "event of cuda:0 c")]


@needs_gpu
@pytest.mark.parametrize("execution", [EAGER, BEST], ids=["eager", "captured"])
def test_threads_with_an_engine_each_on_one_gpu_answer_as_one_alone_does(model: CausalLM, execution: Execution):
    """Each on a stream of its own; who is refused asks again. A step's experts wait until all programs are there."""
    prompts = [prompt_of(model, seed) for seed in range(6)]
    greedy = SamplingParams(max_tokens=24)

    def answer(engine: Engine, prompt: list[int]) -> list[int]:
        while True:
            with contextlib.suppress(UsageError):
                return [t for r in engine.generate(prompt, greedy) for t in r.token_ids]
            time.sleep(1e-3)

    alone = make_engine(model, execution)
    expected = [answer(alone, prompt) for prompt in prompts]
    torch.cuda.synchronize()
    found: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            engine = make_engine(model, execution)
            found[number] = [answer(engine, prompt) for prompt in prompts]

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {0: expected, 1: expected}
