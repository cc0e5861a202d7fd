"""`/v1/chat/completions`: OpenAI's chat, one event for every committed step."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from soloist.answer import Delta
from soloist.errors import UsageError
from soloist.runtime.ring import TokenLogprob
from soloist.sampling_params import SamplingParams
from soloist.server.api.model_name import check_model
from soloist.server.failures import failure_of
from soloist.server.protocol.openai import ChatRequest
from soloist.server.rendering import Rendered, render_chat
from soloist.server.reply import Ask, Progress, Reply
from soloist.server.reply_text import Piece, Reasoning, SplitText
from soloist.server.service import Service
from soloist.server.stream import DONE, KEEP_ALIVE, EventStream, complete, event
from soloist.server.tool_calls import CallArguments, CallBegin, Text

FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}


def chat_routes(service: Service) -> APIRouter:
    """Make the routes of OpenAI's chat."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    @router.post("/chat/completions", include_in_schema=False)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        check_model(service, body.model)
        asks, rendered = make_asks(service, body)
        if body.stream:
            # The first answer is put in line before the response begins, so that a bad request is an HTTP error.
            return EventStream(_stream(service, body, rendered, asks, service.ask(asks[0])))
        return await complete(request, _whole(service, body, rendered, asks))

    return router


def make_asks(service: Service, body: ChatRequest) -> tuple[list[Ask], Rendered]:
    """Turn a request into the answers that are wanted, `n` of them, and how they are read."""
    tools = _callable_tools(body)
    rendered = render_chat(
        service.llm,
        body.messages,
        tools=tools,
        template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
        rule=body.call_rule,
    )
    params = _params(service, body)
    asks = []
    for i in range(body.n or 1):
        constraint = service.constraint(body.schema_wanted, params, rendered)
        asks.append(
            Ask(
                route="/v1/chat/completions",
                prompt_ids=rendered.ids,
                params=params if params.seed is None else replace(params, seed=params.seed + i),
                turn_ends=rendered.turn_ends,
                constraint=constraint,
                find_end=rendered.call_end(),
                key=body.session_id if i == 0 else None,
                wants_progress=bool(body.return_progress),
                template_s=rendered.template_s,
            )
        )
    return asks, rendered


