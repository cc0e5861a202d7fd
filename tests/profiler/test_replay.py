"""What waits cost: played again, steps take what they took, and without waits what the program without them takes."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from soloist.profiler.analysis import analyse
from soloist.profiler.kineto import load_trace
from soloist.profiler.replay import Replay
from soloist.profiler.trace import Trace
from soloist.profiler.waits import find_waits
from tests.profiler.decoding import analysis_of, decode, enqueue_step, read_item, trace_of
from tests.profiler.simulated import Machine

TRACES = Path(__file__).parent / "traces"
# What a launch costs the host, and what a profiler adds to it.
CALL_US, OVERHEAD_US = 4.0, 7.0


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.json.gz")), ids=lambda path: path.name.split(".")[0])
def test_steps_recorded_on_a_gpu_take_as_long_when_they_are_played_again(path: Path):
    trace = load_trace(path)
    # As they were recorded.
    trace.launch_overhead_us = None
    steps = analyse(trace).steps
    mean_ms = (steps.gpu_us[-1] - steps.gpu_us[0]) / len(steps) / 1e3
    assert Replay(trace, steps, find_waits(trace)).step_ms() == pytest.approx(mean_ms, rel=0.03)


def read(machine: Machine) -> None:
    read_item(machine)


def synchronize(machine: Machine) -> None:
    machine.synchronize("cudaDeviceSynchronize")


@pytest.mark.parametrize("wait", [read, synchronize, Machine.pageable_copy, Machine.unseen_wait])
# The GPU decides what a step takes without waits; the host does; and either, nearly.
@pytest.mark.parametrize("busy_us", [0.0, 300.0, 650.0, 1500.0])
def test_the_cost_is_what_the_program_without_waits_saves_when_nobody_records(
    wait: Callable[[Machine], None], busy_us: float
):
    def step(machine: Machine, *, waits: bool) -> None:
        if waits:
            wait(machine)
        machine.busy(busy_us)

    real_ms = [
        analysis_of(decode(lambda m, waits=waits: step(m, waits=waits), machine=Machine(call_us=CALL_US))).step_ms
        for waits in (True, False)
    ]
    recorded = decode(lambda machine: step(machine, waits=True), machine=Machine(call_us=CALL_US + OVERHEAD_US))
    trace = trace_of(recorded)
    trace.launch_overhead_us = OVERHEAD_US
    assert analyse(trace).loss_ms == pytest.approx(real_ms[0] - real_ms[1], rel=0.08, abs=0.004)


def test_what_recording_costs_matters():
    """A host that recording slows down comes late to its waits: they look shorter than they are."""
    machine = decode(lambda m: (read(m), m.busy(1500.0)), machine=Machine(call_us=CALL_US + OVERHEAD_US))
    trace = trace_of(machine)
    slowed_ms = analyse(trace).loss_ms
    trace.launch_overhead_us = OVERHEAD_US
    assert analyse(trace).loss_ms > 1.5 * slowed_ms


def test_a_line_that_waits_behind_another_costs_little_by_itself():
    """Two reads in a step, nothing between them: whoever leaves one out still waits in the other."""

    def read_elsewhere(machine: Machine) -> None:
        with machine.at("masks.py(70): build"):
            machine.read()

    both = analysis_of(decode(lambda m: (read(m), read_elsewhere(m), m.busy(600.0))))
    alone = analysis_of(decode(lambda m: (read(m), m.busy(600.0))))
    assert [line.loss_ms for line in alone.waits] == [pytest.approx(alone.loss_ms)]
    assert len(both.waits) == 2 and both.loss_ms == pytest.approx(alone.loss_ms, rel=0.1)
    assert all(line.loss_ms < 0.1 * both.loss_ms for line in both.waits)


def test_what_is_not_known_well_widens_the_range():
    """Steps that differ, and a profiler whose cost matters; alike and at no cost, there is nothing to be unsure of."""

    def recorded(busy_us: list[float], overhead_us: float) -> Trace:
        busy = itertools.cycle(busy_us)
        machine = decode(lambda m: (read(m), m.busy(next(busy))), machine=Machine(call_us=CALL_US + overhead_us))
        trace = trace_of(machine)
        trace.launch_overhead_us = overhead_us
        return trace

    sure, unsure = analyse(recorded([300.0], 0.0)), analyse(recorded([300.0], OVERHEAD_US))
    assert sure.loss_range_ms == pytest.approx((sure.loss_ms, sure.loss_ms), rel=0.01)
    low_ms, high_ms = unsure.loss_range_ms
    assert low_ms <= unsure.loss_ms <= high_ms and high_ms - low_ms > 0.01
    differing = analyse(recorded([300.0] * 12 + [900.0] * 12, 0.0))
    low_ms, high_ms = differing.loss_range_ms
    assert low_ms < 0.9 * differing.loss_ms < 1.1 * differing.loss_ms < high_ms


def test_a_wait_for_what_ended_long_ago_costs_what_its_call_takes():
    machine = Machine()
    for _ in range(20):
        enqueue_step(machine)
        machine.call("cudaEventSynchronize", 2.0)
    assert analysis_of(machine).loss_ms == pytest.approx(0, abs=0.002)


def test_pauses_that_are_there_without_waits_cost_nothing():
    machine = Machine()
    for _ in range(20):
        for _ in range(8):
            machine.launch("kernel", 50.0)
            machine.free_us[7] += 12.0
    analysis = analysis_of(machine)
    assert analysis.loss_ms == 0 and analysis.idle_share > 0.1


def test_streams_of_two_gpus_with_one_number_are_two():
    machine = Machine()
    for _ in range(20):
        machine.launch("here", 100.0)
        machine.launch("there", 90.0, stream=8)
    for event in machine.events:
        if event["args"].get("stream") == 8:
            event["args"] |= {"device": 1, "stream": 7}
    trace = trace_of(machine)
    steps = analyse(trace).steps
    assert (steps.gpu_us[-1] - steps.gpu_us[0]) / len(steps) == pytest.approx(100.0, rel=0.05)
    assert Replay(trace, steps, []).step_ms() == pytest.approx(0.1, rel=0.05)
