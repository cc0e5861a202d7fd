"""The recipe of soloist-nano: its corpus, its packs, its forward pass against the training forms, its measurements."""

import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from soloist.models import load_model
from soloist.train import operators as op
from soloist.train.batches import Text
from soloist.train.packed import forward_packed, forward_packed_mtp

RECIPE = Path(__file__).parents[2] / "recipes" / "nano"
sys.path.insert(0, str(RECIPE))
import data  # noqa: E402
import evaluate  # noqa: E402
import forward as forward_module  # noqa: E402
import package  # noqa: E402
import polish  # noqa: E402
import prepare_data  # noqa: E402
import train_drafts  # noqa: E402
import train_tokenizer  # noqa: E402

import train  # noqa: E402

END = 37


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """The recipe's config with every size cut down."""
    config = json.loads((RECIPE / "config.json").read_text())
    config |= {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 4, "layer_group_size": 2, "head_dim": 12}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 20, "kv_lora_rank": 10}
    config |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "qk_head_dim": 10, "rotary_dim": 4, "v_head_dim": 8}
    config |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 7, "eos_token_id": END}
    config |= {"moe_shared_expert_intermediate_size": 9, "pad_token_id": END}
    # Low enough to bind.
    config |= {"expert_swiglu_limit_list": [0, 0, 0.02, 0.02], "share_expert_swiglu_limit_list": [0, 0, 0.03, 0.03]}
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_the_forward_pass_of_fixed_shapes_equals_the_training_form(config):
    _, forward, parameters = train.make_model(config, torch.device("cpu"), has_kernel=False)
    for tensor in parameters.values():
        torch.nn.init.normal_(tensor, 0.0, 0.3)
    for block in [*forward.model.feed_forwards[1:], forward.mtp.feed_forward]:
        block.expert_bias.normal_(0.0, 0.2)
    lengths = np.array([70, 1, 17])
    batch = data.make_batch(np.arange(lengths.sum()) * 7 % END, lengths, torch.device("cpu"))
    hidden, counts = forward.hidden(batch.pack, torch.float32)
    mtp_hidden, _ = forward.mtp_hidden(hidden, batch.next_ids, batch.pack)
    chosen: dict[int, torch.Tensor] = {}
    documents = forward_module.rows_of(batch.pack)
    expected, _ = forward_packed(
        forward.model,
        batch.pack.input_ids,
        documents,
        on_route=lambda layer, _, experts: chosen.update({layer: experts}),
    )
    expected = op.rms_norm(expected, forward.model.norm, 1e-6)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        mtp_hidden, forward_packed_mtp(forward.mtp, expected, batch.next_ids, documents), rtol=1e-4, atol=1e-4
    )
    assert [count.tolist() for count in counts] == [
        experts.flatten().bincount(minlength=8).tolist() for experts in chosen.values()
    ]


def test_a_position_is_taught_what_its_own_document_says_next():
    ids = np.array([5, 6, END, 7, END, 8, 9, 10])
    batch = data.make_batch(ids, np.array([3, 2, 3]), torch.device("cpu"))
    assert batch.pack.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch.pack.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert batch.labels.tolist() == [6, END, -100, END, -100, 9, 10, -100]
    assert batch.mtp_labels.tolist() == [END, -100, -100, -100, -100, 10, -100, -100]
    assert batch.next_ids.tolist()[:-1] == ids[1:].tolist()


