"""The loss against its plain form: values, gradients by autograd and by finite differences."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from soloist.train.objective import SlotWeights, _HeadLoss, acceptance_length, draft_loss, make_weights, slot_weights
from soloist.train.settings import ObjectiveSettings

n, B, D, M, N, N_HEAD = 5, 4, 7, 3, 13, 11


@pytest.fixture(autouse=True)
def _fp64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    is_counted = torch.ones(n, B, dtype=torch.bool)
    is_counted[1, 2:] = False
    is_counted[4] = False
    return {
        "hidden": draw(n * B, D).requires_grad_(),
        "markov": draw(n * B, M).requires_grad_(),
        "w2": draw(N, M).requires_grad_(),
        "confidences": draw(n * B).requires_grad_(),
        "lm_head": 0.4 * draw(N_HEAD, D),
        "teacher": draw(n * B, D),
        "labels": torch.randint(N_HEAD, (n * B,), generator=generator),
        "temperatures": torch.tensor([1.0, 0.7, 0.5, 1.0, 1.0]).repeat_interleave(B).double(),
        "is_counted": is_counted,
    }


def plain_loss(x: dict[str, Any], s: ObjectiveSettings, is_last_stage: bool) -> Tensor:
    """The formulas of the spec, for autograd."""
    T = x["temperatures"][:, None]
    z = (x["hidden"] @ x["lm_head"].T + x["markov"] @ x["w2"][:N_HEAD].T) / T
    q, p = z.softmax(-1), (x["teacher"] @ x["lm_head"].T / T).softmax(-1)
    mask = x["is_counted"].double()
    w = torch.exp(-torch.arange(B).double() / (s.decay_gamma or B / 2)) * mask
    w = (w / w.sum()).flatten()
    a = torch.minimum(p, q).sum(-1)
    bce = F.binary_cross_entropy_with_logits(x["confidences"], a.detach(), reduction="none")
    loss = s.confidence_weight * (w * bce).sum()
    if not is_last_stage:
        ce = -q.gather(1, x["labels"][:, None])[:, 0].log()
        return loss + s.ce_weight * (w * ce).sum() + s.l1_weight * (w * (p - q).abs().sum(-1)).sum()
    a = a.view(n, B)
    lifted = ((1 - s.length_floor) * a.detach() + s.length_floor) * mask
    W = torch.stack([sum(lifted[:, : m + 1].prod(1) for m in range(i, B)) for i in range(B)], dim=1)
    return loss - s.length_weight * (W * mask * a.log()).sum() / mask.any(1).sum()


def fast_loss(x: dict[str, Any], s: ObjectiveSettings, is_last_stage: bool, rows: int) -> Tensor:
    is_counted = x["is_counted"]
    weights = make_weights(
        is_counted,
        s,
        is_last_stage=is_last_stage,
        total_weight=slot_weights(is_counted, s).sum(),
        total_blocks=is_counted.any(1).sum(),
    )
    names = ("hidden", "markov", "w2", "confidences")
    others = {name: x[name] for name in ("lm_head", "teacher", "labels", "temperatures")}
    return draft_loss(*(x[name] for name in names), **others, weights=weights, rows=rows)[0]


LEAVES = ("hidden", "markov", "w2", "confidences")


@pytest.mark.parametrize("rows", [1, 9, 1000])
@pytest.mark.parametrize("term", ["ce_weight", "l1_weight", "confidence_weight", "length_weight", "all"])
def test_every_term_and_its_gradient_are_the_plain_ones(term: str, rows: int):
    names = ("ce_weight", "l1_weight", "confidence_weight", "length_weight")
    s = ObjectiveSettings(**{name: 0.7 if term in (name, "all") else 0.0 for name in names})
    x = inputs()
    for is_last_stage in {"length_weight": [True], "all": [False, True]}.get(term, [False]):
        want, got = plain_loss(x, s, is_last_stage), fast_loss(x, s, is_last_stage, rows)
        assert abs(got - want) < 1e-10
        leaves = [x[name] for name in LEAVES]
        wanted = torch.autograd.grad(want, leaves, allow_unused=True, materialize_grads=True)
        found = torch.autograd.grad(got, leaves, allow_unused=True, materialize_grads=True)
        assert sum(float(g.abs().sum()) for g in wanted) > 0
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).abs().max() < 1e-9


@pytest.mark.parametrize("is_last_stage", [False, True])
def test_gradients_are_finite_differences(is_last_stage: bool):
    # The weights W of the length term are held fixed by a floor near 1, as their gradient is not taken.
    s = ObjectiveSettings(confidence_weight=0.0, length_floor=1 - 1e-12)
    x = inputs()
    got = fast_loss(x, s, is_last_stage, 8)
    for name in ("hidden", "markov", "w2"):
        (grad,) = torch.autograd.grad(got, x[name], retain_graph=True)
        direction = torch.randn(x[name].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        values = []
        for step in (1e-5, -1e-5):
            moved = x | {name: (x[name] + step * direction).detach()}
            values.append(float(fast_loss(moved, s, is_last_stage, 8).detach()))
        slope = (values[0] - values[1]) / 2e-5
        assert abs(slope - float((grad * direction).sum())) < 1e-7


def test_the_length_term_has_the_gradient_of_the_expected_length():
    x = inputs()
    s = ObjectiveSettings(confidence_weight=0.0, length_floor=0.0)
    x["is_counted"][:] = True
    (found,) = torch.autograd.grad(fast_loss(x, s, True, 8), x["hidden"])
    T = x["temperatures"][:, None]
    q = ((x["hidden"] @ x["lm_head"].T + x["markov"] @ x["w2"][:N_HEAD].T) / T).softmax(-1)
    p = (x["teacher"] @ x["lm_head"].T / T).softmax(-1)
    a = torch.minimum(p, q).sum(-1).view(n, B)
    (wanted,) = torch.autograd.grad(-acceptance_length(a, x["is_counted"]), x["hidden"])
    assert (found - wanted).abs().max() < 1e-9


def test_the_denominator_is_that_of_all_processes():
    x, s = inputs(), ObjectiveSettings()
    whole = fast_loss(x, s, False, 8)
    parts = []
    for first, last in ((0, 2), (2, 5)):
        rows = slice(first * B, last * B)
        part = {name: v[rows] if v.shape[0] == n * B else v for name, v in x.items()}
        part["is_counted"] = x["is_counted"][first:last]
        totals = {"total_weight": slot_weights(x["is_counted"], s).sum(), "total_blocks": x["is_counted"].any(1).sum()}
        weights = make_weights(part["is_counted"], s, is_last_stage=False, **totals)
        others = {name: part[name] for name in ("lm_head", "teacher", "labels", "temperatures")}
        parts.append(draft_loss(*(part[name] for name in LEAVES), **others, weights=weights, rows=8)[0])
    assert abs(sum(parts) - whole) < 1e-12


def test_a_draft_without_heads_has_a_loss_too():
    x = inputs()
    s = ObjectiveSettings()
    counted = x["is_counted"]
    weights = make_weights(counted, s, is_last_stage=False, total_weight=counted.sum(), total_blocks=counted.sum())
    others = {name: x[name] for name in ("lm_head", "teacher", "labels", "temperatures")}
    loss, figures = draft_loss(x["hidden"], None, None, None, **others, weights=weights, rows=8)
    loss.backward()
    assert x["hidden"].grad.abs().sum() > 0
    assert figures.acceptance.shape == (n, B)
    assert 0 <= float(figures.acceptance.min()) <= float(figures.acceptance.max()) <= 1


def test_laws_that_are_equal_are_accepted_whole_and_pull_nowhere():
    x = inputs()
    x["teacher"] = x["hidden"].detach()
    weights = SlotWeights(
        ce=torch.zeros(n * B),
        l1=torch.ones(n * B),
        confidence=torch.zeros(n * B),
        length=torch.ones(n, B),
        length_floor=0.0,
    )
    args = (x["lm_head"], x["teacher"], x["labels"], torch.ones(n * B).double(), weights, 8, False)
    loss, figures = _HeadLoss.apply(x["hidden"], None, None, *args)
    assert abs(loss) < 1e-12
    assert torch.allclose(figures[:2], torch.ones(2, n * B).double())
    assert acceptance_length(figures[0].view(n, B), torch.ones(n, B).bool()) == pytest.approx(1 + B)


def test_a_compiled_loss_is_the_same():
    x, s = inputs(), ObjectiveSettings()
    counted = x["is_counted"]
    totals = {"total_weight": slot_weights(counted, s).sum(), "total_blocks": counted.any(1).sum()}
    others = {name: x[name] for name in ("lm_head", "teacher", "labels", "temperatures")}
    for is_last_stage in (False, True):
        weights = make_weights(counted, s, is_last_stage=is_last_stage, **totals)
        found = []
        for is_compiled in (False, True):
            leaves = [x[name].detach().requires_grad_() for name in LEAVES]
            # Chunks of two sizes.
            loss, figures = draft_loss(*leaves, **others, weights=weights, rows=12, is_compiled=is_compiled)
            found.append([loss, figures.acceptance, figures.agreement, *torch.autograd.grad(loss, leaves)])
        for a, b in zip(*found, strict=True):
            assert (a - b).abs().max() < 1e-9
