"""Steps that follow each other on the GPU without the host: a captured step as body of a WHILE node.

Owns the graph around the step and the machine code that decides whether another one follows. That code calls
`cudaGraphSetConditional`, which needs the device linker; so it is built beforehand, from `cuda/while_setter.cu`.

Source: CUDA programming guide, conditional graph nodes.
"""

import ctypes
import weakref
from importlib.resources import files
from typing import Any

import torch

from soloist.errors import UnsupportedError
from soloist.runtime.graph import StepGraph

try:
    from cuda.bindings import driver
except ImportError:
    HAS_DRIVER_BINDINGS = False
else:
    HAS_DRIVER_BINDINGS = True

# Machine code by major compute capability: code for x.0 runs on every x.
_CUBINS = {9: "while_setter_sm90.cubin", 10: "while_setter_sm100.cubin"}


def check_device_loop(device: torch.device) -> None:
    """Refuse a device that has no loop.

    Raises:
        UnsupportedError: it is no GPU, or one for which the loop's code was not built.
    """
    if device.type != "cuda":
        raise UnsupportedError(f"a device loop needs an NVIDIA GPU, not {device}: leave --device-loop out")
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _CUBINS:
        raise UnsupportedError(
            f"a device loop works on GPUs of compute capability 9.x and 10.x, this one has {major}.{minor}: leave"
            " --device-loop out"
        )
    if not HAS_DRIVER_BINDINGS:
        raise UnsupportedError("a device loop needs the package cuda-bindings: install it, or leave --device-loop out")


class DeviceLoop:
    """One step after the other, up to `max_steps` a launch; it ends early behind the step that ends the answer.

    A launch behind the end of an answer runs one step, which changes nothing.

    Args:
        step: captured; its memory must outlive the loop's.
        num_left: () int32, which the step sets to 0 where the answer ends or the host has asked to stop.
        max_steps: so that the ring of records is never overrun, and the host can decide something now and then.
    """

    def __init__(self, step: StepGraph, num_left: torch.Tensor, *, max_steps: int) -> None:
        check_device_loop(num_left.device)
        self._step, self._num_left = step, num_left
        # () int32: steps since the launch; the setter puts it back to 0.
        self._num_run = torch.zeros((), dtype=torch.int32, device=num_left.device)
        context = _checked(driver.cuCtxGetCurrent())
        graph = _checked(driver.cuGraphCreate(0))
        # Every launch runs a first step.
        is_set_by_launch = driver.CU_GRAPH_COND_ASSIGN_DEFAULT
        handle = _checked(driver.cuGraphConditionalHandleCreate(graph, context, 1, is_set_by_launch))
        node = driver.CUgraphNodeParams()
        node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle = handle
        node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        node.conditional.size = 1
        node.conditional.ctx = context
        _checked(driver.cuGraphAddNode(graph, None, None, 0, node))
        (body,) = node.conditional.phGraph_out
        child = _checked(driver.cuGraphAddChildGraphNode(body, None, 0, driver.CUgraph(step.raw_graph)))
        _checked(driver.cuGraphAddKernelNode(body, [child], 1, self._setter(int(handle), max_steps)))
        self._executable = _checked(driver.cuGraphInstantiate(graph, 0))
        weakref.finalize(self, _destroy, self._executable, graph).atexit = False

    def _setter(self, handle: int, max_steps: int) -> Any:
        """Describe the node behind the step."""
        major, _ = torch.cuda.get_device_capability(self._num_left.device)
        cubin = (files("soloist.runtime") / "cuda" / _CUBINS[major]).read_bytes()
        module = _checked(driver.cuModuleLoadData(cubin))
        node = driver.CUDA_KERNEL_NODE_PARAMS()
        node.func = _checked(driver.cuModuleGetFunction(module, b"set_while"))
        node.gridDimX = node.gridDimY = node.gridDimZ = 1
        node.blockDimX = node.blockDimY = node.blockDimZ = 1
        node.kernelParams = (
            (handle, self._num_left.data_ptr(), self._num_run.data_ptr(), max_steps),
            (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
        )
        return node

    @property
    def raw_graph(self) -> int:
        """The `cudaGraph_t` of one step."""
        return self._step.raw_graph

    def replay(self) -> None:
        """Enqueue the loop on the current stream; waits for nothing."""
        _checked(driver.cuGraphLaunch(self._executable, torch.cuda.current_stream().cuda_stream))


def _destroy(executable: Any, graph: Any) -> None:
    driver.cuGraphExecDestroy(executable)
    driver.cuGraphDestroy(graph)


def _checked(result: tuple[Any, ...]) -> Any:
    """Give what a call of the driver returned, without its status."""
    status, *values = result
    assert int(status) == 0, f"{status.__class__.__name__}.{status.name}"
    return values[0] if len(values) == 1 else values
