"""The step's latent attention for few query rows, alone: what its splits leave, merged, is plain attention."""

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import mla_step_cuda
from soloist.kernels.launch import IS_INTERPRETED
from tests.kernels import cuda_on_cpu
from tests.kernels.device import DEVICE, nan_in_fresh_memory
from tests.kernels.limits import Limit, assert_near

R, P = 512, 64
# The softmax's weights are rounded.
LIMIT = Limit(rms=3e-3, worst_row=6e-3)


@pytest.mark.parametrize(
    ("T", "heads", "context_len", "splits"),
    [(1, 3, 0, 2), (1, 16, 150, 1), (1, 5, 333, 3), (2, 16, 63, 2), (9, 3, 200, 2), (9, 16, 90, 1), (16, 5, 300, 2)],
)
def test_merged_splits_are_plain_attention(
    monkeypatch: pytest.MonkeyPatch, T: int, heads: int, context_len: int, splits: int
):
    if IS_INTERPRETED:
        monkeypatch.setattr(mla_step_cuda, "load_kernel", cuda_on_cpu.load_kernel)
        monkeypatch.setattr(mla_step_cuda, "launch", cuda_on_cpu.launch)
    S, scale = context_len + T, 0.1
    cache = torch.randn(S + 5, R + P, device=DEVICE).bfloat16()
    cache[S:] = torch.nan
    query = torch.randn(T, heads, R + P, device=DEVICE).bfloat16()
    assert mla_step_cuda.can_run(query, R)
    with nan_in_fresh_memory():
        partial = torch.empty(splits, T * heads, R, device=DEVICE)
        partial_max, partial_sum = torch.empty(2, splits, T * heads, device=DEVICE)
    length = torch.tensor(context_len, dtype=torch.int32, device=DEVICE)
    mla_step_cuda.attend(query, cache, length, partial, partial_max, partial_sum, scale)

    weight = torch.exp2(partial_max - partial_max.amax(0)) * partial_sum
    merged = (partial * (weight / weight.sum(0))[..., None]).sum(0).view(T, heads, R)
    rows = cache[:S].float()
    scores = torch.einsum("thx,sx->ths", query.float(), rows) * scale
    is_seen = torch.arange(S, device=DEVICE) <= context_len + torch.arange(T, device=DEVICE)[:, None]
    scores.masked_fill_(~is_seen[:, None], -torch.inf)
    assert_near(merged, scores.softmax(-1) @ rows[:, :R], LIMIT)
