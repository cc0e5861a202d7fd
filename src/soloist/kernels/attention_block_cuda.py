"""The attention half of a layer in one launch, for a step of few tokens, in CUDA C++; see `attention_block.py`.

One program per multiprocessor, all there at once. A step's attention is a chain of small products that each wait for
the whole one before it, and as launches of their own they wait longer than they read. Here everything that the chain
reads of the memory is asked for before the launch waits for its producers, into shared memory: a program's rows of both
projections and its run of the cache. What programs tell each other is small:

1. queries, keys and values: 8 outputs of the projection at a time on tensor cores;
2. attention of a run of positions, of one key/value head and all query heads that read it;
3. sums over the runs, 16 channels of a head at a time;
4. output projection and residual.

Between these they exchange words of 8 bytes, 4 of data and the number of the launch, which says that the data are
there: nobody waits for a barrier, and nothing is cleared. Sums are made in a fixed order.

Rounding is that of the launches in `linear_cuda.py` and `attention_triton.py`: x * norm_weight, queries, keys, values,
probabilities and heads are rounded to bf16, sums are fp32. Row t may round differently with T: where the runs are cut
depends on the length.

Source: the flag in each word is the LL protocol of NCCL; the cut into runs is Flash-Decoding.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch

from soloist.kernels.launch import pdl_options
from soloist.kernels.nvrtc import HAS_NVRTC, PRELUDE, launch, load_kernel
from soloist.kernels.read_ahead import shares

# Most tokens of a step that are faster in one launch.
MAX_TOKENS = 8
# Bytes of the next launch's weights that are asked for.
READ_AHEAD_BYTES = 12 << 20
# Positions of the cache that are attended to at a time, and how many such tiles are on their way.
TILE, STAGES = 64, 2
WARPS = 8
_MAX_SHARED_BYTES = 226 << 10

_SOURCE = (
    PRELUDE
    + r"""
constexpr int THREADS = WARPS * 32;
constexpr int OUTPUTS = (HEADS + 2 * KV_HEADS) * HEAD_DIM, INNER = HEADS * HEAD_DIM, GROUP = HEADS / KV_HEADS;
// Rows of the attention, (token, query head of the group), and tiles of 16 of them.
constexpr int ROW_TILES = (TOKENS * GROUP + 15) / 16;
// Rows in shared memory, in pieces of 16 bytes: an odd number puts neighbours into other banks.
constexpr int HIDDEN_STRIDE = HIDDEN / 8 | 1, INNER_STRIDE = INNER / 8 | 1, HEAD_STRIDE = HEAD_DIM / 8 | 1;
constexpr int H_STRIDE = HIDDEN_STRIDE > INNER_STRIDE ? HIDDEN_STRIDE : INNER_STRIDE;
constexpr int SCORE_STRIDE = TILE + 8;
constexpr int MOST_TILES = QKV_TILES > OUT_TILES ? QKV_TILES : OUT_TILES;
// A word of each half of a head, for a lane.
constexpr int HALF_WORDS = HEAD_DIM / 4;
// Tiles of 8 channels that a warp sums values for.
constexpr int VALUE_TILES = HEAD_DIM / (8 * WARPS);
// Words of a row of a run: channels, maximum, sum.
constexpr int PART_WORDS = HEAD_DIM + 2;
constexpr int SPLITS_A_LANE = (SPLITS + 31) / 32;
// Pairs of channels that a warp sums over the runs at a time.
constexpr int PAIRS = TOKENS < 4 ? TOKENS : 4;
static_assert(TILE == 8 * WARPS && THREADS == 256);

#define NEGATIVE_INFINITY __uint_as_float(0xff800000u)
typedef unsigned long long Word;

