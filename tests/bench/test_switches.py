"""Switches of `soloist bench`: combinations that are refused, and what the others become."""

import json
import sys
from pathlib import Path

import pytest
import torch

from soloist import loading
from soloist.bench import local
from soloist.bench.figures import spread
from soloist.bench.ladder import EAGER
from soloist.bench.steps import StepFigures
from soloist.cli import answer, main
from soloist.loading import DeviceChoice
from soloist.runtime.graph import Execution
from tests.tiny_model import write_tiny_model

BENCH = ("--workload", "looping", "--input-tokens", "12", "--output-tokens", "6", "--repeats", "1", "-t", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--graph"], "are of a GPU's steps, and these would run on the CPU"),
        (["--run-ahead", "0"], "are of a GPU's steps, and these would run on the CPU"),
        (["--ladder"], "are of a GPU's steps, and these would run on the CPU"),
        (["--ladder", "--pdl", "--graph", "--device", "cuda"], "--ladder adds the switches itself"),
        (["--pdl", "--device", "cuda"], "need captured steps: add --graph"),
        (["--run-ahead", "2", "--device", "cuda"], "need captured steps: add --graph"),
        (["--device-loop", "--device", "cuda"], "need captured steps: add --graph"),
        (["--graph", "--device-loop", "--run-ahead", "2", "--device", "cuda"], "leave --run-ahead out"),
        (["--ladder", "--adaptive-width", "--device", "cuda"], "needs --draft"),
    ],
)
def test_what_does_not_go_together_is_refused(tiny: str, words: list[str], message: str, capsys):
    assert main(["bench", "-m", tiny, *BENCH, *words]) == 2
    assert message in " ".join(capsys.readouterr()[1].split())


