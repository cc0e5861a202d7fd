"""What the kernels need of a GPU and of what is installed beside it. Looks; compiles and launches nothing."""

import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from soloist.config import Environment
from soloist.kernels.launch import HAS_TRITON
from soloist.kernels.nvrtc import HAS_NVRTC

# The first with programmatic dependent launch and bulk copies (`griddepcontrol`, `cp.async.bulk`).
MIN_CAPABILITY = (9, 0)
# Of one program: what Hopper and Blackwell's data-centre GPUs have. At Ling-3.0's sizes latent attention takes 217.
SHARED_KIB = 227


@dataclass(frozen=True, kw_only=True)
class Lack:
    """What the kernels miss."""

    # Names the GPU, what is missing, and what to do.
    in_words: str
    # Nothing runs without it. Else some of it may: smaller models, or what was compiled before.
    is_fatal: bool


def find_lack(index: int) -> Lack | None:
    """Say what kernels miss on a GPU that PyTorch sees, the gravest only; None: nothing.

    Args:
        index: of the GPU.
    """
    gpu = torch.cuda.get_device_properties(index)
    name = f"the {gpu.name}"
    fatal = None
    if torch.version.cuda is None:
        fatal = f"{name} is no NVIDIA GPU, and there are no kernels for others"
    elif (gpu.major, gpu.minor) < MIN_CAPABILITY:
        fatal = f"{name} has compute capability {gpu.major}.{gpu.minor}, and kernels need 9.0 or more: Hopper or newer"
    elif not HAS_TRITON:
        fatal = f"the kernels for {name} need Triton: pip install triton"
    elif not HAS_NVRTC:
        fatal = f"the kernels for {name} need NVRTC: pip install cuda-bindings"
    if fatal is not None:
        return Lack(in_words=fatal, is_fatal=True)
    doubt = None
    # NVIDIA's builds of PyTorch have it, its stubs do not.
    shared_kib = gpu.shared_memory_per_block_optin // 1024  # type: ignore[attr-defined]
    if shared_kib < SHARED_KIB:
        doubt = f"{name} has {shared_kib} KiB of shared memory for a program, and some kernels take up to {SHARED_KIB}"
    elif not (Environment.read().c_compiler or shutil.which("gcc") or shutil.which("clang")):
        doubt = f"the kernels for {name} need a C compiler, which Triton calls: install gcc"
    elif not _python_header().exists():
        doubt = f"the kernels for {name} need {_python_header()}, which Triton includes: install python3-dev"
    return None if doubt is None else Lack(in_words=f"{doubt}; device cuda tries it", is_fatal=False)


def _python_header() -> Path:
    """Say where Triton looks for Python's header; on Debian that is not where packages go."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)) / "Python.h"
