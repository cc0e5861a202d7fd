"""The router and the experts of a step in CUDA C++, one launch; the equations are in `kernels/moe.py`.

One program per multiprocessor, all there at once:

1. Each multiplies the rows by a few rows of the router, on tensor cores, whose weights come before the wait for the
   producers: x * norm_weight is rounded to bf16, the norm's scale is applied to the fp32 sum. It tells the others, and
   until all have come as far it normalises the rows and multiplies them by a few gate and up rows of the shared expert.
2. Each chooses the experts from all logits by itself: that costs less than waiting once more. What was chosen becomes a
   list of slots: the shared expert's, then each distinct expert once, in ascending order, with the tokens that take it.
3. A warp takes the gate and up row of one (slot, f) at a time: weights in registers, times the slot's tokens alone, so
   the arithmetic grows with the choices and not with slots times tokens, and CUDA cores keep up with the memory.
4. A warp that has no more of these asks for the weights of its outputs of D, waits until all programs have come as far,
   and sums over the slots, asking for another slot's weights for each that it used.

Without `ROUTER_INSIDE` the router's product is a launch of its own in front, and the shared expert is a slot like any.
A row's sum runs over its own slots in ascending order: it has the same bits in any company and at any width.
"""

from functools import cache
from math import inf
from typing import Protocol

import torch

from soloist.errors import UnsupportedError
from soloist.kernels.launch import arrival_counters, pdl_options
from soloist.kernels.nvrtc import PRELUDE, launch, load_kernel
from soloist.kernels.read_ahead import shares

# Most tokens of a step.
MAX_ROWS = 16
# Whether the experts' launch multiplies by the router itself.
ROUTER_INSIDE = True
# 16-byte pieces of down rows that a lane has on their way at most.
DOWN_PIECES = 16
# Bytes of the next launch's weights that the experts ask for, measured on one H200, `docs/log.md`.
READ_AHEAD_BYTES = 6 << 20
# Shared memory that activations may take.
_SHARED_BYTES = 160 * 1024

