"""Parts of `kernels.py`: norms, the router, sampling, drafts and the end of a step, by the launchers that models call.

Most of these move little, so that what they take is the launch and its latency; their inputs were just written by the
launch before, and lie in the L2 here too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import chains
from chains import rand, time_chain
from dense_maps import COLD_BYTES, EPS
from kernel_rows import CONTEXT_LEN, WIDTHS, KernelRows, error
from soloist.kernels.allreduce import own_rows_ref
from soloist.kernels.draft_attention import (
    append_context,
    append_context_ref,
    draft_attention,
    draft_attention_ref,
)
from soloist.kernels.embedding_triton import own_rows
from soloist.kernels.linear import norm_linear
from soloist.kernels.norm import gated_rms_norm, gated_rms_norm_ref, rms_norm, rms_norm_ref
from soloist.kernels.rotary import make_rotary_table
from soloist.kernels.sampling import Stream, draw, likeliest, likeliest_ref, target_probs, uniform
from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.runtime.ring import TokenRing
from soloist.runtime.sampler import Target
from soloist.sampling_params import SamplingParams
from soloist.spec.costs import StepCosts
from soloist.spec.ngram import PromptLookup
from soloist.spec.verify import Rule, accept, finish
from soloist.spec.width import WidthRule

# Calls of a chain that reads nothing cold.
NUM_CALLS = 32


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of Ling-3.0-flash and of the published draft for it, in the letters of `kernels/check.py`."""

    name: str = "flash-tp1"
    D: int = 2560
    H: int = 32
    K: int = 128
    E: int = 512
    N: int = 157184
    L: int = 5
    S: int = CONTEXT_LEN


FLASH = Sizes()


def same(call: Callable[[], object]) -> tuple[float, float]:
    """Time a call in a chain of itself."""
    return time_chain([call] * NUM_CALLS)


def i32(x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32, device=chains.DEVICE)


def bench_norm(rows: KernelRows, sizes: Sizes = FLASH) -> None:
    """The norms that stand alone: of rows, and of heads with their gate."""
    D, H, V = sizes.D, sizes.H, sizes.K
    weight, of_head = rand(D) + 1, rand(V) + 1
    for T in WIDTHS:
        x, heads, gate = rand(T, D), rand(T, H, V), rand(T, H, V)
        rows.check("norm", T, error(rms_norm(x, weight, EPS), rms_norm_ref(x, weight, EPS)))
        rows.add(sizes.name, "norm", T, same(lambda: rms_norm(x, weight, EPS)), 2 * (2 * T * D + D))
        out = gated_rms_norm(heads, gate, of_head, EPS)
        rows.check("gated norm", T, error(out, gated_rms_norm_ref(heads, gate, of_head, EPS)))
        us = same(lambda: gated_rms_norm(heads, gate, of_head, EPS))
        rows.add(sizes.name, "gated norm", T, us, 2 * (3 * T * H * V + V))


def bench_router(rows: KernelRows, sizes: Sizes = FLASH) -> None:
    """The router's product with its norm; the choice is made by the launch of the experts."""
    E, D = sizes.E, sizes.D
    num_copies = max(4, round(COLD_BYTES / (2 * E * D)))
    copies, norm = [rand(E, D, scale=D**-0.5) for _ in range(num_copies)], rand(D, scale=0.1) + 1
    for T in WIDTHS:
        x = rand(T, D)
        expected = rms_norm_ref(x, norm, EPS).float() @ copies[0].float().T
        rows.check("router", T, error(norm_linear(x, norm, EPS, copies[0], out_dtype=torch.float32), expected))
        calls = [lambda w=w: norm_linear(x, norm, EPS, w, out_dtype=torch.float32) for w in copies]  # type: ignore[misc]
        rows.add(sizes.name, "router", T, time_chain(calls), 2 * E * D)


def bench_sampling(rows: KernelRows, sizes: Sizes = FLASH) -> None:
    """From rows of logits to tokens: the likeliest, drawn from all, drawn from what top-k and top-p keep."""
    N, device = sizes.N, chains.DEVICE
    scalars = [torch.tensor(x, device=device) for x in (0.8, 0.95, 0.0)]
    temperature, top_p, min_p = scalars
    seed, top_k = torch.tensor(1, device=device), i32(50)
    for T in WIDTHS:
        logits = rand(T, N, dtype=torch.float32)
        positions = torch.arange(T, device=device)

        def sample(
            has_filters: bool, logits: torch.Tensor = logits, positions: torch.Tensor = positions
        ) -> torch.Tensor:
            probs = target_probs(logits, temperature, top_k, top_p, min_p, has_filters=has_filters)
            return draw(probs, uniform(seed, positions, Stream.SAMPLE))

        expected = likeliest_ref(logits)
        assert torch.equal(likeliest(logits)[0], expected[0])
        rows.add(sizes.name, "likeliest token", T, same(lambda: likeliest(logits)), 4 * T * N)
        for has_filters, name in ((False, "draw from all"), (True, "draw from top-k and top-p")):
            probs = target_probs(logits, temperature, top_k, top_p, min_p, has_filters=has_filters)
            # A token that has none of the law is never drawn; sums in another order may choose its neighbour.
            assert (probs.gather(1, sample(has_filters)[:, None]) > 0).all()
            rows.add(sizes.name, name, T, same(lambda: sample(has_filters)), 4 * T * N)


