"""The socket and the event loop of a server: binding, saying where it listens, ending at once when asked to."""

import json
import logging
import socket
import urllib.request
from collections.abc import Callable
from typing import Protocol

import uvicorn
from starlette.types import Receive, Scope, Send

from soloist.errors import SoloistError, UsageError

# A connection that does not end although its answer has is cut after so long.
_GRACE_S = 3


def bind(host: str, port: int) -> socket.socket:
    """Take an address, before anything slow is done.

    Args:
        host: a name or an address.
        port: 0 takes any that is free.

    Raises:
        UsageError: it is taken, or it is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # The protocol is named: asyncio sends small events at once (TCP_NODELAY) only where a socket says it is TCP.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot listen on {host}:{port}: {why}{_who_listens(host, port)}") from None
    return listener


def _who_listens(host: str, port: int) -> str:
    """Say whether the one who has the address is a Soloist, and what it serves."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/v1/models", timeout=1) as answer:
            (model,) = json.loads(answer.read(100_000))["data"]
    except (OSError, ValueError, KeyError, TypeError):
        return "; --port 0 takes any free port"
    if model.get("owned_by") != "soloist":
        return "; --port 0 takes any free port"
    return f": a Soloist that serves {model.get('id')} listens there; --port 0 takes any free port"


class Application(Protocol):
    """What is served: ASGI, with work that can be ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    @property
    def failure(self) -> SoloistError | None:
        """What nothing can be answered after; None: all is well."""

    def close(self) -> None:
        """End all work."""


class _Server(uvicorn.Server):
    """Ends running answers first, so that no open stream holds up the end."""

    def __init__(self, config: uvicorn.Config, app: Application, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._soloist = app
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._soloist.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._soloist.close()
        await super().shutdown(sockets)


def run(app: Application, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
    """Serve until a signal ends it, or a failure after which nothing can be answered.

    Args:
        app: what is served.
        listener: where; see `bind`.
        on_ready: called with the server's URL once the model has made a token.

    Raises:
        SoloistError: the failure; whoever started the server may start it again.
    """
    logging.getLogger("soloist.server").setLevel(logging.INFO)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S, server_header=False
    )
    host, port = listener.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    server = _Server(config, app, lambda: on_ready(f"http://{name}:{port}"))
    server.run(sockets=[listener])
    if (failure := app.failure) is not None:
        raise failure
