"""`/v1/responses`: OpenAI's protocol of items, as coding agents speak it."""

import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from soloist.answer import Delta
from soloist.server.api.chat import figures
from soloist.server.api.model_name import check_model
from soloist.server.failures import failure_of
from soloist.server.protocol.responses import ResponsesRequest
from soloist.server.rendering import Rendered, render_chat
from soloist.server.reply import Ask, Reply
from soloist.server.reply_text import Piece, Reasoning
from soloist.server.service import Service
from soloist.server.stream import KEEP_ALIVE, EventStream, complete, event
from soloist.server.tool_calls import CallArguments, CallBegin, Text

logger = logging.getLogger("soloist.server")


def responses_routes(service: Service) -> APIRouter:
    """Make the route of OpenAI's responses."""
    router = APIRouter()

    @router.post("/v1/responses")
    @router.post("/responses", include_in_schema=False)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        check_model(service, body.model)
        body.check()
        rendered = render_chat(
            service.llm,
            body.openai_messages,
            tools=body.functions,
            template_kwargs=body.chat_template_kwargs,
            reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
            rule=body.call_rule,
        )
        for name in body.skipped_tools:
            rendered.warnings.append(f"the tool {name!r} is of a kind that cannot be called here; it was left out")
        params = body.params(service.settings.defaults)
        ask = Ask(
            route="/v1/responses",
            prompt_ids=rendered.ids,
            params=params,
            turn_ends=rendered.turn_ends,
            constraint=service.constraint(body.schema_wanted, params, rendered),
            find_end=rendered.call_end(),
            template_s=rendered.template_s,
        )
        reply = service.ask(ask)
        writer = _Writer(service, body, rendered, reply)
        if body.stream:
            return EventStream(_stream(service, reply, writer))
        return await complete(request, _whole(reply, writer))

    return router


