"""Loading safetensors and random weights: what is read, how it is held, and every fault of a checkpoint by name."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from soloist.errors import CheckpointError, DoesNotFitError, ModelNotFoundError, UnsupportedError, UsageError
from soloist.kernels.packed import PackedWeight
from soloist.models import MODELS, load_model, memory
from soloist.models.cache import StepKind
from soloist.models.layers import DenseCausalLM
from soloist.models.loader import LoadingSource, Placement, RandomSource
from soloist.models.weights import Part, RecordingSource
from tests.miniature import FAMILIES, draw_tensors, miniature_config, tensor_shapes, write_checkpoint

# Sizes that every packed kernel takes.
PACKABLE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", "llama", seed=1)


@pytest.fixture
def untouched_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail when a source is made: faults must show before any memory is taken."""

    def fail(*_: object) -> None:
        raise AssertionError("a source was made before the fault was found")

    monkeypatch.setattr(LoadingSource, "__init__", fail)


def load_dense(folder: Path, **options: Any) -> DenseCausalLM:
    model = load_model(folder, **options)
    assert isinstance(model, DenseCausalLM)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_found_by_its_architecture(tmp_path: Path, family: str) -> None:
    # model_type says something else.
    folder = write_checkpoint(tmp_path, family, seed=2, model_type="other")
    model = load_model(folder)
    assert type(model) is MODELS[miniature_config(family)["architectures"][0]]


def test_values_go_where_they_belong(checkpoint: Path) -> None:
    model = load_dense(checkpoint, dtype=torch.float32)
    stored = draw_tensors(miniature_config("llama"), seed=1)
    mixer, feed_forward = model.layers[1]
    q, k, v = (stored[f"model.layers.1.self_attn.{name}_proj.weight"].float() for name in "qkv")
    assert torch.equal(mixer.qkv_proj, torch.cat([q, k, v]))
    gate, up = (stored[f"model.layers.1.mlp.{name}_proj.weight"].float() for name in ("gate", "up"))
    assert torch.equal(feed_forward.gate_up, torch.cat([gate, up]))
    assert torch.equal(model.embed_tokens, stored["model.embed_tokens.weight"].float())