def test_packs_hold_every_token_once_an_epoch_and_no_document_is_too_long(monkeypatch):
    monkeypatch.setattr(data, "MAX_LEN", 9)
    documents = [[i % 30] * (3 * i % 23) + [END] for i in range(1, 40)]
    tokens = np.concatenate(documents).astype(np.uint16)
    tokens = tokens[: len(tokens) // 16 * 16]
    tokens[-1] = END
    in_order = list(data.packs(tokens, END, 16, seed=None))
    assert np.concatenate([ids for ids, _ in in_order]).tolist() == tokens.tolist()
    assert all(lengths.sum() == len(ids) == 16 and lengths.max() <= 9 for ids, lengths in in_order)
    drawn = data.packs(tokens, END, 16, seed=1)
    epochs = [np.concatenate([next(drawn)[0] for _ in in_order]) for _ in range(2)]
    assert (epochs[0] != epochs[1]).any()
    assert all(np.sort(epoch).tolist() == np.sort(tokens).tolist() for epoch in epochs)


def test_a_few_steps_lower_the_loss_and_the_checkpoint_is_read_back(config, tmp_path):
    generator = np.random.default_rng(0)
    for name in ("train", "held_out"):
        rows = [[*([a, b, c] * 6), END] for a, b, c in generator.integers(0, END, (40, 3))]
        np.save(tmp_path / f"{name}.npy", np.concatenate(rows).astype(np.uint16))
    (tmp_path / "tokenizer.json").write_text("{}")
    settings = train.Settings(
        seconds=1.0,
        num_tokens=128,
        lr=0.01,
        num_continuations=5,
        continuation_len=12,
        run_len=2,
        mtp_weight=0.3,
        polish_weight=30.0,
        distinct_goal=1.1,
    )
    trainer = train.Trainer(settings, tmp_path, tmp_path, torch.device("cpu"), config)
    losses = [float(trainer.step(0.3)["loss"]) for _ in range(20)]
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) - 0.5
    continued, share = trainer.continue_prompts()
    assert 0 < share < 1 and sum(int(is_repeat.sum()) for _, is_repeat in continued) > 0
    trainer.settings = dataclasses.replace(settings, distinct_goal=0.0)
    assert set(trainer.continue_prompts()[0]) == {None}
    loops = max(continued, key=lambda pack: int(pack[1].sum()))
    before = float(trainer.unlikelihood(*loops))
    for _ in range(8):
        figures = trainer.step(0.3, loops)
    assert 0 <= float(figures["unlikelihood"]) < before
    trainer.save("target", 0.4)
    resumed = train.Trainer(settings, tmp_path, tmp_path, torch.device("cpu"), config)
    assert resumed.resume(tmp_path / "target") == 0.4 and resumed.num_steps == trainer.num_steps
    for name, tensor in trainer.parameters.items():
        torch.testing.assert_close(resumed.parameters[name], tensor, rtol=0.01, atol=1e-6)
    torch.testing.assert_close(resumed.expert_biases, trainer.expert_biases, rtol=0, atol=0)
    model = load_model(tmp_path / "target", dtype=torch.float32, weights_dtype="fp32")
    ours = trainer.forward.model.feed_forwards[1].gate_up
    torch.testing.assert_close(model.feed_forwards[1].gate_up, ours.detach().bfloat16().float(), rtol=0, atol=0)


def test_answers_are_packed_and_what_closes_a_repeated_run_is_marked():
    rows = [(3, 1, 2, 1, 2, 1, 2, 3), (9, 9, 4, 4, 4, 4), (7, 5, 6, 5)]
    texts = [Text(token_ids=row, num_prompt=n, temperature=0.0) for row, n in zip(rows, (1, 2, 2), strict=True)]
    one, two = polish.pack_answers(texts, 16, 2, END, torch.device("cpu"))
    assert one[0].pack.cu_seqlens.tolist() == [0, 8, 14, 16] and two[0].pack.cu_seqlens.tolist() == [0, 4, 16]
    # Position t is told what token t + 1 is.
    assert one[0].labels.tolist() == [1, 2, 1, 2, 1, 2, 3, -100, -100, 4, 4, 4, 4, -100, -100, -100]
    assert one[1].nonzero()[:, 0].tolist() == [3, 4, 5, 11, 12]
    assert two[0].labels[1:4].tolist() == [6, 5, -100] and not two[1].any()


def test_prompts_come_from_beginnings_and_from_anywhere_and_are_of_about_one_length():
    beginnings = [[i] * (5 + i % 40) for i in range(400)]
    prompts = polish.Prompts(np.arange(5000), beginnings, seed=0)
    drawn = [prompts.draw(20) for _ in range(8)]
    for own in drawn[::2]:
        assert all(prompt in beginnings for prompt in own) and max(map(len, own)) - min(map(len, own)) <= 3
    for own in drawn[1::2]:
        assert len({len(prompt) for prompt in own}) == 1 and all(
            np.diff(prompt).tolist() == [1] * (len(prompt) - 1) for prompt in own
        )
    assert len({len(own) for own in drawn}) == 1


def test_documents_are_cleaned_shortened_and_refused():
    body = "".join(f"def name_{i}(value):\n    return value + {i}\n\n\n" for i in range(12))
    doc = 'def f():\n    """First line.\n\n    More.\n    More.\n    More.\n    More.\n    """\n    return 1\n'
    text = prepare_data.clean(f"#!/usr/bin/python\n# Copyright someone\n\n{body}{doc}".encode())
    assert text is not None and text.startswith("def name_0") and '"""First line."""\n    return 1' in text
    assert "More" not in text
    for wrong in (body + "def f(:\n", body + "\tx = 1\n", "# Generated by a tool\n" + body, "x = 1\n"):
        assert prepare_data.clean(wrong.encode()) is None


def test_near_duplicates_of_what_was_seen_are_left_out():
    def document(seed: int, changed: int, is_held_out: bool = False) -> prepare_data.Document:
        lines = [f"value_{seed}_{i} = compute({i}, {seed})" for i in range(200)]
        lines[:changed] = [f"other_{seed}_{i} = {i}" for i in range(changed)]
        return prepare_data.Document(source="s", path="p", text="\n".join(lines), is_held_out=is_held_out)

    seen = prepare_data.Deduplicator()
    assert seen.is_new(document(1, 0, is_held_out=True))
    assert seen.is_new(document(2, 0))
    assert not seen.is_new(document(2, 40))
    assert not seen.is_new(document(1, 150))
    assert seen.is_new(document(2, 170))


