"""Waits inside of a compiled extension, through the CUDA runtime, without PyTorch knowing.

The extension is compiled with the machine's C compiler; without one, the runtime library itself is called.
"""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_work import Work, has_fault, steps

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
int plan(const char *library) {
    void *handle = dlopen(library, RTLD_NOW);
    int (*wait)(void *) = (int (*)(void *))dlsym(handle, "cudaStreamSynchronize");
    return wait ? wait(0) : -1;
}
"""


def runtime_library() -> str:
    """The CUDA runtime that PyTorch has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcudart" in line:
            return line.split()[-1]
    raise RuntimeError("no CUDA runtime is loaded")


def make_plan() -> Callable[[], int]:
    library = runtime_library()
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        wait, argument = ctypes.CDLL(library).cudaStreamSynchronize, None
    else:
        folder = Path(tempfile.mkdtemp())
        (folder / "plan.c").write_text(SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", "plan.so", "plan.c", "-ldl"], cwd=folder, check=True)
        # It keeps Python's lock while it waits, as extensions do that were written without care.
        wait, argument = ctypes.PyDLL(str(folder / "plan.so")).plan, library.encode()
    return lambda: wait(argument)  # fault


torch.cuda.init()
work = Work()
plan = make_plan()
for _ in steps():
    work.step()
    assert not has_fault() or plan() == 0
