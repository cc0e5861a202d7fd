"""Facts about the machine: a bandwidth is measured once, and again only where a decode proved it too low."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from soloist import doctor
from soloist.cli import main
from soloist.doctor import Sharing, estimate_sharing
from soloist.kernels import step_cpu
from soloist.roofline import Footprint, Reads, WeightPart

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
    can_answer = bool(machine.gpus) and machine.gpus[0].lack is None
    assert (machine.capabilities["answers on the GPU"] == "yes") == can_answer
    assert machine.default_device == ("cuda" if can_answer else "cpu")


def test_a_machine_without_machine_code_says_so(monkeypatch: pytest.MonkeyPatch):
    assert doctor.inspect_machine().cpu_machine_code == step_cpu.loaded_name()
    monkeypatch.setattr(step_cpu, "load", lambda: None)
    machine = doctor.inspect_machine()
    assert machine.cpu_machine_code is None
    assert "no machine code" in machine.capabilities["answers on the CPU"]
    assert replace(machine, cpu_machine_code="avx2").capabilities["answers on the CPU"] == "yes"


def test_gpus_that_cannot_reach_each_other_are_named():
    gpu = doctor.Gpu(
        name="G",
        compute_capability="9.0",
        memory_gib=80.0,
        free_memory_gib=79.0,
        lack=None,
        bandwidth_gb_per_s=3000.0,
    )
    machine = replace(doctor.inspect_machine(), gpus=(gpu, gpu, gpu), strangers=())
    assert machine.capabilities["answers on the GPU"] == machine.capabilities["shares a model between GPUs"] == "yes"
    old = replace(gpu, lack="the G is too old")
    one_old = replace(machine, gpus=(gpu, old)).capabilities
    assert one_old["answers on the GPU"] == "yes"
    assert one_old["shares a model between GPUs"] == "no: the G is too old"
    assert replace(machine, gpus=(old,)).capabilities["answers on the GPU"] == "no: the G is too old"
    machine = replace(machine, strangers=((0, 2), (1, 2)))
    assert machine.capabilities["shares a model between GPUs"].startswith("no: GPUs 0 and 2, 1 and 2 cannot")
    assert "shares a model between GPUs" not in replace(machine, gpus=(gpu,)).capabilities


GPU = doctor.Gpu(
    name="G",
    compute_capability="9.0",
    memory_gib=100.0,
    free_memory_gib=99.0,
    lack=None,
    bandwidth_gb_per_s=4000.0,
)


def footprint(weight_gb: float, num_layers: int) -> Footprint:
    num_bytes = round(1e9 * weight_gb)
    part = WeightPart(
        name="all",
        parameters=num_bytes // 2,
        weight_bytes=num_bytes,
        read_bytes=num_bytes,
        reads=Reads.ALL,
        num_choices=1,
        is_sharded=True,
    )
    return Footprint(
        parts=(part,),
        num_layers=num_layers,
        num_experts_per_tok=0,
        state_bytes=0,
        conv_state_bytes=0,
        kv_bytes_per_position=0,
        num_kv_shards=1,
    )


def test_gpus_share_a_model_where_that_saves_more_than_exchanges_take():
    # 50 exchanges of 2 us: 0.1 ms. Half of 4 GB at 4 TB/s saves 0.5 ms, of 1.2 GB 0.15 ms, of 0.4 GB 0.05 ms.
    models = {"large": footprint(4.0, 24), "even": footprint(1.2, 24), "small": footprint(0.4, 24)}
    models |= {"huge": footprint(150.0, 24), "vast": footprint(300.0, 24), "too large": footprint(900.0, 24)}
    found = {estimate.model: estimate for estimate in estimate_sharing(models, [GPU] * 4, exchange_us=2.0)}
    assert {name: (estimate.sharing, estimate.num_gpus) for name, estimate in found.items()} == {
        "large": (Sharing.PAYS, 2),
        "even": (Sharing.UNCLEAR, 2),
        "small": (Sharing.LOSES, 2),
        "huge": (Sharing.NEEDED, 2),
        "vast": (Sharing.NEEDED, 4),
    }
    assert found["large"].one_ms == pytest.approx(1.0) and found["large"].rank_ms == pytest.approx(0.5)
    assert found["large"].exchange_ms == pytest.approx(0.1)
    for name, words in (("large", "should pay"), ("even", "measure"), ("small", "take one GPU"), ("huge", "needs 2")):
        assert words in found[name].in_words and "estimate" in found[name].in_words
    # The least of the GPUs counts.
    slow = replace(GPU, bandwidth_gb_per_s=400.0)
    (estimate,) = estimate_sharing({"small": models["small"]}, [GPU, slow], exchange_us=2.0)
    assert estimate.sharing is Sharing.PAYS
    assert estimate_sharing({"huge": models["huge"]}, [GPU, replace(GPU, memory_gib=80.0)]) == ()


def test_doctor_advises_where_there_are_several_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "_inspect_gpu", lambda index: replace(GPU, memory_gib=140.0))
    monkeypatch.setattr(doctor, "find_strangers", lambda num_gpus: ())
    monkeypatch.setattr(doctor, "measure_bandwidth", lambda device, num_bytes: 20.0)
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    sharing = {estimate["model"]: estimate["sharing"] for estimate in facts["sharing"]}
    assert sharing["ling-3.0-flash"] == "needed" and sharing["smollm2-135m-instruct"] == "loses"
    advice = {estimate["model"]: estimate["advice"] for estimate in facts["sharing"]}
    assert advice["ling-3.0-flash"].startswith("needs 2 GPUs")
    assert main(["doctor"]) == 0
    assert "take one GPU" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "find_strangers", lambda num_gpus: ((0, 1),))
    assert doctor.inspect_machine().sharing == ()
