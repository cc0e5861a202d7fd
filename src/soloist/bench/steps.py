"""Steps by the GPU's own clock: what one takes, how long the GPU idles between two, what is idle within one.

Measured in the engine's own loop, behind a filled context, with the switches of its execution. Rows of a step are
independent random ids, so that the experts of a random model spread as a trained one's do; what the drafter does is
done and thrown away, and drafts are kept by lot where acceptance is simulated.
"""

import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType

from soloist.bench.figures import Spread, spread
from soloist.config import take_profiler_down
from soloist.engine import Engine
from soloist.kernels.clock import stamp
from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.runtime.graph import count_nodes
from soloist.runtime.ring import StepRecord
from soloist.sampling_params import SamplingParams
from soloist.spec.drafter import Drafter
from soloist.spec.verify import Verdict

_GREEDY = SamplingParams()
# Steps of a measurement: at least these tokens, unless that takes longer than this; and never fewer steps than these.
_TOKENS, _SECONDS, _FEWEST_STEPS = 512, 1.5, 48
# Steps at the begin that do not count.
_SKIPPED_STEPS = 8
# Steps under the profiler, for what is idle within them.
_PROFILED_STEPS = 8
_NUM_SLOTS = 4096
# In the name of a stamp's kernel.
STAMP = "stamp_kernel"


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Steps of one execution. Shares are of the time from the first step's begin to the last one's end."""

    # From one step's begin to the next one's.
    step_ms: Spread
    # Least and largest median of the repeats.
    step_ms_range: tuple[float, float]
    # Time over committed tokens, drained from the ring.
    tpot_ms: float
    acceptance_length: float
    # Rows of a step, mean.
    mean_width: float
    # Kernels and copies of a step; those of `SpreadRows`, which a request has not, are among them.
    launches_per_step: int
    # Edges of its graph over which a kernel starts early; None: not captured.
    programmatic_edges: int | None
    # Nothing of a step runs.
    idle_share: float
    # No kernel runs although a step is under way; from a profiler's trace. None: it cannot see into a device loop.
    gap_share: float | None
    # Processor time of the host's loop, enqueuing and taking records.
    host_us_per_step: float
    # Blocking reads that PyTorch saw, and waits of the host for a step that is not followed by another yet.
    syncs_per_step: float


class SpreadRows(Drafter):
    """Has another drafter draft, then puts independent random ids into every row: for timing only.

    That takes up to six launches of PyTorch's, by which a step is a little dearer than that of a request.
    """

    name = "spread rows"

    def __init__(self, drafter: Drafter, num_tokens: int, device: torch.device) -> None:
        self._drafter = drafter
        self.max_drafts, self.has_draft_law = drafter.max_drafts, drafter.has_draft_law
        self.capture_layers, self.max_context_len = drafter.capture_layers, drafter.max_context_len
        self.has_confidences = drafter.has_confidences
        # () int32: the width before the proposal.
        self._width = torch.zeros((), dtype=torch.int32, device=device)
        # (1024, T) int64, and the row that is next, (1,) int64.
        self._table = torch.randint(num_tokens, (1024, 1 + drafter.max_drafts), device=device)
        self._next = torch.zeros(1, dtype=torch.int64, device=device)

    def read_bytes(self, width: int, context_len: int, *, distinct_experts: float | None = None) -> float:
        return self._drafter.read_bytes(width, context_len, distinct_experts=distinct_experts)

    def begin(self, prompt_ids: torch.Tensor, plan: SamplingPlan) -> None:
        self._drafter.width_rule = self.width_rule
        self._drafter.begin(prompt_ids, plan)

    def prefill_chunk(self, input_ids: torch.Tensor, hidden: torch.Tensor, captured: torch.Tensor | None) -> None:
        self._drafter.prefill_chunk(input_ids, hidden, captured)

    def propose(self, buffers: StepBuffers, context_len: torch.Tensor) -> None:
        self._width.copy_(buffers.width)
        self._drafter.propose(buffers, context_len)
        # A proposal may be shorter for lack of a match, which is the text's and not the machine's.
        if self.width_rule is None or not self.has_confidences:
            buffers.width.copy_(self._width)
        buffers.input_ids.copy_(self._table.index_select(0, self._next)[0])
        self._next.add_(1).remainder_(self._table.shape[0])

    def update(
        self, buffers: StepBuffers, verdict: Verdict, hidden: torch.Tensor, captured: torch.Tensor | None
    ) -> None:
        self._drafter.update(buffers, verdict, hidden, captured)


@contextmanager
def counting_waits() -> Iterator[list[warnings.WarningMessage]]:
    """Collect a warning for each call inside the block in which PyTorch makes the host wait for the GPU."""
    with warnings.catch_warnings(record=True) as waits:
        warnings.filterwarnings("ignore")
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def has_room(engine: Engine, context_len: int) -> bool:
    """Say whether the context holds what is measured behind `context_len` tokens."""
    most = max(_FEWEST_STEPS, _TOKENS // engine.runner.buffers.max_width + _SKIPPED_STEPS)
    return engine.runner.max_context_len - context_len > most * engine.runner.buffers.max_width


class StepMeter:
    """Runs steps of one engine between stamps, each time from the same context.

    Args:
        engine: on a GPU, with room for the context and what is measured behind it.
        context_len: tokens in the cache before the first step.
        params: how tokens are drawn.
    """

    def __init__(self, engine: Engine, *, context_len: int, params: SamplingParams = _GREEDY) -> None:
        runner = engine.runner
        device = runner.model.device
        assert has_room(engine, context_len), "no room for the steps that are measured"
        self._engine, self._room = engine, runner.max_context_len - context_len - 1
        self._prompt = torch.randint(runner.buffers.num_tokens, (context_len + 1,), device=device)  # (n,)
        # (slots, 2) int64: see `stamp`.
        self.times = torch.zeros(_NUM_SLOTS, 2, dtype=torch.int64, device=device)
        self._num_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._params, self._plan = params, SamplingPlan.of(params)
        step = engine.make_step(self._plan)

        def timed_step() -> None:
            stamp(self.times, self._num_steps, is_end=False)
            step()
            stamp(self.times, self._num_steps, is_end=True)

        # Every run has its own lots.
        self._num_runs = 0
        self._launch, self.num_nodes, self.num_programmatic = timed_step, None, None
        engine.drafter.begin(self._prompt, self._plan)
        if engine.execution.is_captured:
            runner.buffers.end()
            graph = engine.capture(timed_step)
            self._launch = graph.replay
            num_nodes, self.num_programmatic = count_nodes(graph.raw_graph)
            self.num_nodes = num_nodes - 2

    def run(self, most_steps: int = _NUM_SLOTS) -> "Run":
        """Read the context and run steps behind it, until there are tokens enough."""
        engine, buffers, cache = self._engine, self._engine.runner.buffers, self._engine.runner.cache
        engine.ring.reset()
        if engine.width_rule is not None:
            engine.width_rule.begin()
        buffers.begin(self._prompt.tolist(), self._params, seed=self._num_runs, max_tokens=self._room, stop_ids=())
        self._num_runs += 1
        engine.drafter.begin(self._prompt, self._plan)
        cache.reset()
        engine.runner.prefill(self._prompt[:-1], on_chunk=engine.drafter.prefill_chunk)
        self._num_steps.zero_()
        torch.cuda.synchronize()
        queue = engine.queue(self._launch, num_top=None, is_captured=engine.execution.is_captured)
        records: list[StepRecord] = []
        num_tokens, started_s, started_cpu_s = 0, time.perf_counter(), 0.0
        # Ranks must run as many steps, and their clocks differ.
        has_clock = engine.runner.model.group.size == 1
        with counting_waits() as waits:
            while len(records) < most_steps and num_tokens < _TOKENS + _SKIPPED_STEPS * buffers.max_width:
                if has_clock and time.perf_counter() - started_s > _SECONDS and len(records) >= _FEWEST_STEPS:
                    break
                if len(records) == _SKIPPED_STEPS:
                    started_cpu_s = time.thread_time()
                records.append(queue.next())
                num_tokens += len(records[-1].token_ids)
            cpu_s = time.thread_time() - started_cpu_s
        buffers.is_stop_requested.fill_(True)
        queue.drain()
        torch.cuda.synchronize()
        times_ns = self.times[: len(records)].tolist()
        return Run(records=records, times_ns=times_ns, cpu_s=cpu_s, num_waits=len(waits))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Steps one after the other."""

    records: list[StepRecord]
    # Begin and end of each.
    times_ns: list[tuple[int, int]]
    # Processor time of the host's thread, without the first steps.
    cpu_s: float
    # Calls of PyTorch that waited for the GPU.
    num_waits: int

    @property
    def step_ms(self) -> list[float]:
        """From each begin to the next, the first steps left out."""
        begins = [begin for begin, _ in self.times_ns[_SKIPPED_STEPS:]]
        return [(b - a) / 1e6 for a, b in itertools.pairwise(begins)]

    @property
    def idle_share(self) -> float:
        """Share of the time between an end and the next begin."""
        times = self.times_ns[_SKIPPED_STEPS:]
        return 1 - sum(end - begin for begin, end in times) / (times[-1][1] - times[0][0])


