"""Rows copied to shared memory in bulk, and read there as operands of tensor cores: CUDA C++ for Hopper and later.

A copy is asked for by one thread and counted by a barrier in shared memory, which ends a phase when all bytes have come
that somebody said would; whoever waits for the phase sees them.

Source: PTX ISA, `cp.async.bulk`, `mbarrier` and `ldmatrix`.
"""

# Behind `nvrtc.PRELUDE`. The tests' CPU has its own.
SOURCE = r"""
#ifdef __CUDACC__
typedef unsigned long long Mbarrier;
__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void init_mbarrier(Mbarrier* p, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(p)), "r"(arrivals) : "memory");
}
__device__ void publish_mbarriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void arrive(Mbarrier* p) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(p)) : "memory");
}
// Arrives, for a phase that ends once so many bytes have been copied too; some may have come before.
__device__ void expect_bytes(Mbarrier* p, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(p)), "r"(num_bytes)
                 : "memory");
}
__device__ void wait_for_phase(Mbarrier* p, int parity) {
    unsigned is_over = 0;
    while (!is_over)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(is_over) : "r"(shared_address(p)), "r"(parity) : "memory");
}
// Of what is read once: it is the first to leave the L2.
__device__ void copy_to_shared(void* to, const void* from, int num_bytes, Mbarrier* p) {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(shared_address(to)), "l"(from), "r"(num_bytes), "r"(shared_address(p)), "l"(policy) : "memory");
}
// Tiles of 8 x 8 bf16, a lane's `row` is row lane % 8 of tile lane / 8; each lane gets its pair of every tile.
__device__ void load_tiles(unsigned (&w)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(shared_address(row)) : "memory");
}
__device__ void load_transposed_tiles(unsigned (&w)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(w[0]), "=r"(w[1]) : "r"(shared_address(row)) : "memory");
}
#endif
"""
