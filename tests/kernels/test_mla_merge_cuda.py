"""The merge of a step's latent attention: splits become one softmax, times each head's value map and its gate."""

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import mla_merge_cuda
from soloist.kernels.launch import IS_INTERPRETED
from tests.kernels import cuda_on_cpu
from tests.kernels.device import DEVICE, nan_in_fresh_memory, split_rows
from tests.kernels.limits import Limit, assert_near

BF16 = torch.bfloat16
# The merged latent and the result are rounded.
LIMIT = Limit(rms=4e-3, worst_row=1.5e-2)


@pytest.mark.parametrize(
    ("T", "heads", "splits", "R", "V", "has_gate"),
    [(1, 2, 128, 512, 128, True), (3, 1, 44, 256, 64, True), (9, 2, 37, 512, 128, False), (16, 1, 3, 512, 64, True)],
)
def test_a_merge_equals_its_equation(
    monkeypatch: pytest.MonkeyPatch, T: int, heads: int, splits: int, R: int, V: int, has_gate: bool
):
    if IS_INTERPRETED:
        monkeypatch.setattr(mla_merge_cuda, "load_kernel", cuda_on_cpu.load_kernel)
        monkeypatch.setattr(mla_merge_cuda, "launch", cuda_on_cpu.launch)
    Kn = 24
    partial = torch.randn(splits, T * heads, R, device=DEVICE)
    highest, total = 4 * torch.randn(splits, T * heads, device=DEVICE), 1 + torch.rand(splits, T * heads, device=DEVICE)
    # A split without positions.
    partial[1], highest[1], total[1] = 0, -3e38, 0
    w_kv_b = (torch.randn(heads * (Kn + V), R, device=DEVICE) * R**-0.5).to(BF16)
    gate, _ = split_rows(T, [heads, 3], dtype=BF16)
    assert mla_merge_cuda.can_run(w_kv_b, V)
    with nan_in_fresh_memory():
        out = mla_merge_cuda.merge(partial, highest, total, w_kv_b, gate if has_gate else None, heads, V)

    weight = torch.exp2(highest - highest.amax(0)) * total
    z = (partial * (weight / weight.sum(0))[..., None]).sum(0).view(T, heads, R)
    y = torch.einsum("thr,hvr->thv", z, w_kv_b.float().view(heads, Kn + V, R)[:, Kn:])
    if has_gate:
        y = y * torch.sigmoid(gate.float())[..., None]
    assert_near(out.float(), y.flatten(1), LIMIT)
