"""Tiny dense models written by `transformers`, read back by Soloist, and the ways to run both."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from soloist.models import load_model
from soloist.models.cache import Cache, StepKind
from soloist.models.causal_lm import CausalLM

# Logits of fp32 models against transformers.
MAX_LOGITS_ERROR = 1e-4


def save_oracle(folder: Path, model_class: type[PreTrainedModel], config: Any, seed: int = 0) -> PreTrainedModel:
    """Make a model with lively random weights (norms and biases too) and save it as fp32 safetensors."""
    torch.manual_seed(seed)
    oracle = model_class(config).float().eval()
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            spread = torch.randn_like(weight)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.2 * spread)
            elif name.endswith("bias"):
                weight.copy_(0.4 * spread)
            else:
                weight.copy_(spread * (1.0 if "embed" in name else weight.shape[-1] ** -0.5))
    oracle.save_pretrained(folder)
    return oracle


def oracle_logits(oracle: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """(T, N)."""
    with torch.no_grad():
        return oracle(ids[None]).logits[0].float()


def make_noisy_cache(model: CausalLM, max_context_len: int, max_width: int = 7) -> Cache:
    """A cache whose rows beyond the context are large noise."""
    cache = model.make_cache(max_context_len, max_width)
    assert cache.kv is not None
    cache.kv.k.normal_(0.0, 1e4)
    cache.kv.v.normal_(0.0, 1e4)
    return cache


def run(
    model: CausalLM, cache: Cache, ids: torch.Tensor, kind: StepKind = StepKind.PREFILL, num_rows: int | None = None
) -> torch.Tensor:
    """One pass and its commit (of all rows unless `num_rows` says otherwise): logits (T, N)."""
    logits = model.compute_logits(model.forward(ids, cache, kind))
    cache.commit(len(ids) if num_rows is None else num_rows, kind)
    return logits


def prefill(model: CausalLM, cache: Cache, ids: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Prefill in chunks of these sizes: logits (T, N)."""
    return torch.cat([run(model, cache, chunk) for chunk in ids.split(list(sizes))])


def random_ids(model: CausalLM, count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def check_against_oracle(folder: Path, model_class: type[PreTrainedModel], config: Any) -> CausalLM:
    """Hold fp32 logits of a prefill, and of decode steps behind it, against transformers."""
    oracle = save_oracle(folder, model_class, config)
    model = load_model(folder, dtype=torch.float32)
    ids = random_ids(model, 37)
    expected = oracle_logits(oracle, ids)
    cache = make_noisy_cache(model, 41)
    logits = prefill(model, cache, ids[:29], [29])
    steps = [run(model, cache, ids[i : i + 1], StepKind.DECODE) for i in range(29, 37)]
    error = (torch.cat([logits, *steps]) - expected).abs().max().item()
    assert error < MAX_LOGITS_ERROR
    # The oracle is no constant: another prompt has other logits.
    assert (oracle_logits(oracle, ids.flip(0)) - expected).abs().max() > 0.1
    return model
