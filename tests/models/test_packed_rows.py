"""Packed weights on a CPU: a row of a pass has the same bits whatever rows are beside it, so drafts change no text."""

import pytest
import torch

from soloist.kernels import step_cpu
from soloist.models import load_model
from soloist.models.cache import StepKind
from soloist.models.loader import WeightsDtype

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 176,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}


@pytest.mark.skipif(step_cpu.load() is None, reason="no machine code for this processor")
@pytest.mark.parametrize("weights_dtype", ["int4", "int8"])
def test_a_row_has_the_same_bits_in_every_step(weights_dtype: WeightsDtype) -> None:
    model = load_model(CONFIG, weights="random", weights_dtype=weights_dtype)
    assert set(model.report.bytes_by_format) == {weights_dtype, "bf16"}
    ids = torch.randint(176, (90,))

    def logits_of(widths: list[int]) -> torch.Tensor:
        cache, rows = model.make_cache(100), []
        for width in widths:
            start = int(cache.context_len)
            hidden = model.forward(ids[start : start + width], cache, StepKind.VERIFY)
            rows.append(model.compute_logits(hidden))
            cache.commit(width, StepKind.VERIFY)
        return torch.cat(rows)

    expected = logits_of([1] * 90)
    assert expected.std(0).mean() > 1e-3
    assert torch.equal(logits_of([16, 3, 1, 8, 9, 4, 16, 16, 2, 15]), expected)
