"""Argument checks for launchers, and the switch that runs the references everywhere.

Owns `expect` (named-axis checks), `check_head_size` and `use_reference`. Legend of the axis letters (one for the whole
project):

    T  tokens in this step (decode 1, verify k+1)     F  feed-forward size
    S  cached positions                               E  experts
    D  hidden size                                    A  experts per token
    H  query heads                                    R  latent rank
    G  key/value heads                                N  vocabulary size
    K  key head size     V  value head size           L  layers
    P  rotary part of a head                          O, I  outputs and inputs of a linear map
"""

import os

import torch

from soloist.errors import UnsupportedError

# What activations and weights may be held in.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Head sizes that a GPU's attention kernels take. Each half is the inner side of a tensor core's product, which is 16 at
# least; the tiles of larger heads do not fit the shared memory.
HEAD_SIZES = (32, 64, 128)

_REFERENCE_EVERYWHERE = os.environ.get("SOLOIST_REFERENCE", "") not in ("", "0")


def use_reference(x: torch.Tensor) -> bool:
    """Say whether a launcher given `x` runs its reference: CPU tensors always, CUDA tensors if SOLOIST_REFERENCE=1."""
    return _REFERENCE_EVERYWHERE or not x.is_cuda


def use_reference_everywhere() -> bool:
    """Say whether `SOLOIST_REFERENCE=1` is set, which overrules packed CPU kernels too."""
    return _REFERENCE_EVERYWHERE


def expect(
    x: torch.Tensor,
    axes: str,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    dims: dict[str, int],
    *,
    name: str,
) -> None:
    """Check one tensor argument: one letter stands for one size within a call.

    Args:
        x: the argument.
        axes: axis letters separated by spaces, as in `"T H K"`; a number stands for itself, `""` for a scalar.
        dtype: the dtype, or dtypes, allowed.
        dims: sizes seen so far in this call; new letters are added in place.
        name: what the argument is called.

    Raises:
        AssertionError: the launcher was called wrongly. This is our own mistake, never a user's.
    """
    letters = axes.split()
    shape = x.shape
    if len(shape) != len(letters):
        raise AssertionError(f"{name}: expected axes [{axes}], got shape {tuple(shape)}")
    for size, letter in zip(shape, letters, strict=True):
        want = int(letter) if letter.isdigit() else dims.setdefault(letter, size)
        if size != want:
            raise AssertionError(
                f"{name}: axis {letter} is {size}, expected {want} (shape {tuple(shape)}, axes [{axes}])"
            )
    if x.dtype is not dtype and not (isinstance(dtype, tuple) and x.dtype in dtype):
        raise AssertionError(f"{name}: dtype {x.dtype}, expected {dtype}")


def check_head_size(K: int) -> None:
    """Refuse heads that no attention kernel of a GPU takes.

    Raises:
        UnsupportedError: K is none of `HEAD_SIZES`.
    """
    if K not in HEAD_SIZES:
        raise UnsupportedError(
            f"attention to heads of {K} has no GPU kernel; it takes heads of {', '.join(map(str, HEAD_SIZES))}: run the"
            " model on the CPU"
        )
