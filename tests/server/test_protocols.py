"""Tools and reasoning through every protocol, Anthropic's messages, responses, llama.cpp's routes."""

import json

import pytest

from soloist.generation import Generation
from soloist.server.tool_calls import JsonParser
from soloist.tokenizer import Tokenizer
from tests.server.client import Response
from tests.server.test_tool_calls import ANSWERS, ARGUMENTS, TOOLS

ASK = {"messages": [{"role": "user", "content": "hi"}]}
CALL = ANSWERS[JsonParser]
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
# Four bytes a step.
SAID = f"hmm</think>Well.{CALL}"


# --- chat completions


def deltas(response: Response) -> dict:
    """Put the deltas of a stream together."""
    message: dict = {"content": "", "reasoning_content": "", "calls": {}}
    for chunk in response.events[:-1]:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", []):
                known = message["calls"].setdefault(call["index"], {"arguments": ""})
                known["arguments"] += call["function"]["arguments"]
                known |= {"id": call["id"], "name": call["function"]["name"]} if "id" in call else {}
            message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize("size", [1, 3, 8, 16])
def test_a_call_is_the_same_streamed_or_not(act, size: int):
    # Field report 28.
    client = act(SAID, size)
    fields = ASK | THINKING | {"tools": TOOLS}
    streamed = deltas(client.post("/v1/chat/completions", fields | {"stream": True}))
    (choice,) = client.post("/v1/chat/completions", fields).json["choices"]
    assert streamed["finish_reason"] == choice["finish_reason"] == "tool_calls"
    assert streamed["content"] == choice["message"]["content"] == "Well."
    assert streamed["reasoning_content"] == choice["message"]["reasoning_content"] == "hmm"
    (call,) = choice["message"]["tool_calls"]
    assert streamed["calls"][0]["arguments"] == call["function"]["arguments"]
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    assert streamed["calls"][0]["name"] == "write"


def test_without_tools_nothing_is_taken_for_a_call(act):
    (choice,) = act(SAID).post("/v1/chat/completions", ASK | THINKING).json["choices"]
    assert "tool_calls" not in choice["message"] and CALL in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_hidden_tools_do_not_reach_the_template(act):
    client = act("ok")
    shown, hidden = (
        client.post("/v1/chat/completions", ASK | {"tools": TOOLS, "tool_choice": choice}).json["usage"]
        for choice in ("auto", "none")
    )
    assert shown["prompt_tokens"] > hidden["prompt_tokens"]


def test_effort_sets_what_the_template_knows(act):
    client = act("x</think>y")
    for effort, expected in (("high", ("x", "y")), ("none", (None, "x</think>y"))):
        (choice,) = client.post("/v1/chat/completions", ASK | {"reasoning_effort": effort}).json["choices"]
        assert (choice["message"].get("reasoning_content"), choice["message"]["content"]) == expected


# --- Anthropic's messages

MESSAGE = {"max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
ANTHROPIC_TOOLS = [{"name": "write", "input_schema": TOOLS[0]["function"]["parameters"]}]
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


@pytest.mark.parametrize("size", [1, 3, 16])
def test_messages_stream_their_blocks_in_order(act, size: int):
    client = act(SAID, size)
    fields = MESSAGE | THINK | {"tools": ANTHROPIC_TOOLS}
    response = client.post("/v1/messages?beta=true", fields | {"stream": True})
    events = response.named_events
    names = [name for name, _ in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    assert all(name == data["type"] for name, data in events)
    kinds = [data["content_block"]["type"] for name, data in events if name == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use"]
    assert names.count("content_block_stop") == 3
    parts = [
        "".join(d["delta"].get(key, "") for n, d in events if n == "content_block_delta")
        for key in ("thinking", "text", "partial_json")
    ]
    whole = client.post("/v1/messages", fields).json
    thinking, text, call = whole["content"]
    assert parts[:2] == [thinking["thinking"], text["text"]] == ["hmm", "Well."]
    assert json.loads(parts[2]) == call["input"] == ARGUMENTS
    assert events[-2][1]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"
    assert events[-2][1]["usage"] == whole["usage"]


def test_messages_report_what_stopped_them(act):
    client = act("one two three")
    answer = client.post("/v1/messages", MESSAGE | {"stop_sequences": [" two"]}).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " two")
    assert client.post("/v1/messages", MESSAGE | {"max_tokens": 1}).json["stop_reason"] == "max_tokens"
    assert client.post("/v1/messages", MESSAGE | {"max_tokens": 10**6}).json["stop_reason"] == "end_turn"


def test_messages_fail_in_anthropics_words(act, monkeypatch):
    client = act("one two three", 1)
    refused = client.post("/v1/messages", MESSAGE | {"max_tokens": 0}).json
    assert refused["type"] == "error" and refused["error"]["type"] == "invalid_request_error"
    missing = client.post("/v1/messages", {"messages": MESSAGE["messages"]})
    assert missing.status == 400 and "max_tokens" in missing.json["error"]["message"]
    real = Generation._take_record
    monkeypatch.setattr(Generation, "_take_record", lambda self, r: 1 / 0 if self.token_ids else real(self, r))
    name, data = client.post("/v1/messages", MESSAGE | {"stream": True}).named_events[-1]
    assert name == "error" and data["error"]["type"] == "api_error"


def test_a_conversation_with_calls_and_results_is_written_down(act):
    client = act("ok")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "plan", "signature": ""},
                {"type": "text", "text": "calling"},
                {"type": "tool_use", "id": "t1", "name": "write", "input": {"path": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "done"}]},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    fields = {"messages": messages, "system": "be kind", "tools": ANTHROPIC_TOOLS}
    num_tokens = client.post("/v1/messages/count_tokens", fields).json["input_tokens"]
    answer = client.post("/v1/messages", fields | {"max_tokens": 5}).json
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == num_tokens > 40


