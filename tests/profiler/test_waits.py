"""Every wait is found, counted once, and named in plain words; what only looks like a wait is not."""

from collections.abc import Callable

import pytest

from soloist.profiler.waits import WaitKind, blame, find_waits
from tests.profiler.decoding import analysis_of, decode, read_item, trace_of
from tests.profiler.simulated import Machine


def inside(*ops: str) -> Callable[[Machine], None]:
    """A read within nested operators."""

    def read(machine: Machine) -> None:
        if not ops:
            machine.read()
            return
        with machine.inside(ops[0]):
            inside(*ops[1:])(machine)

    return read


@pytest.mark.parametrize(
    ("ops", "what"),
    [
        (("aten::item", "aten::_local_scalar_dense"), ".item()"),
        (("aten::is_nonzero", "aten::item", "aten::_local_scalar_dense"), "truth value of a tensor"),
        (("aten::index", "aten::nonzero"), "indexing with a mask"),
        (("aten::nonzero",), "nonzero()"),
        (("aten::_unique2",), "unique()"),
        (("aten::to", "aten::_to_copy", "aten::copy_"), "a copy to the host"),
        (("aten::masked_select",), "masked_select()"),
        ((), "a copy to the host (cudaMemcpyAsync)"),
    ],
)
def test_a_read_is_one_wait_in_plain_words(ops: tuple[str, ...], what: str):
    (line,) = analysis_of(decode(inside(*ops))).waits
    assert (line.what, line.count, line.kind) == (what, 1.0, WaitKind.COPY)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("cudaStreamSynchronize", "stream.synchronize()"),
        ("cudaEventSynchronize", "event.synchronize()"),
        ("cudaDeviceSynchronize", "torch.cuda.synchronize()"),
        ("cudaStreamSynchronize_v3020", "stream.synchronize()"),
        ("hipDeviceSynchronize", "torch.cuda.synchronize()"),
    ],
)
def test_synchronisations_are_waits(name: str, what: str):
    (line,) = analysis_of(decode(lambda machine: machine.synchronize(name))).waits
    assert (line.what, line.count, line.kind) == (what, 1.0, WaitKind.SYNCHRONIZE)


def test_a_wait_through_the_driver_is_found_by_its_synchronisation_record():
    (line,) = analysis_of(decode(Machine.unseen_wait)).waits
    assert line.what == "a wait for the device, through the driver" and line.count == 1.0


def test_a_synchronisation_record_of_a_call_that_is_there_counts_once():
    def wait(machine: Machine) -> None:
        start = machine.now_us
        machine.synchronize()
        machine._span("cuda_sync", "Stream Sync", start + 0.5, machine.now_us - 0.5, 7, correlation=888_888)

    assert analysis_of(decode(wait)).syncs_per_step == 1.0


@pytest.mark.parametrize("name", ["cudaMemcpyAsync", "cuMemcpyDtoHAsync_v2", "cudaMemcpyFromSymbolAsync"])
def test_a_copy_that_asks_not_to_block_blocks_with_pageable_memory(name: str):
    (line,) = analysis_of(decode(lambda machine: machine.pageable_copy(name=name))).waits
    assert line.kind is WaitKind.PAGEABLE_COPY and "not pinned" in line.what
    assert line.blocked_ms > 0.1


@pytest.mark.parametrize("kind", ["DtoH (Device -> Pinned)", "HtoD (Pinned -> Device)", "HtoD (Pageable -> Device)"])
def test_copies_that_return_at_once_are_no_waits(kind: str):
    analysis = analysis_of(decode(lambda machine: machine.copy(kind, 1.0)))
    assert analysis.syncs_per_step == 0 and analysis.waits == ()


@pytest.mark.parametrize("name", ["cudaMemcpy", "cudaMemcpyToSymbol", "cuMemcpyHtoD_v2", "cuMemcpy_ptds"])
def test_a_copy_that_blocks_is_a_wait_unless_it_stays_on_the_gpu(name: str):
    (line,) = analysis_of(decode(lambda machine: machine.copy("HtoD (Pinned -> Device)", 1.0, name=name))).waits
    assert (line.kind, line.count) == (WaitKind.COPY, 1.0)
    inside = analysis_of(decode(lambda machine: machine.copy("DtoD (Device -> Device)", 1.0, name=name)))
    assert inside.waits == ()


def test_two_reads_in_one_line_are_two_waits():
    def read_twice(machine: Machine) -> None:
        read_item(machine)
        read_item(machine)

    (line,) = analysis_of(decode(read_twice)).waits
    assert line.count == 2.0


@pytest.mark.parametrize("name", ["cudaFree", "cuMemFree_v2", "cuMemUnmap", "cudaHostUnregister"])
def test_memory_given_back_to_the_driver_is_a_wait_if_it_takes_long(name: str):
    (line,) = analysis_of(decode(lambda machine: machine.call(name, 300.0))).waits
    assert line.kind is WaitKind.ALLOCATION and line.blocked_ms == pytest.approx(0.3)
    assert analysis_of(decode(lambda machine: machine.call("cudaMalloc", 3.0))).waits == ()


def test_a_wait_knows_how_long_it_took():
    waits = find_waits(trace_of(decode(read_item)))
    # Loading and the end wait too, outside of the steps.
    assert len(waits) == 24 + 2
    assert all(wait.blocked_us > 100 for wait in waits[1:-1])
    assert [wait.start_us for wait in waits] == sorted(wait.start_us for wait in waits)


def test_the_line_named_is_not_pytorchs_own():
    trace = trace_of(decode(read_item))
    wait = find_waits(trace)[3]
    frame = blame(wait.stack)
    assert frame is not None and (frame.file, frame.line, frame.function) == ("sampler.py", 200, "sample")
    assert str(frame) == "sample() of sampler.py:200"
    assert [str(f) for f in wait.stack] == ["item", "sample() of sampler.py:200", "decode() of generate.py:10"]
    assert blame(()) is None
