"""Ranks as the world sees them: one model, one answer; and what happens when one of them goes, or never fits."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from soloist import LLM, SamplingParams, loading
from soloist.engine import Engine
from soloist.errors import CheckpointError, ContextLengthError, RankLostError, UnsupportedError, UsageError
from soloist.kernels.mailboxes import num_words, view_mailboxes
from soloist.prefix import PrefixStore
from soloist.runtime import comm, rank_processes
from soloist.runtime.comm import Leader
from soloist.runtime.graph import Execution
from tests.tiny_model import write_tiny_model

PROMPT = list(range(3, 103)) * 3
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_model(folder)


def load(folder: Path, size: int = 2, **options: Any) -> LLM:
    return LLM(folder, dtype="float32", num_threads=1, tensor_parallel_size=size, max_context_len=512, **options)


def leader_of(llm: LLM) -> Leader:
    ranks = llm.engine.ranks
    assert isinstance(ranks, Leader)
    return ranks


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    llm = load(folder, draft="ngram")
    yield llm
    leader_of(llm).close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_ranks_give_one_answer_whatever_ended_the_last_one_and_sleep_between(folder: Path, llm: LLM) -> None:
    wanted = load(folder, 1).generate(PROMPT, GREEDY)
    assert llm.generate(PROMPT, GREEDY).token_ids == wanted.token_ids

    # Left in the middle of an answer, by a stop string, a close and a cancel.
    text = wanted.text[:3]
    stopped = llm.generate(PROMPT, SamplingParams(max_tokens=16, ignore_eos=True, stop=(text[1:],)))
    assert stopped.finish_reason == "stop"
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    stream.close()
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    stream.cancel()
    assert stream.completion.finish_reason == "cancelled"
    # And while the prompt is read.
    stream = llm.stream(PROMPT, GREEDY, on_prefill=lambda done, total: stream.cancel() if done else None)
    assert stream.completion.finish_reason == "cancelled"
    assert llm.generate(PROMPT, GREEDY).token_ids == wanted.token_ids

    sampled = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8, logprobs=2)
    assert len(llm.generate(PROMPT, sampled).token_ids) == 16

    pid = leader_of(llm).process_ids[0]
    before_s = cpu_seconds(pid)
    time.sleep(1.5)
    assert cpu_seconds(pid) - before_s < 0.015 + 1 / os.sysconf("SC_CLK_TCK")


class EvenTokens:
    """Lets an answer have even ids only; counts what it is told."""

    def __init__(self, num_tokens: int) -> None:
        self.mask = torch.arange(num_tokens) % 2 == 0
        self.token_ids: list[int] = []

    def num_legal(self, draft_tokens: list[int]) -> int:
        return next((i for i, token in enumerate(draft_tokens) if token % 2), len(draft_tokens))

    def allowed(self, draft_tokens: list[int]) -> torch.Tensor:
        return self.mask.expand(1 + len(draft_tokens), -1)

    def advance(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids


def test_a_constraint_and_kept_prefixes_are_those_of_one_rank(folder: Path, llm: LLM) -> None:
    alone = load(folder, 1, draft="ngram")
    answers = []
    for model in (alone, llm):
        model.engine.prefixes = PrefixStore(host_bytes=1 << 22)
        constraint = EvenTokens(model.engine.runner.buffers.num_tokens)
        found = [[token for r in model.engine.generate(PROMPT, GREEDY, constraint=constraint) for token in r.token_ids]]
        assert found[0] == constraint.token_ids and all(token % 2 == 0 for token in found[0])
        # Goes on behind what was kept, leaves it, and comes back.
        for prompt in (PROMPT + found[0] + [5, 6], PROMPT[:150] + [7] * 40, PROMPT + found[0] + [5, 6, 7, 8]):
            generation = model.engine.generate(prompt, GREEDY)
            found.append([token for result in generation for token in result.token_ids])
            found.append([generation.reuse.num_tokens])
        scored = model.engine.generate(PROMPT[:20], GREEDY, prompt_logprobs=0)
        for _ in scored:
            pass
        found.append([logprob.token_id for logprob in scored.prompt_logprobs])
        answers.append(found)
    assert answers[0] == answers[1]
    assert answers[0][2] > [300] and answers[0][4] > [140]


def test_ranks_choose_widths_alike_by_what_steps_cost_rank_0(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = load(folder, 1).generate(PROMPT, GREEDY).token_ids
    tables = tmp_path / "soloist" / "step-costs"
    for _ in range(2):
        # Measured the first time, read by rank 0 the second.
        llm = load(folder, draft="ngram", adaptive_width=True)
        assert len(list(tables.iterdir())) == 1
        assert llm.engine.width_rule is not None and llm.engine.switch is not None
        # Long enough for the switch to decide, without a seed too, where one rank would look at the clock.
        long = SamplingParams(max_tokens=120, ignore_eos=True)
        assert llm.generate(PROMPT, long).token_ids[: len(wanted)] == wanted
        sampled = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.9)
        completion = llm.generate(PROMPT, sampled)
        assert len(completion.token_ids) == 60 and "by table" in completion.stats.policy
        leader_of(llm).close()


def test_other_ranks_can_follow_those_that_were_forgotten(folder: Path) -> None:
    first = load(folder)
    wanted = first.generate(PROMPT, GREEDY).token_ids
    with pytest.raises(UsageError, match="one model at a time"):
        load(folder)
    pid = leader_of(first).process_ids[0]
    del first
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()
    second = load(folder)
    assert second.generate(PROMPT, GREEDY).token_ids == wanted
    leader_of(second).close()


def test_a_rank_that_dies_in_a_request_ends_it_with_a_message(llm: LLM) -> None:
    def kill(done: int, total: int) -> None:
        if done:
            os.kill(leader_of(llm).process_ids[0], signal.SIGKILL)

    started_s = time.monotonic()
    with pytest.raises(RankLostError, match="rank 1 of 2 was killed by signal 9"):
        llm.generate(PROMPT, GREEDY, on_prefill=kill)
    assert time.monotonic() - started_s < 5
    with pytest.raises(RankLostError, match="load it again"):
        llm.generate(PROMPT, GREEDY)


def test_a_rank_that_dies_between_requests_is_missed_at_once(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    os.kill(leader_of(llm).process_ids[0], signal.SIGTERM)
    end_s = time.monotonic() + 5
    while leader_of(llm).loss is None:
        assert time.monotonic() < end_s
        time.sleep(0.02)
    # Whoever asks for the loss, or for an answer, is told; nobody else.
    with pytest.raises(RankLostError, match="rank 1 of 2 was killed by signal 15"):
        llm.generate(PROMPT, GREEDY)
    assert "was killed" not in capfd.readouterr().err


def test_a_slow_reader_of_an_answer_does_not_end_with_a_lost_rank(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "_GRACE_S", 0.1)
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    os.kill(leader_of(llm).process_ids[0], signal.SIGKILL)
    time.sleep(1)
    with pytest.raises(RankLostError, match="was killed by signal 9"):
        list(stream)


def test_a_rank_that_is_stopped_is_lost(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "_SILENT_S", 3.0)

    def stop(done: int, total: int) -> None:
        if done:
            os.kill(leader_of(llm).process_ids[0], signal.SIGSTOP)

    started_s = time.monotonic()
    with pytest.raises(RankLostError, match="rank 1 of 2 has given no sign of life for 3 s"):
        llm.generate(PROMPT, GREEDY, on_prefill=stop)
    assert time.monotonic() - started_s < 10


def test_ranks_that_do_not_get_on_are_lost(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "_STALLED_S", 2.0)
    # Never sent: rank 1 waits for the word, and rank 0 in the exchange.
    monkeypatch.setattr(leader_of(llm), "agree", lambda choice: choice)
    with pytest.raises(RankLostError, match="rank 1 of 2 and rank 0 have waited for each other for 2 s"):
        llm.generate(PROMPT, GREEDY)


def mislead(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Have the other ranks load something else."""

    class Misled(Leader):
        def __init__(self, size: int, device: Any, program: str, given: Any) -> None:
            super().__init__(size, device, program, replace(given, **options))

    monkeypatch.setattr("soloist.loading.Leader", Misled)


