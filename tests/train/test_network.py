"""The network of a trainer against the one that drafts: a block sees what it sees at inference, no more, no less."""

from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.errors import UnsupportedError
from soloist.models.cache import StepKind
from soloist.models.causal_lm import HiddenCapture
from soloist.spec.dspark_checkpoint import load_dspark
from soloist.spec.dspark_config import random_config
from soloist.spec.setup import DrafterSetup
from soloist.train.batches import choose_texts, make_batch
from soloist.train.capture import read_states
from soloist.train.checkpoint import config_json, save_draft
from soloist.train.network import DraftNetwork
from soloist.train.settings import DraftShape
from tests.train.small import load_target, make_texts

A, B = 4, 5


def make_network(target: Any, markov: str | None = "vanilla", **overrides: Any) -> DraftNetwork:
    """A network whose every part moves the outcome."""
    shape = DraftShape(
        block_size=B,
        num_hidden_layers=2,
        markov_head_type=markov,
        markov_rank=6,
        target_layer_ids=(-1, 0, 2),
        intermediate_size=34,
    )
    network = DraftNetwork(shape.config_for(target.config), target.embed_tokens)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in network.parameters():
            spread = torch.randn(p.shape, generator=generator)
            p.copy_(spread * p.shape[-1] ** -0.5 if p.dim() == 2 else (p != 0) + 0.3 * spread)
    return network


def make_inputs(target: Any) -> tuple[Any, Any]:
    texts = make_texts(target, 7)
    batch = make_batch(texts, range(7), num_anchors=A, block_size=B, seed=0, step=0, device=torch.device("cpu"))
    return batch, read_states(target, batch.input_ids, batch.documents, (-1, 0, 1), torch.float32)


@pytest.mark.parametrize(
    ("family", "markov"),
    [("qwen3", "vanilla"), ("qwen3", "gated"), ("qwen3", "rnn"), ("qwen3", None), ("bailing_moe_v3", "vanilla")],
)
def test_a_pass_over_all_blocks_equals_inference(family: str, markov: str | None, tmp_path: Path):
    target = load_target(tmp_path / "target", family)
    network = make_network(target, markov)
    save_draft(tmp_path / "draft", network, lm_head=None, dtype=torch.float32)
    setup = DrafterSetup(target=target, draft_path=tmp_path / "draft", max_context_len=64, num_tokens=60)
    model = load_dspark(setup).model
    batch, states = make_inputs(target)
    with torch.no_grad():
        hidden, inputs, confidences = network(
            states.captured, batch.documents, batch.anchor_ids, batch.anchors, batch.previous_ids
        )
    hidden = hidden.view(7, A, B, -1)
    checked = 0
    with torch.inference_mode():
        for i, text in enumerate(make_texts(target, 7)):
            ids = torch.tensor(text.token_ids)
            capture = HiddenCapture(layers=(-1, 0, 1), hidden=torch.zeros(len(ids), 3, target.config.hidden_size))
            target.forward(ids, target.make_cache(len(ids)), StepKind.PREFILL, capture=capture)
            for j in range(A):
                anchor = int(batch.anchors[i, j])
                context, length = model.make_context(), torch.tensor(anchor, dtype=torch.int32)
                model.read_context(capture.hidden, context, torch.zeros((), dtype=torch.int32))
                block_ids = torch.full((B,), network.config.mask_token_id)
                block_ids[0] = ids[anchor]
                want = model.run_block(block_ids, context, length)
                # Slots that stand behind the last position of the context's table cannot be compared.
                assert (hidden[i, j] - want).norm() < 1e-5 * want.norm()
                checked += 1
                if model.markov is None:
                    continue
                state = model.markov.start
                for k in range(B):
                    embedded = model.markov.embed(batch.previous_ids[i, j, k : k + 1])
                    bias, state = model.markov.step(embedded, want[k : k + 1], state)
                    got = inputs.view(7, A, B, -1)[i, j, k] @ network.markov_head.markov_w2.weight.T
                    assert (got - bias[0]).norm() < 1e-5 * bias.norm()
                    c = model.confidence(want[k : k + 1], embedded)
                    assert abs(confidences.view(7, A, B)[i, j, k].sigmoid() - c[0]) < 1e-5
    assert checked == 7 * A


