"""Parts of `kernels.py`: the KDA, MLA and mixture-of-experts kernels by width, and fla-core as the peer of KDA.

Weights are cold: each call of a captured chain reads another copy, or other experts, of far more bytes than the L2
holds.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from chains import REPLAYS, rand, time_chain
from kernel_rows import CONTEXT_LEN, WIDTHS, KernelRows, error
from soloist.kernels import (
    kda,
    kda_commit_cuda,
    kda_step_cuda,
    kda_verify_cuda,
    mla,
    moe,
    moe_step_cuda,
)
from soloist.kernels.kda_inputs import KdaCache, KdaKept, KdaRows, KdaWeights
from soloist.kernels.mla_inputs import MlaRows, MlaWeights
from soloist.kernels.norm import gated_rms_norm_ref
from soloist.kernels.rotary import RotaryTable

try:
    from fla.ops.kda import chunk_kda, fused_recurrent_kda
except ImportError:
    HAS_FLA = False
else:
    HAS_FLA = True


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one model on one rank."""

    name: str
    D: int
    H: int
    E: int
    F: int
    settings: moe.RouterSettings


ROUTER = moe.RouterSettings(num_experts_per_tok=8, n_group=8, topk_group=4, routed_scaling_factor=2.5)
SHAPES = (
    Shape(name="flash-tp1", D=2560, H=32, E=512, F=768, settings=ROUTER),
    Shape(name="flash-tp2", D=2560, H=16, E=512, F=384, settings=ROUTER),
    Shape(name="flash-tp4", D=2560, H=8, E=512, F=192, settings=ROUTER),
    Shape(name="tiny", D=1536, H=16, E=128, F=512, settings=ROUTER),
)


