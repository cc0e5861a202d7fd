"""The end of a step's latent attention in CUDA C++; equations and references are in `kernels/mla.py`.

The programs of a cluster share a head: each merges its part of the latent dims over all splits, for every token, and
gives it to the others; then each multiplies whole latents by its rows of W_uv, which were on their way before the
splits were there, and applies the head's gate.

Source: FlashDecoding's merge; DeepSeek-V2 (arXiv 2405.04434), absorbed form.
"""

import torch

from soloist.kernels.launch import pdl_options
from soloist.kernels.nvrtc import PRELUDE, launch, load_kernel

# Most tokens of a step, and most splits.
MAX_ROWS = 16
MAX_SPLITS = 128
# Programs that share a head, and warps of a program: the most of each that clusters and latents allow.
_PROGRAMS = 8
_WARPS = 8

_SOURCE = (
    PRELUDE
    + r"""
constexpr int WARPS = 8, THREADS = 256;
// A program's latent dims while merging, and its value channels afterwards.
constexpr int DIMS = RANK / CLUSTER, CHANNELS = V / CLUSTER, TILES = CHANNELS / 8;
constexpr int PART = DIMS > CHANNELS ? DIMS : CHANNELS;
// Four dims a thread; the threads that have the same ones share the splits.
constexpr int PIECES = DIMS / 4, SHARERS = THREADS / PIECES, TURNS = (SPLITS + SHARERS - 1) / SHARERS;
// Runs of 32 latents that a warp multiplies; rows whose neighbours lie in other banks.
constexpr int RUNS = RANK / WARPS / 32, STRIDE = RANK + 32;

#ifdef __CUDACC__
__device__ void multiply_tile(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ void store_to_peer(uint2* mine, int program, uint2 x) {
    unsigned theirs;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(theirs) : "r"((unsigned)__cvta_generic_to_shared(mine)), "r"(program));
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(theirs), "r"(x.x), "r"(x.y) : "memory");
}
#endif

// out (T, NUM_HEADS, V) = sigmoid(gate) W_uv z, z the merged splits; gate may be null. partial (SPLITS, T, NUM_HEADS,
// RANK) and, in base 2, its maxima and sums (SPLITS, T, NUM_HEADS); w_kv_b (NUM_HEADS, KEYS + V, RANK).
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
merge(const float* partial, const float* partial_max, const float* partial_sum, const unsigned short* w_kv_b,
      const unsigned short* gate, unsigned short* out, int T, int gate_stride) {
    const int head = blockIdx.x / CLUSTER, program = blockIdx.x % CLUSTER;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, piece = lane % 4;
    __shared__ float weights[ROWS][SPLITS];
    // (WARPS, ROWS, PART): what the warps have merged, in its place later what they have multiplied.
    DYNAMIC_SHARED(uint4, dynamic);
    auto& parts = *(float(*)[WARPS][ROWS][PART])dynamic;
    __shared__ __align__(16) unsigned short latents[ROWS][STRIDE];

    arrive_at_cluster();
    uint4 w[TILES][RUNS];
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < RUNS; ++i) {
            const size_t row = (size_t)head * (KEYS + V) + KEYS + program * CHANNELS + 8 * n + g;
            w[n][i] = load_weights((const uint4*)(w_kv_b + row * RANK + (warp * RUNS + i) * 32 + 8 * piece));
        }
    wait_for_producers();
    let_consumers_start();

    for (int t = warp; t < T; t += WARPS) {
        float most[(SPLITS + 31) / 32], sum[(SPLITS + 31) / 32], highest = -3e38f, total = 0.f;
#pragma unroll
        for (int i = 0; i < (SPLITS + 31) / 32; ++i) {
            const int split = lane + 32 * i;
            const size_t at = ((size_t)split * T + t) * NUM_HEADS + head;
            most[i] = split < SPLITS ? partial_max[at] : -3e38f;
            sum[i] = split < SPLITS ? partial_sum[at] : 0.f;
        }
#pragma unroll
        for (int i = 0; i < (SPLITS + 31) / 32; ++i) highest = fmaxf(highest, most[i]);
#pragma unroll
        for (int o = 16; o; o >>= 1) highest = fmaxf(highest, __shfl_xor_sync(FULL, highest, o));
#pragma unroll
        for (int i = 0; i < (SPLITS + 31) / 32; ++i) {
            sum[i] = sum[i] > 0.f ? sum[i] * exp2f(most[i] - highest) : 0.f;
            total += sum[i];
        }
        total = 1.f / sum_of_lanes(total);
#pragma unroll
        for (int i = 0; i < (SPLITS + 31) / 32; ++i)
            if (lane + 32 * i < SPLITS) weights[t][lane + 32 * i] = sum[i] * total;
    }
    __syncthreads();

    const int mine = threadIdx.x % PIECES, sharer = threadIdx.x / PIECES;
    float z[ROWS][4] = {};
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int split = turn * SHARERS + sharer;
#pragma unroll
        for (int t = 0; t < ROWS; ++t)
            if (t < T && split < SPLITS) {
                const uint4 four = *(const uint4*)(partial + (((size_t)split * T + t) * NUM_HEADS + head) * RANK +
                                                   program * DIMS + 4 * mine);
                const float weight = weights[t][split];
                z[t][0] += weight * __uint_as_float(four.x);
                z[t][1] += weight * __uint_as_float(four.y);
                z[t][2] += weight * __uint_as_float(four.z);
                z[t][3] += weight * __uint_as_float(four.w);
            }
    }
#pragma unroll
    for (int t = 0; t < ROWS; ++t) {
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int o = PIECES; o < 32; o <<= 1) z[t][n] += __shfl_xor_sync(FULL, z[t][n], o);
        if (lane < PIECES)
            *(uint4*)&parts[warp][t][4 * lane] = make_uint4(__float_as_uint(z[t][0]), __float_as_uint(z[t][1]),
                                                            __float_as_uint(z[t][2]), __float_as_uint(z[t][3]));
    }
    __syncthreads();
    wait_for_cluster();
    for (int i = threadIdx.x; i < T * PIECES; i += THREADS) {
        const int t = i / PIECES, at = i % PIECES * 4;
        float sum[4] = {};
#pragma unroll
        for (int k = 0; k < WARPS; ++k)
#pragma unroll
            for (int n = 0; n < 4; ++n) sum[n] += parts[k][t][at + n];
        const uint2 four = make_uint2(to_bf16(sum[0]) | to_bf16(sum[1]) << 16, to_bf16(sum[2]) | to_bf16(sum[3]) << 16);
#pragma unroll
        for (int peer = 0; peer < CLUSTER; ++peer) store_to_peer((uint2*)&latents[t][program * DIMS + at], peer, four);
    }
    arrive_at_cluster();
    wait_for_cluster();

    float c[TILES][4] = {};
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
        const int at = (warp * RUNS + i) * 32 + 8 * piece;
        uint4 a = make_uint4(0, 0, 0, 0), b = a;
        if (g < T) a = *(const uint4*)&latents[g % ROWS][at];
        if (g + 8 < T) b = *(const uint4*)&latents[(g + 8) % ROWS][at];
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            multiply_tile(c[n], a.x, b.x, a.y, b.y, w[n][i].x, w[n][i].y);
            multiply_tile(c[n], a.z, b.z, a.w, b.w, w[n][i].z, w[n][i].w);
        }
    }
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int t = g + i / 2 * 8;
            if (t < T) parts[warp][t][8 * n + 2 * piece + i % 2] = c[n][i];
        }
    __syncthreads();
    for (int i = threadIdx.x; i < T * CHANNELS; i += THREADS) {
        const int t = i / CHANNELS, channel = i % CHANNELS;
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < WARPS; ++k) sum += parts[k][t][channel];
        if (gate) sum *= sigmoid(low(gate[(size_t)t * gate_stride + head]));
        out[((size_t)t * NUM_HEADS + head) * V + program * CHANNELS + channel] = (unsigned short)to_bf16(sum);
    }
}
"""
)


