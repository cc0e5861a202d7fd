"""What the server adds to the Python API: to the first token, and to each event of a stream. CPU, one run.

The same chat is asked of a model in this process and of the same model in a server of its own, over a socket, in turn.
Prompts are read whole each time. The figures are medians: of the time to the first token, and of the gaps between the
steps of all answers. Each side has one thread; the engine's own work is the same, so the difference is the server's.
Without a model a miniature one with random weights is written: its steps are short, so the difference shows.
"""

import argparse
import http.client
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from cpu_peers import HERE, cpu_name, git_commit, say
from soloist.llm import LLM, SamplingParams

RESULT = HERE / "results" / "cpu" / "server-overhead.json"
LIMITS_MS = {"ttft": 5.0, "event": 0.2}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as with `soloist run`; default: a miniature")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of answers")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer")
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args()


def messages(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Question {i}: why is the sky blue, and the grass green?"}]


def gaps_ms(times_s: list[float]) -> list[float]:
    return [1000 * (b - a) for a, b in itertools.pairwise(times_s)]


def ask_api(llm: LLM, i: int, num_tokens: int) -> tuple[float, list[float], str]:
    """Give the time to the first token, the gaps behind it, in ms, and the text."""
    begin_s, times_s, text = time.perf_counter(), [], ""
    for delta in llm.stream_chat(messages(i), SamplingParams(max_tokens=num_tokens, ignore_eos=True)):
        times_s.append(time.perf_counter())
        text += delta.text
    return 1000 * (times_s[0] - begin_s), gaps_ms(times_s), text


def ask_server(connection: http.client.HTTPConnection, i: int, num_tokens: int) -> tuple[float, list[float], str]:
    body = {"messages": messages(i), "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    sent = json.dumps(body)
    # What the last prompt shares with this one would not be read again.
    connection.request("POST", "/reset_prefix_cache")
    connection.getresponse().read()
    begin_s, times_s, text = time.perf_counter(), [], ""
    connection.request("POST", "/v1/chat/completions", sent, {"content-type": "application/json"})
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            times_s.append(time.perf_counter())
            text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    return 1000 * (times_s[0] - begin_s), gaps_ms(times_s), text


def write_miniature(folder: Path) -> str:
    sys.path.insert(0, str(HERE.parent))
    from tests.tiny_model import write_tiny_model

    return str(write_tiny_model(folder))


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-c", "from soloist.cli import main; raise SystemExit(main())", "serve", model]
    command += ["--port", "0", "--threads", "1", "--prefix-memory", "0", "-c", "1024"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "is ready after" in line)
        url = next(word for word in line.split() if word.startswith("http://"))
        connection = http.client.HTTPConnection(url.removeprefix("http://").partition("/")[0])
        llm = LLM(model, device="cpu", num_threads=1, max_context_len=1024)
        sides: dict[str, tuple[list[float], list[float]]] = {"api": ([], []), "server": ([], [])}
        for i in range(options.rounds + 1):
            answers = {
                "api": ask_api(llm, i, options.tokens),
                "server": ask_server(connection, i, options.tokens),
            }
            assert answers["api"][2] == answers["server"][2], "the two sides say different things"
            # The first pair warms both up.
            for name, (ttft_ms, gaps, _) in answers.items() if i else ():
                sides[name][0].append(ttft_ms)
                sides[name][1].extend(gaps)
            say(f"{i}: first token {answers['api'][0]:.2f} and {answers['server'][0]:.2f} ms")
    finally:
        server.terminate()
        server.wait()
        if server.stderr is not None:
            server.stderr.close()
    return {
        name: {
            "ttft_ms": round(statistics.median(ttfts), 4),
            "event_gap_ms": round(statistics.median(gaps), 4),
            "num_answers": len(ttfts),
            "num_gaps": len(gaps),
        }
        for name, (ttfts, gaps) in sides.items()
    }


def main() -> int:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        sides = measure(options.model or write_miniature(Path(folder)), options)
    api, server = sides["api"], sides["server"]
    overhead = {
        "ttft": round(server["ttft_ms"] - api["ttft_ms"], 4),
        "event": round(server["event_gap_ms"] - api["event_gap_ms"], 4),
    }
    result = {
        "case": "server-overhead",
        "date": date.today().isoformat(),
        "command": " ".join(["python benchmarks/server_overhead.py", *sys.argv[1:]]),
        "device": cpu_name(),
        # What uvicorn takes by itself where it is installed.
        "packages": [name for name in ("uvloop", "httptools") if importlib.util.find_spec(name)],
        "commit": git_commit(),
        "model": options.model or "a miniature",
        "sides": sides,
        "overhead_ms": overhead,
        "limits_ms": LIMITS_MS,
        "is_within_limits": all(overhead[name] <= limit for name, limit in LIMITS_MS.items()),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return 0 if result["is_within_limits"] else 4


if __name__ == "__main__":
    raise SystemExit(main())
