"""Kernels that start before the one before them ends wait for it: proven by kernels that write late.

Every second kernel of a step lets its consumer start, sleeps 100 us and then writes. A consumer that reads without
having waited sees what was there before.
"""

import itertools

import pytest
import torch

from soloist.kernels.launch import HAS_TRITON, delayed_producers, has_delays, pdl_options
from soloist.models.causal_lm import CausalLM
from soloist.runtime.graph import without_collection
from tests.runtime.gpu_models import (
    BEST,
    EAGER,
    PARAMS,
    make_engine,
    needs_gpu,
    prepare_delayed,
    prompt_of,
    state_of,
)

if HAS_TRITON:
    import triton
    import triton.language as tl

    from soloist.kernels.launch import let_consumers_start, wait_for_producers

    @triton.jit
    def add_one_kernel(from_ptr, to_ptr, WAITS: tl.constexpr, PDL: tl.constexpr):
        """One more than `from`, 128 numbers."""
        i = tl.arange(0, 128)
        if WAITS:
            wait_for_producers(PDL)
        let_consumers_start(PDL)
        tl.store(to_ptr + i, tl.load(from_ptr + i, volatile=True) + 1)


def test_every_second_kernel_is_delayed_inside_the_block_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("soloist.kernels.launch.IS_INTERPRETED", False)
    assert not has_delays() and pdl_options()["PDL"] is True
    for phase, want in ((0, [2, True, 2, True]), (1, [True, 2, True, 2])):
        with delayed_producers(phase):
            assert has_delays()
            assert [pdl_options()["PDL"] for _ in range(4)] == want
    assert not has_delays() and pdl_options()["PDL"] is True


def run_chain(waits: bool, phase: int) -> list[int]:
    """Eight kernels, each one more than the one before it, replayed as a graph; the last one's result."""
    x = [torch.zeros(128, dtype=torch.int32, device="cuda") for _ in range(9)]

    def chain() -> None:
        for source, target in itertools.pairwise(x):
            add_one_kernel[(1,)](source, target, WAITS=waits, num_warps=4, **pdl_options())

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), delayed_producers(phase):
        chain()
        stream.synchronize()
        with without_collection(), torch.cuda.graph(graph, stream=stream):
            chain()
    for row in x:
        row.zero_()
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    return [int(row[0]) for row in x]


@needs_gpu
@pytest.mark.parametrize("phase", [0, 1])
def test_the_delay_finds_a_kernel_that_does_not_wait(phase: int):
    assert run_chain(True, phase) == list(range(9))
    assert run_chain(False, phase) != list(range(9))


@needs_gpu
@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("max_drafts", [0, 4])
@pytest.mark.parametrize("kind", ["greedy", "everything"])
def test_no_kernel_of_a_step_reads_before_it_has_waited(model: CausalLM, kind: str, max_drafts: int, phase: int):
    texts, logprobs, states = [], [], []
    for execution in (EAGER, BEST):
        engine = make_engine(model, execution, max_drafts)
        if execution is BEST:
            prepare_delayed(engine, PARAMS[kind], phase)
        results = list(engine.generate(prompt_of(model), PARAMS[kind]))
        texts.append([token for result in results for token in result.token_ids])
        logprobs.append([logprob for result in results for logprob in result.logprobs])
        states.append(state_of(engine))
    assert texts[0] == texts[1] and logprobs[0] == logprobs[1]
    assert all(torch.equal(x, y) for x, y in zip(*states, strict=True))
