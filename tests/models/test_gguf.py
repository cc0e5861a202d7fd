"""GGUF files: blocks, names, keys, forms; damaged and unsupported files; the real small models, where they are."""

import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from safetensors.torch import save_file

from soloist.errors import CheckpointError, ModelNotFoundError, UnsupportedError
from soloist.kernels.packed import PackedWeight
from soloist.kernels.rotary import Llama3Scaling, YarnScaling
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.models.gguf import BLOCK_TYPES, GGUFFile
from soloist.models.gguf_blocks import decode
from soloist.models.layers import DenseCausalLM
from tests.miniature import write_checkpoint
from tests.models.dense_oracle import make_noisy_cache, random_ids, run
from tests.models.gguf_files import BLOCKED, as_stored, draw, write_gguf

DENSE_FAMILIES = ("llama", "qwen2", "qwen3")
QUANTISED = [t for t in BLOCK_TYPES.values() if t.block_values > 1]
# The gguf package quantises to these.
WRITABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def logits_of(model: CausalLM) -> torch.Tensor:
    ids = random_ids(model, 11)
    return run(model, make_noisy_cache(model, 16), ids)


def load_dense(path: Path, **options: Any) -> DenseCausalLM:
    model = load_model(path, **options)
    assert isinstance(model, DenseCausalLM)
    return model


@pytest.mark.parametrize("block_type", QUANTISED, ids=lambda t: t.name)
def test_blocks_decode_as_the_gguf_package_decodes_them(block_type: Any) -> None:
    generator = numpy.random.default_rng(1)
    blocks = generator.integers(0, 256, (5, 3, block_type.block_bytes), dtype=numpy.uint8)
    # Every two bytes may be a scale, and a scale may not be infinite: clear the top exponent bit everywhere but in q.
    scales = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q6_K": [208]}.get(block_type.name, [0, 2])
    for offset in scales:
        blocks[..., offset + 1] &= 0xBF
    rows = torch.from_numpy(blocks.reshape(5, -1))
    expected = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[block_type.name])
    got = decode(rows, block_type.name, block_type.block_bytes)
    assert got.shape == (5, 3 * block_type.block_values)
    assert torch.equal(got, torch.from_numpy(expected)) and got.isfinite().all() and got.std() > 0


@pytest.mark.parametrize("block_type", BLOCK_TYPES.values(), ids=lambda t: t.name)
def test_block_sizes_are_those_of_the_format(block_type: Any) -> None:
    kind = gguf.GGMLQuantizationType[block_type.name]
    assert gguf.GGML_QUANT_SIZES[kind] == (block_type.block_values, block_type.block_bytes)
    assert BLOCK_TYPES[kind.value] is block_type


