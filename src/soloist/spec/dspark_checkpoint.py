"""Loading a DSpark or DFlash draft: its tensors, whatever the layout calls them, and what it shares with its target.

Owns the names of tensors and the comparison with the target's embedding and head; configs are `dspark_layout`'s.
"""

from dataclasses import replace
from pathlib import Path

import torch

from soloist.errors import CheckpointError, UnsupportedError
from soloist.kernels.allreduce import TensorParallel, own_rows_ref
from soloist.kernels.linear import linear
from soloist.kernels.packed import PackedWeight
from soloist.models import read_config
from soloist.models.loader import SafetensorsSource, check_weights_fit, choose_placement, compare_tensors
from soloist.models.safetensors import SafetensorsFolder, StoredTensor
from soloist.models.weights import Part, RecordingSource, Weight
from soloist.spec.dspark import DSpark, check_context_fits, check_num_ranks, make_dspark, num_positions
from soloist.spec.dspark_config import DSparkConfig
from soloist.spec.dspark_layout import is_draft_config, read_draft_config
from soloist.spec.dspark_model import DSparkModel, embedding_part, head_part
from soloist.spec.setup import DrafterSetup

EMBEDDING, HEAD, VOCABULARY_MAP = "embed_tokens.weight", "lm_head.weight", "d2t"
# May be there although nobody asks for them.
IGNORED_TENSORS = (VOCABULARY_MAP, "t2d")
IGNORED_PREFIXES = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.")
# Rows of a table that are compared at a time, and inputs that a packed map is tried with.
COMPARED_ROWS, NUM_PROBES = 4096, 4
# Relative error below which a packed map is its dense one, rounded: int4 has 0.1, an unrelated map more than 1.
MAX_PACKING_ERROR = 0.3


def is_dspark(path: Path) -> bool:
    """Say whether a checkpoint is a folder with a draft of this family, implemented or not."""
    return (path / "config.json").is_file() and is_draft_config(read_config(path))


def load_dspark(setup: DrafterSetup) -> DSpark:
    """Load the draft in the folder `setup.draft_path`.

    Embedding and output head are the target's where the checkpoint has none or has the same, else its own.

    Raises:
        UnsupportedError: config.json says something that is not implemented, or does not fit the target.
        CheckpointError: files or tensors are missing, left over, misshaped or damaged.
        DoesNotFitError: the device has too little memory.
        UsageError: the block does not give as many drafts as are wished for.
    """
    path, target = setup.draft_path, setup.target
    assert path is not None
    config = read_draft_config(read_config(path))
    config.check_target(target.config)
    group, layer_group = target.group, setup.layer_group
    check_num_ranks(config, layer_group)
    check_context_fits(config, setup.max_context_len, target.dtype, target.device, layer_group)
    folder = SafetensorsFolder(path)
    folder.tensors = _network_names(folder.tensors, config)
    target_ids = _read_vocabulary_map(folder, config)
    # What is stored is checked, even if the target's own will do.
    is_reduced = config.draft_vocab_size != config.transformer.vocab_size
    embed_tokens: torch.Tensor | None = None if EMBEDDING in folder.tensors else target.embed_tokens
    lm_head: Weight | None = None if HEAD in folder.tensors or is_reduced else target.lm_head
    stored = RecordingSource(target.dtype)
    DSparkModel(config, stored, 1, embed_tokens=embed_tokens, lm_head=lm_head)
    compare_tensors(stored, folder.shapes, _is_ignored, f"{path} does not hold the draft that its config.json names")
    if embed_tokens is None and _is_same(target.embed_tokens, embedding_part(config), folder, group):
        embed_tokens = target.embed_tokens
    if lm_head is None and not is_reduced and _is_same(target.lm_head, head_part(config), folder, group):
        lm_head = target.lm_head
    placement = choose_placement(target.device, target.dtype, setup.weights_dtype, layer_group)
    asked = RecordingSource(target.dtype, layer_group)
    DSparkModel(config, asked, 1, embed_tokens=embed_tokens, lm_head=lm_head, vocabulary_group=group)
    check_weights_fit(asked, placement)
    model = DSparkModel(
        config,
        SafetensorsSource(folder, placement),
        num_positions(config, setup.max_context_len),
        embed_tokens=embed_tokens,
        lm_head=lm_head,
        target_ids=None if target_ids is None else target_ids.to(target.device),
        vocabulary_group=group,
    )
    mask = torch.tensor([config.mask_token_id], device=target.device)
    # Zeros where the row is another rank's: ranks exchange nothing before all have loaded.
    if not own_rows_ref(mask, model.embed_tokens, group.rank * model.embed_tokens.shape[0]).isfinite().all():
        raise CheckpointError(f"{path}: the embedding of the mask token, {config.mask_token_id}, is not finite")
    return make_dspark(model, setup)


