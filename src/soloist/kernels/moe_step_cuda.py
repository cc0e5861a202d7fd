"""The experts of a step in CUDA C++, of one token with their router; the equations are in `kernels/moe.py`.

One program per multiprocessor, all there at once:

1. Each normalises the rows. Of one token it multiplies x * norm_weight with its part of the router, whose rows came
   before the wait, and leaves the logits to all; of more a launch in front has. Each then chooses the experts by itself
   (`moe_choice_cuda.py`): that costs less than waiting for another launch.
2. An expert's width f has one row of D in each of its three maps: gate, up, and W_down transposed. All such rows of
   all chosen experts are one list, of which each program has an equal share. It takes eight f at a time: gate and up
   of all tokens, then, weighted, their part of all D outputs, so that no program waits for another between the maps.
   Rows come through a ring in shared memory, copied whole and ahead of their use, and meet the tokens on tensor cores.
3. A program leaves its sums of the tokens that it had a part of, waits until all have, and adds up a few columns.

Weights are read once, in one stream from the choice to the end. Sums are fp32 in an order that is fixed for a step;
where shares end depends on all its tokens, so a row may round otherwise in other company.
"""

from functools import cache
from math import inf
from typing import NamedTuple

import torch

from soloist.errors import UnsupportedError
from soloist.kernels import bulk_copies_cuda, moe_choice_cuda
from soloist.kernels.launch import cache_outside_captures, pdl_options
from soloist.kernels.nvrtc import PRELUDE, launch, load_kernel
from soloist.kernels.read_ahead import shares

# Most tokens of a step.
MAX_ROWS = 16
# Bytes of the next launch's weights that the experts ask for, half before the choice and half at their end, when the
# memory is idle; measured on one H200, `docs/log.md`.
READ_AHEAD_BYTES = 12 << 20
# Shared memory of a program, and of that what has its size at compile time.
_MAX_SHARED_BYTES = 227 * 1024
_MAX_STATIC_BYTES = 48 * 1024
# Rows of a map that are copied at a time, a stage of the ring, and how many stages there are: the least that keeps
# copies on their way, and, of more tokens than one, a fourth where that leaves room for the launches before and behind.
_UNIT = 8
_MIN_STAGES, _MAX_STAGES = 3, 4
_ROOM_BYTES = 19 * 1024

