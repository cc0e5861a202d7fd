"""What launches share: kept, but not from a capture."""

import pytest
import torch

from soloist.kernels.launch import cache_outside_captures


def test_state_is_kept_for_its_arguments_but_not_from_a_capture(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []

    @cache_outside_captures
    def state(name: str) -> list[str]:
        made.append(name)
        return [name]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert state("a") == ["a"] and state("a") is not state("a")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made.clear()
    assert state("a") is state("a") and state("b") is not state("a")
    # A capture finds what is there.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert state("b") is state("b")
    assert made == ["a", "b"]
