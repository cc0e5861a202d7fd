"""Steps are found by what repeats: not a layer, not the loading of weights; markers go first."""

import pytest

from soloist.profiler.steps import Origin, Recording, find_steps
from tests.profiler.decoding import NUM_STEPS, STEP_KERNELS, STEP_US, decode, enqueue_step, read_item, trace_of
from tests.profiler.simulated import Machine


def test_a_step_is_what_repeats_and_not_a_layer_of_it():
    steps = find_steps(trace_of(decode()))
    assert steps.origin is Origin.REPETITION
    # The last one has no successor, so its end is not known; the first one may begin with something else.
    assert len(steps) == NUM_STEPS - 2
    widths = [end - start for start, end in zip(steps.gpu_us, steps.gpu_us[1:], strict=False)]
    assert widths == pytest.approx([STEP_US] * len(steps), abs=0.1)


def test_steps_of_slightly_changing_length_are_steps():
    machine = Machine()
    for i in range(20):
        enqueue_step(machine)
        # A context that grows brings a kernel now and then.
        for _ in range(i // 7):
            machine.launch("split", 3.0)
        read_item(machine)
    steps = find_steps(trace_of(machine))
    assert steps.origin is Origin.REPETITION and len(steps) in (18, 19)


def test_one_graph_replay_per_step_is_a_step():
    machine = Machine()
    for _ in range(12):
        machine.graph([("a", 30.0), ("b", 40.0), ("a", 30.0)])
        machine.busy(20.0)
    steps = find_steps(trace_of(machine))
    assert len(steps) == 10
    assert steps.gpu_us[1] - steps.gpu_us[0] == pytest.approx(100.0)


def test_three_graphs_per_step_are_one_step():
    machine = Machine()
    for _ in range(12):
        for part in ("draft", "verify", "extend"):
            machine.graph([(part, 100.0)])
    steps = find_steps(trace_of(machine))
    assert len(steps) == 10 and steps.gpu_us[3] - steps.gpu_us[2] == pytest.approx(300.0)


def test_markers_go_before_repetition():
    machine = Machine()
    for i in range(20):
        if i % 2 == 0:
            machine.mark()
        enqueue_step(machine)
    steps = find_steps(trace_of(machine))
    assert steps.origin is Origin.MARKER and len(steps) == 9
    assert steps.gpu_us[1] - steps.gpu_us[0] == pytest.approx(2 * STEP_US, abs=0.1)


def test_a_program_that_repeats_nothing_is_one_step():
    machine = Machine()
    for i in range(30):
        machine.launch(f"kernel {i}", 3.0 + i)
    steps = find_steps(trace_of(machine))
    assert steps.origin is Origin.NONE and len(steps) == 1


def test_marks_with_no_work_between_them_are_no_steps():
    machine = Machine()
    machine.launch("kernel", 5.0)
    trace = trace_of(machine)
    trace.marks_us = [trace.calls[0].start_us - 10.0 + i for i in range(8)]
    assert find_steps(trace).origin is Origin.NONE


def test_only_the_last_steps_are_looked_at():
    trace = trace_of(decode())
    all_steps = find_steps(trace)
    few = all_steps.last(5)
    assert len(few) == 5 and few.host_us == all_steps.host_us[-6:]


def test_steps_know_what_was_recorded_in_them():
    trace = trace_of(decode())
    edges = find_steps(trace).host_us
    trace.named_us = [(0.0, edges[9] + 1.0)]
    steps = find_steps(trace)
    assert steps.recordings[:9] == (Recording.NAMED,) * 9
    assert steps.recordings[9] is Recording.MIXED
    assert set(steps.recordings[10:]) == {Recording.PLAIN}
    plain = steps.longest(Recording.PLAIN)
    assert plain is not None and plain.host_us == edges[10:]
    assert steps.longest(Recording.MIXED) is None
    assert plain.last(5).host_us == edges[-6:] and plain.last(99) == plain


def test_a_layer_of_many_kernels_is_still_no_step():
    machine = Machine()
    for _ in range(10):
        machine.launch("embedding", 4.0)
        for _ in range(12):
            for k in range(20):
                machine.launch(f"layer {k}", 4.0)
        machine.launch("argmax", 6.0)
    steps = find_steps(trace_of(machine))
    assert len(steps) == 8
    assert steps.gpu_us[1] - steps.gpu_us[0] == pytest.approx(10 + 12 * 80, abs=0.1)
    assert STEP_KERNELS == 38
