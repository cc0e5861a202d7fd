"""What a request asks of the sampler and when it ends. Owns the checks of each field; draws nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from soloist.errors import UsageError

# Clients send long stop lists; a list of any length would be matched at every token.
MAX_STOP_STRINGS = 64
# Alternatives reported beside each token, OpenAI's limit.
MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and what ends the answer.

    Raises:
        UsageError: a field is out of its range; the message has what was given and what is allowed.
    """

    temperature: float = 0.0
    """0 takes the likeliest token and draws no random number; 1 samples the model's own law. 0, or in [1e-5, 1e5]."""
    top_k: int | None = None
    """Keep the k likeliest tokens. None: all."""
    top_p: float = 1.0
    """Keep the likeliest tokens until their probability, within what `top_k` kept, reaches this. In [1e-5, 1]."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the likeliest. In [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or answer. In [0.01, 100]; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens in the answer. In [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for every time the answer holds it. In [-2, 2]."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids, before the penalties. Values in [-100, 100]."""
    seed: int | None = None
    """Same seed, same text, whatever ran before. 64 bits, signed. None: a new one each time, shown in the stats."""
    max_tokens: int | None = None
    """Longest answer in tokens, the end token included. 0 reads the prompt only. None: what the context holds."""
    min_tokens: int = 0
    """Tokens before which neither an end token nor a stop string ends the answer."""
    stop: str | Sequence[str] = ()
    """Texts that end the answer; it ends before the first of them. At most 64, kept as a tuple."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the answer, beside the model's own end tokens; kept as a tuple."""
    ignore_eos: bool = False
    """Go on behind the model's end tokens. `stop` and `stop_token_ids` still end the answer."""
    logprobs: int | None = None
    """Report each token's log probability and this many of the likeliest, 0..20. None: no log probabilities.

    They are of the model's own law, before bias, penalties, temperature and filters: no sampling field changes them.
    """

    def __post_init__(self) -> None:
        # Containers are copied, so that a caller's list may change later.
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

        # Smaller ones vanish in fp32, as does what larger ones leave of the logits.
        if self.temperature != 0:
            _require_number("temperature", self.temperature, 1e-5, 1e5, "0 (greedy), or from 0.00001 to 100000")
        if self.top_k is not None:
            _require_integer("top_k", self.top_k, 1, None, "at least 1, or None for all tokens")
        _require_number("top_p", self.top_p, 1e-5, 1, "above 0 (from 0.00001), up to 1")
        _require_number("min_p", self.min_p, 0, 1, "from 0 to 1")
        _require_number("repetition_penalty", self.repetition_penalty, 0.01, 100, "from 0.01 to 100")
        _require_number("presence_penalty", self.presence_penalty, -2, 2, "from -2 to 2")
        _require_number("frequency_penalty", self.frequency_penalty, -2, 2, "from -2 to 2")
        for token, bias in self.logit_bias.items():
            _require_integer("logit_bias", token, 0, None, "token ids as keys")
            _require_number(f"logit_bias of token {token}", bias, -100, 100, "from -100 to 100")
        if self.seed is not None:
            _require_integer("seed", self.seed, -(2**63), 2**63 - 1, "a 64-bit signed integer, or None")
        if self.max_tokens is not None:
            _require_integer("max_tokens", self.max_tokens, 0, None, "at least 0, or None for what the context holds")
        _require_integer("min_tokens", self.min_tokens, 0, self.max_tokens, f"from 0 to max_tokens ({self.max_tokens})")
        for token in self.stop_token_ids:
            _require_integer("stop_token_ids", token, 0, None, "token ids")
        if self.logprobs is not None:
            _require_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}, or None")
        if len(stop) > MAX_STOP_STRINGS:
            raise UsageError(f"stop holds {len(stop)} texts; at most {MAX_STOP_STRINGS} are allowed")
        if any(not isinstance(text, str) or not text for text in stop):
            raise UsageError(f"stop holds {stop!r}; allowed: texts that are not empty")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken every time."""
        return self.temperature == 0

    @property
    def has_filters(self) -> bool:
        """Whether any filter cuts the law that tokens are drawn from."""
        return self.top_k is not None or self.top_p != 1 or self.min_p != 0

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, whichever way it was given."""
        return tuple(self.stop)


def _require_number(name: str, value: float, low: float, high: float, allowed: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails every comparison.
    if not is_number or not low <= value <= high:
        raise UsageError(f"{name} is {value!r}; allowed: {allowed}")


def _require_integer(name: str, value: int, low: int, high: int | None, allowed: str) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):
        raise UsageError(f"{name} is {value!r}; allowed: {allowed}")
