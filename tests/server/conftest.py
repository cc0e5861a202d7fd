"""What the server's tests share: tokenizers, scripted models behind a client, a tiny real model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from soloist.llm import LLM
from soloist.tokenizer import Tokenizer
from tests.server.client import TOOLS_TEMPLATE, Client, make_tokenizer, scripted_llm
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def serve() -> Iterator[Callable[..., Client]]:
    """Serve a model until the test ends."""
    clients: list[Client] = []

    def start(llm: LLM, **settings: Any) -> Client:
        clients.append(Client(llm, **settings))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


@pytest.fixture
def say(serve, tokenizer: Tokenizer) -> Callable[..., Client]:
    """Serve a model that says these texts, one group a step."""

    def start(*groups: str | list[int], ends: bool = True, **settings: Any) -> Client:
        return serve(scripted_llm(tokenizer, list(groups), ends=ends), **settings)

    return start


@pytest.fixture(scope="session")
def tools_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    fim = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
    special = ("<|bos|>", "<|im_end|>", "<|endoftext|>", *fim)
    return make_tokenizer(tmp_path_factory.mktemp("tools"), TOOLS_TEMPLATE, special=special, user_defined=())


@pytest.fixture
def act(serve, tools_tokenizer: Tokenizer) -> Callable[..., Client]:
    """Serve a model that says a text, some tokens a step."""

    def start(text: str, size: int = 3, max_context_len: int = 512, **settings) -> Client:
        ids = tools_tokenizer.encode(text, allow_special=True)
        groups = [ids[i : i + size] for i in range(0, len(ids), size)]
        return serve(scripted_llm(tools_tokenizer, groups, max_context_len=max_context_len), **settings)

    return start
