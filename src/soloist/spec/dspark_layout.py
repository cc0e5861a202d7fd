"""The public layouts of a draft's `config.json`, read into the one descriptor.

    DeepSpec      flat config of a Qwen3-shaped draft; Ling's drafts are the same
    SpecForge     the same with the draft's keys nested in `dflash_config`
    speculators   the layers' config nested in `transformer_layer_config`, layer ids one higher, maybe fewer tokens
    z-lab DFlash  no heads of its own, slot 0 predicts nothing

Owns the words of these layouts and the refusal of what they may say besides. A draft cannot make an answer wrong, but a
misread one drafts for nothing and says nothing: `dspark_selftest` finds that.
"""

from dataclasses import fields
from typing import Any, get_args

from soloist.errors import UnsupportedError
from soloist.models.bailing_moe_v3 import FIXED_VALUES, IGNORED_KEYS, BailingMoeV3Config
from soloist.models.config_json import HARMLESS_KEYS as UNREAD_KEYS
from soloist.models.config_json import ConfigReader
from soloist.models.layers import DenseConfig
from soloist.spec.dspark_config import ConfidenceInput, DSparkConfig, MarkovType, spread_layers

LING_ARCHITECTURE = "LingDSparkModel"
DSPARK_ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel", LING_ARCHITECTURE)
DFLASH_ARCHITECTURE = "DFlashDraftModel"
REFUSED_ARCHITECTURES = {
    "Gemma4DSparkModel": "Gemma targets are not implemented",
    "DFlash2DraftModel": "DFlash2 is another algorithm, with convolutions and a selector",
    "DominoDraftModel": "Domino is another algorithm, with a recurrent correction head",
}
SPECULATORS_KEY = "speculators_model_type"
# Sub-configs whose keys count as if they stood at the top, and a prefix that means nothing.
NESTED_KEYS = ("dflash_config", "dspark_config", "text_config")
PREFIX = "dspark_"
# About training only, or said again by other keys. Heads are stored or borrowed, so nothing is tied.
HARMLESS_KEYS = (
    *UNREAD_KEYS,
    "ce_loss_alpha",
    "draft_model_type",
    "l1_loss_alpha",
    "loss_decay_gamma",
    "max_anchors",
    "max_window_layers",
    "model_type",
    "num_anchors",
    "speculative_algorithm",
    "speculators_version",
    "target_model_type",
    "target_text_model_type",
    "tie_word_embeddings",
    "use_sliding_window",
)
# Keys that would change the numerics, with the values that are implemented.
FIXED_KEYS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_mode": ("gqa", "mha"),
    "final_logit_softcapping": (None,),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "projector_type": ("dspark", "dflash", None),
}
# Different projects' words for the same.
SLOT0_KEYS = ("sample_from_anchor", "query_zero_predicts_next", "shift_label")
CAUSAL_KEYS = ("is_causal", "causal")
CONFIDENCE_KEYS = ("enable_confidence_head", "use_confidence_head")


def is_draft_config(config_json: dict[str, Any]) -> bool:
    """Say whether a `config.json` is of this family, implemented or refused; anything else is a model."""
    known = (*DSPARK_ARCHITECTURES, DFLASH_ARCHITECTURE, *REFUSED_ARCHITECTURES)
    return _architecture(config_json) in known or SPECULATORS_KEY in config_json or "dflash_config" in config_json


def read_draft_config(config_json: dict[str, Any]) -> DSparkConfig:
    """Read the `config.json` of a draft in any of the layouts.

    Raises:
        UnsupportedError: a key is missing, unknown, contradicts another, or has a value that is not implemented.
    """
    if SPECULATORS_KEY in config_json:
        return _read_flat(_flatten_speculators(config_json), is_dspark=config_json[SPECULATORS_KEY] == "dspark")
    named = _architecture(config_json)
    if named in REFUSED_ARCHITECTURES:
        raise UnsupportedError(f"config.json: {named}: {REFUSED_ARCHITECTURES[named]}")
    flat = _flatten(config_json)
    is_dspark = named in DSPARK_ARCHITECTURES or flat.get("projector_type") == "dspark"
    if not is_dspark and named != DFLASH_ARCHITECTURE:
        known = ", ".join((*DSPARK_ARCHITECTURES, DFLASH_ARCHITECTURE))
        raise UnsupportedError(f"config.json: architectures names {named!r}; the drafts that work are {known}")
    return _read_flat(flat, is_dspark=is_dspark)


