"""Miniature hybrid models read back from disk, and the ways to run them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from soloist.models import load_model
from soloist.models.cache import Cache, StepKind
from soloist.models.causal_lm import CausalLM
from soloist.models.hybrid import HybridCausalLM
from tests.miniature import miniature_config, write_checkpoint

# Name -> family, config keys that differ from the miniature's.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ling": ("bailing_moe_v3", {}),
    "ling-query-rank": (
        "bailing_moe_v3",
        {"q_lora_rank": 14, "expert_swiglu_limit_list": None, "share_expert_swiglu_limit_list": None},
    ),
    "ling-gate-rank": ("bailing_moe_v3", {"no_kda_lora": False, "use_kda_lora": True}),
    "ling-no-gate-no-rotary": (
        "bailing_moe_v3",
        {"gated_attention_proj_granularity_type": None, "use_mla_nope": True},
    ),
    "kimi": ("kimi_linear", {}),
}


def config_of(variant: str) -> dict[str, Any]:
    family, overrides = VARIANTS[variant]
    return miniature_config(family, **overrides)


def load(folder: Path, variant: str, dtype: torch.dtype = torch.float32) -> HybridCausalLM:
    """Write a variant's checkpoint, in bf16, and read it back."""
    family, overrides = VARIANTS[variant]
    write_checkpoint(folder, family, seed=3, **overrides)
    model = load_model(folder, dtype=dtype, weights_dtype="fp32" if dtype is torch.float32 else "bf16")
    assert isinstance(model, HybridCausalLM)
    return model


def make_cache(model: Any, max_context_len: int, max_width: int = 7) -> Cache:
    """A cache whose rows beyond the context are large noise, and whose kept verify rows are NaN."""
    cache = model.make_cache(max_context_len, max_width)
    cache.latent.latent.normal_(0.0, 1e4)
    if cache.recurrent is not None:
        r = cache.recurrent
        for kept in (r.verify_k, r.verify_u, r.verify_g, r.verify_conv):
            kept.fill_(torch.nan)
    return cache


def random_ids(model: CausalLM, count: int, seed: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def prefill(model: CausalLM, cache: Cache, chunks: Iterable[torch.Tensor]) -> torch.Tensor:
    """Run chunks (T_i,) one behind the other; give the logits of all rows."""
    logits = []
    for chunk in chunks:
        hidden = model.forward(chunk, cache, StepKind.PREFILL)
        cache.commit(len(chunk), StepKind.PREFILL)
        logits.append(model.compute_logits(hidden))
    return torch.cat(logits)


def decode(model: CausalLM, cache: Cache, input_ids: torch.Tensor) -> torch.Tensor:
    """Run tokens (T,) one by one; give the logits of all rows."""
    logits = []
    for token in input_ids.split(1):
        hidden = model.forward(token, cache, StepKind.DECODE)
        cache.commit(1, StepKind.DECODE)
        logits.append(model.compute_logits(hidden))
    return torch.cat(logits)


def assert_same_state(a: Cache, b: Cache, tolerance: float) -> None:
    assert int(a.context_len) == int(b.context_len)
    rows = int(a.context_len)
    pairs = [(a.latent.latent[:, :rows], b.latent.latent[:, :rows])]
    if a.recurrent is not None:
        pairs += [(a.recurrent.state, b.recurrent.state), (a.recurrent.conv, b.recurrent.conv)]
    for x, y in pairs:
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance)