@pytest.mark.parametrize("family", DENSE_FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_computes_what_its_checkpoint_computes(tmp_path: Path, family: str, tied: bool) -> None:
    config, tensors = draw(family, tie_word_embeddings=tied)
    file = write_gguf(tmp_path / "m.gguf", family, config, tensors)
    folder = write_checkpoint(
        tmp_path / "hf", family, seed=11, dtype=torch.float32, **BLOCKED, tie_word_embeddings=tied
    )
    from_file, from_folder = (load_dense(path, dtype=torch.float32) for path in (file, folder))
    torch.testing.assert_close(logits_of(from_file), logits_of(from_folder), atol=1e-5, rtol=0)
    # The file holds eps in fp32.
    eps = numpy.float32(from_folder.config.rms_norm_eps).item()
    assert from_file.config == replace(from_folder.config, rms_norm_eps=eps)


@pytest.mark.parametrize("type_name", WRITABLE)
def test_every_type_is_read_as_it_is_stored(tmp_path: Path, type_name: str) -> None:
    config, tensors = draw("llama", tie_word_embeddings=False)
    file = write_gguf(tmp_path / "m.gguf", "llama", config, tensors, lambda name: type_name)
    stored = {n: as_stored(t, type_name) if t.dim() == 2 else t for n, t in tensors.items()}
    folder = write_checkpoint(tmp_path / "hf", "llama", seed=11, **BLOCKED, tie_word_embeddings=False)
    for shard in folder.glob("*.safetensors*"):
        shard.unlink()
    save_file(stored, folder / "model.safetensors")
    from_file, from_folder = (load_model(path, dtype=torch.float32) for path in (file, folder))
    torch.testing.assert_close(logits_of(from_file), logits_of(from_folder), atol=1e-5, rtol=0)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1"])
def test_four_bit_blocks_become_int4_without_requantising(tmp_path: Path, type_name: str) -> None:
    config, tensors = draw("llama", tie_word_embeddings=False)
    file = write_gguf(tmp_path / "m.gguf", "llama", config, tensors, lambda name: type_name)
    exact = load_dense(file, dtype=torch.float32)
    for model in (load_dense(file), load_dense(file, weights_dtype="int4")):
        (mixer, feed_forward), (exact_mixer, exact_feed_forward) = model.layers[1], exact.layers[1]
        pairs = [
            (mixer.qkv_proj, exact_mixer.qkv_proj),
            (mixer.o_proj, exact_mixer.o_proj),
            (feed_forward.gate_up, exact_feed_forward.gate_up),
            (model.lm_head, exact.lm_head),
        ]
        for packed, weight in pairs:
            assert isinstance(packed, PackedWeight) and packed.kind == "int4"
            # Tiles keep scale and minimum, otherwise they have bf16's 8 bits; the integers are the file's.
            error = (packed.dequantise() - weight).abs().max() / weight.abs().max()
            assert error < (2**-8 if packed.tiles is None else 1e-6)
        assert set(model.report.bytes_by_format) == {"int4", "bf16"}
        assert model.report.packing_error["int4"] < 0.01
    requantised = load_dense(file, weights_dtype="int8")
    assert set(requantised.report.bytes_by_format) == {"int8", "bf16"}


def test_types_of_more_bits_keep_their_values_by_default(tmp_path: Path) -> None:
    config, tensors = draw("qwen2", tie_word_embeddings=True)
    # As in Q4_K_M files: v has more bits than q and k, and the three are one packed map.
    types = {"attn_v": "Q8_0", "ffn_down": "Q5_1", "token_embd": "Q8_0"}
    file = write_gguf(
        tmp_path / "m.gguf", "qwen2", config, tensors, lambda name: types.get(name.split(".")[-2], "Q4_0")
    )
    model, exact = load_dense(file), load_dense(file, dtype=torch.float32)
    mixer, feed_forward = model.layers[0]
    assert isinstance(mixer.o_proj, PackedWeight) and mixer.o_proj.kind == "int4"
    for weight, reference in (
        (mixer.qkv_proj, exact.layers[0][0].qkv_proj),
        (feed_forward.down, exact.layers[0][1].down),
        (model.lm_head, exact.lm_head),
    ):
        dense = weight.dequantise() if isinstance(weight, PackedWeight) else weight.float()
        if isinstance(weight, PackedWeight) and weight.tiles is not None:
            assert weight.kind == "int8" and model.report.packing_error["int8"] < 0.01
            assert (dense - reference).norm() < 0.01 * reference.norm()
        else:
            assert not isinstance(weight, PackedWeight) or weight.kind == "fp16"
            torch.testing.assert_close(dense, reference, atol=0, rtol=2**-8)
    requantised = load_dense(file, weights_dtype="int4")
    assert requantised.report.packing_error["int4"] > 0.02
    for packed in (load_dense(file), requantised):
        assert ((logits_of(packed) - logits_of(exact)).norm() / logits_of(exact).norm()).item() < 0.2


def test_a_tied_matrix_stored_twice_is_recognised_and_the_better_copy_used(tmp_path: Path) -> None:
    config, tensors = draw("qwen2", tie_word_embeddings=False)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    types = {"output": "Q8_0", "token_embd": "Q5_0"}
    file = write_gguf(tmp_path / "m.gguf", "qwen2", config, tensors, lambda name: types.get(name.split(".")[-2], "F32"))
    model = load_dense(file, dtype=torch.float32)
    assert model.config.tie_word_embeddings and model.lm_head is model.embed_tokens
    assert torch.equal(model.embed_tokens, as_stored(tensors["lm_head.weight"], "Q8_0"))
    file = write_gguf(tmp_path / "two.gguf", "qwen2", *draw("qwen2", tie_word_embeddings=False))
    assert not load_dense(file, dtype=torch.float32).config.tie_word_embeddings


def test_yarn_keys_mean_what_rope_scaling_means(tmp_path: Path) -> None:
    keys = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 256,
        "qwen2.rope.scaling.finetuned": True,
    }
    model = load_dense(write_gguf(tmp_path / "m.gguf", "qwen2", *draw("qwen2"), keys=keys), dtype=torch.float32)
    assert model.config.rope_scaling == YarnScaling(factor=4.0, original_max_position_embeddings=256)


