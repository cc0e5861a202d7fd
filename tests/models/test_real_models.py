"""The real small models from their GGUF files: the text that transformers gives, sense, and the cost of packing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from soloist.models import load_model
from soloist.models.cache import StepKind
from soloist.models.causal_lm import CausalLM
from soloist.tokenizer import Tokenizer
from tests.models.real_models import QWEN_05B, QWEN_15B, SMOLLM2, find_real_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = (
    CHAT.format("Why is the sky blue?"),
    CHAT.format("Write a haiku about the sea."),
    CHAT.format("Name three European capitals and one fact about each."),
    "The history of the steam engine begins",
    "def quicksort(items):\n",
    CHAT.format("Übersetze ins Deutsche: I would like a cup of coffee, please. 🙂"),
)
NUM_TOKENS = 72


def greedy(model: CausalLM, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """Prefill, then decode one token at a time, through any end token."""
    cache = model.make_cache(len(prompt_ids) + num_tokens)
    ids, kind = torch.tensor(prompt_ids), StepKind.PREFILL
    answer: list[int] = []
    while len(answer) < num_tokens:
        hidden = model.forward(ids, cache, kind)
        cache.commit(len(ids), kind)
        ids, kind = model.compute_logits(hidden[-1:]).argmax(-1), StepKind.DECODE
        answer.append(int(ids))
    return answer


@pytest.mark.slow
def test_greedy_text_equals_that_of_transformers() -> None:
    path = find_real_model(SMOLLM2)
    model = load_model(path, dtype=torch.float32)
    tokenizer = Tokenizer.load(path)
    oracle = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    for prompt in PROMPTS:
        prompt_ids = tokenizer.encode(prompt, allow_special=True)
        answer = greedy(model, prompt_ids, NUM_TOKENS)
        # One pass over prompt and answer: each token is what the oracle chooses behind the ones before it, so this is
        # the oracle's own greedy answer.
        ids = torch.tensor(prompt_ids + answer)
        with torch.no_grad():
            logits = oracle(ids[None]).logits[0]
        assert logits[len(prompt_ids) - 1 : -1].argmax(-1).tolist() == answer, prompt
        ours = model.compute_logits(model.forward(ids, model.make_cache(len(ids)), StepKind.PREFILL))
        assert (ours - logits).abs().max().item() < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize(("form", "error"), [(None, 0.03), ("bf16", 0.03), ("int8", 0.06), ("int4", 0.2)])
def test_packed_forms_stay_near_the_exact_logits(form: Any, error: float) -> None:
    path = find_real_model(SMOLLM2)
    ids = torch.tensor(Tokenizer.load(path).encode(PROMPTS[0] + "The sky appears blue because", allow_special=True))

    def logits_of(**options: Any) -> torch.Tensor:
        model = load_model(path, **options)
        return model.compute_logits(model.forward(ids, model.make_cache(len(ids)), StepKind.PREFILL))

    exact = logits_of(dtype=torch.float32)
    exact = exact - exact.mean(-1, keepdim=True)
    packed = logits_of(weights_dtype=form)
    packed = packed - packed.mean(-1, keepdim=True)
    assert ((packed - exact).norm() / exact.norm()).item() < error


@pytest.mark.parametrize("filename", [QWEN_05B, pytest.param(QWEN_15B, marks=pytest.mark.slow)])
def test_qwen_coder_answers_with_sense(filename: str) -> None:
    path = find_real_model(filename)
    model, tokenizer = load_model(path), Tokenizer.load(path)
    # The file holds the tied matrix twice.
    assert model.config.tie_word_embeddings  # type: ignore[attr-defined]
    answer = greedy(model, tokenizer.encode("def fibonacci(n):\n    if n < 2:\n"), 24)
    text = tokenizer.decode(answer)
    assert "return n" in text and "fibonacci(n-1)" in text.replace(" ", ""), text
    answer = greedy(model, tokenizer.encode(CHAT.format("What is the capital of France?"), allow_special=True), 12)
    assert "Paris" in tokenizer.decode(answer)


def test_a_real_file_has_the_parameters_its_model_has() -> None:
    path: Path = find_real_model(SMOLLM2)
    report = load_model(path, weights_dtype="bf16").report
    assert report.weight_bytes == 2 * 134_515_008
