"""How far an operator may be from its oracle, per dtype of its result: one table for all kernel tests."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Errors relative to the oracle's norm."""

    # Over the whole result.
    rms: float
    # Of the worst row (last axis).
    worst_row: float


# One rounding of a result costs 1.7e-3 of its norm in bf16 and 2.1e-4 in fp16; the rest is for a rounded operand on the
# way.
LIMITS = {
    torch.float64: Limit(rms=1e-12, worst_row=1e-11),
    torch.float32: Limit(rms=1e-6, worst_row=1e-5),
    torch.float16: Limit(rms=5e-4, worst_row=2e-3),
    torch.bfloat16: Limit(rms=4e-3, worst_row=1.5e-2),
}


def relative_rms(y: torch.Tensor, expected: torch.Tensor) -> float:
    """Compute the error of `y` relative to the norm of `expected`."""
    return ((y.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_near(y: torch.Tensor, expected: torch.Tensor, limit: Limit | None = None) -> None:
    """Check a result against an oracle of the same shape, by the limit of the result's dtype or the one given."""
    limit = limit or LIMITS[y.dtype]
    assert y.shape == expected.shape
    assert y.isfinite().all()
    error = relative_rms(y, expected)
    assert error <= limit.rms, f"relative RMS {error:.2e} > {limit.rms:.0e}"
    difference = (y.double() - expected.double()).norm(dim=-1)
    # A row of zeros is measured by the mean row.
    scale = expected.double().norm(dim=-1).clamp(min=expected.double().norm().item() / expected.shape[0] ** 0.5 * 1e-2)
    worst = (difference / scale).max().item()
    assert worst <= limit.worst_row, f"worst row {worst:.2e} > {limit.worst_row:.0e}"
