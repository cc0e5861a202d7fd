"""The kernels of a draft's attention equal their references: every tail, window, group and length."""

import sys

import pytest
import torch

pytest.importorskip("triton")

from soloist.errors import UnsupportedError
from soloist.kernels import draft_attention_triton
from soloist.kernels.draft_attention import append_context_ref, draft_attention_ref
from soloist.kernels.launch import IS_INTERPRETED
from soloist.kernels.rotary import make_rotary_table
from tests.kernels.compile_only import compiling, print_kernels, run_without_interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter truncates to bf16 where hardware rounds to nearest, so there everything is fp32.
DTYPE = torch.float32 if IS_INTERPRETED else torch.bfloat16
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[DTYPE]
S, EPS = 300, 1e-5


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def i32(x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32, device=DEVICE)


def beside(x: torch.Tensor) -> torch.Tensor:
    """Copy rows into wider ones filled with noise."""
    wider = torch.full((x.shape[0], x.shape[1] + 8), 1e30, device=DEVICE, dtype=DTYPE)
    wider[:, : x.shape[1]] = x
    return wider[:, : x.shape[1]]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize(("start", "T"), [(0, 1), (5, 9), (17, 33)])
def test_context_rows_equal_the_reference(start: int, T: int):
    L, G, K = 3, 2, 32
    table = make_rotary_table(K, 500.0, S, device=DEVICE)
    kv, k_norm = rand(T, L * 2 * G * K), 1 + rand(L, K) / 4
    got, want = [], []
    for caches, form, rows in (
        (got, draft_attention_triton.store_context, beside(kv)),
        (want, append_context_ref, kv),
    ):
        caches += [torch.full((L, G, S, K), torch.nan, device=DEVICE, dtype=DTYPE) for _ in range(2)]
        form(rows, k_norm, EPS, *caches, i32(start), table.cos, table.sin)
    for ours, reference in zip(got, want, strict=True):
        assert torch.equal(ours.isnan(), reference.isnan())
        assert error(ours.nan_to_num(), reference.nan_to_num()) < LIMIT


@pytest.mark.parametrize(
    ("H", "G", "K", "start", "T", "window", "is_causal"),
    [
        (3, 3, 64, 0, 5, None, False),
        (3, 3, 64, 64, 8, None, False),
        (3, 3, 64, 283, 16, 70, True),
        (6, 2, 32, 1, 9, None, False),
        (6, 2, 32, 200, 17, None, True),
        (6, 2, 32, 150, 5, 3, False),
        # More rows than a tile.
        (20, 1, 32, 130, 5, 70, True),
        (20, 1, 32, 3, 5, None, False),
    ],
)
def test_block_attention_equals_the_reference(
    monkeypatch, H: int, G: int, K: int, start: int, T: int, window: int | None, is_causal: bool
):
    # Few programs, each with several tiles: the interpreter runs them one after the other.
    monkeypatch.setattr(draft_attention_triton, "NUM_PROGRAMS", 6)
    monkeypatch.setattr(draft_attention_triton, "BLOCK_S", 32)
    table = make_rotary_table(K, 500.0, S, device=DEVICE)
    qkv, norms = rand(T, (H + 2 * G) * K), {"q_norm": 1 + rand(K) / 4, "k_norm": 1 + rand(K) / 4}
    keys, values = rand(G, S, K), rand(G, S, K)
    keys[:, start:] = values[:, start:] = torch.nan
    results = []
    for form, rows in ((draft_attention_triton.attend_block, beside(qkv)), (draft_attention_ref, qkv)):
        k_cache, v_cache = keys.clone(), values.clone()
        options = {"num_heads": H, "eps": EPS, "window": window, "is_causal": is_causal}
        out = form(rows, k_cache, v_cache, i32(start), table.cos, table.sin, **options, **norms)
        results.append((out, k_cache, v_cache))
    for ours, reference in zip(*results, strict=True):
        assert torch.equal(ours.isnan(), reference.isnan())
        assert error(ours.nan_to_num(), reference.nan_to_num()) < LIMIT


# The interpreter multiplies tiles of any size.
@pytest.mark.parametrize("K", [16, 48, 256])
def test_heads_of_another_size_are_refused(K: int):
    with pytest.raises(
        UnsupportedError, match=f"attention to heads of {K} has no GPU kernel; it takes heads of 32, 64, 128: run"
    ):
        draft_attention_triton.store_context(
            rand(1, 2 * K), rand(1, K), EPS, rand(1, 1, 9, K), rand(1, 1, 9, K), i32(0), *rand(2, 9, K // 2)
        )


def launch_all() -> None:
    """Launches at the sizes of Ling-3.0-flash's draft: 32 heads of 128, blocks of 8, and Qwen3-4B's, 32 over 8."""
    bf16, table = torch.bfloat16, torch.empty(64, 64)
    context_len, norm = torch.zeros((), dtype=torch.int32), torch.empty(128, dtype=bf16)
    for T, H, G in ((8, 32, 32), (7, 32, 8)):
        cache, qkv = torch.empty(G, 64, 128, dtype=bf16), torch.empty(T, (H + 2 * G) * 128, dtype=bf16)
        options = {"num_heads": H, "q_norm": norm, "k_norm": norm, "eps": 1e-6, "window": None, "is_causal": False}
        draft_attention_triton.attend_block(qkv, cache, cache, context_len, table, table, **options)
    kv, caches = torch.empty(9, 5 * 2 * 32 * 128, dtype=bf16), torch.empty(5, 32, 64, 128, dtype=bf16)
    norms = torch.empty(5, 128, dtype=bf16)
    draft_attention_triton.store_context(kv, norms, 1e-6, caches, caches, context_len, table, table)


def test_every_kernel_compiles_waits_once_and_spills_nothing():
    kernels = run_without_interpreter(__file__, "90")
    assert [kernel.name for kernel in kernels] == [*("split_kernel", "combine_kernel") * 2, "append_kernel"]
    for kernel in kernels:
        assert kernel.waits == 1 and kernel.stack_bytes == 0, kernel
        assert kernel.name != "split_kernel" or kernel.tensor_core_products > 0, kernel


if __name__ == "__main__":
    with compiling(int(sys.argv[1])) as compiled:
        launch_all()
    print_kernels(compiled)
