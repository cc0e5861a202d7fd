"""A tiny target learns a language, a draft learns the target: what it drafts is accepted, in the engine."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from soloist.engine import Engine
from soloist.models import find_model_class, load_model
from soloist.models.causal_lm import CausalLM
from soloist.models.loader import RandomSource, choose_placement
from soloist.runtime.runner import ModelRunner
from soloist.spec.dspark_checkpoint import load_dspark
from soloist.spec.setup import DrafterSetup
from soloist.train.documents import Documents
from soloist.train.evaluate import evaluate
from soloist.train.packed import final_norm_packed, forward_packed
from soloist.train.parameters import TrainableSource
from soloist.train.responses import OwnSource
from soloist.train.run import Progress, train_draft
from soloist.train.settings import DraftShape, ObjectiveSettings
from soloist.train.trainer import Figures
from tests.miniature import miniature_config
from tests.train.small import make_settings

VOCABULARY = 40


def write_text(count: int, generator: torch.Generator) -> torch.Tensor:
    """A language: most tokens follow from the one before."""
    free = torch.randint(VOCABULARY - 2, (count,), generator=generator)
    is_free = torch.rand(count, generator=generator) < 0.15
    is_free[0] = True
    ids: list[int] = []
    for token, is_own in zip(free.tolist(), is_free.tolist(), strict=True):
        ids.append(token if is_own else (7 * ids[-1] + 3) % (VOCABULARY - 2))
    return torch.tensor(ids)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """A small Ling model that has learned the language."""
    config = miniature_config(
        "bailing_moe_v3",
        vocab_size=VOCABULARY,
        num_hidden_layers=3,
        expert_swiglu_limit_list=None,
        share_expert_swiglu_limit_list=None,
        num_nextn_predict_layers=0,
    )
    model_class = find_model_class(config)
    source = TrainableSource(RandomSource(0, choose_placement(torch.device("cpu"), torch.float32, None)))
    model = model_class(model_class.config_class.from_dict(config), source)
    with torch.no_grad():
        parameters = source.parameters(model)
        model.embed_tokens.mul_(50)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.0)
    generator, documents = torch.Generator().manual_seed(0), Documents([40] * 8)
    for step in range(50):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 50)
        ids = torch.cat([write_text(40, generator) for _ in range(8)])
        hidden, _ = forward_packed(model, ids, documents)
        logits = F.linear(final_norm_packed(model, hidden), model.lm_head)
        loss = F.cross_entropy(logits.view(8, 40, -1)[:, :-1].flatten(0, 1), ids.view(8, 40)[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1.5
    folder = tmp_path_factory.mktemp("target")
    source.save(folder, torch.float32)
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder, dtype=torch.float32, weights_dtype="fp32")


def make_engine(target: CausalLM, draft: Path) -> Engine:
    setup = DrafterSetup(target=target, draft_path=draft, max_context_len=160, num_tokens=VOCABULARY - 1)
    drafter = load_dspark(setup)
    runner = ModelRunner(
        target,
        max_context_len=160,
        max_width=1 + drafter.max_drafts,
        num_tokens=VOCABULARY - 1,
        has_draft_probs=True,
        capture_layers=drafter.capture_layers,
    )
    return Engine(runner, drafter, eos_token_ids=())


def test_held_out_acceptance_rises_along_the_text_and_in_the_engine(target: CausalLM, tmp_path: Path):
    generator = torch.Generator().manual_seed(1)
    prompts = [write_text(8, generator).tolist() for _ in range(120)]
    source = OwnSource(model=target, max_new_tokens=48, num_tokens=VOCABULARY - 1, eos_token_ids=(), batch_size=120)
    steps: list[Figures] = []
    lengths = {}
    for num_steps in (1, 100):
        settings = make_settings(
            shape=DraftShape(block_size=4, num_hidden_layers=1, markov_rank=16, target_layer_ids=(0, 1)),
            objective=ObjectiveSettings(min_temperature=0.5),
            num_steps=num_steps,
            documents_per_step=6,
            anchors_per_document=8,
            learning_rate=4e-3,
            loss_rows=4096,
            held_out_share=0.2,
            log_every=50,
            checkpoint_every=200,
        )
        outcome = train_draft(
            target,
            prompts,
            source,
            settings,
            tmp_path / str(num_steps),
            temperatures=(0.0, 0.7, 1.0),
            num_tokens=VOCABULARY - 1,
            data="a language of the test",
            progress=Progress(on_step=lambda figures, num_steps, tok_per_s: steps.append(figures)),
        )
        lines = (tmp_path / str(num_steps) / "held-out.jsonl").read_text().splitlines()
        held_out = [json.loads(line)["ids"] for line in lines]
        engine = make_engine(target, tmp_path / str(num_steps))
        found = evaluate(engine, held_out[:8], model="t", draft="d", temperatures=(0.0, 1.0), max_tokens=60)
        lengths[num_steps] = (outcome.figures, *(t.acceptance_length for t in found.temperatures))
    (before, greedy_before, drawn_before), (after, greedy_after, drawn_after) = lengths[1], lengths[100]
    assert after.greedy_acceptance_length > before.greedy_acceptance_length + 0.5
    assert after.acceptance_length > before.acceptance_length
    assert greedy_after > greedy_before + 1
    assert drawn_after > drawn_before
    # What is predicted along the text is about what the engine finds.
    assert abs(steps[-1].acceptance_length - after.acceptance_length) < 0.5
