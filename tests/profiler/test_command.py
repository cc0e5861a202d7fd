"""Programs run in process as under `python`: arguments, exit codes and errors are theirs; recordings come and go."""

import sys
from pathlib import Path

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
    assert main(["profile", "--fail-on", "syncs>0", "--", "python3", str(write(tmp_path, text))]) == exit_code
    err = capsys.readouterr().err
    assert "used no GPU" in err
    assert ("ZeroDivisionError" in err, "bad news" in err) == ("/" in text, "bad" in text)


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
    ],
)
def test_what_cannot_run_in_process_is_refused(words: list[str], complaint: str):
    with pytest.raises(UsageError, match=complaint):
        find_program(words)


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
until = time.perf_counter() + float(sys.argv[1])
while time.perf_counter() < until:
    step()
    time.sleep(0.002)
"""


def test_a_running_program_is_recorded_with_lines_and_then_without(recorded_reads: None, tmp_path: Path):
    program = find_program(["python", str(write(tmp_path, PROGRAM)), "0.6"])
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
    program = find_program(["python", str(write(tmp_path, PROGRAM)), "0.1"])
    run = run_program(program, naming_s=30.0, plain_s=30.0)
    assert run.trace is not None and run.trace.works
    assert run.trace.calls[-1].stack


def test_nothing_is_recorded_before_its_time(recorded_reads: None, tmp_path: Path):
    program = find_program(["python", str(write(tmp_path, PROGRAM)), "0.1"])
    assert run_program(program, after_s=30.0).trace is None


def test_recording_waits_for_the_end_of_a_graphs_capture(
    recorded_reads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def is_capturing() -> bool:
        asked.append(None)
        return len(asked) < 5

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
    program = find_program(["python", str(write(tmp_path, PROGRAM)), "0.4"])
    assert run_program(program, naming_s=0.05, plain_s=0.05).trace is not None
    assert len(asked) >= 7


def test_the_signal_handler_of_before_is_back_at_the_end(tmp_path: Path):
    before = command.signal.getsignal(command._SIGNAL)
    run_program(find_program(["python", "-c", "pass"]))
    assert command.signal.getsignal(command._SIGNAL) == before
