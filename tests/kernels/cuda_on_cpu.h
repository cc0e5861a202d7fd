// What a CUDA C++ kernel needs, on a CPU: programs, or clusters of them, run one after the other, each thread is a fiber,
// which goes on at a barrier once the others of its warp, of the program, or of the cluster, have come to it. A seed
// decides which warps go on and which stay behind. Included before a kernel's source.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <csetjmp>
#include <cstring>
#include <memory>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
// One program's at a time: exchanged when another program goes on.
#define __shared__ static __attribute__((section("shared_memory"), used))
#define DYNAMIC_SHARED(type, name) __shared__ __align__(16) type name[(227 << 10) / sizeof(type)]
extern char __start_shared_memory[], __stop_shared_memory[];
// So that the section exists.
__shared__ int cpu_first_shared;

using std::max;
using std::min;

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class To, class From> static To cpu_bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    std::memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __uint_as_float(unsigned x) { return cpu_bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return cpu_bits<unsigned>(x); }
static inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(unsigned x) { return __builtin_ffs(x); }
static void __trap() { __builtin_trap(); }
template <class T> static T __ldcg(const T* p) { return *p; }

static unsigned cpu_seed;
static unsigned long long cpu_random_state;
static unsigned cpu_random(unsigned n) {
    cpu_random_state = cpu_random_state * 6364136223846793005ull + 1442695040888963407ull;
    return unsigned(cpu_random_state >> 33) % n;
}

static struct { int x; } threadIdx, blockIdx, gridDim;

static void cpu_main();
// A thread: how it begins, and where it goes on. Jumps leave the signal mask alone, for which `swapcontext` would ask the
// system every time.
struct CpuFiber {
    ucontext_t context;
    jmp_buf place;
    std::unique_ptr<char[]> stack;
    bool has_begun;
    void begin() {
        const size_t num_bytes = 1 << 16;
        // Not filled: most of it is never touched.
        if (!stack) stack.reset(new char[num_bytes]);
        has_begun = false;
        getcontext(&context);
        context.uc_stack.ss_sp = stack.get();
        context.uc_stack.ss_size = num_bytes;
        makecontext(&context, cpu_main, 0);
    }
};
static std::vector<CpuFiber> cpu_fibers;
static jmp_buf cpu_scheduler;

// Returns when thread i waits or has ended.
static void cpu_resume(int i) {
    threadIdx.x = i;
    if (_setjmp(cpu_scheduler)) return;
    CpuFiber& fiber = cpu_fibers[i];
    if (fiber.has_begun) _longjmp(fiber.place, 1);
    fiber.has_begun = true;
    setcontext(&fiber.context);
}
static void cpu_yield() {
    const int me = threadIdx.x;
    if (!_setjmp(cpu_fibers[me].place)) _longjmp(cpu_scheduler, 1);
    threadIdx.x = me;
}

struct CpuBarrier {
    int size, count = 0, round = 0;
    void wait() {
        const int mine = round;
        if (++count == size) { count = 0; ++round; }
        else while (round == mine) cpu_yield();
    }
};
static CpuBarrier cpu_program;
static std::vector<CpuBarrier> cpu_warps;
static std::vector<unsigned> cpu_exchange;

static void __syncthreads() { cpu_program.wait(); }
static void atomicOr(unsigned* p, unsigned bits) { *p |= bits; }
template <class T> static T cpu_shuffle(T x, int from) {
    const int me = threadIdx.x, warp = me / 32;
    cpu_exchange[me] = cpu_bits<unsigned>(x);
    cpu_warps[warp].wait();
    const T got = cpu_bits<T>(cpu_exchange[warp * 32 + from]);
    cpu_warps[warp].wait();
    return got;
}
template <class T> static T __shfl_sync(unsigned, T x, int lane) { return cpu_shuffle(x, lane); }
template <class T> static T __shfl_xor_sync(unsigned, T x, int o) { return cpu_shuffle(x, (threadIdx.x % 32) ^ o); }
template <class T> static T __shfl_up_sync(unsigned, T x, int o) {
    const int lane = threadIdx.x % 32;
    return cpu_shuffle(x, lane < o ? lane : lane - o);
}