#ifdef __CUDACC__
__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void copy_async(uint4* to, const uint4* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ void load_matrices(unsigned (&to)[4], const uint4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}
__device__ void load_matrices_transposed(unsigned (&to)[4], const uint4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}
__device__ void store_word(Word* p, Word x) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
__device__ void store_words(Word* p, Word x, Word y) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(x), "l"(y) : "memory");
}
__device__ Word load_word(const Word* p) {
    Word x;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
    return x;
}
__device__ void load_words(const Word* p, Word& x, Word& y) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(x), "=l"(y) : "l"(p) : "memory");
}
__device__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ void let_others_go_on() {}
#else
__device__ void copy_async(uint4* to, const uint4* from) { *to = *from; }
__device__ void commit_copies() {}
template <int PENDING> __device__ void wait_for_copies() {}
__device__ void load_matrices(unsigned (&to)[4], const uint4* row) { cpu_load_matrices(to, row, false); }
__device__ void load_matrices_transposed(unsigned (&to)[4], const uint4* row) { cpu_load_matrices(to, row, true); }
__device__ void store_word(Word* p, Word x) { *p = x; }
__device__ void store_words(Word* p, Word x, Word y) { p[0] = x, p[1] = y; }
__device__ Word load_word(const Word* p) { return *p; }
__device__ void load_words(const Word* p, Word& x, Word& y) { x = p[0], y = p[1]; }
__device__ float power_of_2(float x) { return exp2f(x); }
__device__ void let_others_go_on() { cpu_rest(); }
#endif

__device__ Word make_word(unsigned data, unsigned turn) { return (Word)turn << 32 | data; }
// N words, or pairs of neighbouring words, all of them asked for before any is waited for: word i at `find(i)` if
// `is_mine(i)`, else 0.
template <int N, class Find, class IsMine>
__device__ void receive(unsigned (&to)[N], unsigned turn, Find find, IsMine is_mine) {
    Word x[N];
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = is_mine(i) ? load_word(find(i)) : make_word(0, turn);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        while ((unsigned)(x[i] >> 32) != turn) {
            let_others_go_on();
            x[i] = load_word(find(i));
        }
        to[i] = (unsigned)x[i];
    }
}
template <int N, class Find, class IsMine>
__device__ void receive_pairs(uint2 (&to)[N], unsigned turn, Find find, IsMine is_mine) {
    Word x[N], y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        x[i] = y[i] = make_word(0, turn);
        if (is_mine(i)) load_words(find(i), x[i], y[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        while ((unsigned)(x[i] >> 32) != turn || (unsigned)(y[i] >> 32) != turn) {
            let_others_go_on();
            load_words(find(i), x[i], y[i]);
        }
        to[i] = {(unsigned)x[i], (unsigned)y[i]};
    }
}
__device__ unsigned to_bf16_pair(float a, float b) { return to_bf16(a) | to_bf16(b) << 16; }

struct __align__(16) Shared {
    uint4 qkv[QKV_TILES * 8 * HIDDEN_STRIDE];
    uint4 out[OUT_TILES * 8 * INNER_STRIDE];
    uint4 keys[STAGES][TILE * HEAD_STRIDE];
    uint4 values[STAGES][TILE * HEAD_STRIDE];
    // The normalised tokens, then their heads.
    uint4 h[TOKENS * H_STRIDE];
    uint4 q[ROW_TILES * 16 * HEAD_STRIDE];
    uint4 probabilities[ROW_TILES * 16 * SCORE_STRIDE / 8];
    // The attention's between the projections.
    union {
        float scores[ROW_TILES * 16 * SCORE_STRIDE];
        float sums[WARPS][MOST_TILES][TOKENS][8];
    };
    float max[ROW_TILES * 16], sum[ROW_TILES * 16], factor[ROW_TILES * 16];
    float scale[TOKENS];
};
static_assert(sizeof(Shared) == SHARED_BYTES);

// Rows of a weight, 8 a tile, tile by tile of this program.
template <int TILES, int PIECES, int STRIDE> __device__ void copy_weight(uint4* to, const uint4* weight, int rows) {
    for (int j = 0; j < TILES; ++j) {
        const int first = 8 * (blockIdx.x + j * gridDim.x);
        if (first < rows)
            for (int i = threadIdx.x; i < 8 * PIECES; i += THREADS) {
                const int row = i / PIECES, piece = i % PIECES;
                copy_async(to + (j * 8 + row) * STRIDE + piece, weight + (size_t)(first + row) * PIECES + piece);
            }
    }
    commit_copies();
}

// sums (warp, tile, token, 8): each warp's part of h (T, INPUTS) times rows of a weight.
template <int TILES, int INPUTS, int STRIDE> __device__ void multiply_rows(Shared& s, const uint4* weight, int T) {
    constexpr int RUNS = INPUTS / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, piece = lane % 4;
    float c[TILES][2][4] = {};
    // Tokens past the last one are read as the last one, and dropped.
    const uint4* token = s.h + min(lane % 16, T - 1) * H_STRIDE + lane / 16;
    const uint4* row = weight + lane % 8 * STRIDE + lane / 8;
#pragma unroll
    for (int k = 0; k < (RUNS + WARPS - 1) / WARPS; ++k) {
        const int run = warp + k * WARPS;
        if (RUNS % WARPS && run >= RUNS) break;
        unsigned a[2][4], b[4];
        load_matrices(a[0], token + 4 * run);
        load_matrices(a[1], token + 4 * run + 2);
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            load_matrices(b, row + j * 8 * STRIDE + 4 * run);
            multiply_tile(c[j][0], a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1]);
            multiply_tile(c[j][1], a[1][0], a[1][1], a[1][2], a[1][3], b[2], b[3]);
        }
    }
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (g + k / 2 * 8 < T) s.sums[warp][j][g + k / 2 * 8][2 * piece + k % 2] = c[j][0][k] + c[j][1][k];
}

