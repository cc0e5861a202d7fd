"""A dense SwiGLU block of one token in CUDA C++: one launch; the equations are in `kernels/feed_forward.py`.

One program per multiprocessor, all there at once. A warp keeps its pieces of the normalised token in registers and
takes the gate and up row of one f at a time. With its last of these it asks for the rows of its outputs of D, piece by
piece into a ring in shared memory; it waits until all programs have come as far, and multiplies.
"""

import torch

from soloist.kernels.launch import pdl_options
from soloist.kernels.nvrtc import HAS_NVRTC, launch, load_kernel
from soloist.kernels.persistent_cuda import PERSISTENT, SHARED_BYTES, arrivals, num_programs

# The token and two rows of D, 16 bytes a lane and piece, fit a lane's registers.
MAX_HIDDEN = 2048
# 16-byte pieces that a lane has of a stretch of a row of F, and most stretches of a warp's ring.
_STRETCH, _MAX_DEPTH = 4, 16

_SOURCE = (
    PERSISTENT
    + r"""
// 16-byte pieces of a row of D and of F, how many of them a lane takes, and in how many stretches.
constexpr int D_PIECES = HIDDEN / 8, F_PIECES = WIDTH / 8;
constexpr int D_LOADS = (D_PIECES + 31) / 32;
constexpr int STRETCHES = (F_PIECES + 32 * STRETCH - 1) / (32 * STRETCH);

// A lane's pieces of the gate and the up row of f.
__device__ void load_rows(const uint4* gate_up, int f, uint4* gate, uint4* up) {
    const uint4* p = gate_up + (size_t)f * D_PIECES + threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < D_LOADS; ++j)
        if (threadIdx.x % 32 + 32 * j < D_PIECES) {
            gate[j] = load_weights(p + 32 * j);
            up[j] = load_weights(p + (size_t)WIDTH * D_PIECES + 32 * j);
        }
}

// A warp's outputs on their way, stretch after stretch. A lane copies what it alone reads.
struct Ring {
    uint4* pieces;
    int d, stretch, at;

    __device__ void ask(const uint4* down, int stride) {
        const int lane = threadIdx.x % 32;
        if (d < HIDDEN)
#pragma unroll
            for (int j = 0; j < STRETCH; ++j) {
                const int piece = (stretch * STRETCH + j) * 32 + lane;
                if (piece < F_PIECES) copy_piece(pieces + (at * STRETCH + j) * 32, down + (size_t)d * F_PIECES + piece);
            }
        if (++stretch == STRETCHES) stretch = 0, d += stride;
        at = at + 1 == DEPTH ? 0 : at + 1;
        // Also of nothing: stretches are waited for by their number.
        end_copies();
    }
};

// act (WIDTH); out (HIDDEN) = x + W_down act. Dynamic shared memory: act, then the rings of warps that have outputs.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
feed_forward(const uint4* x, const uint4* norm_weight, float eps, const uint4* gate_up, const uint4* down, uint4* act,
             unsigned long long* arrivals, unsigned short* out) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Neighbouring rows go to neighbouring multiprocessors.
    const int first = warp * gridDim.x + blockIdx.x, stride = gridDim.x * WARPS;
    DYNAMIC_SHARED(uint4, a);
    Ring ring = {a + F_PIECES + warp * DEPTH * STRETCH * 32 + lane, first, 0, 0};
    uint4 h[D_LOADS], gate[D_LOADS], up[D_LOADS];
    if (first < WIDTH) load_rows(gate_up, first, gate, up);
    if (warp == 0)
        for (int i = lane; i < HIDDEN / 64; i += 32) prefetch((const char*)norm_weight + i * 128);
    wait_for_producers();
    let_consumers_start();

    float even = 0.f, odd = 0.f;
#pragma unroll
    for (int j = 0; j < D_LOADS; ++j)
        h[j] = lane + 32 * j < D_PIECES ? x[lane + 32 * j] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < D_LOADS; ++j) multiply(h[j], h[j], even, odd);
    const float scale = rsqrtf(sum_of_lanes(even + odd) / HIDDEN + eps);
#pragma unroll
    for (int j = 0; j < D_LOADS; ++j)
        if (lane + 32 * j < D_PIECES) h[j] = scale_piece(h[j], norm_weight[lane + 32 * j], scale);

    bool has_asked = first >= HIDDEN;
    for (int f = first; f < WIDTH; f += stride) {
        if (f != first) load_rows(gate_up, f, gate, up);
        if (!has_asked && f + stride >= WIDTH) {
            has_asked = true;
            for (int i = 0; i < DEPTH; ++i) ring.ask(down, stride);
        }
        float g_even = 0.f, g_odd = 0.f, u_even = 0.f, u_odd = 0.f;
#pragma unroll
        for (int j = 0; j < D_LOADS; ++j)
            if (lane + 32 * j < D_PIECES) {
                multiply(gate[j], h[j], g_even, g_odd);
                multiply(up[j], h[j], u_even, u_odd);
            }
        const float g = sum_of_lanes(g_even + g_odd), u = sum_of_lanes(u_even + u_odd);
        if (lane == 0) ((unsigned short*)act)[f] = (unsigned short)to_bf16(g * sigmoid(g) * u);
    }
    if (!has_asked)
        for (int i = 0; i < DEPTH; ++i) ring.ask(down, stride);
    wait_for_all_programs(arrivals);
    for (int i = threadIdx.x; i < F_PIECES; i += WARPS * 32) a[i] = __ldcg(act + i);
    __syncthreads();

    int at = 0;
    for (int d = first; d < HIDDEN; d += stride) {
        even = odd = 0.f;
        for (int stretch = 0; stretch < STRETCHES; ++stretch) {
            wait_for_copies<DEPTH - 1>();
#pragma unroll
            for (int j = 0; j < STRETCH; ++j) {
                const int piece = (stretch * STRETCH + j) * 32 + lane;
                if (piece < F_PIECES) multiply(ring.pieces[(at * STRETCH + j) * 32], a[piece], even, odd);
            }
            at = at + 1 == DEPTH ? 0 : at + 1;
            ring.ask(down, stride);
        }
        const float y = sum_of_lanes(even + odd);
        if (lane == 0) out[d] = (unsigned short)to_bf16(low(((const unsigned short*)x)[d]) + y);
    }
}
"""
)


