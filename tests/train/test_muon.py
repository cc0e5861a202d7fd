"""Muon's update: orthogonal, and of the size that is promised."""

import pytest
import torch

from soloist.train.muon import Muon, orthogonal


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
def test_an_update_of_muon_is_orthogonal_for_wide_tall_and_stacked_matrices(lr: float | torch.Tensor):
    torch.manual_seed(0)
    for shape in ((6, 20), (20, 6), (3, 5, 8)):
        singular = torch.linalg.svdvals(orthogonal(torch.randn(3, *shape[-2:])).float())
        assert singular.min() > 0.6 and singular.max() < 1.3
        tensor = torch.randn(shape, requires_grad=True)
        before = tensor.detach().clone()
        tensor.grad = torch.randn(shape)
        Muon([tensor], lr, weight_decay=0.0).step()
        step = (tensor.detach() - before).square().mean().sqrt()
        assert 0.6 * 0.002 < step < 1.3 * 0.002
