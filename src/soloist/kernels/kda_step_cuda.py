"""One token of Kimi Delta Attention in CUDA C++; equations and references are in `kernels/kda.py`.

The time is that of what waits for each other, not of bytes. So a warp has some value channels with all their keys, in
registers before the rows are there, and does for itself what depends on keys alone. It meets the others once, for the
norm's sum of squares, and updates its state meanwhile: with k and q as they come from the convolution, S the state
before the token and D = diag(exp(g)),

    u = beta (v - S D k / |k|)        S D k, S D q, k q, |k|^2 and |q|^2 are sums over keys of one round
    o = (S D q + u (k q) / |k|) / |q|

Source: Kimi Linear (arXiv 2510.26692), section 3.
"""

import torch

from soloist.kernels import kda_cluster_cuda
from soloist.kernels.kda_inputs import KdaCache, KdaRows, KdaWeights
from soloist.kernels.nvrtc import launch, load_kernel

# Value channels of a program, at most, and of a warp. Fewer of a warp: every warp has all decays to form.
_MAX_CHANNELS = 32
_PER_WARP = 8

_SOURCE = (
    kda_cluster_cuda.SOURCE
    + r"""
constexpr int WARPS = CHANNELS / PER_WARP, THREADS = 32 * WARPS;

// N values of each lane are summed over the warp; a lane gets the sum of value lane % N.
template <int N> __device__ float sums_of_warp(float* x) {
    float sum = sums_by_lane<N / 2>(x);
#pragma unroll
    for (int o = N; o < 32; o *= 2) sum += __shfl_xor_sync(FULL, sum, o);
    return sum;
}

// The short convolution of one channel, the oldest row first, and its SiLU.
__device__ float convolve(float x0, float x1, float x2, float x3, const Four& taps) {
    const float y = x0 * taps.x[0] + x1 * taps.x[1] + x2 * taps.x[2] + x3 * taps.x[3];
    return to_float(to_element(y * sigmoid(y)));
}

// Four key or query channels: three rows that were, the new one, and the taps of each.
struct Window { Four rows[4], taps[4]; };
__device__ void load_window(Window& w, const element* conv, const element* conv_w, int c) {
#pragma unroll
    for (int t = 0; t < 3; ++t) w.rows[t] = load_four(conv + t * C + c);
#pragma unroll
    for (int n = 0; n < 4; ++n) w.taps[n] = load_four(conv_w + 4 * (c + n));
}
__device__ Four convolve(const Window& w, bool is_channel) {
    Four y;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const float x = convolve(w.rows[0].x[n], w.rows[1].x[n], w.rows[2].x[n], w.rows[3].x[n], w.taps[n]);
        y.x[n] = is_channel ? x : 0.f;
    }
    return y;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
kda_step(const element* qkv, const element* f, const element* gate, const element* b, const element* conv_w,
         const float* a_log, const float* dt_bias, const element* o_norm, float* state, element* conv, element* out,
         const int* width, float eps, float scale) {
    const int head = blockIdx.x / CLUSTER, program = blockIdx.x % CLUSTER;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Four keys a lane, all of the warp's value channels; what a value channel has once, every PER_WARP-th lane has.
    const bool has_keys = 4 * lane < K;
    const int at = has_keys ? 4 * lane : 0, d = head * K + at;
    const int first = head * V + program * CHANNELS + warp * PER_WARP, channel = lane % PER_WARP;
    const int c_q = d, c_k = NUM_HEADS * K + d, c_v = 2 * NUM_HEADS * K + first + channel;
    __shared__ __align__(16) float sums[CLUSTER * WARPS];
    __shared__ Mbarrier have_come;

    // The step before wrote the state and the window: complete long before this kernel starts.
    float* mine = state + (size_t)first * K + at;
    Four s[PER_WARP];
#pragma unroll
    for (int m = 0; m < PER_WARP; ++m) s[m] = load_four(mine + m * K);
    Window of_q, of_k;
    load_window(of_q, conv, conv_w, c_q);
    load_window(of_k, conv, conv_w, c_k);
    const float v0 = to_float(conv[c_v]), v1 = to_float(conv[C + c_v]), v2 = to_float(conv[2 * C + c_v]);
    const Four v_taps = load_four(conv_w + 4 * c_v), bias = load_four(dt_bias + d);
    const float of_norm = to_float(o_norm[first - head * V + channel]), log_rate = a_log[head];
    // Before anything is sent, all programs of the cluster count what comes.
    if (threadIdx.x == 0) {
        init_mbarrier(&have_come, 1);
        publish_mbarriers();
        expect_bytes(&have_come, sizeof sums);
    }
    arrive_at_cluster_at_once();
    wait_for_producers();
    let_consumers_start();

    of_q.rows[3] = load_four(qkv + c_q);
    of_k.rows[3] = load_four(qkv + c_k);
    const Four drive = load_four(f + d);
    const float v3 = to_float(qkv[c_v]), of_gate = to_float(gate[first + channel]), strength = to_float(b[head]);
    const bool is_counted = width == nullptr || *width > 0;
    wait_for_cluster();
    // Never so. Without a branch the compiler puts off the last loads until the first ones have been used.
    if (eps < 0.f) __trap();
    const float rate = expf(log_rate);
    const Four q = convolve(of_q, has_keys), k = convolve(of_k, has_keys);
    const float q_square = sum_of_lanes(dot(q, q)), k_square = sum_of_lanes(dot(k, k)), kq = sum_of_lanes(dot(k, q));
    Four decay, decayed_q, decayed_k;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        decay.x[n] = exponential(log_decay(drive.x[n] + bias.x[n], rate));
        decayed_q.x[n] = decay.x[n] * q.x[n];
        decayed_k.x[n] = decay.x[n] * k.x[n];
    }
    float with_q[PER_WARP], with_k[PER_WARP];
#pragma unroll
    for (int m = 0; m < PER_WARP; ++m) {
        with_q[m] = dot(s[m], decayed_q);
        with_k[m] = dot(s[m], decayed_k);
    }
    const float k_factor = rsqrtf(k_square + 1e-6f), q_factor = rsqrtf(q_square + 1e-6f) * scale;
    const float v = convolve(v0, v1, v2, v3, v_taps);
    const float u = sigmoid(strength) * (v - k_factor * sums_of_warp<PER_WARP>(with_k)), of_key = u * k_factor;
    const float o = to_float(to_element(q_factor * (sums_of_warp<PER_WARP>(with_q) + of_key * kq)));
    const float square = sum_of_lanes<PER_WARP>(o * o);
    if (lane < CLUSTER) send_to_peer(&sums[program * WARPS + warp], lane, square, &have_come);

    // While the sums are on their way.
    if (is_counted)
#pragma unroll
        for (int m = 0; m < PER_WARP; ++m) {
            const float x = __shfl_sync(FULL, of_key, m);
#pragma unroll
            for (int n = 0; n < 4; ++n) s[m].x[n] = s[m].x[n] * decay.x[n] + x * k.x[n];
            if (has_keys) store_four(mine + m * K, s[m]);
        }
    const float factor = of_norm * sigmoid(of_gate);
    wait_for_phase(&have_come, 0);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < CLUSTER * WARPS; ++i) sum += sums[i];
    if (lane < PER_WARP) out[first + lane] = to_element(o * rsqrtf(sum / V + eps) * factor);
    // All warps of the head have sent, and so have read the window.
    if (is_counted) {
        if (lane < PER_WARP) {
            conv[c_v] = to_element(v1);
            conv[C + c_v] = to_element(v2);
            conv[2 * C + c_v] = to_element(v3);
        }
        if (program == 0 && warp == 0 && has_keys)
#pragma unroll
            for (int t = 0; t < 3; ++t) {
                store_four(conv + t * C + c_q, of_q.rows[t + 1]);
                store_four(conv + t * C + c_k, of_k.rows[t + 1]);
            }
    }
}
"""
)


def step(
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaCache,
    *,
    width: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch `kda_step` in `kernels/kda.py`; arguments as there."""
    H, V, _ = cache.state.shape
    channels = kda_cluster_cuda.divide_channels(rows, weights, cache, _MAX_CHANNELS)
    programs = V // channels
    qkv, f, _, _ = rows
    # Four channels a load.
    assert all(x.data_ptr() % (4 * x.element_size()) == 0 for x in (qkv, f)), "rows lie between groups of four"
    definitions = (*kda_cluster_cuda.define(rows, weights, cache, programs), ("PER_WARP", str(_PER_WARP)))
    out = torch.empty((1, H * V), dtype=qkv.dtype, device=qkv.device)
    launch(
        load_kernel(_SOURCE, "kda_step", definitions, qkv.device),
        (H * programs, 1, 1), 32 * (channels // _PER_WARP),
        *rows, *weights[:4], *cache, out, width, weights.eps, cache.state.shape[2] ** -0.5,
    )  # fmt: skip
    return out
