"""Large linear maps behind a norm, for a step of T <= 16 tokens, in CUDA C++; references are in `kernels/linear.py`.

Eight rows of a weight are the columns of a tensor-core product whose 16 rows are the tokens, so one form serves every
width at the same speed. A lane's 16-byte load of 8 neighbouring inputs of one row is, as it stands, its share of two
products: they do not care in which order their inner index runs, as long as weights and tokens agree. A run of 32
inputs takes four lanes; the warps that share 8 rows take runs in turn. A lane has its next loads always on their way,
over the end of its rows too, and the first ones before the wait: they read nothing but weights.

Row t of a result does not depend on T. Rounding is that of `kernels/linear_triton.py`: h = x * norm_weight is rounded
to bf16, the norm's scale is applied to the fp32 sum, and bias and gate before the only other rounding, the result's.
"""

from functools import cache
from math import inf

import torch

from soloist.kernels.launch import pdl_options
from soloist.kernels.nvrtc import PRELUDE, launch, load_kernel

# Most tokens of a step; more is a prompt.
MAX_STEP_TOKENS = 16
_WARPS = 8
# 16-byte loads that a lane has on their way.
_LOADS_AHEAD = 16
# Shared memory that the tokens may take.
_SHARED_BYTES = 208 * 1024
# From this many bytes of weights on it is the faster form: on one H200 15 against 19 us for 52 MB at one token, 17
# against 24 at nine; with it for 32 MB a step of Ling-3.0-tiny is about 0.5 % shorter at one token and at nine
# (`docs/log.md`). Below, strips between which the next launch's programs find room are as fast.
_MIN_WEIGHT_BYTES = 30_000_000

_SOURCE = (
    PRELUDE
    + r"""
constexpr int THREADS = WARPS * 32, GROUPS = WARPS / SHARERS, PIECES = INPUTS / 8, RUNS = INPUTS / 32;
// Tokens' rows lie in other banks than their neighbours'.
constexpr int STRIDE = PIECES + 4;
// Outputs of 8 rows.
constexpr int WIDTH = HAS_GATE ? 4 : 8;

// h (T, STRIDE) = x * norm_weight, and each row's scale.
__device__ void stage(const uint4* x, int x_stride, const void* norm_weight, float eps, int T, uint4* h, float* scale) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int t = warp; t < T; t += WARPS) {
        float even = 0.f, odd = 0.f;
#pragma unroll 8
        for (int i = lane; i < PIECES; i += 32) {
            const uint4 of_x = x[(size_t)t * x_stride + i];
            const unsigned a[4] = {of_x.x, of_x.y, of_x.z, of_x.w};
            float w[8];
#ifdef HAS_FP32_NORM
#pragma unroll
            for (int k = 0; k < 8; ++k) w[k] = ((const float*)norm_weight)[8 * i + k];
#else
            const uint4 of_norm = ((const uint4*)norm_weight)[i];
            const unsigned b[4] = {of_norm.x, of_norm.y, of_norm.z, of_norm.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) w[2 * k] = low(b[k]), w[2 * k + 1] = high(b[k]);
#endif
            unsigned y[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                even += low(a[k]) * low(a[k]);
                odd += high(a[k]) * high(a[k]);
                y[k] = to_bf16_pair(low(a[k]) * w[2 * k], high(a[k]) * w[2 * k + 1]);
            }
            h[t * STRIDE + i] = make_uint4(y[0], y[1], y[2], y[3]);
        }
        const float sum = sum_of_lanes(even + odd);
        if (lane == 0) scale[t] = rsqrtf(sum / INPUTS + eps);
    }
}

// y (T, outputs) = norm(x) W^T + bias, without a bias a null pointer; with a gate silu(g) * u of W's two halves.
// Dynamic shared memory: h.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
norm_linear(const uint4* x, int x_stride, const void* norm_weight, float eps, const uint4* weight,
            const unsigned short* bias, float limit, int T, int outputs, void* y) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, piece = lane % 4;
    const int group = warp / SHARERS, sharer = warp % SHARERS;
    DYNAMIC_SHARED(uint4, h);
    __shared__ float sums[2][WARPS][ROWS][8], scale[ROWS];
    const int items = (outputs + WIDTH - 1) / WIDTH, per_round = gridDim.x * GROUPS;
    const int rounds = (items + per_round - 1) / per_round;
    const auto find_output = [&](int round) { return WIDTH * int((round * GROUPS + group) * gridDim.x + blockIdx.x); };
    const auto find_row = [&](int round) {
        // Rows past the end are read as the last one, and dropped.
        const int o = min(find_output(round) + g % WIDTH, outputs - 1);
        return weight + (size_t)(HAS_GATE && g >= 4 ? outputs + o : o) * PIECES + 4 * sharer + piece;
    };
    const auto load = [&](uint4& to, const uint4* row, int place) {
        if (RUNS % (SHARERS * PASSES * AHEAD) == 0 || sharer + SHARERS * place < RUNS)
            to = load_weights(row + 4 * SHARERS * place);
    };
    uint4 w[AHEAD];
    const uint4* row = find_row(0);
    let_consumers_start();
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) load(w[j], row, j);
    wait_for_producers();
    stage(x, x_stride, norm_weight, eps, T, h, scale);
    __syncthreads();
    const bool has_low = g < T, has_high = ROWS > 8 && g + 8 < T;
    const uint4* low_row = h + g * STRIDE + 4 * sharer + piece;
    const uint4* high_row = low_row + 8 * STRIDE;

    for (int round = 0; round < rounds; ++round) {
        const uint4* next = find_row(round + 1);
        const bool has_next = round + 1 < rounds;
        // Four sums in turn: a product need not wait for the one before it.
        float c[4][4] = {};
#pragma unroll 1
        for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
            for (int j = 0; j < AHEAD; ++j) {
                const int place = pass * AHEAD + j;
                if (RUNS % (SHARERS * PASSES * AHEAD) == 0 || sharer + SHARERS * place < RUNS) {
                    uint4 a = make_uint4(0, 0, 0, 0), b = a;
                    if (has_low) a = low_row[4 * SHARERS * place];
                    if (has_high) b = high_row[4 * SHARERS * place];
                    multiply_tile(c[j % 2 * 2], a.x, b.x, a.y, b.y, w[j].x, w[j].y);
                    multiply_tile(c[j % 2 * 2 + 1], a.z, b.z, a.w, b.w, w[j].z, w[j].w);
                }
                if (pass + 1 < PASSES) load(w[j], row, place + AHEAD);
                else if (has_next) load(w[j], next, j);
            }
        row = next;

        float(*mine)[8] = sums[round % 2][warp];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (k < 2 ? has_low : has_high)
                mine[g + 8 * (k / 2)][2 * piece + k % 2] = (c[0][k] + c[1][k]) + (c[2][k] + c[3][k]);
        __syncthreads();
        float(*of_group)[ROWS][8] = &sums[round % 2][group * SHARERS];
        const int first = find_output(round);
        for (int i = threadIdx.x - group * SHARERS * 32; i < T * WIDTH; i += SHARERS * 32) {
            const int t = i / WIDTH, o = first + i % WIDTH;
            if (o >= outputs) continue;
            float sum = 0.f, up = 0.f;
#pragma unroll
            for (int k = 0; k < SHARERS; ++k) {
                sum += of_group[k][t][i % WIDTH];
                if (HAS_GATE) up += of_group[k][t][i % WIDTH + 4];
            }
            sum *= scale[t];
            up *= scale[t];
            const size_t to = (size_t)t * outputs + o;
            if (HAS_GATE) {
                // Comparisons that a NaN passes through.
                sum *= sigmoid(sum);
                sum = sum > limit ? limit : sum;
                up = up > limit ? limit : up < -limit ? -limit : up;
                sum *= up;
            }
            if (bias) sum += low(bias[o]);
#ifdef IS_FP32_OUT
            ((float*)y)[to] = sum;
#else
            ((unsigned short*)y)[to] = (unsigned short)to_bf16(sum);
#endif
        }
    }
}
"""
)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    """A CPU runs programs one after the other: there three stand for many."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def can_run(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether this form takes a map and is the faster one: many weights, tokens x (T, I) of a step."""
    T, I = x.shape
    is_large = weight.numel() * weight.element_size() >= _MIN_WEIGHT_BYTES
    is_aligned = I % 32 == 0 and x.data_ptr() % 16 == 0 and (T == 1 or x.stride(0) % 8 == 0)
    fits = T <= MAX_STEP_TOKENS and T * (2 * I + 64) <= _SHARED_BYTES
    return is_large and x.dtype == torch.bfloat16 and is_aligned and fits


