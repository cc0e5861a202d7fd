"""Prompts and answers: what files may say, a stopped run goes on, and answers that are not the target's are found."""

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.errors import CheckpointError, SoloistError, UnsupportedError, UsageError
from soloist.train.batches import Text
from soloist.train.generate import Request
from soloist.train.prompts import Reader, read_prompts
from soloist.train.responses import (
    OwnSource,
    RemoteSource,
    check_ownership,
    collect_texts,
    describe_mix,
    load_transformers_source,
    require_own,
)
from tests.train.small import load_target

NEW = 30


def make_source(target: Any, **overrides: Any) -> OwnSource:
    fields = {"max_new_tokens": NEW, "num_tokens": target.config.vocab_size, "eos_token_ids": (), "batch_size": 5}
    return OwnSource(model=target, **(fields | overrides))


def make_prompts(count: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (1 + i % 6,), generator=generator).tolist() for i in range(count)]


class Counting:
    """A source that counts what it is asked for, and dies on demand."""

    def __init__(self, source: OwnSource, dies_after: int = 10**9) -> None:
        self.source, self.batch_size, self.dies_after, self.asked = source, source.batch_size, dies_after, 0

    def answer(self, requests: Sequence[Request], seed: int) -> list[Text]:
        self.asked += len(requests)
        if self.asked > self.dies_after:
            raise KeyboardInterrupt
        return self.source.answer(requests, seed)


def test_a_stopped_run_asks_only_for_what_is_missing_and_gets_the_same(tmp_path: Path):
    target = load_target(tmp_path / "target")
    prompts, file = make_prompts(17, 190), tmp_path / "texts.jsonl"
    whole = collect_texts(make_source(target), prompts, (0.0, 1.0), seed=3)
    assert describe_mix(whole) == {"0": 9, "1": 8}
    with pytest.raises(KeyboardInterrupt):
        collect_texts(Counting(make_source(target), dies_after=11), prompts, (0.0, 1.0), seed=3, file=file)
    # As a crash leaves it: half a line.
    with file.open("a") as stream:
        stream.write('{"prompt": 3, "temp')
    again = Counting(make_source(target))
    assert collect_texts(again, prompts, (0.0, 1.0), seed=3, file=file) == whole
    assert again.asked == 7
    assert collect_texts(again, prompts, (0.0, 1.0), seed=3, file=file) == whole
    assert again.asked == 7
    with pytest.raises(CheckpointError, match="other prompts"):
        collect_texts(again, make_prompts(17, 190, seed=1), (0.0, 1.0), seed=3, file=file)


def test_answers_that_are_the_targets_own_pass_and_those_of_another_model_do_not(tmp_path: Path):
    # Field report 166: a draft trained on other text than the target's is accepted less than training says.
    target, other = load_target(tmp_path / "target"), load_target(tmp_path / "other", rms_norm_eps=0.5)
    prompts = make_prompts(30, 190)
    own = collect_texts(make_source(target), prompts, (0.0, 1.0), seed=0)
    found = check_ownership(target, own, target.config.vocab_size, torch.float32)
    assert found.greedy_agreement == 1.0
    assert found.surprise is not None and abs(found.surprise) < 0.1
    require_own(found)
    strange = collect_texts(make_source(other), prompts, (0.0, 1.0), seed=0)
    with pytest.raises(UsageError, match="not the target's own") as caught:
        require_own(check_ownership(target, strange, target.config.vocab_size, torch.float32))
    assert "likeliest" in str(caught.value) and "template" in str(caught.value)
    # Drawn from another law than it says.
    strange = [
        Text(token_ids=tuple(p + q), num_prompt=len(p), temperature=1.0)
        for p, q in zip(prompts, prompts[::-1], strict=True)
    ]
    fault = check_ownership(target, strange, target.config.vocab_size, torch.float32).fault
    assert fault is not None and "nats" in fault


def test_transformers_gives_the_same_greedy_answers(tmp_path: Path):
    target = load_target(tmp_path / "target", "llama")
    prompts = make_prompts(7, 250)
    source = load_transformers_source(tmp_path / "target", torch.device("cpu"), torch.float32, NEW, (), batch_size=4)
    theirs = collect_texts(source, prompts, (0.0,), seed=0)
    assert theirs == collect_texts(make_source(target), prompts, (0.0,), seed=0)
    drawn = collect_texts(source, prompts, (0.7,), seed=0)
    assert {text.temperature for text in drawn} == {0.7}
    require_own(check_ownership(target, drawn, target.config.vocab_size, torch.float32))


