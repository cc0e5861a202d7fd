"""Collectives of a step in CUDA C++: an all-reduce and an argmax that every rank pushes into its peers' mailboxes.

Owns the two kernels; the equations are in `kernels/allreduce.py`, the protocol is in `kernels/mailboxes.py`. Every rank
sums in the order of the ranks, so all hold the same bits.
"""

import torch

from soloist.kernels.check import expect
from soloist.kernels.launch import pdl_options
from soloist.kernels.mailboxes import GENERATIONS, WORLD_SIZES, Mailboxes
from soloist.kernels.nvrtc import PRELUDE, launch, load_kernel

# A thread looks at the clock after so many looks at its mailbox, and so many ns apart at whether its rank has given up:
# that is in the host's memory, and thousands of threads that read it are slower than what they wait for. With a look
# every 256 spins, 16 rows took 109 us where 3 had been measured, `docs/log.md`.
_SPINS_PER_LOOK = 256
_NS_PER_HOST_LOOK = 1_000_000

_EXCHANGE = r"""
constexpr unsigned EMPTY = 0xffffffffu, OTHER_NAN = 0x7fff7fffu;
// Packets of the widest row.
constexpr int ROOM = MAX_HIDDEN / 8;

#ifdef __CUDACC__
// Of 16 bytes: four accesses of 4 bytes, in no order, each seen by every GPU whole or not at all.
__device__ void store_packet(uint4* p, uint4 x) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ uint4 load_packet(const uint4* p) {
    uint4 x;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
    return x;
}
__device__ void store_word(int* p, int x) {
    asm volatile("st.relaxed.sys.global.s32 [%0], %1;" :: "l"(p), "r"(x) : "memory");
}
__device__ int load_word(const int* p) {
    int x;
    asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ unsigned long long clock_ns() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}
#endif

// Of every rank; whether this one gave up before, and where it says so.
struct Mailboxes { uint4* of[8]; int* has_failed; int* error; int timeout_us; };

// Where a mailbox is: the channels of a kind begin at BASE and have room for SIZE packets.
template <size_t BASE, int SIZE> __device__ size_t mailbox(int generation, int channel, int sender) {
    return BASE + (size_t)((generation * MAX_ROWS + channel) * WORLD + sender) * SIZE;
}

__device__ unsigned full(unsigned word) { return word == EMPTY ? OTHER_NAN : word; }

__device__ bool is_full(uint4 x) { return x.x != EMPTY && x.y != EMPTY && x.z != EMPTY && x.w != EMPTY; }

// Sends packet i of COUNT to every peer, and empties its part of the last use's.
template <size_t BASE, int SIZE, int COUNT>
__device__ void send(const Mailboxes& m, int generation, int channel, int i, uint4& x) {
    x = {full(x.x), full(x.y), full(x.z), full(x.w)};
#pragma unroll
    for (int j = 1; j < WORLD; ++j)
        store_packet(m.of[(RANK + j) % WORLD] + mailbox<BASE, SIZE>(generation, channel, RANK) + i, x);
    // The last use may have been of a wider row.
    const int last = (generation ? generation : GENERATIONS) - 1;
#pragma unroll
    for (int o = 0; o < SIZE; o += COUNT)
#pragma unroll
        for (int j = 1; j < WORLD; ++j)
            if (o + COUNT <= SIZE || o + i < SIZE)
                store_packet(m.of[RANK] + mailbox<BASE, SIZE>(last, channel, (RANK + j) % WORLD) + o + i,
                             {EMPTY, EMPTY, EMPTY, EMPTY});
}

__device__ int next(int generation) { return generation + 1 < GENERATIONS ? generation + 1 : 0; }

// Waits for packet i of every peer; one that does not come stays NaN.
template <size_t BASE, int SIZE>
__device__ void receive(const Mailboxes& m, int generation, int channel, int i, uint4 (&x)[WORLD]) {
    unsigned long long started_ns = 0, looked_ns = 0;
    for (int spins = 1;; ++spins) {
        int missing = RANK;
#pragma unroll
        for (int j = 1; j < WORLD; ++j) {
            const int p = (RANK + j) % WORLD;
            x[p] = load_packet(m.of[RANK] + mailbox<BASE, SIZE>(generation, channel, p) + i);
            if (!is_full(x[p])) missing = p;
        }
        if (missing == RANK) return;
        if (spins % SPINS_PER_LOOK) continue;
        const unsigned long long now_ns = clock_ns();
        if (!started_ns) started_ns = looked_ns = now_ns;
        if (now_ns - looked_ns < NS_PER_HOST_LOOK) continue;
        looked_ns = now_ns;
        if (load_word(m.has_failed)) return;
        if (now_ns - started_ns > 1000ull * m.timeout_us) {
            store_word(m.has_failed, 1);
            store_word(m.error, 1 + missing);
            return;
        }
    }
}
"""