def alter(folder: Path, name: str, change: Callable[[torch.Tensor], Any]) -> None:
    """Change one tensor of a checkpoint."""
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            change(tensors[name])
            save_file(tensors, shard)


DOWN, NORM = "layers.1.mlp.down_proj", "layers.1.input_layernorm"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        # One bit of one value; what every rank holds whole, in another order; what each holds a part of.
        (NORM, lambda x: x.view(torch.int16)[7].bitwise_xor_(1)),
        (NORM, lambda x: x.copy_(x.flip(0).clone())),
        (DOWN, lambda x: x.zero_()),
    ],
    ids=["a bit", "an order", "a part"],
)
def test_a_rank_that_has_another_model_is_found_before_it_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[torch.Tensor], Any]
) -> None:
    other = write_tiny_model(tmp_path / "other")
    alter(other, f"model.{name}.weight", change)
    mislead(monkeypatch, model=str(other))
    monkeypatch.setattr("soloist.loading.load_model", None)
    with pytest.raises(CheckpointError, match=rf"other.* than rank 0: 1 of .*model\.{name}"):
        load(folder)


def test_a_rank_that_has_another_draft_is_found(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = [write_tiny_model(tmp_path / name / "draft") for name in ("one", "other")]
    alter(drafts[1], f"model.{DOWN}.weight", lambda x: x.zero_())
    mislead(monkeypatch, draft=str(drafts[1]))
    with pytest.raises(CheckpointError, match=rf"1 of .*model\.{DOWN}.weight of the draft"):
        load(folder, draft=str(drafts[0]))


@pytest.mark.parametrize(
    ("options", "name"),
    [({"max_context_len": 500}, "the context"), ({"draft_width": 3}, "the draft")],
)
def test_a_rank_that_was_given_something_else_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], name: str
) -> None:
    mislead(monkeypatch, **options)
    with pytest.raises(CheckpointError, match=name):
        load(folder, draft="ngram", draft_width=4)


