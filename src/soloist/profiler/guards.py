"""Guards for tests: a step that waits for the GPU fails, at the line that waits.

`no_host_sync` stops at the first read of a device value that PyTorch knows of. `assert_returns_early` finds any wait,
also inside of extensions, by its effect: behind a GPU that sleeps, enqueueing must return at once.
"""

import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from soloist.errors import SoloistError, UsageError


class HostSyncError(SoloistError, AssertionError):
    """The host waited for a device, or read a value from it."""


# Devices whose values the host must wait for.
DEVICES = ("cuda",)
_PACKAGE = "soloist/profiler/"


# Operators whose value, or whose result's shape, the host must read before it can go on.
_READING_OPS = {
    "_linalg_check_errors",
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "allclose",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
    "unique_dim_consecutive",
}
_INDEXING_OPS = {"index", "index_put", "index_put_", "_index_put_impl_"}
# How an operator is written, where that is not its name.
_SPELLED = {"_local_scalar_dense": "item", "_unique": "unique", "_unique2": "unique", "unique_dim": "unique"}


class _ReadGuard(TorchDispatchMode):
    """While entered, refuses this thread's operators that read from a tensor on some types of devices."""

    def __init__(self, devices: Sequence[str]) -> None:
        super().__init__()
        self._devices = devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Judge an operator and run it."""
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if not getattr(_allowed, "depth", 0) and _is_reading(name, args, kwargs):
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and tensor.device.type in self._devices:
                    raise _refusal(_SPELLED.get(name, name), tensor)
        return func(*args, **kwargs)


def _is_reading(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Say whether an operator makes the host read."""
    if name in _INDEXING_OPS:
        # The true elements of a mask must be counted first.
        return any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1])
    # Without its size, the sum of the repeats is read.
    return name in _READING_OPS or (name == "repeat_interleave" and kwargs.get("output_size") is None)


