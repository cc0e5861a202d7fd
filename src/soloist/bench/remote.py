"""Measuring another engine: the very same prompts, sent to any server that speaks OpenAI's completions.

Tokens are those of the server's `usage`, never chunks and never counted here. A server that leaves it out of its
streams is asked for the same answer in one piece.
"""

import http.client
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from soloist.bench.figures import RequestFigures, Summary, summarise
from soloist.bench.workloads import BenchPrompt, Workload
from soloist.errors import SoloistError, UsageError

# Far more than any prompt takes to be read.
_TIMEOUT_S = 600.0


class ServerError(SoloistError):
    """A server answered with something that cannot be measured."""


@dataclass(frozen=True, kw_only=True)
class RemoteMeasurement:
    """A server under one workload."""

    url: str
    model: str
    # What it calls itself in its `Server` header; None: nothing.
    server: str | None
    warm: Summary
    # Whether its answers go on behind the model's end, as ours do.
    knows_ignore_eos: bool
    # Whether its streams say how many tokens they had; without, each answer was asked for again.
    has_usage_in_stream: bool
    # Tokens it counted in each prompt, by prompt: another count than ours is another prompt.
    prompt_tokens: tuple[int, ...]


class Server:
    """A server that speaks OpenAI's completions.

    Args:
        url: as clients have it, with or without /v1.
        model: None: the first it lists.
        api_key: None: none is sent.

    Raises:
        UsageError: the URL is none.
        ServerError: nobody answers there.
    """

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        self._url = _parse_url(url)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.name: str | None = None
        # What it answered instead of a list.
        self._why_none = ""
        # Most servers know the field or overlook it; some refuse it by name, and then go without.
        self.knows_ignore_eos = True
        self.has_usage_in_stream = True
        listed = self._first_model()
        if model is None and listed is None:
            raise ServerError(f"{self.url}/models lists no model{self._why_none}; name one with --against-model")
        self.model: str = model or str(listed)

    @property
    def url(self) -> str:
        """Where its routes are."""
        return f"{self._url.scheme}://{self._url.netloc}{self._url.path}"

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        return kind(self._url.netloc, timeout=_TIMEOUT_S)

    def _first_model(self) -> str | None:
        """Ask which models there are; also the proof that somebody listens."""
        connection = self._connect()
        try:
            connection.request("GET", f"{self._url.path}/models", headers=self._headers)
            response = connection.getresponse()
            text = response.read()
            self._note_name(response)
            if response.status in (401, 403):
                todo = "it refuses this key" if "Authorization" in self._headers else "give its key with --against-key"
                raise ServerError(f"{self.url} answered {response.status}: {todo}")
            if response.status != 200:
                self._why_none = f" (it answered {response.status})"
                return None
            return str(json.loads(text)["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url} does not answer ({error}); is the server running?") from None
        except (ValueError, KeyError, IndexError, TypeError):
            return None
        finally:
            connection.close()

    def _note_name(self, response: http.client.HTTPResponse) -> None:
        self.name = (response.getheader("Server") or "").strip() or self.name

    def run_request(self, prompt: BenchPrompt, workload: Workload) -> RequestFigures:
        """Answer one prompt, streamed, under a stopwatch.

        Raises:
            ServerError: it refuses, breaks off, or does not count tokens.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": workload.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if workload.ignore_eos and self.knows_ignore_eos:
            body["ignore_eos"] = True
        if prompt.is_chat:
            path = "/chat/completions"
            body["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            path = "/completions"
            body["prompt"] = prompt.text
        start_s = time.perf_counter()
        with self._post(path, body) as response:
            if response.status != 200:
                text = response.read().decode(errors="replace")
                if "ignore_eos" in text and "ignore_eos" in body:
                    self.knows_ignore_eos = False
                    return self.run_request(prompt, workload)
                raise ServerError(f"{self.url} answered {response.status}: {text[:300]}")
            arrivals_s, text, usage = _read_stream(response)
        ended_s = time.perf_counter()
        if usage is None:
            self.has_usage_in_stream = False
            usage = self._count(path, body, text)
        return self._figures(start_s, arrivals_s, ended_s, usage)

    @contextmanager
    def _post(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """Send a request; what goes wrong on the way, also while it is read, is a `ServerError`."""
        connection = self._connect()
        try:
            connection.request("POST", self._url.path + path, json.dumps(body), self._headers)
            response = connection.getresponse()
            self._note_name(response)
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url} broke off ({error})") from None
        finally:
            connection.close()

    def _count(self, path: str, body: dict[str, Any], text: str) -> dict[str, Any] | None:
        """Ask for a greedy answer once more, in one piece, of which servers count the tokens; None: this one does not.

        Raises:
            ServerError: the answer is another.
        """
        whole = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        with self._post(path, whole) as response:
            data = response.read()
        try:
            answer = json.loads(data)
            (choice,) = answer["choices"]
            again = _text(choice) or _text({"delta": choice.get("message")})
        except (ValueError, KeyError, TypeError):
            return None
        if again != text:
            raise ServerError(
                f"{self.url} sends no usage in its stream, and another answer without one: its tokens cannot be counted"
            )
        return answer.get("usage")

    def _figures(
        self, start_s: float, arrivals_s: list[float], ended_s: float, usage: dict[str, Any] | None
    ) -> RequestFigures:
        if usage is not None and usage.get("completion_tokens") == 1:
            # The end token alone shows nothing.
            arrivals_s = arrivals_s or [ended_s]
        is_counted = usage is not None and {"prompt_tokens", "completion_tokens"} <= usage.keys()
        if usage is None or not is_counted or not arrivals_s:
            what = "visible token" if is_counted else "usage with prompt_tokens and completion_tokens"
            raise ServerError(f"{self.url} sent no {what} in its stream: its tokens cannot be counted")
        if usage["completion_tokens"] >= 2 and len(arrivals_s) < 2:
            raise ServerError(
                f"{self.url} sent {usage['completion_tokens']} tokens in {len(arrivals_s)} pieces: a time per token"
                " needs two of each"
            )
        details = usage.get("prompt_tokens_details") or {}
        return RequestFigures(
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens"),
            completion_tokens=usage["completion_tokens"],
            ttft_s=arrivals_s[0] - start_s,
            e2e_s=arrivals_s[-1] - start_s,
            chunk_gaps_s=tuple(b - a for a, b in itertools.pairwise(arrivals_s)),
        )


def _parse_url(url: str) -> SplitResult:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"--against wants the URL of a server, as in http://127.0.0.1:8000/v1 (given: {url!r})")
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith("/v1") else f"{path}/v1", query="", fragment="")


def _read_stream(response: http.client.HTTPResponse) -> tuple[list[float], str, dict[str, Any] | None]:
    """Read events; give when each with visible text came, the text, and the usage if there is one."""
    arrivals_s, pieces, usage = [], [], None
    for event in _events(response):
        now_s = time.perf_counter()
        if event.get("error"):
            raise ServerError(f"the server broke off: {json.dumps(event['error'])[:300]}")
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            if text := _text(choice):
                arrivals_s.append(now_s)
                pieces.append(text)
    return arrivals_s, "".join(pieces), usage


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if not line.startswith(b"data:"):
            # Comments keep a connection alive.
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            yield json.loads(data)
        except ValueError:
            raise ServerError(f"the server sent an event that is not JSON: {data[:100]!r}") from None


def _text(choice: dict[str, Any]) -> str:
    """Give what a choice shows: an answer, its reasoning, or plain text."""
    delta = choice.get("delta") or {}
    return "".join(str(delta.get(key) or "") for key in ("content", "reasoning_content", "reasoning")) or str(
        choice.get("text") or ""
    )


def measure_remote(server: Server, workload: Workload, *, repeats: int) -> RemoteMeasurement:
    """Send a server the prompts that `local.measure` ran, in the same order."""
    server.run_request(workload.repeat(0)[0], workload)
    runs = [[server.run_request(prompt, workload) for prompt in workload.repeat(i + 1)] for i in range(repeats)]
    return RemoteMeasurement(
        url=server.url,
        model=server.model,
        server=server.name,
        warm=summarise(runs),
        knows_ignore_eos=server.knows_ignore_eos,
        has_usage_in_stream=server.has_usage_in_stream,
        prompt_tokens=tuple(request.prompt_tokens for request in runs[0]),
    )
