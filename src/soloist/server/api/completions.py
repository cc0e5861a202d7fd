"""`/v1/completions`: text or token ids continued, holes filled, prompts scored."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from soloist.answer import Delta
from soloist.errors import UsageError
from soloist.runtime.ring import TokenLogprob
from soloist.sampling_params import SamplingParams
from soloist.server.api.chat import FINISH_REASONS, added_usage, progress, token_text
from soloist.server.api.model_name import check_model
from soloist.server.failures import failure_of
from soloist.server.protocol.openai import CompletionRequest
from soloist.server.reply import Ask, Progress, Reply
from soloist.server.service import Service
from soloist.server.stream import DONE, KEEP_ALIVE, EventStream, complete, event
from soloist.tokenizer import Tokenizer

# OpenAI's own default of this route.
DEFAULT_MAX_TOKENS = 16


def completion_routes(service: Service) -> APIRouter:
    """Make the routes of OpenAI's completions."""
    router = APIRouter()

    @router.post("/v1/completions")
    @router.post("/completions", include_in_schema=False)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        check_model(service, body.model)
        asks = make_asks(service, body)
        if body.stream:
            return EventStream(_stream(service, body, asks, service.ask(asks[0])))
        return await complete(request, _whole(service, body, asks))

    return router


def make_asks(service: Service, body: CompletionRequest) -> list[Ask]:
    """Turn a request into the answers that are wanted: `n` for every prompt, in order."""
    if body.best_of not in (None, body.n or 1):
        raise UsageError("best_of ranks more answers than are returned, which is not done here; leave it out")
    if body.echo and body.stream:
        raise UsageError("echo cannot be streamed; set stream to false")
    is_scored = bool(body.echo) and body.logprobs is not None
    params = body.sampling_params(
        service.settings.defaults,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
    )
    asks: list[Ask] = []
    for prompt in _prompts(body.prompt):
        prompt_ids, prompt_params = _prompt(service, body, prompt, params)
        for i in range(body.n or 1):
            seed = None if params.seed is None else params.seed + i
            asks.append(
                Ask(
                    route="/v1/completions",
                    prompt_ids=prompt_ids,
                    params=replace(prompt_params, seed=seed),
                    constraint=service.constraint(body.schema_wanted, prompt_params),
                    prompt_logprobs=body.logprobs if is_scored else None,
                    key=body.session_id if not asks else None,
                    wants_progress=bool(body.return_progress),
                )
            )
    return asks


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise UsageError("prompt is an empty list; give a text, or token ids")
    if all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    return [item for item in prompt if not isinstance(item, int)]


def _prompt(
    service: Service, body: CompletionRequest, prompt: str | list[int], params: SamplingParams
) -> tuple[list[int], SamplingParams]:
    """Give a prompt's ids, and the parameters with which it is continued."""
    tokenizer = service.llm.tokenizer
    if body.suffix:
        if not isinstance(prompt, str):
            raise UsageError("suffix needs a prompt that is text")
        if tokenizer is None:
            raise UsageError("this model came without a tokenizer: give token ids, and no suffix")
        return tokenizer.encode_infill(prompt, body.suffix), infill_params(params, tokenizer)
    if isinstance(prompt, str) and body.add_special_tokens is False and tokenizer is not None:
        prompt_ids = tokenizer.encode(prompt, allow_special=True)
    else:
        prompt_ids = service.llm.encode(prompt)
    # An editor may have written the markers of a hole itself; what ends the filling is the same.
    if tokenizer is not None and tokenizer.fim is not None and tokenizer.fim.middle_id in prompt_ids:
        return prompt_ids, infill_params(params, tokenizer)
    return prompt_ids, params


