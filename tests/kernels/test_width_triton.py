"""Adaptive width in single launches chooses and counts as `WidthRule` does, on random counts and costs."""

import random

import pytest
import torch

pytest.importorskip("triton")

from soloist.kernels.launch import IS_INTERPRETED
from soloist.spec import width
from soloist.spec.costs import StepCosts
from soloist.spec.width import WidthRule
from tests.kernels.device import DEVICE, launch_kernels, nan_in_fresh_memory

NUM_CASES = 25 if IS_INTERPRETED else 500


@pytest.fixture(autouse=True)
def _memory_of_nan():
    with nan_in_fresh_memory():
        yield


def run(seed: int, has_confidences: bool, device: torch.device) -> tuple[list[int], list[torch.Tensor]]:
    """Some steps of a request: the widths that were chosen, and the counts behind them."""
    draw = random.Random(seed)
    num_drafts = draw.choice([1, 2, 7, 15])
    costs = [1.0]
    for _ in range(num_drafts):
        costs.append(costs[-1] + draw.choice([0.01, 0.1, 0.5]) * draw.random())
    rule = WidthRule(StepCosts(plain_ms=0.9, step_ms=tuple(costs)), has_confidences=has_confidences, device=device)
    widths = []
    for _ in range(6):
        rule.cap.fill_(draw.choice([1, 1 + num_drafts, 1 + num_drafts]))
        rows = torch.tensor(draw.randint(0, 1 + num_drafts), dtype=torch.int32, device=device)
        rule.limit(rows)
        if has_confidences:
            confidences = torch.tensor([draw.random() ** 0.3 for _ in range(num_drafts)], device=device)
            rows.copy_(torch.minimum(rows, rule.stop(confidences)))
        widths.append(int(rows))
        num_accepted = draw.randint(0, max(widths[-1] - 1, 0))
        rule.record(rows, torch.tensor(num_accepted, dtype=torch.int32, device=device))
    return widths, [x.cpu() for x in (rule.reached, rule.kept, rule.cells)]


@pytest.mark.parametrize("has_confidences", [False, True])
def test_widths_and_counts_are_the_references(has_confidences: bool, monkeypatch: pytest.MonkeyPatch):
    want = [run(seed, has_confidences, torch.device("cpu")) for seed in range(NUM_CASES)]
    launch_kernels(monkeypatch, width)
    got = [run(seed, has_confidences, DEVICE) for seed in range(NUM_CASES)]
    assert [widths for widths, _ in got] == [widths for widths, _ in want]
    for (_, have), (_, wanted) in zip(got, want, strict=True):
        for x, y in zip(have, wanted, strict=True):
            torch.testing.assert_close(x, y)
    chosen = {w for widths, _ in want for w in widths}
    assert {0, 1} < chosen and max(chosen) > 5
