"""What this machine is and can do: processors, memory, libraries, read bandwidth.

Owns the facts and the small file that remembers a measured bandwidth. Knows nothing of models.
"""

import json
import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import soloist
from soloist.kernels import step_cpu
from soloist.roofline import measure_bandwidth
from soloist.runtime.comm import find_strangers

# Past every cache of a CPU we know, and read seven times within a quarter second.
_QUICK_MEASURE_BYTES = 2**28


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One CUDA device."""

    name: str
    # As in "9.0" for Hopper.
    compute_capability: str
    memory_gib: float
    # What can be allocated now.
    free_memory_gib: float
    # Reading, measured.
    bandwidth_gb_per_s: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about this machine; `inspect_machine` fills them in."""

    system: str
    python: str
    soloist: str
    torch: str
    # None: not installed.
    triton: str | None
    # CUDA that PyTorch was built for. None: a CPU build.
    cuda: str | None
    cpu: str
    # Vector instructions that PyTorch uses, as in "AVX2".
    cpu_capability: str
    # What Soloist's own machine code that runs steps here was built for, as in "avx512". None: none loads, PyTorch's
    # operators run them.
    cpu_machine_code: str | None
    # What PyTorch uses by default.
    num_threads: int
    memory_gib: float
    # What can be allocated now without swapping.
    free_memory_gib: float
    # Reading with `num_threads` threads, measured.
    bandwidth_gb_per_s: float
    gpus: tuple[Gpu, ...]
    # Pairs of GPUs of which one cannot read the other's memory, and which therefore cannot share a model.
    strangers: tuple[tuple[int, int], ...]

    @property
    def capabilities(self) -> dict[str, str]:
        """What works here, and where something does not, what is missing."""
        if self.gpus and self.triton:
            gpu = "yes"
        elif self.gpus:
            gpu = "no: Triton is not installed (pip install triton)"
        elif self.cuda:
            gpu = "no: PyTorch sees no CUDA device (is the driver loaded?)"
        else:
            gpu = "no: this PyTorch is a CPU build"
        cpu = "yes" if self.cpu_machine_code else "yes, by PyTorch's operators: no machine code of Soloist's loads here"
        works = {"answers on the CPU": cpu, "answers on the GPU": gpu}
        if len(self.gpus) > 1:
            pairs = ", ".join(f"{a} and {b}" for a, b in self.strangers)
            shared = f"no: GPUs {pairs} cannot read each other's memory" if pairs else "yes"
            works["shares a model between GPUs"] = shared
        return works


def cpu_name() -> str:
    """Name the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> tuple[float, float]:
    """Give physical and free memory."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return total, total
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return total, int(fields["MemAvailable"].split()[0]) / 2**20


def known_bandwidth(device: torch.device, cache_dir: Path, *, seen_gb_per_s: float = 0.0) -> float:
    """Give a device's read bandwidth in GB/s: measured the first time, then read from `cache_dir`.

    On the CPU it is that of PyTorch's current number of threads, and each number is measured once.

    Args:
        device: a CPU or CUDA device.
        cache_dir: where measured values are kept.
        seen_gb_per_s: a rate that was reached. What was measured lower was disturbed, and is measured again.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{cpu_name()}, {torch.get_num_threads()} threads"
    path = cache_dir / "bandwidth.json"
    try:
        known = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        # Missing or damaged: it is only a cache.
        known = {}
    if known.get(name, 0.0) <= seen_gb_per_s:
        measured = measure_bandwidth(device, num_bytes=_QUICK_MEASURE_BYTES if device.type == "cpu" else None)
        known[name] = max(measured, known.get(name, 0.0))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(known, indent=1))
        except OSError:
            # A home that cannot be written costs a measurement at every start, nothing else.
            pass
    return float(known[name])


def _inspect_gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(
        name=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        memory_gib=total / 2**30,
        free_memory_gib=free / 2**30,
        bandwidth_gb_per_s=measure_bandwidth(f"cuda:{index}"),
    )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def inspect_machine() -> Machine:
    """Look at this machine; measures bandwidth afresh."""
    total, free = _memory_gib()
    return Machine(
        system=platform.platform(),
        python=platform.python_version(),
        soloist=soloist.__version__,
        torch=torch.__version__,
        triton=_installed("triton"),
        cuda=torch.version.cuda,
        cpu=cpu_name(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cpu_machine_code=step_cpu.loaded_name(),
        num_threads=torch.get_num_threads(),
        memory_gib=total,
        free_memory_gib=free,
        bandwidth_gb_per_s=measure_bandwidth("cpu", num_bytes=_QUICK_MEASURE_BYTES),
        gpus=tuple(_inspect_gpu(i) for i in range(torch.cuda.device_count())),
        strangers=find_strangers(torch.cuda.device_count()),
    )