def test_each_tensor_has_the_dtype_of_its_own_header(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", seed=1)
    file = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    mixed = {name: tensor.to(dtypes[i % 3]) for i, (name, tensor) in enumerate(tensors.items())}
    save_file(mixed, file)
    model = load_dense(folder, dtype=torch.float32)
    expected = load_dense(write_checkpoint(tmp_path / "plain", "llama", seed=1), dtype=torch.float32)
    # fp16 keeps bf16 values of this size to 2^-24.
    torch.testing.assert_close(model.lm_head, expected.lm_head, atol=1e-7, rtol=0)
    torch.testing.assert_close(model.layers[0][0].o_proj, expected.layers[0][0].o_proj, atol=1e-7, rtol=0)


def test_a_tensor_at_an_odd_offset_is_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", seed=1)
    (folder / "model.safetensors.index.json").unlink()
    tensors = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    for file in folder.glob("*.safetensors"):
        file.unlink()
    header, data = {}, b"\0"
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else b""
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    model = load_dense(folder, dtype=torch.float32)
    assert torch.equal(model.embed_tokens, tensors["model.embed_tokens.weight"].float())


def test_progress_ends_at_all_bytes(checkpoint: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(checkpoint, progress=lambda done, total: calls.append((done, total)))
    total = sum(f.stat().st_size for f in checkpoint.glob("*.safetensors"))
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] and 0.9 * total < calls[-1][1] < total


@pytest.mark.usefixtures("untouched_memory")
@pytest.mark.parametrize("keep_index", [True, False])
def test_a_missing_shard_is_named_before_memory_is_taken(checkpoint: Path, keep_index: bool) -> None:
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    if not keep_index:
        (checkpoint / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors.*incomplete download") as caught:
        load_model(checkpoint)
    assert "model-00001" not in str(caught.value) and caught.value.exit_code == 1


@pytest.mark.usefixtures("untouched_memory")
@pytest.mark.parametrize("keep", [0, 7, 60, 4000, -1])
def test_a_truncated_shard_is_named_before_memory_is_taken(checkpoint: Path, keep: int) -> None:
    file = checkpoint / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is truncated.*incomplete download"):
        load_model(checkpoint)


@pytest.mark.usefixtures("untouched_memory")
def test_bytes_behind_the_last_tensor_are_a_fault(checkpoint: Path) -> None:
    with (checkpoint / "model-00001-of-00002.safetensors").open("ab") as file:
        file.write(b"\0" * 8)
    with pytest.raises(CheckpointError, match="damaged"):
        load_model(checkpoint)


@pytest.mark.usefixtures("untouched_memory")
def test_a_git_lfs_pointer_is_recognised(checkpoint: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"
    (checkpoint / "model-00001-of-00002.safetensors").write_bytes(pointer)
    with pytest.raises(CheckpointError, match="git lfs pull"):
        load_model(checkpoint)


@pytest.mark.usefixtures("untouched_memory")
@pytest.mark.parametrize("text", [b"[]", b"{", b'{"a": 3}', b'{"a": {"dtype": "BF16", "shape": [2]}}', b"\xff\xff"])
def test_a_header_that_is_not_one_is_a_damaged_file(checkpoint: Path, text: bytes) -> None:
    (checkpoint / "model-00001-of-00002.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match=r"model-00001.*damaged"):
        load_model(checkpoint)


@pytest.mark.usefixtures("untouched_memory")
def test_missing_extra_and_misshaped_tensors_are_all_listed(tmp_path: Path) -> None:
    config = miniature_config("llama")
    tensors = draw_tensors(config, seed=1)
    for i in range(3):
        del tensors[f"model.layers.{i}.mlp.up_proj.weight"]
    tensors |= {f"model.stranger.{i}": torch.zeros(1) for i in range(12)}
    tensors["model.norm.weight"] = torch.zeros(61)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path)
    message = str(caught.value)
    assert "3 missing: model.layers.0.mlp.up_proj.weight [84, 60]" in message
    assert "12 unknown: model.stranger.0" in message and "and 2 more" in message
    assert "model.norm.weight is [61], expected [60]" in message


@pytest.mark.parametrize("family", ["llama", "bailing_moe_v3"])
def test_harmless_extras_are_ignored(tmp_path: Path, family: str) -> None:
    folder = write_checkpoint(tmp_path, family, seed=1)
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(5),
        "model.mtp.layers.0.norm.weight": torch.zeros(3),
    }
    save_file(extras, folder / "extras.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(extras, "extras.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load_model(folder)


@pytest.mark.usefixtures("untouched_memory")
def test_a_tensor_in_two_shards_is_a_fault(checkpoint: Path) -> None:
    file = checkpoint / "model-00002-of-00002.safetensors"
    save_file(load_file(file) | {"model.embed_tokens.weight": torch.zeros(257, 60)}, file)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight is both in"):
        load_model(checkpoint)


@pytest.mark.usefixtures("untouched_memory")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_a_pickle_is_refused_by_name(checkpoint: Path, name: str) -> None:
    for file in (*checkpoint.glob("*.safetensors"), checkpoint / "model.safetensors.index.json"):
        file.unlink()
    (checkpoint / name).write_bytes(b"never opened")
    with pytest.raises(UnsupportedError, match=rf"{name} is a pickle.*safetensors"):
        load_model(checkpoint)
    with pytest.raises(UnsupportedError, match=rf"{name} is a pickle.*safetensors"):
        load_model(checkpoint / name)


@pytest.mark.usefixtures("untouched_memory")
def test_a_dtype_that_needs_scales_is_refused(checkpoint: Path) -> None:
    file = checkpoint / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    save_file({name: t.to(torch.float8_e4m3fn) for name, t in tensors.items()}, file)
    with pytest.raises(UnsupportedError, match=r"F8_E4M3.*BF16"):
        load_model(checkpoint)


@pytest.mark.usefixtures("untouched_memory")
@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, UnsupportedError, r"MambaForCausalLM.*LlamaForCausalLM.*KimiLinear"),
        ({"architectures": None}, UnsupportedError, "architectures is None"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedError, "quantization_config.*gptq"),
        ({"compression_config": {"format": "x"}}, UnsupportedError, "compression_config"),
        ({"embedding_multiplier": 12.0}, UnsupportedError, "embedding_multiplier"),
    ],
)
def test_a_config_that_is_not_implemented_is_refused_by_name(
    checkpoint: Path, config: dict[str, Any], error: type[Exception], message: str
) -> None:
    (checkpoint / "config.json").write_text(json.dumps(miniature_config("llama") | config))
    with pytest.raises(error, match=message):
        load_model(checkpoint)


