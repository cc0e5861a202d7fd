"""Measuring what an engine's steps cost by their width, once: the table by which widths are chosen.

Owns where tables are kept and what tells one from another. The steps that are timed are real ones, on random tokens.
"""

import contextlib
import hashlib
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

import soloist
from soloist.engine import Engine
from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.runtime.graph import StepGraph
from soloist.sampling_params import SamplingParams
from soloist.spec.costs import StepCosts, measure_costs
from soloist.spec.drafter import Drafter
from soloist.spec.verify import Verdict

# Prompt of the request whose steps are timed, in tokens by device type; half of the context where that is less. Behind
# a long one attention costs a row more. A GPU reads it in a moment, a CPU does not.
_PROMPT_TOKENS = {"cpu": 64, "cuda": 4096}
_PLAN = SamplingPlan.of(SamplingParams())


def known_costs(engine: Engine, cache_dir: Path) -> StepCosts:
    """Give the costs of an engine's steps: measured the first time, then read from `cache_dir`.

    Between requests only; the sequence in the cache is forgotten when costs are measured. Of ranks that share the model
    all call this, and have the costs that rank 0 has.

    Args:
        engine: with a drafter.
        cache_dir: of the user.
    """
    path = cache_dir / "step-costs" / f"{_key(engine)}.json"
    costs = StepCosts.load(path)
    if not engine.ranks.agree(costs is not None):
        costs = measure(engine)
        # A home that cannot be written costs a measurement at every start, nothing else.
        with contextlib.suppress(OSError):
            if engine.runner.model.group.rank == 0:
                costs.save(path)
    agreed = engine.ranks.agree(costs)
    assert agreed is not None
    return agreed


def _num_prompt_tokens(engine: Engine) -> int:
    device = engine.runner.model.device
    return min(_PROMPT_TOKENS[device.type], engine.runner.max_context_len // 2)


def _key(engine: Engine) -> str:
    """Tell machines, models as they are held, and drafters apart."""
    model, device = engine.runner.model, engine.runner.model.device
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        machine = f"{platform.node()} {platform.processor()} {capability} {torch.get_num_threads()} threads"
    report = getattr(model, "report", None)
    held = (model.dtype, None if report is None else sorted(report.bytes_by_format.items()))
    versions = (soloist.__version__, torch.__version__)
    # Drafts of one kind are told apart by what they read.
    width, behind = engine.runner.buffers.max_width, _num_prompt_tokens(engine)
    drafter = (engine.drafter.name, engine.drafter.max_drafts, engine.drafter.read_bytes(width, behind))
    kind = (model.architecture, model.config, held, drafter, engine.execution, behind)
    parts = (machine, model.group.size, versions, *kind)
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


class _Forced(Drafter):
    """Has another drafter draft, then fills the step up with random tokens to the width that is timed."""

    name = "forced"

    def __init__(self, drafter: Drafter, buffers: StepBuffers) -> None:
        self._drafter = drafter
        self.max_drafts, self.has_draft_law = drafter.max_drafts, drafter.has_draft_law
        device = buffers.width.device
        self.width = torch.ones((), dtype=torch.int32, device=device)
        self._tokens = _random_tokens(buffers, drafter.max_drafts)  # (T-1,)

    def propose(self, buffers: StepBuffers, context_len: torch.Tensor) -> None:
        buffers.width.copy_(self.width)
        self._drafter.propose(buffers, context_len)
        buffers.width.copy_(self.width)
        buffers.input_ids[1:].copy_(self._tokens)

    def update(
        self, buffers: StepBuffers, verdict: Verdict, hidden: torch.Tensor, captured: torch.Tensor | None
    ) -> None:
        self._drafter.update(buffers, verdict, hidden, captured)


def _random_tokens(buffers: StepBuffers, count: int) -> torch.Tensor:
    """Draw token ids, the same ones on every rank: (count,) int64."""
    ids = torch.randint(buffers.num_tokens, (count,), generator=torch.Generator().manual_seed(count))
    return ids.to(buffers.width.device)


@torch.inference_mode()
def measure(engine: Engine) -> StepCosts:
    """Time steps of every width, and steps without drafting."""
    runner, drafter, device = engine.runner, engine.drafter, engine.runner.model.device
    buffers = runner.buffers
    room = runner.max_context_len
    num_prompt = _num_prompt_tokens(engine)
    prompt = _random_tokens(buffers, num_prompt)  # (n,)
    forced = _Forced(drafter, buffers)

    def begin() -> None:
        buffers.begin(prompt.tolist(), SamplingParams(), seed=0, max_tokens=room - num_prompt, stop_ids=())
        engine.ring.reset()
        drafter.begin(prompt, _PLAN)
        runner.cache.reset()
        runner.prefill(prompt[:-1], on_chunk=drafter.prefill_chunk)

    def prepare(is_drafting: bool) -> Callable[[], None]:
        step = engine.make_step(_PLAN, is_drafting=is_drafting)
        if not engine.execution.is_captured:
            return step
        buffers.end()
        # Not in a loop: each is timed.
        return StepGraph(step).replay

    def time_ms(launch: Callable[[], None]) -> float:
        if int(buffers.num_left) <= buffers.max_width:
            begin()
        _wait(device)
        started_s = time.perf_counter()
        launch()
        _wait(device)
        return 1000 * (time.perf_counter() - started_s)

    def time_drafting_ms(width: int) -> float:
        forced.width.fill_(width)
        return time_ms(drafting)

    begin()
    engine.drafter = forced
    try:
        drafting, plain = prepare(True), prepare(False)
    finally:
        engine.drafter = drafter
    begin()
    # First those with drafting: the drafter does not follow the others.
    costs = measure_costs(buffers.max_width, time_drafting_ms, lambda: time_ms(plain))
    buffers.end()
    runner.cache.reset()
    engine.ring.reset()
    return costs


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
