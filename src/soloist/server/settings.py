"""How a server behaves. Owns the checks of its options; reads no environment."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from soloist.errors import UsageError
from soloist.sampling_params import SamplingParams

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Options of one server.

    Raises:
        UsageError: it would listen to the network without a key, or an option is out of range.
    """

    host: str = "127.0.0.1"
    """Where it listens. Anything but loopback needs a key."""
    api_key: str | None = None
    """What clients must send, as `Authorization: Bearer` or `x-api-key`; a browser asks for it as a password."""
    is_open: bool = False
    """Serve the network without a key all the same."""
    cors_origins: tuple[str, ...] = ()
    """Web pages that may call this server, as `https://name:port`, besides those of this machine."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which clients may reach this server, besides `host` and those of loopback."""
    model_name: str = "soloist"
    """What the model is called in answers."""
    is_strict: bool = False
    """Refuse requests that name another model; otherwise any name is accepted, as agents send fixed ones."""
    defaults: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters of requests that do not say."""
    strips_billing_line: bool = True
    """Leave out the line that coding agents change in every system prompt, which would cost the kept prefix."""
    max_body_bytes: int = 32 << 20
    """Longest request body."""
    max_waiting: int = 64
    """Requests that may wait for the running one."""
    keep_alive_s: float = 5.0
    """Silence in a stream, on a wall clock, after which a comment is sent."""
    stuck_after_s: float = 120.0
    """Time without a token, and without a piece of the prompt read, after which a running request counts as stuck."""
    sends_traces: bool = False
    """Send a span for every request to an OpenTelemetry collector."""
    bandwidth_gb_per_s: float | None = None
    """Measured read bandwidth, for the share of the floor that an answer reached. None: not measured."""

    def __post_init__(self) -> None:
        if not self.is_loopback and self.api_key is None and not self.is_open:
            raise UsageError(
                f"host {self.host} is reachable from the network, and there is no key: set --api-key, listen on"
                " 127.0.0.1, or serve everybody with --no-auth"
            )
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("the API key is empty or holds characters that no header can carry")
        for origin in self.cors_origins:
            parts = urlsplit(origin)
            if not parts.hostname or origin != f"{parts.scheme}://{parts.netloc}".lower():
                raise UsageError(
                    f"the origin {origin!r} is none that a browser sends; allowed: scheme://name or scheme://name:port,"
                    " in lower case, without a path"
                )
        if self.max_body_bytes < 1 or self.max_waiting < 0 or self.keep_alive_s <= 0 or self.stuck_after_s <= 0:
            raise UsageError("max_body_bytes, keep_alive_s and stuck_after_s are above 0, max_waiting at least 0")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK_NAMES or self.host.startswith("127.")
