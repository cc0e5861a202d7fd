"""The router's choice in CUDA C++: one program, one warp per token; the equations are in `kernels/moe.py`.

A warp holds a token's E scores in registers, lane l the experts l*E/32 and up, so a group of experts is a run of lanes
and every maximum is a few exchanges within the warp. The program also normalises the rows that the experts will read.
"""

from typing import NamedTuple, Protocol

import torch

from soloist.kernels.launch import pdl_options
from soloist.kernels.nvrtc import launch, load_kernel

# Most tokens of a step, one warp each.
MAX_ROWS = 16

_SOURCE = r"""
constexpr int LANES = 32;
constexpr int PER_LANE = NUM_EXPERTS / LANES;
constexpr int LANES_PER_GROUP = LANES / NUM_GROUPS;
constexpr unsigned FULL = 0xffffffffu;
#define LOWEST __int_as_float(0xff800000)

__device__ float to_float(unsigned short bits) { return __uint_as_float(unsigned(bits) << 16); }

__device__ unsigned short to_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

extern "C" __global__ void __launch_bounds__(512)
route(const unsigned short* x, const unsigned short* norm_weight, float eps, int T, const float* logits,
      const float* bias, const int* width, unsigned short* h, int* slot_expert, float* slot_weight, int* num_slots) {
    const int t = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    __shared__ unsigned active[LANES];
    if (threadIdx.x < LANES) active[threadIdx.x] = 0;

    float add[PER_LANE];
    for (int j = 0; j < PER_LANE; ++j) add[j] = bias[lane * PER_LANE + j];
#ifdef HAS_PDL
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

    // With up to 8 tokens the warps that normalise are not those that choose. Rows past T are zero.
    const int row = MAX_ROWS - 1 - t;
    float sum = 0.f;
    const uint2* p_x = (const uint2*)(x + (size_t)row * HIDDEN);
    if (row < T)
        for (int i = lane; i < HIDDEN / 4; i += LANES) {
            uint2 four = p_x[i];
            float a = to_float(four.x & 0xffff), b = to_float(four.x >> 16);
            float c = to_float(four.y & 0xffff), d = to_float(four.y >> 16);
            sum += a * a + b * b + c * c + d * d;
        }
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(FULL, sum, o);
    const float scale = rsqrtf(sum / HIDDEN + eps);
    const uint2* p_norm = (const uint2*)norm_weight;
    uint2* p_h = (uint2*)(h + (size_t)row * HIDDEN);
    for (int i = lane; i < HIDDEN / 4; i += LANES) {
        uint2 four = row < T ? p_x[i] : make_uint2(0, 0), w = p_norm[i], y;
        y.x = to_bf16(to_float(four.x & 0xffff) * scale * to_float(w.x & 0xffff)) |
              (unsigned)to_bf16(to_float(four.x >> 16) * scale * to_float(w.x >> 16)) << 16;
        y.y = to_bf16(to_float(four.y & 0xffff) * scale * to_float(w.y & 0xffff)) |
              (unsigned)to_bf16(to_float(four.y >> 16) * scale * to_float(w.y >> 16)) << 16;
        p_h[i] = y;
    }

    const int num_tokens = width ? min(T, *width) : T;
    float score[PER_LANE], biased[PER_LANE];
    float first = LOWEST, second = LOWEST;
    for (int j = 0; j < PER_LANE; ++j) {
        float z = t < T ? __ldcg(logits + (size_t)t * NUM_EXPERTS + lane * PER_LANE + j) : 0.f;
        score[j] = 1.f / (1.f + expf(-z));
        biased[j] = score[j] + add[j];
        if (biased[j] > first) { second = first; first = biased[j]; }
        else second = fmaxf(second, biased[j]);
    }
    if (NUM_GROUPS > 1) {
        // A group counts as its two largest; it stays if fewer than TOPK_GROUPS others are larger, or equal and lower.
        for (int o = 1; o < LANES_PER_GROUP; o <<= 1) {
            float other_first = __shfl_xor_sync(FULL, first, o), other_second = __shfl_xor_sync(FULL, second, o);
            second = fmaxf(fminf(first, other_first), fmaxf(second, other_second));
            first = fmaxf(first, other_first);
        }
        const float mine = first + second;
        const int group = lane / LANES_PER_GROUP;
        int rank = 0;
        for (int g = 0; g < NUM_GROUPS; ++g) {
            float other = __shfl_sync(FULL, mine, g * LANES_PER_GROUP);
            rank += other > mine || (other == mine && g < group);
        }
        if (rank >= TOPK_GROUPS)
            for (int j = 0; j < PER_LANE; ++j) biased[j] = LOWEST;
    }
    unsigned chosen = 0;
    float total = 0.f;
    for (int a = 0; a < NUM_CHOSEN; ++a) {
        float best = LOWEST, best_score = 0.f;
        int place = NUM_EXPERTS;
        for (int j = 0; j < PER_LANE; ++j)
            if (biased[j] > best) { best = biased[j]; best_score = score[j]; place = lane * PER_LANE + j; }
        for (int o = 16; o; o >>= 1) {
            float other = __shfl_xor_sync(FULL, best, o), other_score = __shfl_xor_sync(FULL, best_score, o);
            int other_place = __shfl_xor_sync(FULL, place, o);
            if (other > best || (other == best && other_place < place)) {
                best = other; best_score = other_score; place = other_place;
            }
        }
        total += best_score;
        for (int j = 0; j < PER_LANE; ++j)
            if (place == lane * PER_LANE + j) { chosen |= 1u << j; biased[j] = LOWEST; }
    }
    if (t >= num_tokens) chosen = 0;
    __syncthreads();
    if (chosen) atomicOr(&active[lane], chosen);
    __syncthreads();

    // Slots: the shared experts, then every active expert in ascending order.
    const unsigned mine = active[lane];
    int before = __popc(mine);
    for (int o = 1; o < LANES; o <<= 1) {
        int other = __shfl_up_sync(FULL, before, o);
        if (lane >= o) before += other;
    }
    const int count = __shfl_sync(FULL, before, LANES - 1);
    int slot = NUM_SHARED + before - __popc(mine);
    const float factor = ROUTED_SCALE / (total + 1e-20f);
    for (int j = 0; j < PER_LANE; ++j)
        if (mine >> j & 1u) {
            if (t == 0) slot_expert[slot] = lane * PER_LANE + j;
            slot_weight[slot * MAX_ROWS + t] = chosen >> j & 1u ? score[j] * factor : 0.f;
            ++slot;
        }
    if (lane < NUM_SHARED) {
        if (t == 0) slot_expert[lane] = NUM_EXPERTS + lane;
        slot_weight[lane * MAX_ROWS + t] = t < num_tokens ? 1.f : 0.f;
    }
    if (threadIdx.x == 0) *num_slots = NUM_SHARED + count;
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


class Slots(NamedTuple):
    """What the experts' kernels read of the router. A slot is one expert that some token takes, or a shared one."""

    # (16, D) the normalised rows; those past T are zero.
    h: torch.Tensor
    # (slots,) int32: expert of each slot, first the shared ones as E, E+1, .., then ascending.
    expert: torch.Tensor
    # (slots, 16) fp32: weight of the slot for each token, 0 where it does not take it.
    weight: torch.Tensor
    # () int32: slots in use.
    num_slots: torch.Tensor


