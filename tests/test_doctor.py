"""Facts about the machine: a bandwidth is measured once, and again only where a decode proved it too low."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from soloist import doctor
from soloist.kernels import step_cpu

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the next measurements find; each takes one from the front."""
    values = [20.0, 35.0]
    monkeypatch.setattr(doctor, "measure_bandwidth", lambda device, num_bytes: values.pop(0))
    return values


def test_bandwidth_is_measured_once_and_then_remembered(tmp_path: Path, measured: list[float]):
    cache = tmp_path / "new" / "cache"
    assert doctor.known_bandwidth(CPU, cache) == 20.0
    assert doctor.known_bandwidth(CPU, cache) == 20.0
    assert measured == [35.0]


def test_a_disturbed_measurement_is_repeated_once_it_is_outrun(tmp_path: Path, measured: list[float]):
    assert doctor.known_bandwidth(CPU, tmp_path) == 20.0
    assert doctor.known_bandwidth(CPU, tmp_path, seen_gb_per_s=19.0) == 20.0
    assert doctor.known_bandwidth(CPU, tmp_path, seen_gb_per_s=25.0) == 35.0
    assert measured == []


@pytest.mark.parametrize("content", ["", "no json", "[1, 2]"])
def test_a_damaged_cache_costs_a_measurement_only(content: str, tmp_path: Path, measured: list[float]):
    (tmp_path / "bandwidth.json").write_text(content)
    assert doctor.known_bandwidth(CPU, tmp_path) == 20.0
    assert list(json.loads((tmp_path / "bandwidth.json").read_text()).values()) == [20.0]


def test_a_cache_that_cannot_be_written_costs_a_measurement_only(tmp_path: Path, measured: list[float]):
    (tmp_path / "file").touch()
    assert doctor.known_bandwidth(CPU, tmp_path / "file" / "cache") == 20.0


def test_threads_are_measured_apart(tmp_path: Path, measured: list[float], monkeypatch: pytest.MonkeyPatch):
    assert doctor.known_bandwidth(CPU, tmp_path) == 20.0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert doctor.known_bandwidth(CPU, tmp_path) == 35.0


def test_a_machine_without_a_gpu_says_what_is_missing():
    machine = doctor.inspect_machine()
    assert machine.memory_gib >= machine.free_memory_gib > 0 and machine.bandwidth_gb_per_s > 0
    assert machine.capabilities["answers on the CPU"].startswith("yes")
    assert (machine.capabilities["answers on the GPU"] == "yes") == bool(machine.gpus and machine.triton)


def test_a_machine_without_machine_code_says_so(monkeypatch: pytest.MonkeyPatch):
    assert doctor.inspect_machine().cpu_machine_code == step_cpu.loaded_name()
    monkeypatch.setattr(step_cpu, "load", lambda: None)
    machine = doctor.inspect_machine()
    assert machine.cpu_machine_code is None
    assert "no machine code" in machine.capabilities["answers on the CPU"]
    assert replace(machine, cpu_machine_code="avx2").capabilities["answers on the CPU"] == "yes"


def test_gpus_that_cannot_reach_each_other_are_named():
    gpu = doctor.Gpu(
        name="G", compute_capability="9.0", memory_gib=80.0, free_memory_gib=79.0, bandwidth_gb_per_s=3000.0
    )
    machine = replace(doctor.inspect_machine(), gpus=(gpu, gpu, gpu), strangers=())
    assert machine.capabilities["shares a model between GPUs"] == "yes"
    machine = replace(machine, strangers=((0, 2), (1, 2)))
    assert machine.capabilities["shares a model between GPUs"].startswith("no: GPUs 0 and 2, 1 and 2 cannot")
    assert "shares a model between GPUs" not in replace(machine, gpus=(gpu,)).capabilities
