"""The application: routes behind one gate, one place for errors, the page."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

import soloist
from soloist.errors import SoloistError
from soloist.llm import LLM
from soloist.server.api.chat import chat_routes
from soloist.server.api.completions import completion_routes
from soloist.server.api.messages import message_routes
from soloist.server.api.native import native_routes
from soloist.server.api.page import page_routes
from soloist.server.api.responses import responses_routes
from soloist.server.api.state import state_routes
from soloist.server.api.tokens import token_routes
from soloist.server.failures import failure_of
from soloist.server.security import BodyTooLarge, Gate
from soloist.server.service import Service
from soloist.server.settings import ServerSettings
from soloist.server.stream import ClientGone


class App:
    """The whole server as one ASGI application.

    Args:
        llm: the model; nothing else may use it meanwhile.
        settings: of the server.
    """

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self.service = Service(llm, settings)
        self.api = make_api(self.service)
        self._gate: ASGIApp = Gate(self.api, settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._gate(scope, receive, send)
            return
        # An error of ours has been answered and logged when the framework raises it once more.
        with contextlib.suppress(Exception):
            await self._gate(scope, receive, send)

    @property
    def failure(self) -> SoloistError | None:
        """What ends the server."""
        return self.service.failure

    def close(self) -> None:
        """End all work."""
        self.service.close()


def make_api(service: Service) -> FastAPI:
    """Make the routes of a service, without the gate in front of them."""

    @contextlib.asynccontextmanager
    async def lifespan(_api: FastAPI) -> AsyncIterator[None]:
        await service.warm_up()
        yield
        service.close()

    api = FastAPI(
        title="Soloist", version=soloist.__version__, lifespan=lifespan, docs_url=None, redoc_url=None, debug=False
    )
    for routes in (
        chat_routes,
        completion_routes,
        message_routes,
        responses_routes,
        native_routes,
        token_routes,
        state_routes,
    ):
        api.include_router(routes(service))
    api.include_router(page_routes())

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGone):
            # Nobody reads it; the number is the one that logs of web servers use.
            return Response(status_code=499)
        failure = error.failure if isinstance(error, BodyTooLarge) else failure_of(error)
        headers = {"retry-after": "1"} if failure.status == 503 else None
        return JSONResponse(failure.body(request.url.path), failure.status, headers=headers)

    for kind in (SoloistError, RequestValidationError, HTTPException, ClientGone, BodyTooLarge, MemoryError, Exception):
        api.add_exception_handler(kind, refuse)
    return api
