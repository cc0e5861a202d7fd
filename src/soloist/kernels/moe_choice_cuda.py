"""The choice of a step's experts in CUDA C++: every program of `moe_step_cuda` makes it. Equations: `kernels/moe.py`.

A warp chooses for a token. What the tokens chose becomes a list of slots: the shared experts', then each distinct
expert once, in ascending order, with the tokens that take it and their weights.

Logits that programs of the same launch compute are read as they come: a place that holds `NOT_THERE`, a NaN that no
arithmetic gives, is read again. So nobody waits for a barrier before the choice.

Source of data that says that it is there: Lamport's registers, as in the one-shot all-reduces of TensorRT-LLM.
"""

from typing import Protocol

# Behind `nvrtc.PRELUDE`. Sizes come as definitions: NUM_EXPERTS, NUM_GROUPS, TOPK_GROUPS, NUM_CHOSEN, NUM_SHARED,
# ROUTED_SCALE, ROWS, the most tokens, WARPS of a program, as many at least, and CHOICE_BYTES.
SOURCE = r"""
constexpr int THREADS = WARPS * 32;
constexpr int PER_LANE = NUM_EXPERTS / 32;
constexpr int LANES_PER_GROUP = 32 / NUM_GROUPS;
constexpr int MAX_SLOTS = NUM_SHARED + (ROWS * NUM_CHOSEN < NUM_EXPERTS ? ROWS * NUM_CHOSEN : NUM_EXPERTS);

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

constexpr unsigned NOT_THERE = 0xffffffffu;

#ifdef __CUDACC__
__device__ unsigned load_relaxed(const unsigned* p) {
    unsigned x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ uint4 load_relaxed(const uint4* p) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
    return x;
}
__device__ void store_relaxed(float* p, float x) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}
#endif

// The same of floats that other programs store, once they have.
__device__ void await_run(const float* from, float* to) {
    const float* p = from + threadIdx.x % 32 * PER_LANE;
    for (bool is_there = false; !is_there;) {
        is_there = true;
        if (PER_LANE % 4 == 0) {
#pragma unroll
            for (int j = 0; j < PER_LANE; j += 4) {
                const uint4 four = load_relaxed((const uint4*)(p + j));
                const unsigned bits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int k = 0; k < 4; ++k) is_there &= bits[k] != NOT_THERE, to[j + k] = __uint_as_float(bits[k]);
            }
        } else
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) {
                const unsigned bits = load_relaxed((const unsigned*)(p + j));
                is_there &= bits != NOT_THERE, to[j] = __uint_as_float(bits);
            }
    }
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
// `score`: its logits, `add`: the bias, `candidates`: 32 of the warp's own.
__device__ void choose_of_token(Choice& s, int t, float* score, const float* add, uint4* candidates) {
    const int lane = threadIdx.x % 32;
    unsigned key[PER_LANE];
    float first = -3e38f, second = -3e38f;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        score[j] = sigmoid(score[j]);
        const float biased = score[j] + add[j];
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
        uint4* mine = candidates + behind - __popc(is_candidate);
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j)
            if (is_candidate >> j & 1u) *mine++ = make_uint4(key[j], lane * PER_LANE + j, __float_as_uint(score[j]), 0);
        __syncwarp();
        const uint4 candidate = lane < num_candidates ? candidates[lane] : make_uint4(0, 0, 0, 0);
        const int rank = rank_of(candidate.x);
        if (rank < NUM_CHOSEN) {
            s.chosen[t * NUM_CHOSEN + rank] = candidate.y;
            s.chosen_weight[t * NUM_CHOSEN + rank] = __uint_as_float(candidate.z);
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
                for (int j = 0; j < PER_LANE; ++j)
                    if (j == lowest) key[j] = 0, s.chosen_weight[t * NUM_CHOSEN + a] = score[j];
                taken |= 1u << lowest;
                s.chosen[t * NUM_CHOSEN + a] = lane * PER_LANE + lowest;
            }
        }
        if (taken) atomicOr(&s.active[lane], taken);
    }
    __syncwarp();
    const float mine = lane < NUM_CHOSEN ? s.chosen_weight[t * NUM_CHOSEN + lane] : 0.f;
    const float factor = ROUTED_SCALE / (sum_of_lanes(mine) + 1e-20f);
    if (lane < NUM_CHOSEN) s.chosen_weight[t * NUM_CHOSEN + lane] = mine * factor;
}

// What is known before the choice: the shared experts' slots. A barrier behind it, then `choose_experts`.
__device__ void begin_choice(Choice& s, int num_tokens) {
    for (int i = threadIdx.x; i < MAX_SLOTS; i += THREADS) s.tokens[i] = i < NUM_SHARED ? (1u << num_tokens) - 1u : 0u;
    for (int i = threadIdx.x; i < NUM_SHARED * ROWS; i += THREADS) s.weight[i] = 1.f;
    if (threadIdx.x < 32) s.active[threadIdx.x] = 0;
}

// Warp t has token t's.
__device__ void choose_experts(Choice& s, int num_tokens, float* score, const float* add, uint4* candidates) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < num_tokens) choose_of_token(s, warp, score, add, candidates + 32 * warp);
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


def choice_bytes(num_experts: int, num_chosen: int, num_shared: int, rows: int) -> int:
    """Size of the kernel's `Choice`, of as many slots as there can be."""
    slots = num_shared + min(rows * num_chosen, num_experts)
    return slots * (8 + 4 * rows) + 4 + 2 * 32 * 4 + 2 * rows * num_chosen * 4
