"""Kernels compiled side by side: all of them, once, and none of them launched."""

import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from soloist.kernels import norm_triton, step_end_triton
from soloist.kernels.compile_ahead import compiling_ahead
from tests.kernels.compile_only import Compiled, compiling, print_kernels, run_without_interpreter

KERNELS = ["copy_to_slot_kernel", "rms_norm_kernel", "rms_norm_kernel"]


def launch_all() -> None:
    """Launch two kernels, one of them in two forms and one of these twice, on tensors that no GPU could read."""
    x, norm = torch.empty(3, 64, dtype=torch.bfloat16), torch.empty(64, dtype=torch.bfloat16)
    unaligned = torch.empty(3 * 64 + 1, dtype=torch.bfloat16)[1:].view(3, 64)
    for rows in (x, x.clone(), unaligned):
        norm_triton.rms_norm_rows(rows, norm, 1e-6)
    ring, count = torch.empty(4, 16), torch.empty(1, dtype=torch.int64)
    step_end_triton.copy_to_slot(torch.empty(8), ring, count)


def test_what_is_launched_ahead_is_compiled_once_and_not_run():
    kernels = run_without_interpreter(__file__)
    assert sorted(kernel.name for kernel in kernels) == KERNELS


def test_what_another_thread_launches_meanwhile_runs(monkeypatch: pytest.MonkeyPatch):
    runs: list[tuple[int, bool]] = []

    def run(self: object, *args: int, grid: object, warmup: bool) -> int:
        runs.append((args[0], warmup))
        return args[0]

    monkeypatch.setattr(JITFunction, "run", run)
    kernel, results = object(), []

    def launch(number: int) -> None:
        results.append(JITFunction.run(kernel, number, grid=(1,), warmup=False))

    with compiling_ahead(1):
        launch(1)
        launch(1)
        other = threading.Thread(target=lambda: (launch(2), launch(2)))
        other.start()
        other.join()
    assert runs == [(1, True), (2, False), (2, False)] and results == [None, None, 2, 2]
    launch(3)
    assert runs[-1] == (3, False)


def test_threads_compile_ahead_one_after_the_other():
    first, second = threading.Event(), threading.Event()
    original = JITFunction.run

    def compile_too() -> None:
        with compiling_ahead(1):
            second.set()
            first.wait(60)

    with compiling_ahead(1):
        other = threading.Thread(target=compile_too)
        other.start()
        assert not second.wait(0.1)
    assert second.wait(60)
    first.set()
    other.join()
    # What was there before either is there behind both.
    assert JITFunction.run is original


def program() -> list[Compiled]:
    """What runs in a process without the interpreter: the second launches find what was compiled ahead."""
    import triton

    compiled, progress, threads = [], [], set()

    def listen(*, src, metadata, metadata_group, times, cache_hit):
        compiled.append(src.name)
        threads.add(threading.get_ident())

    def make_launcher(src, metadata):
        loaded.append(src.name)
        threads.add(threading.get_ident())
        return loaded.append

    # What a GPU's driver has besides, for the launchers.
    gpu, loaded = triton.runtime.driver.active, []
    gpu.launcher_cls = make_launcher
    gpu.utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 18},
        load_binary=lambda *arguments: (1, 2, 3, 4, 1024),
    )
    triton.knobs.compilation.listener = listen
    with compiling_ahead(2, lambda done, total: progress.append((done, total))):
        launch_all()
    assert progress == [(1, 3), (2, 3), (3, 3)], progress
    assert sorted(compiled) == sorted(loaded) == KERNELS
    assert threading.get_ident() not in threads
    with compiling(90) as kernels:
        launch_all()
    assert len(compiled) == 3, "compiled again"
    return [kernel for i, kernel in enumerate(kernels) if kernel not in kernels[:i]]


if __name__ == "__main__":
    # Sets the GPU that is compiled for.
    with compiling(90):
        pass
    print_kernels(program())
