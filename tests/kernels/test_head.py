"""The greedy head gives the lowest of the likeliest tokens, and never a padding row."""

import pytest
import torch

from soloist.kernels import head
from soloist.kernels.norm import rms_norm_ref
from soloist.kernels.packed import pack_weight
from tests.kernels.limits import LIMITS, Limit, assert_near

T, D, PADDED, N = 4, 24, 37, 33


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, norm and weight: token t likes row 7 t + 2, token 1 row 30 as much as row 9, all a padding row most."""
    x, weight = torch.randn(T, D), torch.randn(PADDED, D)
    weight[7 * torch.arange(T) + 2] = 3 * x
    weight[30] = weight[9]
    weight[N:] = 9 * x.sum(0)
    return x, torch.rand(D) + 0.5, weight


def test_argmax_equals_that_of_all_logits():
    x, norm, weight = inputs()
    ids, logits = head.norm_argmax(x, norm, 1e-5, weight, N)
    expected = rms_norm_ref(x, norm, 1e-5).double() @ weight[:N].double().T
    assert ids.tolist() == [2, 9, 16, 23]
    assert_near(logits[:, None], expected.amax(1)[:, None], LIMITS[torch.float32])


def test_a_packed_head_works_the_same():
    x, norm, weight = inputs()
    ids, _ = head.norm_argmax(x, norm, 1e-5, pack_weight(weight, "fp16"), N)
    assert ids.tolist() == [2, 9, 16, 23]


@pytest.mark.parametrize("rows", [T, 17])
def test_a_gpu_takes_the_kernel_for_a_step_only(monkeypatch: pytest.MonkeyPatch, rows: int):
    pytest.importorskip("triton")
    from soloist.kernels import linear_triton
    from tests.kernels.device import DEVICE, launch_kernels

    launch_kernels(monkeypatch, head)
    taken = []
    run = linear_triton.argmax_step
    monkeypatch.setattr(linear_triton, "argmax_step", lambda *args, **kw: taken.append(args) or run(*args, **kw))
    x, norm, weight = (tensor.to(DEVICE, torch.bfloat16) for tensor in inputs())
    x = x[torch.arange(rows) % T].contiguous()
    ids, logits = head.norm_argmax(x, norm, 1e-5, weight, N)
    assert ids.tolist() == [(2, 9, 16, 23)[t % T] for t in range(rows)]
    expected = rms_norm_ref(x.float(), norm, 1e-5) @ weight[:N].float().T
    # The interpreter truncates to bf16.
    assert_near(logits[:, None], expected.amax(1)[:, None], Limit(rms=2e-2, worst_row=4e-2))
    assert len(taken) == (rows == T)


def test_a_bias_is_added_to_logits_that_there_are_and_ids_begin_where_they_are_told():
    x, _, weight = inputs()
    logits = torch.zeros(T, PADDED)
    logits[2, 11] = 1e6
    ids, values = head.linear_argmax(x, weight, logits, N, first_id=100)
    expected = logits[:, :N].double() + x.double() @ weight[:N].double().T
    assert ids.tolist() == (100 + expected.argmax(1)).tolist() and ids[2] == 111
    assert_near(values[:, None], expected.amax(1)[:, None], LIMITS[torch.float32])


def test_a_gpu_adds_the_bias_in_the_kernel(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    from tests.kernels.device import DEVICE, launch_kernels

    launch_kernels(monkeypatch, head)
    x, _, weight = (tensor.to(DEVICE, torch.bfloat16) for tensor in inputs())
    # Of more rows than are read, and the last one past the end is never looked at.
    logits = torch.randn(2 * T, PADDED + 3, device=DEVICE)[::2, :PADDED]
    logits[2, 11] = 1000
    ids, values = head.linear_argmax(x, weight, logits, N, first_id=100)
    expected = logits[:, :N] + x.float() @ weight[:N].float().T
    assert ids.tolist() == (100 + expected.argmax(1)).tolist() and ids[2] == 111
    assert_near(values[:, None], expected.amax(1)[:, None], Limit(rms=2e-2, worst_row=4e-2))


def test_a_gpu_finds_a_token_where_no_logit_is_a_number(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    from tests.kernels.device import DEVICE, launch_kernels

    launch_kernels(monkeypatch, head)
    x, norm, weight = (tensor.to(DEVICE, torch.bfloat16) for tensor in inputs())
    x[1] = torch.nan
    # No lane of a strip is padding.
    ids, logits = head.norm_argmax(x, norm, 1e-5, weight[:32], 32, first_id=100)
    assert logits.isfinite().tolist() == [True, False, True, True]
    assert 100 <= ids[1] < 132 and ids[0] == 102


def test_a_gpu_sees_one_row_of_a_head_that_is_no_number(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    from tests.kernels.device import DEVICE, launch_kernels

    launch_kernels(monkeypatch, head)
    x, norm, weight = (tensor.to(DEVICE, torch.bfloat16) for tensor in inputs())
    weight[7] = torch.nan
    ids, logits = head.norm_argmax(x, norm, 1e-5, weight, N)
    assert ids.tolist() == [7] * T and not logits.isfinite().any()