_ALL_REDUCE = r"""
constexpr int PACKETS = HIDDEN / 8;

__device__ unsigned sum_pair(const unsigned (&x)[WORLD], unsigned residual) {
    float a = low(x[0]), b = high(x[0]);
#pragma unroll
    for (int p = 1; p < WORLD; ++p) { a += low(x[p]); b += high(x[p]); }
#ifdef HAS_RESIDUAL
    a += low(residual);
    b += high(residual);
#endif
    return to_bf16_pair(a, b);
}

__device__ float square(unsigned pair) { return low(pair) * low(pair) + high(pair) * high(pair); }

__device__ unsigned scale_pair(unsigned x, float scale, unsigned weight) {
    return to_bf16_pair(low(x) * scale * low(weight), high(x) * scale * high(weight));
}

// A program per row, a thread per packet.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
push_all_reduce_add(const uint4* partial, const uint4* residual, const uint4* norm_weight, float eps, uint4* out,
                    uint4* norm_out, int* turns, int* has_failed, int* error, int timeout_us, uint4* m0, uint4* m1,
                    uint4* m2, uint4* m3, uint4* m4, uint4* m5, uint4* m6, uint4* m7) {
    const int t = blockIdx.x, i = threadIdx.x;
    const bool is_mine = i < PACKETS;
#ifdef HAS_NORM
    const uint4 weight = is_mine ? norm_weight[i] : uint4{};
    __shared__ float sums[THREADS / 32];
#endif
    wait_for_producers();
    let_consumers_start();
    const Mailboxes m = {{m0, m1, m2, m3, m4, m5, m6, m7}, has_failed, error, timeout_us};
    const int generation = turns[t];
    uint4 x[WORLD], y = {}, r = {};
    if (is_mine) {
        x[RANK] = partial[(size_t)t * PACKETS + i];
#ifdef HAS_RESIDUAL
        r = residual[(size_t)t * PACKETS + i];
#endif
        send<0, ROOM, PACKETS>(m, generation, t, i, x[RANK]);
    }
    // Every thread has read the turn; packets are on their way.
    __syncthreads();
    if (i == 0) turns[t] = next(generation);
    if (is_mine) {
        receive<0, ROOM>(m, generation, t, i, x);
        unsigned xx[WORLD], xy[WORLD], xz[WORLD], xw[WORLD];
#pragma unroll
        for (int p = 0; p < WORLD; ++p) { xx[p] = x[p].x; xy[p] = x[p].y; xz[p] = x[p].z; xw[p] = x[p].w; }
        y = {sum_pair(xx, r.x), sum_pair(xy, r.y), sum_pair(xz, r.z), sum_pair(xw, r.w)};
        out[(size_t)t * PACKETS + i] = y;
    }
#ifdef HAS_NORM
    // Of the rounded row, as the norm of the next operator would be.
    const float sum = sum_of_lanes(square(y.x) + square(y.y) + square(y.z) + square(y.w));
    if (i % 32 == 0) sums[i / 32] = sum;
    __syncthreads();
    float total = 0.f;
    for (int w = 0; w < THREADS / 32; ++w) total += sums[w];
    const float scale = rsqrtf(total / HIDDEN + eps);
    if (is_mine)
        norm_out[(size_t)t * PACKETS + i] = {scale_pair(y.x, scale, weight.x), scale_pair(y.y, scale, weight.y),
                                             scale_pair(y.z, scale, weight.z), scale_pair(y.w, scale, weight.w)};
#endif
}

"""

_ARGMAX = r"""
// One program, a thread per row. NaN is the largest, so that it is seen; of a peer that did not come it has the own id,
// since whatever comes out is looked up.
extern "C" __global__ void __launch_bounds__(32)
push_argmax(const float* values, const long long* ids, float* out_values, long long* out_ids, int T,
            int* turns, int* has_failed, int* error, int timeout_us, uint4* m0, uint4* m1, uint4* m2, uint4* m3,
            uint4* m4, uint4* m5, uint4* m6, uint4* m7) {
    const int t = threadIdx.x;
    wait_for_producers();
    let_consumers_start();
    if (t >= T) return;
    const Mailboxes m = {{m0, m1, m2, m3, m4, m5, m6, m7}, has_failed, error, timeout_us};
    const int generation = turns[t];
    uint4 x[WORLD];
    const unsigned own_id = ids[t];
    x[RANK] = {__float_as_uint(values[t]), own_id, 0, 0};
    // Behind the mailboxes of the sums.
    constexpr size_t BASE = (size_t)GENERATIONS * MAX_ROWS * WORLD * ROOM;
    send<BASE, 1, 1>(m, generation, t, 0, x[RANK]);
    turns[t] = next(generation);
    receive<BASE, 1>(m, generation, t, 0, x);
    float best = 0.f;
    unsigned best_id = own_id;
#pragma unroll
    for (int p = 0; p < WORLD; ++p) {
        const float value = __uint_as_float(x[p].x);
        const unsigned id = is_full(x[p]) ? x[p].y : own_id;
        if (p == 0 || value > best || (value != value && best == best) || (value == best && id < best_id)) {
            best = value;
            best_id = id;
        }
    }
    out_values[t] = best;
    out_ids[t] = best_id;
}
"""


