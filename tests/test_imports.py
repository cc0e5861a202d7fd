"""What loading the engine imports: every start waits for it, so nothing heavy is among it."""

import json
import subprocess
import sys

# Seconds each, and of no use to an answer: compilers, and a computer algebra system that some of PyTorch drags along.
HEAVY = ("sympy", "torch._dynamo", "torch._inductor", "transformers", "matplotlib", "scipy", "pandas")


def test_the_engine_imports_nothing_heavy():
    """`torch.nn.attention.bias` and `.flex_attention`, for two, bring sympy: their operators can be called without."""
    program = f"import json, sys, soloist.llm; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
