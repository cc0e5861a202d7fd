"""Proof that a draft changes nothing: the same model with and without it, on the same prompts.

    greedy     the same tokens; in fp32 all of them, elsewhere up to a near-tie, where the fp32 reference's two
               likeliest logits are closer than twice the error of the logits
    sampling   tokens drawn with the draft follow the target's law: chi-square of F(token), which is then uniform
    logprobs   what is reported beside the tokens is the same, to the error of the logits
    state      the cache behind an answer is the same, to the difference that reading it in one piece makes
    reading    a DSpark draft agrees with the model's own text, read as its config says and in no other reading more

Owns the checks and the report. Loads nothing but, for a near-tie, the reference.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import soloist
from soloist.engine import Engine
from soloist.errors import UsageError
from soloist.generation import Generation
from soloist.kernels.sampling import target_probs
from soloist.models.cache import Cache, StepKind
from soloist.models.causal_lm import CausalLM
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from soloist.spec.dspark import DSpark
from soloist.spec.dspark_selftest import DraftAgreement, measure_agreement

PROMPTS = (
    "The three laws of thermodynamics, each in one sentence:\n1.",
    "def quicksort(items: list[int]) -> list[int]:\n",
    "Q: What is the capital of France?\nA:",
    "Once upon a time, in a small village by the sea,",
    "a, b, c, d, a, b, c, d, a, b,",
    '{"name": "Ada", "born": 1815, "field": "mathematics"}\n{"name":',
    "SELECT customers.name, SUM(orders.total) FROM",
    "Translate into German: The weather is nice today, and I am going for a walk.\n",
)
# Of the sampled answers: a small head of tokens, as most requests draw from.
_TEMPERATURE, _TOP_K = 1.0, 20
# Bins of the chi-square, and the probability below which a right draft would be called wrong.
_NUM_BINS, _MIN_P_VALUE = 10, 1e-3
# Differences that are rounding whatever was measured.
_LEAST_LOGIT_ERROR, _LEAST_STATE_ERROR = 1e-4, 1e-6
# Places that a draft is read from, over all texts.
_NUM_ANCHORS = 200
# How much more than measured elsewhere an error may be.
_SLACK = 2.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """One property and what was found."""

    name: str
    passed: bool
    # In a few words, for the table.
    summary: str
    details: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Report:
    """All checks of one draft."""

    soloist: str
    model: str
    drafter: str
    dtype: str
    width: int
    num_prompts: int
    max_tokens: int
    acceptance_length: float
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether the draft changes nothing."""
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Put everything into one object."""
        return {"passed": self.passed} | asdict(self)


@dataclass(frozen=True, kw_only=True)
class _Answer:
    tokens: list[int]
    logprobs: list[float]
    # Behind the answer.
    state: dict[str, torch.Tensor]


def check_draft(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    model: str,
    max_tokens: int,
    load_reference: Callable[[], CausalLM],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Run every check.

    Args:
        engine: with the drafter.
        prompts: token ids.
        model: what it is called.
        max_tokens: of every answer.
        load_reference: gives the model in fp32; called only if greedy answers differ.
        on_progress: called with (answers done, answers to give).

    Raises:
        UsageError: the engine has no drafter, or does not verify.
    """
    if not engine.drafter.max_drafts:
        raise UsageError("there is no draft to check: name one")
    if engine.is_simulated:
        raise UsageError("simulated acceptance keeps drafts by lot: there is nothing to check")
    runner = engine.runner
    plain_runner = ModelRunner(
        runner.model,
        max_context_len=runner.max_context_len,
        num_tokens=runner.buffers.num_tokens,
        chunk_tokens=runner.chunk_tokens,
    )
    plain = Engine(plain_runner, eos_token_ids=engine.eos_token_ids)
    plainly: list[_Answer] = []
    drafted: list[_Answer] = []
    sampled: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        for j, (answers, answering) in enumerate(((plainly, plain), (drafted, engine))):
            answers.append(_answer(answering, prompt, max_tokens))
            on_progress(3 * i + j + 1, 3 * len(prompts))
        sampled.append(_sample(engine, prompt, max_tokens, seed=i))
        on_progress(3 * i + 3, 3 * len(prompts))
    totals = engine.totals
    logit_error, state_error = _own_errors(runner.model, prompts, plainly)
    checks = [
        _check_greedy(runner, prompts, plainly, drafted, load_reference),
        _check_sampling(runner, prompts, sampled),
        _check_logprobs(plainly, drafted, logit_error),
        _check_state(plainly, drafted, state_error),
    ]
    if isinstance(engine.drafter, DSpark):
        checks.append(_check_reading(engine.drafter, runner.model, prompts, plainly))
    return Report(
        soloist=soloist.__version__,
        model=model,
        drafter=engine.drafter.name,
        dtype=str(runner.model.dtype).removeprefix("torch."),
        width=runner.buffers.max_width,
        num_prompts=len(prompts),
        max_tokens=max_tokens,
        acceptance_length=totals.acceptance_length,
        checks=tuple(checks),
    )


