"""One replica: the whole server in an actor of a Ray cluster, asked in ASGI scopes and answering in ASGI messages.

It knows nothing of Ray: Ray Serve makes one object of the class in each actor.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

from soloist.llm import LLM
from soloist.server.app import make_api
from soloist.server.service import Service
from soloist.server.settings import ServerSettings

Message = MutableMapping[str, Any]


class Replica:
    """The routes of one model; made on the actor's own event loop.

    Args:
        make_llm: loads the model.
        settings: of the server; an empty model name stands for the model's own.
    """

    async def __init__(self, make_llm: Callable[[], LLM], settings: ServerSettings) -> None:  # type: ignore[misc]
        llm = await asyncio.to_thread(make_llm)
        self._service = Service(llm, dataclasses.replace(settings, model_name=settings.model_name or llm.name))
        self._api = make_api(self._service)
        await self._service.warm_up()

    async def check_health(self) -> None:
        """Raise where the replica does no work any more, so that it is replaced."""
        if self._service.status != "ok":
            raise RuntimeError(f"the replica is {self._service.status}")

    async def call(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """Answer a request; to stop reading ends its work, as a closed connection does.

        Args:
            scope: of ASGI, without what cannot be sent.
            body: of the request, whole.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        is_gone = asyncio.Event()
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if given:
                return given.pop()
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def work() -> None:
            try:
                # An error of ours has been answered and logged when the framework raises it once more.
                with contextlib.suppress(Exception):
                    await self._api({**scope, "state": {}}, receive, messages.put)
            finally:
                messages.put_nowait(None)

        task = asyncio.ensure_future(work())
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            is_gone.set()
            await task

    async def fetch(self, method: str, path: str) -> tuple[int, bytes]:
        """Answer a request without a body: status and content."""
        status, content = 500, b""
        scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "root_path": ""}
        async for message in self.call(scope, b""):
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                content += message.get("body", b"")
        return status, content
