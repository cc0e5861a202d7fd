from pathlib import Path

import pytest

from soloist.config import Environment, is_offline, model_dirs, user_cache_dir

VARIABLES = ("SOLOIST_DEBUG", "SOLOIST_OFFLINE", "HF_HUB_OFFLINE", "SOLOIST_MODELS_DIR", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch, tmp_path):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_the_cache_lies_in_the_home_folder(tmp_path):
    assert user_cache_dir() == tmp_path / ".cache" / "soloist"
    assert model_dirs() == (tmp_path / ".cache" / "soloist" / "models",)


def test_the_cache_follows_xdg_but_not_a_relative_path(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert user_cache_dir() == Path("/var/cache/me/soloist")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert user_cache_dir() == tmp_path / ".cache" / "soloist"


def test_the_models_dir_is_searched_before_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SOLOIST_MODELS_DIR", "~/models")
    assert model_dirs() == (tmp_path / "models", user_cache_dir() / "models")


@pytest.mark.parametrize("name", ["SOLOIST_OFFLINE", "HF_HUB_OFFLINE"])
@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("", False), ("false", False)]
)
def test_either_variable_takes_the_network_away(monkeypatch, name, value, expected):
    monkeypatch.setenv(name, value)
    assert is_offline() is expected


def test_debugging_is_off_unless_asked_for(monkeypatch):
    assert not Environment.read().debug
    monkeypatch.setenv("SOLOIST_DEBUG", "1")
    assert Environment.read().debug
