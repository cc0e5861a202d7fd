"""What a step on an x86-64 processor consists of: linear maps of packed weights, and attention, for AVX2 and AVX-512.

Owns the machine code of `cpu/step.c`, which ships built (`cpu/build.sh`), so that no compiler is needed, and what is
passed to it. The operators are `linear`'s and `attention`'s. Elsewhere the products are PyTorch's.

A call takes a few microseconds besides its work; the same in PyTorch's operators is some ten calls, each with its own
tensor and, between bf16 and fp32, its own copy.
"""

import contextlib
import ctypes
import functools
import mmap
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

# Outputs of a tile, and inputs that share a scale.
TILE, GROUP = 16, 32
# Rows from which attention is a matrix product.
MAX_ATTENTION_ROWS = 16
MAX_HEAD_DIM = 256
_NORM_DTYPES = (torch.bfloat16, torch.float32)

_FOLDER = Path(__file__).parent / "cpu"


@dataclass(frozen=True)
class Tiles:
    """A linear map's weight as step.c reads it."""

    # (O/16, I/32, bytes) uint8, as `packed` makes them.
    codes: torch.Tensor
    # O, I.
    shape: tuple[int, int]
    # Whether codes have 4 bits, or 8.
    is_int4: bool
    # Whether inputs are rounded to 15 bits, finer than bf16 for all but the smallest, or to 8, which is less work
    # for steps of several rows; with 8-bit codes always.
    has_fine_inputs: bool = True

    @functools.cached_property
    def address(self) -> int:
        """Where the codes are."""
        return self.codes.data_ptr()


