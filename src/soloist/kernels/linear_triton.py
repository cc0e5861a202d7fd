"""Triton kernels of the linear maps for a step of T <= 16 tokens; equations and references are in `kernels/linear.py`.

One program computes a strip of outputs for all tokens and reads each weight once. Nothing of the matrix product passes
through shared memory: a lane's 16-byte load of 8 neighbouring inputs of one weight row is, as it stands, its fragment
of two 16x8x16 tensor-core products. That holds because a product does not care in which order its inner index runs, as
long as weights and tokens agree; `_as_rows` and `_as_columns` spell that order out as reshapes and permutations that
move no data. Warps split the inputs and add up at the end. The first chunks of weights are loaded before the wait, and
since nothing else is, consumers may start before it too: their own weights are then on the way while this one runs.

Weight tiles are (8, WARPS, RUN, TILES, 32): row within a tile, warp, piece of the warp's run, tile, input within the
piece. Token tiles have 1 or 2 HALVES of 8 tokens in place of TILES. With the axes in this order Triton gives a lane
8 inputs, 4 lanes a piece, 8 lanes the 8 rows, and every warp its own run of inputs.

Row t of a result does not depend on T: the order of its sum follows from the weight's shape alone.
Rounding: h = x * norm_weight is rounded to the dtype of x, the norm's scale is applied to the fp32 sum, and bias,
residual and gate are applied before the only other rounding, that of the result.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from soloist.kernels.launch import (
    IS_INTERPRETED,
    arrival_counters,
    is_last_arriver,
    let_consumers_start,
    pdl_options,
    wait_for_producers,
)
from soloist.kernels.read_ahead import prefetch

# Most tokens of a step; more is a prompt.
MAX_STEP_TOKENS = 16
# Inputs of one piece: 4 lanes of 8.
PIECE = tl.constexpr(32)


@dataclass(frozen=True, kw_only=True)
class StripSettings:
    """How a weight is cut into programs."""

    # Warps of a program; they split the inputs.
    warps: int
    # Pieces of 32 inputs that a warp takes from each row at a time.
    run: int
    # Tiles of 8 rows.
    tiles: int
    # Chunks of weights that are on their way at once, at least.
    ahead: int
    # Outputs of a program, at most 8 * tiles (4 * tiles with a gate); fewer so that the programs fill the GPU evenly.
    outputs: int
    # Programs that share one strip's inputs.
    splits: int = 1
    # Registers a thread may use; None: as many as the compiler likes.
    max_registers: int | None = None


def settings_for(num_outputs: int, num_inputs: int, *, has_gate: bool = False) -> StripSettings:
    """Choose how a weight of this shape is cut: measured on one H200, `docs/log.md`."""
    if has_gate:
        return StripSettings(warps=4, run=4, tiles=2, ahead=3, outputs=8)
    if num_inputs > 4096:
        # Long rows: two programs to a multiprocessor, most of their weights on the way at once.
        return StripSettings(warps=4, run=4, tiles=1, ahead=6, outputs=min(max(triton.cdiv(num_outputs, 256), 1), 8))
    if num_outputs <= 512 and num_inputs > 2048:
        # A large model's router: more programs, all of their weights on the way at once.
        return StripSettings(warps=4, run=4, tiles=1, ahead=6, outputs=8)
    return StripSettings(warps=4, run=4, tiles=2, ahead=3, outputs=16)


def argmax_settings_for(num_tokens: int, num_outputs: int, num_inputs: int) -> StripSettings:
    """Choose how an output head is cut for `argmax_step`: measured on one H200 for one token, `docs/log.md`.

    A program of half as many outputs reads all tokens as often again, so more of them keep what other maps have. Warps
    and runs, which order a row's sum, are the same.
    """
    if num_tokens == 1 and num_outputs >= 32768 and 1536 <= num_inputs <= 2560:
        # At most five chunks, all of them on the way at once.
        return StripSettings(warps=4, run=4, tiles=1, ahead=5, outputs=8)
    return settings_for(num_outputs, num_inputs)


@triton.jit
def _inputs(first, WARPS: tl.constexpr, RUN: tl.constexpr):
    """Input numbers of a chunk that starts at `first`: (1, WARPS, RUN, 1, 32)."""
    i_warp = tl.arange(0, WARPS)[None, :, None, None, None]
    i_run = tl.arange(0, RUN)[None, None, :, None, None]
    i_in = tl.arange(0, PIECE)[None, None, None, None, :]
    return first + (i_warp * RUN + i_run) * PIECE + i_in


@triton.jit
def _load_weights(
    w_ptr, i_o, m_o, first, I: tl.constexpr, IS_RAGGED: tl.constexpr, WARPS: tl.constexpr, RUN: tl.constexpr
):
    """Rows `i_o` (8, 1, 1, TILES, 1) of one chunk of a (O, I) weight."""
    i_i = _inputs(first, WARPS, RUN)
    mask = m_o & (i_i < I) if IS_RAGGED else m_o
    return tl.load(w_ptr + i_o.to(tl.int64) * I + i_i, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_tokens(
    x_ptr, x_stride_t, T, first, I: tl.constexpr, IS_RAGGED: tl.constexpr,
    WARPS: tl.constexpr, RUN: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """One chunk of all tokens: (8, WARPS, RUN, HALVES, 32), zero past T."""
    i_t = tl.arange(0, 8)[:, None, None, None, None] + 8 * tl.arange(0, HALVES)[None, None, None, :, None]
    i_i = _inputs(first, WARPS, RUN)
    mask = (i_t < T) & (i_i < I) if IS_RAGGED else i_t < T
    return tl.load(x_ptr + i_t * x_stride_t + i_i, mask=mask, other=0.0)


@triton.jit
def _as_rows(b_x, WARPS: tl.constexpr, RUN: tl.constexpr, HALVES: tl.constexpr):
    """Token tile to the left operand (WARPS, 16, 32 * RUN)."""
    if HALVES == 1:
        b_x = tl.where(tl.arange(0, 2)[None, None, None, :, None] == 0, b_x, 0.0)
    b_x = tl.reshape(b_x, (8, WARPS, RUN, 2, 4, 2, 2, 2))
    return tl.reshape(tl.permute(b_x, (1, 3, 0, 2, 5, 6, 4, 7)), (WARPS, 16, PIECE * RUN))


@triton.jit
def _as_columns(b_w, WARPS: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr):
    """Weight tile to the right operand (WARPS, 32 * RUN, 8 * TILES)."""
    b_w = tl.reshape(b_w, (8, WARPS, RUN, TILES, 4, 2, 2, 2))
    return tl.reshape(tl.permute(b_w, (1, 2, 5, 6, 4, 7, 3, 0)), (WARPS, PIECE * RUN, 8 * TILES))


@triton.jit
def _prefetch_norm(norm_ptr, strip, I: tl.constexpr, INTERPRETED: tl.constexpr):
    """Bring the norm's weights into the L2; the first strips see to it."""
    if norm_ptr is not None:
        row_bytes: tl.constexpr = I * norm_ptr.dtype.element_ty.primitive_bitwidth // 8
        prefetch(norm_ptr, tl.where(strip < 8, row_bytes, 0), INTERPRETED)


