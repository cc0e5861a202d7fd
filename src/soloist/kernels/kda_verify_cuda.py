"""Verification of Kimi Delta Attention in CUDA C++; equations and references are in `kernels/kda.py`.

The value channels of a head are shared by the programs of a cluster, each with its part of the frozen state on the way
before the rows are there. What depends on keys alone, each does for itself: convolutions, decays and the T x T products
of rows cost less than an exchange. A program's channels meet the state on tensor cores, operands split into bf16 parts:
two give a product 17 bits, three those of fp32. Rows are then solved by forward substitution, a value channel a lane,
and the norm's sums of squares are the only thing that programs exchange.

Source: Kimi Linear (arXiv 2510.26692), equations of the WY form, from a frozen state.
"""

import torch

from soloist.kernels import kda_cluster_cuda
from soloist.kernels.kda_inputs import KdaCache, KdaKept, KdaRows, KdaWeights
from soloist.kernels.nvrtc import launch, load_kernel

# Most rows of a step.
MAX_ROWS = 16
# Value channels of a program, at most.
_MAX_CHANNELS = 32

_SOURCE = (
    kda_cluster_cuda.SOURCE
    + r"""
// A program's eights of value channels, a warp each.
constexpr int TILES = CHANNELS / 8;
// A key channel, a query channel or a value channel a thread.
constexpr int JOB_WARPS = (2 * K + CHANNELS + 31) / 32, WARPS = JOB_WARPS < 4 ? 4 : JOB_WARPS, THREADS = 32 * WARPS;
// Clusters find their multiprocessors in groups of these: where there are many, two programs share one.
constexpr int PER_MULTIPROCESSOR = NUM_HEADS * CLUSTER > 64 ? 2 : 1;
// The operand of queries, then keys: rows of each. Rows in fours.
constexpr int HALF = ROWS <= 8 ? 8 : 16, PADDED = (ROWS + 3) / 4 * 4;
// Of bf16 that an operand is split into.
constexpr int PARTS = sizeof(element) == 4 ? 3 : 2;
// A row of bf16 whose neighbours lie in other banks.
constexpr int STRIDE = (2 * K + 95) / 128 * 64 + 16;

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, PER_MULTIPROCESSOR)
kda_verify(const element* qkv, const element* f, const element* gate, const element* b, const element* conv_w,
           const float* a_log, const float* dt_bias, const element* o_norm, const float* state, const element* conv,
           float* verify_k, float* verify_u, float* verify_g, element* verify_conv, element* out, int T,
           int qkv_stride, int f_stride, int gate_stride, int b_stride, float eps, float scale) {
    const int head = blockIdx.x / CLUSTER, program = blockIdx.x % CLUSTER, first = program * CHANNELS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, piece = lane % 4;
    // Rows as they come from the convolution, without the factors of their norms; decay of each.
    __shared__ __align__(16) element q[ROWS][K], k[ROWS][K];
    __shared__ __align__(16) float decay[ROWS][K];
    // Queries, then keys, decayed from the start: what meets the state. PARTS of bf16, the largest first.
    DYNAMIC_SHARED(uint4, dynamic);
    auto& meets = *(unsigned short(*)[PARTS][2 * HALF][STRIDE])dynamic;
    __shared__ float met[2 * HALF][CHANNELS + 8], v[ROWS][CHANNELS];
    // [j][i]: k_i exp(G_i - G_j) k_j, i > j; q_i exp(G_i - G_j) k_j, i >= j.
    __shared__ __align__(16) float of_keys[ROWS][PADDED], of_queries[ROWS][PADDED];
    __shared__ float squares[K / 8][16], q_factor[PADDED], k_factor[ROWS], beta[ROWS], sums[CLUSTER][PADDED];

    arrive_at_cluster();
    // The frozen state and the window: a step's end wrote them, so they may be read before the wait.
    float s[K / 4];
    if (warp < TILES)
#pragma unroll
        for (int i = 0; i < K / 4; i += 4) {
            const Four four = load_four(state + ((size_t)head * V + first + 8 * warp + g) * K + 4 * i + 4 * piece);
#pragma unroll
            for (int n = 0; n < 4; ++n) s[i + n] = four.x[n];
        }
    const int job = threadIdx.x, d = job % K;
    const bool is_query = job < K, is_row = job < 2 * K, is_value = !is_row && job < 2 * K + CHANNELS;
    const int c = is_query ? head * K + d
                : is_row   ? NUM_HEADS * K + head * K + d
                           : 2 * NUM_HEADS * K + head * V + first + (is_value ? job - 2 * K : 0);
    float taps[4], window[ROWS + 3];
#pragma unroll
    for (int tap = 0; tap < 4; ++tap) taps[tap] = to_float(conv_w[c * 4 + tap]);
#pragma unroll
    for (int t = 0; t < 3; ++t) window[t] = to_float(conv[t * C + c]);
    const float rate = expf(a_log[head]), bias = dt_bias[head * K + d];
    const bool is_channel = lane < CHANNELS;
    const float of_norm = is_channel ? to_float(o_norm[first + lane]) : 0.f;
    wait_for_producers();
    let_consumers_start();

    element raw[ROWS];
    float drive[ROWS], of_gate[4];
#pragma unroll
    for (int t = 0; t < ROWS; ++t) {
        raw[t] = t < T ? qkv[(size_t)t * qkv_stride + c] : to_element(0.f);
        drive[t] = is_row && t < T ? to_float(f[(size_t)t * f_stride + head * K + d]) : 0.f;
    }
    // The last phase: four rows a warp, a value channel a lane.
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int t = 4 * warp + r;
        of_gate[r] = is_channel && t < T ? to_float(gate[(size_t)t * gate_stride + head * V + first + lane]) : 0.f;
    }
    if (job < ROWS) beta[job] = job < T ? sigmoid(to_float(b[job * b_stride + head])) : 0.f;
    float square[16], from_start = 1.f;
#pragma unroll
    for (int t = ROWS; t < 16; ++t) square[t] = 0.f;
#pragma unroll
    for (int t = 0; t < ROWS; ++t) {
        window[t + 3] = to_float(raw[t]);
        float y = window[t] * taps[0] + window[t + 1] * taps[1] + window[t + 2] * taps[2] + window[t + 3] * taps[3];
        const element rounded = to_element(y * sigmoid(y));
        y = to_float(rounded);
        square[t] = y * y;
        // What every program has, each row's is kept by one.
        const bool keeps = t < T && (!is_row || t % CLUSTER == program);
        if (keeps && (is_row || is_value)) verify_conv[(size_t)t * C + c] = raw[t];
        if (is_row) {
            const float log = log_decay(drive[t] + bias, rate), own = exponential(log);
            from_start *= own;
            (is_query ? q : k)[t][d] = rounded;
            if (!is_query) {
                decay[t][d] = own;
                if (keeps) verify_g[((size_t)t * NUM_HEADS + head) * K + d] = log;
            }
            float rest = y * from_start;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const unsigned bits = to_bf16(rest);
                meets[part][(is_query ? 0 : HALF) + t][d] = (unsigned short)bits;
                rest -= low(bits);
            }
        } else if (is_value) v[t][job - 2 * K] = y;
    }
    if (is_row) {
        // Of 16 channels; a lane gets a row.
        const float sum = sums_by_lane<8>(square);
        squares[job / 16][lane % 16] = sum;
    }
    __syncthreads();

    if (warp < TILES) {
        // (q, k) S: the products run over keys in another order, the same in both operands.
        float sum[HALF / 8][PARTS][PARTS][4] = {};
#pragma unroll
        for (int i = 0; i < K / 4; i += 4) {
            unsigned low_keys[PARTS], high_keys[PARTS];
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                unsigned bits[4];
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    bits[n] = to_bf16(s[i + n]);
                    s[i + n] -= low(bits[n]);
                }
                low_keys[part] = bits[0] | bits[1] << 16;
                high_keys[part] = bits[2] | bits[3] << 16;
            }
#pragma unroll
            for (int m = 0; m < HALF / 8; ++m)
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    const uint2 x = *(const uint2*)&meets[part][16 * m + g][4 * i + 4 * piece];
                    const uint2 y = *(const uint2*)&meets[part][16 * m + g + 8][4 * i + 4 * piece];
#pragma unroll
                    for (int other = 0; part + other < PARTS; ++other)
                        multiply_tile(sum[m][part][other], x.x, y.x, x.y, y.y, low_keys[other], high_keys[other]);
                }
        }
#pragma unroll
        for (int m = 0; m < HALF / 8; ++m)
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                // The small ones first.
                float all = 0.f;
#pragma unroll
                for (int parts = PARTS - 1; parts >= 0; --parts)
#pragma unroll
                    for (int part = 0; part <= parts; ++part) all += sum[m][part][parts - part][n];
                met[16 * m + g + n / 2 * 8][8 * warp + 2 * piece + n % 2] = all;
            }
    }
    if (warp == WARPS - 1 && lane < ROWS) {
        float of_q = 0.f, of_k = 0.f;
#pragma unroll
        for (int i = 0; i < K / 16; ++i) {
            of_q += squares[i][lane];
            of_k += squares[K / 16 + i][lane];
        }
        q_factor[lane] = rsqrtf(of_q + 1e-6f) * scale;
        k_factor[lane] = rsqrtf(of_k + 1e-6f);
    }
    // Pairs of rows: a warp has the rows j and j + 1 and all later rows i. What decays from j to i is a product of
    // single rows' decays: right for any decay.
    for (int j = 2 * ((warp + WARPS - TILES) % WARPS); j < T; j += 2 * WARPS) {
        const bool has_keys = 4 * lane < K;
        const int at = has_keys ? 4 * lane : 0;
        float of_first[2 * HALF], of_second[2 * HALF];
#pragma unroll
        for (int n = 0; n < 2 * HALF; ++n) of_first[n] = of_second[n] = 0.f;
        Four one = load_four(&k[j][at]), two = load_four(&k[j + 1][at]);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            one.x[n] = has_keys ? one.x[n] : 0.f;
            two.x[n] = has_keys ? two.x[n] : 0.f;
        }
        Four key = one, query = load_four(&q[j][at]), own = one;
#pragma unroll
        for (int o = 0; o < ROWS; ++o) {
            const int next = min(j + o + 1, ROWS - 1);
            const Four next_key = load_four(&k[next][at]), next_query = load_four(&q[next][at]);
            const Four next_own = load_four(&decay[next][at]);
            if (o > 0) {
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    one.x[n] *= own.x[n];
                    if (o > 1) two.x[n] *= own.x[n];
                }
                of_first[o] = dot(key, one);
                if (o > 1) of_second[o] = dot(key, two);
                of_second[HALF + o] = dot(query, two);
            }
            of_first[HALF + o] = dot(query, one);
            if (j + o + 1 >= T) break;
            key = next_key, query = next_query, own = next_own;
        }
        float first_sum = sums_by_lane<HALF>(of_first), second_sum = sums_by_lane<HALF>(of_second);
        if (HALF == 8) {
            first_sum += __shfl_xor_sync(FULL, first_sum, 16);
            second_sum += __shfl_xor_sync(FULL, second_sum, 16);
        }
        const int i = j + lane % HALF;
        if (i < ROWS && lane < 2 * HALF) {
            auto& of_rows = lane < HALF ? of_keys : of_queries;
            of_rows[j][i] = first_sum;
            of_rows[j + 1][i] = second_sum;
        }
    }
    __syncthreads();

    // u = beta (v - k S - sum_j (k D k_j) u_j) and o = q S + sum_j (q D k_j) u_j, row by row.
    float y[4] = {};
    const int own_row = 4 * warp;
    if (own_row < T) {
        const int channel = is_channel ? lane : 0;
        float rest[ROWS];
#pragma unroll
        for (int t = 0; t < ROWS; ++t) rest[t] = met[HALF + t][channel];
#pragma unroll
        for (int r = 0; r < 4; ++r) y[r] = met[own_row + r][channel];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            const float u = beta[j] * v[j][channel] - beta[j] * k_factor[j] * rest[j], of_key = k_factor[j] * u;
            if (j / 4 == warp && j < T && is_channel)
                verify_u[((size_t)j * NUM_HEADS + head) * V + first + lane] = u;
#pragma unroll
            for (int t = (j + 1) / 4 * 4; t < ROWS; t += 4) {
                const Four four = load_four(&of_keys[j][t]);
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    if (t + n > j && t + n < ROWS) rest[t + n] += four.x[n] * of_key;
            }
            const Four four = load_four(&of_queries[j][own_row]);
#pragma unroll
            for (int r = 0; r < 4; ++r) y[r] += j <= own_row + r ? four.x[r] * of_key : 0.f;
        }
    }
    wait_for_cluster();
    if (own_row < T)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            y[r] = is_channel ? to_float(to_element(y[r] * q_factor[own_row + r])) : 0.f;
            const float sum = sum_of_lanes(y[r] * y[r]);
            if (lane < CLUSTER) store_to_peer(&sums[program][own_row + r], lane, sum);
        }
    arrive_at_cluster();
    if (is_row && !is_query)
#pragma unroll
        for (int t = 0; t < ROWS; ++t)
            if (t < T && t % CLUSTER == program)
                verify_k[((size_t)t * NUM_HEADS + head) * K + d] = to_float(k[t][d]) * k_factor[t];
    wait_for_cluster();
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int t = own_row + r;
        if (t >= T || !is_channel) continue;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < CLUSTER; ++i) sum += sums[i][t];
        out[((size_t)t * NUM_HEADS + head) * V + first + lane] =
            to_element(y[r] * rsqrtf(sum / V + eps) * of_norm * sigmoid(of_gate[r]));
    }
}
"""
)