class LargePages:
    """Memory for weights in pages of 2 MiB, as far as the system has such pages.

    A thread reads through them 21.5 GB/s on a Zen 4 where it reads 15.6 through pages of 4 KiB.
    """

    _PAGE_BYTES = 2**21
    # Of one mapping, unless more is asked for at once: small weights share pages.
    _CHUNK_BYTES = 2**26

    def __init__(self) -> None:
        # (bytes) uint8, what is left of the last mapping.
        self._free = torch.empty(0, dtype=torch.uint8)

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """Copy a uint8 tensor there."""
        num_bytes = x.numel()
        if self._free.numel() < num_bytes:
            size = max(self._CHUNK_BYTES, num_bytes) + self._PAGE_BYTES
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # A kernel that was built without such pages refuses the advice.
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
            chunk = torch.frombuffer(mapping, dtype=torch.uint8)
            self._free = chunk[-chunk.data_ptr() % self._PAGE_BYTES :]
        # Rows of 64 bytes begin at multiples of 64.
        end = -(-num_bytes // 64) * 64
        placed, self._free = self._free[:num_bytes].view(x.shape), self._free[end:]
        return placed.copy_(x)


class _Linear(ctypes.Structure):
    """`struct Linear` of step.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "norm", "weight", "bias", "residual", "y")),
        *((name, ctypes.c_long) for name in ("num_rows", "num_inputs", "num_outputs")),
        *((name, ctypes.c_int) for name in ("is_int4", "is_fine", "norm_is_fp32", "out_is_fp32")),
        *((name, ctypes.c_int) for name in ("has_gate", "has_limit", "num_threads")),
        *((name, ctypes.c_float) for name in ("eps", "limit")),
    )


class _Attention(ctypes.Structure):
    """`struct Attention` of step.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "k_cache", "v_cache", "cos", "sin", "q_norm", "k_norm", "out")),
        *((name, ctypes.c_long) for name in ("num_rows", "num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_long) for name in ("context_len", "capacity")),
        ("eps", ctypes.c_float),
        ("num_threads", ctypes.c_int),
    )


@functools.cache
def load() -> ctypes.CDLL | None:
    """Load the best machine code that this processor runs; None if there is none."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    for name in ("avx512", "avx2"):
        try:
            library = ctypes.CDLL(str(_FOLDER / f"step_{name}.so"))
        except OSError:
            # A PyTorch that was not built with GCC's OpenMP, or a system without glibc.
            return None
        if library.is_supported():
            library.linear.argtypes = library.attention.argtypes = (ctypes.c_void_p,)
            library.linear.restype = library.attention.restype = None
            return library
    return None


def loaded_name() -> str | None:
    """Give what the machine code that `load` found was built for."""
    library = load()
    return None if library is None else Path(library._name).stem.removeprefix("step_")


def can_map(num_outputs: int, num_inputs: int) -> bool:
    """Say whether weights of this shape can be held as tiles on this machine."""
    return num_outputs % TILE == 0 and num_inputs % GROUP == 0 and load() is not None


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def linear(
    x: torch.Tensor,
    tiles: Tiles,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    has_gate: bool = False,
    limit: float | None = None,
) -> torch.Tensor:
    """Apply a weight of tiles, with what may stand before and behind it.

    h = x or rms_norm(x);  y = round(h) W^T (+ b) (+ residual);  with a gate: [g, u] = y, silu(g) * u

    round(h) = code * scale, one fp32 scale for 32 inputs; |code| <= 16256 if inputs are fine, otherwise 127.

    Args:
        x: (T, I) bf16.
        tiles: the weight (O, I).
        norm: (I) bf16 or fp32, weight of an RMS norm.
        eps: of the norm.
        bias: (O) bf16.
        residual: (T, O) bf16.
        out_dtype: bf16 or fp32.
        has_gate: whether the outputs are gates, then as many factors: O a multiple of 32.
        limit: of the gated product, as `norm_swiglu`'s.

    Returns:
        (T, O), or (T, O/2) with a gate. Sums are fp32 and rounded once. A row has the same bits however many there are,
        and with any number of threads.
    """
    x = x.contiguous()
    T, (O, I) = x.shape[0], tiles.shape
    assert x.dtype is torch.bfloat16 and x.shape[1] == I, f"x is {tuple(x.shape)} {x.dtype}, the weight has {I} inputs"
    assert norm is None or norm.shape[0] == I, f"norm_weight: axis D is {norm.shape[0]}, expected {I}"
    assert norm is None or norm.dtype in _NORM_DTYPES, f"norm_weight: dtype {norm.dtype}, expected {_NORM_DTYPES}"
    assert residual is None or residual.shape == (T, O), f"residual is {tuple(residual.shape)}, expected {(T, O)}"
    assert residual is None or residual.dtype is x.dtype, f"residual: dtype {residual.dtype}, expected {x.dtype}"
    assert bias is None or (bias.shape[0] == O and bias.dtype is x.dtype), f"bias is {tuple(bias.shape)} {bias.dtype}"
    assert not has_gate or O % (2 * TILE) == 0, f"{O} gates and factors come in {2 * TILE}s"
    assert not has_gate or (bias is None and residual is None), "a gated map has no bias and no residual"
    library = load()
    assert library is not None
    y = torch.empty((T, O // 2 if has_gate else O), dtype=out_dtype)
    residual = None if residual is None else residual.contiguous()
    library.linear(
        ctypes.byref(
            _Linear(
                x.data_ptr(),
                _address(norm),
                tiles.address,
                _address(bias),
                _address(residual),
                y.data_ptr(),
                T,
                I,
                O,
                tiles.is_int4,
                tiles.has_fine_inputs,
                norm is not None and norm.dtype is torch.float32,
                out_dtype is torch.float32,
                has_gate,
                limit is not None,
                torch.get_num_threads(),
                eps,
                limit or 0.0,
            )
        )
    )
    return y


def can_attend(qkv: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Say whether `attention` takes these rows, whose caches are of the same dtype."""
    K = k_cache.shape[2]
    is_step = qkv.dtype is torch.bfloat16 and qkv.shape[0] <= MAX_ATTENTION_ROWS and qkv.is_contiguous()
    return is_step and K % 32 == 0 and K <= MAX_HEAD_DIM and k_cache.is_contiguous() and load() is not None


def attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_len: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Compute `attention.attention` for the rows of a step, in fp32 from the rounded cache.

    Scores are taken in blocks of 64 positions, so no more than those of one block are held (Milakov and Gimelshein
    2018, arXiv 1805.02867). A row has the same bits however many there are, and with any number of threads.
    """
    T, K, capacity, start = qkv.shape[0], k_cache.shape[2], k_cache.shape[1], int(context_len)
    assert start + T <= min(capacity, cos.shape[0]) and v_cache.shape == k_cache.shape and v_cache.is_contiguous()
    assert k_cache.dtype is v_cache.dtype is qkv.dtype and k_cache.shape[0] == num_kv_heads
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * K and cos.shape[1] == sin.shape[1] == K // 2
    library = load()
    assert library is not None
    out = torch.empty((T, num_heads * K), dtype=torch.bfloat16)
    library.attention(
        ctypes.byref(
            _Attention(
                qkv.data_ptr(),
                k_cache.data_ptr(),
                v_cache.data_ptr(),
                cos.data_ptr(),
                sin.data_ptr(),
                _address(q_norm),
                _address(k_norm),
                out.data_ptr(),
                T,
                num_heads,
                num_kv_heads,
                K,
                start,
                capacity,
                eps,
                torch.get_num_threads(),
            )
        )
    )
    return out