def run(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    has_gate: bool = False,
    limit: float | None = None,
) -> torch.Tensor:
    """Launch a step's map behind a norm, for what `can_run` says it can.

    Args:
        x: (T, I) bf16, rows apart by `x.stride(0)`.
        norm_weight: (I) bf16 or fp32.
        eps: of the norm.
        weight: (O, I) bf16, contiguous; with a gate gate rows, then as many up rows.
        bias: (O) bf16, or None.
        out_dtype: bf16 or fp32.
        has_gate: y = silu(g) * u.
        limit: of the gate and the up rows, as `norm_swiglu` in `kernels/linear.py` takes it.

    Returns:
        (T, O), or with a gate (T, O / 2).
    """
    T, I = x.shape
    outputs = weight.shape[0] // 2 if has_gate else weight.shape[0]
    runs = I // 32
    sharers = next(count for count in (1, 2, 4, 8) if count == _WARPS or runs <= count * _LOADS_AHEAD)
    passes = -(-runs // (sharers * _LOADS_AHEAD))
    definitions: list[tuple[str, int]] = [
        ("INPUTS", I),
        ("ROWS", 8 if T <= 8 else MAX_STEP_TOKENS),
        ("WARPS", _WARPS),
        ("SHARERS", sharers),
        ("PASSES", passes),
        ("AHEAD", -(-runs // (sharers * passes))),
        ("HAS_GATE", int(has_gate)),
    ]
    if norm_weight.dtype == torch.float32:
        definitions.append(("HAS_FP32_NORM", 1))
    if out_dtype == torch.float32:
        definitions.append(("IS_FP32_OUT", 1))
    if pdl_options()["PDL"]:
        definitions.append(("HAS_PDL", 1))
    kernel = load_kernel(_SOURCE, "norm_linear", tuple((key, str(value)) for key, value in definitions), x.device)
    y = torch.empty((T, outputs), dtype=out_dtype, device=x.device)
    programs = -(-outputs // ((4 if has_gate else 8) * (_WARPS // sharers)))
    launch(
        kernel, (min(programs, 2 * _num_multiprocessors(x.device)), 1, 1), 32 * _WARPS,
        x, x.stride(0) // 8 if T > 1 else 0, norm_weight, eps, weight, bias, inf if limit is None else limit,
        T, outputs, y,
        shared_bytes=T * (2 * I + 64),
    )  # fmt: skip
    return y
