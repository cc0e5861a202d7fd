"""A pytest plugin: `-p soloist.profiler.pytest_plugin`, or `pytest_plugins = ["soloist.profiler.pytest_plugin"]`.

Gives the marker `no_host_sync(devices=("cuda",))`, under which a test fails at the first line that reads a device value
or waits for the GPU, and the fixture `no_host_sync`, the context manager itself, for a part of a test.
"""

from collections.abc import Callable, Generator
from typing import Any

import pytest

from soloist.profiler import guards


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers", 'no_host_sync(devices=("cuda",)): the test fails where the host waits for one of these devices'
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a marked test within the guard; its fixtures are outside."""
    marker = item.get_closest_marker("no_host_sync")
    if marker is None:
        return (yield)
    with guards.no_host_sync(*marker.args, **marker.kwargs):
        return (yield)


@pytest.fixture
def no_host_sync() -> Callable[..., Any]:
    """Give the guard, for a part of a test."""
    return guards.no_host_sync
