"""The training forms: each equals its plain form on every document alone, values and gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from soloist.kernels.kda import kda_chunk
from soloist.kernels.kda_inputs import KdaCache, KdaRows, KdaWeights
from soloist.kernels.moe import RouterSettings
from soloist.train import operators as op
from soloist.train.documents import CHUNK, Documents
from soloist.train.kda import _UnitLowerInverse, kda
from tests.train import plain

# One token; a sub-chunk and a bit; a chunk to the row, and one row more.
LENGTHS = (5, CHUNK + 1, 1, 19, CHUNK)
NUM_TOKENS = sum(LENGTHS)


def draw(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * scale).requires_grad_()


def angles(dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """A rotary table in fp64."""
    angle = torch.outer(torch.arange(max(LENGTHS)).double(), theta ** (-torch.arange(0, dim, 2).double() / dim))
    return angle.cos(), angle.sin()


def compare(packed: Callable[..., Tensor], alone: Callable[..., Tensor], rows: list[Tensor], weights: list[Tensor]):
    """Hold values and all gradients of a packed operator against a plain one, document by document, in fp64."""
    documents = Documents(LENGTHS)
    got = packed(*rows, *weights, documents)
    pieces = zip(*(x.split(LENGTHS) for x in rows), strict=True)
    want = torch.cat([alone(*piece, *weights) for piece in pieces])
    assert got.shape == want.shape
    assert (got - want).abs().max() < 1e-9 * want.abs().max()
    pull = torch.randn_like(want)
    wanted = torch.autograd.grad((want * pull).sum(), rows + weights)
    found = torch.autograd.grad((got * pull).sum(), rows + weights)
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert b.abs().max() > 0, f"nothing flows to input {number}"
        assert (a - b).norm() < 1e-8 * b.norm(), f"gradient of input {number}"


def test_every_row_is_found_again_in_both_arrangements():
    documents = Documents(LENGTHS)
    x = torch.arange(NUM_TOKENS)
    groups, back = documents.padded()
    assert torch.equal(torch.cat([group.gather(x).flatten() for group in groups])[back], x)
    for group in groups:
        lengths = (group.rows.diff(dim=1) != 0).sum(1) + 1
        assert 2 * lengths.min() > group.rows.shape[1]
    chunks = documents.chunks()
    assert torch.equal(x[chunks.rows][chunks.places], x)
    assert chunks.is_real.sum() == NUM_TOKENS
    assert list(chunks.counts) == sorted(chunks.counts, reverse=True) == [5, 1]


def kda_inputs(H: int, K: int, V: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    C = H * (2 * K + V)
    rows = [draw(NUM_TOKENS, n, seed=seed + i) for i, n in enumerate((C, H * K, H * V, H))]
    weights = [draw(C, 4, seed=11), draw(H, seed=12, scale=0.5), draw(H * K, seed=13), draw(V, seed=14)]
    return rows, weights


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_kda_is_its_recurrence(lower_bound: float | None):
    rows, weights = kda_inputs(H=2, K=6, V=5)
    compare(
        lambda *a: kda(*a[:8], 1e-5, a[8], num_heads=2, lower_bound=lower_bound),
        lambda *a: plain.kda(*a, 1e-5, 2, lower_bound),
        rows,
        weights,
    )


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("drive", [-40.0, 0.0, 40.0])
def test_kda_holds_for_decays_that_forget_at_once_and_that_never_forget(lower_bound: float | None, drive: float):
    rows, weights = kda_inputs(H=2, K=6, V=5)
    rows = [x.detach().float() for x in rows]
    weights = [x.detach().float() for x in weights]
    rows[1] = (rows[1] * 0.1 + drive).requires_grad_()
    out = kda(*rows, *weights, 1e-5, Documents(LENGTHS), num_heads=2, lower_bound=lower_bound)
    pieces = zip(*(x.detach().double().split(LENGTHS) for x in rows), strict=True)
    want = torch.cat([plain.kda(*piece, *(w.double() for w in weights), 1e-5, 2, lower_bound) for piece in pieces])
    assert (out - want).norm() < 1e-5 * want.norm()
    (grad,) = torch.autograd.grad(out.sum(), rows[1])
    assert grad.isfinite().all()


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_kda_equals_the_kernels_reference_in_fp32(lower_bound: float | None):
    H, K, V = 3, 8, 6
    rows, weights = kda_inputs(H, K, V)
    rows, weights = [x.detach().float() for x in rows], [x.detach().float() for x in weights]
    got = kda(*rows, *weights, 1e-5, Documents(LENGTHS), num_heads=H, lower_bound=lower_bound)
    want = []
    for piece in zip(*(x.split(LENGTHS) for x in rows), strict=True):
        cache = KdaCache(torch.zeros(H, V, K), torch.zeros(3, rows[0].shape[1]))
        want.append(kda_chunk(KdaRows(*piece), KdaWeights(*weights, 1e-5, lower_bound), cache))
    assert (got - torch.cat(want)).norm() < 1e-5 * torch.cat(want).norm()


def test_the_inverse_has_the_gradient_of_an_inverse():
    L = draw(2, 7, 7, seed=1).detach().tril(-1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: _UnitLowerInverse.apply(x.tril(-1)), L)


def test_attention_is_its_plain_form():
    H, G, K, theta = 6, 2, 8, 500.0
    cos, sin = angles(K, theta)
    compare(
        lambda x, qn, kn, d: op.attention(x, d, cos, sin, num_heads=H, num_kv_heads=G, q_norm=qn, k_norm=kn, eps=1e-5),
        lambda x, qn, kn: plain.attention(x.double(), qn, kn, 1e-5, H, G, theta),
        [draw(NUM_TOKENS, (H + 2 * G) * K, seed=1)],
        [draw(K, seed=2), draw(K, seed=3)],
    )


def test_latent_attention_is_its_plain_form():
    H, Kn, P, V, R, theta = 3, 10, 4, 7, 12, 500.0
    cos, sin = angles(P, theta)
    compare(
        lambda q, kv, gate, norm, w, d: op.mla_attention(
            q, kv, gate, norm, 1e-6, w, d, cos, sin, num_heads=H, v_head_dim=V, scale=0.3
        ),
        lambda q, kv, gate, norm, w: plain.mla(q, kv, gate, norm, 1e-6, w, H, V, 0.3, theta),
        [draw(NUM_TOKENS, H * (Kn + P), seed=1), draw(NUM_TOKENS, R + P, seed=2), draw(NUM_TOKENS, H, seed=3)],
        [draw(R, seed=4), draw(H * (Kn + V), R, seed=5, scale=0.5)],
    )


def test_experts_are_their_plain_form_and_the_routing_is_told():
    D, E, F, Fs = 10, 12, 6, 8
    settings = RouterSettings(num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=2.5)
    bias = draw(E, seed=3, scale=0.4).detach()
    told: list[tuple[Tensor, Tensor]] = []
    compare(
        lambda x, norm, router, gu, down, sgu, sdown, d: op.moe(
            x,
            norm,
            1e-6,
            router,
            bias,
            gu,
            down,
            sgu,
            sdown,
            settings,
            limit=0.3,
            shared_limit=0.4,
            on_route=lambda *a: told.append(a),
        ),
        lambda x, norm, router, gu, down, sgu, sdown: plain.moe(
            x, norm, 1e-6, router, bias, gu, down, sgu, sdown, settings, 0.3, 0.4
        ),
        [draw(NUM_TOKENS, D, seed=1)],
        [
            draw(D, seed=2),
            draw(E, D, seed=4),
            draw(E, 2 * F, D, seed=5, scale=0.5),
            draw(E, D, F, seed=6),
            draw(2 * Fs, D, seed=7, scale=0.5),
            draw(D, Fs, seed=8),
        ],
    )
    ((logits, experts),) = told
    assert logits.shape == (NUM_TOKENS, E)
    assert logits.requires_grad
    assert experts.shape == (NUM_TOKENS, 3)


def test_activations_keep_their_dtype_and_weights_theirs():
    H, K = 2, 16
    rows, weights = kda_inputs(H, K, K)
    rows = [x.detach().bfloat16() for x in rows]
    weights = [x.detach().float().requires_grad_() for x in weights]
    out = kda(*rows, *weights, 1e-5, Documents(LENGTHS), num_heads=H, lower_bound=-5.0)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(w.grad is not None and w.grad.dtype == torch.float32 for w in weights)
