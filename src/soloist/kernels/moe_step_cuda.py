"""The router and the experts of a step in CUDA C++: one launch; the equations are in `kernels/moe.py`.

One program per multiprocessor, all there at once, and each does for itself what costs less than waiting for others:

1. It normalises the rows, multiplies them by its rows of the router, and waits until all programs have.
2. It chooses the experts. What was chosen becomes a list of slots: the shared expert's, then each distinct expert once,
   in ascending order, with the tokens that take it.
3. A warp takes the gate and up row of one (slot, f) at a time: weights in registers, times the slot's tokens alone, so
   the arithmetic grows with the choices and not with slots times tokens, and CUDA cores keep up with the memory.
4. With its last of these a warp asks for the first rows of its outputs of D, into a ring in shared memory; it waits
   until all programs have come as far, and sums over the slots, asking for a row for each that it used.

A row's sum runs over its own slots in ascending order: it has the same bits in any company and at any width.
"""

from collections.abc import Sequence
from math import inf
from typing import Protocol

import torch

from soloist.errors import UnsupportedError
from soloist.kernels.launch import pdl_options
from soloist.kernels.nvrtc import launch, load_kernel
from soloist.kernels.persistent_cuda import PERSISTENT, SHARED_BYTES, arrivals, num_programs
from soloist.kernels.read_ahead import shares

# Most tokens of a step.
MAX_ROWS = 16
# Bytes of the next launch's weights that the experts ask for, measured on one H200, `docs/log.md`.
READ_AHEAD_BYTES = 6 << 20
# Numbers of tokens that have kernels of their own.
_ROWS = (1, 4, 8, 12, MAX_ROWS)
# Shared memory that `act` may take.
_ACT_BYTES = 160 * 1024
# Most rows of a warp's ring.
_MAX_DEPTH = 16

