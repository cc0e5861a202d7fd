"""Every drafter at work on miniature targets. A new drafter gets one line in `DRAFTERS` and is held to everything."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from soloist.engine import Engine
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.runtime.buffers import MAX_WIDTH, StepBuffers
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from soloist.spec.draft_model import DraftModel
from soloist.spec.drafter import Drafter
from soloist.spec.dspark import DSpark, make_random_dspark
from soloist.spec.dspark_config import random_config
from soloist.spec.mtp import load_mtp
from soloist.spec.ngram import PromptLookup
from soloist.spec.setup import DrafterSetup, DraftLayers
from soloist.spec.verify import Rule
from tests.miniature import FAMILIES, write_checkpoint

HYBRIDS = ("bailing_moe_v3", "kimi_linear")
# Few layers of every kind, because these models make thousands of steps; small enough a vocabulary for its law to show.
_SMALL: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2, "vocab_size": 67},
    "qwen2": {"num_hidden_layers": 2, "vocab_size": 61},
    "qwen3": {"num_hidden_layers": 2, "vocab_size": 59},
    "bailing_moe_v3": {"num_hidden_layers": 3, "num_experts": 8, "vocab_size": 71},
    "kimi_linear": {
        "num_hidden_layers": 3,
        "num_experts": 6,
        "vocab_size": 53,
        "linear_attn_config": {
            "full_attn_layers": [3],
            "head_dim": 12,
            "kda_layers": [1, 2],
            "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
    },
}


def write_small(folder: Path, family: str, seed: int = 3, **overrides: Any) -> Path:
    """Write the checkpoint of a small target."""
    return write_checkpoint(folder, family, seed, **(_SMALL[family] | overrides))


def load_small(folder: Path, family: str, seed: int = 3, **overrides: Any) -> CausalLM:
    """Load a small target in fp32, where greedy answers are compared token for token."""
    return load_model(write_small(folder, family, seed, **overrides), dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a drafter is made for."""

    target: CausalLM
    # The target's checkpoint.
    path: Path
    # Where drafts with weights of their own may write theirs.
    scratch: Path
    max_drafts: int
    # Captured steps have fixed shapes; on the CPU they need not.
    is_fixed_shape: bool
    # How ranks hold the layers of a draft.
    draft_layers: DraftLayers = "sharded"

    @property
    def max_context_len(self) -> int:
        """Most tokens of a request in these tests."""
        return self.target.config.max_position_embeddings - 16

    def setup(self) -> DrafterSetup:
        """Say the same in the drafters' own words."""
        return DrafterSetup(
            target=self.target,
            target_path=self.path,
            max_context_len=self.max_context_len,
            num_tokens=self.target.config.vocab_size,
            max_width=1 + self.max_drafts,
            draft_layers=self.draft_layers,
        )


def _draft_model(setting: Setting, family: str, seed: int) -> Drafter:
    # Another model of the family, whose guesses are no better than chance; with the target's seed, its twin.
    N = setting.target.config.vocab_size
    overrides = {"vocab_size": N, "max_position_embeddings": 1024}
    if family == "kimi_linear":
        overrides = {"vocab_size": N}
    model = load_small(setting.scratch / f"{family}-{seed}-{N}", family, seed, **overrides)
    return DraftModel(
        model,
        max_context_len=setting.max_context_len,
        num_tokens=N,
        max_drafts=setting.max_drafts,
        is_fixed_shape=setting.is_fixed_shape,
    )


def _twin(setting: Setting) -> Drafter:
    return DraftModel(
        setting.target,
        max_context_len=setting.max_context_len,
        num_tokens=setting.target.config.vocab_size,
        max_drafts=setting.max_drafts,
        is_fixed_shape=setting.is_fixed_shape,
    )


def _ngram(setting: Setting) -> Drafter:
    return PromptLookup(
        max_context_len=setting.max_context_len,
        max_drafts=setting.max_drafts,
        device=torch.device("cpu"),
        is_fixed_shape=setting.is_fixed_shape,
    )


def _mtp(setting: Setting) -> Drafter:
    drafter = load_mtp(setting.setup())
    drafter.is_fixed_shape = setting.is_fixed_shape
    return drafter