def verify(rows: KdaRows, weights: KdaWeights, cache: KdaCache, kept: KdaKept) -> torch.Tensor:
    """Launch `kda_verify` in `kernels/kda.py`; arguments as there."""
    qkv, f, gate, b = rows
    H, V, K = cache.state.shape
    T = qkv.shape[0]
    channels = kda_cluster_cuda.divide_channels(rows, weights, cache, _MAX_CHANNELS)
    programs = V // channels
    # Loops over rows are unrolled, pairs of rows belong together: the fewest that are even.
    num_rows = T + T % 2
    definitions = (*kda_cluster_cuda.define(rows, weights, cache, programs), ("ROWS", str(num_rows)))
    out = torch.empty((T, H * V), dtype=qkv.dtype, device=qkv.device)
    # PARTS, 2 * HALF and STRIDE of the source.
    parts = 3 if qkv.dtype == torch.float32 else 2
    meets_bytes = 2 * parts * (16 if num_rows <= 8 else 32) * ((2 * K + 95) // 128 * 64 + 16)
    launch(
        load_kernel(_SOURCE, "kda_verify", definitions, qkv.device),
        (H * programs, 1, 1), 32 * max(4, -(-(2 * K + channels) // 32)),
        *rows, *weights[:4], *cache, *kept, out, T,
        qkv.stride(0), f.stride(0), gate.stride(0), b.stride(0), weights.eps, K**-0.5,
        shared_bytes=meets_bytes,
    )  # fmt: skip
    return out
