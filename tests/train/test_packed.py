"""Whole models over packed documents: each document as if it were alone, and their tensors as parameters."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from soloist.errors import UnsupportedError
from soloist.models import find_model_class, load_model
from soloist.models.bailing_moe_v3 import BailingMoeV3ForCausalLM, BailingMoeV3MTP
from soloist.models.cache import StepKind
from soloist.models.causal_lm import CausalLM, HiddenCapture
from soloist.models.loader import RandomSource, choose_placement
from soloist.train.documents import Documents
from soloist.train.packed import final_norm_packed, forward_packed, forward_packed_mtp
from soloist.train.parameters import TrainableSource
from tests.miniature import miniature_config, write_checkpoint

FAMILIES = ("llama", "qwen2", "qwen3", "bailing_moe_v3", "kimi_linear")
LENGTHS = (7, 67, 1, 21)


def load(folder: Path, family: str, **overrides: object) -> CausalLM:
    return load_model(write_checkpoint(folder, family, seed=3, **overrides), dtype=torch.float32, weights_dtype="fp32")


def random_ids(model: CausalLM, count: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(5))


def read_alone(model: CausalLM, ids: torch.Tensor, layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill a document: residual stream (T, D), and captured (T, layers, D)."""
    hidden = torch.zeros(len(ids), len(layers), model.config.hidden_size)
    capture = HiddenCapture(layers=layers, hidden=hidden)
    return model.forward(ids, model.make_cache(len(ids)), StepKind.PREFILL, capture=capture), hidden


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_document_reads_as_if_it_were_alone(family: str, tmp_path: Path):
    model = load(tmp_path, family)
    ids, layers = random_ids(model, sum(LENGTHS)), (-1, 0, 1)
    with torch.inference_mode():
        hidden, captured = forward_packed(model, ids, Documents(LENGTHS), capture_layers=layers)
        alone = [read_alone(model, piece, layers) for piece in ids.split(LENGTHS)]
        logits = F.linear(final_norm_packed(model, hidden), model.lm_head)
        wanted = torch.cat([model.compute_logits(x) for x, _ in alone])
    assert relative(hidden, torch.cat([x for x, _ in alone])) < 1e-5
    assert relative(torch.stack(captured, dim=1), torch.cat([kept for _, kept in alone])) < 1e-5
    assert relative(logits, wanted) < 1e-5


def test_the_packed_mtp_layer_reads_as_if_it_were_alone(tmp_path: Path):
    model = load(tmp_path, "bailing_moe_v3")
    assert isinstance(model, BailingMoeV3ForCausalLM)
    source = RandomSource(1, choose_placement(model.device, model.dtype, None))
    mtp = BailingMoeV3MTP(model, source)
    ids, hidden = random_ids(model, sum(LENGTHS)), torch.randn(sum(LENGTHS), model.config.hidden_size)
    got = forward_packed_mtp(mtp, hidden, ids, Documents(LENGTHS))
    pieces = zip(hidden.split(LENGTHS), ids.split(LENGTHS), strict=True)
    want = torch.cat([mtp.forward(h, i, mtp.make_cache(len(i))) for h, i in pieces])
    assert relative(got, want) < 1e-5


def test_packed_weights_are_refused(tmp_path: Path):
    write_checkpoint(tmp_path, "llama", seed=3)
    model = load_model(tmp_path, dtype=torch.bfloat16, weights_dtype="fp16")
    with pytest.raises(UnsupportedError, match="weights_dtype"):
        forward_packed(model, random_ids(model, 5), Documents((5,)))


def test_a_model_is_trained_in_place_and_saved_in_its_public_names(tmp_path: Path):
    config = miniature_config("bailing_moe_v3")
    model_class = find_model_class(config)
    source = TrainableSource(RandomSource(0, choose_placement(torch.device("cpu"), torch.float32, None)))
    model = model_class(model_class.config_class.from_dict(config), source)
    mtp = BailingMoeV3MTP(model, source)
    parameters = source.parameters(model, mtp)
    assert not any(name.endswith("expert_bias") for name in parameters)
    optimizer = torch.optim.AdamW(parameters.values(), lr=3e-3)
    ids, documents = random_ids(model, sum(LENGTHS)), Documents(LENGTHS)
    targets = ids.roll(-1)
    losses = []
    for _ in range(12):
        hidden, _ = forward_packed(model, ids, documents)
        normed = final_norm_packed(model, hidden)
        drafted = forward_packed_mtp(mtp, normed, targets, documents)
        loss = F.cross_entropy(F.linear(normed, model.lm_head), targets)
        loss = loss + F.cross_entropy(F.linear(drafted, model.lm_head), targets.roll(-1))
        optimizer.zero_grad()
        loss.backward()
        missing = [name for name, p in parameters.items() if p.grad is None]
        assert missing == []
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]

    source.save(tmp_path, torch.float32, shard_bytes=100_000)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_model(tmp_path, dtype=torch.float32, weights_dtype="fp32")
    with torch.inference_mode():
        hidden, _ = forward_packed(model, ids, documents)
        want = F.linear(final_norm_packed(model, hidden), model.lm_head)
        pieces = ids.split(LENGTHS)
        got = torch.cat([loaded.compute_logits(read_alone(loaded, piece, (0,))[0]) for piece in pieces])
    assert relative(got, want) < 1e-5
