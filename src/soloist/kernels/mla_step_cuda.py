"""Latent attention of a step with few query rows in CUDA C++; equations and references are in `kernels/mla.py`.

A program has some of the cached positions, in shared memory before the query is there, once as keys and as values. Its
warps share the latent dims: each multiplies its 64 of the query with all positions of a block, the parts of a score are
summed through shared memory, and then each weighs its 64 dims of the values. The programs of a cluster merge what they
have before it goes to memory.

Source: DeepSeek-V2 (arXiv 2405.04434), absorbed form; FlashDecoding split over keys.
"""

import torch

from soloist.kernels.launch import pdl_options
from soloist.kernels.nvrtc import PRELUDE, launch, load_kernel

# Most query rows, tokens times heads, that this form takes.
MAX_QUERY_ROWS = 32
# Latent dims of a warp; positions of a block times tiles of 16 query rows.
_WARP_DIMS = 64
_BLOCK = 64
# Shared memory that blocks on their way may take.
_STAGE_BYTES = 152 * 1024

_SOURCE = (
    PRELUDE
    + r"""
// Dims of a position, of which RANK are values as well; a warp has 64 of them.
constexpr int DIMS = RANK + ROTARY, WARPS = DIMS / 64, VALUE_WARPS = RANK / 64, THREADS = 32 * WARPS;
constexpr int QUERY_ROWS = 16 * TILES;
// Rows in shared memory whose neighbours lie in other banks: bf16 of a position, scores, weights of positions.
constexpr int STRIDE = DIMS + 8, SCORE_STRIDE = BLOCK + 8, WEIGHT_STRIDE = BLOCK + 8;
// Four scores a thread.
constexpr int PER_ROW = BLOCK / 4, SCORERS = QUERY_ROWS * PER_ROW;
constexpr int PIECES = DIMS / 8;

#ifdef __CUDACC__
__device__ void multiply_tile(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
// Four tiles of 8 x 8 bf16: lane l has the address of row l % 8 of tile l / 8, and gets two neighbours of row l / 4 of
// each.
__device__ void load_tiles(unsigned* x, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}
// The same, two neighbours of column l / 4.
__device__ void load_transposed_tiles(unsigned* x, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}
// 16 bytes from global to shared memory that nobody waits for; zeros where there is nothing.
__device__ void copy_piece(uint4* to, const uint4* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(shared_address(to)), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}
__device__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
__device__ void copy_piece(uint4* to, const uint4* from, bool is_there) {
    *to = is_there ? *from : make_uint4(0, 0, 0, 0);
}
__device__ void end_copies() {}
template <int PENDING> __device__ void wait_for_copies() {}
__device__ float power_of_two(float x) { return exp2f(x); }
#endif

template <int LANES> __device__ float largest_of_lanes(float x) {
#pragma unroll
    for (int o = LANES / 2; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, o));
    return x;
}

// Grid: splits of the positions. partial (splits, rows, RANK), normalised within its split; its maximum and sum
// (splits, rows), in base 2. A split without positions leaves zeros. Row m = t * NUM_HEADS + head sees the positions up
// to context_len + t.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend(const unsigned short* query, const uint4* latent_cache, const int* context_len, float* partial,
       float* partial_max, float* partial_sum, int rows, float scale) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, piece = lane % 4;
    DYNAMIC_SHARED(uint4, blocks);  // STAGES of BLOCK positions
    __shared__ __align__(16) float scores[WARPS][QUERY_ROWS][SCORE_STRIDE];
    __shared__ __align__(16) unsigned short weights[QUERY_ROWS][WEIGHT_STRIDE];
    __shared__ float shrink[QUERY_ROWS], total[QUERY_ROWS];

    // Written by the step before this one, as the positions up to it.
    const int num_old = *context_len, num_positions = num_old + (rows - 1) / NUM_HEADS + 1;
    const int share = (num_positions + (int)gridDim.x * 16 - 1) / ((int)gridDim.x * 16) * 16;
    const int begin = min((int)blockIdx.x * share, num_positions), end = min(begin + share, num_positions);
    const int num_blocks = (end - begin + BLOCK - 1) / BLOCK;
    // A block's positions from `first` on and below `last`; zeros where none is left.
    const auto copy_block = [&](int block, int first, int last) {
        uint4* to = blocks + block % STAGES * (BLOCK * STRIDE / 8);
        for (int i = threadIdx.x; i < BLOCK * PIECES; i += THREADS) {
            const int row = i / PIECES, p = i % PIECES, position = begin + block * BLOCK + row;
            const bool is_there = position < end;
            const uint4* from = latent_cache + (size_t)(is_there ? position : 0) * PIECES + p;
            if (position >= first && position < last) copy_piece(to + row * (STRIDE / 8) + p, from, is_there);
        }
    };
    constexpr int ALL = 0x7fffffff;
#pragma unroll
    for (int block = 0; block < STAGES; ++block)
        if (block < num_blocks) copy_block(block, 0, min(num_old, end));
    wait_for_producers();
    let_consumers_start();
#pragma unroll
    for (int block = 0; block < STAGES; ++block) {
        if (block < num_blocks) copy_block(block, min(num_old, end), ALL);
        end_copies();
    }

    // This warp's dims of the query.
    unsigned q[TILES][4][4];
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int row = 16 * m + g + n % 2 * 8, dim = 64 * warp + 16 * i + n / 2 * 8 + 2 * piece;
                q[m][i][n] = row < rows ? *(const unsigned*)(query + (size_t)row * DIMS + dim) : 0u;
            }
    float out[TILES][8][4] = {};
    // Of a scorer's row; the sum is of its own positions.
    const int scorer_row = threadIdx.x / PER_ROW, scorer_at = threadIdx.x % PER_ROW * 4;
    const int limit = num_old + scorer_row / NUM_HEADS;
    float highest = -3e38f, sum = 0.f;

    for (int block = 0; block < num_blocks; ++block) {
        const uint4* here = blocks + block % STAGES * (BLOCK * STRIDE / 8);
        wait_for_copies<STAGES - 1>();
        __syncthreads();
#pragma unroll
        for (int n = 0; n < BLOCK / 8; ++n) {
            float c[TILES][4] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned keys[4];
                load_tiles(keys, here + (8 * n + lane % 8) * (STRIDE / 8) + 8 * warp + 4 * half + lane / 8);
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int m = 0; m < TILES; ++m) {
                        const unsigned* a = q[m][2 * half + i];
                        multiply_tile(c[m], a[0], a[1], a[2], a[3], keys[2 * i], keys[2 * i + 1]);
                    }
            }
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    *(uint2*)&scores[warp][16 * m + 8 * i + g][8 * n + 2 * piece] =
                        make_uint2(__float_as_uint(c[m][2 * i]), __float_as_uint(c[m][2 * i + 1]));
        }
        __syncthreads();
        if (threadIdx.x < SCORERS) {
            float x[4] = {};
#pragma unroll
            for (int i = 0; i < WARPS; ++i) {
                const uint4 four = *(const uint4*)&scores[i][scorer_row][scorer_at];
                x[0] += __uint_as_float(four.x), x[1] += __uint_as_float(four.y);
                x[2] += __uint_as_float(four.z), x[3] += __uint_as_float(four.w);
            }
            const int position = begin + block * BLOCK + scorer_at;
            float most = -3e38f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[i] = position + i < end && position + i <= limit ? x[i] * (scale * 1.4426950408889634f) : -3e38f;
                most = fmaxf(most, x[i]);
            }
            most = fmaxf(highest, largest_of_lanes<PER_ROW>(most));
            const float smaller = power_of_two(highest - most);
            sum *= smaller;
            unsigned bits[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float weight = x[i] > -3e38f ? power_of_two(x[i] - most) : 0.f;
                sum += weight;
                bits[i] = to_bf16(weight);
            }
            *(uint2*)&weights[scorer_row][scorer_at] = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
            if (scorer_at == 0) shrink[scorer_row] = smaller;
            highest = most;
        }
        __syncthreads();
        if (warp < VALUE_WARPS) {
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float smaller = shrink[16 * m + g + i / 2 * 8];
#pragma unroll
                    for (int n = 0; n < 8; ++n) out[m][n][i] *= smaller;
                }
#pragma unroll
            for (int k = 0; k < BLOCK / 16; ++k) {
                unsigned a[TILES][4];
#pragma unroll
                for (int m = 0; m < TILES; ++m)
                    load_tiles(a[m], &weights[16 * m + lane % 16][16 * k + lane / 16 * 8]);
#pragma unroll
                for (int n = 0; n < 8; n += 2) {
                    unsigned values[4];
                    const uint4* row = here + (16 * k + lane % 16) * (STRIDE / 8);
                    load_transposed_tiles(values, row + 8 * warp + n + lane / 16);
#pragma unroll
                    for (int m = 0; m < TILES; ++m) {
                        multiply_tile(out[m][n], a[m][0], a[m][1], a[m][2], a[m][3], values[0], values[1]);
                        multiply_tile(out[m][n + 1], a[m][0], a[m][1], a[m][2], a[m][3], values[2], values[3]);
                    }
                }
            }
        }
        if (block + STAGES < num_blocks) {
            __syncthreads();
            copy_block(block + STAGES, 0, ALL);
        }
        end_copies();
    }

    if (threadIdx.x < SCORERS) {
        sum = sum_of_lanes<PER_ROW>(sum);
        if (scorer_at == 0) {
            total[scorer_row] = sum;
            if (scorer_row < rows) {
                partial_max[blockIdx.x * rows + scorer_row] = highest;
                partial_sum[blockIdx.x * rows + scorer_row] = sum;
            }
        }
    }
    __syncthreads();
    if (warp < VALUE_WARPS)
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = 16 * m + g + 8 * i;
                if (row >= rows) continue;
                const float factor = total[row] > 0.f ? 1.f / total[row] : 0.f;
                float* to = partial + ((size_t)blockIdx.x * rows + row) * RANK + 64 * warp + 2 * piece;
#pragma unroll
                for (int n = 0; n < 8; ++n)
                    *(uint2*)(to + 8 * n) = make_uint2(__float_as_uint(out[m][n][2 * i] * factor),
                                                       __float_as_uint(out[m][n][2 * i + 1] * factor));
            }
}
"""
)