__device__ float sum_of_warps(const Shared& s, int tile, int t, int o) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += s.sums[w][tile][t][o];
    return sum;
}

// Tile i of a run of the cache: what is there of its rows `first..`, before `end`.
__device__ void copy_tile(Shared& s, int i, const uint4* keys, const uint4* values, int first, int end) {
    constexpr int PIECES = HEAD_DIM / 8;
    uint4 *k = s.keys[i % STAGES], *v = s.values[i % STAGES];
    first += i * TILE;
    for (int j = threadIdx.x; j < TILE * PIECES; j += THREADS) {
        const int row = j / PIECES, piece = j % PIECES, to = row * HEAD_STRIDE + piece;
        if (first + row < end) {
            const size_t from = (size_t)(first + row) * PIECES + piece;
            copy_async(k + to, keys + from);
            copy_async(v + to, values + from);
        } else
            // A probability of 0 must not meet what is no number.
            v[to] = make_uint4(0, 0, 0, 0);
    }
}

// A lane's words of a head, of its lower half and of its upper half, normalised and rotated.
__device__ uint2 rotate(unsigned a, unsigned b, const unsigned* norm, float eps, const float* cos, const float* sin,
                        int position) {
    const int lane = threadIdx.x % 32;
    const bool is_mine = lane < HALF_WORDS;
    float a0 = low(a), a1 = high(a), b0 = low(b), b1 = high(b);
    if (norm) {
        const float scale = rsqrtf(sum_of_lanes(a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1) / HEAD_DIM + eps);
        if (is_mine) {
            const unsigned of_a = norm[lane], of_b = norm[HALF_WORDS + lane];
            a = to_bf16_pair(a0 * scale * low(of_a), a1 * scale * high(of_a));
            b = to_bf16_pair(b0 * scale * low(of_b), b1 * scale * high(of_b));
            a0 = low(a), a1 = high(a), b0 = low(b), b1 = high(b);
        }
    }
    if (!is_mine) return {0, 0};
    const size_t angle = (size_t)position * (HEAD_DIM / 2) + 2 * lane;
    const float c0 = cos[angle], c1 = cos[angle + 1], s0 = sin[angle], s1 = sin[angle + 1];
    return {to_bf16_pair(a0 * c0 - b0 * s0, a1 * c1 - b1 * s1), to_bf16_pair(b0 * c0 + a0 * s0, b1 * c1 + a1 * s1)};
}

