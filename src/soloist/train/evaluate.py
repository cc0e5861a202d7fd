"""What a draft is worth: acceptance lengths rolled out through the engine, on prompts that it was not trained on.

Owns the figures, their confidence intervals and the model card. Acceptance lengths count the bonus token, so a plain
engine has 1 and a block of B drafts at most B + 1.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from soloist.engine import Engine
from soloist.errors import UsageError
from soloist.sampling_params import SamplingParams

# Resamples of the prompts for an interval of 95 %.
_NUM_RESAMPLES = 1000
# Tokens of the runs whose repetition is counted.
_RUN = 4


@dataclass(frozen=True, kw_only=True)
class _Answer:
    completion_tokens: int
    forwards: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    # From the first token to the last.
    decode_s: float


@dataclass(frozen=True, kw_only=True)
class TemperatureFigures:
    """What was measured at one temperature."""

    # 0: greedy.
    temperature: float
    # Tokens of the answers per forward pass, and where 95 % of resampled sets of prompts have it.
    acceptance_length: float
    interval: tuple[float, float]
    # Of the steps that verified a draft at place k, the share that kept it; and where 95 % of resamples have that.
    acceptance_by_position: tuple[float, ...]
    intervals_by_position: tuple[tuple[float, float], ...]
    num_prompts: int
    completion_tokens: int
    forwards: int
    # Answers left out because they repeat themselves, as a share of all.
    excluded_share: float
    # Medians over the answers, behind the first step: time of a step, and per token. None: no answer took two steps.
    step_ms: float | None
    tpot_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured of one draft."""

    model: str
    draft: str
    drafter: str
    dtype: str
    device: str
    # Rows of a step.
    width: int
    max_tokens: int
    # Answers with a smaller share of distinct runs of four tokens are left out; None: none are.
    min_distinct_ratio: float | None
    temperatures: tuple[TemperatureFigures, ...]

    def to_json(self) -> dict[str, Any]:
        """Put everything into one object."""
        return asdict(self)


