"""Architectures by name, and `load_model`: from a path or a config to a model with its weights."""

import json
import zlib
from pathlib import Path
from typing import Any, Literal

import torch

from soloist.errors import CheckpointError, ModelNotFoundError, UnsupportedError, UsageError
from soloist.kernels.allreduce import ALONE, TensorParallel
from soloist.models.bailing_moe_v3 import BailingMoeV3ForCausalLM
from soloist.models.causal_lm import CausalLM
from soloist.models.footprint import CountingSource
from soloist.models.gguf import GGUFFile
from soloist.models.gguf_source import GGUFSource, config_json, shapes_by_name
from soloist.models.kimi_linear import KimiLinearForCausalLM
from soloist.models.llama import LlamaForCausalLM
from soloist.models.loader import (
    LoadingSource,
    Progress,
    RandomSource,
    SafetensorsSource,
    WeightsDtype,
    check_num_ranks,
    check_tensors,
    check_weights_fit,
    choose_placement,
)
from soloist.models.qwen2 import Qwen2ForCausalLM
from soloist.models.qwen3 import Qwen3ForCausalLM
from soloist.models.safetensors import PICKLE_SUFFIXES, SafetensorsFolder
from soloist.models.weights import RecordingSource

# By `architectures[0]` of config.json.
MODELS: dict[str, type[CausalLM]] = {
    model.architecture: model
    for model in (
        LlamaForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        BailingMoeV3ForCausalLM,
        KimiLinearForCausalLM,
    )
}
# Keys of config.json that say the weights are quantised.
QUANTIZATION_KEYS = ("quantization_config", "compression_config")


def find_model_class(config: dict[str, Any]) -> type[CausalLM]:
    """Choose the class that implements a config.

    Raises:
        UnsupportedError: the architecture is not implemented, or the weights are quantised.
    """
    given = config.get("architectures") or [None]
    if given[0] not in MODELS:
        raise UnsupportedError(
            f"config.json: architectures is {config.get('architectures')!r}; what works: {', '.join(MODELS)}"
        )
    for key in QUANTIZATION_KEYS:
        if config.get(key):
            raise UnsupportedError(
                f"config.json: {key} (method {config[key].get('quant_method')!r}): quantised safetensors are not read;"
                " what works is the unquantised checkpoint, or a GGUF file"
            )
    return MODELS[given[0]]


def read_config(model: Path | GGUFFile) -> dict[str, Any]:
    """Read a model's config, in the words of `config.json`.

    Args:
        model: a folder with a config.json, or an open GGUF file.

    Raises:
        CheckpointError: the folder has no config, or a damaged one.
        UnsupportedError: a GGUF file says something that is not implemented.
    """
    if isinstance(model, GGUFFile):
        return config_json(model)
    path = model / "config.json"
    if not path.is_file():
        ggufs = sorted(file.name for file in model.glob("*.gguf"))
        hint = f"give the path of {' or '.join(ggufs)} itself" if ggufs else "incomplete download?"
        raise CheckpointError(f"{model} has no config.json: {hint}")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}): damaged file") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object: damaged file")
    return config


def open_model(model: Path) -> Path | GGUFFile:
    """Tell a folder from a GGUF file, which is opened.

    Raises:
        ModelNotFoundError: the path leads nowhere.
        UnsupportedError: it leads to another kind of file.
        CheckpointError: the GGUF file is damaged.
    """
    if model.is_dir():
        return model
    if not model.is_file():
        raise ModelNotFoundError(f"{model}: no such folder or file")
    if model.suffix == ".safetensors":
        raise UnsupportedError(f"{model}: give the folder, whose config.json says what the tensors mean")
    if model.suffix in PICKLE_SUFFIXES:
        raise UnsupportedError(f"{model} is a pickle, which can run code; what is read: safetensors, GGUF")
    return GGUFFile(model)


def load_model(
    model: Path | dict[str, Any],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    weights: Literal["file", "random"] = "file",
    seed: int = 0,
    weights_dtype: WeightsDtype | None = None,
    progress: Progress | None = None,
    group: TensorParallel = ALONE,
) -> CausalLM:
    """Make a model and fill in its weights.

    What was loaded, and what packing cost, is in the model's `report`; what a step of it reads, in its `footprint`.

    Args:
        model: a folder with config.json and safetensors, a GGUF file, or a parsed config.json (random weights only).
        device: where the model runs; what is to choose one is `loading.choose_device`.
        dtype: of activations, caches and dense weights: fp32, bf16 or fp16.
        weights: from the model's files, or random, so that speed can be measured without a checkpoint.
        seed: of random weights.
        weights_dtype: how linear maps are held. None: in `dtype`; on a CPU with bf16 activations in a form that keeps
            the checkpoint's values: int4 for maps that are 4-bit in a GGUF file, where tiles can be had int8 for maps
            that it quantises to more, which costs about 0.7 %, and `DEFAULT_PACKING` for the rest. "int8" and "int4"
            requantise what is not already so. One form per run: every pass reads the same weights.
        progress: called while the weights are read.
        group: the ranks that share the model; this one reads and holds its part only.

    Raises:
        ModelNotFoundError: the path leads nowhere.
        UnsupportedError: architecture, key, format or combination that is not implemented, by name.
        CheckpointError: files or tensors are missing, left over, misshaped or damaged.
        DoesNotFitError: the weights are larger than the free memory.
    """
    placement = choose_placement(torch.device(device), dtype, weights_dtype, group)
    opened = model if isinstance(model, dict) else open_model(model)
    given = opened if isinstance(opened, dict) else read_config(opened)
    model_class = find_model_class(given)
    config = model_class.config_class.from_dict(given)
    check_num_ranks(model_class, config, group.size)
    asked = RecordingSource(dtype, group)
    blueprint = model_class(config, asked)
    source: LoadingSource
    if weights == "random":
        source = RandomSource(seed, placement)
    elif isinstance(opened, GGUFFile):
        check_tensors(model_class, config, asked, shapes_by_name(opened), opened.path)
        source = GGUFSource(opened, placement, progress)
    elif isinstance(opened, Path):
        folder = SafetensorsFolder(opened)
        check_tensors(model_class, config, asked, folder.shapes, opened)
        source = SafetensorsSource(folder, placement, progress)
    else:
        raise UsageError("a config alone has no weights: give a folder or a GGUF file, or take random weights")
    check_weights_fit(asked, placement)
    counted = CountingSource(source)
    loaded = model_class(config, counted)
    loaded.report = source.report()
    if group.size > 1:
        loaded.report.checksums["config.json"] = zlib.crc32(repr(config).encode())
    loaded.footprint = counted.footprint(blueprint.make_cache(1), config, num_layers=config.num_hidden_layers)
    return loaded
