"""Where a model runs if nobody says where, on machines that are not here: what is taken, refused and said."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from soloist import LLM, loading
from soloist.cli import main
from soloist.errors import UnsupportedError, UsageError
from soloist.kernels import requirements
from soloist.kernels.requirements import find_lack
from soloist.loading import DeviceChoice, choose_device
from soloist.runtime.comm import check_tensor_parallel_size
from tests.tiny_model import write_tiny_model

CPU = DeviceChoice(device=torch.device("cpu"))
CUDA = DeviceChoice(device=torch.device("cuda"))


def gpu(name: str = "Fast One", capability: tuple[int, int] = (9, 0), shared_kib: int = 227) -> SimpleNamespace:
    major, minor = capability
    return SimpleNamespace(name=name, major=major, minor=minor, shared_memory_per_block_optin=shared_kib * 1024)


OLD = gpu("Old One", (8, 0), 163)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[SimpleNamespace]:
    """GPUs of a machine that has all the kernels need; a test changes the list."""
    found = [gpu()]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found[index])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(requirements, "HAS_TRITON", True)
    monkeypatch.setattr(requirements, "HAS_NVRTC", True)
    monkeypatch.setattr(requirements.shutil, "which", lambda name: f"/usr/bin/{name}")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(requirements, "_python_header", lambda: tmp_path / "Python.h")
    monkeypatch.delenv("CC", raising=False)
    return found


def test_a_gpu_is_taken_where_there_is_one(gpus: list[SimpleNamespace]):
    assert choose_device() == choose_device("auto") == choose_device("cuda") == CUDA
    assert choose_device("cpu") == CPU
    gpus.append(gpu("Slow One"))
    assert choose_device() == CUDA
    assert choose_device("cuda:0").device == torch.device("cuda:0")
    gpus.clear()
    assert choose_device() == CPU


def test_another_gpu_than_the_process_is_on_is_refused(gpus: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch):
    gpus.append(gpu("Slow One"))
    with pytest.raises(UsageError, match=r"'cuda:1', and models of this process run on GPU 0: .* CUDA_VISIBLE_DEVICES"):
        choose_device("cuda:1")
    with pytest.raises(UsageError, match="'cuda:2', and PyTorch sees 2 CUDA devices"):
        choose_device("cuda:2")
    # As each process of several that train is on its own.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert choose_device("cuda:1").device == torch.device("cuda:1")
    with pytest.raises(UsageError, match="run on GPU 1"):
        choose_device("cuda:0")


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_hopper_and_what_followed_in_data_centres_lacks_nothing(
    gpus: list[SimpleNamespace], capability: tuple[int, int]
):
    gpus[:] = [gpu(capability=capability)]
    assert find_lack(0) is None


@pytest.mark.parametrize(
    ("missing", "is_fatal", "said"),
    [
        ("age", True, "the Old One has compute capability 8.0, and kernels need 9.0 or more"),
        ("nvidia", True, "the Fast One is no NVIDIA GPU"),
        ("triton", True, "need Triton: pip install triton"),
        ("nvrtc", True, "need NVRTC: pip install cuda-bindings"),
        ("shared", False, "the Home One has 99 KiB of shared memory for a program"),
        ("compiler", False, "need a C compiler, which Triton calls: install gcc"),
        ("header", False, "Python.h, which Triton includes: install python3-dev"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_named_with_what_to_do(
    gpus: list[SimpleNamespace], missing: str, is_fatal: bool, said: str, monkeypatch: pytest.MonkeyPatch
):
    match missing:
        case "age":
            gpus[:] = [OLD]
        case "shared":
            gpus[:] = [gpu("Home One", (12, 0), 99)]
        case "nvidia":
            monkeypatch.setattr(torch.version, "cuda", None)
        case "triton" | "nvrtc":
            monkeypatch.setattr(requirements, f"HAS_{missing.upper()}", False)
        case "compiler":
            monkeypatch.setattr(requirements.shutil, "which", lambda name: None)
        case "header":
            requirements._python_header().unlink()
    choice = choose_device()
    assert choice.device.type == "cpu" and choice.remark is not None
    assert choice.remark.startswith("on the CPU: ") and said in choice.remark
    # What might work is tried by who asks for it.
    assert ("device cuda tries it" in choice.remark) == (not is_fatal)
    # What only a CPU has is not why.
    assert choose_device(num_threads=2) == choice
    for name in ("cuda", "cuda:0"):
        if not is_fatal:
            assert choose_device(name).remark is None
            continue
        with pytest.raises(UnsupportedError, match=f"device is '{name}', and .*, or device cpu") as refused:
            choose_device(name)
        assert said in str(refused.value)


def test_the_compiler_is_looked_for_where_triton_looks(gpus: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requirements.shutil, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    assert find_lack(0) is None
    monkeypatch.setattr(requirements.shutil, "which", lambda name: None)
    assert find_lack(0) is not None
    monkeypatch.setenv("CC", "zig cc")
    assert find_lack(0) is None


def test_pythons_header_is_looked_for_where_this_python_has_it():
    assert requirements._python_header().parent.name.startswith("python3")


def test_a_gpu_that_its_driver_keeps_back_is_none(gpus: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    assert choose_device() == CPU
    with pytest.raises(UsageError, match="PyTorch sees 0 CUDA devices"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("wishes", "named"),
    [
        ({"num_threads": 2}, "a number of threads"),
        ({"weights_dtype": "int8"}, "weights held as int8"),
        ({"weights_dtype": "fp16"}, "weights held as fp16"),
        ({"weights_dtype": "int4", "dtype": torch.float16}, "weights held as int4"),
        ({"draft_weights_dtype": "int4"}, "a draft held as int4"),
        ({"weights_dtype": "bf16"}, None),
        ({"weights_dtype": "fp16", "dtype": "float16"}, None),
        ({"dtype": "float32"}, "activations in float32"),
        ({"dtype": torch.float32, "weights_dtype": "fp32"}, "activations in float32"),
        ({"dtype": "float16"}, None),
    ],
)
def test_what_only_a_cpu_has_chooses_it(gpus: list[SimpleNamespace], wishes: dict[str, Any], named: str | None):
    choice = choose_device(**wishes)
    if named is None:
        assert choice == CUDA
    else:
        assert choice.device.type == "cpu"
        assert choice.remark == f"on the CPU, the only place for {named}: without that the Fast One is used"
    # Without a GPU there is nothing to say, and who named a device is not told of another.
    assert choose_device("cpu", **wishes) == CPU and choose_device("cuda", **wishes) == CUDA
    gpus.clear()
    assert choose_device(**wishes) == CPU


def test_ranks_take_a_gpu_each_and_are_refused_where_there_are_too_few(
    gpus: list[SimpleNamespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("soloist.loading.Leader", None)
    monkeypatch.setattr("soloist.runtime.comm.find_strangers", lambda num_gpus: ())
    with pytest.raises(UsageError, match=r"size is 2, and PyTorch sees 1 CUDA devices; .* device cpu"):
        LLM(tmp_path, tensor_parallel_size=2)
    gpus.append(OLD)
    with pytest.raises(UnsupportedError, match=r"device is 'auto', and the Old One has .*, or device cpu"):
        choose_device(num_ranks=2)
    with pytest.raises(UnsupportedError, match="device is 'cuda', and the Old One has"):
        choose_device("cuda", num_ranks=2)
    assert choose_device() == CUDA
    gpus[1] = gpu()
    assert choose_device(num_ranks=2) == CUDA
    check_tensor_parallel_size(2, CUDA.device)
    assert choose_device(num_ranks=2, num_threads=1).device.type == "cpu"
    gpus[:] = [OLD]
    assert choose_device(num_ranks=2).device.type == "cpu"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.usefixtures("_own_cache")
def test_a_terminal_is_told_once_why_a_gpu_is_left_alone(
    gpus: list[SimpleNamespace], tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run = ["run", "-m", str(tiny), "hello", "-n", "3", "--ignore-eos"]
    cases = (
        ([OLD], [], True, "on the CPU: the Old One has"),
        ([OLD], [], False, None),
        ([OLD], ["--device", "cpu"], True, None),
        ([gpu()], ["-t", "1"], True, "the only place for a number of threads: without that the Fast One is used"),
        ([gpu()], ["--weights-dtype", "int8"], True, "the only place for weights held as int8"),
        ([], ["-t", "1"], True, None),
    )
    for found, words, is_terminal, said in cases:
        gpus[:] = found
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        assert main([*run, *words]) == 0
        err = capsys.readouterr().err
        assert err.count("on the CPU") == (said is not None), err
        assert said is None or said in err
        assert "of this CPU's" in err


@pytest.mark.usefixtures("_own_cache")
def test_a_gpu_that_was_asked_for_and_cannot_be_used_ends_the_command(
    gpus: list[SimpleNamespace], tiny: Path, capsys: pytest.CaptureFixture[str]
):
    gpus[:] = [OLD]
    assert main(["run", "-m", str(tiny), "hello", "--device", "cuda"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("soloist: device is 'cuda', and the Old One has compute capability 8.0")


def test_python_is_warned_where_a_gpu_is_left_alone(gpus: list[SimpleNamespace], tiny: Path):
    with pytest.warns(UserWarning, match="the only place for a number of threads") as caught:
        llm = LLM(tiny, num_threads=1, max_context_len=64)
    assert caught[0].filename == __file__
    assert llm.engine.runner.model.device.type == "cpu"


@pytest.mark.parametrize("command", ["run", "chat", "draft check", "draft eval"])
@pytest.mark.usefixtures("gpus", "_own_cache")
def test_every_command_that_loads_takes_the_gpu(command: str, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    class FakeLLM:
        def __init__(self, model: str, **options: Any) -> None:
            raise UsageError(f"{options['device']} {options['dtype']} {options['weights_dtype']}")

    monkeypatch.setattr("soloist.llm.LLM", FakeLLM)
    words = {"run": ["hello"], "chat": []}.get(command, ["--draft", "ngram"])
    assert main([*command.split(), "-m", str(tiny), *words]) == 2
    # Figures of a draft are of dense weights: on a GPU bf16, as it decodes.
    held = "None bf16" if command == "draft eval" else "None None"
    assert capsys.readouterr().err == f"soloist: cuda {held}\n"


@pytest.mark.usefixtures("gpus", "_own_cache")
@pytest.mark.parametrize(("words", "taken"), [([], ("cuda", "bf16")), (["--device", "cpu"], ("cpu", "fp32"))])
def test_training_computes_in_what_suits_the_device_that_was_taken(
    words: list[str], taken: tuple[str, str], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    seen = []
    (tmp_path / "data.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    commands = sys.modules["soloist.cli.draft_train"]
    load_dense = commands.load_dense

    def load_on_cpu(model: str, *, device: str, **kwargs: Any) -> LLM:
        seen.append(device)
        return load_dense(model, device="cpu", **kwargs)

    def train(target: object, prompts: object, answering: object, settings: Any, *_: Any, **__: Any) -> None:
        seen.append(settings.compute_dtype)
        raise UsageError("enough")

    monkeypatch.setattr(commands, "load_dense", load_on_cpu)
    monkeypatch.setattr("soloist.train.run.train_draft", train)
    data, out = str(tmp_path / "data.jsonl"), str(tmp_path / "draft")
    assert main(["draft", "train", "-m", str(tiny), "--data", data, "--out", out, "-n", "8", *words]) == 2
    assert capsys.readouterr().err.endswith("enough\n") and tuple(seen) == taken


def test_processes_that_train_have_a_gpu_each(gpus: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch):
    joined = []
    monkeypatch.setattr("torch.distributed.is_torchelastic_launched", lambda: True)
    monkeypatch.setattr("torch.distributed.get_node_local_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda kind, **_: joined.append(kind))
    monkeypatch.setattr(torch.cuda, "set_device", joined.append)
    join = sys.modules["soloist.cli.draft_train"]._join_processes
    with pytest.raises(UsageError, match="process 1 has no GPU, there are 1: start fewer, or give --device cpu"):
        join("cuda")
    join("cpu")
    gpus.append(gpu())
    join("cuda")
    assert joined == ["gloo", 1, "nccl"]


@pytest.mark.usefixtures("_own_cache")
def test_replicas_have_the_gpus_that_one_server_would_take(
    gpus: list[SimpleNamespace], tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    fleet = pytest.importorskip("soloist.server.replicas.fleet")
    seen = []

    def start(make_llm: Any, settings: object, *, num_gpus: int, **_: Any) -> None:
        seen.append((make_llm.keywords["device"], num_gpus))
        raise UsageError("enough")

    monkeypatch.setattr(fleet, "Fleet", start)
    monkeypatch.setattr(fleet, "import_ray", lambda: None)
    serve = ["serve", str(tiny), "--port", "0", "--replicas", "2"]
    assert main(serve) == 2
    assert "2 replicas of 1 GPUs each are more than this machine has" in capsys.readouterr().err
    gpus.append(gpu())
    for words in ([], ["--device", "cuda"], ["--threads", "2"]):
        assert main([*serve, *words]) == 2
    gpus.clear()
    # A GPU of the cluster rather than of this machine.
    for words in ([], ["--device", "cuda"]):
        assert main([*serve, *words]) == 2
    assert seen == [("cuda", 1), ("cuda", 1), ("cpu", 0), ("cpu", 0), ("cuda", 1)]


def test_the_floor_is_that_of_the_device_that_would_be_taken(
    gpus: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch, capsys
):
    measured = []
    monkeypatch.setattr("soloist.roofline.measure_bandwidth", lambda device: measured.append(device.type) or 20.0)
    monkeypatch.setattr("soloist.bench.results.device_name", lambda device: device.type)
    floor = ["bench", "--floor", "-m", "qwen2.5-coder-0.5b-instruct"]
    assert main(floor) == 0
    gpus[:] = [OLD]
    assert main(floor) == 0
    assert measured == ["cuda", "cpu"]


@pytest.mark.parametrize("name", ["tpu", "", "cuda:x"])
def test_no_device_is_refused_with_those_that_are(name: str):
    with pytest.raises(UsageError, match="allowed: auto, cpu or cuda"):
        choose_device(name)
    assert loading.AUTO == "auto"
