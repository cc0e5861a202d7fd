"""Reading a checkpoint's `config.json` so that no key is dropped silently.

Owns the refusal of keys: each architecture takes the keys it implements, demands the values it was written for, names
the keys that cannot change a logit, and everything left over is refused by name.
"""

from dataclasses import fields
from typing import Any, TypeVar

from soloist.errors import UnsupportedError
from soloist.kernels.rotary import Llama3Scaling, RopeScaling, YarnScaling

Value = TypeVar("Value")

# Written by the libraries that save checkpoints, or about training only; they cannot change a logit.
HARMLESS_KEYS = (
    "_name_or_path",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "initializer_range",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


class ConfigReader:
    """Takes the keys of one `config.json` one by one.

    Args:
        config_json: the parsed file; not changed.
        architecture: `architectures[0]` that the caller implements.

    Raises:
        UnsupportedError: the config is of another architecture.
    """

    def __init__(self, config_json: dict[str, Any], architecture: str) -> None:
        self._left = dict(config_json)
        self._architecture = architecture
        given = self._left.pop("architectures", None)
        if not given or given[0] != architecture:
            raise UnsupportedError(f"config.json: architectures is {given!r}, expected [{architecture!r}]")
        for key in ("quantization_config", "quantization"):
            if self._left.pop(key, None) is not None:
                raise UnsupportedError(f"config.json: {key}: quantised checkpoints are refused; load the BF16 one")
        # `model_type` is not unique, so it is not looked at.
        self.ignore("model_type", *HARMLESS_KEYS)

    def has(self, key: str) -> bool:
        """Say whether `key` is there, not yet taken, and not null."""
        return self._left.get(key) is not None

    def take(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        """Take a key that must have a value of this type; absent or null means `default`, if there is one.

        Raises:
            UnsupportedError: the key is missing, or its value has another type.
        """
        value = self.take_optional(key, kind)
        if value is None:
            value = default
        if value is None:
            raise UnsupportedError(f"config.json: {key} is missing, and {self._architecture} needs it")
        return value

    def take_optional(self, key: str, kind: type[Value]) -> Value | None:
        """Take a key that may be absent or null.

        Raises:
            UnsupportedError: the value has another type.
        """
        value = self._left.pop(key, None)
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            raise UnsupportedError(f"config.json: {key} is {value!r}, expected a value of type {kind.__name__}")
        return value

    def require(self, key: str, *allowed: Any) -> None:
        """Refuse the checkpoint unless `key` is absent or has one of the values that are implemented.

        Raises:
            UnsupportedError: it has another value.
        """
        value = self._left.pop(key, allowed[0])
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            choices = " or ".join(repr(a) for a in allowed)
            raise UnsupportedError(f"config.json: {key} is {value!r}; {self._architecture} has {choices} only")

    def ignore(self, *keys: str) -> None:
        """Drop keys that cannot change a logit."""
        for key in keys:
            self._left.pop(key, None)

    def finish(self) -> None:
        """Refuse what nobody took.

        Raises:
            UnsupportedError: keys are left over.
        """
        if self._left:
            keys = ", ".join(sorted(self._left))
            raise UnsupportedError(
                f"config.json: unknown keys for {self._architecture}: {keys}; they may change the model's numerics"
            )

    def take_eos_token_ids(self) -> tuple[int, ...]:
        """Take `eos_token_id`: an id or a list of them; absent or null gives none.

        Raises:
            UnsupportedError: the value is neither.
        """
        value = self._left.pop("eos_token_id", None)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int for i in ids):
            raise UnsupportedError(f"config.json: eos_token_id is {value!r}, expected a token id or a list of them")
        return tuple(ids)


def take_rope(
    reader: ConfigReader, *, max_position_embeddings: int, ignored: tuple[str, ...] = ()
) -> tuple[float, RopeScaling | None]:
    """Take the rotary base and its scaling, in either form: `rope_theta` and `rope_scaling`, or `rope_parameters`.

    Args:
        reader: where from.
        max_position_embeddings: the original context, where the scaling does not name it.
        ignored: keys inside the scaling that this architecture does not read.

    Returns:
        Theta, and the scaling (None: plain angles).

    Raises:
        UnsupportedError: theta is missing or given twice differently, or the scaling has an unknown type or key.
    """
    theta = reader.take_optional("rope_theta", float)
    scaling = reader.take_optional("rope_scaling", dict)
    scaling = dict(reader.take_optional("rope_parameters", dict) or scaling or {})
    inner_theta = scaling.pop("rope_theta", None)
    if theta is None and inner_theta is None:
        raise UnsupportedError("config.json: rope_theta is missing")
    if theta is not None and inner_theta is not None and theta != inner_theta:
        raise UnsupportedError(f"config.json: rope_theta is {theta:g}, and {inner_theta:g} in rope_parameters")
    for key in ignored:
        scaling.pop(key, None)
    kinds = {scaling.pop(key) for key in ("rope_type", "type") if key in scaling}
    return float(theta or inner_theta), _make_scaling(kinds, scaling, max_position_embeddings)


def _make_scaling(kinds: set[str], scaling: dict[str, Any], max_position_embeddings: int) -> RopeScaling | None:
    """Make the scaling of one type from its keys."""
    if kinds <= {"default"}:
        if scaling:
            raise UnsupportedError(f"config.json: rope scaling of type default has the keys {', '.join(scaling)}")
        return None
    by_type: dict[str, type[Llama3Scaling] | type[YarnScaling]] = {"llama3": Llama3Scaling, "yarn": YarnScaling}
    kind = kinds.pop()
    if kinds or kind not in by_type:
        raise UnsupportedError(f"config.json: rope scaling of type {kind!r}; supported are default, llama3 and yarn")
    scaling.setdefault("original_max_position_embeddings", max_position_embeddings)
    known = {field.name for field in fields(by_type[kind])}
    if unknown := scaling.keys() - known:
        raise UnsupportedError(f"config.json: unknown keys in rope scaling {kind}: {', '.join(sorted(unknown))}")
    try:
        return by_type[kind](**scaling)
    except TypeError as error:
        raise UnsupportedError(f"config.json: rope scaling of type {kind}: {error}") from None