def _is_ignored(name: str) -> bool:
    return name in IGNORED_TENSORS or name.startswith(IGNORED_PREFIXES) or name.endswith("rotary_emb.inv_freq")


def _network_names(stored: dict[str, StoredTensor], config: DSparkConfig) -> dict[str, StoredTensor]:
    """Give tensors DeepSpec's names: without a `model.` in front, and a fused projection as the three it is made of."""
    named: dict[str, StoredTensor] = {}
    t = config.transformer
    rows = {"q": t.num_attention_heads, "k": t.num_key_value_heads, "v": t.num_key_value_heads}
    fused = (sum(rows.values()) * t.head_dim, t.hidden_size)
    for full_name, tensor in stored.items():
        name = full_name.removeprefix("model.")
        parts = {name: tensor}
        if name.endswith("self_attn.qkv_proj.weight") and tensor.shape == fused:
            parts, offset = {}, tensor.offset
            for part, heads in rows.items():
                piece = replace(tensor, shape=(heads * t.head_dim, t.hidden_size), offset=offset)
                parts[name.replace("qkv_proj", f"{part}_proj")] = piece
                offset += piece.num_bytes
        for part, piece in parts.items():
            if part in named:
                raise CheckpointError(f"{part} is there twice: with and without `model.`, or fused and alone")
            named[part] = piece
    return named


def _read_vocabulary_map(folder: SafetensorsFolder, config: DSparkConfig) -> torch.Tensor | None:
    """Read which token each row of the output head stands for; None: its own number."""
    num_rows, num_tokens = config.draft_vocab_size, config.transformer.vocab_size
    if VOCABULARY_MAP not in folder.tensors:
        if num_rows == num_tokens:
            return None
        raise UnsupportedError(
            f"{folder.folder}: the draft knows {num_rows} of {num_tokens} tokens, and its checkpoint has no tensor"
            f" {VOCABULARY_MAP} that says which: export it again with the map inside the safetensors"
        )
    offsets, rows = folder.read(VOCABULARY_MAP), torch.arange(num_rows)
    if offsets.dtype != torch.int64 or offsets.shape != rows.shape:
        raise CheckpointError(
            f"{folder.folder}: {VOCABULARY_MAP} is {offsets.dtype} {list(offsets.shape)}, expected int64 [{num_rows}]"
        )
    target_ids = rows + offsets
    if target_ids[0] < 0 or target_ids[-1] >= num_tokens or bool((target_ids.diff() <= 0).any()):
        raise CheckpointError(
            f"{folder.folder}: {VOCABULARY_MAP} does not name rising tokens of the {num_tokens} that there are"
        )
    return None if torch.equal(target_ids, rows) else target_ids


def _is_same(own: Weight, part: Part, folder: SafetensorsFolder, group: TensorParallel) -> bool:
    """Say whether the target's table or map (N, D) holds the values that a checkpoint stores, rounded as it is.

    A rank compares what it holds. If ranks decide otherwise, both ways give the same values.
    """
    stored = part.held_of(folder.read(part.name), group)
    if not isinstance(own, PackedWeight):
        own = own[: stored.shape[0]]
        blocks = zip(own.split(COMPARED_ROWS), stored.split(COMPARED_ROWS), strict=True)
        return all(torch.equal(ours, theirs.to(ours.device, ours.dtype)) for ours, theirs in blocks)
    # Codes cannot be compared with values, but what they do can.
    probes = torch.randn(NUM_PROBES, stored.shape[1], generator=torch.Generator().manual_seed(0)).to(own.input_dtype)
    wanted = torch.cat([linear(probes.float(), rows.float()) for rows in stored.split(COMPARED_ROWS)], dim=1)
    return bool((linear(probes, own)[:, : stored.shape[0]].float() - wanted).norm() < MAX_PACKING_ERROR * wanted.norm())