def test_the_line_that_agents_change_is_left_out(act):
    # Field report 85.
    client = act("ok")
    body = {"messages": MESSAGE["messages"]}
    system = {"type": "text", "text": "be kind"}
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=fa690;"}
    with_line = client.post("/v1/messages/count_tokens", body | {"system": [line, system]}).json
    assert with_line == client.post("/v1/messages/count_tokens", body | {"system": [system]}).json
    kept = act("ok", strips_billing_line=False)
    assert kept.post("/v1/messages/count_tokens", body | {"system": [line, system]}).json != with_line


# --- responses


@pytest.mark.parametrize("size", [1, 3, 16])
def test_responses_announce_and_end_every_item(act, size: int):
    # Field report 127.
    client = act(SAID, size)
    tools = [{"type": "function", "name": "write", "parameters": TOOLS[0]["function"]["parameters"]}]
    fields = {"input": "hi", "tools": tools, "store": False, **THINKING}
    events = client.post("/v1/responses", fields | {"stream": True}).named_events
    names = [name for name, _ in events]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert names[:2] == ["response.created", "response.in_progress"] and names[-1] == "response.completed"
    assert names.count("response.output_item.added") == names.count("response.output_item.done") == 3
    output = events[-1][1]["response"]["output"]
    assert output == [data["item"] for name, data in events if name == "response.output_item.done"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[1]["content"][0]["text"] == "Well." and json.loads(output[2]["arguments"]) == ARGUMENTS
    for kind, whole in (("output_text", "Well."), ("function_call_arguments", output[2]["arguments"])):
        assert "".join(d["delta"] for n, d in events if n == f"response.{kind}.delta") == whole
    answer = client.post("/v1/responses", fields).json
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"]


def test_a_custom_tool_takes_text(act):
    call = json.dumps({"name": "apply_patch", "arguments": {"input": "*** Begin\n+x"}})
    client = act(f"<tool_call>{call}</tool_call>")
    tools = [
        {
            "type": "custom",
            "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
        },
        {"type": "web_search"},
    ]
    response = client.post("/v1/responses", {"input": "hi", "tools": tools, "stream": True})
    done = [d["item"] for n, d in response.named_events if n == "response.output_item.done"]
    assert (done[0]["type"], done[0]["input"]) == ("custom_tool_call", "*** Begin\n+x")
    assert "web_search" in response.named_events[-1][1]["response"]["warnings"][0]


def test_responses_take_a_whole_conversation(act):
    items = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "plan"}]},
        {"type": "function_call", "call_id": "c1", "name": "write", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ]
    answer = act("ok").post("/v1/responses", {"input": items, "instructions": "you help"}).json
    assert answer["status"] == "completed" and answer["output"][0]["content"][0]["text"] == "ok"


def test_responses_fail_in_their_own_words(act, monkeypatch):
    client = act("one two three", 1)
    assert client.post("/v1/responses", {"input": "x", "previous_response_id": "r"}).status == 400
    limited = client.post("/v1/responses", {"input": "x", "max_output_tokens": 1}).json
    assert limited["status"] == "incomplete" and limited["incomplete_details"]["reason"] == "max_output_tokens"
    monkeypatch.setattr(Generation, "_take_record", lambda self, record: 1 / 0)
    name, data = client.post("/v1/responses", {"input": "x", "stream": True}).named_events[-1]
    assert name == "response.failed" and data["response"]["status"] == "failed"


