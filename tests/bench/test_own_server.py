"""The benchmark against our own server: the same prompts, the same tokens, over HTTP."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from soloist.bench.local import run_request
from soloist.bench.remote import Server, measure_remote
from soloist.bench.workloads import make_workload
from soloist.llm import LLM
from tests.tiny_model import write_tiny_model

uvicorn = pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def url(tiny: Path) -> Iterator[str]:
    from soloist.server.app import App
    from soloist.server.settings import ServerSettings

    app = App(LLM(tiny, num_threads=1), ServerSettings(model_name="tiny"))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server.should_exit = True
    thread.join()
    app.service.close()


@pytest.mark.parametrize("name", ["code", "chat"])
def test_our_server_answers_as_many_tokens_as_the_engine(tiny: Path, url: str, name: str):
    llm = LLM(tiny, num_threads=1)
    workload = make_workload(name, input_tokens=None, output_tokens=12, count_tokens=None, run=123456)
    remote = measure_remote(Server(url), workload, repeats=1)
    ours = [run_request(llm, prompt, workload) for prompt in workload.repeat(1)]
    tokens = [figures.completion_tokens for figures in ours]
    assert remote.model == "tiny" and remote.warm.completion_tokens == round(sum(tokens) / len(tokens))
    assert remote.prompt_tokens == tuple(figures.prompt_tokens for figures in ours)
    assert remote.warm.cached_share < 0.2
    assert remote.warm.tpot_ms.mean > 0