// out (T, HIDDEN) = x + W_out attention(W_qkv norm(x)), and T new rows of the caches (KV_HEADS, capacity, HEAD_DIM).
// Words: qkv (T, OUTPUTS / 2), parts (SPLITS, T * HEADS, PART_WORDS), heads (T, INNER / 2).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_block(const uint4* x, int T, const uint4* norm_weight, float eps, const uint4* qkv_weight,
                const unsigned short* qkv_bias, const uint4* out_weight, uint4* k_cache, uint4* v_cache, int capacity,
                const int* context_len, const float* cos, const float* sin, const unsigned* q_norm,
                const unsigned* k_norm, float head_eps, float scale_log2, unsigned* num_turns, Word* qkv_words,
                Word* part_words, Word* head_words, const unsigned short* next_weight, int distance, int num_bytes,
                unsigned short* out) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, piece = lane % 4;
    DYNAMIC_SHARED(uint4, memory);
    Shared& s = *(Shared*)memory;

    // The positions, the new ones included, are cut into runs; a program takes one, of one key/value head.
    const int length = *context_len, end = length + T;
    const int run = (end + 16 * SPLITS - 1) / (16 * SPLITS) * 16, num_runs = (end + run - 1) / run;
    const int split = blockIdx.x % SPLITS, kv_head = blockIdx.x / SPLITS;
    const int first = split * run, last = min(first + run, end);
    const int num_tiles = kv_head < KV_HEADS && first < end ? (last - first + TILE - 1) / TILE : 0;
    const size_t head_rows = (size_t)min(kv_head, KV_HEADS - 1) * capacity * (HEAD_DIM / 8);
    uint4 *keys = k_cache + head_rows, *values = v_cache + head_rows;

    copy_weight<QKV_TILES, HIDDEN / 8, HIDDEN_STRIDE>(s.qkv, qkv_weight, OUTPUTS);
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        if (i < num_tiles) copy_tile(s, i, keys, values, first, min(last, length));
        commit_copies();
    }
    copy_weight<OUT_TILES, INNER / 8, INNER_STRIDE>(s.out, out_weight, HIDDEN);
    if (threadIdx.x < HIDDEN / 64) prefetch((const char*)norm_weight + threadIdx.x * 128);
    let_consumers_start();
    wait_for_producers();

    // Nobody is left behind with an old turn: the last program to count it has heard of all others by then.
    const unsigned turn = *(const volatile unsigned*)num_turns + 1;
    for (int t = warp; t < T; t += WARPS) {
        float even = 0.f, odd = 0.f;
#pragma unroll
        for (int i = lane; i < HIDDEN / 8; i += 32) {
            const uint4 of_x = x[(size_t)t * (HIDDEN / 8) + i], of_norm = norm_weight[i];
            const unsigned a[4] = {of_x.x, of_x.y, of_x.z, of_x.w}, b[4] = {of_norm.x, of_norm.y, of_norm.z, of_norm.w};
            unsigned y[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                even += low(a[k]) * low(a[k]);
                odd += high(a[k]) * high(a[k]);
                y[k] = to_bf16_pair(low(a[k]) * low(b[k]), high(a[k]) * high(b[k]));
            }
            s.h[t * H_STRIDE + i] = make_uint4(y[0], y[1], y[2], y[3]);
        }
        const float sum = sum_of_lanes(even + odd);
        if (lane == 0) s.scale[t] = rsqrtf(sum / HIDDEN + eps);
    }
    wait_for_copies<STAGES + 1>();
    __syncthreads();
    multiply_rows<QKV_TILES, HIDDEN, HIDDEN_STRIDE>(s, s.qkv, T);
    __syncthreads();
    // What a thread puts together of a projection: two outputs of a token.
    for (int i = threadIdx.x; i < QKV_TILES * T * 4; i += THREADS) {
        const int pair = i % 4, tile = i / 4 % QKV_TILES, t = i / 4 / QKV_TILES;
        const int o = 8 * (blockIdx.x + tile * gridDim.x) + 2 * pair;
        if (o >= OUTPUTS) continue;
        float a = sum_of_warps(s, tile, t, 2 * pair) * s.scale[t];
        float b = sum_of_warps(s, tile, t, 2 * pair + 1) * s.scale[t];
        if (qkv_bias) a += low(qkv_bias[o]), b += low(qkv_bias[o + 1]);
        store_word(qkv_words + (size_t)t * (OUTPUTS / 2) + o / 2, make_word(to_bf16_pair(a, b), turn));
    }
    if (threadIdx.x == 0 && num_bytes) prefetch_run(next_weight + (size_t)distance * blockIdx.x, num_bytes);

    if (num_tiles) {
        const int rows = T * GROUP;
        unsigned* q = (unsigned*)s.q;
        constexpr int ROWS_A_WARP = (TOKENS * GROUP + WARPS - 1) / WARPS;
        unsigned halves[2 * ROWS_A_WARP];
        const auto find_row = [&](int i) { return warp + i * WARPS; };
        const auto find_half = [&](int i) {
            const int m = find_row(i / 2), head = kv_head * GROUP + m % GROUP;
            const int at = head * (HEAD_DIM / 2) + i % 2 * HALF_WORDS + lane;
            return qkv_words + (size_t)(m / GROUP) * (OUTPUTS / 2) + at;
        };
        receive(halves, turn, find_half, [&](int i) { return find_row(i / 2) < rows && lane < HALF_WORDS; });
#pragma unroll
        for (int i = 0; i < ROWS_A_WARP; ++i) {
            const int m = find_row(i);
            if (m >= rows) break;
            const uint2 pair = rotate(halves[2 * i], halves[2 * i + 1], q_norm, head_eps, cos, sin, length + m / GROUP);
            if (lane < HALF_WORDS) {
                q[m * HEAD_STRIDE * 4 + lane] = pair.x;
                q[m * HEAD_STRIDE * 4 + HALF_WORDS + lane] = pair.y;
            }
        }
        for (int m = threadIdx.x; m < rows; m += THREADS) s.max[m] = NEGATIVE_INFINITY, s.sum[m] = 0.f;
        float c[ROW_TILES][VALUE_TILES][4] = {};
        for (int i = 0; i < num_tiles; ++i) {
            if (i < STAGES) wait_for_copies<STAGES>();
            else wait_for_copies<STAGES - 1>();
            const int begin = first + i * TILE;
            // The step's own rows, here and in the cache.
            for (int p = max(begin, length) + warp; p < min(begin + TILE, last); p += WARPS) {
                const Word* token = qkv_words + (size_t)(p - length) * (OUTPUTS / 2);
                const Word* words = token + (HEADS + kv_head) * (HEAD_DIM / 2) + lane;
                // Both halves of the key, and of the value.
                unsigned got[4];
                const auto find = [&](int i) { return words + i / 2 * KV_HEADS * (HEAD_DIM / 2) + i % 2 * HALF_WORDS; };
                receive(got, turn, find, [&](int) { return lane < HALF_WORDS; });
                const uint2 key = rotate(got[0], got[1], k_norm, head_eps, cos, sin, p);
                if (lane < HALF_WORDS) {
                    const int to = (p - begin) * HEAD_STRIDE * 4 + lane;
                    unsigned *k = (unsigned*)s.keys[i % STAGES] + to, *v = (unsigned*)s.values[i % STAGES] + to;
                    unsigned* k_row = (unsigned*)(keys + (size_t)p * (HEAD_DIM / 8)) + lane;
                    unsigned* v_row = (unsigned*)(values + (size_t)p * (HEAD_DIM / 8)) + lane;
                    k[0] = k_row[0] = key.x, k[HALF_WORDS] = k_row[HALF_WORDS] = key.y;
                    v[0] = v_row[0] = got[2], v[HALF_WORDS] = v_row[HALF_WORDS] = got[3];
                }
            }
            __syncthreads();
            // Scores: a warp takes 8 positions.
            unsigned b[HEAD_DIM / 32][4];
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 32; ++d)
                load_matrices(b[d], s.keys[i % STAGES] + (8 * warp + lane % 8) * HEAD_STRIDE + 4 * d + lane / 8);
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) {
                float score[2][4] = {};
#pragma unroll
                for (int d = 0; d < HEAD_DIM / 16; ++d) {
                    unsigned a[4];
                    load_matrices(a, s.q + (16 * m + lane % 16) * HEAD_STRIDE + 2 * d + lane / 16);
                    multiply_tile(score[d % 2], a[0], a[1], a[2], a[3], b[d / 2][d % 2 * 2], b[d / 2][d % 2 * 2 + 1]);
                }
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int row = 16 * m + g + k / 2 * 8, p = 8 * warp + 2 * piece + k % 2;
                    const bool is_seen = begin + p < last && begin + p <= length + row / GROUP;
                    const float sum = (score[0][k] + score[1][k]) * scale_log2;
                    s.scores[row * SCORE_STRIDE + p] = is_seen ? sum : NEGATIVE_INFINITY;
                }
            }
            __syncthreads();
            for (int m = warp; m < rows; m += WARPS) {
                const float a = s.scores[m * SCORE_STRIDE + 2 * lane], b = s.scores[m * SCORE_STRIDE + 2 * lane + 1];
                float most = fmaxf(a, b);
                for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(FULL, most, o));
                const float old = s.max[m], now = fmaxf(old, most), base = now == NEGATIVE_INFINITY ? 0.f : now;
                const float p = power_of_2(a - base), r = power_of_2(b - base), sum = sum_of_lanes(p + r);
                ((unsigned*)s.probabilities)[(m * SCORE_STRIDE) / 2 + lane] = to_bf16_pair(p, r);
                __syncwarp();
                if (lane == 0) {
                    const float factor = power_of_2(old - base);
                    s.max[m] = now, s.factor[m] = factor, s.sum[m] = s.sum[m] * factor + sum;
                }
            }
            __syncthreads();
            // Values: a warp takes 8 or 16 channels.
            const uint4* channels = s.values[i % STAGES] + lane * HEAD_STRIDE + warp * VALUE_TILES;
            unsigned v[TILE / 32][VALUE_TILES][4];