def _answer(engine: Engine, prompt: Sequence[int], max_tokens: int) -> _Answer:
    generation = engine.generate(prompt, SamplingParams(max_tokens=max_tokens, logprobs=0))
    logprobs = [logprob for result in generation for logprob in result.logprobs]
    state = engine.runner.cache.snapshot().tensors
    return _Answer(tokens=generation.token_ids, logprobs=[logprob.logprob for logprob in logprobs], state=state)


def _sample(engine: Engine, prompt: Sequence[int], max_tokens: int, seed: int) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, temperature=_TEMPERATURE, top_k=_TOP_K, seed=seed)
    generation: Generation = engine.generate(prompt, params)
    for _ in generation:
        pass
    return generation.token_ids


def read_sequence(model: CausalLM, ids: Sequence[int]) -> tuple[torch.Tensor, Cache]:
    """Read a sequence in one piece: the logits behind each of its tokens (T, N), and the cache."""
    cache = model.make_cache(len(ids), 1)
    hidden = model.forward(torch.tensor(ids, device=model.device), cache, StepKind.PREFILL)
    cache.commit(len(ids), StepKind.PREFILL)
    return model.compute_logits(hidden), cache


def _relative_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Give the largest relative RMS difference of two states' tensors."""
    pairs = [(got[name].float(), want[name].float()) for name in want]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)


@torch.inference_mode()
def _own_errors(model: CausalLM, prompts: Sequence[Sequence[int]], plainly: Sequence[_Answer]) -> tuple[float, float]:
    """Measure what the number of rows of a pass changes without any draft: in log probabilities, and in the state."""
    logit_error, state_error = _LEAST_LOGIT_ERROR, _LEAST_STATE_ERROR
    for prompt, answer in zip(prompts, plainly, strict=True):
        ids = [*prompt, *answer.tokens]
        logits, cache = read_sequence(model, ids[:-1])
        chosen = (
            logits[len(prompt) - 1 :].log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None].to(logits.device))
        )
        own = torch.tensor(answer.logprobs, device=logits.device)
        logit_error = max(logit_error, float((chosen[:, 0] - own).abs().max()))
        state_error = max(state_error, _relative_error(answer.state, cache.snapshot().tensors))
    return logit_error, state_error


def _check_greedy(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    plainly: Sequence[_Answer],
    drafted: Sequence[_Answer],
    load_reference: Callable[[], CausalLM],
) -> Check:
    differences: list[dict[str, Any]] = []
    reference, error = None, 0.0
    num_tokens = runner.buffers.num_tokens
    for i, (prompt, one, other) in enumerate(zip(prompts, plainly, drafted, strict=True)):
        at = next((t for t, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b), None)
        if at is None and len(one.tokens) == len(other.tokens):
            continue
        found: dict[str, Any] = {"prompt": i, "at": at, "is_near_tie": False}
        if at is not None and runner.model.dtype is not torch.float32:
            if reference is None:
                reference = load_reference()
                texts = [[*p, *answer.tokens] for p, answer in zip(prompts, plainly, strict=True)]
                error = measure_logit_error(runner.model, reference, texts, num_tokens)
            found |= near_tie(runner.model, reference, [*prompt, *one.tokens[:at]], num_tokens, error)
        differences.append(found)
    num_ties = sum(found["is_near_tie"] for found in differences)
    num_equal = len(prompts) - len(differences)
    summary = f"{num_equal} of {len(prompts)} answers are the same"
    if num_ties:
        summary += f", {num_ties} part at a near-tie"
    return Check(
        name="greedy",
        passed=num_ties == len(differences),
        summary=summary,
        details={"num_equal": num_equal, "num_near_ties": num_ties, "differences": differences},
    )


