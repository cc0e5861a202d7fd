"""What launches of one program per multiprocessor share in CUDA C++: a barrier of all programs, copies without waiting.

Such a launch does what takes two otherwise. While its programs wait for each other, the weights of the second part are
on their way into shared memory, so the memory does not rest between the two.
"""

from functools import cache

import torch

from soloist.kernels.nvrtc import PRELUDE

# Shared memory of a multiprocessor that a program may have, H100 and later.
SHARED_BYTES = 226 * 1024

# A source begins with it, in place of `PRELUDE`.
PERSISTENT = (
    PRELUDE
    + r"""
#ifdef __CUDACC__
__device__ unsigned long long load_acquire(const unsigned long long* p) {
    unsigned long long x;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
    return x;
}
__device__ unsigned long long add_release(unsigned long long* p) {
    unsigned long long before;
    asm volatile("atom.add.release.gpu.global.u64 %0, [%1], 1;" : "=l"(before) : "l"(p) : "memory");
    return before;
}
// 16 bytes from global to shared memory that nobody waits for.
__device__ void copy_piece(uint4* to, const uint4* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#else
__device__ void copy_piece(uint4* to, const uint4* from) { *to = *from; }
__device__ void end_copies() {}
template <int PENDING> __device__ void wait_for_copies() {}
__device__ unsigned long long load_acquire(const unsigned long long* p) { return *p; }
__device__ unsigned long long add_release(unsigned long long* p) { return (*p)++; }
#endif

// Eight products of bf16 pairs.
__device__ void multiply(const uint4& w, const uint4& x, float& even, float& odd) {
    even += low(w.x) * low(x.x);
    odd += high(w.x) * high(x.x);
    even += low(w.y) * low(x.y);
    odd += high(w.y) * high(x.y);
    even += low(w.z) * low(x.z);
    odd += high(w.z) * high(x.z);
    even += low(w.w) * low(x.w);
    odd += high(w.w) * high(x.w);
}

// Eight elements of a normalised row, bf16.
__device__ uint4 scale_piece(const uint4& x, const uint4& weight, float scale) {
    const unsigned a[4] = {x.x, x.y, x.z, x.w}, b[4] = {weight.x, weight.y, weight.z, weight.w};
    unsigned y[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
        y[k] = to_bf16(low(a[k]) * scale * low(b[k])) | to_bf16(high(a[k]) * scale * high(b[k])) << 16;
    return make_uint4(y[0], y[1], y[2], y[3]);
}

// arrivals: how many programs have ever come.
__device__ void wait_for_all_programs(unsigned long long* arrivals) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned long long mine = add_release(arrivals), all = (mine / gridDim.x + 1) * gridDim.x;
        while (load_acquire(arrivals) < all) {}
    }
    __syncthreads();
}
"""
)


@cache
def num_programs(device: torch.device) -> int:
    """One program per multiprocessor; a CPU runs programs one after the other, so there is one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def arrivals(device: torch.device) -> torch.Tensor:
    """() int64: what the programs of one launch wait by. Launches of one device follow each other."""
    return torch.zeros((), dtype=torch.int64, device=device)