@pytest.mark.usefixtures("untouched_memory")
@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_damaged_config_is_named(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json.*damaged"):
        load_model(checkpoint)


@pytest.mark.usefixtures("untouched_memory")
def test_folders_without_a_model_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        load_model(tmp_path / "typo")
    with pytest.raises(CheckpointError, match=r"no config\.json.*incomplete download"):
        load_model(tmp_path)
    (tmp_path / "tiny-q4.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"tiny-q4\.gguf"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(miniature_config("llama")))
    (tmp_path / "tiny-q4.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"no weights.*incomplete download"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="give the folder"):
        load_model(tmp_path / "model.safetensors")


def test_weights_that_do_not_fit_are_refused_before_memory_is_taken(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_tensor(*_: object, **__: object) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000.0)
    monkeypatch.setattr(LoadingSource, "_stack", no_tensor)
    with pytest.raises(DoesNotFitError, match=r"the model needs .* GiB on cpu") as caught:
        load_model(checkpoint)
    assert caught.value.exit_code == 3


def test_experts_count_as_they_are_held_though_the_maps_are_packed() -> None:
    asked = RecordingSource()
    asked.linear(Part(name="map", shape=(64, 32)))
    asked.experts(Part(name="{e}", shape=(64, 32)), num_experts=3)
    assert asked.packable == {"map"}


def test_a_context_that_does_not_fit_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(checkpoint)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000.0)
    with pytest.raises(DoesNotFitError, match="a context of 1024 tokens needs"):
        model.make_cache(1024)
    model.make_cache(1)


def test_random_weights_depend_on_seed_and_name_only() -> None:
    def draw(seed: int, *parts: Part) -> torch.Tensor:
        weight = RandomSource(seed, Placement(device=torch.device("cpu"), dtype=torch.float32)).linear(*parts)
        assert isinstance(weight, torch.Tensor)
        return weight

    a, b = Part(name="a", shape=(5, 7)), Part(name="b", shape=(3, 7))
    both = draw(1, a, b)
    assert torch.equal(both[:5], draw(1, a)) and torch.equal(both[5:], draw(1, b))
    assert not torch.equal(draw(1, a), draw(2, a))
    assert not torch.equal(draw(1, a)[:3], draw(1, b))


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_need_only_a_config(family: str) -> None:
    config = miniature_config(family)
    model, again = (load_model(config, weights="random", seed=3, dtype=torch.float32) for _ in range(2))
    ids = torch.tensor([3, 1, 4])
    logits = [m.compute_logits(m.forward(ids, m.make_cache(8), StepKind.PREFILL)) for m in (model, again)]
    assert torch.equal(*logits) and logits[0].isfinite().all() and logits[0].std() > 0
    assert model.report.weight_bytes >= sum(torch.Size(s).numel() for s in tensor_shapes(config).values()) * 3


def test_random_values_have_the_size_their_kind_asks_for() -> None:
    source = RandomSource(0, Placement(device=torch.device("cpu"), dtype=torch.bfloat16))
    linear = source.linear(Part(name="w", shape=(300, 200)))
    assert abs(linear.float().std().item() - 0.02) < 0.001
    decay = source.tensor(Part(name="A_log", shape=(500,)), dtype=torch.float32, init="decay")
    rates = decay.exp()
    assert decay.dtype == torch.float32 and 1 <= rates.min() < 2 and 15 < rates.max() <= 16
    assert source.tensor(Part(name="n", shape=(9,)), init="ones").eq(1).all()
    assert source.tensor(Part(name="b", shape=(9,)), init="bias").eq(0).all()
    stacked = source.experts(Part(name="e.{e}.up", shape=(4, 6)), Part(name="e.{e}.gate", shape=(5, 6)), num_experts=3)
    assert stacked.shape == (3, 9, 6) and not torch.equal(stacked[0], stacked[1])


def test_a_config_alone_has_no_weights_to_read() -> None:
    with pytest.raises(UsageError, match="random"):
        load_model(miniature_config("llama"))


@pytest.mark.parametrize(("form", "error"), [("int8", 0.01), ("int4", 0.12), ("fp16", 1e-3)])
def test_packed_weights_report_their_bytes_and_their_error(tmp_path: Path, form: Any, error: float) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", seed=4, **PACKABLE)
    dense = load_dense(folder, weights_dtype="bf16")
    model = load_dense(folder, weights_dtype=form)
    mixer, feed_forward = model.layers[0]
    for weight in (mixer.qkv_proj, mixer.o_proj, feed_forward.gate_up, feed_forward.down, model.lm_head):
        assert isinstance(weight, PackedWeight) and weight.kind == form
    report = model.report
    assert set(report.bytes_by_format) == {form, "bf16"}
    assert 0 <= report.packing_error[form] < error and (form == "fp16" or report.packing_error[form] > 1e-4)
    assert dense.report.packing_error == {} and list(dense.report.bytes_by_format) == ["bf16"]
    assert report.weight_bytes == sum(report.bytes_by_format.values()) and report.load_s > 0
    packed = mixer.qkv_proj.dequantise()
    assert ((packed - dense.layers[0][0].qkv_proj.float()).norm() / packed.norm()).item() < error


def test_a_shape_no_kernel_takes_stays_dense_and_is_reported(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", seed=4, **PACKABLE | {"vocab_size": 161})
    model = load_dense(folder, weights_dtype="int4")
    assert model.lm_head is model.embed_tokens
    assert isinstance(model.layers[0][0].qkv_proj, PackedWeight)
    assert model.report.bytes_by_format["bf16"] > 161 * 64 * 2


@pytest.mark.parametrize(
    ("dtype", "form", "allowed"),
    [
        (torch.float32, "int4", "fp32"),
        (torch.float16, "bf16", "fp16"),
        (torch.bfloat16, "fp32", "bf16 or fp16 or int8"),
    ],
)
def test_a_form_that_cannot_be_had_is_refused(checkpoint: Path, dtype: torch.dtype, form: Any, allowed: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"'{form}'.*it can be {allowed}"):
        load_model(checkpoint, dtype=dtype, weights_dtype=form)


def test_an_unknown_dtype_is_refused(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="float64"):
        load_model(checkpoint, dtype=torch.float64)


@pytest.mark.parametrize("device", ["mps", *([] if torch.cuda.is_available() else ["cuda:0"])])
def test_a_device_that_is_not_there_is_refused(checkpoint: Path, device: str) -> None:
    with pytest.raises(UsageError, match=rf"device is '{device}'; .* has cpu"):
        load_model(checkpoint, device=device)
