"""`soloist serve` from the outside: what it refuses before it loads, and a life from start to signal."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from soloist.cli import main
from soloist.errors import UnsupportedError, UsageError
from soloist.server.listen import bind
from tests.server.client import scripted_llm

SOLOIST = Path(sys.executable).parent / "soloist"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--host", "0.0.0.0"], "there is no key"),
        (["--host", "no.such.host.example", "--no-auth"], "cannot listen on"),
        (["--temperature", "-1"], "temperature is -1"),
        (["one", "--model", "two"], "given twice"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(words, complaint, capsys):
    handler = signal.getsignal(signal.SIGTERM)
    assert main(["serve", *words]) == 2
    signal.signal(signal.SIGTERM, handler)
    assert complaint in capsys.readouterr().err


def test_replicas_are_refused_where_ray_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--replicas", "2", "--port", "0"]) == 2
    assert "pip install 'soloist[server,replicas]'" in capsys.readouterr().err


def test_traces_are_refused_where_their_package_is_missing(serve, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'soloist\[server,telemetry\]'"):
        serve(scripted_llm(tokenizer, ["a"]), sends_traces=True)


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match=r"cannot listen on .* --port 0 takes any free port"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_small_events_are_sent_at_once():
    # Without the protocol's number asyncio leaves Nagle's algorithm on: 40 ms for the first event.
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


@contextlib.contextmanager
def running(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `soloist serve`; gives the process and its URL."""
    words = (str(SOLOIST), "serve", str(folder), "--port", "0", "--threads", "1", "--dtype", "float32", *words)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # A shell's background jobs ignore SIGINT, and so would what they start.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    signal.signal(signal.SIGINT, handler)
    try:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "is ready" in line)
        yield server, next(word for word in line.split() if word.startswith("http")).rstrip(",").removesuffix("/v1")
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def ask(url: str, **fields: Any) -> Any:
    body = {"ignore_eos": True} | fields
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    return urllib.request.urlopen(request, timeout=20)


@pytest.mark.parametrize(
    ("signal_number", "exit_code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_server_lives_from_start_to_signal(tiny_folder: Path, signal_number: int, exit_code: int):
    hi = [{"role": "user", "content": "hi"}]
    with running(tiny_folder, "-c", "512") as (server, url), ask(url, messages=hi, stream=True) as stream:
        assert stream.readline().startswith(b"data: ")
        begin_s = time.monotonic()
        server.send_signal(signal_number)
        # A running answer does not hold up the end.
        assert server.wait(timeout=20) == exit_code
        assert time.monotonic() - begin_s < 8


def test_a_server_that_is_killed_loses_only_the_stream(tiny_folder: Path):
    messages = [{"role": "system", "content": "the lazy dog jumps over " * 30}, {"role": "user", "content": "hi"}]
    words = ("-c", "1000", "--prefix-disk", "0.1")
    with running(tiny_folder, *words) as (server, url):
        first = json.load(ask(url, messages=messages, max_tokens=8))
        messages += [first["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        end_s = time.monotonic() + 10
        while not json.load(urllib.request.urlopen(f"{url}/props"))["prefix_cache"]["num_files"]:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        with ask(url, messages=messages, stream=True) as stream:
            assert stream.readline().startswith(b"data: ")
            server.kill()
            server.wait()
    with running(tiny_folder, *words) as (_, url):
        answer = json.load(ask(url, messages=messages, max_tokens=8))
        kept = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert kept > 0.9 * first["usage"]["prompt_tokens"]
        urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", method="POST"))
        cold = json.load(ask(url, messages=messages, max_tokens=8))
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert cold["choices"] == answer["choices"]


def test_a_server_ends_with_a_rank_that_is_lost(tiny_folder: Path):
    with running(tiny_folder, "-c", "512", "--tensor-parallel-size", "2") as (server, url):
        assert json.load(urllib.request.urlopen(f"{url}/health"))["status"] == "ok"
        (rank,) = (int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split())
        os.kill(rank, signal.SIGKILL)
        assert server.wait(timeout=20) == 1
        assert server.stderr is not None
        assert server.stderr.read().count("rank 1 of 2 was killed by signal 9, and the model is lost with it") == 1