#pragma unroll
            for (int k = 0; k < TILE / 32; ++k)
#pragma unroll
                for (int n = 0; n < VALUE_TILES; ++n)
                    load_matrices_transposed(v[k][n], channels + 32 * k * HEAD_STRIDE + n);
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) {
                const float of_low = s.factor[16 * m + g], of_high = s.factor[16 * m + g + 8];
#pragma unroll
                for (int n = 0; n < VALUE_TILES; ++n)
#pragma unroll
                    for (int k = 0; k < 4; ++k) c[m][n][k] *= k < 2 ? of_low : of_high;
#pragma unroll
                for (int k = 0; k < TILE / 16; ++k) {
                    unsigned a[4];
                    load_matrices(a, s.probabilities + (16 * m + lane % 16) * (SCORE_STRIDE / 8) + 2 * k + lane / 16);
#pragma unroll
                    for (int n = 0; n < VALUE_TILES; ++n)
                        multiply_tile(c[m][n], a[0], a[1], a[2], a[3], v[k / 2][n][k % 2 * 2],
                                      v[k / 2][n][k % 2 * 2 + 1]);
                }
            }
            if (i + STAGES < num_tiles) {
                __syncthreads();
                copy_tile(s, i + STAGES, keys, values, first, min(last, length));
            }
            commit_copies();
        }
        const auto find_part = [&](int m) {
            const int row = m / GROUP * HEADS + kv_head * GROUP + m % GROUP;
            return part_words + ((size_t)split * T * HEADS + row) * PART_WORDS;
        };
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 16 * m + g + 8 * half;
                if (row >= rows) continue;