@torch.inference_mode()
def near_tie(
    model: CausalLM, reference: CausalLM, ids: Sequence[int], num_tokens: int, least_error: float = 0.0
) -> dict[str, Any]:
    """Say whether the token behind a sequence is a near-tie: its two likeliest logits are within the error of logits.

    The error is the largest along the sequence: at a single position it may be small by chance.

    Args:
        model: whose answers differ.
        reference: the same in fp32, on any device.
        ids: prompt and answer before the first difference.
        num_tokens: ids that may be drawn.
        least_error: of the logits, as `measure_logit_error` finds it on other sequences of the kind.
    """
    return judge_tie(*_read_both(model, reference, ids, num_tokens), least_error)


@torch.inference_mode()
def measure_logit_error(model: CausalLM, reference: CausalLM, texts: Iterable[Sequence[int]], num_tokens: int) -> float:
    """Give the largest error of a model's logits along some texts; arguments as in `near_tie`."""
    return max(logit_error(*_read_both(model, reference, text, num_tokens)) for text in texts)


def _read_both(
    model: CausalLM, reference: CausalLM, ids: Sequence[int], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the logits (T, N) of the reference behind each token, and those of the model."""
    wanted, got = (read_sequence(one, ids)[0][:, :num_tokens] for one in (reference, model))
    return wanted, got


def judge_tie(wanted: torch.Tensor, got: torch.Tensor, least_error: float = 0.0) -> dict[str, Any]:
    """Hold the gap between the two likeliest tokens behind a sequence against the error of its logits.

    Args:
        wanted: (T, N) of the fp32 reference, behind each token.
        got: (T, N) of the model.
        least_error: of its logits, as measured elsewhere.
    """
    top = wanted[-1].topk(2)
    gap = float(top.values[0] - top.values[1])
    error = max(least_error, logit_error(wanted, got))
    return {"top_two_gap": gap, "logit_error": error, "is_near_tie": gap < 2 * error}


def logit_error(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Give the largest error of logits (T, N), of the two that the reference finds likeliest in each row."""
    difference = (got.to(wanted) - wanted).gather(1, wanted.topk(2).indices)  # (T, 2)
    # A common shift changes no token.
    return float((difference[:, 0] - difference[:, 1]).abs().max() / 2)


@torch.inference_mode()
def _check_sampling(runner: ModelRunner, prompts: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]) -> Check:
    uniforms = []
    generator = torch.Generator().manual_seed(0)
    for prompt, tokens in zip(prompts, sampled, strict=True):
        rows = read_sequence(runner.model, [*prompt, *tokens[:-1]])[0][len(prompt) - 1 :, : runner.buffers.num_tokens]
        uniforms.append(uniform_if_right(rows, tokens, generator))
    values = torch.cat(uniforms)
    counts = (values * _NUM_BINS).long().clamp_max(_NUM_BINS - 1).bincount(minlength=_NUM_BINS)
    expected = values.shape[0] / _NUM_BINS
    statistic = float(((counts - expected) ** 2 / expected).sum())
    p_value = chi_square_p_value(statistic, _NUM_BINS - 1)
    return Check(
        name="sampling",
        passed=p_value > _MIN_P_VALUE,
        summary=f"chi-square {statistic:.1f} over {values.shape[0]} tokens, p = {p_value:.3f}",
        details={"chi_square": statistic, "p_value": p_value, "num_tokens": values.shape[0], "counts": counts.tolist()},
    )


