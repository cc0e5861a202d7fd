"""A server in a thread, behind a real socket: for clients that bring their own HTTP."""

import contextlib
import threading
import time
from collections.abc import Iterator

import uvicorn

from soloist.llm import LLM
from soloist.server.app import App
from soloist.server.listen import Application, bind
from soloist.server.settings import ServerSettings


@contextlib.contextmanager
def serving(app: Application) -> Iterator[str]:
    """Serve an application while entered; gives the URL."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        app.close()
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()


@contextlib.contextmanager
def served(llm: LLM, **settings) -> Iterator[tuple[str, App]]:
    """Serve a model while entered; gives the URL and the application."""
    app = App(llm, ServerSettings(**({"model_name": "tiny"} | settings)))
    with serving(app) as url:
        yield url, app
