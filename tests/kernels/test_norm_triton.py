"""The norm kernels equal their references."""

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import norm_triton
from soloist.kernels.launch import IS_INTERPRETED
from soloist.kernels.norm import gated_rms_norm_ref, rms_norm_ref

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter truncates to bf16 where hardware rounds to nearest, so there everything is fp32.
DTYPE = torch.float32 if IS_INTERPRETED else torch.bfloat16
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[DTYPE]


def noise_beside(*shape: int) -> torch.Tensor:
    """A tensor inside a wider one filled with noise."""
    wider = torch.full((*shape[:-1], shape[-1] + 8), 1e30, device=DEVICE, dtype=DTYPE)
    wider[..., : shape[-1]] = torch.randn(shape, device=DEVICE)
    return wider[..., : shape[-1]]


@pytest.mark.parametrize(("T", "D"), [(1, 7), (5, 96), (3, 1100)])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_equals_its_reference(T: int, D: int, weight_dtype: torch.dtype):
    x, weight = noise_beside(T, D), torch.rand(D, device=DEVICE).add(0.5).to(weight_dtype)
    out = norm_triton.rms_norm_rows(x, weight, 1e-5)
    torch.testing.assert_close(out.float(), rms_norm_ref(x.float(), weight, 1e-5), rtol=LIMIT, atol=1e-6)


def test_gated_rms_norm_equals_its_reference():
    T, H, V = 3, 5, 20
    x, gate, weight = noise_beside(T, H, V), noise_beside(T, H, V), torch.rand(V, device=DEVICE).add(0.5)
    out = norm_triton.gated_rms_norm_rows(x, gate, weight, 1e-5)
    torch.testing.assert_close(
        out.float(), gated_rms_norm_ref(x.float(), gate.float(), weight, 1e-5), rtol=LIMIT, atol=1e-6
    )
