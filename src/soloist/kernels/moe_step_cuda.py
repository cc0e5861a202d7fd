"""The experts of a step in CUDA C++: one launch behind the router's product; the equations are in `kernels/moe.py`.

One program per multiprocessor, all there at once:

1. Each chooses the experts from the router's logits by itself and normalises the rows: that costs less than waiting for
   another launch. What was chosen becomes a list of slots: the shared expert's, then each distinct expert once, in
   ascending order, with the tokens that take it.
2. A warp takes the gate and up row of one (slot, f) at a time: weights in registers, times the slot's tokens alone, so
   the arithmetic grows with the choices and not with slots times tokens, and CUDA cores keep up with the memory.
3. A warp that has no more of these asks for the weights of its outputs of D, waits until all programs have come as far,
   and sums over the slots.

A row's sum runs over its own slots in ascending order: it has the same bits in any company and at any width.
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
# Shared memory that activations may take, a program in all, and of that what has its size at compile time.
_SHARED_BYTES = 160 * 1024
_MAX_SHARED_BYTES = 227 * 1024
_MAX_STATIC_BYTES = 48 * 1024
# Largest hidden size of which MAX_ROWS rows and every lane's sums fit the shared memory beside the choice.
_MAX_HIDDEN = 5632

_SOURCE = (
    PRELUDE
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

#ifdef __CUDACC__
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
#else
__device__ unsigned long long load_acquire(const unsigned long long* p) { return *p; }
__device__ unsigned long long add_release(unsigned long long* p) { return (*p)++; }
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
static_assert(sizeof(Choice) == CHOICE_BYTES, "the launcher counts on another size");

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
        if (lane + 32 * j < D_PIECES) {
            const uint4 of_norm = weight[lane + 32 * j];
            const unsigned a[4] = {mine[j].x, mine[j].y, mine[j].z, mine[j].w};
            const unsigned b[4] = {of_norm.x, of_norm.y, of_norm.z, of_norm.w};
            unsigned y[4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                y[k] = to_bf16(low(a[k]) * scale * low(b[k])) | to_bf16(high(a[k]) * scale * high(b[k])) << 16;
            h[t * D_PIECES + lane + 32 * j] = make_uint4(y[0], y[1], y[2], y[3]);
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

// act (T, CHOICES, WIDTH); out (T, HIDDEN) = residual + sum over slots of weight * W_down act, residual may be null.
// Dynamic shared memory: h (T, HIDDEN), in its place then act, if that is to be copied; behind them every lane's sums.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts(const uint4* x, const uint4* norm_weight, float eps, int T, const float* logits, const float* bias,
        const int* width, const uint4* gate_up, const uint4* shared_gate_up, const uint4* down,
        const uint4* shared_down, float limit, float shared_limit, const unsigned short* residual, uint4* act,
        int copies_act, unsigned long long* arrivals, const unsigned short* next_weight, int distance, int num_bytes,
        unsigned short* out) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Neighbouring rows go to neighbouring multiprocessors: what takes long, the shared expert's, is spread.
    const int first = warp * gridDim.x + blockIdx.x, stride = gridDim.x * WARPS;
    __shared__ Choice s;
    DYNAMIC_SHARED(uint4, h);
    float* sum = (float*)(h + T * max(D_PIECES, copies_act ? CHOICES * F_PIECES : 0)) + warp * T * 32 + lane;
    float add[PER_LANE];
    load_run(bias, add);
    if (warp == 0)
        for (int i = lane; i < HIDDEN / 64; i += 32) prefetch((const char*)norm_weight + i * 128);
    if (threadIdx.x == 0 && num_bytes) prefetch_run(next_weight + (size_t)distance * blockIdx.x, num_bytes);
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
    choose_experts(s, num_tokens, logits, add);

    const int num_slots = num_tokens ? s.num_slots : 0;
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

    const int l = lane % LANES_PER_OUTPUT;
    bool is_first = true;
    for (int unit = first; is_first || unit * OUTPUTS_PER_WARP < HIDDEN; unit += stride) {
        const int d = unit * OUTPUTS_PER_WARP + lane / LANES_PER_OUTPUT;
        const bool is_output = d < HIDDEN;
        for (int t = 0; t < T; ++t)
            sum[t * 32] = l == 0 && is_output && residual ? low(residual[(size_t)t * HIDDEN + d]) : 0.f;
        for (int slots = 0; is_first || slots < num_slots; slots += SLOTS_AT_ONCE) {
            uint4 w[SLOTS_AT_ONCE][F_LOADS];
#pragma unroll
            for (int i = 0; i < SLOTS_AT_ONCE; ++i)
                if (slots + i < num_slots && is_output) {
                    const int expert = s.expert[slots + i];
                    const uint4* p = expert < NUM_EXPERTS
                        ? down + ((size_t)expert * HIDDEN + d) * F_PIECES
                        : shared_down + ((size_t)d * NUM_SHARED + (expert - NUM_EXPERTS)) * F_PIECES;
#pragma unroll
                    for (int j = 0; j < F_LOADS; ++j)
                        if (l + LANES_PER_OUTPUT * j < F_PIECES) w[i][j] = load_weights(p + l + LANES_PER_OUTPUT * j);
                }
            if (is_first) {
                is_first = false;
                wait_for_all_programs(arrivals);
                if (copies_act) {
                    for (int i = threadIdx.x; i < num_tokens * CHOICES * F_PIECES; i += THREADS) h[i] = __ldcg(act + i);
                    __syncthreads();
                }
            }
            const uint4* a = copies_act ? h : act;
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
            }
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


@cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """() int64: what the programs of one launch wait by. Launches of one device follow each other (`runtime.turn`)."""
    return torch.zeros((), dtype=torch.int64, device=device)


def _lanes_per_output(F: int) -> int:
    """Lanes that share a row of F, so that none of them idles where that can be."""
    pieces = F // 8
    return max((8, 16, 32), key=lambda lanes: (pieces / (-(-pieces // lanes) * lanes), lanes))


def _choice_bytes(num_experts: int, num_chosen: int, num_shared: int, rows: int) -> int:
    """Size of the kernel's `Choice`, of as many slots as there can be."""
    slots = num_shared + min(rows * num_chosen, num_experts)
    places = -(-slots * rows // 4) * 4
    return slots * (8 + 4 * rows) + places + 4 + 2 * 32 * 4 + 2 * rows * num_chosen * 4


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
        x: (T, D) bf16 residual stream, T <= 16, D <= 5632.
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
        next_weight: as there.

    Returns:
        (T, D): x, if it is added, and all experts.

    Raises:
        UnsupportedError: sizes, or a dtype, that the kernel does not take.
    """
    T, D = x.shape
    E, _, F = down.shape
    num_shared, rest = divmod(0 if shared_down is None else shared_down.shape[1], F)
    if x.dtype != torch.bfloat16:
        raise UnsupportedError(
            f"experts in {x.dtype} have no GPU kernel for a step: run the model in bfloat16, or on the CPU"
        )
    assert x.dtype == norm_weight.dtype == gate_up.dtype and x.is_contiguous() and T <= MAX_ROWS
    is_sized = D % 8 == F % 8 == E % 32 == rest == 0 and D <= _MAX_HIDDEN and E <= 1024
    if not is_sized or 32 % router.n_group or router.num_experts_per_tok > 32:
        raise UnsupportedError(
            f"experts of size {F} ({E} of them in {router.n_group} groups, {router.num_experts_per_tok} a token, "
            f"{num_shared * F + rest} shared) on a hidden size of {D} have no GPU kernel; it takes hidden and expert "
            f"sizes that are multiples of 8, the hidden size up to {_MAX_HIDDEN}, up to 1024 experts in multiples of "
            "32, groups that divide 32, up to 32 experts a token, and shared experts of a multiple of the experts' "
            "size, a CPU takes all"
        )
    # A step of one token, and every other.
    rows = 1 if T == 1 else MAX_ROWS
    # Two rows of D, 16 bytes a lane and piece, fit the registers of this many warps; of one token's rows they make the
    # fewest rounds.
    warps = 18 if D <= 2048 else 16
    choice_bytes = _choice_bytes(E, router.num_experts_per_tok, num_shared, rows)
    sum_bytes = warps * T * 32 * 4
    # For the rows, and in their place the activations.
    room = _MAX_SHARED_BYTES - choice_bytes - sum_bytes
    row_bytes = T * D * 2
    if choice_bytes > _MAX_STATIC_BYTES or row_bytes > room:
        raise UnsupportedError(
            f"{router.num_experts_per_tok} experts a token of {E}, on a hidden size of {D}, have no GPU kernel for a"
            f" step of {T} rows: their choice takes {choice_bytes} bytes of shared memory, where {_MAX_STATIC_BYTES}"
            f" are, and with the rows {_MAX_SHARED_BYTES - room + row_bytes}, where {_MAX_SHARED_BYTES} are: run the"
            " model on the CPU"
        )
    lanes = _lanes_per_output(F)
    definitions = {
        "HIDDEN": D,
        "WIDTH": F,
        "NUM_EXPERTS": E,
        "NUM_GROUPS": router.n_group,
        "TOPK_GROUPS": router.topk_group,
        "NUM_CHOSEN": router.num_experts_per_tok,
        "NUM_SHARED": num_shared,
        "CHOICE_BYTES": choice_bytes,
        "ROWS": rows,
        "WARPS": warps,
        "ROUTED_SCALE": f"{float(router.routed_scaling_factor)!r}f",
        "LANES_PER_OUTPUT": lanes,
        # So that a lane has 14 pieces at most on their way.
        "SLOTS_AT_ONCE": max(1, 14 // -(-F // (8 * lanes))),
    } | ({"HAS_PDL": 1} if pdl_options()["PDL"] else {})
    device = x.device
    act = torch.empty((T, num_shared + router.num_experts_per_tok, F), dtype=x.dtype, device=device)
    out = torch.empty_like(x)
    act_bytes = act.numel() * act.element_size()
    copies_act = act_bytes <= min(_SHARED_BYTES, room)
    num_programs = _num_programs(device)
    ahead = next(iter(shares([next_weight], READ_AHEAD_BYTES, num_programs)), None)
    kernel = load_kernel(_SOURCE, "experts", tuple((key, str(value)) for key, value in definitions.items()), device)
    launch(
        kernel, (num_programs, 1, 1), 32 * warps,
        x, norm_weight, eps, T, logits, expert_bias, width, gate_up, shared_gate_up, down, shared_down,
        inf if limit is None else limit, inf if shared_limit is None else shared_limit,
        x if adds_residual else None, act, int(copies_act), _arrivals(device),
        *((None, 0, 0) if ahead is None else ahead), out,
        shared_bytes=max(row_bytes, act_bytes if copies_act else 0) + sum_bytes,
    )  # fmt: skip
    return out