def bench_draft_attention(rows: KernelRows, sizes: Sizes = FLASH) -> None:
    """A draft's attention to its context, one layer, and the context that it is given, all layers in a launch."""
    L, H, K, S = sizes.L, sizes.H, sizes.K, sizes.S
    room, device = max(WIDTHS), chains.DEVICE
    table = make_rotary_table(K, 1e6, S + room, device=device)
    k_cache, v_cache = rand(L, H, S + room, K), rand(L, H, S + room, K)
    context_len, q_norm, k_norm, k_norms = i32(S), rand(K) + 1, rand(K) + 1, rand(L, K) + 1
    options = {"num_heads": H, "q_norm": q_norm, "k_norm": k_norm, "eps": EPS, "window": None, "is_causal": False}
    for T in WIDTHS:
        qkv, kv = rand(T, 3 * H * K), rand(T, L * 2 * H * K)

        def attend(layer: int, form: Callable[..., torch.Tensor] = draft_attention, qkv: torch.Tensor = qkv):
            return form(qkv, k_cache[layer], v_cache[layer], context_len, table.cos, table.sin, **options)

        rows.check("draft attention", T, error(attend(0), attend(0, draft_attention_ref)))
        us = time_chain([lambda i=i: attend(i) for i in range(L)])  # type: ignore[misc]
        rows.add(sizes.name, "draft attention", T, us, 4 * H * K * (S + T))

        def append(form: Callable[..., None] = append_context, kv: torch.Tensor = kv) -> None:
            form(kv, k_norms, EPS, k_cache, v_cache, context_len, table.cos, table.sin)

        append()
        written = k_cache[:, :, S : S + T].clone()
        append(append_context_ref)
        rows.check("draft context", T, error(written, k_cache[:, :, S : S + T]))
        rows.add(sizes.name, "draft context", T, same(append), 2 * 2 * T * L * 2 * H * K)


def bench_lookup(rows: KernelRows, sizes: Sizes = FLASH) -> None:
    """What followed the last tokens where they last occurred, and the tokens that a step adds to the history."""
    S, device = sizes.S, torch.device(chains.DEVICE)
    # Repeats itself, so that something is found.
    prompt = torch.arange(S, device=device) % 17
    for T in WIDTHS[1:]:
        drafter = PromptLookup(max_context_len=S + T, max_drafts=T - 1, device=device, is_fixed_shape=True)
        buffers = StepBuffers.allocate(max_width=T, num_tokens=17, device=device)
        drafter.begin(prompt, SamplingPlan.of(SamplingParams()))
        buffers.width.fill_(T)
        context_len, tokens = i32(S - 1), torch.randint(17, (T,), device=device)
        drafter.propose(buffers, context_len)
        assert int(buffers.width) == T
        rows.add(sizes.name, "lookup", T, same(lambda: drafter.propose(buffers, context_len)), 8 * S)
        us = same(lambda: drafter.history.record(tokens, context_len))
        rows.add(sizes.name, "lookup, history", T, us, 2 * 8 * T)


def bench_step_end(rows: KernelRows, sizes: Sizes = FLASH) -> None:
    """Accepting and publishing of a greedy step, the width of the next one, and a rank's rows of the embedding."""
    N, D, device = sizes.N, sizes.D, torch.device(chains.DEVICE)
    plan = SamplingPlan.of(SamplingParams())
    table = rand(N // 2, D)
    for T in WIDTHS:
        buffers = StepBuffers.allocate(max_width=T, num_tokens=N, device=device)
        ring = TokenRing(num_slots=4, max_width=T, num_tokens=N, device=device)
        buffers.begin([1], SamplingParams(), seed=0, max_tokens=2**30, stop_ids=())
        tokens = torch.randint(N, (T,), device=device)
        buffers.input_ids[1:] = tokens[:-1]
        target = Target(tokens=tokens, probs=None, highest=torch.ones(T, device=device))
        context_len = i32(sizes.S)

        def end(
            target: Target = target, buffers: StepBuffers = buffers, ring: TokenRing = ring,
            context_len: torch.Tensor = context_len,
        ) -> torch.Tensor:  # fmt: skip
            verdict = accept(target, buffers, context_len, Rule.CHAIN)
            finish(verdict, buffers, ring, plan, logprobs=None)
            return verdict.num_committed

        assert int(end()) == T, "every draft is the target's own token"
        # The target's tokens and the drafts, and the record.
        rows.add(sizes.name, "accept and publish", T, same(end), 8 * 3 * T)
        ids = torch.randint(N, (T,), device=device)
        assert torch.equal(own_rows(ids, table, 0), own_rows_ref(ids, table, 0))
        us = same(lambda: own_rows(ids, table, 0))
        rows.add(sizes.name, "embedding, of two ranks", T, us, 2 * 2 * T * D)
        if T > 1:
            costs = StepCosts(plain_ms=1.0, step_ms=tuple(1 + 0.1 * t for t in range(T)))
            rule = WidthRule(costs, has_confidences=True, device=device)
            width, kept, confidences = i32(T), i32(1), torch.rand(T - 1, device=device)

            def choose(
                rule: WidthRule = rule, width: torch.Tensor = width, kept: torch.Tensor = kept,
                confidences: torch.Tensor = confidences,
            ) -> torch.Tensor:  # fmt: skip
                rule.limit(width)
                chosen = rule.stop(confidences)
                rule.record(width, kept)
                return chosen

            assert 1 <= int(choose()) <= T
            rows.add(sizes.name, "adaptive width", T, same(choose), 4 * 4 * T)
