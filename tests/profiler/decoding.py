"""Simulated programs that decode, with known steps and known faults."""

from collections.abc import Callable

from soloist.profiler.analysis import Analysis, analyse
from soloist.profiler.kineto import parse_trace
from soloist.profiler.trace import Trace
from tests.profiler.simulated import Machine

NUM_STEPS = 24
LAYER = (("norm", 5.0), ("qkv", 21.0), ("attention", 34.0), ("out", 13.0), ("mlp", 40.0))
NUM_LAYERS = 7
# Embedding, layers, head, argmax.
STEP_KERNELS = NUM_LAYERS * len(LAYER) + 3
STEP_US = 4.0 + NUM_LAYERS * sum(us for _, us in LAYER) + 60.0 + 6.0


def enqueue_step(machine: Machine) -> None:
    """Enqueue a step of a layered model, kernel by kernel."""
    machine.launch("embedding", 4.0)
    for _ in range(NUM_LAYERS):
        for name, us in LAYER:
            machine.launch(name, us)
    machine.launch("lm_head", 60.0)
    machine.launch("argmax", 6.0)


def decode(behind_step: Callable[[Machine], None] | None = None, *, machine: Machine | None = None) -> Machine:
    """Start up, then decode; `behind_step` is called at the end of every step."""
    machine = machine or Machine()
    # Loading repeats too: it must not be taken for steps.
    for _ in range(60):
        machine.launch("fill", 2.0)
    for _ in range(30):
        machine.copy("HtoD (Pinned -> Device)", 1.0)
    machine.synchronize("cudaDeviceSynchronize")
    for _ in range(NUM_STEPS):
        with machine.at("generate.py(10): decode"):
            enqueue_step(machine)
            if behind_step is not None:
                behind_step(machine)
    machine.synchronize("cudaDeviceSynchronize")
    return machine


def trace_of(machine: Machine, name: str = "simulated") -> Trace:
    """Read what the machine wrote."""
    return parse_trace(machine.document(), name)


def analysis_of(machine: Machine) -> Analysis:
    """Analyse what the machine wrote."""
    return analyse(trace_of(machine))


def read_item(machine: Machine) -> None:
    """The commonest fault: `.item()` in a sampler."""
    with (
        machine.at("sampler.py(200): sample"),
        machine.at("<built-in method item of Tensor object at 0x7f00>"),
        machine.inside("aten::item"),
        machine.inside("aten::_local_scalar_dense"),
    ):
        machine.read()
