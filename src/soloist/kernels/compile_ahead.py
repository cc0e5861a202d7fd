"""Compiling kernels side by side, before any of them runs: a step has dozens, each takes about a second of a core."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from soloist.kernels.launch import HAS_TRITON

if HAS_TRITON:
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.jit import JITFunction

# Called with (kernels compiled, kernels to compile).
OnCompiled = Callable[[int, int], None]

# Held by whoever compiles ahead, since launches are caught where all threads make them.
_COMPILING = threading.Lock()


class _Compilers(ThreadPoolExecutor):
    """Threads that also do what a kernel's first launch would: build the C code around it, and load both."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            kernel = fn(*args, **kwargs)
            # A property, made on first use.
            assert kernel.run is not None
            return kernel

        return super().submit(compile_and_load)


def _kind(argument: Any) -> Any:
    """Give all of an argument that a compiled kernel may depend on: its value, but of tensors dtype and alignment."""
    if isinstance(argument, tuple):
        return tuple(_kind(part) for part in argument)
    return (argument.dtype, argument.data_ptr() % 16) if isinstance(argument, torch.Tensor) else argument


@contextmanager
def compiling_ahead(
    num_threads: int, on_compiled: OnCompiled | None = None, *, device: int | None = None
) -> Iterator[None]:
    """Compile the Triton kernels that are launched inside the block, in threads, instead of running them.

    All are compiled when the block ends. What a kernel would have written is not there: nothing that depends on it may
    run in the block either. What other threads launch meanwhile runs, and other threads that compile ahead wait.

    Args:
        num_threads: that compile.
        on_compiled: called with (kernels compiled, kernels to compile).
        device: the GPU that they are loaded on. None: none is there.
    """
    # A model's layers launch the same kernels, and finding that out is most of Triton's work.
    seen: set[tuple[Any, ...]] = set()
    thread = threading.get_ident()

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        options = ((name, _kind(value)) for name, value in kwargs.items())
        launch = (id(self), *(_kind(value) for value in args), *options)
        if launch not in seen:
            seen.add(launch)
            run(self, *args, grid=grid, warmup=True, **kwargs)
        return None

    # A thread begins on the first GPU, and loads for the one that it is on.
    begin = None if device is None else partial(torch.cuda.set_device, device)
    with _COMPILING:
        run, JITFunction.run = JITFunction.run, compile_only
        try:
            with _Compilers(num_threads, initializer=begin) as threads, AsyncCompileMode(threads) as mode:
                yield
                for done, _ in enumerate(as_completed(mode.raw_futures)):
                    if on_compiled is not None:
                        on_compiled(done + 1, len(mode.raw_futures))
        finally:
            JITFunction.run = run
