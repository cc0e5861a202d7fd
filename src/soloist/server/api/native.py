"""`/infill` and `/completion`: llama.cpp's own protocol, as editors speak it."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from soloist.answer import Delta
from soloist.errors import UsageError
from soloist.server.api.chat import progress
from soloist.server.api.completions import infill_params
from soloist.server.api.model_name import check_model
from soloist.server.failures import failure_of
from soloist.server.protocol.llama_cpp import ExtraFile, InfillRequest, NativeCompletionRequest, NativeFields
from soloist.server.reply import Answer, Ask, Progress, Reply
from soloist.server.service import Service
from soloist.server.stream import KEEP_ALIVE, EventStream, complete, event
from soloist.tokenizer import Tokenizer

# Tokens of an answer to an editor that does not say.
_DEFAULT_INFILL_TOKENS = 128


def native_routes(service: Service) -> APIRouter:
    """Make llama.cpp's routes."""
    router = APIRouter()

    @router.post("/infill")
    async def infill(body: InfillRequest, request: Request) -> Response:
        check_model(service, body.model)
        return await _answer(service, body, request, _infill_ask(service, body))

    @router.post("/completion")
    async def completion(body: NativeCompletionRequest, request: Request) -> Response:
        check_model(service, body.model)
        params = body.native_params(service.settings.defaults)
        ask = Ask(
            route="/completion",
            prompt_ids=_prompt_ids(service, body.prompt),
            params=params,
            constraint=service.constraint(body.json_schema, params),
            wants_progress=bool(body.return_progress),
        )
        return await _answer(service, body, request, ask)

    return router


def _infill_ask(service: Service, body: InfillRequest) -> Ask:
    tokenizer = service.llm.tokenizer
    if tokenizer is None or tokenizer.fim is None:
        raise UsageError("this model has no tokens for filling a hole; a coder model has them")
    if body.json_schema is not None:
        raise UsageError("json_schema: a hole in a text has no form of its own")
    params = infill_params(body.native_params(service.settings.defaults), tokenizer)
    if params.max_tokens is None:
        params = replace(params, max_tokens=_DEFAULT_INFILL_TOKENS)
    assert params.max_tokens is not None
    room = service.llm.max_context_len - max(params.max_tokens, 1)
    prompt_ids = _infill_prompt(tokenizer, body, room)
    # What warms the cache gives way to what a person waits for, and the other way round.
    key = f"infill {body.id_slot if body.id_slot is not None else -1}"
    return Ask(route="/infill", prompt_ids=prompt_ids, params=params, key=key)


