"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's protocol."""

import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from soloist.answer import Delta
from soloist.server.api.model_name import check_model
from soloist.server.failures import failure_of
from soloist.server.protocol.anthropic import CountRequest, MessagesRequest
from soloist.server.rendering import Rendered, render_chat
from soloist.server.reply import Ask, Reply
from soloist.server.reply_text import Piece, Reasoning
from soloist.server.service import Service
from soloist.server.stream import KEEP_ALIVE, EventStream, complete, event
from soloist.server.tool_calls import CallArguments, CallBegin, Text

logger = logging.getLogger("soloist.server")


def message_routes(service: Service) -> APIRouter:
    """Make the routes of Anthropic's messages."""
    router = APIRouter()

    @router.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        check_model(service, body.model)
        rendered = _render(service, body)
        params = body.sampling_params(service.settings.defaults, service.llm.max_context_len - len(rendered.ids))
        ask = Ask(
            route="/v1/messages",
            prompt_ids=rendered.ids,
            params=params,
            turn_ends=rendered.turn_ends,
            constraint=service.constraint(None, params, rendered),
            find_end=rendered.call_end(),
            template_s=rendered.template_s,
        )
        reply = service.ask(ask)
        if body.stream:
            return EventStream(_stream(service, rendered, reply))
        return await complete(request, _whole(service, rendered, reply))

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest) -> dict[str, int]:
        check_model(service, body.model)
        return {"input_tokens": len(_render(service, body).ids)}

    return router


def _render(service: Service, body: CountRequest) -> Rendered:
    if skipped := body.skipped_tools:
        logger.warning("tools without a schema are left out: %s", ", ".join(skipped))
    kwargs = {}
    template = service.llm.chat_template
    if body.thinking is not None and template is not None and "enable_thinking" in template.variables:
        kwargs["enable_thinking"] = body.thinking.type != "disabled"
    return render_chat(
        service.llm,
        body.openai_messages(strips_billing_line=service.settings.strips_billing_line),
        tools=body.functions,
        template_kwargs=kwargs,
        rule=body.call_rule,
    )


def _usage(reply: Reply, num_answer: int) -> dict[str, int]:
    stats = reply.stats
    return {
        "input_tokens": stats.prompt_tokens - stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_tokens,
        "output_tokens": num_answer,
    }


def _stop(reason: str, stop_match: str | int | None, num_calls: int) -> dict[str, Any]:
    if isinstance(stop_match, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_match}
    word = "max_tokens" if reason == "length" else "tool_use" if num_calls else "end_turn"
    return {"stop_reason": word, "stop_sequence": None}


def _call_id(reply: Reply, index: int) -> str:
    return f"toolu_{reply.id.replace('-', '')}{index}"


class _Blocks:
    """Writes the events of an answer's content blocks, one block after the other."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._kind: str | None = None
        self._index = -1
        self.num_calls = 0

    def write(self, pieces: list[Piece]) -> Iterator[bytes]:
        """Write the events of a step's pieces."""
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                    yield self._delta({"type": "thinking_delta", "thinking": text})
                case Text(text):
                    # White space between two calls is no block of its own.
                    if self._kind == "text" or text.strip() or not self.num_calls:
                        yield from self._open("text", {"type": "text", "text": ""})
                        yield self._delta({"type": "text_delta", "text": text})
                case CallBegin(index, name):
                    self.num_calls += 1
                    block = {"type": "tool_use", "id": _call_id(self._reply, index), "name": name, "input": {}}
                    yield from self._open(f"call {index}", block)
                case CallArguments(_, text):
                    yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[bytes]:
        """End the open block."""
        if self._kind is not None:
            yield event({"type": "content_block_stop", "index": self._index}, "content_block_stop")
            self._kind = None

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if kind != self._kind:
            yield from self.close()
            self._kind = kind
            self._index += 1
            start = {"type": "content_block_start", "index": self._index, "content_block": block}
            yield event(start, "content_block_start")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta}, "content_block_delta")


async def _stream(service: Service, rendered: Rendered, reply: Reply) -> AsyncIterator[bytes]:
    splitter, blocks = rendered.splitter(), _Blocks(reply)
    is_begun = False
    try:
        async for part in reply.parts(service.settings.keep_alive_s):
            if part is None:
                yield event({"type": "ping"}, "ping") if is_begun else KEEP_ALIVE
                continue
            assert isinstance(part, Delta)
            if not is_begun:
                # Only now it is known how much of the prompt was kept.
                is_begun = True
                head = _head(service, reply) | {"content": [], "stop_reason": None, "stop_sequence": None}
                yield event({"type": "message_start", "message": head | {"usage": _usage(reply, 0)}}, "message_start")
            for data in blocks.write(reply.pieces(splitter, part)):
                yield data
            if part.finish_reason is not None:
                for data in blocks.close():
                    yield data
                delta = _stop(part.finish_reason, part.stop_match, blocks.num_calls)
                last = {"type": "message_delta", "delta": delta, "usage": _usage(reply, reply.stats.completion_tokens)}
                yield event(last | reply.figures, "message_delta")
                yield event({"type": "message_stop"}, "message_stop")
    # A stream that has begun has no status left to send; the client gets an event instead.
    except Exception as error:  # noqa: BLE001
        yield event(failure_of(error).anthropic_body, "error")


def _head(service: Service, reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": service.settings.model_name}


async def _whole(service: Service, rendered: Rendered, reply: Reply) -> Response:
    answer, split = await reply.split(rendered)
    content: list[dict[str, Any]] = []
    if split.reasoning:
        content.append({"type": "thinking", "thinking": split.reasoning, "signature": ""})
    if split.content.strip() or (split.content and not split.calls):
        content.append({"type": "text", "text": split.content})
    for i, (name, arguments) in enumerate(split.calls):
        content.append({"type": "tool_use", "id": _call_id(reply, i), "name": name, "input": _parsed(arguments)})
    stop = _stop(answer.finish_reason, answer.stop_match, len(split.calls))
    usage = {"usage": _usage(reply, reply.stats.completion_tokens)}
    return JSONResponse(_head(service, reply) | {"content": content} | stop | usage | reply.figures)


def _parsed(arguments: str) -> Any:
    """Give a call's arguments as an object; what the model wrote wrongly stays text."""
    try:
        return json.loads(arguments or "{}", strict=False)
    except ValueError:
        return {"arguments": arguments}
