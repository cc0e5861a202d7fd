"""Kernels of several ranks that push into each other's memory, all in this process: queued, then run together.

Without a GPU the machine's C++ compiler compiles them, and threads and stores take turns as a seed says. On a GPU every
rank has a stream.
"""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from soloist.kernels import nvrtc
from soloist.kernels.mailboxes import EMPTY, Mailboxes, num_words, view_mailboxes
from tests.kernels.cuda_on_cpu import OPTIONS
from tests.kernels.device import DEVICE

HEADER = Path(__file__).with_suffix(".h")


class Kernel(NamedTuple):
    """What there is to compile."""

    source: str
    name: str
    definitions: tuple[tuple[str, str], ...]


class Launch(NamedTuple):
    """What a launcher asked for."""

    kernel: Any
    grid: tuple[int, int, int]
    threads: int
    arguments: tuple[torch.Tensor | int | float | None, ...]


@cache
def _compile(kernels: tuple[Kernel, ...]) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++, which compiles CUDA C++ for a CPU")
    parts, table = [f'#include "{HEADER}"'], []
    for i, kernel in enumerate(kernels):
        defined = "\n".join(f"#define {key} {value}" for key, value in kernel.definitions)
        undefined = "\n".join(f"#undef {key}" for key, _ in kernel.definitions)
        source = kernel.source.replace('extern "C"', "")
        parts.append(f"namespace kernel_{i} {{\n{defined}\n{source}\n{undefined}\n}}")
        parts.append(
            f"template <class... A> void enter_{i}(void (*f)(A...), void** values)"
            f" {{ cpu_call(f, values, std::index_sequence_for<A...>{{}}); }}"
        )
        table.append(f"[](void** values) {{ enter_{i}(kernel_{i}::{kernel.name}, values); }}")
    parts.append(f"void (*const cpu_kernels[])(void**) = {{{', '.join(table)}}};")
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder, "ranks.so"))
        command = [compiler, *OPTIONS, "-", "-o", library]
        done = subprocess.run(command, input="\n".join(parts), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return ctypes.CDLL(library)


class Ranks:
    """Ranks with mailboxes of their own, and the kernels that they have launched.

    Args:
        monkeypatch: replaces `load_kernel` and `launch` of a module.
        module: that launches kernels.
        timeout_s: on a CPU a microsecond is one turn of one program.
        replaced: definitions of the kernels that are other here.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        module: Any,
        *,
        world_size: int,
        max_tokens: int,
        hidden_size: int,
        timeout_s: float = 2.0 if DEVICE.type == "cuda" else 0.2,
        replaced: dict[str, int] | None = None,
    ) -> None:
        size = num_words(world_size, max_tokens=max_tokens, hidden_size=hidden_size)
        self._buffers = tuple(torch.full((size,), EMPTY, dtype=torch.int32, device=DEVICE) for _ in range(world_size))
        shape = {"max_tokens": max_tokens, "hidden_size": hidden_size, "timeout_s": timeout_s}
        self.mailboxes: list[Mailboxes] = [view_mailboxes(self._buffers, rank=r, **shape) for r in range(world_size)]
        self._launches: list[list[Launch]] = [[] for _ in range(world_size)]
        self._replaced = replaced or {}
        monkeypatch.setattr(module, "load_kernel", self._load_kernel)
        monkeypatch.setattr(module, "launch", self._launch)

    def _load_kernel(self, source: str, name: str, definitions: tuple[tuple[str, str], ...], device: Any) -> Any:
        definitions = tuple((key, str(self._replaced.get(key, value))) for key, value in definitions)
        # Loaded before any kernel waits for another: loading may wait for the GPU.
        return (
            nvrtc.load_kernel(source, name, definitions, device)
            if DEVICE.type == "cuda"
            else Kernel(source, name, definitions)
        )

    def _launch(self, kernel: Any, grid: tuple[int, int, int], threads: int, *arguments: Any) -> None:
        # The rank is the one whose turns are counted.
        (rank,) = (r for r, boxes in enumerate(self.mailboxes) if any(a is boxes.has_failed for a in arguments))
        self._launches[rank].append(Launch(kernel, grid, threads, arguments))

    def run(self, seed: int = 0) -> None:
        """Run every rank's kernels in their order, ranks beside each other."""
        launches, self._launches = self._launches, [[] for _ in self._launches]
        if DEVICE.type == "cuda":
            self._run_on_streams(launches)
        else:
            self._run_on_cpu(launches, seed)

    def _run_on_streams(self, launches: list[list[Launch]]) -> None:
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in launches]
        for i in range(max(map(len, launches))):
            for stream, queue in zip(streams, launches, strict=True):
                with torch.cuda.stream(stream):
                    for launch in queue[i : i + 1]:
                        nvrtc.launch(launch.kernel, launch.grid, launch.threads, *launch.arguments)
        torch.cuda.synchronize()

    def _run_on_cpu(self, launches: list[list[Launch]], seed: int) -> None:
        kernels = tuple(sorted({launch.kernel for queue in launches for launch in queue}))
        calls: list[int] = []
        addresses: list[Any] = []
        alive: list[Any] = []
        for rank, queue in enumerate(launches):
            for launch in queue:
                values = [_as_c(argument) for argument in launch.arguments]
                alive.append(values)
                addresses.append((ctypes.c_void_p * len(values))(*map(ctypes.addressof, values)))
                calls += [rank, kernels.index(launch.kernel), launch.grid[0], launch.threads]
        ends = [end for x in self._buffers for end in (x.data_ptr(), x.data_ptr() + x.numel() * x.element_size())]
        _compile(kernels).run_ranks(
            len(launches),
            (ctypes.c_void_p * len(ends))(*ends),
            len(addresses),
            (ctypes.c_int * len(calls))(*calls),
            (ctypes.c_void_p * len(addresses))(*map(ctypes.addressof, addresses)),
            ctypes.c_uint(seed),
        )


def _as_c(argument: torch.Tensor | int | float | None) -> Any:
    if argument is None or isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return (ctypes.c_int if isinstance(argument, int) else ctypes.c_float)(argument)