def _architecture(config_json: dict[str, Any]) -> str:
    """Give the first architecture named, or an empty word."""
    return next(iter(config_json.get("architectures") or ()), "")


def _put(flat: dict[str, Any], key: str, value: Any) -> None:
    """Add a key that may have been given before, with the same value if it matters."""
    if flat.get(key) is None:
        flat[key] = value
    elif value is not None and flat[key] != value and key not in HARMLESS_KEYS:
        raise UnsupportedError(f"config.json: {key} is given twice, as {flat[key]!r} and as {value!r}")


def _flatten(config_json: dict[str, Any]) -> dict[str, Any]:
    """Bring nested and prefixed keys to the top."""
    flat: dict[str, Any] = {}
    for key, value in config_json.items():
        if key in NESTED_KEYS:
            for name, inner in (value or {}).items():
                _put(flat, name, inner)
        else:
            _put(flat, key.removeprefix(PREFIX), value)
    return flat


def _flatten_speculators(config_json: dict[str, Any]) -> dict[str, Any]:
    """Bring a config of the speculators layout into the words of the others."""
    own = dict(config_json)
    kind, layers = own.pop(SPECULATORS_KEY), own.pop("transformer_layer_config", None)
    if kind not in ("dspark", "dflash"):
        raise UnsupportedError(f"config.json: {SPECULATORS_KEY} is {kind!r}; what works: dspark, dflash")
    if not isinstance(layers, dict):
        raise UnsupportedError("config.json: transformer_layer_config is missing, and a speculators draft needs it")
    flat = dict(layers)
    flat["architectures"] = [own.pop("architectures", [kind])[0]]
    # A capture point of theirs is the input of that layer, so the output of the one before.
    flat["target_layer_ids"] = [layer - 1 for layer in own.pop("aux_hidden_state_layer_ids", None) or []]
    if own.pop("sliding_window_non_causal", False):
        flat["is_causal"] = False
    own.setdefault("sample_from_anchor", _samples_from_anchor(own.pop("speculators_config", None) or {}, own, kind))
    if kind == "dspark":
        own = {"markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True} | own
    for key, value in own.items():
        _put(flat, key, value)
    return flat


def _samples_from_anchor(plan: dict[str, Any], own: dict[str, Any], kind: str) -> bool:
    """Tell the slot convention of a draft that does not name it by its drafts per block: B, or one less."""
    counts = {method.get("speculative_tokens") for method in plan.get("proposal_methods") or []}
    block_size = own.get("block_size", 0)
    return counts == {block_size} if counts in ({block_size}, {block_size - 1}) else kind == "dspark"


def _take_flag(reader: ConfigReader, keys: tuple[str, ...]) -> bool | None:
    """Take a flag that has several names; None: nobody gives it."""
    given = {key: value for key in keys if (value := reader.take_optional(key, bool)) is not None}
    if len(set(given.values())) > 1:
        raise UnsupportedError(f"config.json: {' and '.join(given)} contradict each other")
    return next(iter(given.values()), None)


def _read_flat(flat: dict[str, Any], *, is_dspark: bool) -> DSparkConfig:
    """Read a config whose keys all stand at the top."""
    reader = ConfigReader(flat, flat["architectures"][0])
    for key, allowed in FIXED_KEYS.items():
        reader.require(key, *allowed)
    reader.ignore(*HARMLESS_KEYS)
    if flat["architectures"][0] == LING_ARCHITECTURE:
        _ignore_ling(reader)
    slot0_predicts = _take_flag(reader, SLOT0_KEYS)
    block_size, mask_token_id = reader.take("block_size", int), reader.take("mask_token_id", int)
    num_layers = flat.get("num_hidden_layers", 0)
    target_layer_ids, num_target_layers = _take_layers(reader, num_layers)
    layer_windows, layer_is_causal = _take_attention(reader, num_layers)
    markov_rank = reader.take("markov_rank", int, 0)
    markov_head_type = _take_markov_type(reader, markov_rank)
    confidence_input = _take_confidence(reader, has_markov=markov_rank > 0)
    temperatures = reader.take_optional("confidence_temperatures", list)
    is_last_layer_raw = reader.take_optional("last_layer_is_raw", bool) or False
    sizes = {key: reader.take_optional(key, int) for key in ("target_hidden_size", "draft_vocab_size")}
    transformer = DenseConfig.read(reader, default_head_dim=128)
    if sizes["target_hidden_size"] not in (None, transformer.hidden_size):
        raise UnsupportedError(
            f"config.json: target_hidden_size is {sizes['target_hidden_size']}, hidden_size {transformer.hidden_size};"
            " a draft that borrows the target's embedding has its size"
        )
    return DSparkConfig(
        transformer=transformer,
        draft_vocab_size=sizes["draft_vocab_size"] or transformer.vocab_size,
        block_size=block_size,
        slot0_predicts=is_dspark if slot0_predicts is None else slot0_predicts,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids,
        num_target_layers=num_target_layers,
        layer_windows=layer_windows,
        layer_is_causal=layer_is_causal,
        markov_head_type=markov_head_type,
        markov_rank=markov_rank,
        confidence_input=confidence_input,
        confidence_temperatures=None if temperatures is None else tuple(float(t) for t in temperatures),
        is_last_layer_raw=is_last_layer_raw,
    )


def _ignore_ling(reader: ConfigReader) -> None:
    """Drop what DeepSpec copies from the target's config and a Qwen3-shaped draft does not use."""
    ours = {field.name for field in fields(DenseConfig)} | {"hidden_act"}
    theirs = {field.name for field in fields(BailingMoeV3Config)} | FIXED_VALUES.keys()
    reader.ignore(*(theirs - ours), *IGNORED_KEYS, "qk_head_dim", "rotary_dim", "use_kda_lora")


def _take_layers(reader: ConfigReader, num_layers: int) -> tuple[tuple[int, ...], int | None]:
    """Take the target layers that are read, and the target's depth."""
    num_target_layers = reader.take_optional("num_target_layers", int)
    ids = reader.take_optional("target_layer_ids", list)
    if not ids and num_target_layers is not None:
        # The first DFlash drafts leave the choice to a formula.
        return spread_layers(num_target_layers, num_layers), num_target_layers
    if not ids or not all(type(layer) is int for layer in ids):
        raise UnsupportedError(f"config.json: target_layer_ids is {ids!r}, expected a list of layers")
    return tuple(ids), num_target_layers


def _take_attention(reader: ConfigReader, num_layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Take each layer's window, and whether it is causal inside a block: with a window, unless a key says otherwise."""
    window, is_causal = reader.take_optional("sliding_window", int), _take_flag(reader, CAUSAL_KEYS)
    kinds = reader.take("layer_types", list, ["full_attention"] * num_layers)
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise UnsupportedError(f"config.json: layer_types is {kinds}; known are full_attention and sliding_attention")
    has_window = [kind == "sliding_attention" for kind in kinds]
    if any(has_window) and window is None:
        raise UnsupportedError("config.json: layer_types names sliding_attention, but there is no sliding_window")
    windows = tuple(window if has else None for has in has_window)
    return windows, tuple(has if is_causal is None else is_causal for has in has_window)


def _take_markov_type(reader: ConfigReader, markov_rank: int) -> MarkovType | None:
    """Take the kind of Markov head; a rank of 0 means none, whatever its kind."""
    if markov_rank == 0:
        reader.ignore("markov_head_type")
        return None
    named = reader.take("markov_head_type", str).lower()
    kind: MarkovType
    for kind in get_args(MarkovType):
        if kind == named:
            return kind
    raise UnsupportedError(f"config.json: markov_head_type is {named!r}; what works: {', '.join(get_args(MarkovType))}")


def _take_confidence(reader: ConfigReader, *, has_markov: bool) -> ConfidenceInput | None:
    """Take what the confidence head looks at. Without a flag, a head whose loss had a weight is there."""
    is_enabled, weight = _take_flag(reader, CONFIDENCE_KEYS), reader.take_optional("confidence_head_alpha", float)
    with_markov = reader.take("confidence_head_with_markov", bool, has_markov)
    if not (bool(weight) if is_enabled is None else is_enabled):
        return None
    return "hidden_and_markov" if with_markov else "hidden"