def _params(service: Service, body: ChatRequest) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise UsageError("top_logprobs is set, but logprobs is not: set logprobs to true")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise UsageError("max_tokens and max_completion_tokens are two names of one limit; give one of them")
    return body.sampling_params(
        service.settings.defaults,
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _callable_tools(body: ChatRequest) -> list[dict[str, Any]] | None:
    """Give the tools that the template shall show; None for none."""
    if not body.tools or body.tool_choice == "none":
        if body.tool_choice not in (None, "none", "auto"):
            raise UsageError("tool_choice asks for a call, but there are no tools")
        return None
    return [tool.model_dump(exclude_none=True) for tool in body.tools]


def call_id(reply: Reply, index: int) -> str:
    """Name a call of an answer."""
    return f"call_{reply.id.replace('-', '')}{index}"


class _Chunks:
    """Writes the chunks of one choice."""

    def __init__(self, service: Service, body: ChatRequest, rendered: Rendered, reply: Reply, index: int) -> None:
        self._service, self._body, self._reply, self._index = service, body, reply, index
        self._splitter = rendered.splitter()
        self._warnings = rendered.warnings
        self._is_first = True
        self.num_calls = 0

    def step(self, delta: Delta, completion_id: str, *, is_last_choice: bool) -> bytes:
        """Write the chunk of one step."""
        message = self._message(self._reply.pieces(self._splitter, delta))
        choice: dict[str, Any] = {
            "index": self._index,
            "delta": message,
            "logprobs": _logprobs(self._service, delta.logprobs) if self._body.logprobs else None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        if delta.finish_reason is not None:
            choice["finish_reason"] = _finish(delta.finish_reason, self.num_calls)
        chunk = chunk_head(self._service, self._reply, completion_id) | {"choices": [choice]}
        options = self._body.stream_options
        if options and (options.continuous_usage_stats or options.include_usage):
            chunk["usage"] = self._reply.usage if options.continuous_usage_stats else None
        if delta.finish_reason is not None and not (options and options.include_usage and is_last_choice):
            chunk |= figures(self._reply, self._warnings)
        return event(chunk)

    def _message(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        split = SplitText(calls=[])
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    split.reasoning += text
                case Text(text):
                    split.content += text
                case CallBegin(index, name):
                    self.num_calls += 1
                    function = {"name": name, "arguments": ""}
                    calls[index] = {
                        "index": index,
                        "id": call_id(self._reply, index),
                        "type": "function",
                        "function": function,
                    }
                case CallArguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        message: dict[str, Any] = {"role": "assistant"} if self._is_first else {}
        self._is_first = False
        if split.reasoning:
            message |= {"reasoning_content": split.reasoning, "reasoning": split.reasoning}
        if split.content or not (split.reasoning or calls):
            message["content"] = split.content
        if calls:
            message["tool_calls"] = list(calls.values())
        return message


def chunk_head(service: Service, reply: Reply, completion_id: str) -> dict[str, Any]:
    """Give what every chunk of a chat begins with."""
    return {
        "id": completion_id,
        "object": "chat.completion.chunk",
        "created": reply.created,
        "model": service.settings.model_name,
    }


def figures(reply: Reply, warnings: Sequence[str]) -> dict[str, Any]:
    """Give what an answer took, and what of the request had no effect."""
    return reply.figures | ({"warnings": list(warnings)} if warnings else {})


def _finish(reason: str, num_calls: int) -> str:
    return "tool_calls" if num_calls and reason == "stop" else FINISH_REASONS[reason]


async def _stream(
    service: Service, body: ChatRequest, rendered: Rendered, asks: Sequence[Ask], reply: Reply
) -> AsyncIterator[bytes]:
    completion_id = f"chatcmpl-{reply.id}"
    total = None
    try:
        for index, ask in enumerate(asks):
            reply = reply if index == 0 else service.ask(ask)
            chunks = _Chunks(service, body, rendered, reply, index)
            async for part in reply.parts(service.settings.keep_alive_s):
                if part is None:
                    yield KEEP_ALIVE
                elif isinstance(part, Progress):
                    yield event(chunk_head(service, reply, completion_id) | {"choices": []} | progress(part))
                else:
                    yield chunks.step(part, completion_id, is_last_choice=index == len(asks) - 1)
            total = added_usage(total, reply.usage)
        if body.stream_options and body.stream_options.include_usage:
            yield event(
                chunk_head(service, reply, completion_id)
                | {"choices": [], "usage": total}
                | figures(reply, rendered.warnings)
            )
    # A stream that has begun has no status left to send; the client gets an event instead.
    except Exception as error:  # noqa: BLE001
        yield event(failure_of(error).openai_body)
    yield DONE


def progress(part: Progress) -> dict[str, Any]:
    """Say how much of the prompt has been read."""
    return {"prompt_progress": {"total": part.num_total, "processed": part.num_done}}


async def _whole(service: Service, body: ChatRequest, rendered: Rendered, asks: Sequence[Ask]) -> Response:
    choices, total = [], None
    for index, ask in enumerate(asks):
        reply = service.ask(ask)
        if index == 0:
            completion_id = f"chatcmpl-{reply.id}"
        answer, split = await reply.split(rendered)
        choice: dict[str, Any] = {
            "index": index,
            "message": _message(split, reply),
            "logprobs": _logprobs(service, answer.logprobs) if body.logprobs else None,
            "finish_reason": _finish(answer.finish_reason, len(split.calls)),
        }
        if body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        choices.append(choice)
        total = added_usage(total, reply.usage)
    head = {"id": completion_id, "object": "chat.completion", "created": reply.created}
    content = head | {"model": service.settings.model_name, "choices": choices, "usage": total}
    if body.return_token_ids:
        content["prompt_token_ids"] = rendered.ids
    return JSONResponse(content | figures(reply, rendered.warnings))


def _message(split: SplitText, reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": split.content}
    if split.reasoning:
        message |= {"reasoning_content": split.reasoning, "reasoning": split.reasoning}
    if split.calls:
        message["content"] = split.content or None
        message["tool_calls"] = [
            {"id": call_id(reply, i), "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(split.calls)
        ]
    return message


def added_usage(total: dict[str, Any] | None, usage: dict[str, Any]) -> dict[str, Any]:
    """Add the usage of one more answer to the same prompt; the prompt counts once."""
    if total is None:
        return usage
    num_answer = total["completion_tokens"] + usage["completion_tokens"]
    return total | {"completion_tokens": num_answer, "total_tokens": total["prompt_tokens"] + num_answer}


def token_text(service: Service, token_id: int) -> tuple[str, list[int]]:
    """Give a token as text and as bytes; a part of a character has U+FFFD in its text."""
    if service.llm.tokenizer is None:
        return "", []
    spelled = service.llm.tokenizer.token_bytes(token_id, show_special=True)
    return spelled.decode("utf-8", "replace"), list(spelled)


def _logprobs(service: Service, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        text, spelled = token_text(service, token_id)
        return {"token": text, "logprob": logprob, "bytes": spelled}

    return {
        "content": [
            describe(entry.token_id, entry.logprob) | {"top_logprobs": [describe(*pair) for pair in entry.top]}
            for entry in entries
        ]
    }
