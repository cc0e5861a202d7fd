"""Server-sent events: the wire form, and a response that notices at once when its client has gone."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
# Made once: a stream writes one event per step.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


def event(data: Any, name: str | None = None) -> bytes:
    """Write one event; `name` for protocols whose events have one."""
    text = _encode(data)
    head = f"event: {name}\n" if name else ""
    # A lone surrogate cannot arise from decoded text, but may stand in what a client sent and gets back.
    return f"{head}data: {text}\n\n".encode("utf-8", "replace")


class EventStream(Response):
    """A response of events that ends its source as soon as the client is gone, whether anything is being sent or not.

    Args:
        events: encoded events. It is closed, and so runs its `finally`, when the client goes.
    """

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(None, headers=_HEADERS, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The length of an empty body was put there by the constructor.
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

        async def write() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        # A socket that fails while it is written to is a client that has gone.
        with contextlib.suppress(ClientGone, OSError):
            await unless_gone(write(), receive)


async def unless_gone(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Run a coroutine to its end, or cancel it when the client closes the connection.

    Args:
        work: is cancelled, and waited for, if the client goes.
        receive: of the request, whose body has been read.

    Raises:
        ClientGone: the client has gone.
    """

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def complete(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run the work of an answer that is sent in one piece; see `unless_gone`."""
    return await unless_gone(work, request.receive)