static void __syncwarp() { cpu_warps[threadIdx.x / 32].wait(); }
template <class F> static unsigned cpu_reduce(unsigned x, F join) {
    const int me = threadIdx.x, warp = me / 32;
    cpu_exchange[me] = x;
    cpu_warps[warp].wait();
    unsigned all = cpu_exchange[warp * 32];
    for (int lane = 1; lane < 32; ++lane) all = join(all, cpu_exchange[warp * 32 + lane]);
    cpu_warps[warp].wait();
    return all;
}
static unsigned __reduce_max_sync(unsigned, unsigned x) {
    return cpu_reduce(x, [](unsigned a, unsigned b) { return max(a, b); });
}
static unsigned __ballot_sync(unsigned, bool x) {
    return cpu_reduce(unsigned(x) << threadIdx.x % 32, [](unsigned a, unsigned b) { return a | b; });
}

// A barrier in shared memory, of arrivals and of bytes that are to come.
struct Mbarrier {
    unsigned char size, pending;
    unsigned short phase;
    int bytes;
};
// A copy may write its place from the moment it is asked for, and be there as late as somebody waits for it: the place
// holds no numbers until then.
struct CpuCopy { void* to; const void* from; int num_bytes; Mbarrier* barrier; };
static std::vector<CpuCopy> cpu_copies;
static void cpu_end_phase(Mbarrier* p) {
    if (p->pending || p->bytes) return;
    p->pending = p->size;
    ++p->phase;
}
static void init_mbarrier(Mbarrier* p, int arrivals) { *p = {(unsigned char)arrivals, (unsigned char)arrivals, 0, 0}; }
static void publish_mbarriers() {}
static void arrive(Mbarrier* p) {
    assert(p->pending);
    --p->pending, cpu_end_phase(p);
}
static void expect_bytes(Mbarrier* p, int num_bytes) { p->bytes += num_bytes, arrive(p); }
static void cpu_end_copy(size_t i) {
    const CpuCopy copy = cpu_copies[i];
    cpu_copies.erase(cpu_copies.begin() + i);
    std::memcpy(copy.to, copy.from, copy.num_bytes);
    copy.barrier->bytes -= copy.num_bytes, cpu_end_phase(copy.barrier);
}
static void copy_to_shared(void* to, const void* from, int num_bytes, Mbarrier* p) {
    assert(((size_t)to | (size_t)from | num_bytes) % 16 == 0);
    std::memset(to, 0xff, num_bytes);
    cpu_copies.push_back({to, from, num_bytes, p});
    if (cpu_random(4) == 0) cpu_end_copy(cpu_random(cpu_copies.size()));
}

static std::vector<const unsigned short*> cpu_rows;
// Element i of row r of the tile whose rows the lanes from 8 * tile on gave.
template <int N, bool IS_TRANSPOSED> static void cpu_load_tiles(unsigned (&w)[N], const void* row) {
    const int me = threadIdx.x, warp = me / 32, g = me % 32 / 4, piece = me % 4;
    cpu_rows.resize(cpu_fibers.size());
    cpu_rows[me] = (const unsigned short*)row;
    cpu_warps[warp].wait();
    for (int tile = 0; tile < N; ++tile) {
        const unsigned short* const* rows = &cpu_rows[warp * 32 + tile * 8];
        w[tile] = IS_TRANSPOSED ? rows[2 * piece][g] | rows[2 * piece + 1][g] << 16
                                : rows[g][2 * piece] | rows[g][2 * piece + 1] << 16;
    }
    cpu_warps[warp].wait();
}
static void load_tiles(unsigned (&w)[4], const void* row) { cpu_load_tiles<4, false>(w, row); }
static void load_transposed_tiles(unsigned (&w)[2], const void* row) { cpu_load_tiles<2, true>(w, row); }