_SOURCE = (
    PRELUDE
    + bulk_copies_cuda.SOURCE
    + moe_choice_cuda.SOURCE
    + r"""
// A unit is up to UNIT rows of each of an expert's three maps; a stage holds those of one map.
constexpr int ROW_BYTES = HIDDEN * 2, STAGE_BYTES = UNIT * PITCH;
// Tokens come in tiles of eight. Half of the warps take gate, half up, each a part of the inputs.
constexpr int TOKEN_TILES = ROWS > 8 ? 2 : 1, SPLIT = WARPS / 2, INPUT_TILES = HIDDEN / 32;
constexpr int D_TILES = HIDDEN / 16, TILES = (D_TILES + WARPS - 1) / WARPS;
constexpr int D_PIECES = HIDDEN / 8;
static_assert(ROWS <= WARPS, "a token has a warp");
static_assert(!HAS_ROUTER || ROWS == 1, "what the router takes lies in the place of the norm's weight, once");
// Threads that normalise a row.
constexpr int NORM_THREADS = ROWS == 1 ? THREADS : 32, NORM_LOADS = (D_PIECES + NORM_THREADS - 1) / NORM_THREADS;

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
#else
__device__ void wait_for_all_programs(unsigned long long* arrivals) {
    if (threadIdx.x == 0) ++*arrivals;
    arrive_at_cluster(), wait_for_cluster();
}
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

// h (D_PIECES) = norm of a row of x, by a warp, or of a step's only one by all; returns the norm's scale. For a router
// x * weight, rounded, takes the weight's place: the barrier of the squares is in front of its readers.
__device__ float normalise(const uint4* x, uint4* weight, float eps, uint4* h) {
    const int me = threadIdx.x % NORM_THREADS;
    uint4 mine[NORM_LOADS], norm_weight[NORM_LOADS];
    float even = 0.f, odd = 0.f;
#pragma unroll
    for (int j = 0; j < NORM_LOADS; ++j)
        mine[j] = me + NORM_THREADS * j < D_PIECES ? x[me + NORM_THREADS * j] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < NORM_LOADS; ++j) multiply(mine[j], mine[j], even, odd);
#pragma unroll
    for (int j = 0; j < NORM_LOADS; ++j)
        if (HAS_ROUTER && me + NORM_THREADS * j < D_PIECES) {
            norm_weight[j] = weight[me + NORM_THREADS * j];
            weight[me + NORM_THREADS * j] = multiply_pairs(mine[j], norm_weight[j]);
        }
    float square = sum_of_lanes(even + odd);
    if (NORM_THREADS > 32) {
        __shared__ float squares[WARPS];
        if (me % 32 == 0) squares[me / 32] = square;
        __syncthreads();
        square = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) square += squares[i];
    }
    const float scale = rsqrtf(square / HIDDEN + eps);
#pragma unroll
    for (int j = 0; j < NORM_LOADS; ++j)
        if (me + NORM_THREADS * j < D_PIECES) {
            const unsigned a[4] = {mine[j].x, mine[j].y, mine[j].z, mine[j].w};
            const uint4 of_norm = HAS_ROUTER ? norm_weight[j] : weight[me + NORM_THREADS * j];
            const unsigned b[4] = {of_norm.x, of_norm.y, of_norm.z, of_norm.w};
            unsigned y[4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                y[k] = to_bf16_pair(low(a[k]) * scale * low(b[k]), high(a[k]) * scale * high(b[k]));
            h[me + NORM_THREADS * j] = make_uint4(y[0], y[1], y[2], y[3]);
        }
    return scale;
}

// A program's way over its rows, counted over all slots: two runs of them, either may be empty; only one token has a
// first one. Units end with slots.
struct Walk {
    int row, end, then, then_end;
    __device__ bool is_over() const { return row == end; }
    __device__ int slot() const { return row / WIDTH; }
    __device__ int num_rows() const { return min(min(UNIT, end - row), WIDTH - row % WIDTH); }
    __device__ void advance() {
        row += num_rows();
        if (ROWS == 1) turn();
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

// The tokens that each program has a part of, as bits; the only one is everybody's.
__device__ void find_touched(const Choice& s, int num_rows, int num_tokens, unsigned* touched) {
    for (int p = threadIdx.x; p < NUM_PROGRAMS; p += THREADS) {
        unsigned tokens = 0;
        if (ROWS == 1) tokens = num_tokens;
        else
            for (int row = share(num_rows, p); row < share(num_rows, p + 1); row = (row / WIDTH + 1) * WIDTH)
                tokens |= s.tokens[row / WIDTH];
        touched[p] = tokens;
    }
}

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
    // Of the first stages, those that are known.
    __device__ void fill(int row, int num_stages) {
        while (n < num_stages && !walk.is_over()) fetch(row);
    }
};

// Products of (token, row of a stage), over a warp's part of the inputs, one of PARTS: the lane's part of a tile.
// `rows` and `h_row`: where the lane reads its first operands.
template <int PARTS> __device__ float4 multiply_rows(const char* rows, const char* h_row, int part) {
    float sum[2][4] = {};
#pragma unroll
    for (int i = 0; i < (INPUT_TILES + PARTS - 1) / PARTS; ++i) {
        if (INPUT_TILES % PARTS && part + PARTS * i >= INPUT_TILES) break;
        const int k = PARTS * i * 64;
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
    return make_float4(sum[0][0] + sum[1][0], sum[0][1] + sum[1][1], sum[0][2] + sum[1][2], sum[0][3] + sum[1][3]);
}

// Logits of the only token and the program's rows of the router, by four threads: what all warps summed, scaled.
__device__ void publish_logits(const float4* sums, float scale, int num_rows, float* logits) {
    const int row = threadIdx.x * 2;
    float y[2] = {};
#pragma unroll
    for (int i = 0; i < WARPS; ++i) y[0] += sums[i * 32 + threadIdx.x].x, y[1] += sums[i * 32 + threadIdx.x].y;
    if (row < num_rows) store_relaxed(logits + row, y[0] * scale);
    if (row + 1 < num_rows) store_relaxed(logits + row + 1, y[1] * scale);
}

typedef unsigned Activations[2][TOKEN_TILES * 8][UNIT / 2];

// By a warp for a tile of tokens: what all warps summed becomes weighted activations, in two bf16 parts.
__device__ void activate(const Choice& s, int slot, int num_rows, int num_tokens, float bound, const float4* sums,
                         Activations& act) {
    const int tile = threadIdx.x / 32, lane = threadIdx.x % 32, t = tile * 8 + lane / 4;
    float g[2] = {}, u[2] = {};
#pragma unroll
    for (int i = 0; i < SPLIT; ++i) {
        const float2 of_gate = ((const float2*)&sums[i * 32 + lane])[tile];
        const float2 of_up = ((const float2*)&sums[(SPLIT + i) * 32 + lane])[tile];
        g[0] += of_gate.x, g[1] += of_gate.y, u[0] += of_up.x, u[1] += of_up.y;
    }
    const float weight = t < num_tokens && s.tokens[slot] >> t & 1u ? s.weight[slot * ROWS + t] : 0.f;
    float a[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        // Comparisons that a NaN passes through.
        float silu = g[j] * sigmoid(g[j]);
        silu = silu > bound ? bound : silu;
        const float clamped = u[j] > bound ? bound : u[j] < -bound ? -bound : u[j];
        if (weight != 0.f && lane % 4 * 2 + j < num_rows) a[j] = low(to_bf16(silu * clamped)) * weight;
    }
    const unsigned first = to_bf16_pair(a[0], a[1]);
    act[0][t][lane % 4] = first;
    act[1][t][lane % 4] = to_bf16_pair(a[0] - low(first), a[1] - high(first));
}

// A lane's part of (output, token), of every so-manieth sixteen outputs. The only token takes all eight columns of a
// product: they are the same, so a lane keeps two outputs of one in four products, and few registers.
constexpr int KEPT = ROWS == 1 ? (TILES + 3) / 4 : TILES * TOKEN_TILES;
typedef float Totals[KEPT][4];

// Both parts of the activations meet the same rows of W_down transposed; rows that are not there are no numbers.
__device__ void add_outputs(Totals& total, const char* rows, const Activations& act, int num_rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_pair_rows = num_rows - lane % 4 * 2;
    const unsigned mask = num_pair_rows > 1 ? ~0u : num_pair_rows > 0 ? 0xffffu : 0u;
    unsigned part[TOKEN_TILES][2];
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) part[i][j] = act[j][ROWS == 1 ? 0 : i * 8 + lane / 4][lane % 4];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        if (D_TILES % WARPS && warp + WARPS * i >= D_TILES) break;
        unsigned w[2];
        load_transposed_tiles(w, rows + WARPS * i * 32);
        w[0] &= mask, w[1] &= mask;
        if (ROWS == 1) {
            float product[4] = {};
            multiply_tile(product, w[0], w[1], w[0], w[1], part[0][0], part[0][1]);
            if (lane % 4 == i % 4) total[i / 4][0] += product[0], total[i / 4][1] += product[2];
        } else
#pragma unroll
            for (int j = 0; j < TOKEN_TILES; ++j)
                multiply_tile(total[i * TOKEN_TILES + j], w[0], w[1], w[0], w[1], part[j][0], part[j][1]);
    }
}

// partial (T, HIDDEN) of a program = its sums, of the tokens in `touched`.
__device__ void leave_sums(const Totals& total, unsigned touched, int T, float* partial) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (ROWS == 1) {
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const int tile = i * 4 + lane % 4, d = warp + WARPS * tile;
            if (touched && tile < TILES && d < D_TILES)
                partial[d * 16 + lane / 4] = total[i][0], partial[d * 16 + lane / 4 + 8] = total[i][1];
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int t = i * 8 + lane % 4 * 2 + j;
            if (t >= T || !(touched >> t & 1u)) continue;
            float* p = partial + (size_t)t * HIDDEN + lane / 4;
#pragma unroll
            for (int k = 0; k < TILES; ++k) {
                const int d = warp + WARPS * k;
                if (D_TILES % WARPS && d >= D_TILES) break;
                p[d * 16] = total[k * TOKEN_TILES + i][j];
                p[d * 16 + 8] = total[k * TOKEN_TILES + i][2 + j];
            }
        }
}

// out (T, HIDDEN) = residual + what the programs left: a few outputs of a token by a warp.
__device__ void add_up(const float* partial, const unsigned* touched, int T, const unsigned short* residual,
                       unsigned short* out) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // LANES float4, of PARTS programs at a time, all on their way at once.
    constexpr int LANES = ROWS == 1 ? 2 : 4, PARTS = 32 / LANES, LOADS = (NUM_PROGRAMS + PARTS - 1) / PARTS;
    constexpr int ITEMS = HIDDEN / (4 * LANES);
    for (int item = warp * NUM_PROGRAMS + blockIdx.x; item < T * ITEMS; item += NUM_PROGRAMS * WARPS) {
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
            *(uint2*)(out + at) = make_uint2(to_bf16_pair(y[0] + low(old.x), y[1] + high(old.x)),
                                             to_bf16_pair(y[2] + low(old.y), y[3] + high(old.y)));
    }
}

// down (E, F, D) and shared_down (Fs, D) are transposed. partial (programs, T, HIDDEN) fp32: each program's sums over
// its rows, of the tokens that take one of them. out (T, HIDDEN) = residual + all partial sums; residual may be null.
// With a router: router_weight (E, HIDDEN), and logits (2, E), of which launches take the halves in turn; each leaves
// the other half without numbers, for the next one. Without: logits (T, E).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts(const uint4* x, const uint4* norm_weight, float eps, int T, const uint4* router_weight, float* logits,
        const float* bias, const int* width, const uint4* gate_up, const uint4* shared_gate_up, const uint4* down,
        const uint4* shared_down, float limit, float shared_limit, const unsigned short* residual, float* partial,
        unsigned long long* arrivals, const unsigned short* next_weight, int distance, int half_bytes,
        unsigned short* out) {
    // Known to be the same for all lanes, which saves registers.
    const int warp = __shfl_sync(FULL, threadIdx.x / 32, 0), lane = threadIdx.x % 32, b = blockIdx.x;
    __shared__ Choice s;
    __shared__ Mbarrier full[STAGES], has_left, is_early;
    __shared__ unsigned touched[NUM_PROGRAMS];
    // Each warp's sums over its part of the inputs, and weighted activations in two bf16 parts.
    __shared__ float4 sums[THREADS];
    __shared__ Activations act;
    DYNAMIC_SHARED(char, stages);
    char *h = stages + STAGES * STAGE_BYTES, *norm_row = h + T * PITCH;
    // One token: every program begins with a share of the shared expert, which is known before the choice.
    constexpr int SHARED_ROWS = ROWS == 1 ? NUM_SHARED * WIDTH : 0;
    Walk walk = {share(SHARED_ROWS, b), share(SHARED_ROWS, b + 1), 0, 0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) init_mbarrier(&full[i], 1);
        init_mbarrier(&has_left, WARPS);
        init_mbarrier(&is_early, 1);
        publish_mbarriers();
    }
    __syncthreads();
    // The program's rows of the router have the ring's last place until they are multiplied.
    char* of_router = stages + (STAGES - 1) * STAGE_BYTES;
    const int first_logit = share(NUM_EXPERTS, b), num_logits = share(NUM_EXPERTS, b + 1) - first_logit;
    if (threadIdx.x == 0) {
        expect_bytes(&is_early, ROW_BYTES + (HAS_ROUTER ? num_logits * ROW_BYTES : 0));
        copy_to_shared(norm_row, norm_weight, ROW_BYTES, &is_early);
    }
    if (HAS_ROUTER && lane == 0 && warp < num_logits)
        copy_to_shared(of_router + warp * PITCH, router_weight + (size_t)(first_logit + warp) * D_PIECES, ROW_BYTES,
                       &is_early);
    Fetcher fetcher = {gate_up, shared_gate_up, down, shared_down, s.expert, stages, full, walk, 0, 0};
    fetcher.fill(warp, STAGES - HAS_ROUTER);
    if (warp == 0)
        for (int i = lane; i < (NUM_EXPERTS + 31) / 32; i += 32) prefetch(bias + i * 32);
    wait_for_producers();
    let_consumers_start();
    const int num_tokens = width ? min(T, *width) : T;
    if (HAS_ROUTER) {
        // As long as this program has not arrived, the launch is not counted.
        const bool is_odd = __ldcg(arrivals) / NUM_PROGRAMS % 2;
        if (threadIdx.x < num_logits)
            logits[(is_odd ? 0 : NUM_EXPERTS) + first_logit + threadIdx.x] = __uint_as_float(NOT_THERE);
        logits += is_odd ? NUM_EXPERTS : 0;
    }
    wait_for_phase(&is_early, 0);
    // With few tokens the warps that normalise are not those that choose.
    const int row = ROWS == 1 ? 0 : WARPS - 1 - warp;
    float scale = 0.f;
    if (row < T) scale = normalise(x + (size_t)row * D_PIECES, (uint4*)norm_row, eps, (uint4*)(h + row * PITCH));
    float add[PER_LANE], score[PER_LANE];
    if (warp < num_tokens) {
        load_run(bias, add);
        if (!HAS_ROUTER) load_run(logits + (size_t)warp * NUM_EXPERTS, score);
    }
    begin_choice(s, num_tokens);
    // Where this lane reads tokens and rows as operands; tokens that are not there are the last again.
    const int token = TOKEN_TILES == 1 ? lane % 8 : lane % 16;
    const char* h_row = h + min(token, T - 1) * PITCH + lane / (8 * TOKEN_TILES) * 16;
    const int of_row = lane % 8 * PITCH + lane / 8 * 16;
    if (HAS_ROUTER) {
        const char* weighted_row = norm_row + lane / 8 * 16;
        sums[threadIdx.x] = multiply_rows<WARPS>(of_router + of_row + warp * 64, weighted_row + warp * 64, warp);
        __syncthreads();
        if (threadIdx.x < 4) publish_logits(sums, scale, num_logits, logits + first_logit);
        fetcher.fill(warp, STAGES);
    }
    __syncthreads();
    const auto read_ahead = [&](int part) {
        const char* mine = (const char*)(next_weight + (size_t)distance * b);
        if (threadIdx.x == 0 && half_bytes) prefetch_run(mine + part * half_bytes, half_bytes);
    };
    read_ahead(0);

    // `n`: stages so far, of which all are left.
    const auto choose = [&](int n) {
        float come[PER_LANE];
        if (HAS_ROUTER && warp < num_tokens) await_run(logits, come);
        choose_experts(s, num_tokens, HAS_ROUTER ? come : score, add, (uint4*)sums);
        const int num_rows = max(0, (num_tokens ? s.num_slots * WIDTH : 0) - SHARED_ROWS);
        const int first_row = SHARED_ROWS + share(num_rows, b), behind_row = SHARED_ROWS + share(num_rows, b + 1);
        walk.follow(first_row, behind_row);
        fetcher.walk.follow(first_row, behind_row);
        fetcher.fill(warp, n + STAGES);
        find_touched(s, num_rows, num_tokens, touched);
        // A program without rows comes to no other barrier before it reads them.
        if (walk.is_over()) __syncthreads();
    };
    bool is_chosen = ROWS > 1;
    if (is_chosen) choose(0);
    Totals total = {};
    const int half = warp / SPLIT, slice = warp % SPLIT;
    h_row += slice * 64;
    const int of_map = of_row + slice * 64, of_down = lane % 8 * PITCH + lane / 8 % 2 * 16 + warp * 32;
    const auto wait = [&](int n) { wait_for_phase(&full[n % STAGES], n / STAGES & 1); };
    for (int n = 0;; n += 3, walk.advance()) {
        if (!is_chosen && walk.is_over()) choose(n), is_chosen = true;
        if (walk.is_over()) break;
        const int slot = walk.slot(), num_unit_rows = walk.num_rows();
        wait(n + half);
        sums[threadIdx.x] = multiply_rows<SPLIT>(stages + (n + half) % STAGES * STAGE_BYTES + of_map, h_row, slice);
        __syncthreads();
        // Both stages are left.
        if (!fetcher.walk.is_over()) fetcher.fetch(warp);
        if (!fetcher.walk.is_over()) fetcher.fetch(warp - (WARPS - UNIT));
        const float bound = slot < NUM_SHARED ? shared_limit : limit;
        if (warp < TOKEN_TILES) activate(s, slot, num_unit_rows, T, bound, sums, act);
        __syncthreads();
        wait(n + 2);
        add_outputs(total, stages + (n + 2) % STAGES * STAGE_BYTES + of_down, act, num_unit_rows);
        __syncwarp();
        if (lane == 0) arrive(&has_left);
        if (!fetcher.walk.is_over()) {
            if (warp < UNIT) wait_for_phase(&has_left, n / 3 & 1);
            fetcher.fetch(warp);
        }
    }
    read_ahead(1);
    leave_sums(total, touched[b], T, partial + (size_t)b * T * HIDDEN);
    wait_for_all_programs(arrivals);
    add_up(partial, touched, T, residual, out);
}
"""
)


