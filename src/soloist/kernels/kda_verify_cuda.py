"""Verification of Kimi Delta Attention in CUDA C++: one program per head; equations and references in `kernels/kda.py`.

All of a head's value channels in one program need no exchange between programs for the norm, and its state is on its
way before the rows are there. With T <= 16 rows nothing is large enough for tensor cores to be worth the exchanges
around them: rows are solved by forward substitution, a value channel a thread, and sums are fp32 throughout.

Source: Kimi Linear (arXiv 2510.26692), equations of the WY form, from a frozen state.
"""

import torch

from soloist.errors import UnsupportedError
from soloist.kernels.launch import pdl_options
from soloist.kernels.nvrtc import PRELUDE, launch, load_kernel

# Most rows of a step.
MAX_ROWS = 16
# Threads that share a value channel.
_PARTS = 4

_SOURCE = (
    PRELUDE
    + r"""
constexpr int THREADS = V * PARTS, WARPS = THREADS / 32, PART = K / PARTS;
constexpr int C = NUM_HEADS * (2 * K + V);
// Rows of keys by parts: neighbouring parts lie in other banks.
constexpr int STRIDE = PARTS * (PART + 4);

#ifdef IS_FP32
typedef float element;
__device__ float to_float(element x) { return x; }
__device__ element to_element(float x) { return x; }
#else
typedef unsigned short element;
__device__ float to_float(element bits) { return __uint_as_float(unsigned(bits) << 16); }
__device__ element to_element(float x) { return (element)to_bf16(x); }
#endif

// The log decay: bounded below (Ling) or not (Kimi).
__device__ float log_decay(float drive, float a_log) {
#ifdef LOWER_BOUND
    return LOWER_BOUND * sigmoid(expf(a_log) * drive);
#else
    return -expf(a_log) * (drive > 20.f ? drive : log1pf(expf(drive)));
#endif
}

__device__ int place(int d) { return d / PART * (PART + 4) + d % PART; }

// All 2 * O values of a lane are summed over the lanes; with O = 16 lane l gets the sum of value l.
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

extern "C" __global__ void __launch_bounds__(THREADS)
kda_verify(const element* qkv, const element* f, const element* gate, const element* b, const element* conv_w,
           const float* a_log, const float* dt_bias, const element* o_norm, const float* state, const element* conv,
           float* verify_k, float* verify_u, float* verify_g, element* verify_conv, element* out, int T,
           int qkv_stride, int f_stride, int gate_stride, int b_stride, float eps, float scale) {
    const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __shared__ uint4 keys[2][ROWS][STRIDE / 4];
    __shared__ float g[ROWS][K], v[ROWS][V + 1];
    float(*q)[STRIDE] = (float(*)[STRIDE])keys[0], (*k)[STRIDE] = (float(*)[STRIDE])keys[1];
    // [i][j]: beta_i sum_d k_i exp(G_i - G_j) k_j below the diagonal; the same with q_i, without beta, on it too.
    __shared__ float lower[ROWS][ROWS], scores[ROWS][ROWS], beta[ROWS];

    // The frozen state: a step's end wrote it, so it may be read before the wait.
    const int channel = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    float s[PART];
#pragma unroll
    for (int i = 0; i < PART; i += 4) {
        const uint4 four = *(const uint4*)(state + ((size_t)head * V + channel) * K + part * PART + i);
        s[i] = __uint_as_float(four.x), s[i + 1] = __uint_as_float(four.y);
        s[i + 2] = __uint_as_float(four.z), s[i + 3] = __uint_as_float(four.w);
    }
    wait_for_producers();
    let_consumers_start();

    // Convolution, SiLU, decay: a channel a thread, rows in turn.
    for (int i = threadIdx.x; i < 3 * K + V; i += THREADS) {
        if (i >= 2 * K + V) {
            const int d = i - 2 * K - V;
            const float a = a_log[head], bias = dt_bias[head * K + d];
            float drive[ROWS];
#pragma unroll
            for (int t = 0; t < ROWS; ++t)
                drive[t] = t < T ? to_float(f[(size_t)t * f_stride + head * K + d]) + bias : 0.f;
#pragma unroll
            for (int t = 0; t < ROWS; ++t) {
                g[t][d] = t < T ? log_decay(drive[t], a) : 0.f;
                if (t < T) verify_g[((size_t)t * NUM_HEADS + head) * K + d] = g[t][d];
            }
            continue;
        }
        const int c = i < K ? head * K + i : i < 2 * K ? NUM_HEADS * K + head * K + i - K
                                                      : 2 * NUM_HEADS * K + head * V + i - 2 * K;
        float w[4], window[ROWS + 3];
        element raw[ROWS];
#pragma unroll
        for (int tap = 0; tap < 4; ++tap) w[tap] = to_float(conv_w[c * 4 + tap]);
#pragma unroll
        for (int t = 0; t < 3; ++t) window[t] = to_float(conv[t * C + c]);
#pragma unroll
        for (int t = 0; t < ROWS; ++t) {
            raw[t] = t < T ? qkv[(size_t)t * qkv_stride + c] : to_element(0.f);
            window[t + 3] = to_float(raw[t]);
        }
#pragma unroll
        for (int t = 0; t < ROWS; ++t) {
            if (t < T) verify_conv[(size_t)t * C + c] = raw[t];
            float y = window[t] * w[0] + window[t + 1] * w[1] + window[t + 2] * w[2] + window[t + 3] * w[3];
            y = t < T ? to_float(to_element(y * sigmoid(y))) : 0.f;
            if (i < K) q[t][place(i)] = y;
            else if (i < 2 * K) k[t][place(i - K)] = y;
            else v[t][i - 2 * K] = y;
        }
    }
    for (int t = threadIdx.x; t < ROWS; t += THREADS) beta[t] = t < T ? sigmoid(to_float(b[t * b_stride + head])) : 0.f;
    __syncthreads();

    // Norms: a row a warp.
    for (int t = warp; t < ROWS; t += WARPS) {
        float of_q = 0.f, of_k = 0.f;
        for (int d = lane; d < K; d += 32) {
            of_q += q[t][place(d)] * q[t][place(d)];
            of_k += k[t][place(d)] * k[t][place(d)];
        }
        of_q = rsqrtf(sum_of_lanes(of_q) + 1e-6f) * scale;
        of_k = rsqrtf(sum_of_lanes(of_k) + 1e-6f);
        for (int d = lane; d < K; d += 32) {
            q[t][place(d)] *= of_q;
            k[t][place(d)] *= of_k;
            if (t < T) verify_k[((size_t)t * NUM_HEADS + head) * K + d] = k[t][place(d)];
        }
    }
    __syncthreads();

    // Pairs of rows: a warp has row j and all later rows i. G_i - G_j is summed up from j: never a positive exponent,
    // nor a difference of large sums.
    for (int j = warp; j < ROWS; j += WARPS) {
        float pairs[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) pairs[i] = 0.f;
        for (int d = lane; d < K; d += 32) {
            const float of_j = k[j][place(d)];
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                if (i >= j && i < T) {
                    if (i > j) sum += g[i][d];
                    const float meets = exponential(sum) * of_j;
                    pairs[i] += k[i][place(d)] * meets;
                    pairs[16 + i] += q[i][place(d)] * meets;
                }
        }
        const float sum = sums_by_lane<16>(pairs);
        const int i = lane % 16;
        if (i < ROWS) {
            if (lane < 16) lower[i][j] = i > j ? beta[i] * sum : 0.f;
            else scores[i][j] = i >= j ? sum : 0.f;
        }
    }
    __syncthreads();
    // From here on q and k are what meets the state: decayed from the start. A channel a thread.
    for (int i = threadIdx.x; i < 2 * K; i += THREADS) {
        float* rows = (i < K ? q[0] : k[0]) + place(i % K);
        float sum = 0.f;
#pragma unroll
        for (int t = 0; t < ROWS; ++t) {
            sum += g[t][i % K];
            rows[t * STRIDE] *= exponential(sum);
        }
    }
    __syncthreads();

    // u = (I + L)^-1 beta (v - k S) and o = q S + P u, row by row; the threads of a channel share K, then do the same.
    float of_k[ROWS], of_q[ROWS];
#pragma unroll
    for (int t = 0; t < ROWS; ++t) {
        of_k[t] = of_q[t] = 0.f;
        if (t >= T) continue;
#pragma unroll
        for (int i = 0; i < PART; i += 4) {
            const uint4 a = keys[0][t][place(part * PART + i) / 4], c = keys[1][t][place(part * PART + i) / 4];
            of_q[t] += s[i] * __uint_as_float(a.x) + s[i + 1] * __uint_as_float(a.y) +
                       s[i + 2] * __uint_as_float(a.z) + s[i + 3] * __uint_as_float(a.w);
            of_k[t] += s[i] * __uint_as_float(c.x) + s[i + 1] * __uint_as_float(c.y) +
                       s[i + 2] * __uint_as_float(c.z) + s[i + 3] * __uint_as_float(c.w);
        }
#pragma unroll
        for (int o = 1; o < PARTS; o <<= 1) {
            of_k[t] += __shfl_xor_sync(FULL, of_k[t], o);
            of_q[t] += __shfl_xor_sync(FULL, of_q[t], o);
        }
    }
#pragma unroll
    for (int t = 0; t < ROWS; ++t) of_k[t] = beta[t] * (v[t][channel] - of_k[t]);
    // Its values are read; the output takes their place, which no other channel touches.
    __syncwarp();
#pragma unroll
    for (int t = 0; t < ROWS; ++t) {
        if (t >= T) continue;
        float u = of_k[t], y = of_q[t];
#pragma unroll
        for (int j = 0; j < t; ++j) {
            u -= lower[t][j] * of_k[j];
            y += scores[t][j] * of_k[j];
        }
        of_k[t] = u;
        y += scores[t][t] * u;
        if (part == t % PARTS) {
            verify_u[((size_t)t * NUM_HEADS + head) * V + channel] = u;
            v[t][channel] = to_float(to_element(y));
        }
    }
    __syncthreads();

    // Gated norm: a row a warp.
    for (int t = warp; t < T; t += WARPS) {
        float sum = 0.f;
        for (int c = lane; c < V; c += 32) sum += v[t][c] * v[t][c];
        const float of_row = rsqrtf(sum_of_lanes(sum) / V + eps);
        for (int c = lane; c < V; c += 32) {
            const float of_gate = sigmoid(to_float(gate[(size_t)t * gate_stride + head * V + c]));
            out[((size_t)t * NUM_HEADS + head) * V + c] = to_element(v[t][c] * of_row * to_float(o_norm[c]) * of_gate);
        }
    }
}
"""
)