@torch.inference_mode()
def measure_steps(
    engine: Engine,
    *,
    context_len: int,
    repeats: int = 3,
    most_steps: int = _NUM_SLOTS,
    params: SamplingParams = _GREEDY,
) -> StepFigures:
    """Time an engine's steps behind a context of random tokens. Between requests only; the sequence is forgotten.

    Args:
        engine: on a GPU, with room for the context and what is measured behind it.
        context_len: tokens in the cache before the first step.
        repeats: at least 1.
        most_steps: of a repeat; more than are skipped.
        params: how tokens are drawn.
    """
    meter = StepMeter(engine, context_len=context_len, params=params)
    runs = [meter.run(most_steps) for _ in range(repeats)]
    records = [record for run in runs for record in run.records[_SKIPPED_STEPS:-1]]
    medians = [statistics.median(run.step_ms) for run in runs]
    elapsed_ms = sum(sum(run.step_ms) for run in runs)
    num_tokens = sum(len(record.token_ids) for record in records)
    gap_share, launches = None, meter.num_nodes
    if not engine.execution.has_device_loop:
        gap_share, num_events = _trace(meter)
        launches = num_events if launches is None else launches
    assert launches is not None
    return StepFigures(
        step_ms=spread([ms for run in runs for ms in run.step_ms]),
        step_ms_range=(min(medians), max(medians)),
        tpot_ms=elapsed_ms / num_tokens,
        acceptance_length=num_tokens / len(records),
        mean_width=1 + statistics.fmean(record.num_drafted for record in records),
        launches_per_step=launches,
        programmatic_edges=meter.num_programmatic,
        idle_share=statistics.median(run.idle_share for run in runs),
        gap_share=gap_share,
        host_us_per_step=1e6 * sum(run.cpu_s for run in runs) / sum(len(run.records) - _SKIPPED_STEPS for run in runs),
        syncs_per_step=sum(run.num_waits for run in runs) / sum(len(run.records) for run in runs)
        + (not (engine.execution.run_ahead or engine.execution.has_device_loop)),
    )


