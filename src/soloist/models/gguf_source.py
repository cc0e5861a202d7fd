"""Filling a dense model from a GGUF file: its metadata in the words of `config.json`, its tensors under their names.

Owns the translation of keys and names, and the way from quantised blocks to the form weights are held in. The container
is read by `gguf`, the blocks are decoded by `gguf_blocks`.
"""

import re
from dataclasses import asdict
from typing import Any

import torch

from soloist.errors import CheckpointError, UnsupportedError
from soloist.kernels.packed import INT4_GROUP, can_pack, can_tile, pack_int4
from soloist.kernels.rotary import Llama3Scaling, make_rotary_table
from soloist.models.gguf import BlockType, GGUFFile
from soloist.models.gguf_blocks import FLOAT_TYPES, FOUR_BIT_TYPES, decode, decode_groups
from soloist.models.loader import LoadingSource, Placement, Progress, sampled_rows, stacked_shape
from soloist.models.weights import Init, Part, Weight

# general.architecture -> architectures[0].
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Metadata that no engine needs for a forward pass: provenance, and the vocabulary, which the tokenizer reads.
HARMLESS_PREFIXES = ("general.", "tokenizer.", "quantize.", "split.", "mradermacher.")

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NAMES = {"token_embd.weight": _EMBEDDING, "output_norm.weight": "model.norm.weight", "output.weight": _HEAD}
# Llama 3's rotary scaling is not in the metadata: exporters store what the frequencies are divided by.
_ROPE_FACTORS = "rope_freqs.weight"
# Of every Llama 3.x that has it; `factor` differs (8, 32) and is the largest divisor.
_LLAMA3_LAW: dict[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Embedding and head are two quantisations of one matrix if their cosine is above this on sampled rows. Measured on
# Qwen2.5-Coder: 0.999 and 0.997; independent matrices are near 0.
MIN_TIED_COSINE = 0.98
DEFAULT_THETA = 10000.0
# How faithfully a type keeps a matrix, best first; of a tied matrix stored twice the better copy is used for both.
_FIDELITY = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0")
# Rows decoded at once hold about this many values, so that what lies between stays in the processor's cache.
CHUNK_VALUES = 2**19


def checkpoint_name(gguf_name: str) -> str:
    """Translate a GGUF tensor name to that of the Hugging Face checkpoint; an unknown name stays as it is."""
    if match := _BLOCK.fullmatch(gguf_name):
        layer, name, kind = match.groups()
        if name in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[name]}.{kind}"
    return _NAMES.get(gguf_name, gguf_name)