@cache
def _num_programs(device: torch.device) -> int:
    """One program per multiprocessor; a CPU runs programs one after the other, so there is one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class _Meeting(NamedTuple):
    """What the programs of a launch meet by. Launches of one device follow each other (`runtime.turn`)."""

    # () int64: how many programs of all launches have come to the end.
    arrivals: torch.Tensor
    # (2, E) fp32 logits of this launch and of the next one, without numbers. Without a router: ().
    logits: torch.Tensor


@cache_outside_captures
def _meeting(device: torch.device, num_programs: int, num_logits: int) -> _Meeting:
    """Give the meeting of launches of so many programs whose routers have so many outputs, or that have none (0)."""
    arrivals = torch.zeros((), dtype=torch.int64, device=device)
    # `NOT_THERE` of the source.
    logits = torch.full((2, num_logits), -1, dtype=torch.int32, device=device)
    return _Meeting(arrivals, logits.view(torch.float32))


def _size(T: int) -> tuple[int, int]:
    """Rows and warps that a kernel is compiled for: a step of one token, of a tile of eight, of two."""
    rows = next(rows for rows in (1, 8, MAX_ROWS) if rows >= T)
    # Sums of two tiles take the registers of twice as many; of one token more warps normalise and multiply.
    return rows, 8 if rows == 8 else 16


def _pitch(D: int) -> int:
    """Bytes from row to row in shared memory: 16 more than a row has, so that eight rows begin in different banks."""
    return 2 * D + 16


def _num_stages(T: int, D: int, E: int, router: moe_choice_cuda.RouterShape, num_shared: int, num_programs: int) -> int:
    """Stages of the ring; 0: what else has to be there leaves too little shared memory."""
    rows, warps = _size(T)
    pitch = _pitch(D)
    static_bytes = moe_choice_cuda.choice_bytes(E, router.num_experts_per_tok, num_shared, rows)
    # The warps' sums, of squares too, who is touched, activations, and the barriers.
    static_bytes += warps * (512 + 4) + num_programs * 4 + 512 + 64
    room = _MAX_SHARED_BYTES - static_bytes - (T + 1) * pitch
    least, most = room // (_UNIT * pitch), (room - _ROOM_BYTES) // (_UNIT * pitch)
    if static_bytes > _MAX_STATIC_BYTES or least < _MIN_STAGES:
        return 0
    return _MIN_STAGES if T == 1 else max(_MIN_STAGES, min(_MAX_STAGES, most))


def takes_router(x: torch.Tensor, router_weight: torch.Tensor) -> bool:
    """Say whether the kernel multiplies with this router, or wants its logits.

    Of one token it exchanges them behind the shared expert's share; of more it would wait for them longer than for
    another launch (`docs/log.md`).
    """
    num_rows = -(-router_weight.shape[0] // _num_programs(x.device))
    is_sized = x.shape[0] == 1 and num_rows <= _UNIT
    return is_sized and router_weight.dtype == torch.bfloat16 and router_weight.is_contiguous()


def can_run(
    x: torch.Tensor, down: torch.Tensor, shared_down: torch.Tensor | None, router: moe_choice_cuda.RouterShape
) -> bool:
    """Say whether the kernel takes a step of these sizes: others run as a prompt does."""
    (T, D), (E, _, F) = x.shape, down.shape
    num_shared, rest = divmod(0 if shared_down is None else shared_down.shape[1], F)
    is_sized = D % 32 == E % 32 == 32 % router.n_group == rest == 0 and E <= 1024 and router.num_experts_per_tok <= 32
    return is_sized and T <= MAX_ROWS and _num_stages(T, D, E, router, num_shared, _num_programs(x.device)) > 0


def run_experts(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router_weight: torch.Tensor,
    expert_bias: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate_up: torch.Tensor | None,
    shared_down: torch.Tensor | None,
    router: moe_choice_cuda.RouterShape,
    *,
    limit: float | None,
    shared_limit: float | None,
    width: torch.Tensor | None,
    adds_residual: bool,
    next_weight: object = None,
    logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose and run the experts of a step; weights, limits and width as `moe` in `kernels/moe.py` takes them.

    Args:
        x: (T, D) bf16 residual stream; `can_run` said yes.
        norm_weight: (D) bf16.
        eps: of the norm.
        router_weight: (E, D), not read where logits are given.
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
        logits: (T, E) fp32 of the router, if `takes_router` says no.

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
    has_router = logits is None
    assert not has_router or takes_router(x, router_weight), "its logits have to be given"
    meeting = _meeting(device, num_programs, E if has_router else 0)
    definitions = {
        "HIDDEN": D,
        "WIDTH": F,
        "NUM_EXPERTS": E,
        "NUM_GROUPS": router.n_group,
        "TOPK_GROUPS": router.topk_group,
        "NUM_CHOSEN": router.num_experts_per_tok,
        "NUM_SHARED": num_shared,
        "CHOICE_BYTES": moe_choice_cuda.choice_bytes(E, router.num_experts_per_tok, num_shared, rows),
        "ROWS": rows,
        "HAS_ROUTER": int(has_router),
        "WARPS": warps,
        "UNIT": _UNIT,
        "PITCH": _pitch(D),
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
        x, norm_weight, eps, T, router_weight, meeting.logits if logits is None else logits, expert_bias, width,
        gate_up, shared_gate_up, down, shared_down,
        inf if limit is None else limit, inf if shared_limit is None else shared_limit,
        x if adds_residual else None, partial, meeting.arrivals,
        *((None, 0, 0) if ahead is None else (ahead.weight, ahead.distance, ahead.num_bytes // 32 * 16)), out,
        shared_bytes=(_UNIT * num_stages + T + 1) * _pitch(D),
    )  # fmt: skip
    return out
