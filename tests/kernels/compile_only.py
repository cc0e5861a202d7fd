"""Compile what a launcher would launch, for a GPU that is not there, and read the machine code.

Triton's wheel brings ptxas, cuobjdump and nvdisasm. The interpreter and the compiler exclude each other within a
process, so a test file that compiles runs itself again: see `run_without_interpreter`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What one kernel became."""

    name: str
    registers: int
    # Spilled registers live here.
    stack_bytes: int
    # What the program asks for at its launch included.
    shared_bytes: int
    # 16-byte loads from global memory, and how many of them stand before the wait for the producers.
    wide_loads: int
    wide_loads_before_wait: int
    # Copies from global to shared memory that nobody waits for: 16 bytes a thread, and less.
    wide_copies: int
    narrow_copies: int
    # Loads narrower than 16 bytes, and stores to shared memory.
    narrow_loads: int
    shared_stores: int
    tensor_core_products: int
    waits: int
    # Runs of memory that are asked into the L2.
    prefetches: int


def read_cubin(name: str, cubin: bytes, dynamic_shared_bytes: int = 0) -> Compiled:
    """Take a cubin apart."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    registers, stack, shared = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "SHARED"))
    loads = re.findall(r"\b(ACQBULK|LDG\.E[.\w]*)", sass)
    wide = [op for op in loads if "ACQBULK" in op or ".128" in op]
    copies = re.findall(r"\bLDGSTS\.E[.\w]*", sass)
    wide_copies = [op for op in copies if ".128" in op]
    return Compiled(
        name=name,
        registers=registers,
        stack_bytes=stack,
        shared_bytes=shared + dynamic_shared_bytes,
        wide_loads=len([op for op in wide if op != "ACQBULK"]),
        wide_loads_before_wait=wide.index("ACQBULK") if "ACQBULK" in wide else 0,
        wide_copies=len(wide_copies),
        narrow_copies=len(copies) - len(wide_copies),
        narrow_loads=len(loads) - len(wide),
        shared_stores=len(re.findall(r"\bST(?:S|SM)\b", sass)),
        tensor_core_products=len(re.findall(r"\b(?:HMMA|HGMMA|UTCHMMA)\b", sass)),
        waits=loads.count("ACQBULK"),
        prefetches=sass.count("UBLKPF"),
    )


@contextmanager
def compiling(arch: int) -> Iterator[list[Compiled]]:
    """Let launches on CPU tensors compile for an `arch`, 90 for sm_90, instead of running; collect the kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class NoGpu:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    kernels: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, warmup=True, **kwargs)
        kernels.append(read_cubin(self.fn.__name__, kernel.asm["cubin"], kernel.metadata.shared))
        return kernel

    driver.set_active(NoGpu())
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run


def print_kernels(kernels: list[Compiled]) -> None:
    """End of the second process."""
    print(json.dumps([asdict(kernel) for kernel in kernels]))


def run_without_interpreter(file: str, *arguments: str) -> list[Compiled]:
    """Run a test file as a program, which compiles and calls `print_kernels`."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        environment.pop("TRITON_INTERPRET", None)
        done = subprocess.run(
            [sys.executable, file, *arguments], env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Compiled(**kernel) for kernel in json.loads(done.stdout.splitlines()[-1])]