def infill_params(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Add what ends the filling of a hole: none of the model's markers reaches an editor."""
    fim = tokenizer.fim
    assert fim is not None
    # The longest lists of editors name markers too.
    stops = tuple(dict.fromkeys((*params.stop_strings, *fim.stop_strings)))
    return replace(params, stop=stops, stop_token_ids=(*params.stop_token_ids, *fim.end_ids))


@dataclass(kw_only=True)
class _Logprobs:
    """Log probabilities in the form of the completions API, growing with the text."""

    num_top: int
    offset: int = 0

    def of(self, service: Service, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """Describe the next tokens; one without an entry is the first of a prompt."""
        tokens = [token_text(service, token_id)[0] for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [self._top(service, entry) for entry in entries] if self.num_top else None,
            "text_offset": offsets,
        }

    def _top(self, service: Service, entry: TokenLogprob | None) -> dict[str, float] | None:
        if entry is None:
            return None
        top: dict[str, float] = {}
        # Several tokens may look alike as text; the likeliest stands for them.
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(token_text(service, token_id)[0], logprob)
        return top


def _head(service: Service, reply: Reply, completion_id: str) -> dict[str, Any]:
    return {
        "id": completion_id,
        "object": "text_completion",
        "created": reply.created,
        "model": service.settings.model_name,
    }


async def _stream(service: Service, body: CompletionRequest, asks: Sequence[Ask], reply: Reply) -> AsyncIterator[bytes]:
    completion_id = f"cmpl-{reply.id}"
    options = body.stream_options
    total = None
    try:
        for index, ask in enumerate(asks):
            reply = reply if index == 0 else service.ask(ask)
            logprobs = None if body.logprobs is None else _Logprobs(num_top=body.logprobs)
            async for part in reply.parts(service.settings.keep_alive_s):
                if part is None:
                    yield KEEP_ALIVE
                    continue
                if isinstance(part, Progress):
                    yield event(_head(service, reply, completion_id) | {"choices": []} | progress(part))
                    continue
                choice = _choice(service, body, index, part, logprobs)
                chunk = _head(service, reply, completion_id) | {"choices": [choice]}
                if options and (options.continuous_usage_stats or options.include_usage):
                    chunk["usage"] = reply.usage if options.continuous_usage_stats else None
                if part.finish_reason is not None and not (options and options.include_usage and ask is asks[-1]):
                    chunk |= reply.figures
                yield event(chunk)
            total = _summed_usage(total, reply.usage, body.n or 1, index)
        if options and options.include_usage:
            yield event(_head(service, reply, completion_id) | {"choices": [], "usage": total} | reply.figures)
    # A stream that has begun has no status left to send; the client gets an event instead.
    except Exception as error:  # noqa: BLE001
        yield event(failure_of(error).openai_body)
    yield DONE


def _choice(
    service: Service, body: CompletionRequest, index: int, delta: Delta, logprobs: _Logprobs | None
) -> dict[str, Any]:
    reason = delta.finish_reason
    choice: dict[str, Any] = {
        "index": index,
        "text": delta.text,
        "logprobs": None if logprobs is None else logprobs.of(service, delta.token_ids, delta.logprobs),
        "finish_reason": None if reason is None else FINISH_REASONS[reason],
    }
    if body.return_token_ids:
        choice["token_ids"] = list(delta.token_ids)
    return choice


async def _whole(service: Service, body: CompletionRequest, asks: Sequence[Ask]) -> Response:
    choices, total = [], None
    for index, ask in enumerate(asks):
        reply = service.ask(ask)
        if index == 0:
            completion_id = f"cmpl-{reply.id}"
        answer = await reply.whole()
        prompt_text = _echoed(service, ask.prompt_ids) if body.echo else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": prompt_text + answer.text,
            "logprobs": None,
            "finish_reason": FINISH_REASONS[answer.finish_reason],
        }
        if body.logprobs is not None:
            token_ids, entries = list(answer.token_ids), list[TokenLogprob | None](answer.logprobs)
            if body.echo:
                token_ids = [*ask.prompt_ids, *token_ids]
                entries = [None, *reply.prompt_logprobs, *entries]
            # Describing thousands of tokens must not hold up the event loop.
            choice["logprobs"] = await asyncio.to_thread(
                _Logprobs(num_top=body.logprobs).of, service, token_ids, entries
            )
        if body.return_token_ids:
            choice |= {"token_ids": answer.token_ids, "prompt_token_ids": list(ask.prompt_ids)}
        choices.append(choice)
        total = _summed_usage(total, reply.usage, body.n or 1, index)
    content = _head(service, reply, completion_id) | {"choices": choices, "usage": total}
    return JSONResponse(content | reply.figures)


def _echoed(service: Service, prompt_ids: Sequence[int]) -> str:
    return "" if service.llm.tokenizer is None else service.llm.tokenizer.decode(prompt_ids, show_special=True)


def _summed_usage(total: dict[str, Any] | None, usage: dict[str, Any], n: int, index: int) -> dict[str, Any]:
    """Add the usage of the next answer; each prompt counts once, however many answers it has."""
    if total is None or index % n:
        return added_usage(total, usage)
    sums = {key: total[key] + usage[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in (total, usage))
    return sums | {"prompt_tokens_details": {"cached_tokens": cached}}
