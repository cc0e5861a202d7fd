"""Nothing is compiled while somebody waits for an answer: all of it was, when the model was loaded."""

from collections.abc import Iterator

import pytest
import torch

from soloist.kernels import nvrtc
from soloist.kernels.launch import cache_outside_captures
from soloist.models.causal_lm import CausalLM
from soloist.runtime.buffers import SamplingPlan
from soloist.runtime.graph import compile_ahead
from soloist.sampling_params import SamplingParams
from tests.runtime.gpu_models import BEST, make_engine, needs_gpu

GREEDY, SAMPLED = SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=3)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of kernels, as their compilers take them up or find them in their caches."""
    triton = pytest.importorskip("triton")
    names: list[str] = []

    def listen(*, src, metadata, metadata_group, times, cache_hit):
        names.append(src.name)

    find_cubin = nvrtc._find_cubin

    def find_and_note(source, name, definitions, capability):
        names.append(f"{name} {definitions}")
        return find_cubin(source, name, definitions, capability)

    monkeypatch.setattr(nvrtc, "_find_cubin", find_and_note)
    triton.knobs.compilation.listener = listen
    yield names
    triton.knobs.compilation.listener = None


@needs_gpu
@pytest.mark.parametrize("max_drafts", [0, 4])
def test_requests_find_everything_compiled(model: CausalLM, compiled: list[str], max_drafts: int):
    engine = make_engine(model, BEST, max_drafts)
    progress: list[tuple[int, int]] = []
    engine.compile_ahead([SamplingPlan.of(GREEDY), SamplingPlan.of(SAMPLED)], lambda *counts: progress.append(counts))
    # Kernels of earlier tests are in memory already, so that there may be none to compile.
    assert all(done <= total for done, total in progress)
    compiled.clear()
    for params in (GREEDY, SAMPLED):
        # One row, a step's rows, more, and chunks with a rest.
        for length in (1, 2, 3, 6, 12, 16, 17, 18, 25, 26, 33, 40, 41, 49, 100):
            tokens = [t for r in engine.generate([17 * i % 97 for i in range(length)], params) for t in r.token_ids]
            assert len(tokens) == 12
            assert not compiled, f"a prompt of {length} tokens"


@needs_gpu
def test_launches_share_no_state_that_was_made_while_compiling_ahead():
    """It would be thrown away unfilled with the capture."""
    made: list[torch.Tensor] = []
    state = cache_outside_captures(lambda: torch.full((3,), 7, device="cuda"))
    compile_ahead([lambda: made.append(state())])
    assert state() is not made[0] and state() is state()
    assert state().tolist() == [7, 7, 7]