@triton.jit
def _load_ahead(
    w_ptr, i_o, m_o, first,
    I: tl.constexpr, CHUNKS: tl.constexpr, IS_RAGGED: tl.constexpr,
    WARPS: tl.constexpr, RUN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Load the first AHEAD chunks of weight rows `i_o`: a tuple of tiles."""
    weights = ()
    for c in tl.static_range(min(AHEAD, CHUNKS)):
        start = first + c * PIECE * RUN * WARPS
        weights = weights + (_load_weights(w_ptr, i_o, m_o, start, I, IS_RAGGED, WARPS, RUN),)  # type: ignore
    return weights


@triton.jit
def _product(
    x_ptr, x_stride_t, norm_ptr, eps, w_ptr, weights, i_o, m_o, T, first,
    I: tl.constexpr, CHUNKS: tl.constexpr, IS_RAGGED: tl.constexpr,
    WARPS: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr, HALVES: tl.constexpr, AHEAD: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Multiply all tokens with the weight rows `i_o` over CHUNKS chunks of inputs from `first` on.

    Gives (8 * HALVES, 8 * TILES) fp32. `weights` are the chunks that are loaded already. With a norm the chunks must
    cover all inputs.
    """
    CHUNK: tl.constexpr = PIECE * RUN * WARPS
    tokens = (_load_tokens(x_ptr, x_stride_t, T, first, I, IS_RAGGED, WARPS, RUN, HALVES),)
    # Two sums in turn: a product need not wait for the one before it.
    b_even = tl.zeros((WARPS, 16, 8 * TILES), dtype=tl.float32)
    b_odd = tl.zeros((WARPS, 16, 8 * TILES), dtype=tl.float32)
    b_square = tl.zeros((8, WARPS, HALVES, 4), dtype=tl.float32)
    for c in tl.static_range(CHUNKS):
        if c + AHEAD < CHUNKS:
            start = first + (c + AHEAD) * CHUNK
            weights = weights + (_load_weights(w_ptr, i_o, m_o, start, I, IS_RAGGED, WARPS, RUN),)
        if c + 1 < CHUNKS:
            start = first + (c + 1) * CHUNK
            b_next = _load_tokens(x_ptr, x_stride_t, T, start, I, IS_RAGGED, WARPS, RUN, HALVES)
            tokens = tokens + (b_next,)  # type: ignore[assignment]
        b_h = tokens[c]
        if norm_ptr is not None:
            b_x = b_h.to(tl.float32)
            b_square += tl.sum(tl.sum(tl.reshape(b_x * b_x, (8, WARPS, RUN, HALVES, 4, 8)), axis=5), axis=2)
            # Every row of lanes loads the same norm weights, which keeps the tile's layout.
            i_i = _inputs(first + c * CHUNK, WARPS, RUN) + 0 * tl.arange(0, 8)[:, None, None, None, None]
            b_norm = tl.load(norm_ptr + i_i, mask=i_i < I, other=0.0).to(tl.float32)
            b_h = (b_x * b_norm).to(b_h.dtype)
        b_left = _as_rows(b_h, WARPS, RUN, HALVES)
        b_right = _as_columns(weights[c], WARPS, RUN, TILES)
        if INTERPRETED:
            b_left, b_right = b_left.to(tl.float32), b_right.to(tl.float32)
        if c % 2 == 0:
            b_even = tl.dot(b_left, b_right, b_even)
        else:
            b_odd = tl.dot(b_left, b_right, b_odd)
    b_y = b_even + b_odd
    if HALVES == 1:
        # A lane holds rows t and t + 8 side by side: dropping the empty half is free and halves what warps exchange.
        b_y = tl.permute(tl.reshape(b_y, (WARPS, 2, 8, 8 * TILES)), (0, 2, 3, 1))
        b_y, _ = tl.split(b_y)
    b_y = tl.sum(b_y, axis=0)
    if norm_ptr is not None:
        b_sum = tl.sum(tl.sum(b_square, axis=3), axis=1)  # (8, HALVES)
        b_mean = tl.reshape(tl.permute(b_sum, (1, 0)), (8 * HALVES,)) / I
        b_y = b_y * (1.0 / tl.sqrt(b_mean + eps))[:, None]
    return b_y


@triton.jit(do_not_specialize=["T", "ROWS"])
def linear_kernel(
    x_ptr, x_stride_t, norm_ptr, eps, w_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, counter_ptr,
    T, O, ROWS,
    I: tl.constexpr, CHUNKS: tl.constexpr, IS_RAGGED: tl.constexpr,
    WARPS: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr, HALVES: tl.constexpr, AHEAD: tl.constexpr,
    SPLITS: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = residual + norm(x) W^T + bias for ROWS <= 8 * TILES outputs; norm, bias and residual may be None.

    Grid: (O / ROWS, SPLITS). With SPLITS > 1 each program sums a share of the inputs to partial (SPLITS, 16, O) fp32,
    and the last to arrive adds the shares in order.
    """
    strip = tl.program_id(0)
    split = tl.program_id(1)
    i_r = tl.arange(0, 8)[:, None, None, None, None] + 8 * tl.arange(0, TILES)[None, None, None, :, None]
    i_w = strip * ROWS + i_r
    m_w = (i_r < ROWS) & (i_w < O)
    first = split * (CHUNKS * PIECE * RUN * WARPS)
    weights = _load_ahead(w_ptr, i_w, m_w, first, I, CHUNKS, IS_RAGGED, WARPS, RUN, AHEAD)
    _prefetch_norm(norm_ptr, strip, I, INTERPRETED)
    let_consumers_start(PDL)
    wait_for_producers(PDL)
    b_y = _product(
        x_ptr, x_stride_t, norm_ptr, eps, w_ptr, weights, i_w, m_w, T, first,
        I, CHUNKS, IS_RAGGED, WARPS, RUN, TILES, HALVES, AHEAD, INTERPRETED,
    )  # fmt: skip
    i_t = tl.arange(0, 8 * HALVES)[:, None]
    i_c = tl.arange(0, 8 * TILES)[None, :]
    i_o = strip * ROWS + i_c
    m_y = (i_t < T) & (i_c < ROWS) & (i_o < O)
    o_y = i_t * O + i_o
    if SPLITS > 1:
        tl.store(partial_ptr + split * 16 * O + o_y, b_y, mask=m_y)
        is_last = is_last_arriver(counter_ptr + strip, SPLITS)
        if not is_last:
            return
        b_y = tl.zeros((8 * HALVES, 8 * TILES), dtype=tl.float32)
        for s in tl.static_range(SPLITS):
            b_y += tl.load(partial_ptr + s * 16 * O + o_y, mask=m_y, other=0.0, cache_modifier=".cg")
    if bias_ptr is not None:
        b_y += tl.load(bias_ptr + i_o, mask=(i_c < ROWS) & (i_o < O), other=0.0).to(tl.float32)
    if residual_ptr is not None:
        b_y += tl.load(residual_ptr + o_y, mask=m_y, other=0.0).to(tl.float32)
    tl.store(y_ptr + o_y, b_y.to(y_ptr.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=["T", "ROWS"])
def swiglu_kernel(
    x_ptr, x_stride_t, norm_ptr, eps, w_ptr, y_ptr, T, F, ROWS,
    I: tl.constexpr, CHUNKS: tl.constexpr, IS_RAGGED: tl.constexpr,
    WARPS: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr, HALVES: tl.constexpr, AHEAD: tl.constexpr,
    LIMIT: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = silu(g) * u with [g u] = norm(x) W^T for ROWS <= 4 * TILES outputs. Grid: (F / ROWS,)."""
    strip = tl.program_id(0)
    i_tile = tl.arange(0, TILES)[None, None, None, :, None]
    # The first half of the tiles are gate rows, the second half the up rows of the same outputs.
    i_r = tl.arange(0, 8)[:, None, None, None, None] + 8 * (i_tile % (TILES // 2))
    i_w = strip * ROWS + i_r
    m_w = (i_r < ROWS) & (i_w < F)
    i_w += F * (i_tile // (TILES // 2))
    weights = _load_ahead(w_ptr, i_w, m_w, 0, I, CHUNKS, IS_RAGGED, WARPS, RUN, AHEAD)
    _prefetch_norm(norm_ptr, strip, I, INTERPRETED)
    let_consumers_start(PDL)
    wait_for_producers(PDL)
    b_gu = _product(
        x_ptr, x_stride_t, norm_ptr, eps, w_ptr, weights, i_w, m_w, T, 0,
        I, CHUNKS, IS_RAGGED, WARPS, RUN, TILES, HALVES, AHEAD, INTERPRETED,
    )  # fmt: skip
    b_gate, b_up = tl.split(tl.permute(tl.reshape(b_gu, (8 * HALVES, 2, 4 * TILES)), (0, 2, 1)))
    b_gate = b_gate * tl.sigmoid(b_gate)
    if LIMIT is not None:
        b_gate = tl.minimum(b_gate, LIMIT)
        b_up = tl.minimum(tl.maximum(b_up, -LIMIT), LIMIT)
    i_t = tl.arange(0, 8 * HALVES)[:, None]
    i_c = tl.arange(0, 4 * TILES)[None, :]
    i_o = strip * ROWS + i_c
    m_y = (i_t < T) & (i_c < ROWS) & (i_o < F)
    tl.store(y_ptr + i_t * F + i_o, (b_gate * b_up).to(y_ptr.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=["T", "ROWS"])
def argmax_kernel(
    x_ptr, x_stride_t, norm_ptr, eps, w_ptr, addend_ptr, addend_stride_t, best_ptr, id_ptr, T, O, ROWS,
    I: tl.constexpr, CHUNKS: tl.constexpr, IS_RAGGED: tl.constexpr,
    WARPS: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr, HALVES: tl.constexpr, AHEAD: tl.constexpr,
    INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Largest of ROWS logits of each token, and its lowest id, to best and id (16, strips). Grid: (O / ROWS,).

    A NaN counts as inf, so that it is seen.
    """
    strip = tl.program_id(0)
    i_r = tl.arange(0, 8)[:, None, None, None, None] + 8 * tl.arange(0, TILES)[None, None, None, :, None]
    i_w = strip * ROWS + i_r
    m_w = (i_r < ROWS) & (i_w < O)
    weights = _load_ahead(w_ptr, i_w, m_w, 0, I, CHUNKS, IS_RAGGED, WARPS, RUN, AHEAD)
    _prefetch_norm(norm_ptr, strip, I, INTERPRETED)
    let_consumers_start(PDL)
    wait_for_producers(PDL)
    b_y = _product(
        x_ptr, x_stride_t, norm_ptr, eps, w_ptr, weights, i_w, m_w, T, 0,
        I, CHUNKS, IS_RAGGED, WARPS, RUN, TILES, HALVES, AHEAD, INTERPRETED,
    )  # fmt: skip
    i_c = tl.arange(0, 8 * TILES)[None, :]
    i_o = strip * ROWS + i_c
    if addend_ptr is not None:
        i_row = tl.arange(0, 8 * HALVES)[:, None]
        m_add = (i_row < T) & (i_c < ROWS) & (i_o < O)
        b_y += tl.load(addend_ptr + i_row * addend_stride_t + i_o, mask=m_add, other=0.0)
    b_y = tl.where(b_y == b_y, b_y, float("inf"))
    b_y = tl.where((i_c < ROWS) & (i_o < O), b_y, float("-inf"))
    b_best = tl.max(b_y, axis=1)
    b_id = tl.min(tl.where(b_y == b_best[:, None], i_o, O - 1), axis=1)
    i_t = tl.arange(0, 8 * HALVES)
    o_best = i_t * tl.num_programs(0) + strip
    tl.store(best_ptr + o_best, b_best, mask=i_t < T)
    tl.store(id_ptr + o_best, b_id, mask=i_t < T)


@triton.jit(do_not_specialize=["strips", "first_id"])
def best_strip_kernel(best_ptr, id_ptr, max_ptr, argmax_ptr, strips, first_id, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Largest of the strips' best logits, and first_id + the lowest id that has it. Grid: (T,)."""
    i_t = tl.program_id(0)
    i_s = tl.arange(0, BLOCK)
    o_best = i_t * strips + i_s
    wait_for_producers(PDL)
    let_consumers_start(PDL)
    b_best = tl.load(best_ptr + o_best, mask=i_s < strips, other=float("-inf"))
    b_id = tl.load(id_ptr + o_best, mask=i_s < strips, other=2147483647)
    best = tl.max(b_best, axis=0)
    lowest = tl.min(tl.where(b_best == best, b_id, 2147483647), axis=0)
    tl.store(max_ptr + i_t, best)
    tl.store(argmax_ptr + i_t, first_id + lowest.to(tl.int64))


def _tile_arguments(num_tokens: int, num_inputs: int, settings: StripSettings) -> dict[str, Any]:
    """Compile-time arguments that all strip kernels share."""
    chunk = settings.warps * settings.run * PIECE.value
    chunks = triton.cdiv(triton.cdiv(num_inputs, chunk), settings.splits)
    return {
        "I": num_inputs,
        "CHUNKS": chunks,
        "IS_RAGGED": chunks * settings.splits * chunk != num_inputs,
        "WARPS": settings.warps,
        "RUN": settings.run,
        "TILES": settings.tiles,
        "HALVES": 1 if num_tokens <= 8 else 2,
        "AHEAD": settings.ahead,
        "INTERPRETED": IS_INTERPRETED,
        "num_warps": settings.warps,
        "maxnreg": settings.max_registers,
        **pdl_options(),
    }


def linear_step(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    settings: StripSettings,
) -> torch.Tensor:
    """Compute residual + norm(x) W^T + bias for T <= 16 tokens: x (T, I), weight (O, I), result (T, O)."""
    T, O = x.shape[0], weight.shape[0]
    splits = settings.splits
    assert norm_weight is None or splits == 1, "the norm needs all inputs in one program"
    strips = triton.cdiv(O, settings.outputs)
    y = torch.empty((T, O), dtype=out_dtype, device=x.device)
    partial = counters = None
    if splits > 1:
        partial = torch.empty((splits, MAX_STEP_TOKENS, O), dtype=torch.float32, device=x.device)
        counters = arrival_counters(x.device)
    linear_kernel[strips, splits](
        x, x.stride(0), norm_weight, eps, weight, bias, residual, y, partial, counters, T, O, settings.outputs,
        SPLITS=splits, **_tile_arguments(T, weight.shape[1], settings),
    )  # fmt: skip
    return y


def swiglu_step(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate_up: torch.Tensor,
    limit: float | None,
    settings: StripSettings,
) -> torch.Tensor:
    """Compute the inside of a SwiGLU block for T <= 16 tokens: x (T, D), gate_up (2F, D), result (T, F)."""
    T, F = x.shape[0], gate_up.shape[0] // 2
    y = torch.empty((T, F), dtype=x.dtype, device=x.device)
    swiglu_kernel[triton.cdiv(F, settings.outputs),](
        x, x.stride(0), norm_weight, eps, gate_up, y, T, F, settings.outputs,
        LIMIT=limit, **_tile_arguments(T, gate_up.shape[1], settings),
    )  # fmt: skip
    return y


def argmax_step(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    vocab_size: int,
    settings: StripSettings,
    *,
    addend: torch.Tensor | None = None,
    first_id: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the likeliest of the first `vocab_size` tokens for T <= 16 rows: ids (T) int64 and their logits (T) fp32.

    `addend` (T, N) fp32 is added to the logits, `first_id` to the ids.
    """
    T = x.shape[0]
    assert addend is None or addend.stride(1) == 1
    strips = triton.cdiv(vocab_size, settings.outputs)
    best = torch.empty((T, strips), dtype=torch.float32, device=x.device)
    best_id = torch.empty((T, strips), dtype=torch.int32, device=x.device)
    argmax_kernel[strips,](
        x, x.stride(0), norm_weight, eps, weight, addend, 0 if addend is None else addend.stride(0), best, best_id, T,
        vocab_size, settings.outputs, **_tile_arguments(T, weight.shape[1], settings),
    )  # fmt: skip
    logits = torch.empty(T, dtype=torch.float32, device=x.device)
    ids = torch.empty(T, dtype=torch.int64, device=x.device)
    block = triton.next_power_of_2(strips)
    warps = 16 if block > 4096 else 8
    best_strip_kernel[T,](best, best_id, logits, ids, strips, first_id, BLOCK=block, num_warps=warps, **pdl_options())
    return ids, logits
