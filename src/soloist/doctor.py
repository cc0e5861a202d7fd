"""What this machine is and can do: processors, memory, libraries, read bandwidth, and what several GPUs are good for.

Owns the facts, the small file that remembers a measured bandwidth, and the rule by which a model is shared or not. Of
models it knows what `roofline` counts.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import soloist
from soloist.hub import BUILT_IN, built_in_config
from soloist.kernels import step_cpu
from soloist.kernels.requirements import find_lack
from soloist.loading import choose_device
from soloist.models import find_model_class
from soloist.models.footprint import model_footprint
from soloist.models.loader import NUM_RANKS
from soloist.roofline import Footprint, measure_bandwidth
from soloist.runtime.comm import find_strangers

# Past every cache of a CPU we know, and read seven times within a quarter second.
_QUICK_MEASURE_BYTES = 2**28
# Of one exchange of a step between two H200, with the residual added: measured, see `docs/log.md`. Other links take
# longer.
EXCHANGE_US = 2.2
# Sharing pays where it saves so many times what its exchanges take: ranks also wait for each other.
_CLEAR_GAIN = 2.0
# Positions in the cache that steps are priced with.
_CONTEXT_LEN = 8192
# Room beside the weights.
_ROOM = 1.2


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One CUDA device."""

    name: str
    # As in "9.0" for Hopper.
    compute_capability: str
    memory_gib: float
    # What can be allocated now.
    free_memory_gib: float
    # What the kernels miss here, and what to do. None: nothing.
    lack: str | None
    # Reading, measured.
    bandwidth_gb_per_s: float


class Sharing(Enum):
    """Whether several GPUs should share a model."""

    # It does not fit one.
    NEEDED = "needed"
    PAYS = "pays"
    # What is saved and what exchanges take are alike.
    UNCLEAR = "unclear"
    LOSES = "loses"


@dataclass(frozen=True, kw_only=True)
class SharingEstimate:
    """What sharing a model between GPUs should give: floors of a step of one token, nothing measured but bandwidth."""

    model: str
    num_gpus: int
    sharing: Sharing
    # Of the bytes on one GPU, whether they fit there or not, and of a rank's bytes on each.
    one_ms: float
    rank_ms: float
    # All exchanges of a step.
    exchange_ms: float

    @property
    def in_words(self) -> str:
        """Advise, as an estimate."""
        on_several = f"{self.rank_ms:.2f} ms and {self.exchange_ms:.2f} ms of exchanges on {self.num_gpus}"
        figures = f"a token costs at least {self.one_ms:.2f} ms on one GPU, {on_several}"
        advice = {
            Sharing.NEEDED: f"needs {self.num_gpus} GPUs for its weights",
            Sharing.PAYS: f"--tensor-parallel-size {self.num_gpus} should pay",
            Sharing.UNCLEAR: "take one GPU, or measure: more may win little or lose",
            Sharing.LOSES: "take one GPU: exchanges cost more than sharing saves",
        }
        return f"{advice[self.sharing]} (estimate: {figures})"


def estimate_sharing(
    footprints: Mapping[str, Footprint], gpus: Sequence[Gpu], *, exchange_us: float = EXCHANGE_US
) -> tuple[SharingEstimate, ...]:
    """Say of models whether GPUs should share them, as few as hold the weights and at least two.

    Args:
        footprints: by model; those that fit nowhere are left out.
        gpus: of this machine; the least of them counts.
        exchange_us: of one exchange between ranks.
    """
    memory_bytes = 2**30 * min(gpu.memory_gib for gpu in gpus)
    bandwidth = min(gpu.bandwidth_gb_per_s for gpu in gpus)
    estimates = []
    for model, footprint in footprints.items():
        needed_bytes = _ROOM * footprint.weight_bytes
        sizes = [size for size in NUM_RANKS if 1 < size <= len(gpus) and needed_bytes < size * memory_bytes]
        if not sizes:
            continue
        num_gpus = min(sizes)
        one_ms, rank_ms = (
            footprint.step_floor_ms(1, _CONTEXT_LEN, bandwidth_gb_per_s=bandwidth, tensor_parallel_size=size)
            for size in (1, num_gpus)
        )
        exchange_ms = footprint.num_all_reduces(num_gpus) * exchange_us / 1e3
        if needed_bytes >= memory_bytes:
            sharing = Sharing.NEEDED
        elif one_ms - rank_ms < exchange_ms:
            sharing = Sharing.LOSES
        else:
            sharing = Sharing.PAYS if one_ms - rank_ms > _CLEAR_GAIN * exchange_ms else Sharing.UNCLEAR
        estimates.append(
            SharingEstimate(
                model=model,
                num_gpus=num_gpus,
                sharing=sharing,
                one_ms=one_ms,
                rank_ms=rank_ms,
                exchange_ms=exchange_ms,
            )
        )
    return tuple(estimates)


def built_in_footprints() -> dict[str, Footprint]:
    """Count the built-in models, in bf16."""
    footprints = {}
    for name in BUILT_IN:
        config = built_in_config(name)
        model_class = find_model_class(config)
        footprints[name] = model_footprint(model_class, model_class.config_class.from_dict(config))
    return footprints


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
    # Where a model runs if nobody says where: "cuda" or "cpu".
    default_device: str
    # Of the built-in models, where GPUs can share one.
    sharing: tuple[SharingEstimate, ...]

    @property
    def capabilities(self) -> dict[str, str]:
        """What works here, and where something does not, what is missing."""
        if self.gpus:
            lack = self.gpus[0].lack
            gpu = "yes" if lack is None else f"no: {lack}"
        elif self.cuda:
            gpu = "no: PyTorch sees no CUDA device (is the driver loaded?)"
        else:
            gpu = "no: this PyTorch is a CPU build"
        cpu = "yes" if self.cpu_machine_code else "yes, by PyTorch's operators: no machine code of Soloist's loads here"
        works = {"answers on the CPU": cpu, "answers on the GPU": gpu}
        if len(self.gpus) > 1:
            pairs = ", ".join(f"{a} and {b}" for a, b in self.strangers)
            lack = next((gpu.lack for gpu in self.gpus if gpu.lack is not None), None)
            shared = "yes" if lack is None else f"no: {lack}"
            works["shares a model between GPUs"] = (
                f"no: GPUs {pairs} cannot read each other's memory" if pairs else shared
            )
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
    lack = find_lack(index)
    return Gpu(
        name=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        memory_gib=total / 2**30,
        free_memory_gib=free / 2**30,
        lack=None if lack is None else lack.in_words,
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
    gpus = tuple(_inspect_gpu(i) for i in range(torch.cuda.device_count()))
    strangers = find_strangers(len(gpus))
    can_share = len(gpus) > 1 and not strangers and all(gpu.lack is None for gpu in gpus)
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
        gpus=gpus,
        strangers=strangers,
        default_device=choose_device().device.type,
        sharing=estimate_sharing(built_in_footprints(), gpus) if can_share else (),
    )
