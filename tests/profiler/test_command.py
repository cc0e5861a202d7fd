"""Programs run in process as under `python`: arguments, exit codes and errors are theirs; recordings come and go."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from soloist.cli import main
from soloist.errors import UsageError
from soloist.profiler import command, recording
from soloist.profiler.command import find_program, run_program
from soloist.profiler.kineto import parse_trace


def write(folder: Path, text: str, name: str = "program.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "exit_code"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit", 0),
        ("raise SystemExit('bad news')", 1),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_the_programs_exit_code_is_passed_on(
    text: str, exit_code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["profile", "--", "python3", str(write(tmp_path, text))]) == exit_code
    err = capsys.readouterr().err
    assert "used no GPU" in err
    assert ("ZeroDivisionError" in err, "bad news" in err) == ("/" in text, "bad" in text)


def test_conditions_that_nothing_was_recorded_for_are_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "page.html"
    words = ["profile", "--json", "--html", str(page), "--fail-on", "syncs>0", "--", "python", "-c"]
    assert main([*words, "pass"]) == 4
    said = capsys.readouterr()
    assert json.loads(said.out) == {"schema": 1, "processes": [], "ranks": None}
    assert "nothing was recorded" in said.err and "page.html" in said.err and "--fail-on" in said.err
    assert not page.exists()
    # A program's own exit code goes first.
    assert main([*words, "raise SystemExit(7)"]) == 7


@pytest.mark.parametrize("option", ["--html", "--save"])
def test_a_file_that_cannot_be_written_is_refused_before_the_program_runs(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = [option, str(tmp_path / "no-such-folder" / "file"), "--", "python", "-c", "print('was run')"]
    assert main(["profile", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "cannot be written" in said.err


def test_a_recorded_trace_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["profile", "--trace", "--after", "2", str(tmp_path / "trace.json")]) == 2
    assert "--after is for programs" in capsys.readouterr().err


def test_a_program_sees_its_own_arguments_and_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path, "value = 5", "neighbour_of_program.py")
    path = write(
        tmp_path, "import sys, neighbour_of_program\nprint(__name__, sys.argv[1:], neighbour_of_program.value)"
    )
    saved = sys.argv[:], sys.path[:]
    assert main(["profile", "--", str(path), "--html", "x", "-m"]) == 0
    assert capsys.readouterr().out == "__main__ ['--html', 'x', '-m'] 5\n"
    assert (sys.argv, sys.path) == saved


def test_modules_and_code_run_too(capsys: pytest.CaptureFixture[str]):
    assert main(["profile", "--", "python", "-m", "this"]) == 0
    assert main(["profile", "--", "python", "-c", "print(6 * 7)"]) == 0
    out = capsys.readouterr().out
    assert "The Zen of Python" in out and "42\n" in out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "no program"),
        (["python"], "no program"),
        (["ls"], "is no Python program"),
        (["no-such-program-anywhere"], "is no Python program"),
        (["python", "-O", "x.py"], "option -O of Python"),
        (["python", "ls"], "is no file"),
        (["/no-such-environment/bin/python3", "x.py"], "the Python of another environment"),
        (["/bin/ls"], "is no Python program"),
    ],
)
def test_what_cannot_run_in_process_is_refused(words: list[str], complaint: str):
    with pytest.raises(UsageError, match=complaint):
        find_program(words)


def test_a_file_is_a_program_if_it_says_so_or_python_stands_before_it(tmp_path: Path):
    shell = write(tmp_path, "#!/bin/sh\necho python\n", "plain.sh")
    with pytest.raises(UsageError, match="is no Python program"):
        find_program([str(shell)])
    handed_on = write(tmp_path, "#!/bin/sh\n'''exec' /a/long/path/python3 \"$0\" \"$@\"\n' ''''\n", "tool")
    for path in (handed_on, write(tmp_path, "#!/usr/bin/env python3\n", "other"), write(tmp_path, "pass")):
        assert find_program([str(path), "-x"]).what == str(path)
    bare = write(tmp_path, "pass", "bare")
    assert find_program([sys.executable, str(bare)]).what == str(bare)


def test_a_console_script_is_a_program():
    soloist = Path(sys.executable).parent / "soloist"
    assert find_program([str(soloist), "run", "hi"]).args == ("run", "hi")
    # Also if the environment is not on the path.
    assert Path(find_program(["soloist"]).what) == soloist
    assert find_program(["python3.12", "-m", "pkg.mod", "-x"]).name == "pkg.mod"


@pytest.fixture
def recorded_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is a GPU: reads count as calls that started work."""

    def with_reads(document, name):
        for i, event in enumerate(document["traceEvents"]):
            if event.get("cat") == "cpu_op" and event["name"] in ("aten::item", "aten::add"):
                event["cat"] = "cuda_runtime"
                is_read = event["name"] == "aten::item"
                event["name"] = "cudaStreamSynchronize" if is_read else "cudaLaunchKernel"
                event["args"] = {"correlation": 0 if is_read else i + 1}
                if not is_read:
                    work = dict(event, cat="kernel", name="add", ts=event["ts"] + 1.0)
                    work["args"] = {"correlation": i + 1, "device": 0, "stream": 7}
                    document["traceEvents"].append(work)
        return parse_trace(document, name)

    monkeypatch.setattr(recording, "parse_trace", with_reads)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