def _infill_prompt(tokenizer: Tokenizer, body: InfillRequest, room: int) -> list[int]:
    """Write the hole and what other files say, cut to `room` tokens: what is far from the cursor goes first.

    Other files stand in front, so that what they say is read once and kept.
    """
    assert tokenizer.fim is not None
    before, after = tokenizer.encode(body.input_prefix + body.prompt), tokenizer.encode(body.input_suffix)
    # The three markers, and BOS.
    room -= 4
    after = after[: max(room // 4, room - len(before))]
    before = before[max(0, len(before) - (room - len(after))) :]
    room -= len(before) + len(after)
    extra: list[int] = []
    for file in reversed(body.input_extra or []):
        ids = _extra_file(tokenizer, file)
        if len(ids) + len(extra) > room:
            break
        extra = ids + extra
    fim = tokenizer.fim
    return tokenizer.with_bos([*extra, fim.prefix_id, *before, fim.suffix_id, *after, fim.middle_id])


def _extra_file(tokenizer: Tokenizer, file: ExtraFile) -> list[int]:
    separator = next(
        (i for text in ("<|file_sep|>", "<file_sep>") if (i := tokenizer.token_id(text)) is not None), None
    )
    if separator is None:
        return tokenizer.encode(f"--- {file.filename}\n{file.text}\n")
    return [separator, *tokenizer.encode(f"{file.filename}\n{file.text}\n")]


def _prompt_ids(service: Service, prompt: str | Sequence[int | str]) -> list[int]:
    if isinstance(prompt, str):
        return service.llm.encode(prompt)
    tokenizer = service.llm.tokenizer
    ids: list[int] = []
    for part in prompt:
        if isinstance(part, int):
            ids.append(part)
        elif tokenizer is None:
            raise UsageError("this model came without a tokenizer: give token ids")
        else:
            ids += tokenizer.encode(part, allow_special=True, add_bos=not ids)
    return ids


async def _answer(service: Service, body: NativeFields, request: Request, ask: Ask) -> Response:
    reply = service.ask(ask)
    if body.stream:
        return EventStream(_stream(service, body, reply))
    return await complete(request, _whole(service, body, reply))


class _TimeLimit:
    """Ends an answer at the first line break after a time; editors would rather have less than wait."""

    def __init__(self, limit_ms: int | None) -> None:
        self._limit_ms = limit_ms
        self._first_s: float | None = None
        self.is_over = False

    def note(self, reply: Reply, text: str) -> None:
        """Look at the clock after another piece of text."""
        now_s = time.perf_counter()
        self._first_s = self._first_s or now_s
        has_passed = self._limit_ms and 1000 * (now_s - self._first_s) > self._limit_ms
        if has_passed and "\n" in text and not self.is_over:
            self.is_over = True
            reply.cancel()


async def _stream(service: Service, body: NativeFields, reply: Reply) -> AsyncIterator[bytes]:
    limit, whole = _TimeLimit(body.t_max_predict_ms), Answer()
    try:
        async for part in reply.parts(service.settings.keep_alive_s):
            if part is None:
                yield KEEP_ALIVE
            elif isinstance(part, Progress):
                yield event({"content": "", "stop": False} | progress(part))
            else:
                whole.add(part)
                limit.note(reply, whole.text)
                yield event(_filtered(_piece(service, body, reply, part, whole, limit), body.response_fields))
    # A stream that has begun has no status left to send; the client gets an event instead.
    except Exception as error:  # noqa: BLE001
        yield event(failure_of(error).openai_body | {"content": "", "stop": True})


def _piece(
    service: Service, body: NativeFields, reply: Reply, delta: Delta, whole: Answer, limit: _TimeLimit
) -> dict[str, Any]:
    piece: dict[str, Any] = {"content": delta.text, "stop": False, "index": 0, "tokens": list(delta.token_ids)}
    if delta.finish_reason is None:
        return piece | {
            "id_slot": 0,
            "tokens_predicted": reply.num_tokens,
            "tokens_evaluated": len(reply.ask.prompt_ids),
        }
    return piece | _summary(service, body, reply, whole, limit)


def _summary(service: Service, body: NativeFields, reply: Reply, answer: Answer, limit: _TimeLimit) -> dict[str, Any]:
    stats = reply.stats
    stop_types = {"stop": "word" if isinstance(answer.stop_match, str) else "eos", "length": "limit"}
    return {
        "stop": True,
        "index": 0,
        "id_slot": body.id_slot or 0,
        "model": service.settings.model_name,
        "tokens_predicted": stats.completion_tokens,
        "tokens_evaluated": stats.prompt_tokens,
        "tokens_cached": stats.cached_tokens,
        "has_new_line": "\n" in answer.text,
        "truncated": False,
        "stop_type": "limit" if limit.is_over else stop_types.get(answer.finish_reason, "none"),
        "stopping_word": answer.stop_match if isinstance(answer.stop_match, str) else "",
    } | reply.figures


async def _whole(service: Service, body: NativeFields, reply: Reply) -> Response:
    limit, answer = _TimeLimit(body.t_max_predict_ms), Answer()
    async for part in reply.parts():
        if isinstance(part, Delta):
            answer.add(part)
            limit.note(reply, answer.text)
    content: dict[str, Any] = {"content": answer.text, "tokens": answer.token_ids if body.return_tokens else []}
    return JSONResponse(_filtered(content | _summary(service, body, reply, answer, limit), body.response_fields))


def _filtered(content: dict[str, Any], fields: Sequence[str] | None) -> dict[str, Any]:
    """Keep only the fields that were asked for; a/b is field b of a, under that whole name."""
    if fields is None:
        return content
    kept = {}
    for name in fields:
        value: Any = content
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            kept[name] = value
    return kept