def _trace(meter: StepMeter) -> tuple[float, int]:
    """Run some steps under the profiler: the share of time in which a step is under way and nothing runs; launches."""
    return gaps(trace_gpu(lambda: meter.run(_PROFILED_STEPS)))


def trace_gpu(run: Callable[[], object]) -> list[tuple[int, int, str]]:
    """Do something under the profiler, and give (begin ns, duration ns, name) of everything that ran on a GPU."""
    take_profiler_down()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        run()
    assert trace.profiler is not None and trace.profiler.kineto_results is not None, "the trace goes on"
    events = trace.profiler.kineto_results.events()
    return [(e.start_ns(), e.duration_ns(), e.name()) for e in events if e.device_type() == DeviceType.CUDA]


def gaps(events: Sequence[tuple[int, int, str]]) -> tuple[float, int]:
    """Find what is idle within steps, in a trace of whole steps between stamps.

    Args:
        events: (begin ns, duration ns, name) of everything that ran, in any order.

    Returns:
        Share of the time from the first stamp to the last, and launches of a step.
    """
    idle_ns, num_events, num_stamps = 0, 0, 0
    first_ns = last_ns = end_ns = 0
    for start_ns, duration_ns, name in sorted(events):
        is_stamp, is_within = STAMP in name, num_stamps % 2 == 1
        if is_within:
            idle_ns += max(0, start_ns - end_ns)
            num_events += not is_stamp
        if is_stamp:
            first_ns = first_ns or start_ns
            last_ns = start_ns + duration_ns
            num_stamps += 1
        end_ns = max(end_ns, start_ns + duration_ns)
    return idle_ns / (last_ns - first_ns), round(num_events / (num_stamps // 2))
