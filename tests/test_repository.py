"""The repository stays small, its documents name only what exists, and it speaks of nothing but the project."""

import ast
import importlib
import importlib.util
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from soloist.cli import app

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
MAX_TRACKED_BYTES = 36 * MIB
MAX_FILE_BYTES = 15 * MIB
MAX_WEIGHT_BYTES = 24 * 10**6
WEIGHT_SUFFIXES = {".safetensors", ".gguf", ".npz", ".npy", ".bin"}
# Formats that run code when they are read.
PICKLE_SUFFIXES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
# A log tells what was; what it names may be gone.
LIVING_DOCUMENTS = [path for path in DOCUMENTS if path.name != "log.md"]
# Written in two halves, so that this file does not contain them.
FORBIDDEN = [
    re.compile(first + second, re.IGNORECASE)
    for first, second in (
        ("/wo", "rk/"),
        ("/ro", "ot/"),
        ("/tmp/bash", "_jobs"),
        (r"\bsub-?", r"agents?\b"),
        (r"\bcontract", r"\.md\b"),
        (r"\bthis ", r"session\b"),
        (r"\blent ", r"(gpu|machine)\b"),
    )
]


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """Every file of the repository: tracked, or new and not ignored."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    return [path for name in names.decode().split("\0") if name and (path := ROOT / name).is_file()]


def test_tracked_files_together_stay_below_36_mib(tracked: list[Path]):
    sizes = {path: path.stat().st_size for path in tracked}
    assert sum(sizes.values()) <= MAX_TRACKED_BYTES, sorted(sizes.items(), key=lambda item: -item[1])[:5]
    assert [path for path, size in sizes.items() if size > MAX_FILE_BYTES] == []


def test_weights_stay_below_24_mb_and_are_never_pickles(tracked: list[Path]):
    assert sum(path.stat().st_size for path in tracked if path.suffix in WEIGHT_SUFFIXES) <= MAX_WEIGHT_BYTES
    assert [path for path in tracked if path.suffix in PICKLE_SUFFIXES] == []


def test_nothing_speaks_of_the_place_where_it_was_written(tracked: list[Path]):
    found = []
    for path in tracked:
        if path.suffix not in {".py", ".md", ".toml", ".txt", ".json", ".cu", ".yml", ""} or path.stat().st_size > MIB:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [(str(path.relative_to(ROOT)), match.group()) for word in FORBIDDEN for match in word.finditer(text)]
    assert found == []


def _code_spans(text: str) -> list[str]:
    """Inline code of a document, without its fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def _fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def missing_files(text: str, folder: Path) -> list[str]:
    """List files that a document links to or names in code, and that are neither in the tree nor in the package."""
    missing = []
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target and not (folder / target).exists():
            missing.append(target)
    for span in _code_spans(text):
        # A path ends in a slash or in a suffix we keep; `<name>` and `*` stand for others.
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*(/|\.(py|md|toml|txt|json|jinja))", span):
            roots = (ROOT, ROOT / "src" / "soloist", folder)
            if not any((root / span).exists() for root in roots):
                missing.append(span)
    return missing


def missing_symbols(text: str) -> list[str]:
    """List dotted names below `soloist` that a document uses and that cannot be found."""
    missing = []
    for span in _code_spans(text):
        if match := re.match(r"(soloist(?:\.\w+)+)", span):
            try:
                pkgutil.resolve_name(match[1])
            except (ImportError, AttributeError):
                missing.append(match[1])
    return missing


def unknown_commands(text: str) -> list[str]:
    """List `soloist` and `make` command lines of a document whose command or options do not exist."""
    lines = [line.strip() for block in _fenced(text, r"\w*") for line in block.splitlines()]
    lines += [span for span in _code_spans(text) if span.startswith(("soloist ", "make "))]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    unknown = []
    for line in lines:
        line = line.split("#")[0].strip()
        if match := re.search(r"(?:^|[|;&] *)make +([a-z-]+)", line):
            if match[1] not in targets:
                unknown.append(line)
        elif match := re.search(r"(?:^|[|;&] *)soloist +(.*)", line):
            command = get_command(app)
            words = match[1].split()
            while words and (child := getattr(command, "commands", {}).get(words[0])):
                command = child
                words = words[1:]
            options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {
                "--help",
                "-h",
            }
            used = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", " ".join(words)))
            is_group = hasattr(command, "commands") and words and words[0][0] not in "-["
            if is_group or not used <= options:
                unknown.append(line)
    return unknown


def broken_examples(text: str) -> list[str]:
    """List names that the Python examples of a document import from `soloist` and that it does not have."""
    broken = []
    for block in _fenced(text, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "soloist":
                module = importlib.import_module(node.module or "")
                broken += [alias.name for alias in node.names if not hasattr(module, alias.name)]
    return broken


@pytest.mark.parametrize("path", LIVING_DOCUMENTS, ids=lambda p: p.name)
def test_a_document_names_only_what_exists(path: Path):
    text = path.read_text(encoding="utf-8")
    assert missing_files(text, path.parent) == []
    assert missing_symbols(text) == []
    assert unknown_commands(text) == []
    assert broken_examples(text) == []


def test_the_document_check_finds_what_is_missing():
    text = (
        "[a](nowhere.md) `kernels/nothing.py` `soloist.errors.NoError`\n"
        "`make nothing` `soloist fly` `soloist run --nothing`\n"
        "```python\nfrom soloist.errors import Nothing\n```\n"
    )
    assert missing_files(text, ROOT) == ["nowhere.md", "kernels/nothing.py"]
    assert missing_symbols(text) == ["soloist.errors.NoError"]
    assert unknown_commands(text) == ["make nothing", "soloist fly", "soloist run --nothing"]
    assert broken_examples(text) == ["Nothing"]


def test_the_page_of_the_command_line_is_what_make_docs_writes():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == generate.render(), "run `make docs`"


def test_make_test_gpu_chooses_every_module_that_runs_on_the_device():
    match = re.search(r'-k "\(([a-z_ ]+)\)', (ROOT / "Makefile").read_text())
    assert match is not None
    keywords = match[1].split(" or ")
    on_device = [path for path in (ROOT / "tests" / "kernels").glob("test_*.py") if "DEVICE" in path.read_text()]
    assert on_device
    assert [path.name for path in on_device if not any(word in path.name for word in keywords)] == []