def _launch(
    mailboxes: Mailboxes,
    turns: torch.Tensor,
    source: str,
    name: str,
    definitions: dict[str, int],
    programs: int,
    threads: int,
    *arguments: torch.Tensor | int | float | None,
) -> None:
    """Launch either kernel; the arguments of both end alike."""
    definitions |= {
        "WORLD": mailboxes.world_size,
        "RANK": mailboxes.rank,
        "MAX_ROWS": mailboxes.max_tokens,
        "MAX_HIDDEN": mailboxes.hidden_size,
        "GENERATIONS": GENERATIONS,
        "SPINS_PER_LOOK": _SPINS_PER_LOOK,
        "NS_PER_HOST_LOOK": _NS_PER_HOST_LOOK,
    } | ({"HAS_PDL": 1} if pdl_options()["PDL"] else {})
    defined = tuple((key, str(value)) for key, value in definitions.items())
    kernel = load_kernel(PRELUDE + _EXCHANGE + source, name, defined, turns.device)
    ends = (turns, mailboxes.has_failed, mailboxes.error, int(mailboxes.timeout_s * 1e6))
    peers = (*mailboxes.buffers, *[None] * (WORLD_SIZES[-1] - mailboxes.world_size))
    launch(kernel, (programs, 1, 1), threads, *arguments, *ends, *peers)


def push_all_reduce_add(
    partial: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    mailboxes: Mailboxes,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Sum the ranks' partial sums in rank order in fp32, add the residual, round once; normalise the row if asked.

    out = residual + sum_r partial_r,  norm_out = out / sqrt(mean(out^2) + eps) * norm_weight

    Models use the sum alone and leave the norm to the next product, which reads the row anyway: a norm of its own took
    0.5 to 0.7 us more. The form with the norm is for a consumer that needs the normalised row in memory; the benchmark
    of exchanges and the tests of these kernels run it.

    Args:
        partial: (T, D) bf16, this rank's; T <= max_tokens, D a multiple of 8 up to the mailboxes' hidden size.
        residual: (T, D) bf16, the same on every rank; may be `out`. None: 0.
        out: (T, D) bf16, written in place: the same bits on every rank.
        mailboxes: of this rank.
        norm_weight: (D) bf16, or None.
        norm_out: (T, D) bf16, written in place: the norm of the rounded `out`. None without a weight.
        eps: of the norm.
    """
    dims: dict[str, int] = {}
    bf16 = torch.bfloat16
    expect(partial, "T D", bf16, dims, name="partial")
    expect(out, "T D", bf16, dims, name="out")
    assert (norm_weight is None) == (norm_out is None), "a norm has a weight and a result"
    tensors = [partial, out]
    for name, x, axes in (
        ("residual", residual, "T D"),
        ("norm_weight", norm_weight, "D"),
        ("norm_out", norm_out, "T D"),
    ):
        if x is not None:
            expect(x, axes, bf16, dims, name=name)
            tensors.append(x)
    T, D = partial.shape
    assert mailboxes.max_tokens >= T and mailboxes.hidden_size >= D and D % 8 == 0, (T, D)
    assert all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in tensors), "rows are read as packets of 16 bytes"
    threads = -(-D // 256) * 32
    definitions = {"HIDDEN": D, "THREADS": threads}
    definitions |= {"HAS_RESIDUAL": 1} if residual is not None else {}
    definitions |= {"HAS_NORM": 1} if norm_weight is not None else {}
    arguments = (partial, residual, norm_weight, float(eps), out, norm_out)
    _launch(mailboxes, mailboxes.turns[0], _ALL_REDUCE, "push_all_reduce_add", definitions, T, threads, *arguments)


def push_argmax(
    values: torch.Tensor, ids: torch.Tensor, out_values: torch.Tensor, out_ids: torch.Tensor, mailboxes: Mailboxes
) -> None:
    """Find the largest of the ranks' values for each row, of equals the lowest id; a NaN is larger than any number.

    Args:
        values: (T,) fp32, this rank's largest.
        ids: (T,) int64 below 2^31 that stand for them.
        out_values: (T,) fp32, written in place.
        out_ids: (T,) int64, written in place.
        mailboxes: of this rank.
    """
    dims: dict[str, int] = {}
    for name, x in (("values", values), ("out_values", out_values)):
        expect(x, "T", torch.float32, dims, name=name)
    for name, x in (("ids", ids), ("out_ids", out_ids)):
        expect(x, "T", torch.int64, dims, name=name)
    assert dims["T"] <= mailboxes.max_tokens, dims
    assert all(x.is_contiguous() for x in (values, ids, out_values, out_ids))
    arguments = (values, ids, out_values, out_ids, dims["T"])
    _launch(mailboxes, mailboxes.turns[1], _ARGMAX, "push_argmax", {}, 1, 32, *arguments)