def llama3_divisors(dim: int, theta: float, factor: float) -> torch.Tensor:
    """What convert_hf_to_gguf.py writes for Llama 3.1."""
    divisors = []
    for i in range(0, dim, 2):
        wavelength = 2 * numpy.pi * theta ** (i / dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(divisors, dtype=torch.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path, factor: float) -> None:
    config, tensors = draw("llama", rope_theta=500000.0)
    divisors = llama3_divisors(16, 500000.0, factor)
    assert ((divisors > 1.01) & (divisors < factor - 0.01)).any()
    file = write_gguf(tmp_path / "m.gguf", "llama", config, tensors, extra={"rope_freqs.weight": divisors})
    assert load_dense(file, dtype=torch.float32).config.rope_scaling == Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    other = write_gguf(tmp_path / "o.gguf", "llama", config, tensors, extra={"rope_freqs.weight": divisors.sqrt()})
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight"):
        load_model(other)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "gemma3"}, r"gemma3.*llama, qwen2, qwen3"),
        ({"llama.attention.sliding_window": 512}, r"unknown keys: llama\.attention\.sliding_window"),
        ({"llama.logit_scale": 0.5}, r"llama\.logit_scale"),
        ({"llama.expert_count": 8}, r"llama\.expert_count is 8"),
        ({"llama.rope.dimension_count": 8}, r"llama\.rope\.dimension_count is 8"),
        ({"llama.attention.key_length": 16, "llama.attention.value_length": 8}, r"value_length is 8"),
        ({"llama.rope.scaling.type": "linear"}, r"rope\.scaling\.type is 'linear'"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 0.5}, "attn_factor 0.5"),
        ({"adapter.type": "lora"}, r"adapter\.type"),
        ({"split.count": 3}, r"split\.count is 3"),
    ],
)
def test_what_would_compute_something_else_is_refused_by_name(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", *draw("llama"), keys=keys)
    with pytest.raises(UnsupportedError, match=message):
        load_model(file)


def test_provenance_keys_are_ignored(tmp_path: Path) -> None:
    keys = {"general.author": "somebody", "quantize.imatrix.dataset": "text", "tokenizer.ggml.pre": "smollm"}
    load_model(write_gguf(tmp_path / "m.gguf", "llama", *draw("llama"), keys=keys))


def test_a_type_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", *draw("llama"))
    data = file.read_bytes()
    # The type follows the axes of the tensor's entry.
    at = data.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 2 * 8
    file.write_bytes(data[:at] + struct.pack("<I", 20) + data[at + 4 :])
    with pytest.raises(UnsupportedError, match=r"blk\.0\.attn_q\.weight is IQ4_NL; what is read: F32.*Q4_K"):
        load_model(file)


def test_missing_and_unknown_tensors_are_listed(tmp_path: Path) -> None:
    config, tensors = draw("llama")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    file = write_gguf(tmp_path / "m.gguf", "llama", config, tensors, extra={"blk.0.attn_q.bias": torch.zeros(64)})
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj.*1 unknown: .*q_proj\.bias"):
        load_model(file)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.05, 0.5, 0.999])
def test_a_truncated_file_is_a_load_error(tmp_path: Path, share: float) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", *draw("llama"))
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"m\.gguf.*(incomplete download|not a GGUF file)"):
        load_model(file)


def test_a_damaged_file_raises_nothing_but_load_errors(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", *draw("llama"))
    data = file.read_bytes()
    generator = numpy.random.default_rng(3)
    for _ in range(60):
        broken = bytearray(data)
        for at in generator.integers(4, 2000, 3):
            broken[at] ^= int(generator.integers(1, 256))
        file.write_bytes(broken)
        # Some damage lies in names and numbers that nothing contradicts.
        with suppress(CheckpointError, UnsupportedError):
            GGUFFile(file)


def test_other_files_are_not_taken_for_gguf(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\3\4 a zip file")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        GGUFFile(tmp_path / "a.gguf")
    with pytest.raises(ModelNotFoundError, match=r"b\.gguf"):
        load_model(tmp_path / "b.gguf")
    (tmp_path / "c.gguf").write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(32))
    with pytest.raises(UnsupportedError, match="big-endian"):
        GGUFFile(tmp_path / "c.gguf")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer.ggml.tokens": ["a", "b", "a", *(f"t{i}" for i in range(173))]}, "1 tokens .* first is 'a'"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "add_bos_token is true.*bos"),
        ({"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": None}, "add_eos_token is true.*eos"),
        ({"tokenizer.ggml.eos_token_id": 176}, "eos_token_id is 176, but there are 176 tokens"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_a_load_error(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", *draw("llama"), keys=keys)
    with pytest.raises(CheckpointError, match=message):
        load_model(file)


def test_metadata_has_every_kind_of_value(tmp_path: Path) -> None:
    keys = {"general.name": "Ünïcode", "general.tags": ["a", "é"], "tokenizer.ggml.scores": [0.5, -1.0]}
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", *draw("llama"), keys=dict(keys)))
    assert {key: file.metadata[key] for key in keys} == keys
    assert file.metadata["tokenizer.ggml.add_bos_token"] is False
    assert file.metadata["llama.block_count"] == 3
    reader = gguf.GGUFReader(file.path)
    assert {t.name: (tuple(reversed(t.shape.tolist())), t.n_bytes) for t in reader.tensors} == {
        name: (tensor.shape, tensor.num_bytes) for name, tensor in file.tensors.items()
    }
    assert all(t.data_offset == file.tensors[t.name].offset for t in reader.tensors)
