"""The experts of a step in CUDA C++: one launch behind the router's product; the equations are in `kernels/moe.py`.

One program per multiprocessor, all there at once:

1. Each chooses the experts from the router's logits by itself and normalises the rows: that costs less than waiting for
   another launch. What was chosen becomes a list of slots: the shared expert's, then each distinct expert once, in
   ascending order, with the tokens that take it.
2. A warp takes the gate and up rows of four f of a slot at a time, as the 8 columns of a tensor-core product whose 16
   rows are the tokens. Weights go from memory to the registers they are multiplied from, always some on their way.
3. A program that has no more of these asks for the weights of its outputs of D, waits until all programs have come as
   far, and sums over the slots, its warps sharing F.

A row's sums run over its own slots in ascending order, and a product's rows do not touch: a row has the same bits in
any company and at any width.
"""

from functools import cache
from math import inf
from typing import Protocol

import torch

from soloist.errors import UnsupportedError
from soloist.kernels.launch import pdl_options
from soloist.kernels.nvrtc import launch, load_kernel

# Most tokens of a step.
MAX_ROWS = 16
# Shared memory that activations may take.
_SHARED_BYTES = 160 * 1024

_SOURCE = r"""
constexpr unsigned FULL = 0xffffffffu;
constexpr int THREADS = WARPS * 32;
constexpr int PER_LANE = NUM_EXPERTS / 32;
constexpr int LANES_PER_GROUP = 32 / NUM_GROUPS;
constexpr int MAX_SLOTS = NUM_SHARED + (ROWS * NUM_CHOSEN < NUM_EXPERTS ? ROWS * NUM_CHOSEN : NUM_EXPERTS);
// A token's choices: the shared slots, then its experts.
constexpr int CHOICES = NUM_SHARED + NUM_CHOSEN;
// 16-byte pieces of a row of D and of F, and runs of four of them: what a warp reads of 8 rows at once.
constexpr int D_PIECES = HIDDEN / 8, F_PIECES = WIDTH / 8, D_RUNS = HIDDEN / 32, F_RUNS = WIDTH / 32;
constexpr int D_LOADS = (D_PIECES + 31) / 32;
// Neighbouring tokens' rows of h lie in other banks.
constexpr int H_STRIDE = D_PIECES + 4;
// Warps that share the F of 8 outputs, the runs each takes of it, and how many such groups of warps there are.
constexpr int RUNS_PER_WARP = F_RUNS / SHARERS, GROUPS = WARPS / SHARERS;
// Slots of outputs that are on their way.
constexpr int SLOTS_AHEAD = RUNS_PER_WARP < RUNS_AHEAD ? RUNS_AHEAD / RUNS_PER_WARP : 1;

#ifdef __CUDACC__
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
__device__ uint4 load_weights(const uint4* p) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}
__device__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
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
__device__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
// c (16, 8) += a (16, 16) b (16, 8): rows g and g + 8 of a, column g of b, where g = lane / 4.
__device__ void multiply_tile(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#else
__device__ uint4 load_weights(const uint4* p) { return *p; }
__device__ void prefetch(const void*) {}
__device__ unsigned long long load_acquire(const unsigned long long* p) { return *p; }
__device__ unsigned long long add_release(unsigned long long* p) { return (*p)++; }
__device__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
#endif

__device__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ unsigned to_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

__device__ float sum_of_warp(float x) {
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(FULL, x, o);
    return x;
}

// Larger floats have larger keys; 0 is below all of them.
__device__ unsigned key_of(float x) {
    unsigned bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Lane l's run of PER_LANE floats.
__device__ void load_run(const float* from, float* to) {
    const float* p = from + threadIdx.x % 32 * PER_LANE;
    if (PER_LANE % 4 == 0) {
#pragma unroll
        for (int j = 0; j < PER_LANE; j += 4) {
            const uint4 four = *(const uint4*)(p + j);
            to[j] = __uint_as_float(four.x), to[j + 1] = __uint_as_float(four.y);
            to[j + 2] = __uint_as_float(four.z), to[j + 3] = __uint_as_float(four.w);
        }
    } else
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) to[j] = p[j];
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

// One token by one warp: lane l holds the experts l * PER_LANE and up, so a group of experts is a run of lanes.
__device__ void choose_of_token(Choice& s, int t, const float* logits, const float* add) {
    const int lane = threadIdx.x % 32;
    const float* row = logits + (size_t)t * NUM_EXPERTS;
    float score[PER_LANE];
    unsigned key[PER_LANE];
    load_run(row, score);
    float first = -3e38f, second = -3e38f;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const float biased = sigmoid(score[j]) + add[j];
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
        const float mine = first + second;
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
    unsigned taken = 0;
    for (int a = 0; a < NUM_CHOSEN; ++a) {
        unsigned best = 0, equal = 0;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) best = max(best, key[j]);
        const unsigned highest = __reduce_max_sync(FULL, best);
        if (lane == __ffs(__ballot_sync(FULL, best == highest)) - 1) {
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) equal |= unsigned(key[j] == highest) << j;
            const int lowest = __ffs(equal) - 1;
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) key[j] = j == lowest ? 0 : key[j];
            taken |= 1u << lowest;
            s.chosen[t * NUM_CHOSEN + a] = lane * PER_LANE + lowest;
        }
    }
    __syncwarp();
    const float mine = lane < NUM_CHOSEN ? sigmoid(row[s.chosen[t * NUM_CHOSEN + lane]]) : 0.f;
    const float factor = ROUTED_SCALE / (sum_of_warp(mine) + 1e-20f);
    if (lane < NUM_CHOSEN) s.chosen_weight[t * NUM_CHOSEN + lane] = mine * factor;
    if (taken) atomicOr(&s.active[lane], taken);
}

__device__ void choose_experts(Choice& s, int num_tokens, const float* logits, const float* add) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < MAX_SLOTS; i += THREADS) {
        s.expert[i] = NUM_EXPERTS + i;
        s.tokens[i] = i < NUM_SHARED ? (1u << num_tokens) - 1u : 0u;
    }
    for (int i = threadIdx.x; i < NUM_SHARED * ROWS; i += THREADS) {
        s.weight[i] = 1.f;
        s.place[i] = i / ROWS;
    }
    if (threadIdx.x < 32) s.active[lane] = 0;
    __syncthreads();
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
        const int t = i / NUM_CHOSEN, expert = s.chosen[i], owner = expert / PER_LANE;
        const int slot = s.before[owner] + __popc(s.active[owner] & ((1u << expert % PER_LANE) - 1u));
        s.expert[slot] = expert;
        s.weight[slot * ROWS + t] = s.chosen_weight[i];
        s.place[slot * ROWS + t] = NUM_SHARED + i % NUM_CHOSEN;
        atomicOr(&s.tokens[slot], 1u << t);
    }
    __syncthreads();
}

// h (T, H_STRIDE) = norm of x, a row per warp.
__device__ void normalise(const uint4* x, const uint4* weight, float eps, int t, uint4* h) {
    const int lane = threadIdx.x % 32;
    uint4 mine[D_LOADS];
    float even = 0.f, odd = 0.f;
#pragma unroll
    for (int j = 0; j < D_LOADS; ++j)
        mine[j] = lane + 32 * j < D_PIECES ? x[(size_t)t * D_PIECES + lane + 32 * j] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < D_LOADS; ++j) {
        const unsigned a[4] = {mine[j].x, mine[j].y, mine[j].z, mine[j].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            even += low(a[k]) * low(a[k]);
            odd += high(a[k]) * high(a[k]);
        }
    }
    const float scale = rsqrtf(sum_of_warp(even + odd) / HIDDEN + eps);
#pragma unroll
    for (int j = 0; j < D_LOADS; ++j)
        if (lane + 32 * j < D_PIECES) {
            const uint4 of_norm = weight[lane + 32 * j];
            const unsigned a[4] = {mine[j].x, mine[j].y, mine[j].z, mine[j].w};
            const unsigned b[4] = {of_norm.x, of_norm.y, of_norm.z, of_norm.w};
            unsigned y[4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                y[k] = to_bf16(low(a[k]) * scale * low(b[k])) | to_bf16(high(a[k]) * scale * high(b[k])) << 16;
            h[t * H_STRIDE + lane + 32 * j] = make_uint4(y[0], y[1], y[2], y[3]);
        }
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

// Both products of a run: 16 tokens, of which a lane holds rows g and g + 8, by 8 rows of weights.
__device__ void multiply_run(float (*c)[4], const uint4& w, const uint4* rows, int high_row, bool has_low,
                             bool has_high) {
    uint4 a = make_uint4(0, 0, 0, 0), b = a;
    if (has_low) a = rows[0];
    if (ROWS > 8 && has_high) b = rows[high_row];
    multiply_tile(c[0], a.x, b.x, a.y, b.y, w.x, w.y);
    multiply_tile(c[1], a.z, b.z, a.w, b.w, w.z, w.w);
}

// act (T, CHOICES, WIDTH); out (T, HIDDEN) = residual + sum over slots of weight * W_down act, residual may be null.
// Dynamic shared memory: h (T, H_STRIDE), then act, if it is to be copied there.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts(const uint4* x, const uint4* norm_weight, float eps, int T, const float* logits, const float* bias,
        const int* width, const uint4* gate_up, const uint4* shared_gate_up, const uint4* down,
        const uint4* shared_down, float limit, float shared_limit, const unsigned short* residual, uint4* act,
        int copies_act, unsigned long long* arrivals, unsigned short* out) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, piece = lane % 4;
    __shared__ Choice s;
    __shared__ float sums[2][WARPS][ROWS][8];
    DYNAMIC_SHARED(uint4, h);
    float add[PER_LANE];
    load_run(bias, add);
    if (warp == 0)
        for (int i = lane; i < HIDDEN / 64; i += 32) prefetch((const char*)norm_weight + i * 128);
#ifdef HAS_PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    const int num_tokens = width ? min(T, *width) : T;
    // With few tokens the warps that normalise are not those that choose.
    for (int t = WARPS - 1 - warp; t < T; t += WARPS) normalise(x, norm_weight, eps, t, h);
    choose_experts(s, num_tokens, logits, add);
    const int num_slots = num_tokens ? s.num_slots : 0;

    // Neighbouring items go to neighbouring multiprocessors. A lane reads row g: gate rows, then up rows.
    const int last = num_slots * (WIDTH / 4);
    const auto find_rows = [&](int item) {
        const int expert = s.expert[item / (WIDTH / 4)], f = item % (WIDTH / 4) * 4 + g % 4;
        const bool is_shared = expert >= NUM_EXPERTS;
        const int row = is_shared ? (expert - NUM_EXPERTS) * WIDTH + (g < 4 ? 0 : NUM_SHARED * WIDTH) + f
                                  : (g < 4 ? 0 : WIDTH) + f;
        const uint4* from = is_shared ? shared_gate_up : gate_up + (size_t)expert * 2 * WIDTH * D_PIECES;
        return from + (size_t)row * D_PIECES + piece;
    };
    uint4 w[RUNS_AHEAD];
    int item = warp * gridDim.x + blockIdx.x;
    const uint4* rows = nullptr;
    if (item < last) {
        rows = find_rows(item);
#pragma unroll
        for (int j = 0; j < RUNS_AHEAD; ++j) w[j] = load_weights(rows + 4 * j);
    }
    while (item < last) {
        const int next = item + gridDim.x * WARPS;
        const uint4* next_rows = next < last ? find_rows(next) : nullptr;
        const int slot = item / (WIDTH / 4), f = item % (WIDTH / 4) * 4;
        const unsigned tokens = s.tokens[slot];
        const bool has_low = tokens >> g & 1u, has_high = tokens >> (g + 8) & 1u;
        float c[2][4] = {};
        for (int run = 0; run < D_RUNS; run += RUNS_AHEAD)
#pragma unroll
            for (int j = 0; j < RUNS_AHEAD; ++j) {
                multiply_run(c, w[j], h + g * H_STRIDE + 4 * (run + j) + piece, 8 * H_STRIDE, has_low, has_high);
                if (run + RUNS_AHEAD < D_RUNS) w[j] = load_weights(rows + 4 * (run + RUNS_AHEAD + j));
                else if (next_rows) w[j] = load_weights(next_rows + 4 * j);
            }
        const float bound = s.expert[slot] >= NUM_EXPERTS ? shared_limit : limit;
        // The first two lanes of four hold the gates of two f each, the others the same f's ups.
#pragma unroll
        for (int half = 0; half < (ROWS > 8 ? 2 : 1); ++half) {
            unsigned both = 0;
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float gate = c[0][2 * half + k] + c[1][2 * half + k], up = __shfl_xor_sync(FULL, gate, 2);
                // Comparisons that a NaN passes through.
                float silu = gate * sigmoid(gate);
                silu = silu > bound ? bound : silu;
                const float clamped = up > bound ? bound : up < -bound ? -bound : up;
                both |= to_bf16(silu * clamped) << (16 * k);
            }
            const int t = g + 8 * half;
            if (piece < 2 && (half ? has_high : has_low)) {
                const size_t choice = t * CHOICES + s.place[slot * ROWS + t];
                ((unsigned*)act)[(choice * WIDTH + f) / 2 + piece] = both;
            }
        }
        item = next;
        rows = next_rows;
    }

    // 8 outputs by a group of warps at a time, each warp with its runs of every slot's F.
    const int group = warp / SHARERS, sharer = warp % SHARERS;
    const int rounds = (HIDDEN / 8 + gridDim.x * GROUPS - 1) / (gridDim.x * GROUPS);
    const auto find_first = [&](int round) { return 8 * int((round * GROUPS + group) * gridDim.x + blockIdx.x); };
    uint4 v[SLOTS_AHEAD][RUNS_PER_WARP];
    int load_round = 0, load_slot = 0;
    const auto load_next = [&](uint4* to) {
        if (load_round == rounds || num_slots == 0) return;
        const int expert = s.expert[load_slot], d = find_first(load_round) + g;
        if (d < HIDDEN) {
            const uint4* p = expert < NUM_EXPERTS
                ? down + ((size_t)expert * HIDDEN + d) * F_PIECES
                : shared_down + ((size_t)d * NUM_SHARED + (expert - NUM_EXPERTS)) * F_PIECES;
#pragma unroll
            for (int k = 0; k < RUNS_PER_WARP; ++k) to[k] = load_weights(p + 4 * (sharer + SHARERS * k) + piece);
        }
        if (++load_slot == num_slots) { load_slot = 0; ++load_round; }
    };
#pragma unroll
    for (int j = 0; j < SLOTS_AHEAD; ++j) load_next(v[j]);
    wait_for_all_programs(arrivals);
    if (copies_act) {
        for (int i = threadIdx.x; i < num_tokens * CHOICES * F_PIECES; i += THREADS) h[i] = __ldcg(act + i);
        __syncthreads();
    }
    const uint4* a = copies_act ? h : act;
    int round = 0, slot = 0;
    float total[4] = {};
    const auto end_round = [&] {
        float* mine = &sums[round % 2][warp][0][0];
        const int d = find_first(round);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int t = g + 8 * (k / 2);
            if (t < T && t < ROWS) mine[t * 8 + 2 * piece + k % 2] = total[k];
            total[k] = 0.f;
        }
        // Output i of this group: token i / 8, row i % 8.
        const int in_group = threadIdx.x - group * SHARERS * 32;
        float before[ROWS * 8 > SHARERS * 32 ? (ROWS * 8 + SHARERS * 32 - 1) / (SHARERS * 32) : 1];
        const int steps = sizeof before / sizeof *before;
#pragma unroll
        for (int k = 0; k < steps; ++k) {
            const int i = in_group + k * SHARERS * 32;
            const bool is_mine = i < T * 8 && d < HIDDEN && residual;
            before[k] = is_mine ? low(residual[(size_t)(i / 8) * HIDDEN + d + i % 8]) : 0.f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < steps; ++k) {
            const int i = in_group + k * SHARERS * 32;
            if (i >= T * 8 || d >= HIDDEN) continue;
            float y = 0.f;
            for (int other = 0; other < SHARERS; ++other) y += sums[round % 2][group * SHARERS + other][i / 8][i % 8];
            out[(size_t)(i / 8) * HIDDEN + d + i % 8] = (unsigned short)to_bf16(before[k] + y);
        }
        ++round;
    };
    if (num_slots == 0)
        while (round < rounds) end_round();
    while (round < rounds)
#pragma unroll
        for (int j = 0; j < SLOTS_AHEAD; ++j) {
            if (round == rounds) break;
            const unsigned tokens = s.tokens[slot];
            const bool has_low = tokens >> g & 1u, has_high = ROWS > 8 && tokens >> (g + 8) & 1u;
            const int low_place = has_low ? slot * ROWS + g : 0, high_place = has_high ? slot * ROWS + g + 8 : 0;
            const int low_row = (g * CHOICES + s.place[low_place]) * F_PIECES;
            const int high_row = ((g + 8) * CHOICES + s.place[high_place]) * F_PIECES;
            float c[2][4] = {};
#pragma unroll
            for (int k = 0; k < RUNS_PER_WARP; ++k) {
                const uint4* from = a + low_row + 4 * (sharer + SHARERS * k) + piece;
                multiply_run(c, v[j][k], from, high_row - low_row, has_low, has_high);
            }
            const float low_weight = has_low ? s.weight[low_place] : 0.f;
            const float high_weight = has_high ? s.weight[high_place] : 0.f;
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if (k < 2 ? has_low : has_high) total[k] += (k < 2 ? low_weight : high_weight) * (c[0][k] + c[1][k]);
            load_next(v[j]);
            if (++slot == num_slots) { slot = 0; end_round(); }
        }
}
"""


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


@cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """() int64: what the programs of one launch wait by. Launches of one device follow each other."""
    return torch.zeros((), dtype=torch.int64, device=device)


def _largest_divisor(size: int, *, limit: int) -> int:
    return next(divisor for divisor in range(min(size, limit), 0, -1) if size % divisor == 0)


def run_experts(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    logits: torch.Tensor,
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
) -> torch.Tensor:
    """Choose and run the experts of a step; weights, limits and width as `moe` in `kernels/moe.py` takes them.

    Args:
        x: (T, D) bf16 residual stream, T <= 16.
        norm_weight: (D) bf16.
        eps: of the norm.
        logits: (T, E) fp32, E a multiple of 32 up to 1024.
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

    Returns:
        (T, D): x, if it is added, and all experts.
    """
    T, D = x.shape
    E, _, F = down.shape
    num_shared, rest = divmod(0 if shared_down is None else shared_down.shape[1], F)
    assert x.dtype == norm_weight.dtype == gate_up.dtype == torch.bfloat16 and x.is_contiguous() and T <= MAX_ROWS
    if rest or D % 32 or F % 32 or E % 32 or E > 1024 or 32 % router.n_group or router.num_experts_per_tok > 32:
        raise UnsupportedError(
            f"experts of size {F} ({E} of them in {router.n_group} groups, {router.num_experts_per_tok} a token, "
            f"{num_shared * F + rest} shared) on a hidden size of {D} have no GPU kernel; it takes hidden and expert "
            "sizes that are multiples of 32, up to 1024 experts in multiples of 32, groups that divide 32, up to 32 "
            "experts a token, and shared experts of a multiple of the experts' size"
        )
    # A step of one token, and every other.
    rows = 1 if T == 1 else MAX_ROWS
    # Warps that share F in equal parts; as many groups of them as 16 warps at most make.
    sharers = _largest_divisor(F // 32, limit=8)
    warps = sharers * (16 // sharers)
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
        "SHARERS": sharers,
        "RUNS_AHEAD": _largest_divisor(D // 32, limit=16),
    } | ({"HAS_PDL": 1} if pdl_options()["PDL"] else {})
    device = x.device
    act = torch.empty((T, num_shared + router.num_experts_per_tok, F), dtype=x.dtype, device=device)
    out = torch.empty_like(x)
    act_bytes = act.numel() * act.element_size()
    copies_act = act_bytes <= _SHARED_BYTES
    kernel = load_kernel(_SOURCE, "experts", tuple((key, str(value)) for key, value in definitions.items()), device)
    launch(
        kernel, (_num_programs(device), 1, 1), 32 * warps,
        x, norm_weight, eps, T, logits, expert_bias, width, gate_up, shared_gate_up, down, shared_down,
        inf if limit is None else limit, inf if shared_limit is None else shared_limit,
        x if adds_residual else None, act, int(copies_act), _arrivals(device), out,
        shared_bytes=max(T * (D * 2 + 64), act_bytes if copies_act else 0),
    )  # fmt: skip
    return out