def route_ref(
    h: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, *, num_experts: int, num_shared: int, num_rows: int
) -> Slots:
    """List the slots of a choice in plain PyTorch; reads it on the host.

    Args:
        h: (T, D) normalised rows.
        experts: (T, A) int64, the router's choice.
        weights: (T, A) fp32.
        num_experts: E.
        num_shared: slots of the shared expert.
        num_rows: rows that count.
    """
    T, A = experts.shape
    active = experts[:num_rows].unique()  # ascending
    table = torch.zeros(MAX_ROWS, num_experts, device=h.device)
    table[:num_rows].scatter_(1, experts[:num_rows], weights[:num_rows])
    size = num_shared + min(T * A, num_experts)
    count = num_shared + active.numel()
    expert = torch.zeros(size, dtype=torch.int32, device=h.device)
    expert[:num_shared] = num_experts + torch.arange(num_shared)
    expert[num_shared:count] = active
    weight = torch.zeros(size, MAX_ROWS, device=h.device)
    weight[:num_shared, :num_rows] = 1
    weight[num_shared:count] = table.T[active]
    rows = torch.zeros(MAX_ROWS, h.shape[1], dtype=h.dtype, device=h.device)
    rows[:T] = h
    return Slots(rows, expert, weight, torch.tensor(count, dtype=torch.int32, device=h.device))


def route(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    logits: torch.Tensor,
    expert_bias: torch.Tensor,
    router: RouterShape,
    *,
    num_shared: int,
    width: torch.Tensor | None,
) -> Slots:
    """Choose experts, list slots and normalise the rows.

    Args:
        x: (T, D) bf16, T <= 16.
        norm_weight: (D) bf16.
        eps: of the norm.
        logits: (T, E) fp32, E a multiple of 32 up to 1024.
        expert_bias: (E) fp32.
        router: the choice; n_group divides 32.
        num_shared: slots of the shared expert, which every token takes.
        width: () int32 rows that count, or None.

    Returns:
        Room for num_shared + min(T*A, E) slots.
    """
    T, D = x.shape
    E = logits.shape[1]
    assert x.dtype == norm_weight.dtype == torch.bfloat16 and x.is_contiguous() and D % 4 == 0
    assert E % 32 == 0 and E <= 1024 and 32 % router.n_group == 0, "a warp holds all experts of a token"
    slots = num_shared + min(T * router.num_experts_per_tok, E)
    device = x.device
    h = torch.empty((MAX_ROWS, D), dtype=x.dtype, device=device)
    slot_expert = torch.empty(slots, dtype=torch.int32, device=device)
    slot_weight = torch.empty((slots, MAX_ROWS), dtype=torch.float32, device=device)
    count = torch.empty((), dtype=torch.int32, device=device)
    definitions = {
        "HIDDEN": D,
        "NUM_EXPERTS": E,
        "NUM_GROUPS": router.n_group,
        "TOPK_GROUPS": router.topk_group,
        "NUM_CHOSEN": router.num_experts_per_tok,
        "NUM_SHARED": num_shared,
        "MAX_ROWS": MAX_ROWS,
        "ROUTED_SCALE": f"{float(router.routed_scaling_factor)!r}f",
    } | ({"HAS_PDL": 1} if pdl_options()["PDL"] else {})
    kernel = load_kernel(_SOURCE, "route", tuple((key, str(value)) for key, value in definitions.items()), device)
    launch(
        kernel, (1, 1, 1), 512, x, norm_weight, eps, T, logits, expert_bias, width, h, slot_expert, slot_weight, count
    )
    return Slots(h, slot_expert, slot_weight, count)