def test_a_block_sees_neither_its_anchor_nor_what_follows_nor_other_documents(tmp_path: Path):
    target = load_target(tmp_path)
    network = make_network(target)
    batch, states = make_inputs(target)

    def run(captured: torch.Tensor) -> torch.Tensor:
        args = (batch.documents, batch.anchor_ids, batch.anchors, batch.previous_ids)
        with torch.no_grad():
            return network(captured, *args)[0].view(7, A, B, -1)

    plain = run(states.captured)
    document = 5
    start, anchor = int(batch.documents.starts[document]), int(batch.anchors[document, -1])
    behind = states.captured.clone()
    behind[start + anchor :] = 1e3
    behind[:start] = -1e3
    assert torch.equal(run(behind)[document], plain[document])
    before = states.captured.clone()
    before[start + anchor - 1] += 1
    assert not torch.equal(run(before)[document, -1], plain[document, -1])


def test_a_checkpoint_has_deepspecs_names_and_may_repeat_the_targets_heads(tmp_path: Path):
    target = load_target(tmp_path / "target")
    network = make_network(target)
    save_draft(tmp_path / "draft", network, lm_head=target.lm_head, dtype=torch.float32)
    setup = DrafterSetup(target=target, draft_path=tmp_path / "draft", max_context_len=64, num_tokens=60)
    model = load_dspark(setup).model
    assert model.embed_tokens is target.embed_tokens
    assert model.config == network.config


def test_what_cannot_be_trained_is_refused(tmp_path: Path):
    target = load_target(tmp_path)
    config = random_config(target.config, block_size=4, num_hidden_layers=1, target_layer_ids=(0,))
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    for change in ({"layer_windows": (8,)}, {"layer_is_causal": (True,)}, {"slot0_predicts": False}):
        with pytest.raises(UnsupportedError, match="full attention"):
            DraftNetwork(type(config)(**(fields | change)), target.embed_tokens)
    with pytest.raises(UnsupportedError, match="below the last"):
        DraftShape(target_layer_ids=(3,)).config_for(target.config)


def test_a_draft_that_reads_the_last_layer_says_which_state_it_means(tmp_path: Path):
    target = load_target(tmp_path)
    network = DraftNetwork(DraftShape(target_layer_ids=(0, 2)).config_for(target.config), target.embed_tokens)
    assert config_json(network.config)["last_layer_is_raw"]
    save_draft(tmp_path / "draft", network, lm_head=None)
    setup = DrafterSetup(target=target, draft_path=tmp_path / "draft", max_context_len=40, num_tokens=60)
    assert load_dspark(setup).model.config == network.config
    below = DraftShape(target_layer_ids=(0, 1)).config_for(target.config)
    assert "last_layer_is_raw" not in config_json(below)


def test_every_text_has_its_turn_in_every_epoch_and_anchors_do_not_depend_on_the_batch(tmp_path: Path):
    chosen = [i for step in range(7) for i in choose_texts(10, 4, 0, step)]
    assert sorted(chosen[:10]) == sorted(chosen[10:20]) == list(range(10))
    assert chosen[:10] != chosen[10:20]
    target = load_target(tmp_path)
    texts = make_texts(target, 7)
    device = torch.device("cpu")
    whole = make_batch(texts, range(7), num_anchors=A, block_size=B, seed=1, step=3, device=device)
    alone = make_batch(texts[4:5], [4], num_anchors=A, block_size=B, seed=1, step=3, device=device)
    assert torch.equal(whole.anchors[4], alone.anchors[0])
    # The first place is the prompt's last token: an answer begins there.
    places = {
        int(make_batch(texts[4:5], [4], num_anchors=1, block_size=B, seed=1, step=s, device=device).anchors)
        for s in range(200)
    }
    assert places == set(range(texts[4].num_prompt - 1, len(texts[4].token_ids) - 1))


def test_labels_are_the_tokens_behind_and_slots_behind_the_end_do_not_count(tmp_path: Path):
    target = load_target(tmp_path)
    texts = make_texts(target, 7)
    batch = make_batch(texts, range(7), num_anchors=A, block_size=B, seed=1, step=0, device=torch.device("cpu"))
    for i, text in enumerate(texts):
        distinct = min(A, text.num_candidates)
        for j in range(A):
            anchor = int(batch.anchors[i, j])
            for k in range(B):
                counts = j < distinct and anchor + k + 1 < len(text.token_ids)
                assert bool(batch.is_counted[i, j, k]) == counts
                if counts:
                    assert batch.labels[i, j, k] == text.token_ids[anchor + k + 1]
                    assert batch.previous_ids[i, j, k] == text.token_ids[anchor + k]
                    row = int(batch.teacher_rows[i, j, k])
                    assert row == int(batch.documents.starts[i]) + anchor + k
