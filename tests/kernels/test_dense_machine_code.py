"""The dense step's kernels, compiled for GPUs that are not here: no spills, wide loads, weights before the wait."""

import sys

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import attention_triton, linear_triton
from tests.kernels.compile_only import Compiled, compiling, print_kernels, run_without_interpreter

BF16 = torch.bfloat16


def launch_all(arch: int) -> None:
    """Launches at Qwen2.5-1.5B's sizes: all that matter for sm_90, the two main kernels for another."""
    x, norm = torch.empty(9, 1536, dtype=BF16), torch.empty(1536, dtype=BF16)
    weight = torch.empty(512, 1536, dtype=BF16)
    qkv, cache = torch.empty(16, 2048, dtype=BF16), torch.empty(2, 128, 128, dtype=BF16)
    context_len, table = torch.zeros((), dtype=torch.int32), torch.empty(128, 64)
    rest = (cache, cache, context_len, table, table, 12, None, None, 1e-6)
    strip, split = linear_triton.settings_for(2048, 1536), attention_triton.settings_for(2)
    linear_triton.linear_step(x, norm, 1e-6, weight, norm[:512], None, BF16, strip)
    attention_triton.attend_step(qkv[:1], *rest, split, (weight, torch.empty(17920, 1536, dtype=BF16)))
    if arch == 90:
        gated = linear_triton.settings_for(512, 1536, has_gate=True)
        linear_triton.swiglu_step(x[:8], norm, 1e-6, weight, None, gated)
        attention_triton.attend_step(qkv, *rest, split)
        # The largest heads.
        attention_triton.attend_prompt(torch.empty(32, 2048, dtype=BF16), *rest)


@pytest.fixture(scope="module", params=[90, 100], ids="sm_{}".format)
def kernels(request: pytest.FixtureRequest) -> list[Compiled]:
    return run_without_interpreter(__file__, str(request.param))


def test_every_kernel_waits_once_and_spills_nothing(kernels: list[Compiled]):
    assert len(kernels) in (3, 8)
    for kernel in kernels:
        assert kernel.waits == 1, kernel
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= 227 * 1024, kernel


def test_strips_load_fragments_wide_and_straight_into_registers(kernels: list[Compiled]):
    strips = [kernel for kernel in kernels if kernel.name in ("linear_kernel", "swiglu_kernel")]
    assert strips
    for kernel in strips:
        # 3 chunks x 4 pieces x 2 tiles of weights, all of them before the wait; behind it the tokens.
        assert kernel.wide_loads_before_wait == 24, kernel
        assert kernel.wide_loads >= 36, kernel
        assert kernel.narrow_loads <= 4, kernel
        # What the warps add up in the end passes through shared memory, and nothing else.
        assert kernel.shared_stores <= 30, kernel
        assert kernel.tensor_core_products == 48, kernel
        # At least two programs of 4 warps fit into a multiprocessor, with half of it left for the next launch.
        assert kernel.registers <= 200, kernel


def test_attention_loads_a_tile_of_the_cache_before_the_wait(kernels: list[Compiled]):
    splits = [kernel for kernel in kernels if kernel.name == "split_kernel"]
    # Keys and values of 64 positions x 128 x 2 bytes, in 16-byte loads of 128 threads, of 256 for the widest tile.
    assert [kernel.wide_loads_before_wait for kernel in splits] == [16, 8][: len(splits)]


def test_attention_reads_two_weights_ahead(kernels: list[Compiled]):
    # A run that is cut short reads ahead as well: two places, two weights each. The second launch was told of none.
    splits = [kernel for kernel in kernels if kernel.name == "split_kernel"]
    assert [kernel.prefetches for kernel in splits] == [4, 0][: len(splits)]


if __name__ == "__main__":
    with compiling(int(sys.argv[1])) as compiled:
        launch_all(int(sys.argv[1]))
    print_kernels(compiled)