def time_calls(call: Callable[[], object]) -> tuple[float, float]:
    """Median and spread of one call in us, launched as it is: what reads the host cannot be captured."""
    times = []
    for _ in range(REPLAYS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    del times[0]
    return statistics.median(times), max(times) - min(times)


class MoeBench:
    """Mixture-of-experts layers with their own weights, and inputs that route independently."""

    def __init__(self, shape: Shape, num_layers: int = 3) -> None:
        s = shape
        self.shape = s
        self.layers = [
            (
                torch.ones(s.D, dtype=torch.bfloat16, device="cuda"),
                1e-6,
                rand(s.E, s.D, scale=s.D**-0.5),
                rand(s.E, scale=0.01, dtype=torch.float32),
                rand(s.E, 2 * s.F, s.D, scale=s.D**-0.5),
                rand(s.E, s.F, s.D, scale=s.F**-0.5).mT,
                rand(2 * s.F, s.D, scale=s.D**-0.5),
                rand(s.F, s.D, scale=s.F**-0.5).mT,
            )
            for _ in range(num_layers)
        ]

    def distinct(self, inputs: list[torch.Tensor]) -> float:
        """Mean number of distinct experts a layer reads."""
        counts = []
        for i, x in enumerate(inputs):
            norm, eps, gate, bias, *_ = self.layers[i % len(self.layers)]
            h = moe.rms_norm_ref(x, norm, eps)
            chosen, _ = moe.route_ref(h.float() @ gate.float().T, bias, self.shape.settings)
            counts.append(chosen.unique().numel())
        return statistics.mean(counts)

    def check(self, T: int) -> float:
        x, (norm, eps, gate, bias, *weights) = rand(T, self.shape.D), self.layers[0]
        width = torch.tensor(T, dtype=torch.int32, device="cuda")
        options = {"limit": 4.0, "shared_limit": 5.0, "width": width, "adds_residual": True}
        # The reference's own logits: at a near-tie others would choose another expert.
        logits = moe.rms_norm_ref(x, norm, eps).float() @ gate.float().T
        layer = (x, norm, eps, gate, bias, *weights, self.shape.settings)
        out = moe_step_cuda.run_experts(*layer, **options, logits=logits)
        return error(out, moe.moe_ref(*layer, **options))

    def time(self, T: int, num_calls: int = 24) -> tuple[float, float, float]:
        """Median us, spread, and bytes."""
        inputs = [rand(T, self.shape.D) for _ in range(num_calls)]

        def call(i: int) -> Callable[[], object]:
            layer = self.layers[i % len(self.layers)]
            return lambda: moe.moe(inputs[i], *layer, self.shape.settings)

        s = self.shape
        num_bytes = 2 * ((self.distinct(inputs) + 1) * 3 * s.F * s.D + s.E * s.D)
        return *time_chain([call(i) for i in range(num_calls)]), num_bytes


def kda_arguments(shape: Shape, T: int) -> tuple[KdaRows, KdaWeights]:
    H, K = shape.H, 128
    C = 3 * H * K
    row = rand(T, C + 2 * H * K + H)
    a_log, dt = rand(H, dtype=torch.float32, scale=0.5), rand(H * K, dtype=torch.float32, scale=0.5)
    ones = torch.ones(K, dtype=torch.bfloat16, device="cuda")
    weights = KdaWeights(rand(C, 4, scale=0.5), a_log, dt, ones, 1e-6, -5.0)
    return KdaRows(*row.split([C, H * K, H * K, H], 1)), weights


def copy(cache: KdaCache) -> KdaCache:
    return KdaCache(*(x.clone() for x in cache))


def bench_kda(shape: Shape, rows: KernelRows) -> None:
    L, H, K = 35, shape.H, 128
    C = 3 * H * K
    caches = KdaCache(rand(L, H, K, K, dtype=torch.float32), rand(L, 3, C))
    all_kept = KdaKept(*(rand(L, 16, H, K, dtype=torch.float32) for _ in range(3)), rand(L, 16, C))
    cache_of = [KdaCache(*(x[i] for x in caches)) for i in range(L)]
    kept_of = [KdaKept(*(x[i] for x in all_kept)) for i in range(L)]
    state_bytes = H * K * K * 4
    for T in WIDTHS:
        inputs, weights = kda_arguments(shape, T)
        if T == 1:
            plain, cache = copy(cache_of[0]), copy(cache_of[0])
            ref = kda.kda_recurrent_ref(inputs, weights, plain)
            out = kda_step_cuda.step(inputs, weights, cache)
            rows.check(f"{shape.name} kda_step", T, error(out, ref), error(cache.state, plain.state))
            us = time_chain([lambda x=x: kda_step_cuda.step(inputs, weights, x) for x in cache_of])
            rows.add(shape.name, "kda_step", T, us, 2 * state_bytes)
        for law in (-5.0, None):
            of_law = weights._replace(lower_bound=law)
            plain, cache = copy(cache_of[0]), copy(cache_of[0])
            ref = kda.kda_recurrent_ref(inputs, of_law, plain)
            out = kda_verify_cuda.verify(inputs, of_law, cache, kept_of[0])
            count = torch.tensor(T, dtype=torch.int32, device="cuda")
            kda_commit_cuda.commit(KdaCache(*(x[None] for x in cache)), KdaKept(*(x[:1] for x in all_kept)), count)
            rows.check(f"{shape.name} kda_verify {law}", T, error(out, ref), error(cache.state, plain.state))

        def verify(i: int, inputs: KdaRows = inputs, weights: KdaWeights = weights) -> Callable[[], object]:
            return lambda: kda_verify_cuda.verify(inputs, weights, cache_of[i], kept_of[i])

        rows.add(shape.name, "kda_verify", T, time_chain([verify(i) for i in range(L)]), state_bytes)
    for T in WIDTHS:
        count = torch.tensor(T, dtype=torch.int32, device="cuda")
        us = time_chain([lambda: kda_commit_cuda.commit(caches, all_kept, count) for _ in range(4)])
        # The states, and of each row what its update is made of.
        rows.add(shape.name, "kda_commit of all layers", T, us, L * (2 * state_bytes + T * 3 * H * K * 4))
    T = CONTEXT_LEN
    inputs, weights = kda_arguments(shape, T)
    plain, cache = copy(cache_of[0]), copy(cache_of[0])
    ref = kda.kda_chunk_ref(inputs, weights, plain)
    out = kda.kda_chunk(inputs, weights, cache)
    rows.check(f"{shape.name} kda_prompt", T, error(out, ref), error(cache.state, plain.state))
    us = time_chain([lambda: kda.kda_chunk(inputs, weights, cache_of[0]) for _ in range(2)])
    rows.add(shape.name, "kda_prompt", T, us, 2 * state_bytes + T * (C + 3 * H * K) * 2)


def bench_fla(shape: Shape, rows: KernelRows) -> None:
    """fla-core's KDA on the same shapes, for comparison: without the convolution, the output norm and the gate.

    Its recurrence gives no rows to commit: with drafts a caller keeps the state of every row, or runs again.
    """
    L, H, K = 35, shape.H, 128
    state = rand(L, 1, H, K, K, dtype=torch.float32)
    a_log, dt_bias = rand(H, dtype=torch.float32, scale=0.5), rand(H * K, dtype=torch.float32, scale=0.5)
    options = {
        "A_log": a_log,
        "dt_bias": dt_bias,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": -5.0,
        "state_v_first": True,
        "output_final_state": True,
    }
    for T in (*WIDTHS, CONTEXT_LEN):
        inputs = (*(rand(1, T, H, K) for _ in range(4)), rand(1, T, H))
        q, k, v, f, b = (x[0] for x in inputs)
        # Taps that let a row through: what remains of the convolution is its SiLU.
        taps = torch.zeros(3 * H * K, 4, dtype=torch.bfloat16, device="cuda")
        taps[:, 3] = 1
        ones, no_gate = torch.ones(K, dtype=torch.bfloat16, device="cuda"), torch.zeros_like(q.flatten(1))
        qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
        mixed = tuple(torch.nn.functional.silu(x.float()).bfloat16() for x in inputs[:3])
        if T == CONTEXT_LEN:
            us = time_calls(lambda: chunk_kda(*mixed, *inputs[3:], initial_state=state[0], safe_gate=True, **options))
            rows.add(shape.name, "kda_prompt of fla-core", T, us, 2 * H * K * K * 4 + T * 7 * H * K * 2)
            continue
        plain = KdaCache(state[0, 0].clone(), torch.zeros(3, 3 * H * K, dtype=torch.bfloat16, device="cuda"))
        weights = KdaWeights(taps, a_log, dt_bias, ones, 1e-6, options["lower_bound"])
        expected = kda.kda_recurrent_ref(KdaRows(qkv, f.flatten(1), no_gate, b), weights, plain)
        out, final = fused_recurrent_kda(*mixed, *inputs[3:], initial_state=state[0], **options)
        normed = gated_rms_norm_ref(out[0], no_gate.view(T, H, K), ones, 1e-6).flatten(1)
        rows.check(f"{shape.name} kda of fla-core", T, error(normed, expected), error(final[0], plain.state))

        def recur(i: int, mixed: tuple = mixed, rest: tuple = inputs[3:]) -> Callable[[], object]:
            return lambda: fused_recurrent_kda(*mixed, *rest, initial_state=state[i], **options)

        us = time_chain([recur(i) for i in range(L)])
        rows.add(shape.name, "kda_recurrence of fla-core", T, us, 2 * H * K * K * 4)


def bench_mla(shape: Shape, rows: KernelRows) -> None:
    L, H, K, V, R, P = 12, shape.H, 128, 128, 512, 64
    S = CONTEXT_LEN + 4096
    caches = [rand(S, R + P) for _ in range(L)]
    norm = torch.ones(R, dtype=torch.bfloat16, device="cuda")
    maps = [rand(H * (K + V), R, scale=R**-0.5) for _ in range(L)]
    weights = [MlaWeights(norm, 1e-6, w_kv_b, H, V, (K + P) ** -0.5) for w_kv_b in maps]
    angle = torch.rand(S, P // 2, device="cuda") * 6
    rotary = RotaryTable(cos=angle.cos(), sin=angle.sin())
    context_len = torch.tensor(CONTEXT_LEN, dtype=torch.int32, device="cuda")
    for T in (*WIDTHS, 2048):
        inputs = MlaRows(rand(T, H * (K + P)), rand(T, R + P), rand(T, H))

        def call(i: int, form: Callable = mla.mla_attention, inputs: MlaRows = inputs) -> torch.Tensor:
            return form(inputs, weights[i], caches[i], context_len, rotary)

        rows.check(
            f"{shape.name} mla",
            T,
            error(call(0), call(0, mla.mla_attention_ref if T < 100 else mla.mla_naive_ref)),
            0.0,
        )
        num_bytes = 2 * ((CONTEXT_LEN + T) * (R + P) + H * (K + V) * R)
        us = time_chain([lambda i=i: call(i) for i in range(L)]) if T <= 16 else time_calls(lambda: call(0))
        rows.add(shape.name, "mla", T, us, num_bytes)


def bench_moe(shape: Shape, rows: KernelRows) -> None:
    bench = MoeBench(shape)
    for T in WIDTHS:
        rows.check(f"{shape.name} moe", T, bench.check(T), 0.0)
        median, spread, num_bytes = bench.time(T)
        rows.add(shape.name, "moe", T, (median, spread), num_bytes)
