"""A dense block of one token in one launch equals its reference."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import feed_forward_cuda
from soloist.kernels.launch import IS_INTERPRETED
from soloist.kernels.norm import rms_norm_ref
from tests.kernels import cuda_on_cpu
from tests.kernels.device import DEVICE, nan_in_fresh_memory, rand
from tests.kernels.limits import Limit, assert_near

BF16 = torch.bfloat16
EPS = 1e-6
# The output's own rounding, and an activation that is now and then rounded the other way.
LIMIT = Limit(rms=4e-3, worst_row=1e-2)


@pytest.fixture(autouse=True)
def _on_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if IS_INTERPRETED:
        monkeypatch.setattr(feed_forward_cuda, "load_kernel", cuda_on_cpu.load_kernel)
        monkeypatch.setattr(feed_forward_cuda, "launch", cuda_on_cpu.launch)
    with nan_in_fresh_memory():
        yield


# Qwen2.5's smallest, part-filled pieces, more than one round of rows and of outputs, a ring that is longer than a row.
@pytest.mark.parametrize(("D", "F"), [(896, 4864), (64, 8), (192, 1000), (704, 264), (1984, 4128), (1536, 8960)])
def test_a_block_equals_its_reference(D: int, F: int):
    x, norm = rand(1, D, dtype=BF16), torch.rand(D, device=DEVICE).add(0.5).to(BF16)
    gate_up, down = rand(2 * F, D, scale=D**-0.5, dtype=BF16), rand(D, F, scale=F**-0.5, dtype=BF16)
    assert feed_forward_cuda.can_run(x, gate_up, down) or not feed_forward_cuda.HAS_NVRTC
    gate, up = (rms_norm_ref(x.float(), norm.float(), EPS) @ gate_up.float().T).chunk(2, dim=1)
    block = torch.nn.functional.silu(gate) * up @ down.float().T
    kept = x.clone()
    # Launches one after the other share what programs wait by.
    for _ in range(3):
        out = feed_forward_cuda.run(x, norm, EPS, gate_up, down)
    assert torch.equal(x, kept)
    assert_near(out, x + block, LIMIT)
    assert_near(out - x, block, Limit(rms=1e-2, worst_row=3e-2))


def test_what_does_not_fit_is_left_to_others():
    norms = [torch.empty(rows, D, dtype=dtype, device=DEVICE) for rows, D, dtype in (
        (2, 256, BF16), (1, 4096, BF16), (1, 200, BF16), (1, 256, torch.float32),
    )]  # fmt: skip
    for x in norms:
        D = x.shape[1]
        gate_up, down = x.new_empty(128, D), x.new_empty(D, 64)
        assert not feed_forward_cuda.can_run(x, gate_up, down)
    x = torch.empty(1, 256, dtype=BF16, device=DEVICE)
    assert not feed_forward_cuda.can_run(x, x.new_empty(24, 256), x.new_empty(256, 12))