#pragma unroll
                for (int n = 0; n < VALUE_TILES; ++n)
                    store_words(find_part(row) + 8 * (warp * VALUE_TILES + n) + 2 * piece,
                                make_word(__float_as_uint(c[m][n][2 * half]), turn),
                                make_word(__float_as_uint(c[m][n][2 * half + 1]), turn));
            }
        for (int m = threadIdx.x; m < rows; m += THREADS)
            store_words(find_part(m) + HEAD_DIM, make_word(__float_as_uint(s.max[m]), turn),
                        make_word(__float_as_uint(s.sum[m]), turn));
    }

    // Sums over the runs: a warp takes a few channels of a row, a lane a run.
    const int num_chunks = T * HEADS * (HEAD_DIM / (2 * PAIRS));
    for (int chunk = warp * gridDim.x + blockIdx.x; chunk < num_chunks; chunk += WARPS * gridDim.x) {
        const int row = chunk / (HEAD_DIM / (2 * PAIRS)), channel = chunk % (HEAD_DIM / (2 * PAIRS)) * 2 * PAIRS;
        // Of each of a lane's runs: channels, then maximum and sum.
        uint2 got[SPLITS_A_LANE * (PAIRS + 1)];
        const auto find_run = [&](int i) { return lane + i / (PAIRS + 1) * 32; };
        const auto find = [&](int i) {
            const Word* part = part_words + ((size_t)find_run(i) * T * HEADS + row) * PART_WORDS;
            return part + (i % (PAIRS + 1) == PAIRS ? HEAD_DIM : channel + 2 * (i % (PAIRS + 1)));
        };
        receive_pairs(got, turn, find, [&](int i) { return find_run(i) < num_runs; });
        float most = NEGATIVE_INFINITY, sum = 0.f, c[2 * PAIRS] = {};
#pragma unroll
        for (int j = 0; j < SPLITS_A_LANE; ++j)
            if (lane + 32 * j < num_runs) most = fmaxf(most, __uint_as_float(got[j * (PAIRS + 1) + PAIRS].x));
        for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(FULL, most, o));