def evaluate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    model: str,
    draft: str,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int = 0,
    min_distinct_ratio: float | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Answer prompts with the draft and count.

    Args:
        engine: with the drafter.
        prompts: token ids, held out of training.
        model: what the target is called.
        draft: what the draft is called.
        temperatures: each prompt is answered at each of them.
        max_tokens: of an answer.
        seed: of the draws and the resamples.
        min_distinct_ratio: leave out answers of which a smaller share of the runs of four tokens is distinct: loops are
            easy to draft. None: all count.
        on_progress: called with (answers done, answers to give).

    Raises:
        UsageError: there is no drafter, acceptance is simulated, or no prompt or no answer is left.
    """
    if not engine.drafter.max_drafts or engine.is_simulated:
        raise UsageError("there is no draft to evaluate: name one, and let its drafts be verified")
    if not prompts:
        raise UsageError("there is no prompt to evaluate on")
    found = []
    for i, temperature in enumerate(temperatures):
        answers = []
        for j, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + j)
            generation = engine.generate(prompt, params)
            for _ in generation:
                pass
            stats = generation.stats
            is_varied = min_distinct_ratio is None or distinct_ratio(generation.token_ids) >= min_distinct_ratio
            if stats.forwards and is_varied:
                answers.append(
                    _Answer(
                        completion_tokens=stats.completion_tokens,
                        forwards=stats.forwards,
                        drafted=stats.drafted_histogram,
                        accepted=stats.accepted_histogram,
                        decode_s=stats.decode_s,
                    )
                )
            on_progress(i * len(prompts) + j + 1, len(temperatures) * len(prompts))
        if not answers:
            raise UsageError(f"at temperature {temperature:g} every answer repeats itself: none is left to count")
        found.append(_summarise(answers, temperature, len(prompts), seed))
    runner = engine.runner
    return Evaluation(
        model=model,
        draft=draft,
        drafter=engine.drafter.name,
        dtype=str(runner.model.dtype).removeprefix("torch."),
        device=runner.model.device.type,
        width=runner.buffers.max_width,
        max_tokens=max_tokens,
        min_distinct_ratio=min_distinct_ratio,
        temperatures=tuple(found),
    )


def distinct_ratio(token_ids: Sequence[int]) -> float:
    """Give the share of runs of four tokens that are distinct; 1 for fewer than four."""
    runs = [tuple(token_ids[i : i + _RUN]) for i in range(len(token_ids) - _RUN + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def _length(answers: Sequence[_Answer]) -> float:
    return sum(a.completion_tokens for a in answers) / sum(a.forwards for a in answers)


def _by_position(answers: Sequence[_Answer], num_positions: int) -> list[float]:
    """Of the steps that verified a draft at place k, the share that kept it; 0 where none did."""
    shares = []
    for k in range(num_positions):
        drafted = sum(sum(a.drafted[k + 1 :]) for a in answers)
        shares.append(sum(sum(a.accepted[k + 1 :]) for a in answers) / drafted if drafted else 0.0)
    return shares


def _summarise(answers: Sequence[_Answer], temperature: float, num_prompts: int, seed: int) -> TemperatureFigures:
    deepest = max(j for a in answers for j, steps in enumerate(a.drafted) if steps)
    draw = random.Random(seed)
    lengths, positions = [], []
    for _ in range(_NUM_RESAMPLES):
        resampled = draw.choices(answers, k=len(answers))
        lengths.append(_length(resampled))
        positions.append(_by_position(resampled, deepest))
    timed = [answer for answer in answers if answer.forwards > 1]
    return TemperatureFigures(
        temperature=temperature,
        acceptance_length=_length(answers),
        interval=_interval(lengths),
        acceptance_by_position=tuple(_by_position(answers, deepest)),
        intervals_by_position=tuple(_interval([row[k] for row in positions]) for k in range(deepest)),
        num_prompts=len(answers),
        completion_tokens=sum(a.completion_tokens for a in answers),
        forwards=sum(a.forwards for a in answers),
        excluded_share=1 - len(answers) / num_prompts,
        step_ms=_median_ms([a.decode_s / (a.forwards - 1) for a in timed]),
        tpot_ms=_median_ms([a.decode_s / (a.completion_tokens - 1) for a in timed]),
    )


def _median_ms(seconds: list[float]) -> float | None:
    return 1000 * statistics.median(seconds) if seconds else None


def _interval(values: list[float]) -> tuple[float, float]:
    """Give the bounds of the middle 95 %."""
    ordered = sorted(values)
    return ordered[round(0.025 * (len(ordered) - 1))], ordered[round(0.975 * (len(ordered) - 1))]


def table(evaluation: Evaluation) -> str:
    """Write the figures as a Markdown table."""
    depth = max(len(t.acceptance_by_position) for t in evaluation.temperatures)
    head = ["temperature", "acceptance length (95 %)", "prompts", "tokens", *(f"p{k + 1}" for k in range(depth))]
    rows = [head, ["---:"] * len(head)]
    for t in evaluation.temperatures:
        low, high = t.interval
        shares = [f"{share:.2f}" for share in t.acceptance_by_position]
        rows.append(
            [
                f"{t.temperature:g}",
                f"{t.acceptance_length:.2f} ({low:.2f}-{high:.2f})",
                str(t.num_prompts),
                str(t.completion_tokens),
                *shares,
                *[""] * (depth - len(shares)),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def model_card(
    evaluation: Evaluation,
    *,
    licence: str,
    data: str,
    mix: dict[str, int] | None,
    training: dict[str, Any] | None,
    command: str,
) -> str:
    """Write a README for the draft's folder.

    Args:
        evaluation: what was measured.
        licence: of the weights.
        data: what the prompts were.
        mix: texts by the temperature they were drawn at. None: not known.
        training: settings of the run. None: not known.
        command: that gave the figures.
    """
    e = evaluation
    excluded = ", ".join(f"{t.excluded_share:.0%} at {t.temperature:g}" for t in e.temperatures)
    lines = [
        "---",
        f"license: {licence}",
        f"base_model: {e.model}",
        "tags: [speculative-decoding, dspark]",
        "---",
        "",
        f"# {e.draft}",
        "",
        f"A DSpark draft for {e.model}: it proposes {e.width - 1} tokens a step, and changes no answer.",
        "",
        "## What it is worth",
        "",
        f"Answers of up to {e.max_tokens} tokens to prompts held out of training, {e.dtype} on {e.device}, all"
        f" {e.width - 1} drafts verified. Acceptance length: tokens of the answer per pass of the target, the target's"
        f" own included, so 1 without a draft and at most {e.width}. p1, p2, ...: of the steps that verified a draft at"
        " that place, the share that kept it. In brackets: 95 % of resampled sets of prompts.",
        "",
        table(e),
        "",
    ]
    if e.min_distinct_ratio is not None:
        lines += [
            f"Answers of which less than {e.min_distinct_ratio:.0%} of the runs of four tokens are distinct are left"
            f" out: {excluded}.",
            "",
        ]
    lines += [f"    {command}", "", "## Data", "", data, ""]
    if mix is not None:
        counts = ", ".join(f"{count} at {temperature}" for temperature, count in mix.items())
        lines += [f"Answers are the target's own, by temperature: {counts}.", ""]
    if training is not None:
        lines += ["## Training", "", *_describe(training), ""]
    return "\n".join(lines)


def _describe(settings: dict[str, Any], prefix: str = "") -> list[str]:
    """List settings, nested ones by path."""
    lines = []
    for key, value in settings.items():
        if isinstance(value, dict):
            lines += _describe(value, f"{prefix}{key}.")
        else:
            lines.append(f"- {prefix}{key}: {value}")
    return lines