def test_transformers_refuses_what_it_does_not_know(tmp_path: Path):
    load_target(tmp_path, "bailing_moe_v3")
    with pytest.raises(UnsupportedError, match="--source own"):
        load_transformers_source(tmp_path, torch.device("cpu"), torch.float32, NEW, (), batch_size=4)


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server whose model says "b" after "a", and nothing after "c"."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            text = {"a": "bb", "c": ""}.get(body["prompt"][-1], "z")
            reply = json.dumps({"choices": [{"text": text}]} if self.path == "/v1/completions" else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/v1", asked
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def make_remote(url: str) -> RemoteSource:
    def encode(text: str) -> list[int]:
        # "zz" is one token, so that an answer can grow together with its prompt.
        return [ord(c) for c in text.replace("zz", "Z")]

    return RemoteSource(
        url=url,
        model="m",
        max_new_tokens=7,
        decode=lambda ids: "".join(map(chr, ids)),
        encode=encode,
        num_parallel=2,
        batch_size=2,
    )


def test_a_server_is_asked_for_completions_and_what_does_not_fit_is_left_out(
    server: tuple[str, list[dict[str, Any]]], tmp_path: Path
):
    url, asked = server
    prompts = [[ord("a")], [ord("c")], [ord("z")], [ord("x"), ord("a")]]
    texts = collect_texts(make_remote(url), prompts, (0.0, 0.7), seed=5, file=tmp_path / "texts.jsonl")
    assert [text.token_ids for text in texts] == [tuple(map(ord, "abb")), tuple(map(ord, "xabb"))]
    assert [text.temperature for text in texts] == [0.0, 0.7]
    assert sorted(body["prompt"] for body in asked) == ["a", "c", "xa", "z"]
    assert all(body["max_tokens"] == 7 and body["model"] == "m" for body in asked)
    assert len({body["seed"] for body in asked}) == 4
    # Nobody is asked again, not even for the answers that did not come.
    assert len(collect_texts(make_remote(url), prompts, (0.0, 0.7), seed=5, file=tmp_path / "texts.jsonl")) == 2
    assert len(asked) == 4


def test_a_server_that_is_none_is_named(server: tuple[str, list[dict[str, Any]]]):
    with pytest.raises(SoloistError, match="gave no completion"):
        collect_texts(make_remote(server[0] + "/wrong"), [[97]], (0.0,), seed=0)


# --- prompts ---

READER = Reader(encode=lambda text: [ord(c) for c in text], render=lambda messages: [len(messages)] * 3)


def read(path: Path, **overrides: Any) -> list[list[int]]:
    return read_prompts(
        path, overrides.pop("reader", READER), **({"limit": 99, "max_prompt_tokens": 400, "seed": 0} | overrides)
    )


def test_every_form_of_a_line_is_read(tmp_path: Path):
    lines: list[Any] = [
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
        {
            "conversations": [
                {"from": "human", "value": "u"},
                {"from": "gpt", "value": "a"},
                {"from": "human", "value": "v"},
            ]
        },
        {"prompt": "ab"},
        {"text": "x" * 1000},
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    prompts = read(path)
    # The assistant's last answer is the target's to give.
    assert sorted(p for p in prompts if len(p) == 3) == [[1] * 3, [2] * 3, [3] * 3]
    assert [97, 98] in prompts
    assert sum(set(p) == {ord("x")} for p in prompts) == 2
    assert prompts == read(path) and prompts != read(path, seed=1)
    assert len(read(path, limit=2)) == 2


def test_a_folder_gives_beginnings_of_its_source_files(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.py").write_text("0123456789" * 130)
    (tmp_path / "b.bin").write_text("no")
    prompts = read(tmp_path)
    assert len(prompts) == 3
    assert all(16 <= len(p) <= 256 for p in prompts)
    assert {p[0] for p in prompts} == {ord("0"), ord("2"), ord("4")}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1]", "none of"),
        ("{", "not JSON"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no message of the user"),
        ('{"prompt": "' + "a" * 500 + '"}', "none of at most 400"),
        ('{"prompt": 3}', "none of"),
    ],
)
def test_lines_that_say_nothing_are_refused(text: str, complaint: str, tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(UsageError, match=complaint):
        read(path)


def test_conversations_need_a_template_and_a_folder_files(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "u"}]}\n')
    with pytest.raises(UnsupportedError, match="no chat template"):
        read(path, reader=Reader(encode=READER.encode, render=None))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no source files"):
        read(tmp_path / "empty")
