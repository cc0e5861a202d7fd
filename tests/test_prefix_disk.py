"""States in files: a later process goes on where an earlier one ended, within a budget, and nothing damaged is used."""

import threading
import time
from pathlib import Path

import pytest
import torch

from soloist import prefix_disk
from soloist.engine import Engine
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.prefix import PrefixStore
from soloist.prefix_disk import DiskPrefixes, model_fingerprint
from tests.miniature import write_checkpoint
from tests.scripted import RandomDrafter, make_engine
from tests.test_prefix import FAMILIES, N, ask, ids_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CausalLM]:
    folder = tmp_path_factory.mktemp("models")
    paths = {family: write_checkpoint(folder / family, family, seed=3, vocab_size=N) for family in FAMILIES}
    return {family: load_model(path, dtype=torch.float32) for family, path in paths.items()}


def start(
    model: CausalLM, folder: Path, *, max_bytes: int = 1 << 26, fingerprint: str = "a" * 64, drafter=None
) -> Engine:
    engine = make_engine(model, drafter, chunk_tokens=16)
    engine.prefixes = PrefixStore(host_bytes=1 << 26, disk=DiskPrefixes(folder, fingerprint, max_bytes))
    return engine


def stop(engine: Engine) -> None:
    assert engine.prefixes is not None and engine.prefixes.disk is not None
    engine.prefixes.disk.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_process_goes_on_with_the_same_answer(models, tmp_path: Path, family: str):
    prompt = ids_of(150, 1)
    first, cold = start(models[family], tmp_path), make_engine(models[family], chunk_tokens=16)
    answer, _ = ask(first, prompt)
    stop(first)
    second = start(models[family], tmp_path)
    prompt = [*prompt, *answer, *ids_of(9, 2)]
    again, generation = ask(second, prompt)
    assert again == ask(cold, prompt)[0]
    assert generation.stats.cached_tokens == len(prompt) - 10
    stop(second)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_system_prompt_is_found_again_behind_another_question(models, tmp_path: Path, family: str):
    head = ids_of(200, 1)
    first, cold = start(models[family], tmp_path), make_engine(models[family], chunk_tokens=16)
    ask(first, [*head, *ids_of(30, 2)], turn_ends=(200,))
    stop(first)
    second = start(models[family], tmp_path)
    prompt = [*head, *ids_of(30, 3)]
    answer, generation = ask(second, prompt, turn_ends=(200,))
    assert answer == ask(cold, prompt)[0] and generation.stats.cached_tokens == 200
    stop(second)


def test_a_shorter_recurrent_state_has_a_file_of_its_own(models, tmp_path: Path):
    engine = start(models["kimi_linear"], tmp_path)
    prompt = ids_of(300, 1)
    ask(engine, prompt)
    # An edit returns to a place that no file is of.
    ask(engine, [*prompt[:150], *ids_of(150, 2)], turn_ends=(150,))
    stop(engine)
    engine = start(models["kimi_linear"], tmp_path)
    assert ask(engine, [*prompt[:150], *ids_of(50, 3)])[1].stats.cached_tokens == 150
    stop(engine)


def test_one_file_stands_for_a_conversation_that_can_be_cut(models, tmp_path: Path):
    engine = start(models["llama"], tmp_path)
    prompt = ids_of(100, 1)
    for turn in range(4):
        answer, _ = ask(engine, prompt)
        prompt = [*prompt, *answer, *ids_of(70, 10 + turn)]
    stop(engine)
    (path,) = files(tmp_path)
    # A turn that adds little is not worth writing everything once more.
    engine = start(models["llama"], tmp_path)
    before = path.stat().st_mtime_ns
    ask(engine, prompt[:-60])
    stop(engine)
    assert [p.stat().st_mtime_ns >= before for p in files(tmp_path)] == [True]


def test_the_budget_holds_and_the_oldest_leaves(models, tmp_path: Path):
    engine = start(models["llama"], tmp_path)
    ask(engine, ids_of(150, 0))
    stop(engine)
    size = files(tmp_path)[0].stat().st_size
    engine = start(models["llama"], tmp_path, max_bytes=round(2.5 * size))
    for seed in (1, 2):
        ask(engine, ids_of(150, seed))
        time.sleep(0.05)
    stop(engine)
    assert len(files(tmp_path)) == 2 and sum(p.stat().st_size for p in files(tmp_path)) <= 2.5 * size
    engine = start(models["llama"], tmp_path)
    assert ask(engine, ids_of(150, 0))[1].stats.cached_tokens == 0
    assert ask(engine, ids_of(150, 2))[1].stats.cached_tokens == 149
    stop(engine)


