"""The ladder: what each switch of a GPU's steps gives, one after the other, each with all those before it."""

from dataclasses import dataclass, replace
from typing import Any

from soloist.bench.steps import StepFigures
from soloist.runtime.graph import Execution

EAGER = "eager, the host waits for each step"


@dataclass(frozen=True, kw_only=True)
class RungSettings:
    """One rung."""

    # As it is typed; `EAGER` for the first.
    switch: str
    # None: what is fastest on the device.
    execution: Execution | None
    has_draft: bool = False
    is_adaptive: bool = False
    # That share the model.
    num_ranks: int = 1


def ladder(
    *, has_experts: bool, run_ahead: int, draft: str | None, is_adaptive: bool, num_ranks: int = 1
) -> list[RungSettings]:
    """Give the rungs in the order in which switches are added.

    Args:
        has_experts: whether the model has experts that `--fused-moe` could be about.
        run_ahead: steps ahead, from that rung on.
        draft: as `--draft` names it; None: no rung drafts.
        is_adaptive: whether there is a rung of adaptive width.
        num_ranks: that share the model; with several there is no head in fp32 and no device loop.
    """
    execution = Execution(
        is_captured=False, run_ahead=0, has_pdl=False, has_fused_moe=not has_experts, has_bf16_head=num_ranks > 1
    )
    rungs = [RungSettings(switch=EAGER, execution=execution, num_ranks=num_ranks)]

    def add(switch: str, *, has_draft: bool = False, is_adaptive: bool = False, **changes: Any) -> None:
        nonlocal execution
        execution, last = replace(execution, **changes), rungs[-1]
        rungs.append(
            RungSettings(
                switch=switch,
                execution=execution,
                has_draft=has_draft or last.has_draft,
                is_adaptive=is_adaptive or last.is_adaptive,
                num_ranks=num_ranks,
            )
        )

    if has_experts:
        add("--fused-moe", has_fused_moe=True)
    if num_ranks == 1:
        add("--bf16-head", has_bf16_head=True)
    add("--graph", is_captured=True)
    add(f"--run-ahead {run_ahead}", run_ahead=run_ahead)
    add("--pdl", has_pdl=True)
    if draft is not None:
        add(f"--draft {draft}", has_draft=True)
        if is_adaptive:
            add("--adaptive-width", is_adaptive=True)
    if num_ranks == 1:
        add("--device-loop", run_ahead=0, has_device_loop=True)
    return rungs


def step_fields(steps: StepFigures) -> dict[str, Any]:
    """Give the fields of a `Result` that steps fill in, besides those of requests."""
    return {
        "launches_per_step": steps.launches_per_step,
        "idle_share": steps.idle_share,
        "gap_share": steps.gap_share,
        "host_us_per_step": steps.host_us_per_step,
        "syncs_per_step": steps.syncs_per_step,
    }
