"""What the step and the verification of Kimi Delta Attention share, in CUDA C++.

A head's value channels are divided over the programs of a cluster, which need nothing of each other until the output's
norm. Here are that division, the cluster's exchange, and what both do to rows.

Source: PTX ISA, `barrier.cluster`, `mapa` and `st.async`; Kimi Linear (arXiv 2510.26692), section 3.
"""

import torch

from soloist.errors import UnsupportedError
from soloist.kernels import bulk_copies_cuda
from soloist.kernels.kda_inputs import KdaCache, KdaRows, KdaWeights
from soloist.kernels.launch import pdl_options
from soloist.kernels.nvrtc import PRELUDE

# Programs of a cluster, at most: what every GPU with clusters takes.
_MAX_PROGRAMS = 8

# Kernels' sources begin with it. Sizes come as definitions: those of `define`.
SOURCE = (
    PRELUDE
    + bulk_copies_cuda.SOURCE
    + r"""
// A program's value channels.
constexpr int CHANNELS = V / CLUSTER;
constexpr int C = NUM_HEADS * (2 * K + V);

#ifdef IS_FP32
typedef float element;
__device__ float to_float(element x) { return x; }
__device__ element to_element(float x) { return x; }
#else
typedef unsigned short element;
__device__ float to_float(element bits) { return __uint_as_float(unsigned(bits) << 16); }
__device__ element to_element(float x) { return (element)to_bf16(x); }
#endif

#ifdef __CUDACC__
// A barrier of the cluster, in two halves. The first publishes what was written, or does not wait for that.
__device__ void arrive_at_cluster_at_once() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ unsigned address_of_peer(const void* mine, int program) {
    unsigned theirs;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(shared_address(mine)), "r"(program));
    return theirs;
}
// Stores where another program of the cluster has what is at `mine` here.
__device__ void store_to_peer(float* mine, int program, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_of_peer(mine, program)), "f"(x) : "memory");
}
// The same, and the peer's barrier counts the bytes: who waits there need not wait for the cluster.
__device__ void send_to_peer(float* mine, int program, float x, Mbarrier* barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
                 ::"r"(address_of_peer(mine, program)), "f"(x), "r"(address_of_peer(barrier, program)) : "memory");
}
#endif

// The log decay: bounded below (Ling) or not (Kimi).
__device__ float log_decay(float drive, float rate) {
#ifdef LOWER_BOUND
    return LOWER_BOUND * sigmoid(rate * drive);
#else
    return -rate * (drive > 20.f ? drive : log1pf(expf(drive)));
#endif
}

// All 2 * O values of a lane are summed over 2 * O lanes; lane l gets the sum of value l % (2 * O).
template <int O> __device__ float sums_by_lane(float* x) {
#pragma unroll
    for (int i = 0; i < O; ++i) {
        const bool is_upper = threadIdx.x & O;
        const float mine = is_upper ? x[i + O] : x[i], other = is_upper ? x[i] : x[i + O];
        x[i] = mine + __shfl_xor_sync(FULL, other, O);
    }
    if constexpr (O > 1) return sums_by_lane<O / 2>(x);
    return x[0];
}

struct Four { float x[4]; };
__device__ Four load_four(const float* p) {
    const uint4 four = *(const uint4*)p;
    return {__uint_as_float(four.x), __uint_as_float(four.y), __uint_as_float(four.z), __uint_as_float(four.w)};
}
__device__ void store_four(float* p, const Four& x) {
    *(uint4*)p = make_uint4(__float_as_uint(x.x[0]), __float_as_uint(x.x[1]), __float_as_uint(x.x[2]),
                            __float_as_uint(x.x[3]));
}
#ifndef IS_FP32
__device__ Four load_four(const element* p) {
    const uint2 pairs = *(const uint2*)p;
    return {low(pairs.x), high(pairs.x), low(pairs.y), high(pairs.y)};
}
__device__ void store_four(element* p, const Four& x) {
    *(uint2*)p = make_uint2(to_bf16_pair(x.x[0], x.x[1]), to_bf16_pair(x.x[2], x.x[3]));
}
#endif
__device__ float dot(const Four& a, const Four& b) {
    return a.x[0] * b.x[0] + a.x[1] * b.x[1] + a.x[2] * b.x[2] + a.x[3] * b.x[3];
}
"""
)


def divide_channels(rows: KdaRows, weights: KdaWeights, cache: KdaCache, most: int) -> int:
    """Give the value channels of a program, `most` at most, in eights.

    Raises:
        UnsupportedError: rows or heads that no kernel takes.
    """
    _, V, K = cache.state.shape
    dtype = rows.qkv.dtype
    if dtype not in (torch.bfloat16, torch.float32) or {weights.conv_w.dtype, weights.o_norm.dtype} != {dtype}:
        raise UnsupportedError(
            f"KDA rows of {dtype} beside taps of {weights.conv_w.dtype} and a norm of {weights.o_norm.dtype} have no"
            " GPU kernel for a step; it takes bfloat16 or float32 for all three, a CPU takes all"
        )
    choices = [n for n in range(8, most + 1, 8) if V % n == 0 and V // n <= _MAX_PROGRAMS]
    if not choices or K % 16 or K > 128:
        raise UnsupportedError(
            f"KDA heads of {K} keys and {V} values have no GPU kernel for a step; it takes keys in multiples of 16 up"
            f" to 128, and values that divide into {_MAX_PROGRAMS} or fewer equal parts, each a multiple of 8 up to"
            f" {most}, a CPU takes all"
        )
    return max(choices)


def define(rows: KdaRows, weights: KdaWeights, cache: KdaCache, programs: int) -> tuple[tuple[str, str], ...]:
    """Give the definitions of `SOURCE`, for a cluster of so many programs."""
    H, V, K = cache.state.shape
    definitions: list[tuple[str, int | str]] = [("K", K), ("V", V), ("NUM_HEADS", H), ("CLUSTER", programs)]
    if weights.lower_bound is not None:
        definitions.append(("LOWER_BOUND", f"{float(weights.lower_bound)!r}f"))
    if rows.qkv.dtype == torch.float32:
        definitions.append(("IS_FP32", 1))
    if pdl_options()["PDL"]:
        definitions.append(("HAS_PDL", 1))
    return tuple((key, str(value)) for key, value in definitions)
