"""The import rule: a layer imports only from layers above it. This table is the one the style guide speaks of."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "soloist"

# Top to bottom. Modules of one row do not import each other, unless SAME_ROW says so.
LAYERS = (
    ("errors",),
    ("config", "sampling_params"),
    ("kernels",),
    ("roofline",),
    ("models",),
    ("runtime",),
    ("spec",),
    ("prefix_disk",),
    ("prefix",),
    ("request_stats",),
    ("engine", "generation"),
    ("step_costs",),
    ("vocabulary", "tokenizer", "chat", "hub"),
    ("answer",),
    ("loading",),
    ("follower", "llm"),
    ("profiler", "bench", "doctor", "draft_check"),
    ("train", "server"),
    ("cli",),
)
ROW = {name: row for row, names in enumerate(LAYERS) for name in names}
# (importer, imported): the only imports within a row.
SAME_ROW = {
    ("tokenizer", "vocabulary"), ("chat", "tokenizer"), ("bench", "profiler"), ("bench", "doctor"),
    # A request's way back to its engine is a type only.
    ("engine", "generation"), ("generation", "engine"),
}  # fmt: skip
# Text knows nothing of steps, whatever the order says.
NEVER = {
    (text, engine)
    for text in LAYERS[ROW["tokenizer"]]
    for engine in ("runtime", "spec", "prefix", "engine", "generation")
}
# Packages an installation may lack: imported where they are used.
OPTIONAL_PACKAGES = {
    "accelerate", "cuda", "fla", "gguf", "llguidance", "matplotlib", "numpy", "opentelemetry", "ray", "readline",
    "transformers", "triton",
}  # fmt: skip
# Packages that bring kernels or an API of their own, and the only parts of the tree that may know them.
CONFINED_PACKAGES = {
    "cuda": ("kernels", "runtime"),
    "fla": ("kernels", "train"),
    "fastapi": ("server",),
    "flash_attn": ("kernels",),
    "flashinfer": ("kernels",),
    "llguidance": ("server",),
    "prometheus_client": ("server",),
    "pydantic": ("server",),
    "opentelemetry": ("server",),
    "ray": ("server",),
    "rich": ("cli",),
    "starlette": ("server",),
    "triton": ("kernels",),
    "typer": ("cli",),
    "uvicorn": ("cli", "server"),
}
# What the command line may import at its start: nothing that imports torch.
LIGHT = {"cli", "config", "errors", "sampling_params"}
# Where the environment is read.
ENVIRONMENT_READERS = {"config.py", "kernels/check.py", "kernels/launch.py"}
BANNED_NAMES = {"utils", "util", "common", "base", "misc", "helpers"}


def _sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def _top(path: Path) -> str:
    """Name of the layer a file belongs to; `__init__` for the package's own face."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _imports(tree: ast.Module) -> Iterator[tuple[ast.stmt, str, str]]:
    """Yield every import as (node, dotted name, where it stands: "top", "function" or "types")."""
    where = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            where |= {id(inner): "types" for statement in node.body for inner in ast.walk(statement)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where |= {id(inner): "function" for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, where.get(id(node), "top")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}: imports are absolute"
            for alias in node.names:
                # `from soloist import engine` names a layer in its alias.
                yield node, f"{node.module}.{alias.name}", where.get(id(node), "top")


def problems(source: str, path: Path) -> list[str]:
    """List what breaks the import rule in one file, each with its line."""
    found = []
    importer = _top(path)
    for node, module, place in _imports(ast.parse(source)):
        line = f"{path.relative_to(SOURCE)}:{node.lineno}: "
        package, *rest = module.split(".")
        if package == "soloist":
            imported = rest[0] if rest and rest[0] in ROW else None
            if imported is None or importer == "__init__" or imported == importer:
                pass
            elif (importer, imported) in NEVER:
                found.append(line + f"{importer} knows nothing of {imported}")
            elif ROW[imported] >= ROW[importer] and (importer, imported) not in SAME_ROW:
                found.append(line + f"{importer} imports {imported}, which is not above it")
            elif imported in ("train", "server") and importer != "cli":
                found.append(line + f"nothing but cli imports {imported}")
        elif package in CONFINED_PACKAGES and importer not in CONFINED_PACKAGES[package]:
            found.append(line + f"{package} belongs to {' and '.join(CONFINED_PACKAGES[package])} only")
        # The package's face is lazy, so that `soloist --help` need not import torch.
        if place == "function" and importer not in ("cli", "__init__") and package not in OPTIONAL_PACKAGES:
            found.append(line + f"{module} is imported inside a function")
        is_heavy = package == "soloist" and rest[:1] and rest[0] in ROW and rest[0] not in LIGHT
        if place == "top" and importer == "cli" and is_heavy:
            found.append(line + f"cli imports {module} outside its commands: starting it would wait for torch")
    return found


@pytest.mark.parametrize("path", _sources(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_imports_only_from_layers_above_it(path: Path):
    assert problems(path.read_text(), path) == []


def test_every_file_has_its_row_in_the_table():
    assert {_top(path) for path in _sources()} - {"__init__", "__main__"} <= set(ROW)


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("kernels/kda.py", "from soloist.models.cache import Cache", "not above it"),
        ("kernels/kda.py", "from soloist import engine", "not above it"),
        ("tokenizer.py", "import soloist.engine", "knows nothing of engine"),
        ("hub.py", "from soloist.chat import render", "not above it"),
        ("llm.py", "from soloist.server.app import app", "not above it"),
        ("models/llama.py", "import triton", "belongs to kernels only"),
        ("llm.py", "from pydantic import BaseModel", "belongs to server only"),
        ("engine.py", "def step():\n    import json", "inside a function"),
        ("cli.py", "from soloist.llm import LLM", "outside its commands"),
        ("cli/chat.py", "from soloist.llm import LLM", "outside its commands"),
    ],
)
def test_the_rule_catches_what_it_forbids(file: str, line: str, complaint: str):
    (problem,) = problems(line, SOURCE / file)
    assert complaint in problem


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("chat.py", "from soloist.tokenizer import Tokenizer"),
        ("models/llama.py", "from soloist.models.cache import Cache"),
        ("kernels/linear.py", "def pack():\n    import triton"),
        ("cli.py", "def run():\n    from soloist.llm import LLM"),
    ],
)
def test_the_rule_lets_pass_what_it_allows(file: str, line: str):
    assert problems(line, SOURCE / file) == []


@pytest.mark.parametrize("path", _sources(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_environment_is_read_in_config_only(path: Path):
    if str(path.relative_to(SOURCE)) in ENVIRONMENT_READERS:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and ast.unparse(node.value) == "os":
            pytest.fail(f"line {node.lineno} reads the environment: config.py does that")


def test_files_are_named_for_the_thing_they_hold():
    assert [p for p in _sources() if p.stem in BANNED_NAMES or p.parent.name in BANNED_NAMES] == []
