"""Kernels in CUDA C++, compiled at run time: for what Triton cannot say, such as work split by warp.

Owns compiling, loading and launching; a kernel's source lies beside the launcher that uses it. NVRTC comes with CUDA
builds of PyTorch, so nobody needs a compiler. Each process compiles a source once per set of definitions, in about a
tenth of a second.

Source: CUDA driver API, `cuLaunchKernelEx` with the programmatic stream serialisation attribute.
"""

import ctypes
from functools import cache
from typing import Any

import torch

from soloist.kernels.launch import has_delays, pdl_options

try:
    from cuda.bindings import driver, nvrtc
except ImportError:
    HAS_NVRTC = False
else:
    HAS_NVRTC = True


# How a kernel lets its consumers start, and what delays it behind that: see `delayed_producers`.
_TRIGGER = 'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");'
_DELAY = """{
    unsigned long long begin_ns, now_ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin_ns));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now_ns)); while (now_ns - begin_ns < 100000);
}"""


def _check(result: tuple[Any, ...]) -> Any:
    """Give what a driver or compiler call returned, without its status."""
    status, *values = result
    assert int(status) == 0, f"{status.__class__.__name__}.{status.name}"
    return values[0] if len(values) == 1 else values


def _compile(source: str, name: str, definitions: tuple[tuple[str, str], ...], capability: tuple[int, int]) -> bytes:
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    options += [f"-D{key}={value}" for key, value in definitions]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status) != 0:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise AssertionError(f"{name} does not compile:\n{log.decode(errors='replace')}")
    cubin = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def load_kernel(source: str, name: str, definitions: tuple[tuple[str, str], ...], device: torch.device) -> Any:
    """Compile and load one `extern "C"` kernel for a device.

    Args:
        source: CUDA C++, without includes.
        name: of the kernel.
        definitions: preprocessor names and values: sizes fixed at compile time.
        device: a CUDA device; its context is current.
    """
    return _load(source.replace(_TRIGGER, _TRIGGER + _DELAY) if has_delays() else source, name, definitions, device)


@cache
def _load(source: str, name: str, definitions: tuple[tuple[str, str], ...], device: torch.device) -> Any:
    cubin = _compile(source, name, definitions, torch.cuda.get_device_capability(device))
    module = _check(driver.cuModuleLoadData(cubin))
    kernel = _check(driver.cuModuleGetFunction(module, name.encode()))
    # Whatever a multiprocessor has is a launch's to ask for.
    of_device, of_kernel = driver.CUdevice_attribute, driver.CUfunction_attribute
    most = _check(
        driver.cuDeviceGetAttribute(
            of_device.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, _check(driver.cuCtxGetDevice())
        )
    )
    fixed = _check(driver.cuFuncGetAttribute(of_kernel.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel))
    attribute = of_kernel.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuFuncSetAttribute(kernel, attribute, most - fixed)
    assert int(status) == 0, status
    return kernel


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    threads: int,
    *arguments: torch.Tensor | int | float | None,
    shared_bytes: int = 0,
) -> None:
    """Launch on the current stream, with PDL if kernels of this step carry it.

    Args:
        kernel: what `load_kernel` gave.
        grid: programs.
        threads: of each program.
        arguments: tensors as pointers, None as a null pointer, ints as `int`, floats as `float`.
        shared_bytes: dynamic shared memory of each program.
    """
    values: list[Any] = []
    types: list[Any] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor) or argument is None:
            values.append(0 if argument is None else argument.data_ptr())
            types.append(ctypes.c_void_p)
        else:
            values.append(argument)
            types.append(ctypes.c_int if isinstance(argument, int) else ctypes.c_float)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = torch.cuda.current_stream().cuda_stream
    if pdl_options()["PDL"]:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    _check(driver.cuLaunchKernelEx(config, kernel, (tuple(values), tuple(types)), 0))