struct CpuFragments { unsigned a[4], b[2]; };
static std::vector<CpuFragments> cpu_fragments;
static float cpu_bf16(unsigned pair, int half) { return __uint_as_float(half ? pair & 0xffff0000u : pair << 16); }
// The tensor cores' m16n8k16 product of bf16.
static void multiply_tile(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const int me = threadIdx.x, warp = me / 32, g = me % 32 / 4, piece = me % 4;
    cpu_fragments[me] = {{a0, a1, a2, a3}, {b0, b1}};
    cpu_warps[warp].wait();
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k) {
            const CpuFragments& a = cpu_fragments[warp * 32 + g * 4 + k % 8 / 2];
            const CpuFragments& b = cpu_fragments[warp * 32 + (2 * piece + i % 2) * 4 + k % 8 / 2];
            c[i] += cpu_bf16(a.a[i / 2 + 2 * (k / 8)], k % 2) * cpu_bf16(b.b[k / 8], k % 2);
        }
    cpu_warps[warp].wait();
}

static void (*cpu_body)();
static std::vector<char> cpu_is_done;
static void cpu_main() {
    const int me = threadIdx.x;
    cpu_body();
    cpu_is_done[me] = 1;
    _longjmp(cpu_scheduler, 1);
}

// A program of a cluster while another one runs.
struct CpuResting {
    std::vector<CpuFiber> fibers;
    std::vector<char> is_done, shared;
    std::vector<CpuBarrier> warps;
    std::vector<unsigned> exchange;
    std::vector<CpuFragments> fragments;
    std::vector<const unsigned short*> rows;
    std::vector<CpuCopy> copies;
    CpuBarrier program;
    // Of each thread: the cluster's barrier that it has come to, and whether it waits there or for a phase.
    std::vector<int> round;
    std::vector<char> is_waiting;
};
static std::vector<CpuResting> cpu_cluster;
static int cpu_program_of_cluster;
static CpuBarrier cpu_cluster_barrier;

static void arrive_at_cluster() {
    CpuBarrier& b = cpu_cluster_barrier;
    cpu_cluster[cpu_program_of_cluster].round[threadIdx.x] = b.round;
    if (++b.count == b.size) { b.count = 0; ++b.round; }
}
static void arrive_at_cluster_at_once() { arrive_at_cluster(); }
static void wait_for_cluster() {
    const int me = threadIdx.x;
    CpuResting& mine = cpu_cluster[cpu_program_of_cluster];
    for (; mine.round[me] == cpu_cluster_barrier.round; cpu_yield()) mine.is_waiting[me] = 1;
    mine.is_waiting[me] = 0;
}
// Of what other programs write: as it was before they had another turn.
static bool cpu_ends_turn;
template <class T> static T load_relaxed(const T* p) {
    const T seen = *p;
    cpu_ends_turn = true;
    cpu_yield();
    return seen;
}
static void store_relaxed(float* p, float x) { *p = x; }
template <class T> static void store_to_peer(T* p, int program, T x) {
    if (program == cpu_program_of_cluster) *p = x;
    else std::memcpy(&cpu_cluster[program].shared[(char*)p - __start_shared_memory], &x, sizeof x);
}

static void wait_for_phase(Mbarrier* p, int parity) {
    const int me = threadIdx.x;
    std::vector<char>& is_waiting = cpu_cluster[cpu_program_of_cluster].is_waiting;
    for (; (p->phase & 1) == parity; cpu_yield()) {
        is_waiting[me] = 1;
        for (size_t i = cpu_copies.size(); i--;)
            if (cpu_copies[i].barrier == p) cpu_end_copy(i);
    }
    is_waiting[me] = 0;
}
static void send_to_peer(float* p, int program, float x, Mbarrier* barrier) {
    store_to_peer(p, program, x);
    if (program != cpu_program_of_cluster)
        barrier = (Mbarrier*)&cpu_cluster[program].shared[(char*)barrier - __start_shared_memory];
    barrier->bytes -= sizeof x, cpu_end_phase(barrier);
}