# --- llama.cpp's routes


def test_infill_answers_an_editor(act):
    # Field report 169.
    client = act("print()<|fim_middle|>more")
    body = {
        "input_prefix": "def f():\n", "input_suffix": "\n", "prompt": "    ", "n_predict": 20, "stop": [],
        "n_indent": 4,
        "top_k": 40, "samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True,
        "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "id_slot": 0,
        "input_extra": [{"filename": "a.py", "text": "x = 1"}],
    }  # fmt: skip
    answer = client.post("/infill", body).json
    assert answer["content"] == "print()" and answer["stop_type"] in ("eos", "word")
    fields = ["content", "timings/prompt_n", "timings/predicted_ms"]
    assert set(client.post("/infill", body | {"response_fields": fields}).json) == set(fields)
    assert client.post("/infill", body | {"n_predict": 0, "response_fields": [""]}).json == {}


@pytest.mark.parametrize("said", ["print()<|fim_middle|>", "<|fim_middle|>x", "print()<|file_sep|>a.py"])
@pytest.mark.parametrize("route", ["/infill", "/v1/completions", "typed"])
def test_no_marker_reaches_an_editor(act, said: str, route: str):
    client = act(said, 1)
    if route == "/infill":
        text = client.post("/infill", {"input_prefix": "a", "input_suffix": "b"}).json["content"]
    else:
        prompt = (
            {"prompt": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"}
            if route == "typed"
            else {"prompt": "a", "suffix": "b"}
        )
        text = client.post("/v1/completions", prompt).json["choices"][0]["text"]
    assert text == said.partition("<|")[0]


def test_infill_keeps_what_is_near_the_cursor(act, tools_tokenizer: Tokenizer):
    client = act("x")
    extra = [{"filename": f"{i}.py", "text": "word " * 100} for i in range(9)]
    body = {"input_prefix": "a b " * 400 + "NEAR", "input_suffix": "NEXT" + " c d" * 400, "input_extra": extra}
    response = client.post("/infill", body | {"n_predict": 4})
    assert response.status == 200
    assert client.service.receipts[-1]["prompt_tokens"] <= 508


def test_native_completion_streams_objects_that_always_have_content_and_stop(act):
    client = act("one two")
    events = client.post("/completion", {"prompt": "x", "n_predict": -1, "stream": True, "seed": -1}).events
    assert all({"content", "stop"} <= set(e) for e in events)
    assert [e["stop"] for e in events] == [False] * (len(events) - 1) + [True]
    assert "".join(e["content"] for e in events) == "one two"
    assert client.post("/completion", {"prompt": [5, "x"]}).json["content"] == "one two"


def test_text_becomes_tokens_and_text_again(act, tools_tokenizer: Tokenizer):
    client = act("x")
    ids = client.post("/tokenize", {"prompt": "naïve 😀", "add_special_tokens": False}).json
    assert ids["tokens"] == tools_tokenizer.encode("naïve 😀") and ids["count"] == len(ids["tokens"])
    assert client.post("/detokenize", {"tokens": ids["tokens"]}).json["content"] == "naïve 😀"
    pieces = client.post("/tokenize", {"content": "ab", "with_pieces": True}).json["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == "ab"
    assert client.get("/tokenizer_info").json["eos_token"] == "<|im_end|>"
    prompt = client.post("/apply-template", ASK).json
    assert prompt["prompt"] == "user: hi<|im_end|>\nassistant: "
    assert client.post("/detokenize", {"tokens": [-1]}).status == 400


def test_metrics_count_what_was_done(act):
    client = act("one two")
    client.post("/v1/chat/completions", ASK)
    text = client.get("/metrics").body.decode()
    assert 'soloist_request_success_total{finished_reason="stop"} 1.0' in text
    names = [
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "prompt_tokens_total",
        "generation_tokens_total", "prompt_tokens_cached_total", "num_requests_running", "kv_cache_usage_perc",
        "spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_per_pos_total",
        "request_queue_time_seconds_sum",
    ]  # fmt: skip
    for name in names:
        assert f"soloist_{name}" in text, name
    assert 'inter_token_latency_seconds_bucket{le="0.0005"}' in text


def test_props_tell_how_the_server_stands(act):
    client = act("one two")
    client.post("/v1/chat/completions", ASK)
    props = client.get("/props").json
    assert props["total_slots"] == 1 and props["drafter"]["name"] == "script"
    assert props["receipts"][-1]["route"] == "/v1/chat/completions"
