"""Latent attention of a step in CUDA C++; equations and references are in `kernels/mla.py`.

A program has some of the query rows, tokens times heads, and some of the cached positions, which are in shared memory
before the query is there, once as keys and as values. Its warps share the latent dims: each multiplies its 64 of the
query, held in registers, with all positions of a block, the parts of a score are summed through shared memory, and then
each weighs its 64 dims of the values.

Source: DeepSeek-V2 (arXiv 2405.04434), absorbed form; FlashDecoding split over keys.
"""

import torch

from soloist.kernels.launch import pdl_options
from soloist.kernels.nvrtc import PRELUDE, launch, load_kernel

# Dims that this form takes, with and without rotary; positions of a block.
_RANK, _ROTARY = 512, 64
_BLOCK = 32
# Most query rows of a program, in tiles of 16, and blocks on their way by their number: one tile leaves room for a
# program of another launch.
_MAX_TILES = 3
_STAGES = {1: 2, 2: 3, 3: 3}
# Programs that fill a GPU, and most splits of the positions.
_NUM_PROGRAMS = 132
_MAX_SPLITS = 128

_SOURCE = (
    PRELUDE
    + r"""
// Dims of a position, of which RANK are values as well: a warp has 64 of these. Of the rotary ones it has 16, for the
// eights of positions whose number has the parity of its half of the warps.
constexpr int DIMS = RANK + ROTARY, WARPS = RANK / 64, THREADS = 32 * WARPS;
static_assert(ROTARY / 16 * 2 == WARPS && BLOCK == 32, "");
constexpr int QUERY_ROWS = 16 * TILES;
// Rows in shared memory whose neighbours lie in other banks: bf16 of a position, scores, weights of positions.
constexpr int STRIDE = DIMS + 8, SCORE_STRIDE = BLOCK + 8, WEIGHT_STRIDE = BLOCK + 8;
// Fours of scores that a thread has of a row, and threads of a row.
constexpr int FOURS = TILES > 2 ? 2 : 1, PER_ROW = BLOCK / (4 * FOURS), SCORERS = QUERY_ROWS * PER_ROW;
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

// Grid: splits of the positions, for each all tiles of rows. partial (splits, rows, RANK), normalised within its split;
// its maximum and sum (splits, rows), in base 2. A split without positions leaves zeros. Row m = t * NUM_HEADS + head
// sees the positions up to context_len + t. Dynamic shared memory: STAGES blocks, then each warp's scores.
extern "C" __global__ void __launch_bounds__(THREADS, TILES > 1 ? 1 : 2)
attend(const unsigned short* query, const uint4* latent_cache, const int* context_len, float* partial,
       float* partial_max, float* partial_sum, int rows, int row_tiles, float scale) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, piece = lane % 4;
    const int split = blockIdx.x / row_tiles, first_row = blockIdx.x % row_tiles * QUERY_ROWS;
    const int splits = gridDim.x / row_tiles;
    DYNAMIC_SHARED(uint4, blocks);
    auto& scores = *(float(*)[WARPS][QUERY_ROWS][SCORE_STRIDE])(blocks + STAGES * (BLOCK * STRIDE / 8));
    __shared__ __align__(16) unsigned short weights[QUERY_ROWS][WEIGHT_STRIDE];
    __shared__ float shrink[QUERY_ROWS], total[QUERY_ROWS];

    // Written by the step before this one, as the positions up to it.
    const int num_old = *context_len, num_positions = num_old + (rows - 1) / NUM_HEADS + 1;
    const int share = (num_positions + splits * 16 - 1) / (splits * 16) * 16;
    const int begin = min(split * share, num_positions), end = min(begin + share, num_positions);
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

    // This warp's dims of the query, the rotary ones last.
    const int rotary = RANK + warp % (WARPS / 2) * 16, parity = warp / (WARPS / 2);
    unsigned q[TILES][5][4];
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int i = 0; i < 5; ++i)
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int row = first_row + 16 * m + g + n % 2 * 8;
                const int dim = (i < 4 ? 64 * warp + 16 * i : rotary) + n / 2 * 8 + 2 * piece;
                q[m][i][n] = row < rows ? *(const unsigned*)(query + (size_t)row * DIMS + dim) : 0u;
            }
    float out[TILES][8][4] = {};
    // Of a scorer's row; the sum is of its own positions.
    const int scorer_row = threadIdx.x / PER_ROW, scorer_at = threadIdx.x % PER_ROW * 4;
    const int limit = num_old + (first_row + scorer_row) / NUM_HEADS;
    float highest = -3e38f, sum = 0.f;

    for (int block = 0; block < num_blocks; ++block) {
        const uint4* here = blocks + block % STAGES * (BLOCK * STRIDE / 8);
        wait_for_copies<STAGES - 1>();
        __syncthreads();
        unsigned rotary_keys[4];
        const int at = 8 * (parity + lane / 16 * 2) + lane % 8;
        load_tiles(rotary_keys, here + at * (STRIDE / 8) + rotary / 8 + lane / 8 % 2);
#pragma unroll
        for (int n = 0; n < BLOCK / 8; ++n) {
            float c[TILES][4] = {};
            if (n % 2 == parity)
#pragma unroll
                for (int m = 0; m < TILES; ++m) {
                    const unsigned* a = q[m][4];
                    multiply_tile(c[m], a[0], a[1], a[2], a[3], rotary_keys[n / 2 * 2], rotary_keys[n / 2 * 2 + 1]);
                }
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
            float x[FOURS][4] = {};
#pragma unroll
            for (int i = 0; i < WARPS; ++i)
#pragma unroll
                for (int f = 0; f < FOURS; ++f) {
                    const uint4 four = *(const uint4*)&scores[i][scorer_row][scorer_at + f * 4 * PER_ROW];
                    x[f][0] += __uint_as_float(four.x), x[f][1] += __uint_as_float(four.y);
                    x[f][2] += __uint_as_float(four.z), x[f][3] += __uint_as_float(four.w);
                }
            float most = -3e38f;
#pragma unroll
            for (int f = 0; f < FOURS; ++f)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int position = begin + block * BLOCK + scorer_at + f * 4 * PER_ROW + i;
                    x[f][i] = position < end && position <= limit ? x[f][i] * (scale * 1.4426950408889634f) : -3e38f;
                    most = fmaxf(most, x[f][i]);
                }
            most = fmaxf(highest, largest_of_lanes<PER_ROW>(most));
            const float smaller = power_of_two(highest - most);
            sum *= smaller;
#pragma unroll
            for (int f = 0; f < FOURS; ++f) {
                unsigned bits[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float weight = x[f][i] > -3e38f ? power_of_two(x[f][i] - most) : 0.f;
                    sum += weight;
                    bits[i] = to_bf16(weight);
                }
                *(uint2*)&weights[scorer_row][scorer_at + f * 4 * PER_ROW] =
                    make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
            }
            if (scorer_at == 0) shrink[scorer_row] = smaller;
            highest = most;
        }
        __syncthreads();
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
            if (first_row + scorer_row < rows) {
                partial_max[split * rows + first_row + scorer_row] = highest;
                partial_sum[split * rows + first_row + scorer_row] = sum;
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = 16 * m + g + 8 * i;
            if (first_row + row >= rows) continue;
            const float factor = total[row] > 0.f ? 1.f / total[row] : 0.f;
            float* to = partial + ((size_t)split * rows + first_row + row) * RANK + 64 * warp + 2 * piece;
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
    return query.dtype == torch.bfloat16 and query.shape[2] == _RANK + _ROTARY and latent_rank == _RANK


def _count_tiles(num_query_rows: int) -> tuple[int, int]:
    """Give tiles of 16 query rows of a program, and programs that have the same positions."""
    tiles = -(-num_query_rows // 16)
    programs = -(-tiles // _MAX_TILES)
    return -(-tiles // programs), programs


def count_splits(num_query_rows: int) -> int:
    """Give how many splits of the positions fill the GPU."""
    return max(1, min(_MAX_SPLITS, _NUM_PROGRAMS // _count_tiles(num_query_rows)[1]))


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
    splits, rows, R = partial.shape
    H, X = query.shape[1:]
    tiles, row_tiles = _count_tiles(rows)
    stages, warps = _STAGES[tiles], R // 64
    definitions = {"RANK": R, "ROTARY": X - R, "NUM_HEADS": H, "TILES": tiles, "BLOCK": _BLOCK, "STAGES": stages}
    if pdl_options()["PDL"]:
        definitions["HAS_PDL"] = 1
    launch(
        load_kernel(_SOURCE, "attend", tuple((k, str(v)) for k, v in definitions.items()), query.device),
        (splits * row_tiles, 1, 1), warps * 32,
        query, latent_cache, context_len, partial, partial_max, partial_sum, rows, row_tiles, scale,
        # STRIDE and SCORE_STRIDE of the source.
        shared_bytes=stages * _BLOCK * 2 * (X + 8) + warps * 16 * tiles * 4 * (_BLOCK + 8),
    )  # fmt: skip