def _dspark(setting: Setting, **shape: Any) -> Drafter:
    depth = setting.target.config.num_hidden_layers
    config = random_config(
        setting.target.config,
        block_size=setting.max_drafts + 2,
        num_hidden_layers=1,
        markov_rank=6,
        target_layer_ids=tuple(range(-1, depth - 1)),
        **shape,
    )
    drafter = make_random_dspark(setting.setup(), config)
    drafter.is_fixed_shape = setting.is_fixed_shape
    return drafter


def _dspark_chosen(setting: Setting) -> Drafter:
    drawn = _dspark(setting, markov_head_type="rnn")
    assert isinstance(drawn, DSpark)
    drafter = DSpark(drawn.model, max_drafts=setting.max_drafts, draft_greedily=True)
    drafter.is_fixed_shape = setting.is_fixed_shape
    return drafter


MakeDrafter = Callable[[Setting], Drafter]
# Drafter, and the families it drafts for.
DRAFTERS: dict[str, tuple[MakeDrafter, tuple[str, ...]]] = {
    "ngram": (_ngram, FAMILIES),
    "draft model": (lambda setting: _draft_model(setting, "llama", 9), FAMILIES),
    "recurrent draft model": (lambda setting: _draft_model(setting, "kimi_linear", 9), ("llama", "kimi_linear")),
    # Always right, so every step commits all its drafts.
    "twin": (_twin, FAMILIES),
    "mtp": (_mtp, ("bailing_moe_v3",)),
    "dspark": (_dspark, FAMILIES),
    "dspark, chosen": (_dspark_chosen, ("llama", "bailing_moe_v3")),
    "dflash": (lambda setting: _dspark(setting, markov_head_type=None, confidence_input="hidden"), ("qwen3",)),
}
CASES = [(name, family) for name, (_, families) in DRAFTERS.items() for family in families]


def make_engine(
    target: CausalLM,
    drafter: Drafter | None = None,
    *,
    is_fixed_shape: bool = False,
    rule: Rule = Rule.CHAIN,
    chunk_tokens: int = 3,
    num_tokens: int | None = None,
    max_context_len: int | None = None,
    simulated_acceptance: float | None = None,
) -> Engine:
    """Make an engine of small chunks, whose steps have all their rows if shapes are fixed."""
    limit = (drafter and drafter.max_context_len) or target.config.max_position_embeddings - 16
    runner = ModelRunner(
        target,
        max_context_len=max_context_len or limit,
        max_width=1 + (drafter.max_drafts if drafter else 0),
        has_draft_probs=bool(drafter and drafter.has_draft_law),
        capture_layers=drafter.capture_layers if drafter else (),
        chunk_tokens=chunk_tokens,
        num_tokens=num_tokens,
    )
    engine = Engine(runner, drafter, eos_token_ids=(), rule=rule, simulated_acceptance=simulated_acceptance)
    engine._reads_width = not is_fixed_shape
    return engine


def answer(engine: Engine, prompt: list[int], **params: Any) -> list[int]:
    """Give the ids of an answer."""
    return [token for result in engine.generate(prompt, SamplingParams(**params)) for token in result.token_ids]


def prompt_of(num_tokens: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Draw a prompt."""
    return torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def tamper(drafter: Drafter, wanted: list[int], num_prompt: int, num_kept: list[int], N: int) -> list[list[int]]:
    """Let step s keep `num_kept[s % len]` drafts of a known answer; give the list that proposals are put into.

    Args:
        drafter: its proposals are noted, then replaced by right tokens and, behind those, wrong ones.
        wanted: the answer.
        num_prompt: tokens of the prompt.
        num_kept: drafts kept by each step, over and over.
        N: ids that may be drawn.
    """
    proposals: list[list[int]] = []
    propose = drafter.propose

    def propose_and_tamper(buffers: StepBuffers, context_len: torch.Tensor) -> None:
        propose(buffers, context_len)
        proposals.append(buffers.input_ids[1 : int(buffers.width)].tolist())
        at, kept = int(context_len) - num_prompt + 1, num_kept[len(proposals) % len(num_kept)]
        right = (wanted + [0] * MAX_WIDTH)[at : at + drafter.max_drafts]
        for t, token in enumerate(right):
            buffers.input_ids[1 + t] = (token + (t >= kept)) % N

    drafter.propose = propose_and_tamper  # type: ignore[method-assign]
    return proposals