def test_another_model_finds_nothing(models, tmp_path: Path):
    engine = start(models["llama"], tmp_path)
    ask(engine, ids_of(150, 0))
    stop(engine)
    engine = start(models["llama"], tmp_path, fingerprint="b" * 64)
    assert ask(engine, ids_of(150, 0))[1].stats.cached_tokens == 0
    stop(engine)


def test_a_fingerprint_is_of_files_and_form(tmp_path: Path):
    path = write_checkpoint(tmp_path / "a", "llama", seed=3, vocab_size=N)
    cache = load_model(path, dtype=torch.float32).make_cache(64)
    name = model_fingerprint(path, cache)
    assert name == model_fingerprint(path, cache)
    assert name != model_fingerprint(path, load_model(path, dtype=torch.bfloat16).make_cache(64))
    assert name == model_fingerprint(path, load_model(path, dtype=torch.float32).make_cache(128))
    (path / "config.json").write_text((path / "config.json").read_text() + " ")
    assert name != model_fingerprint(path, cache)


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_a_damaged_file_is_deleted_and_counts_as_missing(models, tmp_path: Path, damage: str):
    engine = start(models["llama"], tmp_path)
    ask(engine, ids_of(150, 0))
    stop(engine)
    (path,) = files(tmp_path)
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": content[:-1], "text": b"x" * len(content)}[damage])
    engine = start(models["llama"], tmp_path)
    answer, generation = ask(engine, ids_of(150, 0))
    assert generation.stats.cached_tokens == 0
    assert answer == ask(make_engine(models["llama"], chunk_tokens=16), ids_of(150, 0))[0]
    stop(engine)
    assert path.read_bytes() == content


def test_a_file_that_goes_while_the_server_runs_is_missed_in_peace(models, tmp_path: Path):
    engine = start(models["llama"], tmp_path)
    ask(engine, ids_of(150, 0))
    stop(engine)
    engine = start(models["llama"], tmp_path)
    files(tmp_path)[0].unlink()
    assert ask(engine, ids_of(150, 0))[1].stats.cached_tokens == 0
    stop(engine)


def test_what_a_killed_process_left_is_removed(models, tmp_path: Path):
    folder = tmp_path / ("a" * 32)
    folder.mkdir()
    (folder / "abc.999999999.tmp").write_bytes(b"half")
    stop(start(models["llama"], tmp_path))
    assert files(tmp_path) == []
    # Nobody else on the machine may read what was said.
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_forgetting_deletes_files(models, tmp_path: Path):
    engine = start(models["llama"], tmp_path)
    ask(engine, ids_of(150, 0))
    stop(engine)
    engine = start(models["llama"], tmp_path)
    assert engine.prefixes.counts.num_files == 1 and engine.prefixes.counts.disk_bytes > 0
    engine.prefixes.clear()
    assert files(tmp_path) == [] and engine.prefixes.counts.num_files == 0
    stop(engine)


def test_what_is_being_written_is_forgotten_too(models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = start(models["llama"], tmp_path)
    begun, goes_on = threading.Event(), threading.Event()
    real = prefix_disk.save_file

    def save(*args) -> None:
        begun.set()
        goes_on.wait(10)
        real(*args)

    monkeypatch.setattr(prefix_disk, "save_file", save)
    ask(engine, ids_of(150, 0))
    assert begun.wait(10)
    engine.prefixes.clear()
    goes_on.set()
    stop(engine)
    assert files(tmp_path) == [] and engine.prefixes.counts.num_files == 0


def test_a_drafter_without_a_state_changes_nothing(models, tmp_path: Path):
    drafter = RandomDrafter(max_drafts=3, vocab_size=N, has_draft_law=False)
    engine = start(models["kimi_linear"], tmp_path, drafter=drafter)
    answer, _ = ask(engine, ids_of(150, 0))
    stop(engine)
    engine = start(models["kimi_linear"], tmp_path, drafter=drafter)
    again, generation = ask(engine, [*ids_of(150, 0), *answer, *ids_of(5, 1)])
    assert generation.stats.cached_tokens >= 150
    cold = make_engine(models["kimi_linear"], chunk_tokens=16)
    assert again == ask(cold, [*ids_of(150, 0), *answer, *ids_of(5, 1)])[0]
    stop(engine)
