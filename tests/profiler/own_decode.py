"""Decode with a miniature for some seconds: a program to be profiled. With "item" every step reads from the GPU."""

import sys
import tempfile
import time
from pathlib import Path

import torch

from soloist.engine import Engine
from soloist.models import load_model
from soloist.runtime.runner import ModelRunner
from soloist.sampling_params import SamplingParams
from tests.miniature import write_checkpoint
from tests.runtime.gpu_models import GPU_SIZES

# A request must outlast the recording.
CONTEXT_LEN = 1 << 19


def main(seconds: float, is_planted: bool) -> None:
    """Decode for `seconds`, of which the first ones go to loading and compiling."""
    until_s = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        sizes = GPU_SIZES["llama"] | {"max_position_embeddings": CONTEXT_LEN}
        path = write_checkpoint(Path(folder) / "llama", "llama", seed=3, **sizes)
        model = load_model(path, dtype=torch.bfloat16, device="cuda")
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
