"""Several ranks: one report, on one clock, that names the rank which comes late and not the slow collective."""

import json
import random
import re
from pathlib import Path

import pytest

from soloist.cli import main
from soloist.errors import UsageError
from soloist.profiler.analysis import analyse
from soloist.profiler.ranks import compare_ranks
from soloist.profiler.report import ranks_in_words
from tests.profiler.decoding import trace_of
from tests.profiler.simulated import Machine


def run_ranks(
    late_us: list[float],
    clocks_us: list[float] | None = None,
    num_steps: int = 20,
    late_each: tuple[int, ...] = (1, 1, 1),
) -> list[Machine]:
    """Ranks that exchange twice per step; a late one does something else first, in one of `late_each` steps."""
    clocks_us = clocks_us or [0.0] * len(late_us)
    machines = [Machine(rank=i, clock_us=clock_us) for i, clock_us in enumerate(clocks_us)]
    generator = random.Random(0)
    for i in range(num_steps):
        # Steps differ a little, for all ranks alike; by that their traces are recognised.
        work_us = generator.uniform(30.0, 90.0)
        for part in ("attention", "mlp"):
            for machine, us, each in zip(machines, late_us, late_each, strict=False):
                with machine.at("worker.py(40): step"):
                    machine.launch(part, work_us)
                    if part == "mlp":
                        machine.synchronize()
                        machine.busy(us if i % each == 0 else 0.0)
                        machine.launch("add", 3.0)
            # It ends everywhere when the last rank has come.
            arrivals = []
            for machine in machines:
                correlation = machine.call("cudaLaunchKernel")
                arrivals.append((max(machine.now_us + 3.0, machine.free_us[7]), correlation))
            end_us = max(start for start, _ in arrivals) + 6.0
            for machine, (start, correlation) in zip(machines, arrivals, strict=True):
                args = {"device": 0, "stream": 7, "correlation": correlation}
                machine._span("kernel", "ncclDevKernel_AllReduce_Sum_bf16", start, end_us, 7, **args)
                machine.free_us[7] = end_us
    return machines


def compare(machines: list[Machine]):
    traces = [trace_of(machine, f"rank{machine.rank}.json") for machine in machines]
    analyses = [analyse(trace) for trace in traces]
    return compare_ranks(traces, analyses), analyses


def test_the_rank_that_comes_last_is_named():
    report, analyses = compare(run_ranks([0.0, 120.0, 0.0]))
    assert report.late_rank == 1 and report.num_collectives == 40
    assert report.waited_us == pytest.approx(120.0, abs=5.0)
    shares = [figures.late_share for figures in report.ranks]
    assert shares == pytest.approx([0.0, 0.5, 0.0])
    assert report.ranks[0].waiting_us == pytest.approx(60.0, abs=3.0) and report.ranks[1].waiting_us < 1
    words = ranks_in_words(report, analyses)
    assert "Rank 1 is late" in words and "step() of worker.py:40" in words


def test_clocks_that_differ_are_put_right_by_the_ends_of_collectives():
    report, _ = compare(run_ranks([0.0, 80.0], clocks_us=[0.0, 7_300.0]))
    assert report.late_rank == 1
    assert report.ranks[1].clock_offset_us == pytest.approx(-7_300.0, abs=2.0)
    assert report.waited_us == pytest.approx(80.0, abs=5.0)


def test_traces_of_which_each_has_its_own_third_are_matched_by_the_clock():
    """Of 600 collectives the first trace has the first 400, the second the last 400."""
    machines = run_ranks([0.0, 90.0], num_steps=300)
    for machine, part in zip(machines, (slice(0, 2 / 3), slice(1 / 3, 1)), strict=True):
        times = sorted(event["ts"] for event in machine.events)
        first, last = times[int(part.start * len(times))], times[int(part.stop * len(times)) - 1]
        machine.events = [event for event in machine.events if first <= event["ts"] <= last]
    report, _ = compare(machines)
    assert report.late_rank == 1 and 180 < report.num_collectives < 220
    assert report.waited_us == pytest.approx(90.0, abs=5.0)


