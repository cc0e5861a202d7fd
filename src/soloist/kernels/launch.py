"""How Triton kernels are launched: programmatic dependent launch, arrival counters, the interpreter.

Owns the one place where Triton is imported as optional (CPU installs do not have it), the switch for programmatic
dependent launch (PDL) and the zeroed counters that last-arriver combines use.

A kernel of a step takes a constexpr `PDL` and calls `wait_for_producers(PDL)` before it reads anything that a kernel of
this step wrote, then `let_consumers_start(PDL)`. Weights, and state of the previous step, may be read before the wait.
A kernel that reads nothing but weights before its wait may let consumers start first, so that their weights come early
as well. When a kernel starts, everything is complete that was written before the last launch that waited first, or that
was no dependent launch at all, as a step's embedding.

Source: CUDA programming guide, programmatic dependent launch; PTX `griddepcontrol`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import count
from typing import Any, TypeVar

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True

# Whether kernels run in Triton's interpreter, on CPU tensors (tests without a GPU).
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "") == "1"

_NUM_COUNTERS = 1 << 16

_State = TypeVar("_State")

_pdl: ContextVar[bool] = ContextVar("pdl", default=True)
_fused_experts: ContextVar[bool] = ContextVar("fused_experts", default=True)
# Tells of each launch whether it is delayed; None: none is.
_delays: ContextVar[Iterator[bool] | None] = ContextVar("delays", default=None)
# Value of the constexpr `PDL` of a delayed kernel.
_DELAYED = 2


@contextmanager
def programmatic_launch(is_enabled: bool) -> Iterator[None]:
    """Launch kernels with PDL, or not, inside the block (the `--pdl` rung of the benchmark's ladder)."""
    token = _pdl.set(is_enabled)
    try:
        yield
    finally:
        _pdl.reset(token)


@contextmanager
def fused_experts(is_enabled: bool) -> Iterator[None]:
    """Run a step's experts in its own few launches, or as a prompt's (the `--fused-moe` rung)."""
    token = _fused_experts.set(is_enabled)
    try:
        yield
    finally:
        _fused_experts.reset(token)


def has_fused_experts() -> bool:
    """Say whether a step's experts run in their own few launches."""
    return _fused_experts.get()


@contextmanager
def delayed_producers(phase: int) -> Iterator[None]:
    """Delay every second kernel launched inside the block, from the one of number `phase`, 0 or 1, on: for tests.

    A delayed kernel lets consumers start, sleeps 100 us, and only then writes: a consumer that does not wait reads what
    was there before. Its own consumer is not delayed, or it would sleep through its mistake.
    """
    token = _delays.set(i % 2 == phase for i in count())
    try:
        yield
    finally:
        _delays.reset(token)


def has_delays() -> bool:
    """Say whether kernels are delayed here."""
    return _delays.get() is not None


def pdl_options() -> dict[str, Any]:
    """Keyword arguments that launch a kernel with, or without, PDL: its constexpr `PDL` and the launch attribute."""
    if not _pdl.get() or IS_INTERPRETED:
        return {"PDL": False}
    delays = _delays.get()
    return {"PDL": _DELAYED if delays is not None and next(delays) else True, "launch_pdl": True}


def cache_outside_captures(make: Callable[..., _State]) -> Callable[..., _State]:
    """Keep what `make` gives for its arguments, as `functools.cache` does, but not in a capture: for launches' state.

    In a capture nothing runs, and what compiles ahead throws the capture away: what is made there never holds the
    numbers that it is made with. A step that is captured to be replayed has run before, so its state is there.
    """
    kept: dict[tuple[Any, ...], _State] = {}

    @wraps(make)
    def get(*args: Any) -> _State:
        if args not in kept:
            made = make(*args)
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return made
            kept[args] = made
        return kept[args]

    return get


@cache_outside_captures
def arrival_counters(device: torch.device) -> torch.Tensor:
    """Counters for last-arriver combines: (65536,) int32, zero between kernels.

    Shared by every kernel of one device, since a step runs on one stream and engines take turns (`runtime.turn`): each
    kernel leaves the counters it used at zero, and none touches them before its wait.
    """
    return torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)


if HAS_TRITON:

    @triton.jit
    def wait_for_producers(PDL: tl.constexpr):
        """Wait until the kernels this one depends on are complete and their writes visible."""
        if PDL:
            tl.extra.cuda.gdc_wait()

    @triton.jit
    def let_consumers_start(PDL: tl.constexpr):
        """Allow the next kernel of the stream to start; it waits for this one's end by itself."""
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        # `_DELAYED`: see `delayed_producers`.
        if PDL == 2:
            tl.inline_asm_elementwise(
                "{ .reg .u64 begin, now; .reg .pred p; mov.u64 begin, %globaltimer; again: mov.u64 now, %globaltimer;"
                " sub.u64 now, now, begin; setp.lt.u64 p, now, 100000; @p bra again; mov.u32 $0, 0; }",
                "=r,r",
                [tl.program_id(0)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )

    @triton.jit
    def is_last_arriver(counter_ptr, num_programs):
        """Count one arrival; true in the program that arrives last, which also resets the counter.

        Writes of every arrived program made before the call are visible to the last one.
        """
        tl.debug_barrier()
        is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == num_programs - 1
        if is_last:
            tl.store(counter_ptr, 0)
        tl.debug_barrier()
        return is_last
