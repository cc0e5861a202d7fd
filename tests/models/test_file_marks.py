"""Files that differ have other marks, and the name of what differs; the same tensors in other files have the same."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from soloist.models import open_model
from soloist.models.file_marks import mark_files
from tests.models.gguf_files import draw, write_gguf

# Of more values than a small tensor has.
LARGE, SMALL = (300, 401), (7, 11)


def write(folder: Path, tensors: dict[str, torch.Tensor], config: str = "{}") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    half = len(tensors) // 2
    for i, names in enumerate((list(tensors)[:half], list(tensors)[half:]), 1):
        save_file({name: tensors[name] for name in names}, folder / f"model-{i:05}-of-00002.safetensors")
    return folder


def differing(a: Path, b: Path) -> list[str]:
    marks = mark_files(open_model(a)), mark_files(open_model(b))
    return [name for name in marks[0] | marks[1] if marks[0].get(name) != marks[1].get(name)]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"large": torch.randn(LARGE), "small": torch.randn(SMALL), "other": torch.randn(5).bfloat16()}


def test_what_differs_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    first = write(tmp_path / "first", tensors)
    changes = {
        "large": [lambda x: x.zero_(), lambda x: x.neg_(), lambda x: x[-1].copy_(x[-1].flip(0).clone())],
        "small": [lambda x: x[3, 4].neg_(), lambda x: x.copy_(x.flip(0).clone())],
        "other": [lambda x: x[2:3].view(torch.int16).bitwise_xor_(1)],
    }
    for name, made in changes.items():
        for i, change in enumerate(made):
            altered = {key: tensor.clone() for key, tensor in tensors.items()}
            change(altered[name])
            assert differing(first, write(tmp_path / f"{name}{i}", altered)) == [name]
    reshaped = tensors | {"small": tensors["small"].view(11, 7)}
    assert differing(first, write(tmp_path / "reshaped", reshaped)) == ["small"]
    fewer = {name: tensor for name, tensor in tensors.items() if name != "other"}
    assert differing(first, write(tmp_path / "fewer", fewer, '{"a": 1}')) == ["config.json", "other"]


def test_where_a_tensor_lies_does_not_matter(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    turned = dict(reversed(list(tensors.items())))
    assert differing(write(tmp_path / "first", tensors), write(tmp_path / "second", turned)) == []


def test_gguf_files_are_told_apart(tmp_path: Path) -> None:
    config, tensors = draw("llama")
    first = write_gguf(tmp_path / "first.gguf", "llama", config, tensors, lambda name: "Q8_0")
    tensors["model.layers.1.mlp.down_proj.weight"].zero_()
    second = write_gguf(tmp_path / "second.gguf", "llama", config, tensors, lambda name: "Q8_0")
    assert differing(first, first) == [] and differing(first, second) == ["blk.1.ffn_down.weight"]
