"""What the server is and does: models, health, readiness, properties, metrics, and forgetting what is kept."""

import contextlib
import dataclasses
import os
import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

import soloist
from soloist.errors import UsageError
from soloist.server.failures import ModelNameError
from soloist.server.service import Service
from soloist.server.tool_calls import parser_class

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def state_routes(service: Service) -> APIRouter:
    """Make the routes that say how things are."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """Say whether the server lives and works: a request that runs gets on, and when a token was last made."""
        token_s = None if service.last_token_s is None else round(time.monotonic() - service.last_token_s, 3)
        content = {
            "status": service.status,
            "last_token_age_s": token_s,
            "silent_s": round(service.queue.silent_s, 3),
            "running": service.queue.num_running,
            "waiting": service.queue.num_waiting,
        }
        return JSONResponse(content, 200 if content["status"] == "ok" else 503)

    @router.get("/ready")
    async def ready() -> Response:
        """Say whether the model has made a token since the server started."""
        is_ready = service.last_token_s is not None and service.status == "ok"
        return JSONResponse({"status": "ready" if is_ready else "loading"}, 200 if is_ready else 503)

    @router.get("/v1/models")
    @router.get("/models", include_in_schema=False)
    async def models() -> dict[str, Any]:
        """List the one model."""
        return {"object": "list", "data": [describe_model(service)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe the model under its name."""
        if name != service.settings.model_name:
            raise ModelNameError(f"the model {name!r} is not served here; there is {service.settings.model_name!r}")
        return describe_model(service)

    @router.get("/props")
    async def props() -> dict[str, Any]:
        """Say how the server is set up, what it is doing, and what the last requests took."""
        return describe_server(service)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Give Prometheus' metrics."""
        return Response(service.metrics.text(), media_type=METRICS_TYPE)

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, Any]:
        """Forget what is kept of earlier requests, as benchmarks want it."""
        await service.clear_prefixes()
        return {"status": "ok"}

    return router


def describe_model(service: Service) -> dict[str, Any]:
    """Describe the model in the words of OpenAI's list."""
    llm = service.llm
    tokenizer, template = llm.tokenizer, llm.chat_template
    capabilities = ["completion"]
    if template is not None:
        capabilities.append("chat")
        # A template that writes calls in a form that is not read is no reason to fail here.
        with contextlib.suppress(UsageError):
            parser_class(template.text_for([{"type": "function"}]))
            capabilities.append("tools")
    if tokenizer is not None and tokenizer.fim is not None:
        capabilities.append("infill")
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": int(time.time() - (time.monotonic() - service.started_s)),
        "owned_by": "soloist",
        "max_model_len": llm.max_context_len,
        "meta": {
            "n_ctx_train": llm.engine.runner.model.config.max_position_embeddings,
            "n_vocab": llm.engine.runner.buffers.num_tokens,
            "architecture": llm.architecture,
        },
        "capabilities": capabilities,
    }


def describe_server(service: Service) -> dict[str, Any]:
    """Give everything about the server that a page or a person may want to see."""
    llm, engine = service.llm, service.llm.engine
    prefixes = engine.prefixes
    return {
        "version": soloist.__version__,
        "pid": os.getpid(),
        "model": describe_model(service),
        "chat_template": None if llm.chat_template is None else llm.chat_template.text_for(None),
        "template_variables": [] if llm.chat_template is None else sorted(llm.chat_template.variables),
        "stop_token_ids": list(engine.eos_token_ids),
        "drafter": {"name": engine.drafter.name, "max_drafts": engine.drafter.max_drafts},
        "total_slots": 1,
        "running": service.queue.num_running,
        "waiting": service.queue.num_waiting,
        "bandwidth_gb_per_s": service.settings.bandwidth_gb_per_s,
        "default_generation_settings": {
            "n_ctx": llm.max_context_len,
            "params": dataclasses.asdict(service.settings.defaults),
        },
        "prefix_cache": None if prefixes is None else dataclasses.asdict(prefixes.counts),
        "receipts": list(service.receipts),
    }
