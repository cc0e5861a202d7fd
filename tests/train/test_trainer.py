"""The loop: goes on to the same bits, the same over processes, refuses what does not fit."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from soloist.errors import CheckpointError, NumericsError, UsageError
from soloist.models import load_model
from soloist.train.capture import MemoryStore, StateStore, bytes_per_token, fits_in_memory
from soloist.train.generate import Request, generate
from soloist.train.settings import DraftShape, ObjectiveSettings
from soloist.train.trainer import Trainer, learning_rate
from tests.miniature import write_checkpoint
from tests.train.small import load_target, make_settings, make_texts


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.parameters.items()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(optimizer: str, tmp_path: Path):
    target = load_target(tmp_path / "target")
    texts, settings = make_texts(target, 12), make_settings(optimizer=optimizer)
    whole = Trainer(target, texts, settings)
    first = parameters(whole)
    whole.run()
    Trainer(target, texts, settings, folder=tmp_path / "run").run(3)
    resumed = Trainer(target, texts, settings, folder=tmp_path / "run")
    assert resumed.step == 3
    resumed.run()
    for name, p in parameters(whole).items():
        assert torch.equal(parameters(resumed)[name], p), name
        assert not torch.equal(first[name], p), f"{name} was not trained"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert 1 <= lines[-1]["acceptance_length"] <= 6


def test_figures_go_to_tensorboard_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written = []

    class SummaryWriter:
        def __init__(self, folder: Path) -> None:
            assert folder == tmp_path / "run" / "tensorboard"

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, step))

        def flush(self) -> None:
            pass

    find_spec, import_module = importlib.util.find_spec, importlib.import_module
    module = SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "tensorboard" or find_spec(name))
    monkeypatch.setattr("importlib.import_module", lambda n: module if "tensorboard" in n else import_module(n))
    target = load_target(tmp_path / "target")
    trainer = Trainer(target, make_texts(target, 12), make_settings(num_steps=2), folder=tmp_path / "run")
    trainer.run()
    trainer.measure()
    assert ("step/loss", 2) in written and ("held out/greedy_acceptance_length", 2) in written


def test_a_loss_that_is_no_number_ends_the_run_and_leaves_the_last_checkpoint(tmp_path: Path):
    target = load_target(tmp_path / "target")
    texts, settings = make_texts(target, 12), make_settings(checkpoint_every=1)
    trainer = Trainer(target, texts, settings, folder=tmp_path / "run")
    trainer.run(2)
    trainer.parameters["norm.weight"].data.fill_(torch.inf)
    with pytest.raises(NumericsError, match="smaller learning rate"):
        trainer.run()
    assert Trainer(target, texts, settings, folder=tmp_path / "run").step == 2


def test_a_checkpoint_of_another_run_is_refused_by_what_differs(tmp_path: Path):
    target = load_target(tmp_path / "target")
    Trainer(target, make_texts(target, 12), make_settings(), folder=tmp_path / "run").run(1)
    with pytest.raises(CheckpointError, match="learning_rate"):
        Trainer(target, make_texts(target, 12), make_settings(learning_rate=1e-4), folder=tmp_path / "run")
    with pytest.raises(CheckpointError, match="other texts"):
        Trainer(target, make_texts(target, 12, seed=1), make_settings(), folder=tmp_path / "run")


def test_stored_states_train_as_computed_ones_do_and_are_kept(tmp_path: Path):
    target = load_target(tmp_path / "target")
    texts, settings = make_texts(target, 12), make_settings(num_steps=2)
    layers = settings.shape.config_for(target.config).target_layer_ids
    num_bytes = bytes_per_token(target, layers) * sum(len(text.token_ids) for text in texts)
    with pytest.raises(UsageError, match="budget"):
        StateStore(tmp_path / "states", texts, target, layers, num_bytes - 1)
    StateStore(tmp_path / "states", texts, target, layers, num_bytes)
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "states").glob("*.safetensors")}
    again = StateStore(tmp_path / "states", texts, target, layers, num_bytes)
    assert files == {file: file.stat().st_mtime_ns for file in (tmp_path / "states").glob("*.safetensors")}
    assert files
    computed, stored = Trainer(target, texts, settings), Trainer(target, texts, settings, store=again)
    computed.run()
    stored.run()
    # bf16 on disk.
    for name, p in parameters(computed).items():
        assert (parameters(stored)[name] - p).norm() < 0.1 * p.norm() + 1e-2, name
    with pytest.raises(CheckpointError, match="other texts"):
        StateStore(tmp_path / "states", texts[1:], target, layers, num_bytes)


def test_states_kept_in_memory_train_as_computed_ones_do(tmp_path: Path):
    target = load_target(tmp_path / "target", "bailing_moe_v3")
    texts, settings = make_texts(target, 12), make_settings(num_steps=2)
    layers = settings.shape.config_for(target.config).target_layer_ids
    assert fits_in_memory(target, texts, layers, torch.float32)
    kept = Trainer(target, texts, settings, store=MemoryStore(texts, target, layers, torch.float32))
    computed = Trainer(target, texts, settings)
    kept.run()
    computed.run()
    for name, p in parameters(computed).items():
        assert (parameters(kept)[name] - p).norm() < 1e-5 * p.norm() + 1e-6, name


def test_a_draft_begins_with_the_final_norm_of_its_target(tmp_path: Path):
    target = load_target(tmp_path / "target")
    target.norm.mul_(3.5)
    trainer = Trainer(target, make_texts(target, 12), make_settings())
    assert torch.equal(trainer.network.norm.weight.data, target.norm)
    trainer.run(1)
    assert not torch.equal(trainer.network.norm.weight.data, target.norm)


def test_steps_of_one_shape_train_as_packed_ones(tmp_path: Path):
    target = load_target(tmp_path / "target")
    texts, settings = make_texts(target, 12), make_settings(optimizer="muon")
    layers = settings.shape.config_for(target.config).target_layer_ids
    store = MemoryStore(texts, target, layers, torch.float32)
    packed = Trainer(target, texts, settings, store=store)
    packed.run(1)
    recorded = Trainer(target, texts, replace(settings, is_recorded=True), store=store)
    recorded.run(1)
    for name, p in parameters(packed).items():
        # Muon rounds to bf16.
        torch.testing.assert_close(parameters(recorded)[name], p, rtol=2e-2, atol=1e-4)
    packed.run()
    recorded.run()
    assert abs(packed.measure().loss - recorded.measure().loss) < 1e-2
    with pytest.raises(UsageError, match="kept in memory"):
        Trainer(target, texts, replace(settings, is_recorded=True))


def test_attention_is_kept_from_cudnn_while_its_shapes_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    attend, found = F.scaled_dot_product_attention, set()

    def listen(*args, **kwargs):
        found.add(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **kwargs)

    def heard() -> set[bool]:
        seen = set(found)
        found.clear()
        assert torch.backends.cuda.cudnn_sdp_enabled()
        return seen

    monkeypatch.setattr(F, "scaled_dot_product_attention", listen)
    target = load_target(tmp_path)
    texts, settings = make_texts(target, 12), make_settings(num_steps=2)
    requests = [Request(prompt_ids=text.token_ids, temperature=0.0) for text in texts]
    generate(target, requests, max_new_tokens=3, num_tokens=9, eos_token_ids=(), seed=0)
    assert heard() == {False}
    layers = settings.shape.config_for(target.config).target_layer_ids
    store = MemoryStore(texts, target, layers, torch.float32)
    assert heard() == {False}
    packed = Trainer(target, texts, settings, store=store)
    packed.run()
    assert heard() == {False}
    packed.measure()
    assert heard() == {False}
    # One shape for all steps is planned once.
    Trainer(target, texts, replace(settings, is_recorded=True), store=store).run()
    assert heard() == {True}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are a GPU's")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_recorded_steps_are_those_that_are_launched_one_by_one(is_compiled: bool, tmp_path: Path):
    write_checkpoint(tmp_path, "qwen3", seed=3)
    target = load_model(tmp_path, device=torch.device("cuda"), dtype=torch.float32, weights_dtype="fp32")
    # Eight steps: warm ones, then graphs of both stages.
    texts, settings = make_texts(target, 12), make_settings(optimizer="muon", is_compiled=is_compiled)
    layers = settings.shape.config_for(target.config).target_layer_ids
    store = MemoryStore(texts, target, layers, torch.float32)
    launched = Trainer(target, texts, settings, store=store)
    recorded = Trainer(target, texts, replace(settings, is_recorded=True), store=store)
    launched.run()
    recorded.run()
    assert len(recorded._recorded._graphs) == 2
    for name, p in parameters(launched).items():
        torch.testing.assert_close(parameters(recorded)[name], p, rtol=5e-2, atol=2e-3)
    assert abs(launched.measure().loss - recorded.measure().loss) < 2e-2


def test_muon_has_the_maps_of_hidden_states_and_no_table_of_the_vocabulary(tmp_path: Path):
    target = load_target(tmp_path / "target")
    trainer = Trainer(target, make_texts(target, 12), make_settings(optimizer="muon"))
    adamw, muon = ([p for group in o.param_groups for p in group["params"]] for o in trainer.optimizers)
    owned = {name for name, p in trainer.parameters.items() if any(p is other for other in muon)}
    assert len(adamw) + len(muon) == len(trainer.parameters)
    assert {"fc.weight", "layers.1.mlp.down_proj.weight", "layers.0.self_attn.q_proj.weight"} <= owned
    assert not any("markov" in name or "norm" in name or "confidence" in name for name in owned)


def test_the_rate_rises_in_a_line_and_falls_as_a_cosine():
    settings = make_settings(num_steps=100, warmup_share=0.1, learning_rate=1.0)
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] < 1e-3


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_settings(num_steps=0),
        lambda: make_settings(held_out_share=1.0),
        lambda: make_settings(compute_dtype="fp8"),
        lambda: DraftShape(block_size=16),
        lambda: ObjectiveSettings(l1_weight=-1),
        lambda: ObjectiveSettings(ce_weight=0, l1_weight=0, confidence_weight=0, length_weight=0),
        lambda: ObjectiveSettings(min_temperature=0.0),
    ],
)
def test_wishes_that_make_no_sense_are_refused(make):
    with pytest.raises(UsageError, match=r"allowed|bf16"):
        make()


RANK = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from safetensors.torch import save_file
from soloist.models import load_model
from soloist.train.trainer import Trainer
from tests.miniature import write_checkpoint
from tests.train.small import make_settings, make_texts
torch.set_num_threads(1)
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
target = load_model(folder / "target", dtype=torch.float32, weights_dtype="fp32")
trainer = Trainer(target, make_texts(target, 12), make_settings(num_steps=4, checkpoint_every=4), folder=folder / "run")
trainer.run()
if rank == 0:
    save_file({n: p.detach().contiguous() for n, p in trainer.parameters.items()}, folder / "trained.safetensors")
dist.destroy_process_group()
"""


def test_two_processes_train_what_one_does(tmp_path: Path):
    from safetensors.torch import load_file

    target = load_target(tmp_path / "target")
    alone = Trainer(target, make_texts(target, 12), make_settings(num_steps=4, checkpoint_every=4))
    alone.run()
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": f"{root}:{root / 'src'}", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path)], env=env) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    trained = load_file(tmp_path / "trained.safetensors")
    for name, p in parameters(alone).items():
        assert (trained[name] - p).norm() < 1e-4 * p.norm() + 1e-7, name
    with pytest.raises(UsageError, match="at least"):
        make_settings(documents_per_step=0)
