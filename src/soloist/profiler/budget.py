"""Budgets: conditions under which a profile fails a check, as in "syncs>0,idle>5%"."""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from soloist.errors import UsageError
from soloist.profiler.analysis import Analysis
from soloist.profiler.waits import WaitKind

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_BUDGET = re.compile(r"\s*(?P<name>\w+)\s*(?P<operator>[<>]=?)\s*(?P<value>\d+(?:\.\d+)?)\s*(?P<percent>%?)\s*")
# Of a whole, so that percents are meant: as 5% or as 0.05.
_SHARES = ("idle",)
_METRICS: dict[str, Callable[[Analysis], float]] = {
    "syncs": lambda a: a.syncs_per_step,
    "idle": lambda a: a.idle_share,
    "gaps": lambda a: a.gaps_per_step,
    "blocked_ms": lambda a: a.blocked_ms,
    "pageable": lambda a: sum(wait.count for wait in a.waits if wait.kind is WaitKind.PAGEABLE_COPY),
    "step_ms": lambda a: a.step_ms,
    "lead_us": lambda a: a.lead.median_us if a.lead else 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One condition under which a check fails."""

    metric: str
    operator: str
    value: float

    def is_missed(self, analysis: Analysis) -> bool:
        """Say whether the condition holds."""
        return _OPERATORS[self.operator](_METRICS[self.metric](analysis), self.value)

    def __str__(self) -> str:
        return f"{self.metric}{self.operator}{self.value:g}"


def parse_budgets(text: str) -> tuple[Budget, ...]:
    """Read conditions, as in "syncs>0,idle>5%".

    Raises:
        UsageError: one is not understood, or could never hold.
    """
    budgets = []
    for part in text.split(","):
        match = _BUDGET.fullmatch(part)
        if match is None or match["name"] not in _METRICS:
            raise UsageError(
                f"--fail-on: {part.strip()!r} is not understood; allowed: NAME OPERATOR NUMBER, separated by commas,"
                f" NAME one of {', '.join(_METRICS)}, OPERATOR one of {' '.join(_OPERATORS)}; as in syncs>0,idle>5%"
            )
        value = float(match["value"]) / (100 if match["percent"] else 1)
        if match["name"] in _SHARES and value > 1:
            raise UsageError(
                f"--fail-on: {part.strip()!r} can never tell anything, since {match['name']} is a share of 1: for 5 of"
                " 100 say 5% or 0.05"
            )
        if match["name"] not in _SHARES and match["percent"]:
            raise UsageError(
                f"--fail-on: {part.strip()!r} has a percent sign, and only {' and '.join(_SHARES)} is a share"
            )
        budgets.append(Budget(metric=match["name"], operator=match["operator"], value=value))
    return tuple(budgets)


def missed(budgets: Sequence[Budget], analyses: Sequence[Analysis]) -> list[str]:
    """List the budgets that analyses miss, in words."""
    return [
        f"{budget.metric} is {_METRICS[budget.metric](analysis):.4g}, and --fail-on has {budget}"
        + (f" ({analysis.name})" if len(analyses) > 1 else "")
        for analysis in analyses
        for budget in budgets
        if budget.is_missed(analysis)
    ]