_SOURCE = (
    PRELUDE
    + r"""
constexpr int THREADS = WARPS * 32;
// A group of experts is a run of lanes, of which the last ones may have less, or nothing.
constexpr int PER_GROUP = NUM_EXPERTS / NUM_GROUPS, LANES_PER_GROUP = 32 / NUM_GROUPS;
constexpr int PER_LANE = (PER_GROUP + LANES_PER_GROUP - 1) / LANES_PER_GROUP;
constexpr int MAX_SLOTS = NUM_SHARED + (ROWS * NUM_CHOSEN < NUM_EXPERTS ? ROWS * NUM_CHOSEN : NUM_EXPERTS);
// A token's choices: the shared slots, then its experts.
constexpr int CHOICES = NUM_SHARED + NUM_CHOSEN;
// 16-byte pieces of a row of D and of F, and how many of them a lane takes.
constexpr int D_PIECES = HIDDEN / 8, F_PIECES = WIDTH / 8;
constexpr int D_LOADS = (D_PIECES + 31) / 32, F_LOADS = (F_PIECES + LANES_PER_OUTPUT - 1) / LANES_PER_OUTPUT;
constexpr int OUTPUTS_PER_WARP = 32 / LANES_PER_OUTPUT;
// Eight rows of weights are the columns of a tensor core's product. Warps take its runs of 32 inputs in turn.
constexpr int RUNS = ((D_PIECES + 3) / 4 + WARPS - 1) / WARPS;
// Programs wait for each other behind the router's product and behind the gate and up rows.
constexpr int NUM_BARRIERS = HAS_ROUTER ? 2 : 1;

#ifdef __CUDACC__
__device__ unsigned load_acquire(const unsigned* p) {
    unsigned x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
// Counts up to `last`, then begins at 0.
__device__ void count_release(unsigned* p, unsigned last) {
    asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(p), "r"(last) : "memory");
}
// Nothing: but the compiler cannot keep what it makes of x in more registers than x has.
__device__ void keep_packed(uint4& x) { asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)); }
#else
__device__ unsigned load_acquire(const unsigned* p) {
    let_other_programs_run();
    return *p;
}
__device__ void count_release(unsigned* p, unsigned last) { *p = *p < last ? *p + 1 : 0; }
__device__ void keep_packed(uint4&) {}
#endif

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

// Larger floats have larger keys; 0 is below all of them.
__device__ unsigned key_of(float x) {
    unsigned bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// How many experts a lane has, and the first of them.
__device__ int num_of_lane() {
    if (PER_GROUP == PER_LANE * LANES_PER_GROUP) return PER_LANE;
    return min(PER_LANE, PER_GROUP - int(threadIdx.x) % LANES_PER_GROUP * PER_LANE);
}
__device__ int first_of_lane() {
    const int lane = threadIdx.x % 32;
    return lane / LANES_PER_GROUP * PER_GROUP + lane % LANES_PER_GROUP * PER_LANE;
}

// Of each of the lane's experts a float. Not from the L1: another program of this launch may have written it.
__device__ void load_run(const float* from, float* to) {
    const float* p = from + first_of_lane();
    if (PER_LANE % 4 == 0 && PER_GROUP == PER_LANE * LANES_PER_GROUP) {
#pragma unroll
        for (int j = 0; j < PER_LANE; j += 4) {
            const uint4 four = __ldcg((const uint4*)(p + j));
            to[j] = __uint_as_float(four.x), to[j + 1] = __uint_as_float(four.y);
            to[j + 2] = __uint_as_float(four.z), to[j + 3] = __uint_as_float(four.w);
        }
    } else
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) to[j] = j < num_of_lane() ? __ldcg(p + j) : 0.f;
}

struct Choice {
    // Per slot: its expert (the shared ones are NUM_EXPERTS and up) and the tokens that take it, as bits; per slot and
    // token the weight, and which of the token's choices it is.
    int expert[MAX_SLOTS];
    unsigned tokens[MAX_SLOTS];
    float weight[MAX_SLOTS * ROWS];
    unsigned char place[MAX_SLOTS * ROWS];
    int num_slots;
    unsigned active[32];
    int before[32];
    int chosen[ROWS * NUM_CHOSEN];
    float chosen_weight[ROWS * NUM_CHOSEN];
};

// One token by one warp.
__device__ void choose_of_token(Choice& s, int t, const float* logits, const float* add) {
    const int lane = threadIdx.x % 32;
    float score[PER_LANE];
    unsigned key[PER_LANE];
    load_run(logits + (size_t)t * NUM_EXPERTS, score);
    float first = -3e38f, second = -3e38f;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        score[j] = sigmoid(score[j]);
        const float biased = score[j] + add[j];
        key[j] = 0;
        if (j >= num_of_lane()) continue;
        key[j] = key_of(biased);
        second = fmaxf(second, fminf(first, biased));
        first = fmaxf(first, biased);
    }
    if (NUM_GROUPS > 1) {
        // A group counts as its two largest; it stays if fewer than TOPK_GROUPS others are larger, or equal and lower.
        for (int o = 1; o < LANES_PER_GROUP; o <<= 1) {
            const float other_first = __shfl_xor_sync(FULL, first, o), other_second = __shfl_xor_sync(FULL, second, o);
            second = fmaxf(fminf(first, other_first), fmaxf(second, other_second));
            first = fmaxf(first, other_first);
        }
        const float mine = PER_GROUP > 1 ? first + second : first;
        const int group = lane / LANES_PER_GROUP;
        int rank = 0;
#pragma unroll
        for (int g = 0; g < NUM_GROUPS; ++g) {
            const float other = __shfl_sync(FULL, mine, g * LANES_PER_GROUP);
            rank += other > mine || (other == mine && g < group);
        }
        if (rank >= TOPK_GROUPS)
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) key[j] = 0;
    }
    unsigned taken = 0, best = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) best = max(best, key[j]);
    for (int a = 0; a < NUM_CHOSEN; ++a) {
        const unsigned highest = __reduce_max_sync(FULL, best);
        if (lane == __ffs(__ballot_sync(FULL, best == highest)) - 1) {
            unsigned equal = 0;
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) equal |= unsigned(key[j] == highest) << j;
            const int lowest = __ffs(equal) - 1;
            float chosen_score = 0.f;
            best = 0;
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) {
                if (j == lowest) key[j] = 0, chosen_score = score[j];
                best = max(best, key[j]);
            }
            taken |= 1u << lowest;
            s.chosen[t * NUM_CHOSEN + a] = first_of_lane() + lowest;
            s.chosen_weight[t * NUM_CHOSEN + a] = chosen_score;
        }
    }
    __syncwarp();
    const float mine = lane < NUM_CHOSEN ? s.chosen_weight[t * NUM_CHOSEN + lane] : 0.f;
    const float factor = ROUTED_SCALE / (sum_of_lanes(mine) + 1e-20f);
    if (lane < NUM_CHOSEN) s.chosen_weight[t * NUM_CHOSEN + lane] = mine * factor;
    if (taken) atomicOr(&s.active[lane], taken);
}

// The shared slots, and nothing else.
__device__ void begin_choice(Choice& s, int num_tokens) {
    for (int i = threadIdx.x; i < MAX_SLOTS; i += THREADS) {
        s.expert[i] = NUM_EXPERTS + i;
        s.tokens[i] = i < NUM_SHARED ? (1u << num_tokens) - 1u : 0u;
    }
    for (int i = threadIdx.x; i < NUM_SHARED * ROWS; i += THREADS) {
        s.weight[i] = 1.f;
        s.place[i] = i / ROWS;
    }
    if (threadIdx.x < 32) s.active[threadIdx.x] = 0;
}

// Behind `begin_choice` and a barrier.
__device__ void choose_experts(Choice& s, int num_tokens, const float* logits, const float* add) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int t = warp; t < num_tokens; t += WARPS) choose_of_token(s, t, logits, add);
    __syncthreads();
    if (warp == 0) {
        const int mine = __popc(s.active[lane]);
        int before = mine;
        for (int o = 1; o < 32; o <<= 1) {
            const int other = __shfl_up_sync(FULL, before, o);
            if (lane >= o) before += other;
        }
        s.before[lane] = NUM_SHARED + before - mine;
        if (lane == 31) s.num_slots = NUM_SHARED + before;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_tokens * NUM_CHOSEN; i += THREADS) {
        const int t = i / NUM_CHOSEN, expert = s.chosen[i], in_group = expert % PER_GROUP;
        const int owner = expert / PER_GROUP * LANES_PER_GROUP + in_group / PER_LANE;
        const int slot = s.before[owner] + __popc(s.active[owner] & ((1u << in_group % PER_LANE) - 1u));
        s.expert[slot] = expert;
        s.weight[slot * ROWS + t] = s.chosen_weight[i];
        s.place[slot * ROWS + t] = NUM_SHARED + i % NUM_CHOSEN;
        atomicOr(&s.tokens[slot], 1u << t);
    }
    __syncthreads();
}

__device__ uint4 scale_piece(const uint4& x, float scale, const uint4& of_norm) {
    const unsigned a[4] = {x.x, x.y, x.z, x.w}, b[4] = {of_norm.x, of_norm.y, of_norm.z, of_norm.w};
    unsigned y[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
        y[k] = to_bf16(low(a[k]) * scale * low(b[k])) | to_bf16(high(a[k]) * scale * high(b[k])) << 16;
    return make_uint4(y[0], y[1], y[2], y[3]);
}

// h (T, D_PIECES) = norm of x, a row per warp.
__device__ void normalise(const uint4* x, const uint4* weight, float eps, int t, uint4* h) {
    const int lane = threadIdx.x % 32;
    uint4 mine[D_LOADS];
    float even = 0.f, odd = 0.f;
#pragma unroll
    for (int j = 0; j < D_LOADS; ++j)
        mine[j] = lane + 32 * j < D_PIECES ? x[(size_t)t * D_PIECES + lane + 32 * j] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < D_LOADS; ++j) multiply(mine[j], mine[j], even, odd);
    const float scale = rsqrtf(sum_of_lanes(even + odd) / HIDDEN + eps);
#pragma unroll
    for (int j = 0; j < D_LOADS; ++j)
        if (lane + 32 * j < D_PIECES)
            h[t * D_PIECES + lane + 32 * j] = scale_piece(mine[j], scale, weight[lane + 32 * j]);
}

// The lane's piece of its warp's run j, and its part of a row in a tile of eight: lane l has row l / 4.
__device__ int piece_of_run(int j) { return 4 * (int(threadIdx.x) / 32 + WARPS * j) + int(threadIdx.x) % 4; }
__device__ void load_row(const uint4* row, bool is_row, uint4 (&w)[RUNS]) {
#pragma unroll
    for (int j = 0; j < RUNS; ++j) {
        w[j] = make_uint4(0, 0, 0, 0);
        if (is_row && piece_of_run(j) < D_PIECES) w[j] = load_weights(row + piece_of_run(j));
    }
}

// Of rows of D what the lane needs of them: rows l / 4 and l / 4 + 8 of lane l.
struct Tokens {
    uint4 low[RUNS], high[ROWS > 8 ? RUNS : 1];

    __device__ static void load(uint4& to, const uint4* x, int t, int T, int j) {
        to = make_uint4(0, 0, 0, 0);
        if (t < T && piece_of_run(j) < D_PIECES) to = x[t * D_PIECES + piece_of_run(j)];
    }
    __device__ void load(const uint4* x, int T) {
        const int t = threadIdx.x % 32 / 4;
#pragma unroll
        for (int j = 0; j < RUNS; ++j) {
            load(low[j], x, t, T, j);
            if (ROWS > 8) load(high[j], x, t + 8, T, j);
        }
    }
    __device__ static void weigh(uint4& x, const uint4& of_norm, float& square) {
        float even = 0.f, odd = 0.f;
        multiply(x, x, even, odd);
        square += even + odd;
        x = scale_piece(x, 1.f, of_norm);
    }
    // Times the norm's weight; squares (WARPS, T) are the warp's shares of what the norm divides by.
    __device__ void weigh_rows(int T, const uint4 (&of_norm)[RUNS], float* squares) {
        const int t = threadIdx.x % 32 / 4;
        float of_low = 0.f, of_high = 0.f;
#pragma unroll
        for (int j = 0; j < RUNS; ++j) weigh(low[j], of_norm[j], of_low);
        if (ROWS > 8)
#pragma unroll
            for (int j = 0; j < RUNS; ++j) weigh(high[j], of_norm[j], of_high);
        of_low = sum_of_lanes<4>(of_low), of_high = sum_of_lanes<4>(of_high);
        float* mine = squares + threadIdx.x / 32 * T + t;
        if (threadIdx.x % 4 == 0 && t < T) mine[0] = of_low;
        if (threadIdx.x % 4 == 0 && t + 8 < T) mine[8] = of_high;
    }
    // sums (WARPS, T, 8): the warp's share of a product with a tile's rows.
    __device__ void multiply_rows(const uint4 (&w)[RUNS], int T, float* sums) const {
        const int t = threadIdx.x % 32 / 4;
        float c[2][4] = {};
#pragma unroll
        for (int j = 0; j < RUNS; ++j) {
            const uint4 a = low[j], b = ROWS > 8 ? high[j] : make_uint4(0, 0, 0, 0);
            multiply_tile(c[0], a.x, b.x, a.y, b.y, w[j].x, w[j].y);
            multiply_tile(c[1], a.z, b.z, a.w, b.w, w[j].z, w[j].w);
        }
        float* mine = sums + (threadIdx.x / 32 * T + t) * 8 + threadIdx.x % 4 * 2;
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (t + k / 2 * 8 < T) mine[k / 2 * 64 + k % 2] = c[0][k] + c[1][k];
    }
};

// Of (WARPS, ...) the sum over the warps.
__device__ float sum_of_warps(const float* x, int distance) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += x[w * distance];
    return sum;
}

// Comparisons that a NaN passes through.
__device__ unsigned short swiglu(float g, float u, float bound) {
    float silu = g * sigmoid(g);
    silu = silu > bound ? bound : silu;
    const float clamped = u > bound ? bound : u < -bound ? -bound : u;
    return (unsigned short)to_bf16(silu * clamped);
}

// arrivals: 0 before and behind a launch; every program counts once for each barrier. Behind a barrier of the program.
__device__ void tell_all_programs(unsigned* arrivals) {
    if (threadIdx.x == 0) count_release(arrivals, NUM_BARRIERS * gridDim.x - 1);
}
template <bool IS_LAST> __device__ void wait_for_all_programs(const unsigned* arrivals) {
    // Nobody counts past a barrier that this program has not counted at.
    if (threadIdx.x == 0)
        while (IS_LAST ? load_acquire(arrivals) != 0 : load_acquire(arrivals) < gridDim.x) {}
    __syncthreads();
}

// act (T, CHOICES, WIDTH); out (T, HIDDEN) = residual + sum over slots of weight * W_down act, residual may be null.
// With a router logits are written, else read.
// Dynamic shared memory: h (T, HIDDEN), in its place then act, if that is to be copied; behind them every lane's sums.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts(const uint4* x, const uint4* norm_weight, float eps, int T, const uint4* router, float* logits,
        const float* bias, const int* width, const uint4* gate_up, const uint4* shared_gate_up, const uint4* down,
        const uint4* shared_down, float limit, float shared_limit, const unsigned short* residual, uint4* act,
        int copies_act, unsigned* arrivals, const unsigned short* next_weight, int distance, int num_bytes,
        unsigned short* out) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Neighbouring rows go to neighbouring multiprocessors: what takes long, the shared expert's, is spread.
    const int first = warp * gridDim.x + blockIdx.x, stride = gridDim.x * WARPS;
    __shared__ Choice s;
    DYNAMIC_SHARED(uint4, h);
    float* sums = (float*)(h + T * max(D_PIECES, copies_act ? CHOICES * F_PIECES : 0));
    float add[PER_LANE];
    // Row i of a tile of the router is an expert; of the shared experts' four gate rows and their up rows.
    const auto find_expert = [&](int tile, int i) { return (tile * 8 + i) * int(gridDim.x) + int(blockIdx.x); };
    const auto find_shared = [&](int tile, int i) { return (tile * 4 + i % 4) * int(gridDim.x) + int(blockIdx.x); };
    const auto shared_row = [&](int tile, int i) {
        return shared_gate_up + (size_t)(find_shared(tile, i) + i / 4 * NUM_SHARED * WIDTH) * D_PIECES;
    };
    const auto load_router = [&](int tile, uint4 (&w)[RUNS]) {
        const int expert = find_expert(tile, lane / 4);
        load_row(router + (size_t)expert * D_PIECES, expert < NUM_EXPERTS, w);
    };
    const auto load_shared = [&](int tile, uint4 (&w)[RUNS]) {
        load_row(shared_row(tile, lane / 4), find_shared(tile, lane / 4) < NUM_SHARED * WIDTH, w);
    };
    if (threadIdx.x == 0 && num_bytes) prefetch_run(next_weight + (size_t)distance * blockIdx.x, num_bytes);
    uint4 of_norm[RUNS], of_rows[RUNS];
    if (HAS_ROUTER) {
        load_row(norm_weight, true, of_norm);
        load_router(0, of_rows);
        // Two tiles of the shared expert, and a share of its down rows.
        if (warp == 1 && lane < 16 && find_shared(lane / 8, lane % 8) < NUM_SHARED * WIDTH)
            prefetch_run(shared_row(lane / 8, lane % 8), HIDDEN * 2);
        const int pieces = HIDDEN * NUM_SHARED * F_PIECES, share = (pieces / gridDim.x + 8) / 8 * 8;
        const int num_pieces = min(share, pieces - int(blockIdx.x) * share);
        if (threadIdx.x == 64 && num_pieces > 0)
            prefetch_run(shared_down + (size_t)blockIdx.x * share, num_pieces * 16);
    } else {
        load_run(bias, add);
        if (warp == 0)
            for (int i = lane; i < HIDDEN / 64; i += 32) prefetch((const char*)norm_weight + i * 128);
        if (first < NUM_SHARED * WIDTH)
            for (int i = lane; i < HIDDEN / 64; i += 32) {
                const char* p = (const char*)(shared_gate_up + (size_t)first * D_PIECES) + i * 128;
                prefetch(p);
                prefetch(p + (size_t)NUM_SHARED * WIDTH * HIDDEN * 2);
            }
    }
    wait_for_producers();
    let_consumers_start();
    const int num_tokens = width ? min(T, *width) : T;
    if (HAS_ROUTER) {
        __shared__ float scale[ROWS];
        float* squares = sums + WARPS * T * 8;
        Tokens y;
        y.load(x, T);
        y.weigh_rows(T, of_norm, squares);
#pragma unroll 1
        for (int tile = 0; find_expert(tile, 0) - int(blockIdx.x) < NUM_EXPERTS; ++tile) {
            if (tile) load_router(tile, of_rows);
            y.multiply_rows(of_rows, T, sums);
            __syncthreads();
            const int t = threadIdx.x / 8, i = threadIdx.x % 8, expert = find_expert(tile, i);
            if (t < T && (i == 0 || expert < NUM_EXPERTS)) {
                const float of_token = rsqrtf(sum_of_warps(squares + t, T) / HIDDEN + eps);
                if (i == 0) scale[t] = of_token;
                if (expert < NUM_EXPERTS)
                    logits[(size_t)t * NUM_EXPERTS + expert] = sum_of_warps(sums + t * 8 + i, T * 8) * of_token;
            }
            __syncthreads();
        }
        tell_all_programs(arrivals);
        load_shared(0, of_rows);
        // Until the others have come: the rows' norm, and the shared expert.
        for (int i = threadIdx.x; i < T * D_PIECES; i += THREADS)
            h[i] = scale_piece(x[i], scale[i / D_PIECES], norm_weight[i % D_PIECES]);
        if (NUM_SHARED) {
            __syncthreads();
            y.load(h, T);
        }
#pragma unroll 1
        for (int tile = 0; find_shared(tile, 0) - int(blockIdx.x) < NUM_SHARED * WIDTH; ++tile) {
            if (tile) load_shared(tile, of_rows);
            y.multiply_rows(of_rows, T, sums);
            __syncthreads();
            const int t = threadIdx.x / 4, i = threadIdx.x % 4, f = find_shared(tile, i);
            if (t < T && f < NUM_SHARED * WIDTH) {
                const float g = sum_of_warps(sums + t * 8 + i, T * 8), u = sum_of_warps(sums + t * 8 + i + 4, T * 8);
                ((unsigned short*)act)[(size_t)t * CHOICES * WIDTH + f] = swiglu(g, u, shared_limit);
            }
            __syncthreads();
        }
        load_run(bias, add);
        begin_choice(s, num_tokens);
        wait_for_all_programs<false>(arrivals);
    } else {
        // With few tokens the warps that normalise are not those that choose.
        for (int t = WARPS - 1 - warp; t < T; t += WARPS) normalise(x, norm_weight, eps, t, h);
        begin_choice(s, num_tokens);
        __syncthreads();
    }
    choose_experts(s, num_tokens, logits, add);

    const int num_slots = num_tokens ? s.num_slots : 0;
    for (int item = first + HAS_ROUTER * NUM_SHARED * WIDTH; item < num_slots * WIDTH; item += stride) {
        const int slot = item / WIDTH, f = item % WIDTH, expert = s.expert[slot];
        const bool is_shared = !HAS_ROUTER && expert >= NUM_EXPERTS;
        const uint4* p = is_shared ? shared_gate_up + (size_t)((expert - NUM_EXPERTS) * WIDTH + f) * D_PIECES
                                   : gate_up + ((size_t)expert * 2 * WIDTH + f) * D_PIECES;
        const uint4* p_up = p + (size_t)(is_shared ? NUM_SHARED * WIDTH : WIDTH) * D_PIECES;
        uint4 gate[D_LOADS], up[D_LOADS];
#pragma unroll
        for (int j = 0; j < D_LOADS; ++j)
            if (lane + 32 * j < D_PIECES) {
                gate[j] = load_weights(p + lane + 32 * j);
                up[j] = load_weights(p_up + lane + 32 * j);
            }
        for (unsigned tokens = s.tokens[slot]; tokens; tokens &= tokens - 1) {
            const int t = __ffs(tokens) - 1;
            float g_even = 0.f, g_odd = 0.f, u_even = 0.f, u_odd = 0.f;
#pragma unroll
            for (int j = 0; j < D_LOADS; ++j)
                if (lane + 32 * j < D_PIECES) {
                    const uint4 y = h[t * D_PIECES + lane + 32 * j];
                    keep_packed(gate[j]), keep_packed(up[j]);
                    multiply(gate[j], y, g_even, g_odd);
                    multiply(up[j], y, u_even, u_odd);
                }
            const float g = sum_of_lanes(g_even + g_odd), u = sum_of_lanes(u_even + u_odd);
            const size_t choice = t * CHOICES + s.place[slot * ROWS + t];
            if (lane == 0) ((unsigned short*)act)[choice * WIDTH + f] = swiglu(g, u, is_shared ? shared_limit : limit);
        }
    }

    const int l = lane % LANES_PER_OUTPUT;
    float* sum = sums + warp * T * 32 + lane;
    bool is_first = true;
    for (int unit = first; is_first || unit * OUTPUTS_PER_WARP < HIDDEN; unit += stride) {
        const int d = unit * OUTPUTS_PER_WARP + lane / LANES_PER_OUTPUT;
        const bool is_output = d < HIDDEN;
        uint4 w[SLOTS_AT_ONCE][F_LOADS];
        const auto load = [&](int i, int slot) {
            if (slot >= num_slots || !is_output) return;
            const int expert = s.expert[slot];
            const uint4* p = expert < NUM_EXPERTS
                ? down + ((size_t)expert * HIDDEN + d) * F_PIECES
                : shared_down + ((size_t)d * NUM_SHARED + (expert - NUM_EXPERTS)) * F_PIECES;
#pragma unroll
            for (int j = 0; j < F_LOADS; ++j)
                if (l + LANES_PER_OUTPUT * j < F_PIECES) w[i][j] = load_weights(p + l + LANES_PER_OUTPUT * j);
        };
#pragma unroll
        for (int i = 0; i < SLOTS_AT_ONCE; ++i) load(i, i);
        for (int t = 0; t < T; ++t)
            sum[t * 32] = l == 0 && is_output && residual ? low(residual[(size_t)t * HIDDEN + d]) : 0.f;
        if (is_first) {
            is_first = false;
            __syncthreads();
            tell_all_programs(arrivals);
            wait_for_all_programs<true>(arrivals);
            if (copies_act) {
                for (int i = threadIdx.x; i < num_tokens * CHOICES * F_PIECES; i += THREADS) h[i] = __ldcg(act + i);
                __syncthreads();
            }
        }
        const uint4* a = copies_act ? h : act;
        for (int slots = 0; slots < num_slots; slots += SLOTS_AT_ONCE) {
#pragma unroll
            for (int i = 0; i < SLOTS_AT_ONCE; ++i) {
                unsigned tokens = is_output && slots + i < num_slots ? s.tokens[slots + i] : 0;
                for (; tokens; tokens &= tokens - 1) {
                    const int t = __ffs(tokens) - 1, mine = (slots + i) * ROWS + t;
                    const uint4* p = a + (size_t)(t * CHOICES + s.place[mine]) * F_PIECES + l;
                    float even = 0.f, odd = 0.f;
#pragma unroll
                    for (int j = 0; j < F_LOADS; ++j)
                        if (l + LANES_PER_OUTPUT * j < F_PIECES) multiply(w[i][j], p[LANES_PER_OUTPUT * j], even, odd);
                    sum[t * 32] += s.weight[mine] * (even + odd);
                }
                if (HAS_ROUTER) load(i, slots + SLOTS_AT_ONCE + i);
            }
            if (!HAS_ROUTER)
#pragma unroll
                for (int i = 0; i < SLOTS_AT_ONCE; ++i) load(i, slots + SLOTS_AT_ONCE + i);
        }
        for (int t = 0; t < T; ++t) {
            const float y = sum_of_lanes<LANES_PER_OUTPUT>(sum[t * 32]);
            if (l == 0 && is_output) out[(size_t)t * HIDDEN + d] = (unsigned short)to_bf16(y);
        }
    }
}
"""
)