// Makes a program of the cluster the one that runs, or puts it back.
static void cpu_exchange_resting(CpuResting& p) {
    std::swap(p.fibers, cpu_fibers);
    std::swap(p.is_done, cpu_is_done);
    std::swap(p.warps, cpu_warps);
    std::swap(p.exchange, cpu_exchange);
    std::swap(p.fragments, cpu_fragments);
    std::swap(p.rows, cpu_rows);
    std::swap(p.copies, cpu_copies);
    std::swap(p.program, cpu_program);
    std::swap_ranges(p.shared.begin(), p.shared.end(), __start_shared_memory);
}

// Runs `body` in every thread of one cluster.
static void cpu_run(int programs, int threads, void (*body)()) {
    const int first_block = blockIdx.x;
    // Of how many turns a warp takes one.
    const int warps = (threads + 31) / 32;
    std::vector<unsigned> rests(warps, 1);
    bool stays = false;
    cpu_body = body;
    cpu_cluster.resize(programs);
    cpu_cluster_barrier = {programs * threads};
    for (CpuResting& p : cpu_cluster) {
        p.fibers.resize(threads);
        p.is_done.assign(threads, 0);
        p.warps.assign(threads / 32, {32});
        p.exchange.assign(threads, 0);
        p.fragments.assign(threads, {});
        p.program = {threads};
        p.round.assign(threads, 0);
        p.is_waiting.assign(threads, 0);
        // Nothing is there before a program writes it: no numbers, or zeros.
        p.shared.assign(__stop_shared_memory - __start_shared_memory, cpu_seed % 2 ? 0 : (char)0xff);
        for (CpuFiber& fiber : p.fibers) fiber.begin();
    }
    for (bool is_busy = true; is_busy;) {
        is_busy = false;
        for (cpu_program_of_cluster = 0; cpu_program_of_cluster < programs; ++cpu_program_of_cluster) {
            CpuResting& p = cpu_cluster[cpu_program_of_cluster];
            blockIdx.x = first_block + cpu_program_of_cluster;
            cpu_exchange_resting(p);
            // Until all threads are done or wait for what may be another program's, or one looks for that.
            cpu_ends_turn = false;
            for (bool goes_on = true; goes_on && !cpu_ends_turn;) {
                goes_on = false;
                // At times a warp is far slower than another one, which takes its time: not with seed 0.
                if (cpu_seed && cpu_random(64) == 0)
                    for (unsigned& rest : rests) rest = 1u << cpu_random(5);
                const int first = cpu_random(warps * 32);
                for (int n = 0; n < warps * 32; ++n) {
                    const int warp = (n / 32 + first / 32) % warps, i = warp * 32 + (n ^ first) % 32;
                    if (n % 32 == 0) stays = cpu_random(rests[warp]) != 0;
                    if (i >= threads || cpu_is_done[i]) continue;
                    if (!stays) cpu_resume(i);
                    goes_on |= !cpu_is_done[i] && !p.is_waiting[i];
                    is_busy |= !cpu_is_done[i];
                }
            }
            cpu_exchange_resting(p);
        }
    }
    // A program must not end before its copies have come.
    for (const CpuResting& p : cpu_cluster) assert(p.copies.empty());
    blockIdx.x = first_block;
}

template <class... A, size_t... I> static void cpu_call(void (*f)(A...), void** values, std::index_sequence<I...>) {
    f(*static_cast<A*>(values[I])...);
}

// Launches a kernel of `programs` programs, `cluster` of them side by side, with the addresses of its arguments.
template <class... A>
static void cpu_launch(void (*kernel)(A...), int programs, int cluster, int threads, void** values, unsigned seed) {
    cpu_random_state = cpu_seed = seed;
    static void (*f)(A...);
    static void** v;
    f = kernel;
    v = values;
    gridDim.x = programs;
    for (blockIdx.x = 0; blockIdx.x < programs; blockIdx.x += cluster)
        cpu_run(cluster, threads, [] { cpu_call(f, v, std::index_sequence_for<A...>{}); });
}
