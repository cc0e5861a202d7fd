"""Kernels in CUDA C++, compiled at run time: for what Triton cannot say, such as work split by warp.

Owns compiling, loading and launching; a kernel's source lies beside the launcher that uses it. NVRTC comes with CUDA
builds of PyTorch, so nobody needs a compiler. A source is compiled once per set of definitions, in a few tenths of a
second, and kept in the user's cache folder.

Source: CUDA driver API, `cuLaunchKernelEx` with the programmatic stream serialisation attribute.
"""

import ctypes
import hashlib
import os
import threading
from functools import cache
from typing import Any

import torch

from soloist.config import user_cache_dir
from soloist.kernels.launch import has_delays, pdl_options

try:
    from cuda.bindings import driver, nvrtc
except ImportError:
    HAS_NVRTC = False
else:
    HAS_NVRTC = True


# What kernels share; a source begins with it.
PRELUDE = r"""
constexpr unsigned FULL = 0xffffffffu;

// Of a pair of bf16.
__device__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

#ifdef __CUDACC__
// Aligned for bulk copies and loads of 16 bytes, whatever the type.
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]
// 16 bytes that are read once. Not `.nc`: the compiler would read it behind the wait for producers.
__device__ uint4 load_weights(const uint4* p) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}
__device__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ void prefetch_run(const void* p, int num_bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(num_bytes));
}
__device__ unsigned to_bf16(float x) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
// The first is the low half.
__device__ unsigned to_bf16_pair(float x, float y) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}
// Products of pairs of bf16, each rounded once.
__device__ unsigned multiply_pairs(unsigned a, unsigned b) {
    unsigned products;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(a), "r"(b));
    return products;
}
// c (16, 8) += a (16, 16) b (16, 8), each lane with its part of them.
__device__ void multiply_tile(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ float exponential(float x) { return __expf(x); }
__device__ float quotient(float x, float y) { return __fdividef(x, y); }
#else
__device__ uint4 load_weights(const uint4* p) { return *p; }
__device__ void prefetch(const void*) {}
__device__ void prefetch_run(const void*, int) {}
__device__ unsigned to_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    return x == x ? (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16 : 0x7fffu;
}
__device__ unsigned to_bf16_pair(float x, float y) { return to_bf16(x) | to_bf16(y) << 16; }
__device__ unsigned multiply_pairs(unsigned a, unsigned b) {
    return to_bf16_pair(low(a) * low(b), high(a) * high(b));
}
__device__ float exponential(float x) { return expf(x); }
__device__ float quotient(float x, float y) { return x / y; }
#endif

__device__ void wait_for_producers() {
#ifdef HAS_PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ void let_consumers_start() {
#ifdef HAS_PDL
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ uint4 multiply_pairs(const uint4& a, const uint4& b) {
    return make_uint4(multiply_pairs(a.x, b.x), multiply_pairs(a.y, b.y), multiply_pairs(a.z, b.z),
                      multiply_pairs(a.w, b.w));
}
__device__ float sigmoid(float x) { return quotient(1.f, 1.f + exponential(-x)); }

template <int LANES = 32> __device__ float sum_of_lanes(float x) {
#pragma unroll
    for (int o = LANES / 2; o; o >>= 1) x += __shfl_xor_sync(FULL, x, o);
    return x;
}
"""

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


def _find_cubin(source: str, name: str, definitions: tuple[tuple[str, str], ...], capability: tuple[int, int]) -> bytes:
    """Give a kernel's machine code from the user's cache, or compile it and leave it there."""
    what = repr((source, name, definitions, capability, _check(nvrtc.nvrtcVersion())))
    path = user_cache_dir() / "kernels" / f"{name}-{hashlib.sha256(what.encode()).hexdigest()[:32]}.cubin"
    if path.is_file():
        return path.read_bytes()
    cubin = _compile(source, name, definitions, capability)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: several processes may compile the same kernel.
    unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    unfinished.write_bytes(cubin)
    unfinished.replace(path)
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
    cubin = _find_cubin(source, name, definitions, torch.cuda.get_device_capability(device))
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
