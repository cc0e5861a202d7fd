"""The attention half of a layer in one launch equals the reference at every width and length, and minds its rows."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import attention_block_cuda
from soloist.kernels.attention_block import attention_block_ref
from soloist.kernels.launch import IS_INTERPRETED
from soloist.kernels.rotary import make_rotary_table
from tests.kernels import cuda_on_cpu
from tests.kernels.device import DEVICE, nan_in_fresh_memory, rand
from tests.kernels.limits import Limit, assert_near

BF16 = torch.bfloat16
EPS = 1e-6
S = 700


@pytest.fixture(autouse=True)
def _on_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if IS_INTERPRETED:

        def load_kernel(source: str, name: str, definitions: tuple[tuple[str, str], ...], device: torch.device) -> Any:
            # Programs that wait for each other go on in turn.
            programs = str(attention_block_cuda._num_programs(device))
            return cuda_on_cpu.load_kernel(source, name, (*definitions, ("CLUSTER", programs)), device)

        monkeypatch.setattr(attention_block_cuda, "load_kernel", load_kernel)
        monkeypatch.setattr(attention_block_cuda, "launch", cuda_on_cpu.launch)
        monkeypatch.setattr(attention_block_cuda, "HAS_NVRTC", True)
    with nan_in_fresh_memory():
        yield


class Case:
    """Arguments of one call; rows of the cache that nobody has written are no numbers."""

    def __init__(
        self, T: int, length: int, *, D: int = 96, H: int = 6, G: int = 2, K: int = 64, has_norm: bool = False
    ) -> None:
        torch.manual_seed(1000 * T + length)
        self.x, self.norm = rand(T, D, dtype=BF16), torch.rand(D, device=DEVICE).add(0.5).to(BF16)
        self.qkv = rand((H + 2 * G) * K, D, scale=D**-0.5, dtype=BF16)
        self.bias = None if has_norm else rand((H + 2 * G) * K, dtype=BF16)
        # Large, so that what is added to the residual stream does not drown in its rounding.
        self.out = rand(D, H * K, scale=8 * (H * K) ** -0.5, dtype=BF16)
        self.k_cache, self.v_cache = (rand(G, S, K, dtype=BF16) for _ in range(2))
        self.k_cache[:, length:], self.v_cache[:, length:] = torch.nan, torch.nan
        self.length, self.heads = torch.tensor(length, dtype=torch.int32, device=DEVICE), H
        table = make_rotary_table(K, 1e4, S, device=DEVICE)
        self.tables = table.cos, table.sin
        self.norms = [torch.rand(K, device=DEVICE).add(0.5).to(BF16) if has_norm else None for _ in range(2)]

    def arguments(self, *caches: torch.Tensor) -> tuple[Any, ...]:
        return self.x, self.norm, EPS, self.qkv, self.bias, self.out, *caches, self.length, *self.tables

    def run(self) -> torch.Tensor:
        assert attention_block_cuda.can_run(self.x, self.k_cache, self.heads)
        arguments = self.arguments(self.k_cache, self.v_cache)
        return attention_block_cuda.run(*arguments, self.heads, *self.norms, (self.qkv,))

    def check(self) -> torch.Tensor:
        T, length = self.x.shape[0], int(self.length)
        x, k_ref, v_ref = self.x.clone(), self.k_cache.clone(), self.v_cache.clone()
        # A run looks at no row behind the last one, whatever is there.
        k_ref[:, length + T :] = v_ref[:, length + T :] = 0.0
        q_norm, k_norm = self.norms
        options = {"num_heads": self.heads, "q_norm": q_norm, "k_norm": k_norm}
        expected = attention_block_ref(*self.arguments(k_ref, v_ref), **options)
        out = self.run()
        assert torch.equal(self.x, x)
        assert_near(out - x, expected.float() - x, Limit(rms=1.2e-2, worst_row=3e-2))
        for cache, reference in ((self.k_cache, k_ref), (self.v_cache, v_ref)):
            assert torch.equal(cache[:, :length], reference[:, :length])
            assert_near(
                cache[:, length : length + T], reference[:, length : length + T], Limit(rms=4e-3, worst_row=1e-2)
            )
            assert cache[:, length + T :].isnan().all()
        return out


@pytest.mark.parametrize("length", [0, 1, 15, 47, 48, 130, 600])
@pytest.mark.parametrize("T", [1, 3, 8] if IS_INTERPRETED else range(1, 9))
def test_a_step_equals_its_reference(T: int, length: int):
    Case(T, length).check()


@pytest.mark.parametrize(
    ("D", "H", "G", "K"), [(160, 2, 1, 128), (64, 3, 3, 64), (288, 4, 1, 64)], ids=["wide heads", "own keys", "one key"]
)
@pytest.mark.parametrize("T", [1, 5])
def test_other_sizes_equal_the_reference(T: int, D: int, H: int, G: int, K: int):
    Case(T, 200, D=D, H=H, G=G, K=K).check()


@pytest.mark.parametrize("K", [64, 128])
def test_queries_and_keys_are_normalised(K: int):
    Case(2, 77, K=K, has_norm=True).check()


def test_launches_follow_each_other_and_repeat_to_the_bit():
    case = Case(2, 100)
    first = case.check()
    Case(8, 300).check()
    assert torch.equal(case.run(), first)


def test_what_does_not_fit_is_left_to_other_launches():
    x, cache = rand(1, 4096, dtype=BF16), rand(8, 32, 128, dtype=BF16)
    assert not attention_block_cuda.can_run(x, cache, 32)
    assert not attention_block_cuda.can_run(rand(9, 96, dtype=BF16), cache, 8)
    assert not attention_block_cuda.can_run(rand(1, 96, dtype=torch.float16), cache.half(), 8)