_SOURCE = (
    PERSISTENT
    + r"""
constexpr int THREADS = WARPS * 32;
constexpr int PER_LANE = NUM_EXPERTS / 32;
constexpr int LANES_PER_GROUP = 32 / NUM_GROUPS;
constexpr int MAX_SLOTS = NUM_SHARED + (ROWS * NUM_CHOSEN < NUM_EXPERTS ? ROWS * NUM_CHOSEN : NUM_EXPERTS);
// A token's choices: the shared slots, then its experts.
constexpr int CHOICES = NUM_SHARED + NUM_CHOSEN;
// 16-byte pieces of a row of D and of F, and how many of them a lane takes.
constexpr int D_PIECES = HIDDEN / 8, F_PIECES = WIDTH / 8;
constexpr int D_LOADS = (D_PIECES + 31) / 32, F_LOADS = (F_PIECES + LANES_PER_OUTPUT - 1) / LANES_PER_OUTPUT;
constexpr int OUTPUTS_PER_WARP = 32 / LANES_PER_OUTPUT;

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
            const uint4 four = __ldcg((const uint4*)(p + j));
            to[j] = __uint_as_float(four.x), to[j + 1] = __uint_as_float(four.y);
            to[j + 2] = __uint_as_float(four.z), to[j + 3] = __uint_as_float(four.w);
        }
    } else
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) to[j] = __ldcg(p + j);
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
    const float mine = lane < NUM_CHOSEN ? sigmoid(__ldcg(row + s.chosen[t * NUM_CHOSEN + lane])) : 0.f;
    const float factor = ROUTED_SCALE / (sum_of_lanes(mine) + 1e-20f);
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
            h[t * D_PIECES + lane + 32 * j] = scale_piece(mine[j], weight[lane + 32 * j], scale);
}

// logits (T, NUM_EXPERTS) of this program's rows of the router: a (row, token) a warp at a time, the first row loaded.
__device__ void route(const uint4* router, const uint4* h, int T, uint4* row, float* logits) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int num_rows = (NUM_EXPERTS - 1 - (int)blockIdx.x) / (int)gridDim.x + 1;
    for (int i = warp; i < num_rows * T; i += WARPS) {
        const int expert = i / T * gridDim.x + blockIdx.x, t = i % T;
        float even = 0.f, odd = 0.f;
#pragma unroll
        for (int j = 0; j < D_LOADS; ++j)
            if (lane + 32 * j < D_PIECES) {
                if (i != warp) row[j] = router[(size_t)expert * D_PIECES + lane + 32 * j];
                multiply(row[j], h[t * D_PIECES + lane + 32 * j], even, odd);
            }
        const float y = sum_of_lanes(even + odd);
        if (lane == 0) logits[(size_t)t * NUM_EXPERTS + expert] = y;
    }
}

// A warp's rows of W_down on their way: of one output after the other, of each slot after slot. A lane copies what it
// alone reads.
struct Ring {
    uint4* pieces;
    int unit, slot, at;

    __device__ void ask(const Choice& s, int num_slots, int stride, const uint4* down, const uint4* shared_down) {
        const int lane = threadIdx.x % 32, l = lane % LANES_PER_OUTPUT;
        const int d = unit * OUTPUTS_PER_WARP + lane / LANES_PER_OUTPUT;
        if (d < HIDDEN && num_slots) {
            const int expert = s.expert[slot];
            const uint4* p = expert < NUM_EXPERTS
                ? down + ((size_t)expert * HIDDEN + d) * F_PIECES
                : shared_down + ((size_t)d * NUM_SHARED + (expert - NUM_EXPERTS)) * F_PIECES;
#pragma unroll
            for (int j = 0; j < F_LOADS; ++j)
                if (l + LANES_PER_OUTPUT * j < F_PIECES)
                    copy_piece(pieces + (at * F_LOADS + j) * 32, p + l + LANES_PER_OUTPUT * j);
        }
        if (++slot >= num_slots) slot = 0, unit += stride;
        at = at + 1 == DEPTH ? 0 : at + 1;
        // Also of nothing: rows are waited for by their number.
        end_copies();
    }
};

// act (T, CHOICES, WIDTH); out (T, HIDDEN) = residual + sum over slots of weight * W_down act, residual may be null.
// Dynamic shared memory: h (T, HIDDEN), in its place then act, if that is to be copied; every lane's sums; the rings of
// the warps that have outputs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts(const uint4* x, const uint4* norm_weight, float eps, int T, const uint4* router, float* logits,
        const float* bias, const int* width, const uint4* gate_up, const uint4* shared_gate_up, const uint4* down,
        const uint4* shared_down, float limit, float shared_limit, const unsigned short* residual, uint4* act,
        int copies_act, unsigned long long* arrivals, const unsigned short* upcoming, int distance, int num_bytes,
        unsigned short* out) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Neighbouring rows go to neighbouring multiprocessors: what takes long, the shared expert's, is spread.
    const int first = warp * gridDim.x + blockIdx.x, stride = gridDim.x * WARPS;
    __shared__ Choice s;
    DYNAMIC_SHARED(uint4, h);
    float* sums = (float*)(h + T * max(D_PIECES, copies_act ? CHOICES * F_PIECES : 0));
    float* sum = sums + warp * T * 32 + lane;
    Ring ring = {(uint4*)(sums + WARPS * T * 32) + warp * DEPTH * F_LOADS * 32 + lane, first, 0, 0};
    const bool has_outputs = first * OUTPUTS_PER_WARP < HIDDEN;
    float add[PER_LANE];
    load_run(bias, add);
    if (warp == 0)
        for (int i = lane; i < HIDDEN / 64; i += 32) prefetch((const char*)norm_weight + i * 128);
    if (threadIdx.x == 0 && num_bytes) prefetch_run(upcoming + (size_t)distance * blockIdx.x, num_bytes);
    const int routed = warp / T * gridDim.x + blockIdx.x;
    if (router && routed < NUM_EXPERTS)
        for (int i = lane; i < HIDDEN / 64; i += 32) prefetch(router + (size_t)routed * D_PIECES + i * 8);
    if (first < NUM_SHARED * WIDTH)
        for (int i = lane; i < HIDDEN / 64; i += 32) {
            const char* p = (const char*)(shared_gate_up + (size_t)first * D_PIECES) + i * 128;
            prefetch(p);
            prefetch(p + (size_t)NUM_SHARED * WIDTH * HIDDEN * 2);
        }
    wait_for_producers();
    let_consumers_start();
    const int num_tokens = width ? min(T, *width) : T;
    // With few tokens the warps that normalise are not those that choose.
    for (int t = WARPS - 1 - warp; t < T; t += WARPS) normalise(x, norm_weight, eps, t, h);
    if (router) {
        uint4 row[D_LOADS];
        if (routed < NUM_EXPERTS)
#pragma unroll
            for (int j = 0; j < D_LOADS; ++j)
                if (lane + 32 * j < D_PIECES) row[j] = load_weights(router + (size_t)routed * D_PIECES + lane + 32 * j);
        __syncthreads();
        route(router, h, T, row, logits);
        wait_for_all_programs(arrivals);
    }
    choose_experts(s, num_tokens, logits, add);

    const int num_slots = num_tokens ? s.num_slots : 0;
    bool has_asked = !has_outputs;
    for (int item = first; item < num_slots * WIDTH; item += stride) {
        const int slot = item / WIDTH, f = item % WIDTH, expert = s.expert[slot];
        const bool is_shared = expert >= NUM_EXPERTS;
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
        if (!has_asked && item + stride >= num_slots * WIDTH) {
            has_asked = true;
            for (int i = 0; i < DEPTH; ++i) ring.ask(s, num_slots, stride, down, shared_down);
        }
        const float bound = is_shared ? shared_limit : limit;
        for (unsigned tokens = s.tokens[slot]; tokens; tokens &= tokens - 1) {
            const int t = __ffs(tokens) - 1;
            float g_even = 0.f, g_odd = 0.f, u_even = 0.f, u_odd = 0.f;
#pragma unroll
            for (int j = 0; j < D_LOADS; ++j)
                if (lane + 32 * j < D_PIECES) {
                    const uint4 y = h[t * D_PIECES + lane + 32 * j];
                    multiply(gate[j], y, g_even, g_odd);
                    multiply(up[j], y, u_even, u_odd);
                }
            const float g = sum_of_lanes(g_even + g_odd), u = sum_of_lanes(u_even + u_odd);
            if (lane == 0) {
                // Comparisons that a NaN passes through.
                float silu = g * sigmoid(g);
                silu = silu > bound ? bound : silu;
                const float clamped = u > bound ? bound : u < -bound ? -bound : u;
                const size_t choice = t * CHOICES + s.place[slot * ROWS + t];
                ((unsigned short*)act)[choice * WIDTH + f] = (unsigned short)to_bf16(silu * clamped);
            }
        }
    }

    if (!has_asked)
        for (int i = 0; i < DEPTH; ++i) ring.ask(s, num_slots, stride, down, shared_down);
    wait_for_all_programs(arrivals);
    if (copies_act) {
        for (int i = threadIdx.x; i < num_tokens * CHOICES * F_PIECES; i += THREADS) h[i] = __ldcg(act + i);
        __syncthreads();
    }
    const uint4* a = copies_act ? h : act;
    const int l = lane % LANES_PER_OUTPUT;
    int at = 0;
    for (int unit = first; unit * OUTPUTS_PER_WARP < HIDDEN; unit += stride) {
        const int d = unit * OUTPUTS_PER_WARP + lane / LANES_PER_OUTPUT;
        const bool is_output = d < HIDDEN;
        for (int t = 0; t < T; ++t)
            sum[t * 32] = l == 0 && is_output && residual ? low(residual[(size_t)t * HIDDEN + d]) : 0.f;
        for (int slot = 0; slot < num_slots; ++slot) {
            wait_for_copies<DEPTH - 1>();
            uint4 w[F_LOADS];
#pragma unroll
            for (int j = 0; j < F_LOADS; ++j) w[j] = ring.pieces[(at * F_LOADS + j) * 32];
            at = at + 1 == DEPTH ? 0 : at + 1;
            for (unsigned tokens = is_output ? s.tokens[slot] : 0; tokens; tokens &= tokens - 1) {
                const int t = __ffs(tokens) - 1, mine = slot * ROWS + t;
                const uint4* p = a + (size_t)(t * CHOICES + s.place[mine]) * F_PIECES + l;
                float even = 0.f, odd = 0.f;
#pragma unroll
                for (int j = 0; j < F_LOADS; ++j)
                    if (l + LANES_PER_OUTPUT * j < F_PIECES) multiply(w[j], p[LANES_PER_OUTPUT * j], even, odd);
                sum[t * 32] += s.weight[mine] * (even + odd);
            }
            ring.ask(s, num_slots, stride, down, shared_down);
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
    upcoming: Sequence[object] = (),
) -> torch.Tensor:
    """Choose and run the experts of a step; weights, limits and width as `moe` in `kernels/moe.py` takes them.

    Args:
        x: (T, D) bf16 residual stream, T <= 16.
        norm_weight: (D) bf16.
        eps: of the norm.
        router_weight: (E, D) bf16, E a multiple of 32 up to 1024. None: its product is there already.
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
        upcoming: as there.

    Returns:
        (T, D): x, if it is added, and all experts.
    """
    T, D = x.shape
    E, _, F = down.shape
    num_shared, rest = divmod(0 if shared_down is None else shared_down.shape[1], F)
    assert x.dtype == norm_weight.dtype == gate_up.dtype == torch.bfloat16 and x.is_contiguous() and T <= MAX_ROWS
    if rest or D % 8 or F % 8 or E % 32 or E > 1024 or 32 % router.n_group or router.num_experts_per_tok > 32:
        raise UnsupportedError(
            f"experts of size {F} ({E} of them in {router.n_group} groups, {router.num_experts_per_tok} a token, "
            f"{num_shared * F + rest} shared) on a hidden size of {D} have no GPU kernel; it takes hidden and expert "
            "sizes that are multiples of 8, up to 1024 experts in multiples of 32, groups that divide 32, up to 32 "
            "experts a token, and shared experts of a multiple of the experts' size"
        )
    rows = min(rows for rows in _ROWS if rows >= T)
    # Two rows of D, 16 bytes a lane and piece, fit the registers of this many warps; of one token's rows they make the
    # fewest rounds.
    warps = 18 if D <= 2048 else 16
    lanes = _lanes_per_output(F)
    device, programs = x.device, num_programs(x.device)
    num_choices = num_shared + router.num_experts_per_tok
    copies_act = rows * num_choices * F * 2 <= _ACT_BYTES
    of_rows = max(2 * D, 2 * num_choices * F if copies_act else 0) + 4 * 32 * warps
    # Per slot what `Choice` holds, and what else it does.
    num_slots = num_shared + min(rows * router.num_experts_per_tok, E)
    of_choice = num_slots * (8 + 5 * rows) + 8 * rows * router.num_experts_per_tok + 1024
    # Of warps that have outputs, a row for each output that it computes side by side.
    of_rings = min(warps, -(-D * lanes // (32 * programs))) * -(-F // (8 * lanes)) * 512
    depth = min(_MAX_DEPTH, num_slots, (SHARED_BYTES - of_choice - rows * of_rows) // of_rings)
    if depth < 1:
        raise UnsupportedError(
            f"{T} tokens, a hidden size of {D} and experts of size {F} do not fit into a multiprocessor's shared memory"
        )
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
        "DEPTH": depth,
    } | ({"HAS_PDL": 1} if pdl_options()["PDL"] else {})
    act = torch.empty((T, num_choices, F), dtype=x.dtype, device=device)
    out = torch.empty_like(x)
    assert (router_weight is None) != (logits is None), "the router's weight or its product"
    if logits is None:
        logits = torch.empty((T, E), dtype=torch.float32, device=device)
    ahead = next(iter(shares(upcoming, READ_AHEAD_BYTES, programs)), None)
    kernel = load_kernel(_SOURCE, "experts", tuple((key, str(value)) for key, value in definitions.items()), device)
    launch(
        kernel, (programs, 1, 1), 32 * warps,
        x, norm_weight, eps, T, router_weight, logits, expert_bias, width, gate_up, shared_gate_up, down, shared_down,
        inf if limit is None else limit, inf if shared_limit is None else shared_limit,
        x if adds_residual else None, act, int(copies_act), arrivals(device),
        *((None, 0, 0) if ahead is None else ahead), out,
        shared_bytes=T * of_rows + depth * of_rings,
    )  # fmt: skip
    return out
