"""Miniatures at sizes that a GPU's kernels take, and engines that run them step by step or captured."""

import pytest
import torch

from soloist.engine import Engine
from soloist.models.causal_lm import CausalLM
from soloist.runtime.graph import Execution
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
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


def state_of(engine: Engine) -> list[torch.Tensor]:
    """What the cache holds of the sequence."""
    snapshot = engine.runner.cache.snapshot()
    return [torch.tensor(snapshot.context_len), *snapshot.tensors.values()]