def can_run(w_kv_b: torch.Tensor, v_head_dim: int) -> bool:
    """Say whether this form takes value maps: w_kv_b (H*(Kn+V), R), V value rows a head."""
    return (
        w_kv_b.dtype == torch.bfloat16
        and w_kv_b.shape[1] % (32 * _WARPS) == 0
        and w_kv_b.shape[1] <= 1024
        and v_head_dim % (8 * _PROGRAMS) == 0
    )


def merge(
    partial: torch.Tensor,
    partial_max: torch.Tensor,
    partial_sum: torch.Tensor,
    w_kv_b: torch.Tensor,
    gate: torch.Tensor | None,
    num_heads: int,
    v_head_dim: int,
) -> torch.Tensor:
    """Launch the merge of one step, what `can_run` says it can.

    Args:
        partial: (splits, T*H, R) fp32, at most 128 splits, T at most 16.
        partial_max: (splits, T*H) fp32, in base 2.
        partial_sum: likewise; 0 where a split saw nothing.
        w_kv_b: (H*(Kn+V), R) bf16.
        gate: (T, H) bf16, rows may be strided, or None.
        num_heads: H.
        v_head_dim: V.

    Returns:
        (T, H*V) bf16.
    """
    splits, _, R = partial.shape
    H, V, T = num_heads, v_head_dim, partial.shape[1] // num_heads
    rows = next(n for n in (1, 4, 8, 12, MAX_ROWS) if n >= T)
    definitions = {
        "RANK": R,
        "V": V,
        "KEYS": w_kv_b.shape[0] // H - V,
        "NUM_HEADS": H,
        "SPLITS": splits,
        "ROWS": rows,
        "CLUSTER": _PROGRAMS,
    }
    if pdl_options()["PDL"]:
        definitions["HAS_PDL"] = 1
    out = torch.empty((T, H * V), dtype=w_kv_b.dtype, device=partial.device)
    launch(
        load_kernel(_SOURCE, "merge", tuple((k, str(v)) for k, v in definitions.items()), partial.device),
        (H * _PROGRAMS, 1, 1), 32 * _WARPS,
        partial, partial_max, partial_sum, w_kv_b, gate, out, T, 0 if gate is None else gate.stride(0),
        shared_bytes=4 * _WARPS * rows * max(R, V) // _PROGRAMS,
    )  # fmt: skip
    return out
