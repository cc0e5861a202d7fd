"""A prompt's choice of experts: that of the reference, with odd sizes, ties, groups of one, scores of no number."""

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels.moe import RouterSettings, route_ref
from soloist.kernels.moe_route_triton import route
from tests.kernels.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def choose(logits: torch.Tensor, bias: torch.Tensor, settings: RouterSettings) -> tuple[torch.Tensor, torch.Tensor]:
    return route(
        logits,
        bias,
        num_experts_per_tok=settings.num_experts_per_tok,
        n_group=settings.n_group,
        topk_group=settings.topk_group,
        routed_scaling_factor=settings.routed_scaling_factor,
    )


def settings_of(A: int, groups: int, kept: int) -> RouterSettings:
    return RouterSettings(num_experts_per_tok=A, n_group=groups, topk_group=kept, routed_scaling_factor=2.5)


@pytest.mark.parametrize(
    ("E", "A", "groups", "kept"),
    # The published ones, then none, odd ones, groups of one, and all groups.
    [(512, 8, 8, 4), (128, 8, 8, 4), (256, 8, 1, 1), (33, 5, 3, 2), (6, 3, 6, 4), (24, 7, 2, 2)],
)
def test_experts_and_weights_are_those_of_the_reference(E: int, A: int, groups: int, kept: int):
    T = 21
    logits, bias = 3 * torch.randn(T, E, device=DEVICE), torch.randn(E, device=DEVICE) * 0.1
    # Negative where nothing else is left, so that a losing group must not count as 0.
    bias[: E // 2] -= 1.5
    expected, expected_weights = route_ref(logits, bias, settings_of(A, groups, kept))
    experts, weights = choose(logits, bias, settings_of(A, groups, kept))
    assert experts.tolist() == expected.tolist()
    torch.testing.assert_close(weights, expected_weights, rtol=2e-6, atol=0)


def test_of_equals_the_lowest_comes_first():
    logits = torch.zeros(2, 16, device=DEVICE)
    logits[1, [3, 9, 12]] = 1.0
    bias = torch.zeros(16, device=DEVICE)
    for settings in (settings_of(4, 1, 1), settings_of(4, 4, 2)):
        expected, _ = route_ref(logits, bias, settings)
        experts, _ = choose(logits, bias, settings)
        assert experts.tolist() == expected.tolist()


def test_scores_of_no_number_choose_experts_that_there_are():
    logits, bias = torch.full((3, 12), torch.nan, device=DEVICE), torch.zeros(12, device=DEVICE)
    experts, weights = choose(logits, bias, settings_of(4, 3, 2))
    assert ((experts >= 0) & (experts < 12)).all() and weights.shape == (3, 4)