@pytest.mark.parametrize(
    "words",
    [
        ["--workload", "chat"],
        ["--input-tokens", "9"],
        ["--output-tokens", "9"],
        ["--repeats", "2"],
        ["--draft", "ngram"],
        ["--simulate-acceptance", "2"],
        ["--ladder"],
        ["--graph"],
        ["--run-ahead", "1"],
        ["--pdl"],
        ["--fused-moe"],
        ["--bf16-head"],
        ["--device-loop"],
        ["--dtype", "float32"],
        ["--weights", "random"],
        ["--weights-dtype", "int4"],
        ["--tensor-parallel-size", "4"],
        ["--threads", "1"],
        ["--against", "http://x"],
        ["--against-model", "x"],
        ["--against-key", "x"],
        # A value that is the default as well was typed.
        ["--repeats", "3"],
    ],
    ids=" ".join,
)
def test_what_would_do_nothing_beside_another_mode_is_refused(words: list[str], capsys):
    for mode in (["--floor", "--bandwidth", "20"], ["--compare", "a.json", "b.json"]):
        assert main(["bench", *mode, *words]) == 2
        assert f"{mode[0]} takes no {words[0]}; it takes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare", "a.json", "b.json", "-m", "x"], "--compare takes no --model; it takes --chart, --json, --debug"),
        (["--compare", "a.json", "b.json", "--floor"], "--compare takes no --floor"),
        (["--floor", "--chart", "x.svg"], "--floor takes no --chart"),
        (["--gpus", "1"], "--gpus needs --floor"),
        (["--bandwidth", "9", "--draft-gb", "0"], "--bandwidth and --draft-gb need --floor"),
        (["--against-model", "x", "--against-key", "y"], "--against-model and --against-key need --against"),
        (["--draft-width", "3"], "--draft-width needs --draft"),
        (["--draft", "off", "--draft-width", "3"], "--draft-width needs --draft, which is off"),
    ],
)
def test_what_needs_another_option_is_refused_without_it(words: list[str], message: str, capsys):
    assert main(["bench", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_key_of_the_environment_is_none_that_was_typed(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert main(["bench", "--floor", "-m", "qwen2.5-coder-0.5b-instruct", "--bandwidth", "20", "--json"]) == 0


@pytest.fixture
def executions(monkeypatch: pytest.MonkeyPatch) -> list[Execution | None]:
    """Forms of the step that a GPU would run, on a machine without one."""
    seen: list[Execution | None] = []
    load = answer.load

    def load_on_cpu(model, *, execution, device, **kwargs):
        assert device == "cuda"
        seen.append(execution)
        return load(model, device="cpu", **kwargs)

    # The package has the command under the name of its module.
    monkeypatch.setattr(sys.modules["soloist.cli.bench"], "load", load_on_cpu)
    return seen


def test_switches_that_are_not_typed_are_off(tiny: str, executions: list, capsys):
    assert main(["bench", "-m", tiny, *BENCH, "--device", "cuda", "--graph", "--bf16-head"]) == 0
    assert main(["bench", "-m", tiny, *BENCH, "--device", "cuda"]) == 0
    graph = Execution(is_captured=True, run_ahead=0, has_pdl=False, has_fused_moe=False, has_bf16_head=True)
    assert executions == [graph, None]


def test_a_draft_that_is_off_is_no_rung_of_its_own(tiny: str, executions: list, capsys):
    assert main(["bench", "-m", tiny, *BENCH, "--device", "cuda", "--draft", "off", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(executions) == 1 and "rungs" not in result


def test_a_gpu_that_is_there_takes_the_switches(tiny: str, executions: list, monkeypatch: pytest.MonkeyPatch, capsys):
    choose = loading.choose_device

    def choose_gpu(device: str = "auto", **wishes) -> DeviceChoice:
        return DeviceChoice(device=torch.device("cuda")) if device == "auto" else choose(device, **wishes)

    monkeypatch.setattr(loading, "choose_device", choose_gpu)
    words = ["bench", "-m", tiny, *BENCH, "--draft", "ngram"]
    assert main([*words, "--graph"]) == main(words) == 0
    assert [execution and execution.is_captured for execution in executions] == [True, True, None, None]


@pytest.mark.usefixtures("executions")
def test_a_gpus_steps_are_said_in_words_and_in_the_result(tiny: str, monkeypatch: pytest.MonkeyPatch, capsys):
    figures = StepFigures(
        step_ms=spread([1.25, 1.25, 1.5]),
        step_ms_range=(1.25, 1.5),
        tpot_ms=1.25,
        acceptance_length=1.0,
        mean_width=1.0,
        launches_per_step=180,
        programmatic_edges=172,
        idle_share=0.002,
        gap_share=0.004,
        host_us_per_step=41.0,
        syncs_per_step=0,
    )
    monkeypatch.setattr(local, "_steps", lambda llm, warm: figures)
    assert main(["bench", "-m", tiny, *BENCH, "--device", "cuda", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert [result[key] for key in ("launches_per_step", "idle_share", "gap_share")] == [180, 0.002, 0.004]
    assert result["host_us_per_step"] == 41.0 and result["syncs_per_step"] == 0
    assert result["step_ms_median"] == 1.25
    assert result["share_of_floor"] == pytest.approx(result["floor_step_ms"] / 1.25)
    words = " ".join(err.split())
    assert "steps 1.250 ms by the GPU's clock, 180 launches; idle between steps 0.2%, within 0.4%" in words


def test_a_ladder_is_a_result_with_a_rung_for_every_switch(tiny: str, executions: list, tmp_path: Path, capsys):
    words = ["bench", "-m", tiny, *BENCH, "--device", "cuda", "--ladder", "--draft", "ngram", "--adaptive-width"]
    assert main([*words, "--run-ahead", "3", "--json", "--chart", str(tmp_path / "ladder.svg")]) == 0
    result = json.loads(capsys.readouterr()[0])
    switches = ["--bf16-head", "--graph", "--run-ahead 3", "--pdl", "--draft ngram", "--adaptive-width"]
    assert [rung["case"] for rung in result["rungs"]] == [EAGER, *switches, "--device-loop"]
    assert len(executions) == 8 and executions[3].run_ahead == 3
    assert all(rung["tpot_ms_median"] > 0 for rung in result["rungs"])
    assert "--adaptive-width" in (tmp_path / "ladder.svg").read_text()