class _Keys:
    """Takes the keys of one architecture from a file's metadata one by one."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file, self._prefix = file, f"{architecture}."
        self._left = {k: v for k, v in file.metadata.items() if not k.startswith(HARMLESS_PREFIXES)}

    def take(self, key: str, default: Any = None) -> Any:
        value = self._left.pop(self._prefix + key, default)
        if value is None:
            raise CheckpointError(f"{self._file.path}: the key {self._prefix}{key} is missing: damaged file")
        return value

    def require(self, key: str, allowed: Any) -> None:
        value = self._left.pop(self._prefix + key, allowed)
        if value != allowed:
            raise UnsupportedError(f"{self._file.path}: {self._prefix}{key} is {value!r}; what works is {allowed!r}")

    def finish(self) -> None:
        if self._left:
            raise UnsupportedError(
                f"{self._file.path}: unknown keys: {', '.join(sorted(self._left))}; they may change the numerics"
            )


def config_json(file: GGUFFile) -> dict[str, Any]:
    """Say in the words of `config.json` what a file's metadata says.

    Raises:
        UnsupportedError: the architecture, a key or a value is not implemented.
        CheckpointError: a key is missing.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path}: general.architecture is {architecture!r}; what works in GGUF: {', '.join(ARCHITECTURES)}"
        )
    keys = _Keys(file, architecture)
    num_heads, hidden_size = keys.take("attention.head_count"), keys.take("embedding_length")
    head_dim = keys.take("attention.key_length", hidden_size // num_heads)
    keys.require("attention.value_length", head_dim)
    keys.require("rope.dimension_count", head_dim)
    keys.require("attention.causal", True)
    keys.require("expert_count", 0)
    keys.require("expert_used_count", 0)
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise CheckpointError(f"{file.path}: the tensor token_embd.weight is missing: damaged file")
    keys.require("vocab_size", table.shape[0])
    eos_token_id = file.metadata.get("tokenizer.ggml.eos_token_id")
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": table.shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": keys.take("block_count"),
        "max_position_embeddings": keys.take("context_length"),
        "eos_token_id": eos_token_id,
        "intermediate_size": keys.take("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.take("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.take("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.take("rope.freq_base", DEFAULT_THETA),
        "rope_scaling": _rope_scaling(file, keys),
        "tie_word_embeddings": is_tied(file),
    }
    keys.finish()
    return config


def _rope_scaling(file: GGUFFile, keys: _Keys) -> dict[str, Any] | None:
    """Say how a longer context was reached, in the words of `rope_scaling`."""
    kind = keys.take("rope.scaling.type", "none")
    factor = keys.take("rope.scaling.factor", 1.0)
    # Training history: a finetuned extension is computed like another one.
    keys.take("rope.scaling.finetuned", False)
    original = keys.take("rope.scaling.original_context_length", 0)
    attention_factor = keys.take("rope.scaling.attn_factor", 1.0)
    if _ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise UnsupportedError(f"{file.path}: has {_ROPE_FACTORS} besides rope.scaling.type {kind!r}")
        return _llama3_scaling(file)
    if kind == "none":
        return None
    if kind != "yarn":
        raise UnsupportedError(f"{file.path}: rope.scaling.type is {kind!r}; what works: none, yarn")
    if attention_factor != 1.0 or not original:
        raise UnsupportedError(
            f"{file.path}: yarn with rope.scaling.attn_factor {attention_factor} and original_context_length"
            f" {original}; what works is a factor of 1 and a known length"
        )
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def _llama3_scaling(file: GGUFFile) -> dict[str, Any]:
    """Recognise Llama 3's scaling by what it divides the frequencies by."""
    divisors = _decode_all(file, _ROPE_FACTORS).flatten().float()  # (P/2)
    scaling = Llama3Scaling(factor=divisors.max().item(), **_LLAMA3_LAW)
    theta = file.metadata.get("llama.rope.freq_base", DEFAULT_THETA)
    plain, scaled = (make_rotary_table(2 * len(divisors), theta, 2, s) for s in (None, scaling))
    # Position 1 is turned by the frequency itself.
    expected = torch.atan2(plain.sin[1], plain.cos[1]) / torch.atan2(scaled.sin[1], scaled.cos[1])  # (P/2)
    if not torch.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedError(f"{file.path}: {_ROPE_FACTORS} does not hold the divisors of Llama 3's scaling")
    return {"rope_type": "llama3"} | asdict(scaling)


def _decode_all(file: GGUFFile, name: str) -> torch.Tensor:
    tensor = file.tensors[name]
    return decode(file.blocks(name), tensor.type.name, tensor.type.block_bytes)


def is_tied(file: GGUFFile) -> bool:
    """Say whether the output head is the token embedding: left out, or stored once more in another quantisation."""
    head, table = file.tensors.get("output.weight"), file.tensors["token_embd.weight"]
    if head is None:
        return True
    if head.shape != table.shape:
        return False
    rows = sampled_rows(head.shape[0])
    a, b = (decode(file.blocks(t.name)[rows], t.type.name, t.type.block_bytes).float() for t in (head, table))
    return torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).item() > MIN_TIED_COSINE


def shapes_by_name(file: GGUFFile) -> dict[str, tuple[int, ...]]:
    """List what a file holds in the names of the Hugging Face checkpoint, without what `config_json` has read."""
    return {checkpoint_name(name): t.shape for name, t in file.tensors.items() if name != _ROPE_FACTORS}


class GGUFSource(LoadingSource):
    """Decodes tensors of a GGUF file straight into their places; 4-bit blocks become packed int4 without requantising.

    Args:
        file: the open file, whose tensors `check_tensors` has accepted.
        placement: where they go, and in what form.
        progress: called behind each part.
    """

    def __init__(self, file: GGUFFile, placement: Placement, progress: Progress | None = None) -> None:
        names = {checkpoint_name(name): name for name in file.tensors}
        if _HEAD in names and is_tied(file):
            # One of two copies is used for both: the one that was quantised less.
            names[_EMBEDDING] = min(
                (names.pop(_HEAD), names[_EMBEDDING]), key=lambda name: _FIDELITY.index(file.tensors[name].type.name)
            )
        super().__init__(placement, sum(file.tensors[name].num_bytes for name in names.values()), progress)
        self._file, self._names = file, names
        self._keeps_four_bits, self._repacking = placement.keeps_four_bits, placement.repacking
        # Llama's exporters reorder the rows of these maps from half-split to interleaved rotary pairs.
        self._reordered_heads: dict[str, int] = {}
        if file.metadata["general.architecture"] == "llama":
            num_heads = file.metadata["llama.attention.head_count"]
            num_kv_heads = file.metadata.get("llama.attention.head_count_kv", num_heads)
            self._reordered_heads = {"q_proj.weight": num_heads, "k_proj.weight": num_kv_heads}

    def _blocks(self, name: str) -> tuple[torch.Tensor, BlockType]:
        """Give a tensor's rows of raw blocks, (rows, row bytes) uint8, in the order of the Hugging Face checkpoint."""
        tensor = self._file.tensors[self._names[name]]
        blocks = self._file.blocks(tensor.name)
        for suffix, num_heads in self._reordered_heads.items():
            if name.endswith(suffix):
                blocks = blocks.view(num_heads, -1, 2, blocks.shape[1]).transpose(1, 2).reshape(blocks.shape)
        return blocks, tensor.type

    def _own(self, part: Part, blocks: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Give the rows of blocks that hold what this rank has of a part, and which of their values those are."""
        if part.split is None or self.group.size == 1:
            return blocks, slice(None)
        start, end, _ = part.split.place(part.shape[part.split.axis], self.group)
        # A vector is one row.
        is_rows = part.split.axis == 0 and len(part.shape) > 1
        return (blocks[start:end], slice(None)) if is_rows else (blocks, slice(start, end))

    def _fill(self, part: Part, destination: torch.Tensor, init: Init) -> int:
        all_blocks, block_type = self._blocks(part.name)
        blocks, columns = self._own(part, all_blocks)
        num_rows = max(1, CHUNK_VALUES // part.shape[-1])
        rows = destination.view(-1, destination.shape[-1])
        rows[len(blocks) :].zero_()
        # A GPU decodes what it gets as it is in the file: fewer bytes to send, and nothing for the processor to do.
        blocks = blocks.to(destination.device)
        for chunk, place in zip(blocks.split(num_rows), rows[: len(blocks)].split(num_rows), strict=True):
            place.copy_(decode(chunk, block_type.name, block_type.block_bytes)[:, columns])
        return blocks.numel()

    def _types(self, parts: tuple[Part, ...]) -> set[str]:
        return {self._file.tensors[self._names[part.name]].type.name for part in parts}

    def _can_keep_four_bits(self, parts: tuple[Part, ...]) -> bool:
        shape = stacked_shape(parts, self.group)
        return self._keeps_four_bits and self._types(parts) <= set(FOUR_BIT_TYPES) and can_pack("int4", *shape)

    def tied_head(self, part: Part, embedding: torch.Tensor) -> Weight:
        return self.linear(part) if self._can_keep_four_bits((part,)) else super().tied_head(part, embedding)

    def linear(self, *parts: Part) -> Weight:
        if not self._can_keep_four_bits(parts):
            is_quantised = not self._types(parts) & set(FLOAT_TYPES)
            if self._repacking is not None and is_quantised and can_tile(stacked_shape(parts, self.group), self.dtype):
                return self._pack(parts, self._repacking)
            return super().linear(*parts)
        rows, inputs = stacked_shape(parts, self.group)
        # Rows that no token has stay zero.
        codes = torch.zeros((rows, inputs), dtype=torch.uint8)  # (O, I)
        scales, mins = torch.zeros((2, rows, inputs // INT4_GROUP)).unbind()  # (O, I/32) each
        start = 0
        for part in parts:
            all_blocks, block_type = self._blocks(part.name)
            blocks, columns = self._own(part, all_blocks)
            values = decode_groups(blocks, block_type.name, block_type.block_bytes)
            own = slice(start, start + len(blocks))
            codes[own] = values.q.view(len(blocks), -1)[:, columns]
            groups = slice(*(i and i // INT4_GROUP for i in (columns.start, columns.stop)))
            scales[own] = values.scale.view(len(blocks), -1)[:, groups]
            mins[own] = values.minimum.view(len(blocks), -1)[:, groups]
            self._advance(blocks.numel())
            start += part.held_shape(self.group)[0]
        # Where other maps are requantised to 4 bits, what coarse inputs lose does not count.
        is_fine = self.packing != "int4"
        packed = pack_int4(codes, scales, mins, activation_dtype=self.dtype, has_fine_inputs=is_fine)
        sample = sampled_rows(rows)
        q, scale, minimum = codes[sample], scales[sample], mins[sample]
        exact = (q.view(*scale.shape, INT4_GROUP) * scale[..., None] + minimum[..., None]).flatten(1)
        return self._count_packed(packed, pack_int4(q, scale, minimum, activation_dtype=self.dtype), exact)
