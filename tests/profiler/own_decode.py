"""Decode with random weights for some seconds: a program to be profiled. With "item" every step reads from the GPU."""

import sys
import time

import torch

from soloist.engine import Engine
from soloist.models import load_model
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from tests.miniature import miniature_config

# A request must outlast the recording, and two seconds of steps must not fill a disk: some 6 GB are read in each.
CONTEXT_LEN = 1 << 16
SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 28672,
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": CONTEXT_LEN,
}


def main(seconds: float, is_planted: bool) -> None:
    """Decode for `seconds`, of which the first ones go to loading and compiling."""
    until_s = time.monotonic() + seconds
    model = load_model(miniature_config("llama", **SIZES), dtype=torch.bfloat16, device="cuda", weights="random")
    engine = Engine(ModelRunner(model, max_context_len=CONTEXT_LEN), eos_token_ids=())
    num_tokens = 0
    for result in engine.generate([1, 2, 3], SamplingParams()):
        num_tokens += len(result.token_ids)
        if is_planted:
            engine.runner.buffers.num_left.item()  # fault
        if time.monotonic() > until_s:
            break
    print(f"{num_tokens} tokens", file=sys.stderr)


main(float(sys.argv[1]), sys.argv[2:] == ["item"])
