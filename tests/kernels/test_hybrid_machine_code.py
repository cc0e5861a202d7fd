"""The hybrid step's kernels, compiled for a GPU that is not here: registers, shared memory, 16-byte and early loads."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels import (
    kda_commit_cuda,
    kda_step_cuda,
    kda_verify_cuda,
    launch,
    mla_triton,
    moe_step_cuda,
    nvrtc,
    step_end_triton,
)
from soloist.kernels.kda_inputs import KdaCache, KdaKept, KdaRows, KdaWeights
from soloist.kernels.mla_inputs import MlaRows, MlaWeights
from soloist.kernels.moe import RouterSettings
from soloist.kernels.rotary import RotaryTable
from tests.kernels.compile_only import Compiled, compiling, print_kernels, read_cubin, run_without_interpreter

ARCH = 90
BF16 = torch.bfloat16
# Ling-3.0-flash on two ranks: hidden size, heads, head size, experts, their size, experts of a token.
D, H, K, E, F, A = 2560, 16, 128, 512, 384, 8
T = 9


def i32() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int32)


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=BF16)


def kda_layer() -> tuple[KdaRows, KdaWeights, KdaCache, KdaKept]:
    C = 3 * H * K
    rows = KdaRows(*bf16(T, C + 2 * H * K + H).split([C, H * K, H * K, H], dim=1))
    weights = KdaWeights(bf16(C, 4), torch.empty(H), torch.empty(H * K), bf16(K), 1e-6, -5.0)
    kept = KdaKept(torch.empty(T, H, K), torch.empty(T, H, K), torch.empty(T, H, K), bf16(T, C))
    return rows, weights, KdaCache(torch.empty(H, K, K), bf16(3, C)), kept


def launch_mla() -> None:
    P, R = 64, 512
    q, kv, gate = bf16(T, H * (K + P) + R + P + H).split([H * (K + P), R + P, H], dim=1)
    table = torch.empty(1024, P // 2)
    weights = MlaWeights(bf16(R), 1e-6, bf16(H * (K + K), R), H, K, 0.1)
    # The form of other sizes and dtypes too.
    mla_triton.attend(MlaRows(q, kv, gate), weights, bf16(1024, R + P), i32(), RotaryTable(cos=table, sin=table))


def launch_end() -> None:
    counts = {name: i32() for name in ("width", "num_left", "finish_code")}
    ids, highest = torch.zeros(T, dtype=torch.int64), torch.empty(T)
    stop_mask = torch.zeros(151936, dtype=torch.bool)
    step_end_triton.conclude(
        ids, highest, None, None, input_ids=ids, stop_mask=stop_mask, end_codes=(1, 2, 3), **counts
    )
    step_end_triton.finish(
        ids,
        *(i32() for _ in range(3)),
        input_ids=ids,
        num_unstoppable=i32(),
        is_stop_requested=torch.zeros((), dtype=torch.bool),
        num_published=torch.zeros(1, dtype=torch.int64),
        records=torch.zeros(4, 5 + T, dtype=torch.int64),
        header=5,
        **counts,
    )


def compile_cuda() -> list[Compiled]:
    """By NVRTC, where that is installed."""
    if not nvrtc.HAS_NVRTC:
        return []
    kernels: list[Compiled] = []

    def load_kernel(source: str, name: str, definitions: tuple[tuple[str, str], ...], device: torch.device) -> None:
        cubin = nvrtc._compile(source, name, definitions, divmod(ARCH, 10))
        # The experts of one token are another form, with their router.
        of_a_token = "_of_a_token" if ("ROWS", "1") in definitions else ""
        kernels.append(replace(read_cubin(name, cubin), name=name + of_a_token))

    for module in (moe_step_cuda, kda_step_cuda, kda_verify_cuda, kda_commit_cuda):
        module.load_kernel, module.launch = load_kernel, lambda *_, **__: None
    settings = RouterSettings(num_experts_per_tok=A, n_group=8, topk_group=4, routed_scaling_factor=2.5)
    weights = (bf16(E, 2 * F, D), bf16(E, F, D).mT, bf16(2 * F, D), bf16(F, D).mT)
    moe_step_cuda._num_programs = lambda _: 132
    for num_tokens, logits in ((1, None), (T, torch.empty(T, E))):
        step = (bf16(num_tokens, D), bf16(D), 1e-6, bf16(E, D), torch.empty(E), *weights, settings)
        options = {"limit": 4.0, "shared_limit": 5.0, "width": i32(), "adds_residual": True}
        moe_step_cuda.run_experts(*step, **options, logits=logits)
    rows, weights, cache, kept = kda_layer()
    kda_step_cuda.step(KdaRows(*(x[:1] for x in rows)), weights, cache, width=i32())
    kda_verify_cuda.verify(rows, weights, cache, kept)
    kda_commit_cuda.commit(KdaCache(*(x[None] for x in cache)), KdaKept(*(x[None] for x in kept)), i32())
    return kernels


@pytest.fixture(scope="module")
def kernels() -> dict[str, Compiled]:
    compiled = run_without_interpreter(__file__)
    return {kernel.name: kernel for kernel in compiled}


# What each takes today, with room for another compiler: registers, KiB of shared memory.
BUDGETS = {
    "prepare_kernel": (72, 48),
    "attention_kernel": (255, 227),
    "combine_kernel": (240, 16),
    "conclude_kernel": (32, 1),
    "finish_kernel": (48, 1),
    "experts": (168, 24),
    "experts_of_a_token": (128, 12),
    "kda_step": (128, 2),
    "kda_verify": (120, 32),
    "kda_commit": (96, 16),
}
# They need NVRTC.
IN_CUDA = {"experts", "experts_of_a_token", "kda_step", "kda_verify", "kda_commit"}


def test_every_kernel_keeps_its_budget(kernels: dict[str, Compiled]):
    assert set(BUDGETS) - set(kernels) <= IN_CUDA
    for name, kernel in kernels.items():
        registers, shared_kib = BUDGETS[name]
        assert kernel.registers <= registers, kernel
        assert kernel.shared_bytes <= shared_kib * 1024, kernel
        assert kernel.stack_bytes <= (0 if name == "experts_of_a_token" else 16), kernel


def test_every_kernel_waits_for_what_it_reads(kernels: dict[str, Compiled]):
    for name, kernel in kernels.items():
        # Two kinds of program, one wait each.
        assert kernel.waits == (2 if name == "prepare_kernel" else 1), kernel


def test_the_latent_cache_comes_in_copies_of_16_bytes_that_nobody_waits_for(kernels: dict[str, Compiled]):
    kernel = kernels["attention_kernel"]
    assert kernel.wide_copies >= 32 and kernel.narrow_copies == 0, kernel
    assert kernel.narrow_loads <= 2, kernel
    assert kernel.tensor_core_products >= 64, kernel


def test_states_and_weights_are_on_their_way_before_the_wait(kernels: dict[str, Compiled]):
    # Latent maps: 128 x 128 of bf16 by 128 threads.
    for name in ("prepare_kernel", "combine_kernel"):
        assert kernels[name].wide_loads_before_wait >= 16, kernels[name]
    # fp32 state: 32 x 128 by 128 threads.
    for name, loads in {"kda_step": 8, "kda_verify": 8, "kda_commit": 8}.items():
        assert name not in kernels or kernels[name].wide_loads_before_wait >= loads, kernels[name]


def test_what_is_a_product_runs_on_tensor_cores(kernels: dict[str, Compiled]):
    for name, products in {"prepare_kernel": 16, "combine_kernel": 16, "kda_verify": 48, "experts": 40}.items():
        assert name not in kernels or kernels[name].tensor_core_products >= products, kernels[name]


if __name__ == "__main__":
    assert not launch.IS_INTERPRETED
    with compiling(ARCH) as compiled:
        launch_mla()
        launch_end()
    print_kernels(compiled + compile_cuda())
