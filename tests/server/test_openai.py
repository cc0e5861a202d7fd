"""OpenAI's chat and completions: one event a step, and text, ids, log probabilities and usage that end together."""

import pytest

from soloist.tokenizer import Tokenizer
from tests.server.client import Client, Response

ASK = {"messages": [{"role": "user", "content": "hi"}]}


def chat(client: Client, **fields) -> Response:
    return client.post("/v1/chat/completions", ASK | fields)


def complete(client: Client, **fields) -> Response:
    return client.post("/v1/completions", {"prompt": "hi", "max_tokens": 50} | fields)


def content(response: Response) -> str:
    deltas = [choice["delta"] for e in response.events[:-1] for choice in e["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def text(response: Response) -> str:
    return "".join(choice["text"] for e in response.events[:-1] for choice in e["choices"])


def test_a_chat_answers_in_one_piece(say):
    response = chat(say("Hello", " there"))
    assert response.status == 200
    answer = response.json
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello there"}
    assert choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_stream_has_one_event_for_every_step(say):
    response = chat(say("Hello", " there", "!"), stream=True)
    *chunks, done = response.events
    assert done == "[DONE]"
    # Three steps and the one with the end token.
    assert len(chunks) == 4
    assert content(response) == "Hello there!"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in c["choices"][0]["delta"] for c in chunks[1:])
    assert len({c["id"] for c in chunks}) == 1
    assert response.headers["content-type"].startswith("text/event-stream")


def test_the_usage_is_in_the_last_event_and_has_no_choices(say):
    # Field report 124.
    response = chat(say("Hello"), stream=True, stream_options={"include_usage": True})
    *chunks, last, done = response.events
    assert done == "[DONE]" and last["choices"] == []
    assert last["usage"]["completion_tokens"] > 1 and "timings" in last
    assert [c["usage"] for c in chunks] == [None] * len(chunks)


def test_continuous_usage_counts_tokens_not_chunks(say, tokenizer: Tokenizer):
    groups = ["ab", "cde", "f"]
    response = complete(say(*groups), stream=True, stream_options={"continuous_usage_stats": True})
    sizes = [len(tokenizer.encode(g)) for g in groups] + [1]
    counts = [c["usage"]["completion_tokens"] for c in response.events[:-1]]
    assert counts == [sum(sizes[: i + 1]) for i in range(4)]


def test_every_answer_says_what_it_took(say):
    for response in (chat(say("Hello", " there")), complete(say("Hello", " there"))):
        answer = response.json
        timings, speculation, receipt = answer["timings"], answer["speculation"], answer["receipt"]
        assert timings["predicted_n"] == answer["usage"]["completion_tokens"]
        assert timings["prompt_n"] + timings["cache_n"] == answer["usage"]["prompt_tokens"]
        # Field report 61: counts of real steps.
        assert speculation["drafter"] == "script"
        assert sum(speculation["accepted_histogram"]) == speculation["steps"] == 3
        assert sum(j * n for j, n in enumerate(speculation["accepted_histogram"])) == speculation["accepted"]
        assert sum(j * n for j, n in enumerate(speculation["drafted_histogram"])) == speculation["drafted"]
        assert receipt["finish_reason"] == "stop" and receipt["ttft_ms"] > 0 and receipt["prefix"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_character_split_over_steps_comes_whole(say, tokenizer: Tokenizer, path: str):
    # Field report 1.
    ids = tokenizer.encode("🎉😀")
    client = say(*[[i] for i in ids])
    body = (ASK if "chat" in path else {"prompt": "x", "max_tokens": 50}) | {"stream": True}
    response = client.post(path, body)
    assert "�" not in response.body.decode()
    assert (content(response) if "chat" in path else text(response)) == "🎉😀"


def test_korean_text_streams_as_it_is_said(say, tokenizer: Tokenizer):
    # Field report 4.
    said = "안녕하세요 세계 그리고 뷁쉛 " * 10
    ids = tokenizer.encode(said)
    groups = [ids[i : i + 3] for i in range(0, len(ids), 3)]
    client = say(*groups)
    assert text(complete(client, stream=True, max_tokens=400)) == said
    assert complete(client, max_tokens=400).json["choices"][0]["text"] == said


def test_a_character_cut_by_the_limit_ends_with_one_mark(say, tokenizer: Tokenizer):
    # Field report 7.
    ids = tokenizer.encode("😀")
    response = complete(say([ids[0]], ids[1:], ends=False), stream=True, max_tokens=1)
    assert text(response) == "�"
    assert response.events[-2]["choices"][0]["finish_reason"] == "length"
    assert response.events[-2]["timings"]["predicted_n"] == 1


def test_a_partial_stop_string_is_delivered_at_the_end_of_the_answer(say):
    # Field report 10.
    assert text(complete(say("UNO", "DUE", "TRE"), stream=True, stop=["TRE\nAAAA"])) == "UNODUETRE"
    response = complete(say("UNO", "TRE", "X", "more"), stream=True, stop=["TREX"])
    assert text(response) == "UNO"
    assert response.events[-2]["choices"][0]["finish_reason"] == "stop"


def test_text_ids_logprobs_and_usage_end_at_the_same_token(say, tokenizer: Tokenizer):
    # Field report 13.
    step = [*tokenizer.encode("x"), *tokenizer.encode("END"), *tokenizer.encode("y"), *tokenizer.encode("z")]
    for stream in (False, True):
        response = complete(say(step), stop=["END"], logprobs=2, return_token_ids=True, stream=stream)
        answer = response.events[0] if stream else response.json
        (choice,) = answer["choices"]
        assert choice["text"] == "x" and choice["finish_reason"] == "stop"
        assert choice["token_ids"] == tokenizer.encode("x")
        assert choice["logprobs"]["tokens"] == ["x"] and choice["logprobs"]["text_offset"] == [0]
        assert answer["timings"]["predicted_n"] == 1


def test_sixty_four_stop_strings_are_taken(say):
    stops = [f"never {i}" for i in range(63)] + ["c"]
    assert complete(say("abcd"), stop=stops).json["choices"][0]["text"] == "ab"
    assert complete(say("abcd"), stop=[*stops, "d"]).status == 400


def test_null_fields_mean_not_sent(say):
    fields = dict.fromkeys(["stop", "seed", "temperature", "top_p", "logit_bias", "stream_options", "tools", "n"])
    assert chat(say("a"), **fields).json["choices"][0]["message"]["content"] == "a"


def test_chat_logprobs_have_bytes_and_alternatives(say, tokenizer: Tokenizer):
    answer = chat(say("é"), logprobs=True, top_logprobs=3).json
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    assert bytes(b for entry in entries[:-1] for b in entry["bytes"]).decode() == "é"
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == max(t["logprob"] for t in entry["top_logprobs"]) <= 0


def test_legacy_logprobs_have_the_four_lists(say):
    # Field report 130.
    (choice,) = complete(say("ab cd"), logprobs=1, prompt="x").json["choices"]
    logprobs = choice["logprobs"]
    lengths = {len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert lengths == {len(logprobs["tokens"])}
    assert "".join(logprobs["tokens"]).startswith("ab cd")
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == value == max(top.values())


def test_zero_logprobs_report_the_chosen_token_only(say):
    # Field report 133.
    logprobs = complete(say("ab"), logprobs=0).json["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] is None and all(value <= 0 for value in logprobs["token_logprobs"])


def test_an_echo_scores_the_prompt(say, tokenizer: Tokenizer):
    client = say("ab")
    prompt = tokenizer.encode("the quick fox")
    fields = {"prompt": [prompt, prompt[:2]], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1}
    answer = complete(client, **fields).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice, ids in zip(answer["choices"], (prompt, prompt[:2]), strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(ids) + 1
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert all(value is not None for value in logprobs["token_logprobs"][1:])
        assert choice["text"].startswith(tokenizer.decode(ids))
        assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])
    assert answer["usage"]["prompt_tokens"] == len(prompt) + 2


def test_an_echo_without_new_tokens_scores_only(say):
    answer = complete(say("ab"), echo=True, logprobs=0, max_tokens=0).json
    assert answer["choices"][0]["text"] == "hi" and answer["usage"]["completion_tokens"] == 0


def test_several_answers_come_in_order_and_the_prompt_counts_once(say):
    client = say("ab")
    answer = complete(client, prompt=["x", "yy"], n=2).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    one = [complete(client, prompt=prompt).json["usage"] for prompt in ("x", "yy")]
    assert answer["usage"]["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in one)
    assert answer["usage"]["completion_tokens"] == 2 * sum(usage["completion_tokens"] for usage in one)
    *chunks, _ = chat(client, n=2, stream=True).events
    assert [c["choices"][0]["index"] for c in chunks] == [0, 0, 1, 1]


def test_short_paths_and_any_model_name_are_served(say):
    client = say("ab")
    assert client.post("/chat/completions", ASK | {"model": "gpt-4o"}).json["model"] == "tiny"
    assert client.post("/completions", {"prompt": "x"}).status == 200
    strict = say("ab", is_strict=True)
    response = strict.post("/v1/chat/completions", ASK | {"model": "gpt-4o"})
    assert response.status == 404 and response.json["error"]["code"] == "model_not_found"


def test_models_tell_the_context_length_and_what_they_can(say, act):
    (model,) = say("a").get("/v1/models").json["data"]
    assert model["id"] == "tiny" and model["max_model_len"] > 500
    assert model["capabilities"] == ["completion", "chat"]
    assert act("a").get("/v1/models").json["data"][0]["capabilities"] == ["completion", "chat", "tools", "infill"]


def test_progress_of_the_prompt_is_reported_on_request(say):
    events = chat(say("a"), stream=True, return_progress=True).events
    progress = [e["prompt_progress"] for e in events if "prompt_progress" in e]
    assert progress[-1]["processed"] == progress[-1]["total"]
    assert not any("prompt_progress" in e for e in chat(say("a"), stream=True).events)
