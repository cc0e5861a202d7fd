"""The built wheel works on its own: outside the tree, in an environment that holds nothing else of ours."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[1]


def run(*words: str | Path, cwd: Path) -> str:
    """Run a command away from the tree; fails the test with the command's own words."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT, cwd=folder)
    (path,) = folder.glob("soloist-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; its dependencies are borrowed from the one that runs the tests."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    install = ["--python", python, "install", "-q", "--no-deps", "--no-index"]
    run(sys.executable, "-m", "pip", *install, wheel, cwd=folder)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # A path in a .pth file is searched, but its own .pth files are not: the editable install stays out.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "env" / "bin"


def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*") if path.is_file()}
    data = {name for name in sources if "__pycache__" not in name}
    assert data <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"soloist"}


def test_the_installed_command_describes_a_built_in_model(installed: Path, tmp_path: Path):
    where = run(installed / "python", "-c", "import soloist; print(soloist.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    description = json.loads(run(installed / "soloist", "models", "describe", "ling-3.0-tiny", "--json", cwd=tmp_path))
    assert description["name"] == "ling-3.0-tiny" and description["parameters"] == 7_893_392_800


def test_the_installed_command_runs_the_demo_model_with_its_draft_offline(installed: Path, tmp_path: Path):
    listed = run(installed / "soloist", "models", cwd=tmp_path)
    for name in ("soloist-nano", "nano-dspark8", "nano-dspark16"):
        assert f"{name} " in listed
    description = json.loads(run(installed / "soloist", "models", "describe", "soloist-nano", "--json", cwd=tmp_path))
    assert description["architecture"] == "BailingMoeV3ForCausalLM"
    words = ["env", "SOLOIST_OFFLINE=1", "HF_HUB_OFFLINE=1", "PIP_NO_INDEX=1", installed / "soloist", "run"]
    words += ["-m", "soloist-nano", "def ", "-n", "48", "--temperature", "0", "-t", "1", "--dtype", "float32"]
    answer = json.loads(run(*words, "--json", cwd=tmp_path))
    assert answer["drafter"] == "dspark nano-dspark8" and answer["completion_tokens"] > 8
    assert answer["acceptance_length"] > 1.5
    plain = json.loads(run(*words, "--draft", "off", "--json", cwd=tmp_path))
    assert plain["text"] == answer["text"] and plain["acceptance_length"] == 1
    wide = json.loads(run(*words, "--draft", "nano-dspark16", "--json", cwd=tmp_path))
    assert wide["text"] == answer["text"] and len(wide["drafted_histogram"]) == 16


def test_the_installed_command_answers(installed: Path, tmp_path: Path):
    model = write_tiny_model(tmp_path / "tiny")
    words = ["run", "-m", model, "hello", "--max-tokens", "3", "--ignore-eos", "--json"]
    answer = json.loads(run(installed / "soloist", *words, cwd=tmp_path))
    assert answer["completion_tokens"] == 3