class _Writer:
    """Turns the pieces of an answer into items, and into the events that announce them."""

    def __init__(self, service: Service, body: ResponsesRequest, rendered: Rendered, reply: Reply) -> None:
        self._service, self._body, self._reply, self._warnings = service, body, reply, rendered.warnings
        self._splitter = rendered.splitter()
        self._custom_tools = body.custom_tools
        self._number = -1
        # Items so far; the last one is open while `_is_open`.
        self._items: list[dict[str, Any]] = []
        self._is_open = False

    def event(self, kind: str, **fields: Any) -> bytes:
        """Write one event with its number."""
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    def step(self, delta: Delta) -> Iterator[bytes]:
        """Write the events of one step."""
        for piece in self._reply.pieces(self._splitter, delta):
            yield from self._write(piece)
        if delta.finish_reason is not None:
            yield from self._close()

    def response(self, status: str, **fields: Any) -> dict[str, Any]:
        """Give the response object."""
        body = self._body
        return {
            "id": f"resp_{self._reply.id}",
            "object": "response",
            "created_at": self._reply.created,
            "status": status,
            "model": self._service.settings.model_name,
            "output": self._items,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._reply.ask.params.temperature,
            "top_p": self._reply.ask.params.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "metadata": body.metadata or {},
            "usage": None,
        } | fields

    def finished(self, delta: Delta) -> tuple[str, dict[str, Any]]:
        """Give the last event's name and the whole response."""
        usage = self._reply.usage
        told = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        extra = figures(self._reply, self._warnings)
        if delta.finish_reason == "stop":
            return "response.completed", self.response("completed", usage=told, **extra)
        why = {"reason": "max_output_tokens" if delta.finish_reason == "length" else "cancelled"}
        return "response.incomplete", self.response("incomplete", usage=told, incomplete_details=why, **extra)

    def _write(self, piece: Piece) -> Iterator[bytes]:
        match piece:
            case Reasoning(text):
                yield from self._open("reasoning")
                self._items[-1]["content"][0]["text"] += text
                yield self.event("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)
            case Text(text):
                if self._items and self._items[-1]["type"] != "message" and not text.strip():
                    return
                yield from self._open("message")
                self._items[-1]["content"][0]["text"] += text
                yield self.event(
                    "response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=[]
                )
            case CallBegin(index, name):
                yield from self._close()
                yield from self._open_call(index, name)
            case CallArguments(_, text):
                item = self._items[-1]
                item["arguments"] += text
                if item["type"] == "function_call":
                    yield self.event("response.function_call_arguments.delta", **self._place(), delta=text)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _open(self, kind: str) -> Iterator[bytes]:
        """Begin a message or reasoning, unless one is open."""
        if self._is_open and self._items[-1]["type"] == kind:
            return
        yield from self._close()
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        item: dict[str, Any] = {"id": self._item_id(), "type": kind, "status": "in_progress"}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["role"] = "assistant"
        else:
            item["summary"] = []
        self._items.append(item | {"content": []})
        self._is_open = True
        yield self.event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])
        self._items[-1]["content"].append(part)
        yield self.event("response.content_part.added", **self._place(), content_index=0, part=part)

    def _open_call(self, index: int, name: str) -> Iterator[bytes]:
        is_custom = name in self._custom_tools
        item = {
            "id": self._item_id(),
            "type": "custom_tool_call" if is_custom else "function_call",
            "status": "in_progress",
            "call_id": f"call_{self._reply.id.replace('-', '')}{index}",
            "name": name,
            "arguments": "",
        }
        self._items.append(item)
        self._is_open = True
        shown = {key: value for key, value in item.items() if key != "arguments"} | {"input": ""} if is_custom else item
        yield self.event("response.output_item.added", output_index=len(self._items) - 1, item=shown)

    def _item_id(self) -> str:
        return f"item_{self._reply.id}_{len(self._items)}"

    def _close(self) -> Iterator[bytes]:
        """End the open item."""
        if not self._is_open:
            return
        self._is_open = False
        item, place = self._items[-1], self._place()
        item["status"] = "completed"
        if item["type"] == "function_call":
            yield self.event("response.function_call_arguments.done", **place, arguments=item["arguments"])
        elif item["type"] == "custom_tool_call":
            item["input"] = _custom_input(item.pop("arguments"))
            yield self.event("response.custom_tool_call_input.delta", **place, delta=item["input"])
            yield self.event("response.custom_tool_call_input.done", **place, input=item["input"])
        else:
            part = item["content"][0]
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            yield self.event(f"response.{kind}.done", **place, content_index=0, text=part["text"])
            yield self.event("response.content_part.done", **place, content_index=0, part=part)
        yield self.event("response.output_item.done", output_index=place["output_index"], item=item)


def _custom_input(arguments: str) -> str:
    """Give the text that a custom tool takes; what the model wrote wrongly is passed on as it is."""
    try:
        return str(json.loads(arguments, strict=False)["input"])
    except (ValueError, KeyError, TypeError):
        return arguments


async def _stream(service: Service, reply: Reply, writer: _Writer) -> AsyncIterator[bytes]:
    try:
        yield writer.event("response.created", response=writer.response("in_progress"))
        yield writer.event("response.in_progress", response=writer.response("in_progress"))
        async for part in reply.parts(service.settings.keep_alive_s):
            if part is None:
                yield KEEP_ALIVE
                continue
            assert isinstance(part, Delta)
            for data in writer.step(part):
                yield data
            if part.finish_reason is not None:
                name, response = writer.finished(part)
                yield writer.event(name, response=response)
    # A stream that has begun has no status left to send; the client gets an event instead.
    except Exception as error:  # noqa: BLE001
        failure = failure_of(error)
        told = {"code": failure.code or "server_error", "message": failure.message}
        yield writer.event("response.failed", response=writer.response("failed", error=told))


async def _whole(reply: Reply, writer: _Writer) -> Response:
    async for part in reply.parts():
        assert isinstance(part, Delta)
        # The events are not sent; the items that they announce are.
        for _ in writer.step(part):
            pass
    assert reply.delta is not None
    return JSONResponse(writer.finished(reply.delta)[1])