def _always(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return True


def _blocks_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """Say whether `.to(...)` copies to the host and waits."""
    targets = [*args, kwargs.get("device")]
    is_to_host = any(isinstance(t, str | torch.device) and torch.device(t).type == "cpu" for t in targets if t)
    non_blocking = kwargs.get("non_blocking", next((arg for arg in args if isinstance(arg, bool)), False))
    return is_to_host and not non_blocking


def _blocks_copy(tensor: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> bool:
    """Say whether `.copy_` waits: it does between devices unless told not to, and if the host's memory is pageable."""
    if tensor.device.type == other.device.type:
        return False
    host = tensor if tensor.device.type == "cpu" else other
    return host.device.type == "cpu" and not (non_blocking and host.is_pinned())


# Methods of a tensor that read it past the operators, and when they do: on a CPU they need no copy, and nothing else
# knows of memory that is not pinned.
_READS: dict[str, Callable[..., bool]] = {
    "__repr__": _always,
    "copy_": _blocks_copy,
    "cpu": _always,
    "numpy": _always,
    "to": _blocks_to,
    "tolist": _always,
}


def _has_list(data: Any, *args: Any, **kwargs: Any) -> bool:
    """Say whether a tensor is made of a list: elements that are tensors are read one by one."""
    return isinstance(data, list | tuple)


# (owner, name), and when they read: what makes tensors does it out of sight of a dispatch mode.
_READERS: dict[tuple[Any, str], Callable[..., bool]] = {
    **{(torch.Tensor, name): reads for name, reads in _READS.items()},
    (torch, "tensor"): _has_list,
    (torch, "as_tensor"): _has_list,
}
# (owner, name): wait for whatever was enqueued.
_WAITS = (
    (torch.cuda, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
    (torch.accelerator, "synchronize"),
)

# Threads that are inside of `allow_host_sync`, and how deep.
_allowed = threading.local()


@contextmanager
def no_host_sync(devices: Sequence[str] = DEVICES) -> Iterator[None]:
    """Raise `HostSyncError` where this thread reads a device value or waits for a device; also a decorator.

    On a GPU, PyTorch's own sync-debug mode raises, which finds reads inside of its operators; that mode belongs to the
    process, so other threads must not wait meanwhile either. Extensions that call CUDA themselves are found by
    `assert_returns_early` only.

    A CPU run is judged operator by operator: one that reads on a GPU is refused. What `torch.compile` made runs
    uncompiled meanwhile. Two things are refused that a GPU may do without a read: an assignment of a number through a
    mask, and `one_hot` with a size, which checks its input on a CPU.

    Args:
        devices: types of the devices whose values must not be read. ("cpu",) tries a CPU run for what would wait on a
            GPU.

    Raises:
        UsageError: they are none, under which nothing would be guarded.
    """
    _check_devices(devices)
    thread = threading.get_ident()
    patches = [*_READERS, *_WAITS]
    has_gpu = "cuda" in devices and torch.cuda.is_available()
    mode = torch.cuda.get_sync_debug_mode() if has_gpu else 0
    others = [device for device in devices if device != "cuda"]
    # None: the class has the method from a parent, and gets it back from there.
    saved = [(owner, name, vars(owner).get(name)) for owner, name in patches]
    for owner, name in patches:
        setattr(owner, name, _guarded(getattr(owner, name), name, _READERS.get((owner, name)), devices, thread))
    if has_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        with _ReadGuard(others) if others else nullcontext():
            yield
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise HostSyncError(f"{_where_raised(error)}: a synchronizing CUDA operation") from error
    finally:
        if has_gpu:
            torch.cuda.set_sync_debug_mode(mode)
        for owner, name, original in saved:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _check_devices(devices: Sequence[str]) -> None:
    with suppress(RuntimeError):
        if not isinstance(devices, str) and devices and all(torch.device(name).type == name for name in devices):
            return
    raise UsageError(
        f'no_host_sync has the devices {devices!r}; allowed: types of devices, as in ("cuda",) or ("cpu",)'
    )


def _guarded(
    original: Callable[..., Any],
    name: str,
    reads: Callable[..., bool] | None,
    devices: Sequence[str],
    thread: int,
) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and not getattr(_allowed, "depth", 0):
            if reads is None:
                raise HostSyncError(f"{_where(sys._getframe(1))}: {name}() waits for the device")
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and tensor.device.type in devices and reads(*args, **kwargs):
                    raise _refusal(name, tensor)
        return original(*args, **kwargs)

    return guarded


def _refusal(name: str, tensor: torch.Tensor) -> HostSyncError:
    return HostSyncError(
        f"{_where(sys._getframe(1))}: {name} reads a value of a {tensor.device.type} tensor of shape"
        f" {tuple(tensor.shape)} on the host"
    )


@contextmanager
def _deeper() -> Iterator[None]:
    _allowed.depth = getattr(_allowed, "depth", 0) + 1
    try:
        yield
    finally:
        _allowed.depth -= 1


@contextmanager
def allow_host_sync(reason: str) -> Iterator[None]:
    """Let this thread wait inside of `no_host_sync`.

    Args:
        reason: why it must; for the reader.
    """
    assert reason, "say why the host may wait here"
    has_gpu = torch.cuda.is_initialized()
    mode = torch.cuda.get_sync_debug_mode() if has_gpu else 0
    with _deeper():
        if has_gpu:
            torch.cuda.set_sync_debug_mode("default")
        try:
            yield
        finally:
            if has_gpu:
                torch.cuda.set_sync_debug_mode(mode)


def _where(frame: FrameType | None) -> str:
    """Name the innermost line that is neither PyTorch's nor ours."""
    while frame is not None and _is_inner(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "unknown line"


def _is_inner(filename: str) -> bool:
    path = filename.replace("\\", "/")
    return _PACKAGE in path or "/torch/" in path or path.endswith("/contextlib.py")


def _where_raised(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_inner(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown line"


class GpuSleep:
    """Work that keeps the current GPU stream busy for a known time and needs nothing else.

    Args:
        seconds: how long.
    """

    def __init__(self, seconds: float) -> None:
        self._cycles = int(seconds * _cycles_per_s())
        self._end = torch.cuda.Event()

    def begin(self) -> None:
        """Enqueue it."""
        torch.cuda._sleep(self._cycles)
        self._end.record()

    def is_over(self) -> bool:
        """Say whether the GPU has got past it; does not wait."""
        return self._end.query()


def _cycles_per_s() -> float:
    """Measure the clock that `torch.cuda._sleep` counts."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 10_000_000
    torch.cuda._sleep(1000)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / start.elapsed_time(end) * 1e3


def assert_returns_early(
    enqueue: Callable[[], Any], *, seconds: float = 0.5, sleep: Callable[[float], GpuSleep] = GpuSleep
) -> Any:
    """Call a function behind a sleeping GPU and raise unless it returns before the GPU wakes up.

    It finds every wait on the current stream, whatever library makes it; what it cannot see is a wait for another
    stream that does not depend on this one. Call the function once before, so that nothing is compiled here.

    Args:
        enqueue: what must only enqueue.
        seconds: how long the GPU sleeps; longer than enqueueing ever takes.
        sleep: makes the sleep; for tests of this guard.

    Returns:
        What `enqueue` returned.

    Raises:
        HostSyncError: it returned late; names the line where it stood, if Python could tell.
    """
    sleeping = sleep(seconds)
    watcher = _Watcher(seconds / 2)
    sleeping.begin()
    with watcher:
        result = enqueue()
    if sleeping.is_over():
        raise HostSyncError(
            f"{watcher.where or 'somewhere in a call that keeps Python from looking'}: waited for the GPU, which was"
            f" asleep for {seconds:g} s; enqueueing must not wait"
        )
    return result


class _Watcher:
    """While entered, notes after some time where the entering thread stands."""

    def __init__(self, delay_s: float) -> None:
        self._ident = threading.get_ident()
        self._delay_s = delay_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.where: str | None = None

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        end_s = time.monotonic() + self._delay_s
        while time.monotonic() < end_s:
            if self._is_over.wait(max(0.0, end_s - time.monotonic())):
                return
        self.where = _where(sys._current_frames().get(self._ident))
