"""Bubbles: how much the GPU idles, and which wait or which line of the host is behind it."""

import pytest

from soloist.profiler.analysis import analyse
from soloist.profiler.gaps import GapKind
from soloist.profiler.kineto import parse_trace
from soloist.profiler.trace import Frame, Trace
from tests.profiler.decoding import NUM_STEPS, STEP_US, analysis_of, decode, enqueue_step, read_item, trace_of
from tests.profiler.simulated import Machine


def test_a_program_that_never_looks_has_no_gap_and_no_wait():
    analysis = analysis_of(decode())
    assert analysis.syncs_per_step == 0 and analysis.gaps == ()
    assert analysis.idle_share == pytest.approx(0, abs=1e-9)
    assert analysis.step_ms == pytest.approx(STEP_US / 1e3, rel=1e-3)
    # The host is ahead by many steps.
    assert analysis.lead is not None and analysis.lead.share_without < 0.01
    assert analysis.lead.median_us > STEP_US


def test_idle_time_is_put_behind_the_wait_that_caused_it():
    def read_and_think(machine: Machine) -> None:
        read_item(machine)
        machine.busy(100.0)

    analysis = analysis_of(decode(read_and_think))
    (wait,) = analysis.waits
    (gap,) = analysis.gaps
    assert gap.kind is GapKind.WAIT and gap.count == 1.0
    assert gap.place == wait.place and wait.place.where == "sample() of sampler.py:200"
    # Behind the read: the way back to the host, the rest of the read, thinking, and the next launch.
    assert 0.1 < wait.idle_ms < 0.13
    assert gap.idle_ms == wait.idle_ms
    assert analysis.idle_share == pytest.approx(wait.idle_ms / analysis.step_ms, rel=0.02)
    assert wait.queued_us == 0
    # Without the wait the host would think while the GPU works.
    assert analysis.loss_ms == pytest.approx(wait.idle_ms, rel=0.05)


def read_then_detokenize(machine: Machine) -> None:
    read_item(machine)
    with machine.at("text.py(33): detokenize"), machine.inside("aten::add"):
        machine.busy(900.0)


def test_what_a_host_does_for_long_behind_a_wait_is_no_part_of_the_wait():
    analysis = analysis_of(decode(read_then_detokenize))
    (wait,) = analysis.waits
    host, behind = analysis.gaps
    assert (host.kind, host.place.where, host.what) == (GapKind.HOST, "detokenize() of text.py:33", "aten::add")
    assert host.idle_ms == pytest.approx(0.9, rel=0.03)
    # The way back to the host, and the rest of the read.
    assert behind.kind is GapKind.WAIT and behind.idle_ms == wait.idle_ms < 0.02
    assert analysis.gaps_per_step == 1
    assert analysis.idle_share == pytest.approx((host.idle_ms + wait.idle_ms) / analysis.step_ms, rel=0.02)


def test_a_wait_behind_which_work_is_queued_is_harmless():
    machine = Machine()
    for _ in range(20):
        enqueue_step(machine)
        # Waits for what ended long ago.
        machine.call("cudaEventSynchronize", 2.0)
    analysis = analysis_of(machine)
    (wait,) = analysis.waits
    assert wait.idle_ms == 0 and wait.queued_us > STEP_US
    assert analysis.syncs_per_step == 1


def test_a_wait_that_ends_before_the_gpu_runs_dry_has_no_part_in_the_bubble():
    def look_and_detokenize(machine: Machine) -> None:
        machine.call("cudaEventSynchronize", 2.0)
        with machine.at("text.py(33): detokenize"):
            machine.busy(3000.0)

    analysis = analysis_of(decode(look_and_detokenize))
    (gap,) = analysis.gaps
    assert (gap.kind, gap.place.where, gap.count) == (GapKind.HOST, "detokenize() of text.py:33", 1.0)
    assert analysis.waits[0].idle_ms == 0 and analysis.waits[0].queued_us > 100


def test_a_busy_host_is_named_by_the_line_that_keeps_it_busy():
    machine = Machine()
    for _ in range(20):
        with machine.at("loop.py(5): decode"):
            # Launches as fast as the GPU runs: nothing is queued when the text is looked after.
            for _ in range(6):
                machine.launch("kernel", 4.0)
            with machine.at("text.py(33): detokenize"):
                machine.busy(3000.0)
            machine.launch("last", 4.0)
    analysis = analysis_of(machine)
    gap = analysis.gaps[0]
    assert (gap.kind, gap.place.where) == (GapKind.HOST, "detokenize() of text.py:33")
    assert gap.idle_ms == pytest.approx(3.0, rel=0.01)
    assert analysis.syncs_per_step == 0


def test_work_that_was_enqueued_in_time_does_not_blame_the_host():
    machine = Machine(latency_us=40.0)
    for _ in range(20):
        machine.launch("first", 100.0)
        machine.free_us[7] += 30.0
        machine.launch("second", 100.0)
    kinds = {gap.kind for gap in analysis_of(machine).gaps}
    assert kinds == {GapKind.QUEUED}


