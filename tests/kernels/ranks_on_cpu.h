// Several GPUs that store into each other's memory, on a CPU: every rank has a queue of kernels, every thread is a fiber,
// and a seed decides who goes on. A store of 16 bytes is four stores of 4, each of which arrives when the seed says:
// those into a rank's own memory at the latest when the kernel has ended, those into a peer's at any time after that.
#include "cuda_on_cpu.h"

struct CpuStore { unsigned* p; unsigned x; int rank; bool is_own; };
struct CpuProgram {
    int block, num_left;
    std::vector<CpuFiber> fibers;
    std::vector<char> is_done, shared;
    std::vector<CpuBarrier> warps;
    std::vector<unsigned> exchange;
    CpuBarrier barrier;
};
struct CpuCall { int kernel, grid, threads; void** values; };
struct CpuRank {
    const char *first, *end;  // its memory, for peers to store to
    std::vector<CpuCall> calls;
    size_t num_started = 0;
    std::vector<CpuProgram> programs;
    unsigned speed = 1;
};
static std::vector<CpuRank> cpu_ranks;
static std::vector<CpuStore> cpu_stores;
static CpuRank* cpu_rank;
static unsigned long long cpu_clock;

static void cpu_store(unsigned* p, unsigned x) {
    const bool is_own = cpu_rank->first <= (char*)p && (char*)p < cpu_rank->end;
    cpu_stores.push_back({p, x, int(cpu_rank - cpu_ranks.data()), is_own});
}
static void store_packet(uint4* p, uint4 x) {
    unsigned* words = (unsigned*)p;
    cpu_store(words, x.x);
    cpu_store(words + 1, x.y);
    cpu_store(words + 2, x.z);
    cpu_store(words + 3, x.w);
    cpu_yield();
}
static uint4 load_packet(const uint4* p) {
    cpu_yield();
    return *p;
}
static void store_word(int* p, int x) { *p = x; }
static int load_word(const int* p) { return *p; }
static unsigned long long clock_ns() { return cpu_clock; }

extern void (*const cpu_kernels[])(void**);
static void** cpu_values;
static int cpu_kernel;
static void cpu_enter() { cpu_kernels[cpu_kernel](cpu_values); }

// Makes a program the one whose threads run, or puts it back.
static void cpu_exchange_program(CpuProgram& p) {
    std::swap(p.fibers, cpu_fibers);
    std::swap(p.is_done, cpu_is_done);
    std::swap(p.warps, cpu_warps);
    std::swap(p.exchange, cpu_exchange);
    std::swap(p.barrier, cpu_program);
    std::swap_ranges(p.shared.begin(), p.shared.end(), __start_shared_memory);
}

static void cpu_begin_program(CpuProgram& p, int block, int threads) {
    p.block = block;
    p.num_left = threads;
    p.fibers.resize(threads);
    p.is_done.assign(threads, 0);
    p.exchange.assign(threads, 0);
    p.warps.assign(threads / 32, {32});
    p.barrier = {threads};
    p.shared.assign(__stop_shared_memory - __start_shared_memory, 0x55);
    for (CpuFiber& fiber : p.fibers) fiber.begin();
}

static void cpu_arrive(size_t i) {
    *cpu_stores[i].p = cpu_stores[i].x;
    cpu_stores[i] = cpu_stores.back();
    cpu_stores.pop_back();
}

// Runs a few threads of one program of a rank, which begins its next kernel first if it has ended the last.
static void cpu_go_on(CpuRank& rank) {
    cpu_rank = &rank;
    if (rank.programs.empty()) {
        const CpuCall& call = rank.calls[rank.num_started++];
        rank.programs.resize(call.grid);
        for (int b = 0; b < call.grid; ++b) cpu_begin_program(rank.programs[b], b, call.threads);
    }
    const CpuCall& call = rank.calls[rank.num_started - 1];
    cpu_kernel = call.kernel;
    cpu_values = call.values;
    cpu_body = cpu_enter;
    const size_t chosen = cpu_random(rank.programs.size());
    CpuProgram& p = rank.programs[chosen];
    blockIdx.x = p.block;
    cpu_exchange_program(p);
    const int threads = call.threads, first = cpu_random(threads), step = 2 * cpu_random(threads / 2) + 1;
    for (int n = cpu_random(2 * threads) + 1, i = first; n; --n, i = (i + step) % threads)
        if (!cpu_is_done[i]) {
            cpu_resume(i);
            p.num_left -= cpu_is_done[i];
        }
    cpu_exchange_program(p);
    if (p.num_left) return;
    std::swap(p, rank.programs.back());
    rank.programs.pop_back();
    if (rank.programs.empty())
        for (size_t i = cpu_stores.size(); i--;)
            if (cpu_stores[i].is_own && &cpu_ranks[cpu_stores[i].rank] == &rank) cpu_arrive(i);
}

// `ends` has the first and the last address of every rank's mailboxes; a call is its rank and what `CpuCall` says.
extern "C" void run_ranks(int num_ranks, const char** ends, int num_calls, const int* calls, void*** values, unsigned seed) {
    cpu_random_state = seed;
    cpu_clock = 1;
    cpu_ranks.clear(), cpu_ranks.resize(num_ranks);
    for (int r = 0; r < num_ranks; ++r) { cpu_ranks[r].first = ends[2 * r]; cpu_ranks[r].end = ends[2 * r + 1]; }
    for (int i = 0; i < num_calls; ++i)
        cpu_ranks[calls[4 * i]].calls.push_back({calls[4 * i + 1], calls[4 * i + 2], calls[4 * i + 3], values[i]});
    for (;;) {
        // At times one rank is far faster than another, and at times stores are slow.
        if (cpu_random(256) == 0)
            for (auto& rank : cpu_ranks) rank.speed = 1u << cpu_random(7);
        unsigned total = 0;
        for (auto& rank : cpu_ranks)
            if (rank.num_started < rank.calls.size() || !rank.programs.empty()) total += rank.speed;
        if (!total) break;
        unsigned chosen = cpu_random(total);
        for (auto& rank : cpu_ranks) {
            if (rank.num_started == rank.calls.size() && rank.programs.empty()) continue;
            if (chosen < rank.speed) { cpu_go_on(rank); break; }
            chosen -= rank.speed;
        }
        for (unsigned n = cpu_random(4) ? cpu_random(64) : 0; n && !cpu_stores.empty(); --n) cpu_arrive(cpu_random(cpu_stores.size()));
        cpu_clock += 1000;
    }
    while (!cpu_stores.empty()) cpu_arrive(cpu_stores.size() - 1);
}