class RouterShape(Protocol):
    """What a launch needs of `moe.RouterSettings`."""

    @property
    def num_experts_per_tok(self) -> int: ...
    @property
    def n_group(self) -> int: ...
    @property
    def topk_group(self) -> int: ...
    @property
    def routed_scaling_factor(self) -> float: ...


@cache
def _num_programs(device: torch.device) -> int:
    """One program per multiprocessor; a CPU runs programs one after the other, so there is one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _lanes_per_output(F: int) -> int:
    """Lanes that share a row of F, so that none of them idles where that can be."""
    pieces = F // 8
    return max((8, 16, 32), key=lambda lanes: (pieces / (-(-pieces // lanes) * lanes), lanes))


def run_experts(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router_weight: torch.Tensor | None,
    logits: torch.Tensor | None,
    expert_bias: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate_up: torch.Tensor | None,
    shared_down: torch.Tensor | None,
    router: RouterShape,
    *,
    limit: float | None,
    shared_limit: float | None,
    width: torch.Tensor | None,
    adds_residual: bool,
    next_weight: object = None,
) -> torch.Tensor:
    """Route, choose and run the experts of a step; weights, limits and width as `moe` in `kernels/moe.py` takes them.

    Args:
        x: (T, D) bf16 residual stream, T <= 16.
        norm_weight: (D) bf16.
        eps: of the norm.
        router_weight: (E, D) bf16, E up to 1024. None: its product is there already.
        logits: (T, E) fp32, that product; else None.
        expert_bias: (E) fp32.
        gate_up: see `moe`, as the weights that follow.
        down: as there.
        shared_gate_up: as there.
        shared_down: as there; Fs is a multiple of F.
        router: the choice; n_group divides 32.
        limit: as there.
        shared_limit: as there.
        width: as there.
        adds_residual: as there.
        next_weight: as there.

    Returns:
        (T, D): x, if it is added, and all experts.
    """
    T, D = x.shape
    E, _, F = down.shape
    num_shared, rest = divmod(0 if shared_down is None else shared_down.shape[1], F)
    assert x.dtype == norm_weight.dtype == gate_up.dtype == torch.bfloat16 and x.is_contiguous() and T <= MAX_ROWS
    if rest or D % 8 or F % 8 or E > 1024 or 32 % router.n_group or router.num_experts_per_tok > 32:
        raise UnsupportedError(
            f"experts of size {F} ({E} of them in {router.n_group} groups, {router.num_experts_per_tok} a token, "
            f"{num_shared * F + rest} shared) on a hidden size of {D} have no GPU kernel; it takes hidden and expert "
            "sizes that are multiples of 8, up to 1024 experts, groups whose number divides 32, up to 32 experts a "
            "token, and shared experts of a multiple of the experts' size"
        )
    # A step of one token, and every other.
    rows = 1 if T == 1 else MAX_ROWS
    # Two rows of D, 16 bytes a lane and piece, fit the registers of this many warps; of one token's rows they make the
    # fewest rounds.
    warps = 18 if D <= 2048 and router_weight is None else 16
    lanes = _lanes_per_output(F)
    definitions = {
        "HIDDEN": D,
        "WIDTH": F,
        "NUM_EXPERTS": E,
        "NUM_GROUPS": router.n_group,
        "TOPK_GROUPS": router.topk_group,
        "NUM_CHOSEN": router.num_experts_per_tok,
        "NUM_SHARED": num_shared,
        "ROWS": rows,
        "WARPS": warps,
        "ROUTED_SCALE": f"{float(router.routed_scaling_factor)!r}f",
        "LANES_PER_OUTPUT": lanes,
        "SLOTS_AT_ONCE": max(1, DOWN_PIECES // -(-F // (8 * lanes))),
        "HAS_ROUTER": int(router_weight is not None),
    } | ({"HAS_PDL": 1} if pdl_options()["PDL"] else {})
    device = x.device
    act = torch.empty((T, num_shared + router.num_experts_per_tok, F), dtype=x.dtype, device=device)
    out = torch.empty_like(x)
    if logits is None:
        assert router_weight is not None and router_weight.dtype == x.dtype, "the router is bf16"
        logits = torch.empty((T, E), dtype=torch.float32, device=device)
    act_bytes = act.numel() * act.element_size()
    copies_act = act_bytes <= _SHARED_BYTES
    num_programs = _num_programs(device)
    ahead = next(iter(shares([next_weight], READ_AHEAD_BYTES, num_programs)), None)
    kernel = load_kernel(_SOURCE, "experts", tuple((key, str(value)) for key, value in definitions.items()), device)
    launch(
        kernel, (num_programs, 1, 1), 32 * warps,
        x, norm_weight, eps, T, router_weight, logits, expert_bias, width, gate_up, shared_gate_up, down, shared_down,
        inf if limit is None else limit, inf if shared_limit is None else shared_limit,
        x if adds_residual else None, act, int(copies_act), arrival_counters(device),
        *((None, 0, 0) if ahead is None else ahead), out,
        shared_bytes=max(T * D * 2, act_bytes if copies_act else 0) + warps * T * 32 * 4,
    )  # fmt: skip
    return out
