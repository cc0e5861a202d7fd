"""The experts of a step in CUDA C++: one launch behind the router's product; the equations are in `kernels/moe.py`.

One program per multiprocessor, all there at once:

1. Each chooses the experts from the router's logits by itself (`moe_choice_cuda.py`) and normalises the rows: that
   costs less than waiting for another launch.
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

import torch

from soloist.errors import UnsupportedError
from soloist.kernels import bulk_copies_cuda, moe_choice_cuda
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
    + bulk_copies_cuda.SOURCE
    + moe_choice_cuda.SOURCE
    + r"""
// A unit is up to UNIT rows of each of an expert's three maps; a stage holds those of one map.
constexpr int ROW_BYTES = HIDDEN * 2, STAGE_BYTES = UNIT * PITCH;
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

// Gate or up of (token, row of the unit), over a warp's part of the inputs: the lane's part of a tile.
__device__ float4 multiply_rows(const char* rows, const char* h_row, int slice) {
    float sum[2][4] = {};
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
    return make_float4(sum[0][0] + sum[1][0], sum[0][1] + sum[1][1], sum[0][2] + sum[1][2], sum[0][3] + sum[1][3]);
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
    unsigned parts[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        // Comparisons that a NaN passes through.
        float silu = g[j] * sigmoid(g[j]);
        silu = silu > bound ? bound : silu;
        const float clamped = u[j] > bound ? bound : u[j] < -bound ? -bound : u[j];
        float a = 0.f;
        if (weight != 0.f && lane % 4 * 2 + j < num_rows) a = low(to_bf16(silu * clamped)) * weight;
        const unsigned first = to_bf16(a);
        parts[0] |= first << 16 * j;
        parts[1] |= to_bf16(a - low(first)) << 16 * j;
    }
    act[0][t][lane % 4] = parts[0];
    act[1][t][lane % 4] = parts[1];
}

// A lane's part of (output, token), of every so-manieth sixteen outputs.
typedef float Totals[TILES][TOKEN_TILES][4];

// Both parts of the activations meet the same rows of W_down transposed; rows that are not there are no numbers.
__device__ void add_outputs(Totals& total, const char* rows, const Activations& act, int num_rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_pair_rows = num_rows - lane % 4 * 2;
    const unsigned mask = num_pair_rows > 1 ? ~0u : num_pair_rows > 0 ? 0xffffu : 0u;
    unsigned part[TOKEN_TILES][2];
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) part[i][j] = act[j][i * 8 + lane / 4][lane % 4];
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

// partial (T, HIDDEN) of a program = its sums, of the tokens in `touched`.
__device__ void leave_sums(const Totals& total, unsigned touched, int T, float* partial) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
                p[d * 16] = total[k][i][j];
                p[d * 16 + 8] = total[k][i][2 + j];
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
            *(uint2*)(out + at) = make_uint2(to_bf16(y[0] + low(old.x)) | to_bf16(y[1] + high(old.x)) << 16,
                                             to_bf16(y[2] + low(old.y)) | to_bf16(y[3] + high(old.y)) << 16);
    }
}

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
    __shared__ Activations act;
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

    Totals total = {};
    const int half = warp / SPLIT, slice = warp % SPLIT;
    // Where this lane reads tokens and rows as operands; tokens that are not there are the last again.
    const int token = TOKEN_TILES == 1 ? lane % 8 : lane % 16;
    const char* h_row = h + min(token, T - 1) * PITCH + lane / (8 * TOKEN_TILES) * 16 + slice * 64;
    const int of_map = lane % 8 * PITCH + lane / 8 * 16 + slice * 64;
    const int of_down = lane % 8 * PITCH + lane / 8 % 2 * 16 + warp * 32;
    const auto wait = [&](int n) { wait_for_phase(&full[n % STAGES], n / STAGES & 1); };
    for (int n = 0; !walk.is_over(); n += 3, walk.advance()) {
        const int slot = walk.slot(), num_unit_rows = walk.num_rows();
        wait(n + half);
        sums[threadIdx.x] = multiply_rows(stages + (n + half) % STAGES * STAGE_BYTES + of_map, h_row, slice);
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


@cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """() int64: what the programs of one launch wait by. Launches of one device follow each other (`runtime.turn`)."""
    return torch.zeros((), dtype=torch.int64, device=device)


def _size(T: int) -> tuple[int, int]:
    """Rows and warps that a kernel is compiled for: a step of one token, of a tile of eight, of two."""
    rows = next(rows for rows in (1, 8, MAX_ROWS) if rows >= T)
    # Sums of two tiles take the registers of twice as many.
    return rows, 8 if rows <= 8 else 16


def _pitch(D: int) -> int:
    """Bytes from row to row in shared memory: 16 more than a row has, so that eight rows begin in different banks."""
    return 2 * D + 16


def _num_stages(T: int, D: int, E: int, router: moe_choice_cuda.RouterShape, num_shared: int, num_programs: int) -> int:
    """Stages of the ring; 0: what else has to be there leaves too little shared memory."""
    rows, warps = _size(T)
    pitch = _pitch(D)
    static_bytes = moe_choice_cuda.choice_bytes(E, router.num_experts_per_tok, num_shared, rows)
    # The warps' sums, who is touched, activations, and the barriers.
    static_bytes += warps * 512 + num_programs * 4 + 512 + 64
    room = _MAX_SHARED_BYTES - static_bytes - T * pitch
    least, most = room // (_UNIT * pitch), (room - _ROOM_BYTES) // (_UNIT * pitch)
    if static_bytes > _MAX_STATIC_BYTES or least < _MIN_STAGES:
        return 0
    return max(_MIN_STAGES, min(_MAX_STAGES, most))


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
    logits: torch.Tensor,
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
        "CHOICE_BYTES": moe_choice_cuda.choice_bytes(E, router.num_experts_per_tok, num_shared, rows),
        "ROWS": rows,
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
        x, norm_weight, eps, T, logits, expert_bias, width, gate_up, shared_gate_up, down, shared_down,
        inf if limit is None else limit, inf if shared_limit is None else shared_limit,
        x if adds_residual else None, partial, _arrivals(device),
        *((None, 0, 0) if ahead is None else ahead), out,
        shared_bytes=(_UNIT * num_stages + T) * _pitch(D),
    )  # fmt: skip
    return out
