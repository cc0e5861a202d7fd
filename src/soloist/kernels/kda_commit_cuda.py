"""The commit of Kimi Delta Attention in CUDA C++: the states of all layers, read and written once.

A program has some value channels of one head and layer, its part of the state in registers before the accepted number
is there. Sums are fp32: with T <= 16 rows they take less time than the state's bytes.

Source: Kimi Linear (arXiv 2510.26692), the state update of the chunkwise form.
"""

import torch

from soloist.errors import UnsupportedError
from soloist.kernels.kda_inputs import KdaCache, KdaKept
from soloist.kernels.launch import pdl_options
from soloist.kernels.nvrtc import PRELUDE, launch, load_kernel

# Most rows that a verification keeps.
MAX_ROWS = 16
# Value channels of a program, at most, and of a thread, which has four keys of each.
_MAX_CHANNELS = 32
_PER_THREAD = 8

_SOURCE = (
    PRELUDE
    + r"""
constexpr int PER_ROW = K / 4, THREADS = CHANNELS / PER_THREAD * PER_ROW;
constexpr int C = NUM_HEADS * (2 * K + V);

#ifdef IS_FP32
typedef float element;
#else
typedef unsigned short element;
#endif

// The last three raw rows of the window and the first n new ones, of one channel.
__device__ void shift_window(element* window, const element* rows, int n) {
    element last[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) last[i] = n + i < 3 ? window[(n + i) * C] : rows[(size_t)(n + i - 3) * C];
#pragma unroll
    for (int i = 0; i < 3; ++i) window[i * C] = last[i];
}

// S = S diag(exp(G)) + sum_i u_i (exp(G - G_i) k_i)^T over the first num_rows of T rows.
extern "C" __global__ void __launch_bounds__(THREADS)
kda_commit(float* state, element* conv, const float* verify_k, const float* verify_u, const float* verify_g,
           const element* verify_conv, const int* num_rows, int T) {
    const int program = blockIdx.x % (V / CHANNELS), first = program * CHANNELS;
    const int head = blockIdx.x / (V / CHANNELS) % NUM_HEADS, layer = blockIdx.x / (V / CHANNELS) / NUM_HEADS;
    const int channel = threadIdx.x / PER_ROW * PER_THREAD, at = threadIdx.x % PER_ROW * 4;
    __shared__ __align__(16) float keys[ROWS][K], values[ROWS][CHANNELS], decay[K];
    uint4* mine = (uint4*)(state + (((size_t)layer * NUM_HEADS + head) * V + first + channel) * K + at);
    uint4 s[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) s[i] = mine[i * PER_ROW];
    wait_for_producers();
    let_consumers_start();
    const int n = min(*num_rows, T);
    if (n == 0) return;

    const size_t row = (size_t)layer * T * NUM_HEADS + head;
    for (int d = threadIdx.x; d < K; d += THREADS) {
        float k[ROWS], g[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            if (i < n) {
                k[i] = verify_k[(row + i * NUM_HEADS) * K + d];
                g[i] = verify_g[(row + i * NUM_HEADS) * K + d];
            }
        // The g of all later rows: a sum, never a difference of sums.
        float later = 0.f;
#pragma unroll
        for (int i = ROWS - 1; i >= 0; --i)
            if (i < n) {
                keys[i][d] = k[i] * exponential(later);
                later += g[i];
            }
        decay[d] = exponential(later);
    }
    for (int i = threadIdx.x; i < n * CHANNELS; i += THREADS)
        values[i / CHANNELS][i % CHANNELS] = verify_u[(row + i / CHANNELS * NUM_HEADS) * V + first + i % CHANNELS];
    __syncthreads();

    float sum[PER_THREAD][4];
    const uint4 of_decay = *(const uint4*)&decay[at];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        sum[i][0] = __uint_as_float(s[i].x) * __uint_as_float(of_decay.x);
        sum[i][1] = __uint_as_float(s[i].y) * __uint_as_float(of_decay.y);
        sum[i][2] = __uint_as_float(s[i].z) * __uint_as_float(of_decay.z);
        sum[i][3] = __uint_as_float(s[i].w) * __uint_as_float(of_decay.w);
    }
    for (int t = 0; t < n; ++t) {
        const uint4 key = *(const uint4*)&keys[t][at];
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const float u = values[t][channel + i];
            sum[i][0] += u * __uint_as_float(key.x);
            sum[i][1] += u * __uint_as_float(key.y);
            sum[i][2] += u * __uint_as_float(key.z);
            sum[i][3] += u * __uint_as_float(key.w);
        }
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
        mine[i * PER_ROW] = make_uint4(__float_as_uint(sum[i][0]), __float_as_uint(sum[i][1]),
                                       __float_as_uint(sum[i][2]), __float_as_uint(sum[i][3]));

    element* window = conv + (size_t)layer * 3 * C;
    const element* rows = verify_conv + (size_t)layer * T * C;
    for (int i = threadIdx.x; i < CHANNELS; i += THREADS) {
        const int c = 2 * NUM_HEADS * K + head * V + first + i;
        shift_window(window + c, rows + c, n);
    }
    if (program == 0)
        for (int i = threadIdx.x; i < 2 * K; i += THREADS) {
            const int c = i / K * NUM_HEADS * K + head * K + i % K;
            shift_window(window + c, rows + c, n);
        }
}
"""
)


def commit(cache: KdaCache, kept: KdaKept, num_rows: torch.Tensor) -> None:
    """Launch `kda_commit` in `kernels/kda.py`; arguments as there."""
    L, H, V, K = cache.state.shape
    T, dtype = kept.k.shape[1], cache.conv.dtype
    if dtype not in (torch.bfloat16, torch.float32) or K % 4 or V % _PER_THREAD or T > MAX_ROWS:
        raise UnsupportedError(
            f"{dtype} heads of {K} keys and {V} values, {T} rows kept, have no kernel that commits; it takes "
            f"bfloat16 and float32, keys in multiples of 4, values in multiples of {_PER_THREAD} and {MAX_ROWS} rows,"
            " a CPU takes all"
        )
    channels = max(n for n in range(_PER_THREAD, _MAX_CHANNELS + 1, _PER_THREAD) if V % n == 0)
    definitions = {
        "K": K,
        "V": V,
        "NUM_HEADS": H,
        "ROWS": MAX_ROWS,
        "CHANNELS": channels,
        "PER_THREAD": _PER_THREAD,
    }
    if dtype == torch.float32:
        definitions["IS_FP32"] = 1
    if pdl_options()["PDL"]:
        definitions["HAS_PDL"] = 1
    launch(
        load_kernel(_SOURCE, "kda_commit", tuple((k, str(v)) for k, v in definitions.items()), num_rows.device),
        (L * H * (V // channels), 1, 1), channels // _PER_THREAD * (K // 4),
        *cache, *kept, num_rows, T,
    )  # fmt: skip