#pragma unroll
        for (int j = 0; j < SPLITS_A_LANE; ++j) {
            const uint2* mine = got + j * (PAIRS + 1);
            const float weight = lane + 32 * j < num_runs ? power_of_2(__uint_as_float(mine[PAIRS].x) - most) : 0.f;
            sum += weight * __uint_as_float(mine[PAIRS].y);
#pragma unroll
            for (int k = 0; k < PAIRS; ++k) {
                c[2 * k] += weight * __uint_as_float(mine[k].x);
                c[2 * k + 1] += weight * __uint_as_float(mine[k].y);
            }
        }
        sum = sum_of_lanes(sum);
#pragma unroll
        for (int k = 0; k < 2 * PAIRS; ++k) c[k] = quotient(sum_of_lanes(c[k]), sum);
        if (lane == 0)
#pragma unroll
            for (int k = 0; k < PAIRS; ++k)
                store_word(head_words + (row * HEAD_DIM + channel) / 2 + k,
                           make_word(to_bf16_pair(c[2 * k], c[2 * k + 1]), turn));
    }

    const auto find_output = [&](int i) { return 8 * (blockIdx.x + i / 4 % OUT_TILES * gridDim.x) + 2 * (i % 4); };
    const auto find_token = [&](int i) { return i / 4 / OUT_TILES; };
    constexpr int PAIRS_A_THREAD = (TOKENS * (INNER / 4) + THREADS - 1) / THREADS;
    constexpr int AT_ONCE = PAIRS_A_THREAD < 6 ? PAIRS_A_THREAD : 6;
    for (int first_pair = threadIdx.x; first_pair < T * (INNER / 4); first_pair += AT_ONCE * THREADS) {
        const auto find_pair = [&](int i) { return first_pair + i * THREADS; };
        const auto is_mine = [&](int i) { return find_pair(i) < T * (INNER / 4); };
        uint2 got[AT_ONCE];
        receive_pairs(got, turn, [&](int i) { return head_words + 2 * find_pair(i); }, is_mine);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (is_mine(i))
                ((uint2*)(s.h + find_pair(i) / (INNER / 4) * H_STRIDE))[find_pair(i) % (INNER / 4)] = got[i];
    }
    wait_for_copies<0>();
    __syncthreads();
    multiply_rows<OUT_TILES, INNER, INNER_STRIDE>(s, s.out, T);
    __syncthreads();
    for (int i = threadIdx.x; i < OUT_TILES * T * 4; i += THREADS) {
        const int o = find_output(i), t = find_token(i);
        if (o >= HIDDEN) continue;
        const size_t to = ((size_t)t * HIDDEN + o) / 2;
        const unsigned residual = ((const unsigned*)x)[to];
        const float a = low(residual) + sum_of_warps(s, i / 4 % OUT_TILES, t, o % 8);
        const float b = high(residual) + sum_of_warps(s, i / 4 % OUT_TILES, t, o % 8 + 1);
        ((unsigned*)out)[to] = to_bf16_pair(a, b);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *num_turns = turn;
}
"""
)


@cache
def _num_programs(device: torch.device) -> int:
    """One program per multiprocessor; on a CPU seven, which go on in turn, stand for many."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 7


