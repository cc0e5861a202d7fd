"""A GPU answers as the plain operators do in fp32 on a CPU, and what it says fits in its memory does."""

from pathlib import Path

import pytest
import torch

from soloist.draft_check import measure_logit_error, near_tie, read_sequence
from soloist.engine import Engine
from soloist.errors import DoesNotFitError
from soloist.hub import DEFAULT_MODEL, built_in_config, local_path
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.runtime.graph import Execution
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from soloist.tokenizer import Tokenizer
from tests.miniature import write_checkpoint
from tests.runtime.gpu_models import GPU_SIZES, make_drafter, make_drafting_engine, needs_gpu, prompt_of

MAX_TOKENS = 64
PROMPTS = ("The three laws of thermodynamics are", "def quicksort(items):\n", "Once upon a time,", "1, 2, 3, 4,")


# Drafters of the models whose state cannot be cut back.
DRAFTED = {"bailing_moe_v3": ("mtp", "ngram", "dspark", "twin"), "kimi_linear": ("ngram", "dspark", "twin")}


def answer(engine: Engine, prompt: list[int]) -> list[int]:
    """Answer greedily."""
    return [t for result in engine.generate(prompt, SamplingParams(max_tokens=MAX_TOKENS)) for t in result.token_ids]


def make_plain_engine(model: CausalLM, prompts: list[list[int]], num_tokens: int) -> Engine:
    """Make an engine without a draft, with all that is fastest on the device."""
    room = max(map(len, prompts)) + MAX_TOKENS
    runner = ModelRunner(model, max_context_len=room, num_tokens=num_tokens, chunk_tokens=24)
    return Engine(runner, eos_token_ids=(), execution=Execution.best_for(model.device))


@torch.inference_mode()
def check_greedy_texts(engine: Engine, reference: CausalLM, prompts: list[list[int]]) -> list[int]:
    """Hold answers to the reference's, each up to its first near-tie; how many tokens that is."""
    model, num_tokens = engine.runner.model, engine.runner.buffers.num_tokens
    answers = [answer(engine, prompt) for prompt in prompts]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, answers, strict=True)]
    error = measure_logit_error(model, reference, texts, num_tokens)
    same = []
    for prompt, tokens, text in zip(prompts, answers, texts, strict=True):
        logits, _ = read_sequence(reference, text[:-1])
        want = logits[len(prompt) - 1 :, :num_tokens].argmax(-1).tolist()
        same.append(next((i for i, (a, b) in enumerate(zip(tokens, want, strict=True)) if a != b), len(tokens)))
        if same[-1] < len(tokens):
            tie = near_tie(model, reference, text[: len(prompt) + same[-1]], num_tokens, error)
            assert tie["is_near_tie"], f"token {same[-1]} differs: {tie}"
        check_tokens_are_likely(logits, read_sequence(model, text[:-1])[0], tokens)
    return same


def check_tokens_are_likely(wanted: torch.Tensor, got: torch.Tensor, tokens: list[int]) -> None:
    """Hold the tokens of an answer, those behind the first near-tie too, to the likeliest after the same text.

    One in eight may be less likely than rounding explains: rounded otherwise, in steps instead of one piece, a near-tie
    of the router sends a token to another expert, which moves logits by far more.

    Args:
        wanted: (T, N) of the reference behind each token of prompt and answer but the last.
        got: (T, N) of the model, which read them in one piece: how far rounding alone moves the two apart.
        tokens: of the answer.
    """
    wanted, got = wanted[-len(tokens) :], got[-len(tokens) :].to(wanted)
    pairs = torch.stack([wanted.argmax(-1), torch.tensor(tokens)], dim=1)  # (T, 2)
    lead = wanted.gather(1, pairs)  # (T, 2)
    moved = lead - got.gather(1, pairs)
    lost, error = lead[:, 0] - lead[:, 1], float((moved[:, 0] - moved[:, 1]).abs().max())
    num_worse = int((lost > 2 * error).sum())
    assert num_worse <= len(tokens) // 8, (
        f"{num_worse} of {len(tokens)} tokens up to {float(lost.max()):.3f} less likely; rounding moves {error:.3f}"
    )


