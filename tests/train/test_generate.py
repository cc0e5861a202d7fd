"""The batched generator answers as the engine does, and draws what it was asked to draw."""

from pathlib import Path

import pytest
import torch

from soloist.engine import Engine
from soloist.errors import ContextLengthError
from soloist.models.cache import StepKind
from soloist.models.causal_lm import CausalLM
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from soloist.train.generate import Request, generate
from tests.train.small import load_target

FAMILIES = ("llama", "qwen2", "qwen3", "bailing_moe_v3", "kimi_linear")
NEW = 40


def make_prompts(model: CausalLM) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(2)
    return [
        tuple(torch.randint(model.config.vocab_size - 3, (n,), generator=generator).tolist()) for n in (1, 9, 4, 23)
    ]


def run(model: CausalLM, requests: list[Request], eos: tuple[int, ...] = (), seed: int = 0, new: int = NEW):
    num_tokens = model.config.vocab_size - 3
    return generate(model, requests, max_new_tokens=new, num_tokens=num_tokens, eos_token_ids=eos, seed=seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_the_engines(family: str, tmp_path: Path):
    model = load_target(tmp_path, family)
    engine = Engine(ModelRunner(model, max_context_len=80, num_tokens=model.config.vocab_size - 3), eos_token_ids=())
    prompts = make_prompts(model)
    texts = run(model, [Request(prompt_ids=prompt, temperature=0.0) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        generation = engine.generate(prompt, SamplingParams(max_tokens=NEW))
        for _ in generation:
            pass
        assert text.num_prompt == len(prompt)
        assert list(text.token_ids) == [*prompt, *generation.token_ids]


def test_answers_end_with_an_end_token_and_others_go_on(tmp_path: Path):
    model = load_target(tmp_path, "bailing_moe_v3")
    requests = [Request(prompt_ids=prompt, temperature=0.0) for prompt in make_prompts(model)]
    whole = run(model, requests)
    answers = [text.token_ids[text.num_prompt :] for text in whole]
    # End tokens that three of the four answers come to, so that the batch shrinks under way.
    eos = tuple({answer[i] for answer, i in zip(answers, (2, 5, 8), strict=False)})
    ended = run(model, requests, eos)
    assert len({len(text.token_ids) for text in ended}) > 2
    for text, answer in zip(ended, answers, strict=True):
        stop = next((i + 1 for i, token in enumerate(answer) if token in eos), NEW)
        assert text.token_ids[text.num_prompt :] == answer[:stop]


def test_draws_follow_the_law_at_their_temperature_and_the_seed(tmp_path: Path):
    model = load_target(tmp_path, "qwen3")
    prompt = make_prompts(model)[1]
    requests = [Request(prompt_ids=prompt, temperature=t) for t in (0.0, 0.7, 3.0) for _ in range(1000)]
    texts = run(model, requests, new=1)
    assert texts == run(model, requests, new=1)
    assert texts != run(model, requests, new=1, seed=1)
    ids = torch.tensor(prompt)
    with torch.inference_mode():
        hidden = model.forward(ids, model.make_cache(len(ids)), StepKind.PREFILL)
        logits = model.compute_logits(hidden[-1:])[0, :-3]
    drawn = torch.tensor([text.token_ids[-1] for text in texts]).view(3, 1000)
    assert (drawn[0] == logits.argmax()).all()
    for row, temperature in ((1, 0.7), (2, 3.0)):
        found = drawn[row].bincount(minlength=len(logits)) / 1000
        law = (logits / temperature).softmax(-1)
        # Far below the distance of the two laws.
        assert (found - law).abs().sum() < 0.25
    assert ((logits / 0.7).softmax(-1) - (logits / 3.0).softmax(-1)).abs().sum() > 0.5


def test_what_does_not_fit_is_refused(tmp_path: Path):
    model = load_target(tmp_path, "qwen3")
    with pytest.raises(ContextLengthError, match="positions"):
        run(model, [Request(prompt_ids=(1,) * 1000, temperature=0.0)])
