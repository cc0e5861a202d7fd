"""What a person and a CI job read: plain words, one JSON object, budgets with exit code 4, one HTML page."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from soloist.cli import main
from soloist.errors import UsageError
from soloist.profiler.analysis import Place, analyse
from soloist.profiler.budget import missed, parse_budgets
from soloist.profiler.kineto import load_trace, parse_trace, save_trace, to_chrome
from soloist.profiler.report import _source, as_json, in_words, short_name
from soloist.profiler.timeline import MAX_ITEMS, as_html
from tests.profiler.decoding import analysis_of, decode, read_item, trace_of
from tests.profiler.simulated import Machine


def read_and_think(machine: Machine) -> None:
    read_item(machine)
    machine.busy(150.0)


def test_the_headline_says_how_idle_and_behind_what():
    def headline(us: float) -> str:
        def read_and_think(machine: Machine) -> None:
            read_item(machine)
            machine.busy(us)

        return in_words(analysis_of(decode(read_and_think))).splitlines()[0]

    start = r"NVIDIA H200, 22 steps of \d\.\d\d ms: GPU idle [12345]\d% of the step: 1 gap, "
    assert re.fullmatch(start + r"100% of it behind sample\(\) of sampler\.py:200 `\.item\(\)`", headline(150))
    assert re.fullmatch(start + r"99% of it while the host was busy at decode\(\) of generate\.py:10", headline(900))


def test_a_clean_program_is_told_so():
    words = in_words(analysis_of(decode()))
    assert "GPU idle 0% of the step\n" in words
    assert "No blocking wait: the host never stands still for the GPU." in words


def test_words_name_waits_lead_kernels_and_what_profiling_costs():
    words = in_words(analysis_of(decode(read_and_think)))
    for part in ("1 blocking wait per step", "shorter by about", "Launch lead", "lm_head", "unprofiled: not measured"):
        assert part in words


def test_a_wait_for_a_gpu_that_had_run_dry_is_not_called_harmless():
    def wait_twice(machine: Machine) -> None:
        machine.synchronize()
        machine.call("cudaEventSynchronize", 2.0)

    words = in_words(analysis_of(decode(wait_twice)))
    assert "nothing left to run, but what it then idles has another cause" in words and "harmless" not in words


def test_one_step_that_repeats_nothing_is_admitted():
    machine = Machine()
    machine.launch("only", 50.0)
    machine.synchronize()
    assert "Nothing repeats" in in_words(analysis_of(machine))


def test_hidden_graphs_are_admitted():
    machine = Machine()
    for _ in range(20):
        machine.graph([("a", 30.0)], is_visible=False)
        machine.launch("sample", 5.0)
    assert "recorded without their kernels" in in_words(analysis_of(machine))


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>(int)",
         "at::native::vectorized_elementwise_kernel"),
        ("Memcpy DtoH (Device -> Pageable)", "Memcpy DtoH"),
        ("kda_step_kernel", "kda_step_kernel"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute",
         "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroup..."),
    ],
)  # fmt: skip
def test_names_of_kernels_are_cut_before_their_arguments(name: str, short: str):
    assert short_name(name) == short


def test_json_holds_every_figure_and_no_python_objects():
    report = json.loads(json.dumps(as_json([analysis_of(decode(read_item))])))
    (process,) = report["processes"]
    assert report["schema"] == 1 and report["ranks"] is None
    assert process["syncs_per_step"] == 1.0
    assert process["waits"][0]["place"]["where"] == "sample() of sampler.py:200"
    assert process["waits"][0]["kind"] == "copy" and process["origin"] == "repetition"
    assert set(process) >= {"idle_share", "gap_share", "lead", "kernels", "overhead", "loss_ms", "hidden_replays"}


@pytest.mark.parametrize(
    ("text", "is_missed"),
    [
        ("syncs>0", True),
        ("syncs>1", False),
        ("syncs>=1", True),
        ("idle>5%", True),
        ("idle > 0.9", False),
        ("step_ms<100", True),
        ("gaps>0, syncs>9", True),
        ("pageable>0", False),
        ("lead_us<1", False),
    ],
)
def test_a_budget_is_missed_when_its_condition_holds(text: str, is_missed: bool):
    analysis = analysis_of(decode(read_and_think))
    assert bool(missed(parse_budgets(text), [analysis])) == is_missed


@pytest.mark.parametrize("text", ["sync>0", "syncs", "syncs=0", "idle>5%%", "", "idle>x"])
def test_a_budget_that_is_not_understood_is_refused_with_what_is_allowed(text: str):
    with pytest.raises(UsageError, match="syncs, idle, gaps"):
        parse_budgets(text)


@pytest.mark.parametrize(("text", "why"), [("idle>5", "5% or 0.05"), ("syncs>5%", "only idle is a share")])
def test_a_budget_that_can_never_tell_anything_is_refused(text: str, why: str):
    with pytest.raises(UsageError, match=why):
        parse_budgets(text)


def test_no_conditions_are_not_all_conditions_met(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(decode(read_item).document()))
    assert main(["profile", "--trace", str(path), "--fail-on", ""]) == 2
    assert "is not understood" in capsys.readouterr().err


def test_callers_are_told_from_what_the_line_called():
    frames = ("json/encoder.py:258", "json/__init__.py:231", "work.py:11", "main.py:3")
    place = Place(where="work.py:11", function="work", text="json.dumps(page)", stack=frames)
    assert _source(place) == [
        "      > json.dumps(page)",
        "      in json/encoder.py:258 < json/__init__.py:231",
        "      from main.py:3",
    ]


def test_a_missed_budget_gives_exit_code_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(decode(read_item).document()).encode()))
    assert main(["profile", "--trace", str(path), "--fail-on", "syncs>0,idle>90%"]) == 4
    err = capsys.readouterr().err
    assert "syncs is 1, and --fail-on has syncs>0" in err and "idle is" not in err
    assert main(["profile", "--trace", str(path), "--fail-on", "syncs>1", "--steps", "6"]) == 0
    assert "6 steps of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"not json", "is no Chrome trace"),
        (b'{"a": 1}', "no list of traceEvents"),
        (b'{"traceEvents": []}', "holds no event of a GPU"),
        (b"\x1f\x8bbroken", "is no Chrome trace"),
        (b"[1, 2]", "an event that torch.profiler does not write"),
        (b'[{"ph": "X", "cat": "kernel", "ts": 1, "dur": 5}]', "KeyError: 'name'"),
        (b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": "soon", "dur": 5}]', "ValueError"),
        (b'{"traceEvents": [], "soloist": {}}', "KeyError: 'stacks'"),
        (b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 0}]', "spans no time"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(
    content: bytes, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    assert main(["profile", "--trace", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line
    assert main(["profile", "--trace", str(tmp_path / "missing.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def assert_alike(value: Any, expected: Any, path: str = "") -> None:
    """Compare what JSON holds, numbers up to the rounding of times."""
    if isinstance(expected, dict):
        assert value.keys() == expected.keys(), path
        for key in expected:
            assert_alike(value[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(value) == len(expected), path
        for i, pair in enumerate(zip(value, expected, strict=True)):
            assert_alike(*pair, f"{path}[{i}]")
    elif isinstance(expected, float):
        assert value == pytest.approx(expected, rel=1e-3, abs=1e-5), path
    else:
        assert value == expected, path


def test_a_trace_survives_being_written_and_read(tmp_path: Path):
    trace = trace_of(decode(read_and_think))
    trace.named_us = [(10.0, 500.0)]
    trace.unprofiled_step_ms = 1.25
    first = as_json([analysis_of(decode(read_and_think))])
    path = tmp_path / "simulated"
    save_trace(trace, path)
    read = load_trace(path)
    again = as_json([analyse(read)])["processes"][0]
    expected = dict(first["processes"][0], name=again["name"], overhead=again["overhead"])
    assert_alike(again, expected)
    assert read.unprofiled_step_ms == 1.25
    assert again["overhead"]["unprofiled_step_ms"] == 1.25
    assert [call.stack for call in read.calls] == [call.stack for call in trace.calls]
    assert read.named_us[0][1] - read.named_us[0][0] == pytest.approx(490.0)
    assert to_chrome(read)["traceEvents"] != []


def test_a_written_trace_tells_nothing_of_its_machine():
    document = decode(read_item).document() | {"host_name": "secret-host", "traceName": "/home/secret/trace.json"}
    text = json.dumps(to_chrome(parse_trace(document, "secret-name")))
    assert "secret" not in text and '"pid": 77' not in text


def test_the_page_holds_everything_and_loads_nothing():
    machine = decode(read_and_think)
    trace = trace_of(machine, "a <b> & c")
    page = as_html([trace], [analyse(trace)])
    assert not re.search(r"(src|href)=|https?://|__\w+__", page)
    assert "a &lt;b&gt; &amp; c" in page
    data = json.loads(re.search(r'application/json">(.*?)</script>', page, re.DOTALL)[1])
    names = [row["name"] for row in data["rows"]]
    assert names == ["GPU 0, stream 7", "GPU 0 idle", "host thread 1"]
    items = data["rows"][2]["items"]
    assert any(item.get("c") == "wait" and item["n"] == ".item()" and "sampler.py:200" in item["t"] for item in items)
    assert len(data["steps"]) == 9


def test_a_page_of_a_large_trace_shows_fewer_steps():
    machine = Machine()
    for _ in range(6):
        machine.launch("begin", 5.0)
        for k in range(2500):
            machine.launch(f"k{k}", 4.0)
    trace = trace_of(machine)
    analysis = analyse(trace)
    page = as_html([trace], [analysis])
    data = json.loads(re.search(r'application/json">(.*?)</script>', page, re.DOTALL)[1])
    assert sum(len(row["items"]) for row in data["rows"]) <= MAX_ITEMS
    assert 2 <= len(data["steps"]) < len(analysis.steps.gpu_us)
