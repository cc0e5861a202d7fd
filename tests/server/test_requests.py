"""Requests that are wrong cost one clear 4xx, and every field is applied or refused."""

import json
import random

import pytest

from soloist.llm import LLM
from tests.server.client import Client

ASK = {"messages": [{"role": "user", "content": "hi"}]}


def error(client: Client, path: str, body, status: int = 400) -> dict:
    response = client.post(path, body)
    assert response.status == status, response.body
    return response.json["error"]


def test_an_unknown_field_is_named_with_the_nearest_known(say):
    # Field report 52.
    client = say("a")
    given = error(client, "/v1/chat/completions", ASK | {"temprature": 1})
    assert given["param"] == "temprature" and "did you mean 'temperature'" in given["message"]
    assert given["code"] == "unknown_field" and given["type"] == "invalid_request_error"
    nested = error(client, "/v1/chat/completions", ASK | {"stream_options": {"usage": True}})
    assert nested["param"] == "stream_options.usage"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"logprobs": True, "top_logprobs": 1000000}, "from 0 to 20"),
        ({"top_logprobs": 2}, "set logprobs to true"),
        ({"max_tokens": -5}, "max_tokens is -5"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "two names of one limit"),
        ({"n": 100}, "n: "),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, "messages: "),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role is 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "only text parts"),
        ({"logit_bias": {"900000": 1}}, "no token 900000"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x: "),
        ({"stop": 5}, "stop: "),
        ({"tool_choice": "required", "tools": []}, "there are no tools"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"chat_template_kwargs": {"nonsense": 1}}, "no variable 'nonsense'"),
        ({"stop": ["a"] * 65}, "at most 64"),
        ({"stop": [""]}, "not empty"),
        ({"max_tokens": 100000}, "ask for at most"),
    ],
)
def test_a_bad_value_is_refused_in_words(say, fields: dict, words: str):
    # Field report 88 among them.
    client = say("a")
    assert words in error(client, "/v1/chat/completions", ASK | fields)["message"]
    assert client.post("/v1/chat/completions", ASK).status == 200


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [10**9], [-1]])
def test_an_empty_or_impossible_prompt_is_refused(say, prompt):
    # Field report 91.
    error(say("a"), "/v1/completions", {"prompt": prompt})


def test_a_prompt_beyond_the_context_is_refused_with_numbers(say):
    # Field report 106: nothing is dropped in silence.
    client = say("a")
    long = [{"role": "system", "content": "word " * 500}, {"role": "user", "content": "hi"}]
    given = error(client, "/v1/chat/completions", {"messages": long})
    assert given["code"] == "context_length_exceeded" and "512" in given["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"messages": NaN}', b"{}" * 3])
def test_a_body_that_is_no_request_is_refused(say, body: bytes):
    client = say("a")
    for path in ("/v1/chat/completions", "/v1/completions"):
        error(client, path, body)


def test_a_body_that_is_not_announced_as_json_says_so(say):
    client = say("a")
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        response = client.post("/v1/chat/completions", ASK, content_type=kind)
        assert response.status == 400 and "Content-Type: application/json" in response.json["error"]["message"]


@pytest.mark.parametrize("name", ["n_predict", "max_tokens"])
def test_only_minus_one_means_no_limit(say, name: str):
    client = say("a")
    assert client.post("/completion", {"prompt": "x", name: -1}).status == 200
    assert error(client, "/completion", {"prompt": "x", name: -5})["param"] == name


def test_malformed_bodies_leave_the_server_alive(say):
    client = say("a")
    chance = random.Random(1)
    good = json.dumps(ASK | {"max_tokens": 2, "stop": ["x"], "logit_bias": {"1": 2}}).encode()
    for _ in range(150):
        body = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        assert client.post("/v1/chat/completions", bytes(body)).status in (200, 400)
    assert client.post("/v1/chat/completions", ASK).status == 200


def test_unknown_routes_and_methods_have_an_error_body(say):
    client = say("a")
    assert client.get("/v1/nothing").json["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/nothing").status == 404
    assert client.get("/v1/chat/completions").status == 405


def test_sampling_fields_reach_the_sampler(say, tokenizer):
    ids = tokenizer.encode("a")
    client = say("aa")
    answer = client.post("/v1/completions", {"prompt": "x", "logit_bias": {str(ids[0]): -100}, "max_tokens": 3}).json
    assert not answer["choices"][0]["text"].startswith("a")
    answer = client.post("/v1/completions", {"prompt": "x", "top_k": -1, "temperature": 1.0, "seed": 3}).json
    assert answer["receipt"]["seed"] == 3


def test_repetition_penalty_changes_the_answer(serve, tiny_folder):
    # Field report 52.
    client = serve(LLM(tiny_folder, dtype="float32", num_threads=1))
    body = {"prompt": "the fox", "max_tokens": 60, "ignore_eos": True}
    answers = [client.post("/v1/completions", body | {"repetition_penalty": x}).json for x in (1.0, 5.0)]
    assert answers[0]["choices"][0]["text"] != answers[1]["choices"][0]["text"]


def test_a_seed_gives_the_same_text_whatever_ran_before(serve, tiny_folder):
    # Field report 55.
    client = serve(LLM(tiny_folder, dtype="float32", num_threads=1))
    body = {"prompt": "the fox", "max_tokens": 8, "seed": 7, "temperature": 1.0}
    first = client.post("/v1/completions", body).json["choices"][0]["text"]
    client.post("/v1/completions", {"prompt": "other work", "max_tokens": 30, "temperature": 1.0})
    assert client.post("/v1/completions", body).json["choices"][0]["text"] == first