def test_an_error_of_another_rank_is_raised_here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mislead(monkeypatch, model=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"no config\.json|tokenizer"):
        load(folder)


def test_an_error_behind_the_weights_of_another_rank_is_raised_before_anything_is_exchanged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Found once its model is loaded; to measure what steps cost would be an exchange.
    mislead(monkeypatch, max_context_len=100_000)
    with pytest.raises(ContextLengthError, match="100000"):
        load(folder, draft="ngram", adaptive_width=True)
    assert "Traceback" not in capfd.readouterr().err


def test_ranks_meet_before_they_exchange(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def note(name: str, owner: Any, attribute: str) -> None:
        call = getattr(owner, attribute)

        def noted(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, noted)

    note("meet", Leader, "meet")
    note("load", loading, "load_model")
    note("compile", Engine, "compile_ahead")
    note("prepare", Engine, "prepare")
    llm = load(folder)
    leader_of(llm).close()
    assert done == ["meet", "load", "compile", "meet", "prepare", "meet"]


def test_what_steps_of_ranks_cannot_be_is_refused_before_a_rank_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("soloist.loading.Leader", None)
    for switch in ({"has_device_loop": True}, {"has_bf16_head": False}):
        execution = Execution(is_captured=True, run_ahead=0, has_pdl=True, **switch)
        with pytest.raises(UsageError, match="no device loop, and no head in fp32"):
            load(folder, execution=execution)


class BrokenGroup:
    def abort(self) -> None:
        raise RuntimeError("CUDA error")


def test_exchanges_with_ranks_that_are_gone_are_ended_whatever_the_device_says() -> None:
    words = torch.full((num_words(2, max_tokens=1, hidden_size=8),), -1, dtype=torch.int32)
    mailboxes = view_mailboxes((words, words), rank=0, max_tokens=1, hidden_size=8, timeout_s=1)
    group: Any = SimpleNamespace(mailboxes=mailboxes, process_group=BrokenGroup())
    rank_processes.end_exchanges(group)
    assert int(mailboxes.has_failed) == 1


def test_multicast_is_off_before_gpus_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(comm.dist, "init_process_group", lambda *_, **__: found.update(os.environ))
    comm._join(0, 2, "tcp://127.0.0.1:1", torch.device("cuda", 0))
    assert found["NCCL_NVLS_ENABLE"] == "0" and found["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


HUNG = """
import sys, time, torch
from soloist.prefix import PrefixStore
from soloist.runtime.comm import Leader
leader = Leader(2, torch.device("cpu"), "from soloist.runtime.comm import Follower; Follower()", None)
# In an exchange that nobody ends.
with leader.at_work():
    time.sleep(60)
"""


def test_rank_0_ends_where_a_lost_rank_leaves_it_hanging(tmp_path: Path) -> None:
    started_s = time.monotonic()
    # Where they meet is left behind: they never have.
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=50, env=environment)
    assert run.returncode == 1 and "rank 1 of 2 ended with exit code 0" in run.stderr
    assert time.monotonic() - started_s < 40


KILLED = """
import os, signal, torch
from soloist.runtime import comm
# The first thing behind their start.
comm.RankProcesses.receive = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
comm.Leader(2, torch.device("cpu"), "from soloist.runtime.comm import Follower; Follower()", None)
"""


def test_ranks_that_rank_0_leaves_while_they_start_end_in_silence_and_leave_no_folder(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    # Their output is this one's: it ends with the last of them.
    run = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60, env=environment)
    assert run.returncode == -signal.SIGKILL
    assert not run.stderr
    assert not list(tmp_path.iterdir())


INTERRUPTED = """
import os, signal, sys
from soloist import cli
from soloist.cli import answer
from soloist.runtime import comm

start = comm.Leader.__init__
def announce(self, *arguments):
    start(self, *arguments)
    print(*self.process_ids, sep="\\n", file=sys.stderr)
comm.Leader.__init__ = announce

class Bar(answer.Bar):
    def __call__(self, done, total):
        if done and self._title == "reading the prompt":
            for _ in range(PRESSES):
                os.kill(os.getpid(), signal.SIGINT)
answer.Bar = Bar
words = ["-m", sys.argv[1], "--tensor-parallel-size", "2", "-t", "1", "-c", "512", "--raw", "x y " * 80]
sys.exit(cli.main(["run", *words]))
"""


@pytest.mark.parametrize("num_presses", [1, 2])
def test_ctrl_c_while_the_prompt_is_read_leaves_no_process(folder: Path, num_presses: int) -> None:
    program = INTERRUPTED.replace("PRESSES", str(num_presses))
    run = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 130, run.stderr
    pids = [int(line) for line in run.stderr.splitlines() if line.isdecimal()]
    assert len(pids) == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "was killed" not in run.stderr


WITH_RANKS = """
import os, signal, sys, threading, time
from soloist import cli
from soloist.cli import answer
from soloist.runtime import comm, rank_processes

words = ["run", "-m", sys.argv[1], "--tensor-parallel-size", "2", "-t", "1", "-c", "512", "--raw", "x y " * 80]

class Announced(comm.Leader):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.num_meetings = 0
        print(*self.process_ids, sep="\\n", file=sys.stderr, flush=True)

    def meet(self, identity):
        self.num_meetings += 1
        on_meeting(self)
        super().meet(identity)

from soloist import loading
loading.Leader = Announced

class Bar(answer.Bar):
    def __call__(self, done, total):
        if done and self._title == "reading the prompt":
            on_prompt()
answer.Bar = Bar
on_prompt = lambda: None
on_meeting = lambda leader: None
"""


def start(folder: Path, tmp_path: Path, program: str) -> tuple[subprocess.Popen[str], int]:
    """Run `soloist run` on two ranks with something done on the way; gives the process and the id of rank 1."""
    program = WITH_RANKS + program + "\nsys.exit(cli.main(words))"
    run = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert run.stderr is not None
    return run, int(next(line for line in run.stderr if line.strip().isdecimal()))


def is_gone(pid: int, within_s: float) -> bool:
    end_s = time.monotonic() + within_s
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


def test_a_second_ctrl_c_ends_what_hangs(folder: Path, tmp_path: Path) -> None:
    run, pid = start(
        folder,
        tmp_path,
        """
def press():
    for _ in range(2):
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)

def on_prompt():
    os.kill(comm_leader.process_ids[0], signal.SIGSTOP)
    threading.Thread(target=press).start()

def on_meeting(leader):
    global comm_leader
    comm_leader = leader
""",
    )
    started_s = time.monotonic()
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors
    assert time.monotonic() - started_s < 40
    assert is_gone(pid, 2)


def test_a_loss_while_loading_is_said_once(folder: Path, tmp_path: Path) -> None:
    run, _ = start(
        folder,
        tmp_path,
        """
def on_meeting(leader):
    if leader.num_meetings == 2:
        os.kill(leader.process_ids[0], signal.SIGKILL)
        time.sleep(1)
""",
    )
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1 and errors.count("rank 1 of 2 was killed by signal 9") == 1, errors


def test_ranks_end_in_silence_behind_rank_0_and_leave_no_folder(folder: Path, tmp_path: Path) -> None:
    run, pid = start(folder, tmp_path, "on_prompt = lambda: os.kill(os.getpid(), signal.SIGKILL)")
    _, errors = run.communicate(timeout=60)
    assert run.returncode == -signal.SIGKILL
    assert is_gone(pid, 4)
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_what_ranks_cannot_share_is_refused_with_what_they_can_before_one_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("soloist.loading.Leader", None)
    with pytest.raises(UsageError, match="allowed: 1, 2, 4, 8"):
        load(folder, 3)
    with pytest.raises(UnsupportedError, match="widths of 6, which 4 ranks cannot share: allowed are 1, 2"):
        load(folder, 4)