def verify(
    qkv: torch.Tensor,
    f: torch.Tensor,
    gate: torch.Tensor,
    b: torch.Tensor,
    conv_w: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    o_norm: torch.Tensor,
    eps: float,
    state: torch.Tensor,
    conv: torch.Tensor,
    verify_k: torch.Tensor,
    verify_u: torch.Tensor,
    verify_g: torch.Tensor,
    verify_conv: torch.Tensor,
    *,
    lower_bound: float | None,
) -> torch.Tensor:
    """Launch `kda_verify` in `kernels/kda.py`; arguments as there."""
    H, V, K = state.shape
    T = qkv.shape[0]
    if qkv.dtype not in (torch.bfloat16, torch.float32) or K % 16 or V % 8 or not 8 <= V <= 256 or K > 128:
        raise UnsupportedError(
            f"{qkv.dtype} heads of {K} keys and {V} values have no kernel that verifies; it takes bfloat16 and "
            "float32, keys in multiples of 16 up to 128 and values in multiples of 8 up to 256"
        )
    # Loops over rows are unrolled: the fewer the better.
    rows = min(rows for rows in (4, 8, 12, MAX_ROWS) if rows >= T)
    definitions: list[tuple[str, int | str]] = [("K", K), ("V", V), ("NUM_HEADS", H), ("PARTS", _PARTS), ("ROWS", rows)]
    if lower_bound is not None:
        definitions.append(("LOWER_BOUND", f"{float(lower_bound)!r}f"))
    if qkv.dtype == torch.float32:
        definitions.append(("IS_FP32", 1))
    if pdl_options()["PDL"]:
        definitions.append(("HAS_PDL", 1))
    out = torch.empty((T, H * V), dtype=qkv.dtype, device=qkv.device)
    launch(
        load_kernel(_SOURCE, "kda_verify", tuple((key, str(value)) for key, value in definitions), qkv.device),
        (H, 1, 1), V * _PARTS,
        qkv, f, gate, b, conv_w, A_log, dt_bias, o_norm, state, conv, verify_k, verify_u, verify_g, verify_conv, out, T,
        qkv.stride(0), f.stride(0), gate.stride(0), b.stride(0), eps, K**-0.5,
    )  # fmt: skip
    return out