PROGRAM = """
import sys, time, torch
x = torch.zeros(8)
def step():
    y = x + 1
    return y.sum().item()
# Not by the clock: the first recording on a GPU takes seconds to begin, and the program stands still meanwhile.
for _ in range(int(sys.argv[1])):
    step()
    time.sleep(0.002)
"""


def test_a_running_program_is_recorded_with_lines_and_then_without(recorded_reads: None, tmp_path: Path):
    program = find_program(["python", str(write(tmp_path, PROGRAM)), "300"])
    run = run_program(program, naming_s=0.15, plain_s=0.15)
    assert run.exit_code == 0 and run.trace is not None
    calls = [call for call in run.trace.calls if call.name == "cudaStreamSynchronize"]
    ((start_us, end_us),) = run.trace.named_us
    named = [call for call in calls if start_us < call.start_us and call.end_us < end_us]
    assert len(named) > 10 and len(calls) - len(named) > 10
    assert {str(call.stack[0]) for call in named} == {"program.py:6"}
    # The stack ends where the program begins.
    assert {call.stack[-1].file for call in named} == {"program.py"}
    assert sys.gettrace() is None or "lines" not in str(sys.gettrace())


def test_a_program_that_ends_early_keeps_what_was_recorded(recorded_reads: None, tmp_path: Path):
    program = find_program(["python", str(write(tmp_path, PROGRAM)), "50"])
    run = run_program(program, naming_s=30.0, plain_s=30.0)
    assert run.trace is not None and run.trace.works
    assert run.trace.calls[-1].stack


def test_nothing_is_recorded_before_its_time(recorded_reads: None, tmp_path: Path):
    program = find_program(["python", str(write(tmp_path, PROGRAM)), "50"])
    assert run_program(program, after_s=30.0).trace is None


def test_recording_waits_for_the_end_of_a_graphs_capture(
    recorded_reads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def is_capturing() -> bool:
        asked.append(None)
        return len(asked) < 5

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
    program = find_program(["python", str(write(tmp_path, PROGRAM)), "300"])
    assert run_program(program, naming_s=0.05, plain_s=0.05).trace is not None
    assert len(asked) >= 7


STUCK = """
import hashlib, time, torch
x, was_stuck = torch.zeros(8), False
def step():
    y = x + 1
    return y.sum().item()
for _ in range(600):
    step()
    time.sleep(0.002)
    if not was_stuck and torch._C._autograd._profiler_enabled():
        # In C, where Python handles no signal: as a rank does that waits for another one.
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_500_000)
        was_stuck = True
"""


def test_a_recording_with_lines_has_steps_though_the_program_was_stuck(recorded_reads: None, tmp_path: Path):
    run = run_program(find_program(["python", str(write(tmp_path, STUCK))]), naming_s=0.15, plain_s=0.15)
    assert run.trace is not None
    ((start_us, end_us),) = run.trace.named_us
    calls = [call for call in run.trace.calls if call.name == "cudaStreamSynchronize"]
    assert len([call for call in calls if start_us < call.start_us and call.end_us < end_us]) > 10
    assert len([call for call in calls if call.start_us > end_us]) > 10


@pytest.mark.parametrize("num_stuck", [0, 3, 1000])
def test_time_in_which_a_program_is_stuck_does_not_count_within_limits(monkeypatch: pytest.MonkeyPatch, num_stuck: int):
    recorder = command._Recorder("program.py", 0.0, 0.04, 0.0)
    now_s, asked = 0.0, 0

    def ask(action: object) -> bool:
        nonlocal now_s, asked
        asked += 1
        now_s += 0.011 if asked <= num_stuck else 0.001
        return True

    monkeypatch.setattr(recorder, "_ask", ask)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: now_s))
    assert recorder._let_run(0.04)
    assert asked == {0: 4, 3: 7, 1000: 16}[num_stuck]
    asked = 0
    assert recorder._let_run(0.0) and asked == 0


PROFILING = """
import time, torch
with torch.profiler.profile() as profile:
    until = time.perf_counter() + 0.3
    while time.perf_counter() < until:
        torch.zeros(8).sum().item()
        time.sleep(0.002)
print(sum(event.count for event in profile.key_averages() if event.key == "aten::item"))
"""


def test_a_programs_own_profiler_is_not_disturbed(
    recorded_reads: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = run_program(
        find_program(["python", str(write(tmp_path, PROFILING))]), after_s=0.1, naming_s=0.05, plain_s=0.05
    )
    assert run.exit_code == 0 and run.trace is None and "PyTorch's profiler itself" in run.why_none
    # It saw its own reads.
    assert int(capsys.readouterr().out) > 20


def test_the_signal_handler_of_before_is_back_at_the_end(tmp_path: Path):
    before = command.signal.getsignal(command._SIGNAL)
    run_program(find_program(["python", "-c", "pass"]))
    assert command.signal.getsignal(command._SIGNAL) == before