def can_run(query: torch.Tensor, latent_rank: int) -> bool:
    """Say whether this form takes absorbed queries (T, H, R+P) of latents of rank R."""
    T, H, X = query.shape
    is_even = latent_rank % _WARP_DIMS == 0 and X % _WARP_DIMS == 0 and X <= 1024
    return query.dtype == torch.bfloat16 and T * H <= MAX_QUERY_ROWS and is_even


def attend(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    context_len: torch.Tensor,
    partial: torch.Tensor,
    partial_max: torch.Tensor,
    partial_sum: torch.Tensor,
    scale: float,
) -> None:
    """Launch the attention of one step, what `can_run` says it can.

    Args:
        query: (T, H, R+P) bf16, absorbed.
        latent_cache: (S, R+P) bf16, this step's rows written.
        context_len: () int32.
        partial: (splits, T*H, R) fp32, written.
        partial_max: (splits, T*H) fp32, written.
        partial_sum: likewise.
        scale: of the scores.
    """
    T, H, X = query.shape
    R = partial.shape[2]
    tiles = next(n for n in (1, 2, 4) if 16 * n >= T * H)
    block = _BLOCK // tiles
    position_bytes = 2 * (X + 8)
    stages = max(1, min(4, _STAGE_BYTES // (block * position_bytes)))
    definitions = {"RANK": R, "ROTARY": X - R, "NUM_HEADS": H, "TILES": tiles, "BLOCK": block, "STAGES": stages}
    if pdl_options()["PDL"]:
        definitions["HAS_PDL"] = 1
    launch(
        load_kernel(_SOURCE, "attend", tuple((k, str(v)) for k, v in definitions.items()), query.device),
        (partial.shape[0], 1, 1), X // _WARP_DIMS * 32,
        query, latent_cache, context_len, partial, partial_max, partial_sum, T * H, scale,
        shared_bytes=stages * block * position_bytes,
    )  # fmt: skip