def uniform_if_right(logits: torch.Tensor, tokens: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Map each token to F(token) under the law it should follow, jumps of F filled at random: (T,) fp64.

    Likelier tokens come first, so that a draft that is kept too often shows at one end.

    Args:
        logits: (T, N).
        tokens: the drawn ones.
        generator: of the numbers that fill the jumps.
    """
    device = logits.device
    parameters = [torch.tensor(x, device=device) for x in (_TEMPERATURE, 1.0, 0.0)]
    top_k = torch.tensor(_TOP_K, dtype=torch.int32, device=device)
    probs = target_probs(logits.float(), parameters[0], top_k, *parameters[1:]).double().cpu()
    chosen = probs.gather(1, torch.tensor(tokens)[:, None])  # (T, 1)
    below = torch.where(probs > chosen, probs, 0.0).sum(1)
    return below + chosen[:, 0] * torch.rand(len(tokens), generator=generator)


def chi_square_p_value(statistic: float, degrees: int) -> float:
    """Give the probability of a chi-square at least this large."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _check_logprobs(plainly: Sequence[_Answer], drafted: Sequence[_Answer], error: float) -> Check:
    largest, num_compared = 0.0, 0
    for one, other in zip(plainly, drafted, strict=True):
        for t, (a, b) in enumerate(zip(one.logprobs, other.logprobs, strict=False)):
            if one.tokens[t] != other.tokens[t]:
                break
            largest, num_compared = max(largest, abs(a - b)), num_compared + 1
    return Check(
        name="logprobs",
        passed=num_compared > 0 and not math.isnan(largest) and largest <= _SLACK * error,
        summary=f"at most {largest:.1e} apart over {num_compared} tokens; without a draft {error:.1e}",
        details={"largest_difference": largest, "num_compared": num_compared, "without_a_draft": error},
    )


def _check_state(plainly: Sequence[_Answer], drafted: Sequence[_Answer], error: float) -> Check:
    pairs = [(a, b) for a, b in zip(plainly, drafted, strict=True) if a.tokens == b.tokens]
    largest = max((_relative_error(b.state, a.state) for a, b in pairs), default=math.nan)
    return Check(
        name="state",
        passed=largest <= _SLACK * error,
        summary=f"relative difference {largest:.1e} behind {len(pairs)} answers; without a draft {error:.1e}",
        details={"largest_difference": largest, "num_compared": len(pairs), "without_a_draft": error},
    )


@torch.inference_mode()
def _check_reading(
    drafter: DSpark, target: CausalLM, prompts: Sequence[Sequence[int]], plainly: Sequence[_Answer]
) -> Check:
    """Hold a draft, in every reading, against the greedy answers."""
    model = drafter.model
    shortest = model.config.block_size + 1
    texts = [(p, a.tokens) for p, a in zip(prompts, plainly, strict=True) if len(a.tokens) >= shortest]
    if not texts:
        summary = f"not measured: no answer has the {shortest} tokens that a block needs; ask for more --tokens"
        return Check(name="reading", passed=False, summary=summary, details={"num_anchors": 0})
    num_anchors = max(_NUM_ANCHORS // len(texts), 1)
    found = [
        measure_agreement(model, target, [*p, *tokens], num_prompt=len(p), num_anchors=num_anchors)
        for p, tokens in texts
    ]
    together = _pool(found)
    agreement = together.mean(together.declared)
    fault = together.fault
    return Check(
        name="reading",
        passed=fault is None,
        summary=fault or f"agrees with {agreement:.2f} of the text, from {together.num_anchors} places",
        details={"agreement": agreement, "by_slot": together.by_slot[together.declared], "fault": fault}
        | {"num_anchors": together.num_anchors},
    )


def _pool(found: Sequence[DraftAgreement]) -> DraftAgreement:
    """Put what was found on several texts together, each place counting once."""
    total = sum(one.num_anchors for one in found)
    by_slot = {
        reading: tuple(
            sum(one.by_slot[reading][k] * one.num_anchors for one in found) / total for k in range(len(shares))
        )
        for reading, shares in found[0].by_slot.items()
    }
    return replace(found[0], by_slot=by_slot, num_anchors=total)
