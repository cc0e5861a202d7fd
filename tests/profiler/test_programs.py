"""The programs with planted faults: what was recorded of them on an H200 names the right lines, and nothing else.

`benchmarks/profile_programs.py` records them anew.
"""

import re
from pathlib import Path

import pytest

from soloist.profiler.analysis import Analysis, analyse
from soloist.profiler.gaps import GapKind
from soloist.profiler.kineto import load_trace

PROGRAMS = Path(__file__).parent / "programs"
TRACES = Path(__file__).parent / "traces"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem != "gpu_work")


def marked_lines(name: str, mark: str) -> set[str]:
    """Lines of a program that end in a comment."""
    lines = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8").splitlines()
    return {f"{name}.py:{i + 1}" for i, line in enumerate(lines) if line.endswith(f"# {mark}")}


def analysis_of(name: str, max_steps: int) -> Analysis:
    return analyse(load_trace(TRACES / f"{name}.json.gz"), max_steps=max_steps)


def test_every_program_has_its_trace():
    assert sorted(path.name.split(".")[0] for path in TRACES.iterdir()) == NAMES


def test_there_is_a_program_for_every_kind_of_fault():
    with_fault = [name for name in NAMES if marked_lines(name, "fault") or marked_lines(name, "busy")]
    clean = [name for name in NAMES if name.startswith("clean_")]
    assert len(with_fault) >= 12 and len(clean) >= 3
    assert sorted(with_fault + clean) == NAMES


# Of the ten steps without Python lines that a trace has, three are fewer than lie behind those with lines.
@pytest.mark.parametrize("max_steps", [64, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_planted_line_is_named_and_no_other(name: str, max_steps: int):
    analysis = analysis_of(name, max_steps)
    # A wait in fewer than half of the steps belongs to the program's start or end.
    named = {wait.place.where for wait in analysis.waits if wait.count >= 0.5}
    faults = marked_lines(name, "fault")
    assert faults <= named <= faults | marked_lines(name, "allowed")
    assert all(gap.place.where for gap in analysis.gaps if gap.kind is GapKind.HOST)
    if busy := marked_lines(name, "busy"):
        assert {next(gap.place.where for gap in analysis.gaps if gap.kind is GapKind.HOST)} == busy
    if name.startswith("clean_"):
        assert analysis.syncs_per_step == 0


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.json.gz")), ids=lambda path: path.name)
def test_recorded_traces_are_small_and_anonymous(path: Path):
    assert path.stat().st_size < 200_000
    trace = load_trace(path)
    samples = [sample for samples in trace.samples.values() for sample in samples]
    files = {frame.file for place in [*trace.calls, *samples] for frame in place.stack}
    assert not any(re.match(r"/|\w:", file) for file in files)