def can_run(x: torch.Tensor, gate_up: object, down: object) -> bool:
    """Say whether the block of these weights, for these tokens, is one launch."""
    return (
        HAS_NVRTC
        and isinstance(gate_up, torch.Tensor)
        and isinstance(down, torch.Tensor)
        and x.shape[0] == 1
        and x.dtype == gate_up.dtype == down.dtype == torch.bfloat16
        and x.shape[1] <= MAX_HIDDEN
        and x.shape[1] % 64 == 0
        and down.shape[1] % 8 == 0
        # The product's input and a ring of two stretches a warp.
        and 2 * down.shape[1] <= SHARED_BYTES // 4
    )


def run(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Launch the block where `can_run` says so.

    Args:
        x: (1, D) bf16 residual stream.
        norm_weight: (D) bf16.
        eps: of the norm.
        gate_up: (2F, D) bf16: gate rows, then up rows.
        down: (D, F) bf16.

    Returns:
        (1, D): x and the block.
    """
    (_, D), F = x.shape, down.shape[1]
    device, programs = x.device, num_programs(x.device)
    # As many as leave a lane the registers.
    warps = 16 if D <= 1536 else 12
    stretch_bytes = min(warps, -(-D // programs)) * _STRETCH * 512
    depth = min(_MAX_DEPTH, (SHARED_BYTES - 2 * F) // stretch_bytes)
    definitions = {"HIDDEN": D, "WIDTH": F, "WARPS": warps, "STRETCH": _STRETCH, "DEPTH": depth} | (
        {"HAS_PDL": 1} if pdl_options()["PDL"] else {}
    )
    act, out = torch.empty((1, F), dtype=x.dtype, device=device), torch.empty_like(x)
    kernel = load_kernel(_SOURCE, "feed_forward", tuple((k, str(v)) for k, v in definitions.items()), device)
    launch(
        kernel, (programs, 1, 1), 32 * warps,
        x, norm_weight, eps, gate_up, down, act, arrivals(device), out,
        shared_bytes=2 * F + depth * stretch_bytes,
    )  # fmt: skip
    return out
