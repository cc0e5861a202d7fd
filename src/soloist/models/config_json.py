"""Reading a checkpoint's `config.json` so that no key is dropped silently.

Owns the refusal of keys: each architecture takes the keys it implements, demands the values it was written for, names
the keys that cannot change a logit, and everything left over is refused by name.
"""

from typing import Any, TypeVar

from soloist.errors import UnsupportedError

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
            raise UnsupportedError(f"config.json: {key} is {value!r}; {self._architecture} is implemented for {choices}")

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
