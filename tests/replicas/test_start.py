"""Replicas from the command line: what they cannot start for is said, and a signal ends all of them."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from soloist.cli.serve import load_to_serve
from soloist.errors import SoloistError
from soloist.server.settings import ServerSettings
from tests.replicas.test_replicas import LOADING
from tests.tiny_model import write_tiny_model

pytest.importorskip("ray")
from soloist.server.replicas.fleet import Fleet


def test_replicas_that_cannot_load_say_why(tmp_path: Path):
    folder = write_tiny_model(tmp_path)
    loading = LOADING | {"context": 10**6}
    make_llm = partial(load_to_serve, str(folder), prefix_bytes=0, prefix_device_bytes=0, **loading)
    with pytest.raises(SoloistError, match="a context of 1000000 tokens is asked for"):
        Fleet(make_llm, ServerSettings(model_name="tiny"), num_replicas=1)


def test_a_command_serves_replicas_until_a_signal(tmp_path: Path):
    folder = write_tiny_model(tmp_path)
    words = [sys.executable, "-c", "from soloist.cli import main; raise SystemExit(main())", "serve", str(folder)]
    words += ["--replicas", "2", "--port", "0", "--threads", "1", "--dtype", "float32", "-c", "512", "--alias", "two"]
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    signal.signal(signal.SIGINT, handler)
    try:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "is ready after" in line)
        url = next(word for word in line.split() if word.startswith("http")).rstrip(",")
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["model"] == "two"
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 130
    finally:
        server.kill()
        server.wait()