@needs_gpu
def test_greedy_text_on_a_gpu_is_that_of_the_reference(model: CausalLM, folder: Path, request: pytest.FixtureRequest):
    family = request.node.callspec.params["model"]
    reference = load_model(folder / family, dtype=torch.float32)
    prompts = [prompt_of(model, seed) for seed in range(4)]
    engine = make_plain_engine(model, prompts, model.config.vocab_size)
    print(family, check_greedy_texts(engine, reference, prompts))


@pytest.mark.parametrize(
    ("family", "draft", "device"),
    [
        # What is compared, and how, on a CPU too.
        ("bailing_moe_v3", "mtp", "cpu"),
        ("kimi_linear", "twin", "cpu"),
        *(pytest.param(family, draft, "cuda", marks=needs_gpu) for family in DRAFTED for draft in DRAFTED[family]),
    ],
)
def test_greedy_text_with_a_draft_is_that_of_the_reference(folder: Path, family: str, draft: str, device: str):
    path = folder / family
    if not path.exists():
        write_checkpoint(path, family, seed=3, **GPU_SIZES[family])
    model, reference = load_model(path, device=device), load_model(path, dtype=torch.float32)
    engine = make_drafting_engine(model, make_drafter(draft, model, path), Execution.best_for(model.device))
    # The second repeats itself, so that there is something to look up.
    prompts = [prompt_of(model), [5, 6, 7, 8, 9] * 6]
    prompts += [prompt_of(model, seed) for seed in range(1, 4)] if device == "cuda" else []
    print(family, draft, device, check_greedy_texts(engine, reference, prompts), engine.totals)
    assert engine.totals.drafted > 0
    assert draft != "twin" or engine.totals.acceptance_length > 2, "drafts that are the target's own are lost"


def test_a_token_that_rounding_does_not_explain_is_found():
    wanted = torch.tensor([[0.0, 3.0, 2.9], [0.0, 1.0, 5.0]])
    got = wanted + torch.tensor([[0.3, -0.1, 0.1], [0.0, 0.0, 0.1]])
    check_tokens_are_likely(wanted, got, [2, 2])
    with pytest.raises(AssertionError, match=r"1 of 2 tokens up to 4\.000 less likely"):
        check_tokens_are_likely(wanted, got, [2, 1])


@needs_gpu
@pytest.mark.skipif(local_path(DEFAULT_MODEL) is None, reason="the default model is not on this machine")
def test_greedy_text_of_the_default_model_on_a_gpu_is_that_of_the_reference():
    path = local_path(DEFAULT_MODEL)
    assert path is not None
    tokenizer = Tokenizer.load(path)
    model, reference = load_model(path, device="cuda"), load_model(path, dtype=torch.float32)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    found = check_greedy_texts(make_plain_engine(model, prompts, tokenizer.num_tokens), reference, prompts)
    print("tokens up to a near-tie", found)
    assert max(found) >= 16, "every answer parts at once: that is no matter of near-ties"


@needs_gpu
def test_the_largest_context_that_is_named_fits_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """PyTorch may take no more than is said to be free, and an answer that fills the context is given."""
    config = built_in_config("qwen2.5-coder-1.5b-instruct") | {"num_hidden_layers": 8}
    model = load_model(config, device="cuda", weights="random")
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_allocated() + 2 * 2**30 + 100_000_000
    monkeypatch.setattr("soloist.models.memory.free_bytes", lambda device: limit - torch.cuda.memory_allocated())
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        with pytest.raises(DoesNotFitError, match="the largest context that fits is") as refused:
            # Its cache alone is larger than what is free.
            ModelRunner(model, max_context_len=32768)
        largest = int(str(refused.value).rsplit("is ", 1)[1].split()[0])
        engine = Engine(ModelRunner(model, max_context_len=largest), eos_token_ids=())
        prompt = torch.randint(model.config.vocab_size, (largest - 20,)).tolist()
        results = list(engine.generate(prompt, SamplingParams(max_tokens=20)))
        assert sum(len(result.token_ids) for result in results) == 20
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
