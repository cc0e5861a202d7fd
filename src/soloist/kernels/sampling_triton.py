"""Triton kernels of the sampling operators whose references read the host or sum in no fixed order on a GPU.

The equations and references are in `kernels/sampling.py`.
"""

import torch
import triton
import triton.language as tl

from soloist.kernels.launch import let_consumers_start, pdl_options, wait_for_producers


@triton.jit
def uniform_kernel(seed_ptr, positions_ptr, out_ptr, T, STREAM: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    """Philox4x32-10, word 0 of counter (position, position >> 32, stream, 0). Grid: (1,)."""
    i_t = tl.arange(0, ROWS)
    m_t = i_t < T
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    seed = tl.load(seed_ptr)
    position = tl.load(positions_ptr + i_t, mask=m_t, other=0)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low & 0
    word, _, _, _ = tl.philox(seed, low, high, zero + STREAM, zero)
    tl.store(out_ptr + i_t, ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07, mask=m_t)


@triton.jit
def draw_kernel(probs_ptr, uniforms_ptr, out_ptr, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The first v with cdf_v > u * cdf_N, summed block by block in one order. Grid: (T,)."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    total = 0.0
    for start in range(0, N, BLOCK):
        total += tl.sum(tl.load(probs_ptr + t * N + start + i, mask=start + i < N, other=0.0), axis=0)
    threshold = tl.load(uniforms_ptr + t) * total
    before = 0.0
    token = N
    # Rounded otherwise than the sum, the cumulated law may end below the threshold: then the last token that can be.
    last = 0
    for start in range(0, N, BLOCK):
        m = start + i < N
        b_probs = tl.load(probs_ptr + t * N + start + i, mask=m, other=0.0)
        b_cdf = before + tl.cumsum(b_probs, axis=0)
        m_past = m & (b_cdf > threshold) & (b_probs > 0.0)
        token = tl.minimum(token, tl.min(tl.where(m_past, start + i, N), axis=0))
        last = tl.maximum(last, tl.max(tl.where(b_probs > 0.0, start + i, 0), axis=0))
        before += tl.sum(b_probs, axis=0)
    tl.store(out_ptr + t, tl.where(token < N, token, last).to(tl.int64))


def uniform(seed: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """Launch `uniform`; arguments as there."""
    T = positions.shape[0]
    out = torch.empty(T, dtype=torch.float32, device=positions.device)
    uniform_kernel[(1,)](
        seed,
        positions,
        out,
        T,
        STREAM=int(stream),
        ROWS=max(16, triton.next_power_of_2(T)),
        num_warps=1,
        **pdl_options(),
    )
    return out


def draw(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Launch `draw`; arguments as there."""
    T, N = probs.shape
    out = torch.empty(T, dtype=torch.int64, device=probs.device)
    draw_kernel[(T,)](probs.contiguous(), uniforms, out, N, BLOCK=4096, num_warps=8, **pdl_options())
    return out
