"""The one place where the error tree becomes HTTP: a status, a code, and the words of each protocol."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from soloist.errors import ContextLengthError, DoesNotFitError, NumericsError, SoloistError, UsageError
from soloist.server.stream import DONE, event

logger = logging.getLogger("soloist.server")

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ModelNameError(UsageError):
    """A request names a model that is not served, and the server is strict."""


class BusyError(SoloistError):
    """More requests wait than are allowed to."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What went wrong, in the server's words; each protocol has its own form for it."""

    status: int
    message: str
    # OpenAI's machine-readable word, such as context_length_exceeded.
    code: str | None = None
    # The field at fault.
    param: str | None = None

    @property
    def openai_type(self) -> str:
        """The kind of failure in OpenAI's words."""
        if self.status == 401:
            return "authentication_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def openai_body(self) -> dict[str, Any]:
        """The body in OpenAI's form, also an event of a stream that has begun."""
        return {
            "error": {"message": self.message, "type": self.openai_type, "param": self.param, "code": self.code},
        }

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The body in Anthropic's form, also the data of an `error` event."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def events(self, path: str) -> bytes:
        """What ends a stream of `path` that has begun and cannot go on."""
        if path.startswith("/v1/messages"):
            return event(self.anthropic_body, "error")
        if path.endswith("/responses"):
            told = {"type": "error", "code": self.code, "message": self.message, "param": self.param}
            return event(told | {"sequence_number": 0}, "error")
        if path in ("/infill", "/completion"):
            return event(self.openai_body | {"content": "", "stop": True})
        return event(self.openai_body) + DONE

    def body(self, path: str) -> dict[str, Any]:
        """The body for a request to `path`."""
        return self.anthropic_body if path.startswith("/v1/messages") else self.openai_body


def failure_of(error: BaseException) -> Failure:
    """Say what an exception means to a client; no path of this machine and no traceback is in it."""
    match error:
        case ContextLengthError():
            return Failure(status=400, message=str(error), code="context_length_exceeded")
        case ModelNameError():
            return Failure(status=404, message=str(error), code="model_not_found", param="model")
        case UsageError():
            return Failure(status=400, message=_without_paths(str(error)), code="invalid_value")
        case BusyError():
            return Failure(status=503, message=str(error), code="busy")
        case NumericsError():
            return Failure(status=500, message=_without_paths(str(error)), code="not_finite")
        case DoesNotFitError() | torch.OutOfMemoryError() | MemoryError():
            return Failure(status=503, message=_memory_report(error), code="out_of_memory")
        case RequestValidationError():
            return _validation_failure(error.errors())
        case HTTPException():
            return Failure(status=error.status_code, message=str(error.detail), code=None)
        case SoloistError():
            return Failure(status=500, message=_without_paths(str(error)), code="failed")
    logger.error("internal error", exc_info=error)
    return Failure(
        status=500,
        message=f"internal error, {type(error).__name__}: this is a fault of Soloist; its log has the traceback",
        code="internal_error",
    )


def _memory_report(error: BaseException) -> str:
    words = "not enough memory for this request; a shorter prompt needs less"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        words += f" ({free / 2**30:.2f} of {total / 2**30:.2f} GiB are free)"
    return words if not isinstance(error, DoesNotFitError) else _without_paths(str(error))


def _without_paths(message: str) -> str:
    """Cut the file in front of a message: clients are not told where things lie on this machine."""
    head, colon, rest = message.partition(": ")
    return rest if colon and ("/" in head or "\\" in head) and " " not in head else message


def _validation_failure(problems: Sequence[Any]) -> Failure:
    """Put the first thing that a schema refused into words."""
    problem = problems[0]
    where = [str(part) for part in problem["loc"] if part != "body"]
    # Names that the schema library gives to the members of a union, or to a key, are no part of the request.
    named = [part for part in where if not part.startswith(("function-", "list[", "tagged-"))]
    field = ".".join(part for part in named if part not in ("str", "[key]"))
    if problem["type"] == "json_invalid":
        return Failure(status=400, message=f"the body is not JSON: {problem['ctx'].get('error', 'damaged')}")
    if problem["type"] == "unknown_field":
        param = ".".join([*([field] if field else []), problem["ctx"]["name"]])
        return Failure(status=400, message=f"{param}: {problem['msg']}", code="unknown_field", param=param)
    given = problem.get("input")
    if isinstance(given, bytes):
        # The framework leaves a body alone that is not announced as JSON.
        message = "the body was not announced as JSON: send the header Content-Type: application/json"
        return Failure(status=400, message=message, code="content_type")
    shown = "" if isinstance(given, dict | list) or problem["type"] == "missing" else f" (given: {_short(given)})"
    message = f"{field or 'the body'}: {problem['msg']}{shown}"
    return Failure(status=400, message=message, code="invalid_value", param=field or None)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
