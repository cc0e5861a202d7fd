"""Refusing what does not fit, before any of it is allocated."""

import math
from pathlib import Path

import torch

from soloist.errors import DoesNotFitError

_GIB = 2**30
# Where Linux says how much memory can be had without swapping.
_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> float:
    """Say how much memory can be allocated on a device, in bytes; infinity where nobody knows."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "cpu" and _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return math.inf


def check_fits(num_bytes: float, device: torch.device, what: str) -> None:
    """Refuse an allocation that cannot succeed.

    Args:
        num_bytes: bytes that will be asked for.
        device: where.
        what: what needs them, for the message.

    Raises:
        DoesNotFitError: less is free.
    """
    free = free_bytes(device)
    if num_bytes > free:
        elsewhere = "" if device.type == "cpu" else ", or run it on the CPU"
        raise DoesNotFitError(
            f"{what} needs {num_bytes / _GIB:.2f} GiB on {device}, and {free / _GIB:.2f} GiB are free: choose a smaller"
            f" model or context, or end what else uses the memory{elsewhere}"
        )