def test_licences_are_taken_only_if_they_are_clearly_permissive():
    def licence(*lines: str) -> str | None:
        return prepare_data.licence_of("\n".join(["Metadata-Version: 2.1", "Name: x", *lines, "", "text"]))

    assert licence("License-Expression: Apache-2.0 OR BSD-3-Clause") == "Apache-2.0 OR BSD-3-Clause"
    assert licence("License: MIT") == "MIT"
    assert licence("Classifier: License :: OSI Approved :: BSD License") == "BSD License"
    assert licence("License-Expression: Apache-2.0 OR GPL-2.0-or-later") is None
    assert licence("Classifier: License :: OSI Approved :: GNU Lesser General Public License v3 (LGPLv3)") is None
    assert licence("License: Custom") is None


def test_the_vocabulary_reads_back_what_it_wrote(monkeypatch):
    monkeypatch.setattr(train_tokenizer, "VOCAB_SIZE", 500)
    source = Path(prepare_data.__file__).read_text()
    tokenizer = train_tokenizer.train([source])
    assert [tokenizer.token_to_id(t) for t in (train_tokenizer.END, train_tokenizer.MASK)] == [498, 499]
    ids = train_tokenizer.encode(tokenizer, iter([source, "def "])).tolist()
    assert ids[-1] == 498
    first = ids[: ids.index(498)]
    assert tokenizer.decode(first) == source
    # A space is the end of a word.
    assert tokenizer.decode(ids[-2:-1]) == "def "


@pytest.mark.parametrize(
    ("completion", "is_ended", "is_valid"),
    [
        ("    return 1\n    x = (", False, True),
        ("    try:\n        x = 1\n    y", False, False),
        ("    x = 1\n    try:\n        y = 1\n    z", False, True),
        ("    a b\n    c", False, False),
        ("    x = 1", True, True),
        ("    x = 1", False, False),
        ("    x = 'a\n    y", False, False),
        ("", True, False),
    ],
)
def test_a_completion_parses_up_to_its_last_complete_statement(completion, is_ended, is_valid):
    assert evaluate.parses("def f(a):\n", completion, is_ended) is is_valid


def test_the_n_gram_model_is_a_law_and_learns():
    train_tokens = np.array([1, 2, 3, 0] * 50, dtype=np.uint16)
    prefix = [1, 2, 3, 0, 1, 2, 3]
    nats = [evaluate.ngram_nats(train_tokens, np.array([*prefix, last]), 4) for last in range(4)]
    before = evaluate.ngram_nats(train_tokens, np.array(prefix), 4)
    assert sum(np.exp(before - n) for n in nats) == pytest.approx(1.0)
    assert np.exp(before - nats[0]) > 0.9


def test_drafts_train_for_the_time_they_are_given_and_the_schedule_ends_with_it(monkeypatch, tmp_path):
    class FakeTrainer:
        settings, step, network = train_drafts.TrainSettings(), 0, None

        def run(self, num_steps: int, on_step: object = None) -> None:
            assert num_steps <= self.settings.num_steps
            time.sleep(0.0005 * (num_steps - self.step))
            self.step = num_steps

        def measure(self) -> None:
            pass

    saved = []
    monkeypatch.setattr(train_drafts, "save_draft", lambda *_, **__: saved.append(trainer.step))
    monkeypatch.setattr(train_drafts, "SAVE_EVERY_S", 0.1)
    trainer, start = FakeTrainer(), time.perf_counter()
    train_drafts.train_for(trainer, 0.6, tmp_path)
    assert 0.5 < time.perf_counter() - start < 3
    assert trainer.step == trainer.settings.num_steps > 100 and saved[-1] > 50


def test_figures_name_no_place_of_the_machine_they_come_from(tmp_path):
    command = "soloist bench -m {0}train/target --draft {0}drafts/dspark8 --workload looping"
    found = {"case": "target-looping", "model": "target", "commit": "0123456+"}
    found["command"] = command.format("/tmp/x/run/")
    file = tmp_path / "looping-dspark8.json"
    file.write_text(json.dumps(found | {"rungs": [{"case": "--draft /tmp/x/run/drafts/dspark8"}]}))
    figures = package.read_figures(file, "target", "abcdef0")
    assert figures == {
        "case": "soloist-nano-looping",
        "model": "soloist-nano",
        "commit": "abcdef0",
        "command": command.format("run/"),
        "rungs": [{"case": "--draft run/drafts/dspark8"}],
    }
    file.write_text('{"model": "target", "draft": "dspark8", "drafter": "dspark dspark8"}')
    names = {"model": "soloist-nano", "draft": "nano-dspark8", "drafter": "dspark nano-dspark8"}
    assert package.read_figures(file, "target", "abcdef0") == names
    file.write_text("")
    assert package.read_figures(file, "target", "abcdef0") is None
