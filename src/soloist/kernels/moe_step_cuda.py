"""The experts of a step in CUDA C++: one launch behind the router's product; the equations are in `kernels/moe.py`.

One program per multiprocessor, all there at once:

1. Each chooses the experts from the router's logits by itself and normalises the rows: that costs less than waiting for
   another launch. What was chosen becomes a list of slots: the shared expert's, then each distinct expert once, in
   ascending order, with the tokens that take it.
2. An expert's width f has one row of D in each of its three maps: gate, up, and W_down transposed. All such rows of all
   slots are one list, of which each program has an equal share. It takes eight f at a time: gate and up of all tokens,
   then, weighted, their part of all D outputs, so that no program waits for another between the maps. Rows come through
   a ring in shared memory, copied whole and ahead of their use, and meet the tokens on tensor cores.
3. A program leaves its sums of the tokens that it had a part of, waits until all have, and adds up a few columns.

Weights are read once, in one stream from the choice to the end. Sums are fp32 in an order that is fixed for a step;
where shares end depends on all its tokens, so a row may round otherwise in other company.
"""

from functools import cache
from math import inf
from typing import Protocol

import torch

from soloist.errors import UnsupportedError
from soloist.kernels.launch import pdl_options
from soloist.kernels.nvrtc import PRELUDE, launch, load_kernel
from soloist.kernels.read_ahead import shares

# Most tokens of a step.
MAX_ROWS = 16
# Bytes of the next launch's weights that the experts ask for, measured on one H200, `docs/log.md`.
READ_AHEAD_BYTES = 6 << 20
# Shared memory of a program, and of that what has its size at compile time.
_MAX_SHARED_BYTES = 227 * 1024
_MAX_STATIC_BYTES = 48 * 1024
# Rows of a map that are copied at a time, a stage of the ring, and how many stages there are: the least that keeps
# copies on their way, and the most that gains something while there is room for the launches before and behind.
_UNIT = 8
_MIN_STAGES, _MAX_STAGES = 3, 4
_ROOM_BYTES = 19 * 1024