def test_streams_that_overlap_are_busy_together():
    machine = Machine()
    for _ in range(20):
        machine.launch("long", 100.0, stream=7)
        machine.launch("beside", 80.0, stream=13)
        machine.synchronize()
    analysis = analysis_of(machine)
    assert analysis.busy_ms == pytest.approx(0.1, abs=0.005)
    assert sum(kernel.busy_us for kernel in analysis.kernels) == pytest.approx(180.0)


def test_lead_falls_to_nothing_behind_a_wait():
    analysis = analysis_of(decode(read_item))
    assert analysis.lead is not None
    assert analysis.lead.min_us < 5 < analysis.lead.median_us
    assert 0 < analysis.lead.share_without < 0.2


def test_graph_replays_count_as_their_kernels():
    machine = Machine()
    for _ in range(20):
        machine.graph([("a", 30.0), ("b", 50.0)])
        read_item(machine)
    analysis = analysis_of(machine)
    assert analysis.hidden_replays == 0
    busy = {kernel.name: (kernel.count, kernel.busy_us) for kernel in analysis.kernels}
    assert busy["a"] == (1.0, pytest.approx(30.0)) and busy["b"] == (1.0, pytest.approx(50.0))
    assert analysis.busy_ms == pytest.approx(0.081, rel=0.01)
    # Of a replay only the first kernel has a lead.
    assert analysis.lead is not None and analysis.lead.median_us < 5


def test_graph_replays_without_their_kernels_are_not_taken_for_idle_time():
    machine = Machine()
    for _ in range(20):
        machine.graph([("a", 30.0), ("b", 50.0)], is_visible=False)
        machine.launch("sample", 5.0)
        read_item(machine)
    analysis = analysis_of(machine)
    assert analysis.hidden_replays == 1.0


def test_shares_of_kernels_add_up():
    kernels = analysis_of(decode(read_item)).kernels
    assert sum(kernel.share for kernel in kernels) == pytest.approx(1.0)
    assert [kernel.busy_us for kernel in kernels] == sorted((kernel.busy_us for kernel in kernels), reverse=True)
    (copy,) = (kernel for kernel in kernels if kernel.kind == "memcpy")
    assert copy.num_bytes == 8
    assert next(kernel for kernel in kernels if kernel.name == "mlp").count == 7


def half_named(machine: Machine) -> Trace:
    """Read what the machine wrote, as if Python lines had been recorded in its first half only."""
    trace = trace_of(machine)
    calls = [call for call in trace.calls if call.start_us > 1000]
    switch_us = calls[len(calls) // 2].start_us
    trace.named_us = [(0.0, switch_us)]
    exact = {
        "sampler.py": Frame("sampler.py", 212, "sample", "token = logits.argmax().item()"),
        "text.py": Frame("text.py", 35, "detokenize", "return table[token]"),
    }
    for call in trace.calls:
        is_named = call.start_us < switch_us
        call.stack = tuple(exact.get(frame.file, frame) for frame in call.stack) if is_named else ()
    for samples in trace.samples.values():
        for sample in samples:
            sample.stack = tuple(exact.get(f.file, f) for f in sample.stack) if sample.time_us < switch_us else ()
    return trace


def test_names_of_traced_steps_are_lent_to_steps_without():
    analysis = analyse(half_named(decode(read_item)))
    (wait,) = analysis.waits
    assert wait.place.where == "sampler.py:212" and wait.count == 1.0
    assert wait.place.text == "token = logits.argmax().item()"
    assert analysis.num_steps < NUM_STEPS // 2 + 2
    overhead = analysis.overhead
    assert overhead.named_step_ms is not None and overhead.plain_step_ms is not None


def test_what_is_done_between_two_steps_is_lent_its_line_together_with_its_operator():
    analysis = analyse(half_named(decode(read_then_detokenize)))
    hosts = {(gap.place.where, gap.what) for gap in analysis.gaps if gap.kind is GapKind.HOST}
    assert hosts == {("text.py:35", "aten::add")}
    # The last of them ends with a launch behind the last step.
    assert sum(gap.count for gap in analysis.gaps if gap.kind is GapKind.HOST) == pytest.approx(1.0)


def test_a_wait_of_every_third_step_is_lent_its_name_by_such_a_step():
    num_steps = 0

    def read_sometimes(machine: Machine) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps % 3 == 0:
            read_item(machine)

    (wait,) = analyse(half_named(decode(read_sometimes))).waits
    assert wait.place.where == "sampler.py:212" and wait.count == pytest.approx(1 / 3, abs=0.1)


def test_a_trace_without_stacks_still_counts_its_waits():
    document = decode(read_item).document()
    document["traceEvents"] = [e for e in document["traceEvents"] if e.get("cat") != "python_function"]
    (wait,) = analyse(parse_trace(document, "bare")).waits
    assert (wait.what, wait.place.where, wait.count) == (".item()", "", 1.0)
