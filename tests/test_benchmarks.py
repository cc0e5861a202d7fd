"""Benchmarks run on machines that tests do not have; what they import exists all the same."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted([*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")])


def source_of(module: str, script: Path) -> Path | None:
    """Find a module of the project: a script beside the one that imports it, or of the package."""
    parts = module.split(".")
    candidates = (script.parent / f"{module}.py", ROOT / "benchmarks" / f"{module}.py")
    if parts[0] == "soloist":
        folder = ROOT.joinpath("src", *parts)
        candidates = (folder / "__init__.py", folder.with_suffix(".py"))
    return next((path for path in candidates if path.is_file()), None)


def names_of(source: Path) -> set[str]:
    """Collect what a module defines, imports or has as submodules."""
    names = {path.stem for path in source.parent.glob("*.py")} if source.name == "__init__.py" else set()
    names |= {path.name for path in source.parent.iterdir() if path.is_dir()} if source.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def missing_imports(script: Path, text: str) -> list[str]:
    missing = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            source = source_of(node.module, script)
            if source is None and node.module.startswith("soloist"):
                missing.append(node.module)
            elif source is not None:
                missing += [f"{node.module}.{a.name}" for a in node.names if a.name not in names_of(source)]
    return missing


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_imports_only_what_is_there(script: Path):
    assert missing_imports(script, script.read_text()) == []


def test_the_check_finds_what_is_missing():
    text = (
        "from decode_gpu import built_in, gone\nfrom soloist.engine import Engine, Motor\nfrom soloist.nowhere import x"
    )
    expected = ["decode_gpu.gone", "soloist.engine.Motor", "soloist.nowhere"]
    assert missing_imports(ROOT / "benchmarks" / "x.py", text) == expected
