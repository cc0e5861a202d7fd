"""Triton kernels of the sampling operators whose references read the host or sum in no fixed order on a GPU.

The equations and references are in `kernels/sampling.py`.
"""

import torch
import triton
import triton.language as tl

from soloist.kernels.launch import let_consumers_start, pdl_options, wait_for_producers
from soloist.kernels.linear_triton import best_strip_kernel

# Logits that one program looks at: enough programs for one row to fill a GPU.
_BEST_BLOCK = 2048


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


@triton.jit(do_not_specialize=["N"])
def block_best_kernel(logits_ptr, logits_stride_t, best_ptr, id_ptr, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Largest logit of every block, and the lowest id that has it; a NaN counts as inf. Grid: (T, N / BLOCK)."""
    t, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    b_logits = tl.load(logits_ptr + t * logits_stride_t + i, mask=i < N, other=float("-inf"))
    b_logits = tl.where(b_logits == b_logits, b_logits, float("inf"))
    best = tl.max(b_logits, axis=0)
    o_best = t * tl.num_programs(1) + block
    tl.store(best_ptr + o_best, best)
    tl.store(id_ptr + o_best, tl.min(tl.where(b_logits == best, i, N - 1), axis=0))


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


def likeliest(logits: torch.Tensor, first_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `likeliest`; arguments as there. The logit of a row with a NaN comes back as inf."""
    T, N = logits.shape
    assert logits.stride(1) == 1
    blocks = triton.cdiv(N, _BEST_BLOCK)
    best = torch.empty((T, blocks), dtype=torch.float32, device=logits.device)
    best_id = torch.empty((T, blocks), dtype=torch.int32, device=logits.device)
    block_best_kernel[(T, blocks)](
        logits, logits.stride(0), best, best_id, N, BLOCK=_BEST_BLOCK, num_warps=4, **pdl_options()
    )
    values = torch.empty(T, dtype=torch.float32, device=logits.device)
    ids = torch.empty(T, dtype=torch.int64, device=logits.device)
    size = triton.next_power_of_2(blocks)
    best_strip_kernel[T,](best, best_id, values, ids, blocks, first_id, BLOCK=size, num_warps=4, **pdl_options())
    return ids, values
