"""Machine code is compiled once: whole files are kept by all that it depends on."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from soloist.kernels import nvrtc

SIZES = (("K", "3"),)


def test_a_kernel_is_compiled_once_for_each_source_size_machine_and_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compiled: list[tuple] = []

    def compile_(*what: object) -> bytes:
        compiled.append(what)
        return f"code {len(compiled)}".encode()

    def compiler(minor: int) -> SimpleNamespace:
        return SimpleNamespace(nvrtcVersion=lambda: (0, 13, minor))

    monkeypatch.setattr(nvrtc, "_compile", compile_)
    monkeypatch.setattr(nvrtc, "user_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(nvrtc, "nvrtc", compiler(0), raising=False)
    assert [nvrtc._find_cubin("source", "name", SIZES, (9, 0)) for _ in range(3)] == [b"code 1"] * 3
    others = [
        ("other", "name", SIZES, (9, 0)),
        ("source", "name", (("K", "4"),), (9, 0)),
        ("source", "name", SIZES, (10, 0)),
    ]
    assert [nvrtc._find_cubin(*other) for other in others] == [b"code 2", b"code 3", b"code 4"]
    monkeypatch.setattr(nvrtc, "nvrtc", compiler(1))
    assert nvrtc._find_cubin("source", "name", SIZES, (9, 0)) == b"code 5"
    # Nothing half written is left.
    assert {path.suffix for path in (tmp_path / "kernels").iterdir()} == {".cubin"}