def test_a_trace_that_begins_later_is_matched_by_the_clock():
    machines = run_ranks([0.0, 90.0])
    cut = machines[1]
    middle = sorted(event["ts"] for event in cut.events)[len(cut.events) // 3]
    cut.events = [event for event in cut.events if event["ts"] > middle]
    report, _ = compare(machines)
    assert report.late_rank == 1 and 20 < report.num_collectives < 30
    assert report.waited_us == pytest.approx(90.0, abs=5.0)


@pytest.mark.parametrize("stalled", [0, 1])
def test_stalls_of_recorders_neither_make_a_rank_late_nor_count(stalled: int):
    """As when its recording begins while the other's runs, stops naming lines, and ends."""
    machines = run_ranks([0.0, 90.0], num_steps=60)
    for machine in machines:
        collectives = [event for event in machine.events if event["name"].startswith("nccl")]
        for collective in (collectives[20], collectives[60], collectives[100]):
            start_us = collective["ts"]
            # The other rank is inside of it meanwhile.
            if machine.rank != stalled:
                collective["dur"] += 20_000.0
            for event in machine.events:
                if event["ts"] > start_us or (event is collective and machine.rank == stalled):
                    event["ts"] += 20_000.0
    report, _ = compare(machines)
    assert report.late_rank == 1
    assert report.ranks[0].late_share < 0.05 < report.ranks[1].late_share
    assert report.waited_us == pytest.approx(90.0, abs=5.0)


def test_a_rank_that_is_late_seldom_and_much_is_named_before_one_that_is_late_always_and_little():
    """As the rank that does the host's work of a step is, of whose collectives only the first waits for it."""
    report, _ = compare(run_ranks([5.0, 2000.0], num_steps=300, late_each=(1, 30)))
    assert report.ranks[0].late_share > 10 * report.ranks[1].late_share > 0
    assert report.late_rank == 1 and report.waited_us == pytest.approx(2000.0, rel=0.02)


def test_ranks_that_arrive_together_have_no_late_one():
    report, analyses = compare(run_ranks([0.0, 0.0]))
    assert report.late_rank is None
    assert "arrive together" in ranks_in_words(report, analyses)


def test_traces_that_do_not_belong_together_are_refused():
    machines = run_ranks([0.0, 0.0])
    machines[1].rank = 0
    with pytest.raises(UsageError, match="one trace per rank"):
        compare(machines)
    machines[1].rank = 1
    machines[1].events = [event for event in machines[1].events if "nccl" not in event["name"]]
    with pytest.raises(UsageError, match=r"rank1\.json has no collective"):
        compare(machines)


def test_traces_of_different_times_are_not_matched_by_chance():
    with pytest.raises(UsageError, match=r"rank1\.json begins .* s after rank0\.json has ended"):
        compare(run_ranks([0.0, 0.0], clocks_us=[0.0, 60e6]))


def test_traces_that_do_not_say_their_rank_are_kept_apart(tmp_path: Path):
    paths = []
    for machine in run_ranks([0.0, 150.0]):
        paths.append(tmp_path / f"{machine.rank}.json")
        paths[-1].write_text(json.dumps(machine.document() | {"distributedInfo": {}}))
    assert main(["profile", "--trace", *map(str, paths), "--save", str(tmp_path / "saved-{rank}.json")]) == 0
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved-0.json", "saved-1.json"]


def test_two_traces_make_one_merged_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = []
    for machine in run_ranks([0.0, 150.0], clocks_us=[0.0, 7_300.0]):
        paths.append(tmp_path / f"rank{machine.rank}.json")
        paths[-1].write_text(json.dumps(machine.document()))
    page = tmp_path / "page.html"
    saved = tmp_path / "saved-{rank}.json.gz"
    words = ["profile", "--trace", *map(str, paths), "--json", "--html", str(page), "--save", str(saved)]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ranks"]["late_rank"] == 1
    assert [process["rank"] for process in report["processes"]] == [0, 1]
    text = page.read_text()
    assert "rank0.json, rank1.json" in text and "Rank 1 is late" in text and "of 2 alone" not in text
    data = json.loads(re.search(r'application/json">(.*?)</script>', text, re.DOTALL)[1])
    streams = {row["name"]: row["items"] for row in data["rows"] if "stream" in row["name"]}
    assert list(streams) == ["rank 0: GPU 0, stream 7", "rank 1: GPU 0, stream 7"]
    # On one clock a collective ends everywhere at once.
    ends = [[item["e"] for item in items if "AllReduce" in item["n"]] for items in streams.values()]
    assert len(ends[0]) > 8 and ends[0] == pytest.approx(ends[1], abs=0.1)
    # A trace of one rank says that it is not all.
    assert main(["profile", "--trace", str(paths[0])]) == 0
    assert "This is rank 0 of 2 alone" in capsys.readouterr().err
    # What was kept says the same again.
    again = [str(tmp_path / f"saved-{rank}.json.gz") for rank in (0, 1)]
    assert main(["profile", "--trace", *again, "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["ranks"]["late_rank"] == 1
    assert main(["profile", "--trace", *map(str, paths), "--save", str(tmp_path / "one.json")]) == 2
    assert "{rank}" in capsys.readouterr().err