_SOURCE = (
    PRELUDE
    + r"""
constexpr int THREADS = WARPS * 32;
constexpr int PER_LANE = NUM_EXPERTS / 32;
constexpr int LANES_PER_GROUP = 32 / NUM_GROUPS;
constexpr int MAX_SLOTS = NUM_SHARED + (ROWS * NUM_CHOSEN < NUM_EXPERTS ? ROWS * NUM_CHOSEN : NUM_EXPERTS);
// A unit is up to UNIT rows of each of an expert's three maps; a stage holds those of one map.
// 16 bytes more than a row, so that eight rows begin in different banks.
constexpr int ROW_BYTES = HIDDEN * 2, PITCH = ROW_BYTES + 16, STAGE_BYTES = UNIT * PITCH;
// Tokens come in tiles of eight. Half of the warps take gate, half up; each a part of the inputs, STEPS times 32.
constexpr int TOKEN_TILES = ROWS > 8 ? 2 : 1, SPLIT = WARPS / 2;
constexpr int INPUT_TILES = HIDDEN / 32, STEPS = (INPUT_TILES + SPLIT - 1) / SPLIT;
constexpr int D_TILES = HIDDEN / 16, TILES = (D_TILES + WARPS - 1) / WARPS;
constexpr int D_PIECES = HIDDEN / 8, D_LOADS = (D_PIECES + 31) / 32;

#ifdef __CUDACC__
// Programs meet: all that any of them wrote before is there behind it. `arrivals`: how many have ever come.
__device__ void wait_for_all_programs(unsigned long long* arrivals) {
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned long long before, now;
        asm volatile("atom.add.release.gpu.global.u64 %0, [%1], 1;" : "=l"(before) : "l"(arrivals) : "memory");
        const unsigned long long all = (before / NUM_PROGRAMS + 1) * NUM_PROGRAMS;
        do
            asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(arrivals) : "memory");
        while (now < all);
    }
    __syncthreads();
}
typedef unsigned long long Mbarrier;
__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void init_mbarrier(Mbarrier* p, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(p)), "r"(arrivals) : "memory");
}
__device__ void publish_mbarriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void arrive(Mbarrier* p) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(p)) : "memory");
}
// Arrives, for a phase that ends once so many bytes have been copied too; some may have come before.
__device__ void expect_bytes(Mbarrier* p, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(p)), "r"(num_bytes)
                 : "memory");
}
__device__ void wait_for_phase(Mbarrier* p, int parity) {
    unsigned is_over = 0;
    while (!is_over)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(is_over) : "r"(shared_address(p)), "r"(parity) : "memory");
}
// Of what is read once: it is the first to leave the L2.
__device__ void copy_to_shared(void* to, const void* from, int num_bytes, Mbarrier* p) {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(shared_address(to)), "l"(from), "r"(num_bytes), "r"(shared_address(p)), "l"(policy) : "memory");
}
// Tiles of 8 x 8 bf16, a lane's `row` is row lane % 8 of tile lane / 8; each lane gets its pair of every tile.
__device__ void load_tiles(unsigned (&w)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(shared_address(row)) : "memory");
}
__device__ void load_transposed_tiles(unsigned (&w)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(w[0]), "=r"(w[1]) : "r"(shared_address(row)) : "memory");
}
#else
__device__ void wait_for_all_programs(unsigned long long*) { arrive_at_cluster(), wait_for_cluster(); }
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

// How many lanes have a larger key, or an equal one and come before.
__device__ int rank_of(unsigned key) {
    const int lane = threadIdx.x % 32;
    int rank = 0;
#pragma unroll
    for (int l = 0; l < 32; ++l) {
        const unsigned other = __shfl_sync(FULL, key, l);
        rank += other > key || (other == key && l < lane);
    }
    return rank;
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
    // Per slot: its expert, unless it is a shared one, and the tokens that take it, as bits; per slot and token the
    // weight.
    int expert[MAX_SLOTS];
    unsigned tokens[MAX_SLOTS];
    float weight[MAX_SLOTS * ROWS];
    int num_slots;
    unsigned active[32];
    int before[32];
    int chosen[ROWS * NUM_CHOSEN];
    float chosen_weight[ROWS * NUM_CHOSEN];
};
static_assert(sizeof(Choice) == CHOICE_BYTES, "the launcher counts on another size");

// One token by one warp: lane l holds the experts l * PER_LANE and up, so a group of experts is a run of lanes.
// `candidates`: 32 of the warp's own.
__device__ void choose_of_token(Choice& s, int t, const float* logits, const float* add, uint2* candidates) {
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
        // Of a single expert there is no second.
        const float mine = PER_LANE * LANES_PER_GROUP > 1 ? first + second : first;
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
    // As many lanes as experts are chosen have a key that is not below `bound`, so no key below it is chosen.
    unsigned best = 0, is_candidate = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) best = max(best, key[j]);
    const unsigned bound = __shfl_sync(FULL, best, __ffs(__ballot_sync(FULL, rank_of(best) == NUM_CHOSEN - 1)) - 1);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) is_candidate |= unsigned(key[j] && key[j] >= bound) << j;
    int behind = __popc(is_candidate);
    for (int o = 1; o < 32; o <<= 1) {
        const int other = __shfl_up_sync(FULL, behind, o);
        if (lane >= o) behind += other;
    }
    const int num_candidates = __shfl_sync(FULL, behind, 31);
    if (num_candidates <= 32) {
        // One a lane, in ascending order of experts.
        uint2* mine = candidates + behind - __popc(is_candidate);
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j)
            if (is_candidate >> j & 1u) *mine++ = make_uint2(key[j], lane * PER_LANE + j);
        __syncwarp();
        const uint2 candidate = lane < num_candidates ? candidates[lane] : make_uint2(0, 0);
        const int rank = rank_of(candidate.x);
        if (rank < NUM_CHOSEN) {
            s.chosen[t * NUM_CHOSEN + rank] = candidate.y;
            atomicOr(&s.active[candidate.y / PER_LANE], 1u << candidate.y % PER_LANE);
        }
    } else {
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
        if (taken) atomicOr(&s.active[lane], taken);
    }
    __syncwarp();
    const float mine = lane < NUM_CHOSEN ? sigmoid(row[s.chosen[t * NUM_CHOSEN + lane]]) : 0.f;
    const float factor = ROUTED_SCALE / (sum_of_lanes(mine) + 1e-20f);
    if (lane < NUM_CHOSEN) s.chosen_weight[t * NUM_CHOSEN + lane] = mine * factor;
}

__device__ void choose_experts(Choice& s, int num_tokens, const float* logits, const float* add, uint2* candidates) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < MAX_SLOTS; i += THREADS) s.tokens[i] = i < NUM_SHARED ? (1u << num_tokens) - 1u : 0u;
    for (int i = threadIdx.x; i < NUM_SHARED * ROWS; i += THREADS) s.weight[i] = 1.f;
    if (threadIdx.x < 32) s.active[lane] = 0;
    __syncthreads();
    for (int t = warp; t < num_tokens; t += WARPS) choose_of_token(s, t, logits, add, candidates + 32 * warp);
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
        atomicOr(&s.tokens[slot], 1u << t);
    }
    __syncthreads();
}

// h (D_PIECES) = norm of x's row t, by a warp.
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
        if (lane + 32 * j < D_PIECES) {
            const uint4 of_norm = weight[lane + 32 * j];
            const unsigned a[4] = {mine[j].x, mine[j].y, mine[j].z, mine[j].w};
            const unsigned b[4] = {of_norm.x, of_norm.y, of_norm.z, of_norm.w};
            unsigned y[4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                y[k] = to_bf16(low(a[k]) * scale * low(b[k])) | to_bf16(high(a[k]) * scale * high(b[k])) << 16;
            h[lane + 32 * j] = make_uint4(y[0], y[1], y[2], y[3]);
        }
}

// A program's way over its rows, counted over all slots: two runs of them, either may be empty. Units end with slots.
struct Walk {
    int row, end, then, then_end;
    __device__ bool is_over() const { return row == end; }
    __device__ int slot() const { return row / WIDTH; }
    __device__ int num_rows() const { return min(min(UNIT, end - row), WIDTH - row % WIDTH); }
    __device__ void advance() {
        row += num_rows();
        turn();
    }
    // Sets the second run.
    __device__ void follow(int first, int behind) {
        then = first, then_end = behind;
        turn();
    }
    __device__ void turn() {
        if (row == end) row = then, end = then_end, then = then_end;
    }
};
// Where the p-th of NUM_PROGRAMS equal shares of so many rows begins.
__device__ int share(int num_rows, int p) { return num_rows * p / NUM_PROGRAMS; }

// Where a program is with asking for its rows: three stages a unit, of gate, of up and of W_down transposed, in turn.
// Every warp keeps one; each asks for one row of a stage, so that no warp is long at it.
// Stage n lies at place n % STAGES; a phase of the place's `full` ends when row 0's warp has said how many bytes come
// and all have, whichever is first. A place is asked for again once all warps have left it: gate's and up's at the
// barrier behind their products, that of W_down at `has_left`, for which only warps wait that ask.
struct Fetcher {
    const uint4 *gate_up, *shared_gate_up, *down, *shared_down;
    const int* expert;
    char* stages;
    // Of each place in the ring: its rows are there.
    Mbarrier* full;
    Walk walk;
    int map, n;

    // A row of the next stage; whoever asks for the first one says how many bytes will come. All have left its place.
    __device__ void fetch(int row) {
        const int at = n % STAGES, slot = walk.slot(), num_rows = walk.num_rows();
        if (threadIdx.x % 32 == 0 && row >= 0 && row < num_rows) {
            const bool is_shared = slot < NUM_SHARED;
            const uint4* rows = map == 2 ? (is_shared ? shared_down : down) : is_shared ? shared_gate_up : gate_up;
            // In runs of WIDTH rows: (E, gate and up), and of the shared experts all gates, then all ups.
            const int first =
                is_shared ? slot + map % 2 * NUM_SHARED : map == 2 ? expert[slot] : 2 * expert[slot] + map;
            if (row == 0) expect_bytes(&full[at], num_rows * ROW_BYTES);
            copy_to_shared(stages + at * STAGE_BYTES + row * PITCH,
                           rows + ((size_t)first * WIDTH + walk.row % WIDTH + row) * D_PIECES, ROW_BYTES, &full[at]);
        }
        ++n;
        if (++map == 3) map = 0, walk.advance();
    }
    __device__ void fill(int row) {
        while (n < STAGES && !walk.is_over()) fetch(row);
    }
};

// down (E, F, D) and shared_down (Fs, D) are transposed. partial (programs, T, HIDDEN) fp32: each program's sums over
// its rows, of the tokens that take one of them. out (T, HIDDEN) = residual + all partial sums; residual may be null.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts(const uint4* x, const uint4* norm_weight, float eps, int T, const float* logits, const float* bias,
        const int* width, const uint4* gate_up, const uint4* shared_gate_up, const uint4* down,
        const uint4* shared_down, float limit, float shared_limit, const unsigned short* residual, float* partial,
        unsigned long long* arrivals, const unsigned short* next_weight, int distance, int num_bytes,
        unsigned short* out) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, b = blockIdx.x;
    __shared__ Choice s;
    __shared__ Mbarrier full[STAGES], has_left;
    // The tokens that each program has a part of, as bits.
    __shared__ unsigned touched[NUM_PROGRAMS];
    // Each warp's sums over its part of the inputs, and weighted activations in two bf16 parts.
    __shared__ float4 sums[THREADS];
    __shared__ unsigned act[2][TOKEN_TILES * 8][UNIT / 2];
    DYNAMIC_SHARED(char, stages);
    char* h = stages + STAGES * STAGE_BYTES;
    // One token: every program begins with a share of the shared expert, which is known before the choice.
    constexpr int SHARED_ROWS = ROWS == 1 ? NUM_SHARED * WIDTH : 0;
    Walk walk = {share(SHARED_ROWS, b), share(SHARED_ROWS, b + 1), 0, 0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) init_mbarrier(&full[i], 1);
        init_mbarrier(&has_left, WARPS);
        publish_mbarriers();
        if (num_bytes) prefetch_run(next_weight + (size_t)distance * b, num_bytes);
    }
    __syncthreads();
    Fetcher fetcher = {gate_up, shared_gate_up, down, shared_down, s.expert, stages, full, walk, 0, 0};
    fetcher.fill(warp);
    if (warp == 0)
        for (int i = lane; i < HIDDEN / 64; i += 32) prefetch((const char*)norm_weight + i * 128);
    float add[PER_LANE];
    load_run(bias, add);
    wait_for_producers();
    let_consumers_start();
    const int num_tokens = width ? min(T, *width) : T;
    // With few tokens the warps that normalise are not those that choose.
    for (int t = WARPS - 1 - warp; t < T; t += WARPS) normalise(x, norm_weight, eps, t, (uint4*)(h + t * PITCH));
    choose_experts(s, num_tokens, logits, add, (uint2*)sums);

    const int num_rows = max(0, (num_tokens ? s.num_slots * WIDTH : 0) - SHARED_ROWS);
    const int first_row = SHARED_ROWS + share(num_rows, b), behind_row = SHARED_ROWS + share(num_rows, b + 1);
    walk.follow(first_row, behind_row);
    fetcher.walk.follow(first_row, behind_row);
    fetcher.fill(warp);
    for (int p = threadIdx.x; p < NUM_PROGRAMS; p += THREADS) {
        unsigned tokens = 0;
        if (ROWS == 1) tokens = num_tokens;
        else
            for (int row = share(num_rows, p); row < share(num_rows, p + 1); row = (row / WIDTH + 1) * WIDTH)
                tokens |= s.tokens[row / WIDTH];
        touched[p] = tokens;
    }
    // A program without rows comes to no other barrier before it reads them.
    if (walk.is_over()) __syncthreads();

    float total[TILES][TOKEN_TILES][4] = {};
    const int half = warp / SPLIT, slice = warp % SPLIT;
    // Where this lane reads tokens and rows as operands; tokens that are not there are the last again.
    const int token = TOKEN_TILES == 1 ? lane % 8 : lane % 16;
    const char* h_row = h + min(token, T - 1) * PITCH + lane / (8 * TOKEN_TILES) * 16 + slice * 64;
    const int of_map = lane % 8 * PITCH + lane / 8 * 16 + slice * 64;
    const int of_down = lane % 8 * PITCH + lane / 8 % 2 * 16 + warp * 32;
    const auto wait = [&](int n) { wait_for_phase(&full[n % STAGES], n / STAGES & 1); };
    for (int n = 0; !walk.is_over(); n += 3, walk.advance()) {
        const int slot = walk.slot(), num_unit_rows = walk.num_rows();
        // (token, row) of gate or up over a part of the inputs.
        wait(n + half);
        float sum[2][4] = {};
        {
            const char* rows = stages + (n + half) % STAGES * STAGE_BYTES + of_map;
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                if (INPUT_TILES % SPLIT && slice + SPLIT * i >= INPUT_TILES) break;
                const int k = SPLIT * i * 64;
                unsigned w[4], x[4];
                load_tiles(w, rows + k);
                load_tiles(x, h_row + k);
                if (TOKEN_TILES == 1) {
                    multiply_tile(sum[0], x[0], 0, x[1], 0, w[0], w[1]);
                    multiply_tile(sum[1], x[2], 0, x[3], 0, w[2], w[3]);
                } else {
                    multiply_tile(sum[0], x[0], x[1], x[2], x[3], w[0], w[1]);
                    load_tiles(x, h_row + k + 32);
                    multiply_tile(sum[1], x[0], x[1], x[2], x[3], w[2], w[3]);
                }
            }
        }
        sums[threadIdx.x] = make_float4(sum[0][0] + sum[1][0], sum[0][1] + sum[1][1], sum[0][2] + sum[1][2],
                                        sum[0][3] + sum[1][3]);
        __syncthreads();
        // Both stages are left.
        if (!fetcher.walk.is_over()) fetcher.fetch(warp);
        if (!fetcher.walk.is_over()) fetcher.fetch(warp - (WARPS - UNIT));
        if (warp < TOKEN_TILES) {
            const int t = warp * 8 + lane / 4;
            float g[2] = {}, u[2] = {};
#pragma unroll
            for (int i = 0; i < SPLIT; ++i) {
                const float2 of_gate = ((const float2*)&sums[i * 32 + lane])[warp];
                const float2 of_up = ((const float2*)&sums[(SPLIT + i) * 32 + lane])[warp];
                g[0] += of_gate.x, g[1] += of_gate.y, u[0] += of_up.x, u[1] += of_up.y;
            }
            const float bound = slot < NUM_SHARED ? shared_limit : limit;
            const float weight = t < T && s.tokens[slot] >> t & 1u ? s.weight[slot * ROWS + t] : 0.f;
            unsigned parts[2] = {};
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                // Comparisons that a NaN passes through.
                float silu = g[j] * sigmoid(g[j]);
                silu = silu > bound ? bound : silu;
                const float clamped = u[j] > bound ? bound : u[j] < -bound ? -bound : u[j];
                float a = 0.f;
                if (weight != 0.f && lane % 4 * 2 + j < num_unit_rows) a = low(to_bf16(silu * clamped)) * weight;
                const unsigned first = to_bf16(a);
                parts[0] |= first << 16 * j;
                parts[1] |= to_bf16(a - low(first)) << 16 * j;
            }
            act[0][t][lane % 4] = parts[0];
            act[1][t][lane % 4] = parts[1];
        }
        __syncthreads();
        // Both parts of the activations meet the same rows; rows that are not there are no numbers.
        unsigned part[TOKEN_TILES][2];
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) part[i][j] = act[j][i * 8 + lane / 4][lane % 4];
        const int num_pair_rows = num_unit_rows - lane % 4 * 2;
        const unsigned mask = num_pair_rows > 1 ? ~0u : num_pair_rows > 0 ? 0xffffu : 0u;
        wait(n + 2);
        {
            const char* rows = stages + (n + 2) % STAGES * STAGE_BYTES + of_down;
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                if (D_TILES % WARPS && warp + WARPS * i >= D_TILES) break;
                unsigned w[2];
                load_transposed_tiles(w, rows + WARPS * i * 32);
                w[0] &= mask, w[1] &= mask;
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; ++j)
                    multiply_tile(total[i][j], w[0], w[1], w[0], w[1], part[j][0], part[j][1]);
            }
        }
        __syncwarp();
        if (lane == 0) arrive(&has_left);
        if (!fetcher.walk.is_over()) {
            if (warp < UNIT) wait_for_phase(&has_left, n / 3 & 1);
            fetcher.fetch(warp);
        }
    }
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int t = i * 8 + lane % 4 * 2 + j;
            if (t >= T || !(touched[b] >> t & 1u)) continue;
            float* p = partial + ((size_t)b * T + t) * HIDDEN + lane / 4;
#pragma unroll
            for (int k = 0; k < TILES; ++k) {
                const int d = warp + WARPS * k;
                if (D_TILES % WARPS && d >= D_TILES) break;
                p[d * 16] = total[k][i][j];
                p[d * 16 + 8] = total[k][i][2 + j];
            }
        }
    wait_for_all_programs(arrivals);
    // A few outputs of a token by a warp: LANES float4, of PARTS programs at a time, all on their way at once.
    constexpr int LANES = ROWS == 1 ? 2 : 4, PARTS = 32 / LANES, LOADS = (NUM_PROGRAMS + PARTS - 1) / PARTS;
    constexpr int ITEMS = HIDDEN / (4 * LANES);
    for (int item = warp * NUM_PROGRAMS + b; item < T * ITEMS; item += NUM_PROGRAMS * WARPS) {
        const int t = item / ITEMS;
        const size_t at = (size_t)t * HIDDEN + (item % ITEMS * LANES + lane % LANES) * 4;
        const uint2 old = residual ? *(const uint2*)(residual + at) : make_uint2(0, 0);
        float4 part[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int p = lane / LANES + PARTS * i;
            part[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (p < NUM_PROGRAMS && touched[p] >> t & 1u)
                part[i] = __ldcg((const float4*)(partial + (size_t)p * T * HIDDEN + at));
        }
        float y[4] = {};
#pragma unroll
        for (int i = 0; i < LOADS; ++i) y[0] += part[i].x, y[1] += part[i].y, y[2] += part[i].z, y[3] += part[i].w;
#pragma unroll
        for (int o = LANES; o < 32; o <<= 1)
#pragma unroll
            for (int j = 0; j < 4; ++j) y[j] += __shfl_xor_sync(FULL, y[j], o);
        if (lane < LANES)
            *(uint2*)(out + at) = make_uint2(to_bf16(y[0] + low(old.x)) | to_bf16(y[1] + high(old.x)) << 16,
                                             to_bf16(y[2] + low(old.y)) | to_bf16(y[3] + high(old.y)) << 16);
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


@cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """() int64: what the programs of one launch wait by. Launches of one device follow each other (`runtime.turn`)."""
    return torch.zeros((), dtype=torch.int64, device=device)


def _choice_bytes(num_experts: int, num_chosen: int, num_shared: int, rows: int) -> int:
    """Size of the kernel's `Choice`, of as many slots as there can be."""
    slots = num_shared + min(rows * num_chosen, num_experts)
    return slots * (8 + 4 * rows) + 4 + 2 * 32 * 4 + 2 * rows * num_chosen * 4


def _size(T: int) -> tuple[int, int]:
    """Rows and warps that a kernel is compiled for: a step of one token, of a tile of eight, of two."""
    rows = next(rows for rows in (1, 8, MAX_ROWS) if rows >= T)
    # Sums of two tiles take the registers of twice as many.
    return rows, 8 if rows <= 8 else 16


def _num_stages(T: int, D: int, E: int, router: RouterShape, num_shared: int, num_programs: int) -> int:
    """Stages of the ring; 0: what else has to be there leaves too little shared memory."""
    rows, warps = _size(T)
    pitch = 2 * D + 16
    static_bytes = _choice_bytes(E, router.num_experts_per_tok, num_shared, rows)
    # The warps' sums, who is touched, activations, and the barriers.
    static_bytes += warps * 512 + num_programs * 4 + 512 + 64
    room = _MAX_SHARED_BYTES - static_bytes - T * pitch
    least, most = room // (_UNIT * pitch), (room - _ROOM_BYTES) // (_UNIT * pitch)
    if static_bytes > _MAX_STATIC_BYTES or least < _MIN_STAGES:
        return 0
    return max(_MIN_STAGES, min(_MAX_STAGES, most))


def can_run(x: torch.Tensor, down: torch.Tensor, shared_down: torch.Tensor | None, router: RouterShape) -> bool:
    """Say whether the kernel takes a step of these sizes: others run as a prompt does."""
    (T, D), (E, _, F) = x.shape, down.shape
    num_shared, rest = divmod(0 if shared_down is None else shared_down.shape[1], F)
    is_sized = D % 32 == E % 32 == 32 % router.n_group == rest == 0 and E <= 1024 and router.num_experts_per_tok <= 32
    return is_sized and T <= MAX_ROWS and _num_stages(T, D, E, router, num_shared, _num_programs(x.device)) > 0


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
    next_weight: object = None,
) -> torch.Tensor:
    """Choose and run the experts of a step; weights, limits and width as `moe` in `kernels/moe.py` takes them.

    Args:
        x: (T, D) bf16 residual stream; `can_run` said yes.
        norm_weight: (D) bf16.
        eps: of the norm.
        logits: (T, E) fp32.
        expert_bias: (E) fp32.
        gate_up: see `moe`, as the weights that follow.
        down: as there, its storage (E, F, D).
        shared_gate_up: as there.
        shared_down: as there, its storage (Fs, D).
        router: the choice.
        limit: as there.
        shared_limit: as there.
        width: as there.
        adds_residual: as there.
        next_weight: as there.

    Returns:
        (T, D): x, if it is added, and all experts.

    Raises:
        UnsupportedError: a dtype that the kernel does not take.
    """
    (T, D), (E, _, F) = x.shape, down.shape
    if x.dtype != torch.bfloat16:
        raise UnsupportedError(
            f"experts in {x.dtype} have no GPU kernel for a step: run the model in bfloat16, or on the CPU"
        )
    assert x.dtype == norm_weight.dtype == gate_up.dtype and x.is_contiguous()
    assert down.mT.is_contiguous() and (shared_down is None or shared_down.mT.is_contiguous()), "see `MixtureOfExperts`"
    device = x.device
    rows, warps = _size(T)
    num_programs = _num_programs(device)
    num_shared = 0 if shared_down is None else shared_down.shape[1] // F
    num_stages = _num_stages(T, D, E, router, num_shared, num_programs)
    assert num_stages, "`can_run` says no"
    definitions = {
        "HIDDEN": D,
        "WIDTH": F,
        "NUM_EXPERTS": E,
        "NUM_GROUPS": router.n_group,
        "TOPK_GROUPS": router.topk_group,
        "NUM_CHOSEN": router.num_experts_per_tok,
        "NUM_SHARED": num_shared,
        "CHOICE_BYTES": _choice_bytes(E, router.num_experts_per_tok, num_shared, rows),
        "ROWS": rows,
        "WARPS": warps,
        "UNIT": _UNIT,
        "STAGES": num_stages,
        "NUM_PROGRAMS": num_programs,
        "ROUTED_SCALE": f"{float(router.routed_scaling_factor)!r}f",
    } | ({"HAS_PDL": 1} if pdl_options()["PDL"] else {})
    partial = torch.empty((num_programs, T, D), dtype=torch.float32, device=device)
    out = torch.empty_like(x)
    ahead = next(iter(shares([next_weight], READ_AHEAD_BYTES, num_programs)), None)
    kernel = load_kernel(_SOURCE, "experts", tuple((key, str(value)) for key, value in definitions.items()), device)
    launch(
        kernel, (num_programs, 1, 1), 32 * warps,
        x, norm_weight, eps, T, logits, expert_bias, width, gate_up, shared_gate_up, down, shared_down,
        inf if limit is None else limit, inf if shared_limit is None else shared_limit,
        x if adds_residual else None, partial, _arrivals(device),
        *((None, 0, 0) if ahead is None else ahead), out,
        shared_bytes=(_UNIT * num_stages + T) * (2 * D + 16),
    )  # fmt: skip
    return out
