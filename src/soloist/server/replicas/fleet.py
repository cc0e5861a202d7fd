"""The front of several replicas: the same API, each conversation with one replica.

What was under way on a replica that is lost ends as the client's protocol says it, or is begun again on another one if
nothing had been sent yet.
"""

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from soloist.config import forbid_telemetry
from soloist.errors import SoloistError, UnsupportedError, UsageError
from soloist.llm import LLM
from soloist.server.api.state import METRICS_TYPE
from soloist.server.failures import Failure
from soloist.server.replicas.conversation import conversation_of
from soloist.server.replicas.replica import Message, Replica
from soloist.server.security import BodyTooLarge, Gate
from soloist.server.settings import ServerSettings
from soloist.server.stream import ClientGone, unless_gone

logger = logging.getLogger("soloist.server")

_APP = "soloist"
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
# Replicas answer what the front asks of all of them within so long, or count as lost.
_PATIENCE_S = 10
# Of a scope, what a replica needs; all of it can be sent.
_SCOPE_KEYS = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
_LOST = Failure(status=503, message="the replica that worked on this was lost; send it again", code="replica_lost")


class Fleet:
    """Replicas on a Ray cluster, as one ASGI application; `close` it.

    Args:
        make_llm: loads the model; called in every replica.
        settings: of the server; an empty model name stands for the model's own.
        num_replicas: how many.
        num_cpus: CPUs that each is given.
        num_gpus: GPUs that each is given.

    Raises:
        UnsupportedError: Ray is not installed.
        SoloistError: the replicas did not start.
    """

    def __init__(
        self,
        make_llm: Callable[[], LLM],
        settings: ServerSettings,
        *,
        num_replicas: int,
        num_cpus: float = 1,
        num_gpus: float = 0,
    ) -> None:
        self._ray, serve = import_ray()
        self._serve_api = serve
        self._errors = (self._ray.exceptions.RayError, serve.exceptions.RayServeException)
        if num_replicas < 1:
            raise UsageError(f"replicas is {num_replicas}; allowed: at least 1")
        if not self._ray.is_initialized():
            # Where RAY_ADDRESS names a cluster it is used, else one is started here.
            self._ray.init(include_dashboard=False, log_to_driver=True, configure_logging=False)
        try:
            serve.start(proxy_location="Disabled")
            deployment = serve.deployment(Replica).options(
                num_replicas=num_replicas,
                max_constructor_retry_count=3,
                max_ongoing_requests=settings.max_waiting + 1,
                health_check_period_s=5,
                graceful_shutdown_timeout_s=3,
                ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus},
                request_router_config=serve.config.RequestRouterConfig(request_router_class=_ROUTER),
            )
            self._handle = serve.run(deployment.bind(make_llm, settings), name=_APP, route_prefix=None)
        except (RuntimeError, *self._errors) as error:
            why = self._reason() or str(error)
            self.close()
            raise SoloistError(f"the replicas did not start: {why}") from error
        self._gate = Gate(self._answer, settings)

    def _reason(self) -> str | None:
        """Give the last line of what a replica said when it failed to start."""
        app = self._serve_api.status().applications.get(_APP)
        lines = (
            [line for deployment in app.deployments.values() for line in deployment.message.splitlines()] if app else []
        )
        return next((line.strip() for line in reversed(lines) if "Error: " in line), None)

    @property
    def failure(self) -> SoloistError | None:
        """Nothing: a replica that fails is replaced."""
        return None

    def close(self) -> None:
        """End all replicas."""
        if not self._ray.is_initialized():
            return
        # A cluster that got the same signal may be gone already, and would be waited for.
        deletion = threading.Thread(target=self._serve_api.delete, args=(_APP,), daemon=True)
        deletion.start()
        deletion.join(_PATIENCE_S)
        self._ray.shutdown()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._gate(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        try:
            body = await _read(receive)
            response = await self._of_all(method, path)
        except BodyTooLarge as error:
            response = JSONResponse(error.failure.body(path), error.failure.status)
        if response is not None:
            await response(scope, receive, send)
            return
        sent = {key: scope[key] for key in _SCOPE_KEYS if key in scope} | {"headers": list(scope["headers"])}
        with contextlib.suppress(ClientGone):
            await unless_gone(self._forward(sent, body, send), receive)

    async def _of_all(self, method: str, path: str) -> Response | None:
        """Answer for all replicas together; None: one of them answers."""
        match method, path:
            case "GET", "/health" | "/ready":
                return _health(await self._all(method, path))
            case "GET", "/metrics":
                return Response(_metrics(await self._all(method, path)), media_type=METRICS_TYPE)
            case "GET", "/props":
                return _props(await self._all(method, path))
            case "POST", "/reset_prefix_cache":
                status, content = max(await self._all(method, path), default=(503, b""))
                return Response(content, status, media_type="application/json")
        return None

    async def _all(self, method: str, path: str) -> list[tuple[int, bytes]]:
        """Ask every replica that lives."""
        response = self._handle.broadcast("fetch", method, path)
        results = await response.results_async(timeout_s=_PATIENCE_S, return_exceptions=True)
        return [result for result in results if not isinstance(result, BaseException)]

    async def _forward(self, scope: dict[str, Any], body: bytes, send: Send) -> None:
        """Have one replica answer; another one, if it is lost before it has said anything."""
        key = conversation_of(scope["path"], body)
        options = {"stream": True} | ({} if key is None else {"session_id": key})
        handle = self._handle.options(method_name="call", **options)
        is_begun, is_event_stream = False, False
        for _ in range(3):
            messages = handle.remote(scope, body)
            try:
                async for message in messages:
                    is_begun = True
                    is_event_stream = is_event_stream or _is_event_stream(message)
                    await send(message)
                return
            except asyncio.CancelledError:
                messages.cancel()
                raise
            except self._errors as error:
                logger.warning("a replica was lost during %s: %s", scope["path"], type(error).__name__)
                if is_begun:
                    break
        if not is_begun:
            headers = {"retry-after": "1"}
            content = _LOST.body(scope["path"])
            await JSONResponse(content, _LOST.status, headers=headers)({"type": "http"}, _no_more, send)
            return
        # A status has been sent: what is left is to say so in the stream, and to end it.
        rest = _LOST.events(scope["path"]) if is_event_stream else b""
        await send({"type": "http.response.body", "body": rest, "more_body": False})


def import_ray() -> tuple[Any, Any]:
    """Give `ray` and `ray.serve`.

    Raises:
        UnsupportedError: they are not installed.
    """
    forbid_telemetry()
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise UnsupportedError(f"replicas need {error.name}: pip install 'soloist[server,replicas]'") from None
    return ray, serve


async def _no_more() -> Message:
    return {"type": "http.disconnect"}


async def _read(receive: Receive) -> bytes:
    """Read a request's body."""
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return b"".join(parts)


def _is_event_stream(message: Message) -> bool:
    headers: Iterable[tuple[bytes, bytes]] = message.get("headers", ())
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def _health(answers: list[tuple[int, bytes]]) -> Response:
    """Say how all are: the server lives as long as one does."""
    status = min((status for status, _ in answers), default=503)
    replicas = [json.loads(content) for _, content in answers]
    first = replicas[0] if replicas else {"status": "failed"}
    best = next((r["status"] for (s, _), r in zip(answers, replicas, strict=True) if s == status), first["status"])
    total = {key: sum(r[key] for r in replicas) for key in ("running", "waiting") if key in first}
    return JSONResponse({"status": best, **total, "replicas": replicas}, status)


def _props(answers: list[tuple[int, bytes]]) -> Response:
    """Describe the server as one: the last requests of all replicas, in order."""
    replicas = [json.loads(content) for status, content in answers if status == 200]
    if not replicas:
        return JSONResponse(_LOST.openai_body, _LOST.status)
    receipts = sorted((r for props in replicas for r in props["receipts"]), key=lambda receipt: receipt["created"])
    total = {key: sum(props[key] for props in replicas) for key in ("total_slots", "running", "waiting")}
    return JSONResponse(replicas[0] | total | {"receipts": receipts, "num_replicas": len(replicas)})


class _Merged:
    """The metrics of all replicas, told apart by a label."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for i, text in enumerate(self._texts):
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.add_sample(sample.name, {**sample.labels, "replica": str(i)}, sample.value)
        yield from families.values()


def _metrics(answers: list[tuple[int, bytes]]) -> bytes:
    return generate_latest(_Merged([content.decode() for status, content in answers if status == 200]))
