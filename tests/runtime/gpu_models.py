"""Miniatures at sizes that a GPU's kernels take, drafters for them, and engines that run them in either form."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from soloist.engine import Engine
from soloist.kernels.launch import delayed_producers
from soloist.models.causal_lm import CausalLM
from soloist.runtime.buffers import SamplingPlan
from soloist.runtime.device_loop import DeviceLoop
from soloist.runtime.graph import Execution, StepGraph
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from soloist.spec.draft_model import DraftModel
from soloist.spec.drafter import Drafter
from soloist.spec.dspark import make_random_dspark
from soloist.spec.dspark_config import random_config
from soloist.spec.mtp import load_mtp
from soloist.spec.ngram import PromptLookup
from soloist.spec.setup import DrafterSetup
from tests.scripted import RandomDrafter

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are a GPU's")

EAGER = Execution(is_captured=False, run_ahead=0, has_pdl=False)
CAPTURED = Execution(is_captured=True, run_ahead=0, has_pdl=False)
BEST = Execution(is_captured=True, run_ahead=2, has_pdl=True)
LOOPED = Execution(is_captured=True, run_ahead=0, has_pdl=True, has_device_loop=True)

# Sizes that a GPU's kernels take: heads of powers of two, experts in 32s.
GPU_SIZES: dict[str, dict] = {
    "llama": {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 264},
    "qwen2": {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 200},
    "qwen3": {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 3},
    "bailing_moe_v3": {
        "hidden_size": 96,
        "head_dim": 32,
        "intermediate_size": 160,
        "kv_lora_rank": 64,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64,
        "num_experts": 64,
        "qk_head_dim": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "rotary_dim": 16,
        "v_head_dim": 64,
    },
    "kimi_linear": {
        "hidden_size": 128,
        "intermediate_size": 144,
        "kv_lora_rank": 64,
        "linear_attn_config": {
            "full_attn_layers": [3, 5],
            "head_dim": 16,
            "kda_layers": [1, 2, 4],
            "num_heads": 5,
            "short_conv_kernel_size": 4,
        },
        "moe_intermediate_size": 64,
        "num_experts": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
    },
}
# Past them lies the longest prompt's step, a prompt's chunk and its rest.
PROMPT_TOKENS = 37


def make_engine(model: CausalLM, execution: Execution, max_drafts: int = 0, *, has_draft_law: bool = False) -> Engine:
    drafter = None
    if max_drafts:
        N = model.config.vocab_size
        drafter = RandomDrafter(max_drafts=max_drafts, vocab_size=N, has_draft_law=has_draft_law, sharpness=0.1)
        drafter.laws = drafter.laws.to(model.device)
    runner = ModelRunner(
        model, max_context_len=200, max_width=1 + max_drafts, chunk_tokens=24, has_draft_probs=has_draft_law
    )
    return Engine(runner, drafter, eos_token_ids=(), execution=execution)


def make_drafter(name: str, target: CausalLM, path: Path) -> Drafter:
    """Make a drafter of 4 drafts for a miniature: ngram, mtp, dspark, or its twin, most of whose drafts are kept.

    Args:
        name: of the drafter.
        target: the miniature.
        path: its checkpoint.
    """
    N, depth = target.config.vocab_size, target.config.num_hidden_layers
    setup = DrafterSetup(target=target, target_path=path, max_context_len=200, num_tokens=N, max_width=5)
    if name == "ngram":
        return PromptLookup(max_context_len=200, max_drafts=4, device=target.device)
    if name == "mtp":
        return load_mtp(setup)
    if name == "twin":
        return DraftModel(target, max_context_len=200, num_tokens=N, max_drafts=4)
    assert name == "dspark", name
    layers = (0, depth - 2)
    config = random_config(target.config, block_size=6, num_hidden_layers=2, markov_rank=16, target_layer_ids=layers)
    return make_random_dspark(setup, config)


def make_drafting_engine(model: CausalLM, drafter: Drafter | None, execution: Execution) -> Engine:
    """Make an engine with room for 200 tokens that reads prompts in chunks of 24."""
    runner = ModelRunner(
        model,
        max_context_len=200,
        max_width=1 + (drafter.max_drafts if drafter else 0),
        has_draft_probs=bool(drafter and drafter.has_draft_law),
        capture_layers=drafter.capture_layers if drafter else (),
        chunk_tokens=24,
    )
    return Engine(runner, drafter, eos_token_ids=(), execution=execution)


def prompt_of(model: CausalLM, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (PROMPT_TOKENS,), generator=generator).tolist()


PARAMS = {
    # The seed is the drafter's: which rows are drafts must not differ from run to run.
    "greedy": SamplingParams(max_tokens=40, logprobs=3, seed=5),
    "sampled": SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, min_p=0.01, seed=5, repetition_penalty=1.1),
    "everything": SamplingParams(
        max_tokens=40,
        temperature=0.9,
        top_k=50,
        top_p=0.95,
        min_p=0.001,
        repetition_penalty=1.05,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        # The end token has its rule and its ban, and never comes.
        logit_bias={3: -100.0, 7: 2.0},
        min_tokens=8,
        stop_token_ids=(3,),
        logprobs=5,
        seed=5,
    ),
}


def prepare_delayed(engine: Engine, params: SamplingParams, phase: int) -> None:
    """Capture the steps of a request with every second kernel delayed, from the one of number `phase` on."""
    capture = Engine.capture

    def load_and_capture(engine: Engine, step: Callable[[], None]) -> StepGraph | DeviceLoop:
        # A kernel that is not delayed in the run before the capture may be in it, where nothing can be loaded.
        for other in (0, 1):
            with delayed_producers(other):
                step()
        return capture(engine, step)

    with pytest.MonkeyPatch.context() as patch, delayed_producers(phase):
        patch.setattr(Engine, "capture", load_and_capture)
        engine.prepare(SamplingPlan.of(params))


def state_of(engine: Engine) -> list[torch.Tensor]:
    """What the cache holds of the sequence."""
    snapshot = engine.runner.cache.snapshot()
    return [torch.tensor(snapshot.context_len), *snapshot.tensors.values()]