class _Words:
    """What the programs of a launch tell each other; launches of one device follow each other."""

    def __init__(self, device: torch.device, num_outputs: int, num_rows: int, head_dim: int, num_splits: int) -> None:
        def make(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.qkv = make(MAX_TOKENS, num_outputs // 2)
        self.parts = make(num_splits, num_rows, head_dim + 2)
        self.heads = make(num_rows, head_dim // 2)


@cache
def _words(device: torch.device, num_outputs: int, num_rows: int, head_dim: int, num_splits: int) -> _Words:
    return _Words(device, num_outputs, num_rows, head_dim, num_splits)


@cache
def _num_turns(device: torch.device) -> torch.Tensor:
    """() int32: how many launches there were; it is their number that words carry."""
    return torch.zeros((), dtype=torch.int32, device=device)


def _tokens(T: int) -> int:
    """Tokens that a kernel has room for: a few kernels serve all widths."""
    return next(count for count in (1, 4, MAX_TOKENS) if count >= T)


@cache
def _definitions(
    D: int, H: int, G: int, K: int, tokens: int, num_programs: int
) -> tuple[tuple[tuple[str, int], ...], int] | None:
    """Give the sizes that a kernel is compiled for, and its shared memory; None where that is more than there is."""
    outputs, inner, warps = (H + 2 * G) * K, H * K, WARPS
    qkv_tiles, out_tiles = (-(-rows // (8 * num_programs)) for rows in (outputs, D))
    hidden, in_heads, in_head = D // 8 | 1, inner // 8 | 1, K // 8 | 1
    row_tiles = -(-tokens * (H // G) // 16)
    pieces = qkv_tiles * 8 * hidden + out_tiles * 8 * in_heads + 2 * STAGES * TILE * in_head
    pieces += tokens * max(hidden, in_heads) + row_tiles * 16 * (in_head + (TILE + 8) // 8)
    floats = max(row_tiles * 16 * (TILE + 8), warps * max(qkv_tiles, out_tiles) * tokens * 8)
    floats += 3 * row_tiles * 16 + tokens
    num_bytes = -(-(16 * pieces + 4 * floats) // 16) * 16
    if num_bytes > _MAX_SHARED_BYTES:
        return None
    return (
        ("HIDDEN", D),
        ("HEADS", H),
        ("KV_HEADS", G),
        ("HEAD_DIM", K),
        ("TOKENS", tokens),
        ("SPLITS", num_programs // G),
        ("QKV_TILES", qkv_tiles),
        ("OUT_TILES", out_tiles),
        ("TILE", TILE),
        ("STAGES", STAGES),
        ("WARPS", warps),
        ("SHARED_BYTES", num_bytes),
    ), num_bytes


def can_run(x: torch.Tensor, k_cache: torch.Tensor, num_heads: int) -> bool:
    """Say whether one launch takes the attention of a step's tokens x (T, D) over a cache (G, S, K)."""
    (T, D), (G, _, K) = x.shape, k_cache.shape
    is_bf16 = x.dtype == k_cache.dtype == torch.bfloat16 and x.is_contiguous()
    fits_tiles = D % 32 == 0 and K in (64, 128) and num_heads % G == 0
    num_programs = _num_programs(x.device)
    if not (HAS_NVRTC and is_bf16 and fits_tiles and T <= MAX_TOKENS and num_programs >= G):
        return False
    # Each program has a part of the sums over the runs.
    if T * num_heads * K < 2 * min(_tokens(T), 4) * num_programs:
        return False
    return _definitions(D, num_heads, G, K, _tokens(T), num_programs) is not None


def run(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    qkv_proj: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    o_proj: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    upcoming: Sequence[object],
) -> torch.Tensor:
    """Launch `attention_block` for what `can_run` says it can; arguments and result are described there."""
    (T, D), (G, S, K), device = x.shape, k_cache.shape, x.device
    num_programs, tokens = _num_programs(device), _tokens(T)
    sizes = _definitions(D, num_heads, G, K, tokens, num_programs)
    assert sizes is not None
    definitions, shared_bytes = sizes
    if pdl_options()["PDL"]:
        definitions = (*definitions, ("HAS_PDL", 1))
    kernel = load_kernel(_SOURCE, "attention_block", tuple((key, str(value)) for key, value in definitions), device)
    words = _words(device, (num_heads + 2 * G) * K, MAX_TOKENS * num_heads, K, num_programs // G)
    ahead = next(iter(shares(upcoming, READ_AHEAD_BYTES, num_programs)), None)
    out = torch.empty_like(x)
    launch(
        kernel, (num_programs, 1, 1), 32 * WARPS,
        x, T, norm_weight, eps, qkv_proj, qkv_bias, o_proj, k_cache, v_cache, S, context_len, cos, sin,
        q_norm, k_norm, eps, K**-0.5 * math.log2(math.e), _num_turns(device), words.qkv, words.parts, words.heads,
        *((None, 0, 0) if ahead is None else ahead), out,
        shared_bytes=shared_bytes,
    )  # fmt: skip
    return out
