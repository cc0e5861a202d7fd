"""Calls that a request forces, forbids to be several, or wants to the letter: kept whatever the model would say."""

import json
from collections.abc import Callable

import pytest

from soloist.server.tool_calls import JsonParser, ToolParser, XmlArgumentsParser, XmlParametersParser
from soloist.tokenizer import ANSWER_MARKS, Tokenizer
from tests.server.client import Client, make_tokenizer, scripted_llm
from tests.server.test_structured import Fixed, noisy_llm
from tests.server.test_tool_calls import ANSWERS, ARGUMENTS, TOOLS

HI = [{"role": "user", "content": "hi"}]
# What a template must contain for each form to be found in it.
FORMS: dict[type[ToolParser], str] = {
    JsonParser: "<tool_call>",
    XmlArgumentsParser: "<tool_call><arg_key>",
    XmlParametersParser: "<tool_call><function=<parameter=",
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Bath"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}


def tool(name: str, parameters: dict, **more) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TWO = [tool("weather", WEATHER), tool("now", {"type": "object", "properties": {}, "additionalProperties": False})]
LOOSE = {"type": "object", "properties": {"n": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}


@pytest.fixture(scope="session")
def form_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[type[ToolParser], Tokenizer]:
    def make(parser: type[ToolParser]) -> Tokenizer:
        template = (
            f"{{% if tools %}}{{{{ tools | length }}}}{FORMS[parser]}{{% endif %}}"
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
        )
        # Two forms have their marks as tokens, as checkpoints have them; the third spells them.
        marks = {
            JsonParser: ("<tool_call>", "</tool_call>"),
            XmlArgumentsParser: tuple(sorted(ANSWER_MARKS - {"<think>", "</think>"})),
        }.get(parser, ())
        special = ("<|im_end|>", *marks)
        return make_tokenizer(tmp_path_factory.mktemp("form"), template, special=special, user_defined=())

    return {parser: make(parser) for parser in FORMS}


@pytest.fixture
def noisy(serve, form_tokenizers) -> Callable[..., Client]:
    """Serve a model that would say anything."""
    return lambda parser, **parts: serve(noisy_llm(form_tokenizers[parser], **parts))


@pytest.fixture
def act(serve, form_tokenizers) -> Callable[..., Client]:
    """Serve a model that says a text."""

    def start(parser: type[ToolParser], text: str, size: int = 3) -> Client:
        tokenizer = form_tokenizers[parser]
        ids = tokenizer.encode(text, allow_special=True)
        return serve(scripted_llm(tokenizer, [ids[i : i + size] for i in range(0, len(ids), size)]))

    return start


def chat(client: Client, **fields) -> dict:
    response = client.post("/v1/chat/completions", {"messages": HI, "max_tokens": 300, "tools": TWO} | fields)
    assert response.status == 200, response.body
    return response.json["choices"][0]


def check(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "weather":
        assert given["city"] in ("Rome", "Bath") and 1 <= given.get("days", 1) <= 9
        assert set(given) <= {"city", "days"}
    else:
        assert name == "now" and given == {}


@pytest.mark.parametrize("parser", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_is_made_by_a_model_that_would_say_anything(noisy, parser, seed: int):
    choice = chat(noisy(parser), tool_choice="required", temperature=1.0, seed=seed, parallel_tool_calls=False)
    (call,) = choice["message"]["tool_calls"]
    check(call["function"]["name"], call["function"]["arguments"])
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None


@pytest.mark.parametrize("parser", FORMS)
@pytest.mark.parametrize("name", ["weather", "now"])
def test_a_named_call_is_of_that_function_in_every_protocol(noisy, parser, name: str):
    client = noisy(parser)
    choice = chat(client, tool_choice={"type": "function", "function": {"name": name}})
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == name
    check(name, call["function"]["arguments"])
    tools = [{"type": "function", **t["function"]} for t in TWO]
    fields = {"input": "hi", "tools": tools, "tool_choice": {"type": "function", "name": name}}
    (item,) = client.post("/v1/responses", fields | {"max_output_tokens": 300}).json["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", name, call["function"]["arguments"])
    tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TWO]
    fields = {"messages": HI, "max_tokens": 300, "tools": tools, "tool_choice": {"type": "tool", "name": name}}
    answer = client.post("/v1/messages", fields).json
    assert [block["type"] for block in answer["content"]] == ["tool_use"] and answer["stop_reason"] == "tool_use"
    assert answer["content"][0]["input"] == json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("parser", FORMS)
def test_what_the_model_writes_of_its_own_accord_is_within_the_grammar(act, parser):
    # The grammar would otherwise bend an answer that is right.
    said = ANSWERS[parser]
    free = chat(act(parser, said), tools=TOOLS)
    forced = chat(act(parser, said), tools=TOOLS, tool_choice="required")
    (call,), (same,) = free["message"]["tool_calls"], forced["message"]["tool_calls"]
    assert same["function"] == call["function"] and json.loads(call["function"]["arguments"]) == ARGUMENTS
    # One after the other, too.
    short = said[: said.index("a b.txt")] + {JsonParser: 'x"}}', XmlArgumentsParser: "x</arg_value>\n"}.get(
        parser, "x\n</parameter>\n</function>\n"
    )
    short += "</tool_call>"
    several = chat(act(parser, f"{short}\n{short}"), tools=TOOLS, tool_choice="required")
    assert [json.loads(c["function"]["arguments"]) for c in several["message"]["tool_calls"]] == [{"path": "x"}] * 2


@pytest.mark.parametrize("parser", FORMS)
def test_a_draft_changes_nothing_of_a_forced_call(noisy, form_tokenizers, parser):
    ids = form_tokenizers[parser].encode("<tool_call>\nweather", allow_special=True)[:15]
    fields = {"tool_choice": "required", "parallel_tool_calls": False}

    def said(client: Client, **sampling) -> tuple[str, list[tuple[str, str]]]:
        choice = chat(client, **fields, **sampling)
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"]]
        return choice["finish_reason"], calls

    for sampling in ({}, {"temperature": 0.8, "seed": 5}):
        drafted = said(noisy(parser, drafter=Fixed(ids)), **sampling)
        assert drafted == said(noisy(parser), **sampling) and drafted[0] == "tool_calls"


@pytest.mark.parametrize("size", [1, 3, 7, 16])
@pytest.mark.parametrize("stream", [True, False])
def test_one_call_ends_an_answer_that_may_have_one_only(act, form_tokenizers, stream: bool, size: int):
    call = ANSWERS[JsonParser]
    client = act(JsonParser, f"Well. {call}\n{call} Done.", size)
    fields = {"tools": TOOLS, "parallel_tool_calls": False, "return_token_ids": True}
    body = {"messages": HI, "max_tokens": 450, "stream": stream} | fields
    response = client.post("/v1/chat/completions", body)
    if stream:
        chunks = response.events[:-1]
        ids = [i for c in chunks for i in c["choices"][0]["token_ids"]]
        begun = [t for c in chunks for t in c["choices"][0]["delta"].get("tool_calls", []) if "id" in t]
        last, usage = chunks[-1]["choices"][0], chunks[-1]["timings"]["predicted_n"]
    else:
        (last,) = response.json["choices"]
        ids, begun = last["token_ids"], last["message"]["tool_calls"]
        usage = response.json["usage"]["completion_tokens"]
    assert len(begun) == 1 and last["finish_reason"] == "tool_calls"
    # Text, ids and usage end with the call.
    tokenizer = form_tokenizers[JsonParser]
    assert ids == tokenizer.encode(f"Well. {call}", allow_special=True) and usage == len(ids)
    plain = chat(client, tools=TOOLS, max_tokens=450)
    assert len(plain["message"]["tool_calls"]) == 2


def test_one_call_is_enough_for_every_protocol(act):
    call = ANSWERS[JsonParser]
    client = act(JsonParser, f"{call}\n{call}")
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    fields = {"input": "hi", "tools": tools, "parallel_tool_calls": False}
    answer = client.post("/v1/responses", fields).json
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    assert answer["parallel_tool_calls"] is False
    tools = [{"name": "write", "input_schema": TOOLS[0]["function"]["parameters"]}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    fields = {"messages": HI, "max_tokens": 400, "tools": tools, "tool_choice": choice}
    assert [b["type"] for b in client.post("/v1/messages", fields).json["content"]] == ["tool_use"]


@pytest.mark.parametrize("parser", FORMS)
def test_a_strict_tool_is_followed_wherever_the_model_calls_it(act, parser):
    wrong = {
        JsonParser: '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>',
        XmlArgumentsParser: "<tool_call>weather\n<arg_key>town</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
        XmlParametersParser: "<tool_call>\n<function=weather>\n<parameter=town>\nOslo\n</parameter>\n</function>\n"
        "</tool_call>",
    }[parser]
    client = act(parser, f"Let me see. {wrong}")
    strict = [tool("weather", WEATHER, strict=True)]
    (call,) = chat(client, tools=[tool("weather", WEATHER)])["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"town": "Oslo"}
    choice = chat(client, tools=strict, parallel_tool_calls=False)
    assert choice["message"]["content"].startswith("Let me see.")
    check("weather", choice["message"]["tool_calls"][0]["function"]["arguments"])
    # Field report 103: an answer in prose stays free.
    assert chat(act(parser, "No call < here."), tools=strict)["message"]["content"] == "No call < here."


def test_a_schema_that_cannot_be_followed_is_refused_or_told(act):
    client = act(JsonParser, "x")
    body = {"messages": HI, "max_tokens": 50, "tool_choice": "required"}
    refused = client.post("/v1/chat/completions", body | {"tools": [tool("f", LOOSE, strict=True)]})
    assert refused.status == 400 and "uniqueItems" in refused.json["error"]["message"]
    told = client.post("/v1/chat/completions", body | {"tools": [tool("f", LOOSE)]})
    assert told.status == 200 and "uniqueItems" in told.json["warnings"][0]
    narrow = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}, "required": ["a"]}
    xml = act(XmlArgumentsParser, "x")
    refused = xml.post("/v1/chat/completions", body | {"tools": [tool("f", narrow, strict=True)]})
    assert refused.status == 400 and "pattern" in refused.json["error"]["message"]


@pytest.mark.parametrize("parser", FORMS)
def test_a_function_that_takes_anything_can_be_forced(act, parser):
    said = {
        JsonParser: '<tool_call>\n{"name": "f", "arguments": {"k": "v"}}\n</tool_call>',
        XmlArgumentsParser: "<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>",
        XmlParametersParser: "<tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter>\n</function>\n</tool_call>",
    }[parser]
    tools = [{"type": "function", "function": {"name": "f"}}]
    (call,) = chat(act(parser, said), tools=tools, tool_choice="required")["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"k": "v"}


@pytest.mark.parametrize("said", ['{"n": 7}', ANSWERS[JsonParser]])
def test_a_form_and_tools_leave_the_choice_between_both(act, said: str):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choice = chat(act(JsonParser, said), tools=TOOLS, response_format=form)
    if "tool_call" in said:
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    else:
        assert json.loads(choice["message"]["content"]) == {"n": 7}


def test_reasoning_stands_before_a_forced_call_and_is_counted(act, form_tokenizers):
    said = f"let me see</think>\n{ANSWERS[JsonParser]}"
    client = act(JsonParser, said)
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    body = {"messages": HI, "tools": TOOLS, "tool_choice": "required", **thinking}
    answer = client.post("/v1/chat/completions", body).json
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "let me see" and len(message["tool_calls"]) == 1
    num_tokens = len(form_tokenizers[JsonParser].encode("let me see</think>"))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens}
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    usage = client.post("/v1/responses", {"input": "hi", "tools": tools, **thinking}).json["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": num_tokens}
    plain = client.post("/v1/chat/completions", {"messages": HI}).json["usage"]
    assert plain["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/v1/chat/completions", {"tool_choice": {"type": "function", "function": {"name": "no"}}}, "no tool 'no'"),
        ("/v1/chat/completions", {"tool_choice": "required", "tools": []}, "there are no tools"),
        ("/v1/chat/completions", {"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ("/v1/messages", {"tool_choice": {"type": "any"}, "tools": []}, "no tools"),
        ("/v1/messages", {"tool_choice": {"type": "tool"}, "tools": [{"name": "f", "input_schema": {}}]}, "name"),
        ("/v1/responses", {"input": "hi", "tool_choice": {"type": "web_search"}}, "allowed are"),
        ("/v1/responses", {"input": "hi", "tool_choice": "required", "tools": [{"type": "web_search"}]}, "no tools"),
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused(act, path: str, fields: dict, words: str):
    given = {
        "/v1/chat/completions": {"messages": HI, "tools": TOOLS},
        "/v1/messages": {"messages": HI, "max_tokens": 5},
    }
    response = act(JsonParser, "x").post(path, given.get(path, {}) | fields)
    assert response.status == 400 and words in response.json["error"]["message"], response.body
