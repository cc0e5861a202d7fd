"""Guards name the line that waits. Without a GPU, values of CPU tensors stand for those of a device."""

import ctypes
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from soloist.errors import UsageError
from soloist.profiler import HostSyncError, allow_host_sync, assert_returns_early, no_host_sync, pytest_plugin
from soloist.profiler.guards import _blocks_copy

x = torch.tensor([3.0, 0.0, 2.0])
ON_CPU = ("cpu",)

READS: dict[str, Callable[[], object]] = {
    "item": lambda: x[0].item(),
    "tolist": lambda: x.tolist(),
    "cpu": lambda: x.cpu(),
    "to": lambda: x.to("cpu"),
    "to device": lambda: x.to(device=torch.device("cpu")),
    "numpy": lambda: x.numpy(),
    "truth": lambda: bool(x[0] > 1),
    "if": lambda: 1 if x[0] else 0,
    "int": lambda: int(x[0]),
    "float": lambda: float(x[0]),
    "index": lambda: range(5)[torch.tensor(2)],
    "mask": lambda: x[x > 1],
    "mask in a tuple": lambda: x[None][:, x > 1],
    "mask assignment": lambda: x.clone().__setitem__(x > 9, 1.0),
    "nonzero": lambda: x.nonzero(),
    "torch.nonzero": lambda: torch.nonzero(x),
    "unique": lambda: x.unique(),
    "torch.unique": lambda: torch.unique(x),
    "masked_select": lambda: torch.masked_select(x, x > 1),
    "repeat_interleave": lambda: torch.repeat_interleave(x, torch.tensor([1, 2, 1])),
    "repeat_interleave method": lambda: x.repeat_interleave(torch.tensor([1, 2, 1])),
    "format": lambda: f"{x[0]:.2f}",
    "repr": lambda: repr(x),
    "contains": lambda: 2.0 in x,
    "equal": lambda: torch.equal(x, x),
    "equal by name": lambda: torch.equal(input=x, other=x),
    "allclose": lambda: torch.allclose(x, x),
    "is_nonzero": lambda: torch.is_nonzero(x[0]),
    "where": lambda: torch.where(x > 1),
    "argwhere": lambda: torch.argwhere(x),
    "unique_consecutive": lambda: torch.unique_consecutive(x),
    "bincount": lambda: torch.bincount(torch.tensor([0, 2])),
    "index_put_": lambda: x.clone().index_put_((x > 9,), x[:1]),
    "list as a mask": lambda: x[[True, False, True]],
    "arange": lambda: torch.arange(torch.tensor(3)),
    "full": lambda: torch.full((2,), x[0]),
    "end of a slice": lambda: x[: torch.tensor(2)],
    "tensor of tensors": lambda: torch.tensor([x[0], x[1]]),
    "as_tensor of tensors": lambda: torch.as_tensor((x[0], 2.0)),
    "complex": lambda: complex(x[0]),
    "inverse": lambda: torch.linalg.inv(torch.eye(2)),
    "one_hot": lambda: torch.nn.functional.one_hot(torch.tensor([0, 2])),
    "accelerator": lambda: torch.accelerator.synchronize(),
    "synchronize": lambda: torch.cuda.synchronize(),
    "event": lambda: torch.cuda.Event.synchronize(None),
    "stream": lambda: torch.cuda.Stream.synchronize(None),
}
CLEAN: dict[str, Callable[[], object]] = {
    "tensor of numbers": lambda: torch.tensor([1.0, 2.0]),
    "as_tensor of a tensor": lambda: torch.as_tensor(x),
    "arithmetic": lambda: (x * 2 + 1).sum(),
    "slices": lambda: x[1:][None, ..., -1],
    "gather": lambda: x[torch.tensor([0, 2])],
    "assignment": lambda: x.clone().__setitem__(1, 5.0),
    "to dtype": lambda: x.to(torch.float64),
    "non-blocking": lambda: x.to("cpu", non_blocking=True),
    "non-blocking by place": lambda: x.to("cpu", torch.float32, True),
    "copy by name": lambda: x.clone().copy_(other=x),
    "static size": lambda: torch.nonzero_static(x, size=2),
    "masked_fill": lambda: x.masked_fill(x > 1, 0.0),
    "sizes": lambda: x.repeat_interleave(torch.tensor([1, 2, 1]), output_size=4),
    "repeats": lambda: x.repeat_interleave(2),
    "shape": lambda: (len(x), x.shape, x.numel()),
    "where": lambda: torch.where(x > 1, x, -x),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_raises_at_its_line(name: str):
    with pytest.raises(HostSyncError) as caught, no_host_sync(ON_CPU):
        READS[name]()
    assert re.search(r"test_guards\.py:\d+: \w+", str(caught.value))
    line = int(re.search(r"test_guards\.py:(\d+)", str(caught.value))[1])
    text = Path(__file__).read_text(encoding="utf-8").splitlines()[line - 1]
    assert f'"{name}": lambda' in text


@pytest.mark.parametrize("name", CLEAN)
def test_what_stays_on_the_device_passes(name: str):
    with no_host_sync(ON_CPU):
        CLEAN[name]()


def test_a_copy_is_judged_by_where_its_memory_is():
    class Fake:
        def __init__(self, kind: str, is_pinned: bool = False) -> None:
            self.device = torch.device(kind)
            self.is_pinned = lambda: is_pinned

    gpu, pageable, pinned = Fake("cuda"), Fake("cpu"), Fake("cpu", True)
    assert not _blocks_copy(gpu, gpu) and not _blocks_copy(pageable, pinned)
    assert _blocks_copy(pageable, gpu, True) and _blocks_copy(gpu, pageable, True)
    assert not _blocks_copy(pinned, gpu, True) and not _blocks_copy(gpu, pinned, True)
    assert _blocks_copy(pinned, gpu)


def test_tensors_of_other_devices_may_be_read():
    with no_host_sync():
        assert x[0].item() == 3.0


def test_everything_is_as_before_when_the_guard_is_left():
    before = {name: getattr(torch.Tensor, name) for name in ("item", "cpu", "to")}
    own = set(vars(torch.Tensor))
    with pytest.raises(ZeroDivisionError), no_host_sync(ON_CPU):
        _ = 1 / 0
    assert {name: getattr(torch.Tensor, name) for name in before} == before
    assert set(vars(torch.Tensor)) == own
    assert x[0].item() == 3.0


def test_a_region_with_a_reason_may_read():
    with no_host_sync(ON_CPU):
        with allow_host_sync("the last token of an answer"):
            assert x[0].item() == 3.0
        with pytest.raises(HostSyncError):
            x[0].item()


@pytest.mark.parametrize("devices", ["cpu", ("gpu",), ("cuda:0",), ()])
def test_what_is_no_type_of_device_would_guard_nothing_and_is_refused(devices: tuple[str, ...]):
    with pytest.raises(UsageError, match="types of devices"), no_host_sync(devices):
        pass


def test_the_guard_is_a_decorator_and_nests():
    @no_host_sync(ON_CPU)
    def step() -> None:
        with no_host_sync(ON_CPU):
            x.sum()
        x.sum().item()

    with pytest.raises(HostSyncError, match="item"):
        step()


class Sleep:
    """A GPU that sleeps, of which only the clock is real."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def begin(self) -> None:
        self.end_s = time.perf_counter() + self.seconds

    def is_over(self) -> bool:
        return time.perf_counter() > self.end_s


def test_enqueueing_behind_a_sleeping_gpu_must_return_before_it_wakes():
    assert assert_returns_early(lambda: 5, seconds=0.5, sleep=Sleep) == 5


def extension() -> None:
    """Waits where PyTorch knows nothing of it."""
    ctypes.CDLL(None).usleep(150_000)  # waits


def test_a_wait_in_an_extension_is_found_by_its_effect_and_named():
    with pytest.raises(HostSyncError) as caught:
        assert_returns_early(extension, seconds=0.1, sleep=Sleep)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    expected = next(i + 1 for i, line in enumerate(lines) if line.endswith("# waits"))
    assert f"test_guards.py:{expected}: waited for the GPU" in str(caught.value)


PLUGIN_TEST = """
import pytest, torch

@pytest.mark.no_host_sync(devices=("cpu",))
def test_reads():
    torch.ones(1).item()

@pytest.mark.no_host_sync(devices=("cpu",))
def test_stays():
    torch.ones(1).sum()

def test_unmarked():
    torch.ones(1).item()

def test_part(no_host_sync):
    torch.ones(1).item()
    with no_host_sync(("cpu",)):
        torch.ones(1).tolist()
"""


def test_the_pytest_plugin_fails_marked_tests_that_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "test_plugin.py"
    path.write_text(PLUGIN_TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = ["-q", "--strict-markers", "-p", "no:cacheprovider", "-c", str(tmp_path / "pytest.ini"), str(path)]
    assert pytest.main(words, plugins=[pytest_plugin]) == pytest.ExitCode.TESTS_FAILED
    out = capsys.readouterr().out
    assert "2 failed, 2 passed" in out, out
    assert "test_plugin.py:6: item reads a value" in out
    assert "test_plugin.py:18: tolist reads a value" in out
