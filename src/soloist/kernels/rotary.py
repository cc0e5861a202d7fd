"""Rotary position embedding: the table of angles, with its scalings, and the rotation. Owns no positions."""

import math
from dataclasses import dataclass

import torch

from soloist.kernels.check import FLOATS, expect


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Slow frequencies divided by `factor`, fast ones kept, a linear blend in between (`rope_type: llama3`)."""

    # How many times longer the context became.
    factor: float
    # Wavelengths above original_max_position_embeddings / low_freq_factor are slowed by the full factor.
    low_freq_factor: float
    # Wavelengths below original_max_position_embeddings / high_freq_factor are kept.
    high_freq_factor: float
    # Context length the model was first trained with.
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Frequencies interpolated by the number of turns they make within the original context (`rope_type: yarn`)."""

    # How many times longer the context became.
    factor: float
    # Context length the model was first trained with.
    original_max_position_embeddings: int
    # Dimensions that turn more often than this within the original context are kept.
    beta_fast: float = 32.0
    # Dimensions that turn less often than this are slowed by the full factor.
    beta_slow: float = 1.0
    # cos and sin are multiplied by this; None: computed from `factor`, `mscale` and `mscale_all_dim`.
    attention_factor: float | None = None
    # Strength of the logarithmic correction in cos and sin; None: 1.
    mscale: float | None = None
    # Strength of the part of the correction that the model applies to its softmax scale instead; None: none.
    mscale_all_dim: float | None = None
    # Whether the bounds of the blend are rounded to whole dimensions.
    truncate: bool = True


RopeScaling = Llama3Scaling | YarnScaling


@dataclass(frozen=True, kw_only=True)
class RotaryTable:
    """Cosines and sines of every position, computed once."""

    # (S, P/2) fp32, any attention factor included.
    cos: torch.Tensor
    # (S, P/2) fp32, any attention factor included.
    sin: torch.Tensor


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Compute YaRN's logarithmic correction: 0.1 * mscale * ln(factor) + 1 for a factor above 1.

    Source: Peng et al. 2023 (arXiv 2309.00071), equation 22.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _scale_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Slow the frequencies (P/2) whose wavelength is long against the original context."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _scale_yarn(frequencies: torch.Tensor, scaling: YarnScaling, dim: int, theta: float) -> torch.Tensor:
    """Slow the frequencies (P/2) of the dimensions that turn seldom within the original context."""

    def dimension_of(num_turns: float) -> float:
        """Say which dimension makes `num_turns` turns within the original context."""
        wavelength = scaling.original_max_position_embeddings / num_turns
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = max(high - low, 0.001)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device=frequencies.device) - low) / width
    keep = 1 - ramp.clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _attention_factor(scaling: YarnScaling) -> float:
    """Compute the factor on cos and sin."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor)


def make_rotary_table(
    dim: int,
    theta: float,
    max_len: int,
    scaling: RopeScaling | None = None,
    *,
    device: torch.device | str = "cpu",
) -> RotaryTable:
    """Compute the angles of the positions 0..max_len-1.

    angle(s, i) = s * frequency_i, frequency_i = theta^(-2i / P) before scaling

    Args:
        dim: P, the rotated dimensions of a head; even.
        theta: base of the frequencies.
        max_len: S, number of positions.
        scaling: how a longer context was reached; None: plain angles.
        device: where the table is put.

    Returns:
        The table, fp32. YaRN's attention factor is inside cos and sin; a factor on the softmax scale is the model's.

    Source: Su et al. 2021 (arXiv 2104.09864), equation 15; Peng et al. 2023 (arXiv 2309.00071); Llama 3.1's model card.
    """
    assert dim % 2 == 0, f"dim: {dim} is odd, rotary rotates pairs"
    if torch.device(device).type == "meta":
        # `arange` there would import PyTorch's compiler, which takes seconds.
        cos, sin = (torch.empty(max_len, dim // 2, device=device) for _ in range(2))
        return RotaryTable(cos=cos, sin=sin)
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)  # (P/2)
    factor = 1.0
    if isinstance(scaling, Llama3Scaling):
        frequencies = _scale_llama3(frequencies, scaling)
    elif isinstance(scaling, YarnScaling):
        frequencies = _scale_yarn(frequencies, scaling, dim, theta)
        factor = _attention_factor(scaling)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32, device=device), frequencies)  # (S, P/2)
    return RotaryTable(cos=angles.cos() * factor, sin=angles.sin() * factor)


def apply_rotary_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate pairs in fp32, rounded once to `x`'s dtype."""
    num_tokens, half = cos.shape
    between = (1,) * (x.dim() - 2)
    cos, sin = cos.view(num_tokens, *between, half), sin.view(num_tokens, *between, half)  # (T, 1.., P/2)
    split, axis = ((half, 2), -1) if interleaved else ((2, half), -2)
    pairs = x.float().view(*x.shape[:-1], *split)
    rotated = pairs * cos.unsqueeze(axis)
    # Written as two updates in place: at one token the cost is the number of calls.
    (a, b), (rotated_a, rotated_b) = pairs.unbind(axis), rotated.unbind(axis)  # (T, .., P/2) each
    rotated_a.addcmul_(b, sin, value=-1)
    rotated_b.addcmul_(a, sin)
    return rotated.view(x.shape).to(x.dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the pairs of each head by the angle of their token.

    (a, b) -> (a cos - b sin, b cos + a sin)

    Args:
        x: (T, .., P), any number of axes between.
        cos: (T, P/2) fp32, the rows of the table at the tokens' positions.
        sin: (T, P/2) fp32.
        interleaved: pairs are (x_2i, x_2i+1); otherwise half-split, (x_i, x_i+P/2).

    Returns:
        The shape and dtype of `x`, the same arrangement of pairs: fp32 inside, one rounding.

    Source: Su et al. 2021 (arXiv 2104.09864), equation 34; half-split as in GPT-NeoX.
    """
    assert x.dtype in FLOATS, f"x: dtype {x.dtype}, expected {FLOATS}"
    dims = {"T": x.shape[0], "P": x.shape[-1] // 2}
    expect(cos, "T P", torch.float32, dims, name="cos")
    expect(sin, "T P", torch.float32, dims, name="sin")
    # Plain operators of PyTorch, on any device: steps rotate inside their attention kernels.
    return apply_rotary_ref(x, cos, sin, interleaved)
