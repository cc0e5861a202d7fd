"""CUDA C++ kernels on CPU tensors, by the machine's C++ compiler: an interpreter as Triton has one."""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

HEADER = Path(__file__).with_suffix(".h")
# Fortified jumps would end the process: they take another thread's stack for a wrong one.
OPTIONS = ("-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-w", "-shared", "-fPIC", "-x", "c++")


@cache
def _compile(source: str, name: str, definitions: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++, which compiles CUDA C++ for a CPU")
    cluster = dict(definitions).get("CLUSTER", "1")
    entry = (
        "void launch(int programs, int threads, void** values, unsigned seed)"
        f" {{ cpu_launch({name}, programs, {cluster}, threads, values, seed); }}"
    )
    code = f'{source}\nextern "C" {entry}\n'
    options = [*OPTIONS, "-include", str(HEADER), "-", "-o"]
    defined = [f"-D{key}={value}" for key, value in definitions]
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder, "kernel.so"))
        done = subprocess.run(
            [compiler, *defined, *options, library], input=code, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return ctypes.CDLL(library)


def load_kernel(source: str, name: str, definitions: tuple[tuple[str, str], ...], device: torch.device) -> ctypes.CDLL:
    """Stand in for `nvrtc.load_kernel`."""
    assert device.type == "cpu"
    return _compile(source, name, definitions)


def launch(
    kernel: ctypes.CDLL,
    grid: tuple[int, int, int],
    threads: int,
    *arguments: torch.Tensor | int | float | None,
    shared_bytes: int = 0,
    seed: int = 0,
) -> None:
    """Stand in for `nvrtc.launch`; returns when the kernel has ended. `seed` decides in which order warps go on."""
    assert grid[1:] == (1, 1) and shared_bytes <= 227 << 10
    values: list[ctypes.c_void_p | ctypes.c_int | ctypes.c_float] = []
    for argument in arguments:
        if argument is None or isinstance(argument, torch.Tensor):
            values.append(ctypes.c_void_p(None if argument is None else argument.data_ptr()))
        else:
            values.append((ctypes.c_int if isinstance(argument, int) else ctypes.c_float)(argument))
    addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    kernel.launch(grid[0], threads, addresses, seed)
