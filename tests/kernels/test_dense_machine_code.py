"""The dense step's kernels, compiled for GPUs that are not here: no spills, wide loads, weights before the wait."""

import dataclasses
import sys

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import attention_triton, linear_triton
from tests.kernels.compile_only import Compiled, compiling, print_kernels, run_without_interpreter

BF16 = torch.bfloat16
STRIP = linear_triton.StripSettings(warps=4, run=4, tiles=2, ahead=3, outputs=16)


def launch_all() -> None:
    """One launch of every kernel, at Qwen2.5-1.5B's sizes."""
    x, norm, residual = torch.empty(9, 1536, dtype=BF16), torch.empty(1536, dtype=BF16), torch.empty(9, 512, dtype=BF16)
    weight = torch.empty(512, 1536, dtype=BF16)
    linear_triton.linear_step(x, norm, 1e-6, weight, norm[:512], None, BF16, STRIP)
    linear_triton.linear_step(
        x[:1], None, 0.0, weight, None, residual[:1], BF16, dataclasses.replace(STRIP, splits=3, ahead=1)
    )
    linear_triton.swiglu_step(x[:8], norm, 1e-6, weight, None, dataclasses.replace(STRIP, outputs=8))
    linear_triton.argmax_step(x, norm, 1e-6, weight, 510, STRIP)
    qkv, cache = torch.empty(16, 2048, dtype=BF16), torch.empty(2, 128, 128, dtype=BF16)
    context_len, table = torch.zeros((), dtype=torch.int32), torch.empty(128, 64)
    rest = (cache, cache, context_len, table, table, 12, None, None, 1e-6)
    split = attention_triton.SplitSettings(splits=64, block_s=64, warps=4)
    attention_triton.attend_step(qkv[:1], *rest, split)
    attention_triton.attend_step(qkv, *rest, split)
    attention_triton.attend_prompt(qkv, *rest)


@pytest.fixture(scope="module", params=[90, 100], ids="sm_{}".format)
def kernels(request: pytest.FixtureRequest) -> list[Compiled]:
    return run_without_interpreter(__file__, str(request.param))


def test_every_kernel_waits_once_and_keeps_its_values_in_registers(kernels: list[Compiled]):
    assert len(kernels) == 11
    for kernel in kernels:
        assert kernel.waits == 1, kernel
        assert kernel.stack_bytes == 0, kernel
        # A program of 8 warps needs to fit.
        assert kernel.registers <= 255, kernel
        assert kernel.shared_bytes <= 227 * 1024, kernel


def test_strips_load_fragments_wide_and_straight_into_registers(kernels: list[Compiled]):
    strips = [kernel for kernel in kernels if kernel.name in ("linear_kernel", "swiglu_kernel", "argmax_kernel")]
    assert len(strips) == 4
    for kernel in strips:
        # 3 chunks x 4 pieces x 2 tiles of weights in 16-byte loads, and the tokens.
        assert kernel.wide_loads >= (8 if kernel.wide_loads_before_wait == 8 else 24) + 4, kernel
        assert kernel.wide_loads_before_wait >= 8, kernel
        assert kernel.narrow_loads <= 4, kernel
        # What the warps add up in the end passes through shared memory, and nothing else.
        assert kernel.shared_stores <= 40, kernel
        assert kernel.tensor_core_products in (16, 48), kernel
        assert kernel.registers <= 168, kernel


def test_attention_loads_a_tile_of_the_cache_before_the_wait(kernels: list[Compiled]):
    first, wide = (kernel for kernel in kernels if kernel.name == "split_kernel")
    # Keys and values of 64 positions x 128 x 2 bytes, in 16-byte loads of 128 or 256 threads.
    assert first.wide_loads_before_wait == 16
    assert wide.wide_loads_before_wait == 8


if __name__ == "__main__":
    with compiling(int(sys.argv[1])) as compiled:
        launch_all()
    print_kernels(compiled)
