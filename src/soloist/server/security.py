"""Who may call: the key, the Host header, pages of other origins, the size of bodies. One layer before all routes."""

import base64
import binascii
import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from soloist.server.failures import Failure
from soloist.server.settings import LOOPBACK_NAMES, ServerSettings

# What a probe may ask without a key; the answers say nothing of anyone's text.
_OPEN_PATHS = frozenset({"/health", "/ready"})
_ALLOWED_METHODS = "GET, POST, OPTIONS"
# Browsers may remember a pre-flight answer for so long, in seconds.
_PREFLIGHT_AGE = "600"


class Gate:
    """Lets requests through to the routes, or answers them itself.

    Args:
        app: the routes.
        settings: of the server.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._hosts = LOOPBACK_NAMES | {settings.host, *settings.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        grants = self._grants(origin, headers) if origin is not None else {}
        if (failure := self._refusal(scope, headers, grants)) is not None:
            response: Response = JSONResponse(failure.body(scope["path"]), failure.status, headers=grants)
            if failure.status == 401:
                response.headers["www-authenticate"] = 'Basic realm="Soloist", charset="UTF-8"'
            await response(scope, receive, send)
        elif scope["method"] == "OPTIONS" and origin is not None:
            await Response(status_code=204, headers=grants)(scope, receive, send)
        else:
            await self._app(scope, self._bounded(receive), _with_headers(send, grants))

    def _refusal(self, scope: Scope, headers: Headers, grants: Mapping[str, str]) -> Failure | None:
        if not self._is_known_host(headers.get("host", "")):
            return Failure(status=403, message="the Host header names another machine", code="unknown_host")
        if headers.get("origin") is not None and not grants and not self._is_same_origin(headers):
            return Failure(status=403, message="web pages of this origin may not call this server", code="origin")
        is_preflight = scope["method"] == "OPTIONS"
        if not is_preflight and scope["path"] not in _OPEN_PATHS and not self._has_key(headers):
            return Failure(status=401, message="a valid API key is needed: Authorization: Bearer KEY", code="no_key")
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            return Failure(status=400, message="the Content-Length header is no number")
        if int(length) > self._settings.max_body_bytes:
            return _too_large(self._settings)
        return None

    def _is_known_host(self, host: str) -> bool:
        """Refuse names that a page of the network may have pointed at this machine (DNS rebinding)."""
        if not self._settings.is_loopback and not self._settings.allowed_hosts:
            # Off loopback the key decides; names of this machine cannot be known.
            return True
        return _host_name(host) in self._hosts

    def _is_same_origin(self, headers: Headers) -> bool:
        return urlsplit(headers["origin"]).netloc == headers.get("host")

    def _has_key(self, headers: Headers) -> bool:
        key = self._settings.api_key
        if key is None:
            return True
        scheme, _, value = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            given.append(value.strip())
        elif scheme.lower() == "basic":
            given.append(_password(value))
        # Each in constant time: how far a guess agrees does not show.
        return any(hmac.compare_digest(candidate.encode(), key.encode()) for candidate in given)

    def _grants(self, origin: str, headers: Headers) -> dict[str, str]:
        """Give the headers that let a page of an allowed origin read the answer; none for another's."""
        if urlsplit(origin).hostname not in LOOPBACK_NAMES and origin not in self._settings.cors_origins:
            return {}
        grants = {"access-control-allow-origin": origin, "vary": "Origin"}
        if (asked := headers.get("access-control-request-headers")) is not None:
            grants["access-control-allow-headers"] = asked
        if headers.get("access-control-request-method") is not None:
            grants |= {"access-control-allow-methods": _ALLOWED_METHODS, "access-control-max-age": _PREFLIGHT_AGE}
        return grants

    def _bounded(self, receive: Receive) -> Receive:
        """Count a body that comes in pieces, and break off one that is too long."""
        num_bytes = 0

        async def bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._settings.max_body_bytes:
                raise BodyTooLarge(_too_large(self._settings))
            return message

        return bounded


class BodyTooLarge(HTTPException):
    """A body grew beyond the limit while it was read; of this kind, or the framework would call it damaged."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.status, failure.message)
        self.failure = failure


def _too_large(settings: ServerSettings) -> Failure:
    limit = f"{settings.max_body_bytes / 2**20:.0f} MiB"
    return Failure(status=413, message=f"the body is longer than {limit}", code="body_too_large")


def _host_name(host: str) -> str:
    """Give the name of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _with_headers(send: Send, grants: Mapping[str, str]) -> Send:
    if not grants:
        return send
    added = [(name.encode(), value.encode("latin-1", "replace")) for name, value in grants.items()]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await send(message)

    return sending
