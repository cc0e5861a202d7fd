"""A client that talks to the application in this process: no socket, every byte and every disconnect under control."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soloist.llm import LLM
from soloist.server.app import App
from soloist.server.settings import ServerSettings
from soloist.server.stream import KEEP_ALIVE
from soloist.tokenizer import Tokenizer
from tests.scripted import Script
from tests.tiny_model import CHAT_TEMPLATE
from tests.tiny_vocabulary import make_backend, make_folder

TIMEOUT_S = 20
# With tools, which it shows, and reasoning, which it opens if asked to.
TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content or '' }}{{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls else '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>{% endif %}{% endif %}"
)


@dataclass
class Response:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    is_complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of every event: parsed, but for `[DONE]`."""
        lines = self.body.decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [text if text == "[DONE]" else json.loads(text) for text in data]

    @property
    def named_events(self) -> list[tuple[str, Any]]:
        """Name and data of every event that has a name."""
        blocks = [block for block in self.body.decode().split("\n\n") if block.startswith("event: ")]
        pairs = [block.split("\n", 1) for block in blocks]
        return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]

    @property
    def num_keep_alives(self) -> int:
        return self.chunks.count(KEEP_ALIVE)


class Client:
    """Talks to one server; close it, as its thread would go on."""

    def __init__(self, llm: LLM, **settings: Any) -> None:
        given = {"model_name": "tiny", "keep_alive_s": 5.0} | settings
        self.app = App(llm, ServerSettings(**given))
        self.service = self.app.service
        self.loop = asyncio.new_event_loop()

    def close(self) -> None:
        self.service.close()
        self.loop.close()

    def get(self, path: str, **headers: str) -> Response:
        return self.run(self.call("GET", path, headers=headers))

    def post(self, path: str, body: Any = None, **headers: str) -> Response:
        return self.run(self.call("POST", path, body, headers=headers))

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, TIMEOUT_S))

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        is_gone: Callable[[Response], bool] = lambda response: False,
        gone: asyncio.Event | None = None,
    ) -> Response:
        """Make one request.

        Args:
            method: of HTTP.
            path: with its query.
            body: bytes, or what becomes JSON.
            headers: with _ for -.
            is_gone: asked after every piece of the body whether the client goes now.
            gone: set to go at another moment.
        """
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {"host": "localhost:8000", "content-type": "application/json", "content-length": str(len(content))}
        given |= {name.replace("_", "-").lower(): value for name, value in (headers or {}).items()}
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }
        gone = gone or asyncio.Event()
        sent = [{"type": "http.request", "body": content, "more_body": False}]
        response = Response()

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if gone.is_set():
                # As uvicorn does: nobody is told that nobody reads.
                return
            if message["type"] == "http.response.start":
                response.status = message["status"]
                response.headers = {name.decode(): value.decode() for name, value in message["headers"]}
                return
            if message.get("body"):
                response.chunks.append(message["body"])
            response.is_complete = not message.get("more_body", False)
            if is_gone(response):
                gone.set()
                # As with a socket: what follows a disconnect happens a little later.
                await asyncio.sleep(0)

        await self.app(scope, receive, send)
        return response


def make_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE, **backend: Any) -> Tokenizer:
    config = {"eos_token": "<|im_end|>"} | ({"chat_template": chat_template} if chat_template else {})
    return Tokenizer.load(make_folder(folder, make_backend(**backend), tokenizer_config=config))


def scripted_llm(
    tokenizer: Tokenizer, groups: list[str | list[int]], *, ends: bool = True, max_context_len: int = 512
) -> LLM:
    """Make a model that says these texts or ids, one group a step; with `ends`, the end token behind them."""
    ids = [tokenizer.encode(group, allow_special=True) if isinstance(group, str) else group for group in groups]
    if ends:
        ids.append([tokenizer.eos_id])
    script = Script(ids, vocab_size=tokenizer.num_tokens, end_id=tokenizer.eos_id, max_context_len=max_context_len)
    return LLM.of(script.engine(eos_token_ids=(tokenizer.eos_id,)), tokenizer, "scripted")
