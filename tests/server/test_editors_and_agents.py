"""What editors and coding agents send, field by field as they send it, and the smallest thing that would break them."""

import asyncio
import json
from collections.abc import Callable
from functools import partial

import pytest

from tests.server.client import Client, Response
from tests.server.test_protocols import CALL
from tests.server.test_tool_calls import ARGUMENTS


@pytest.fixture
def say(act) -> Callable[..., Client]:
    """Serve a model that says a text, with room for what agents send."""
    return partial(act, max_context_len=4000)


FIM = "<|fim_prefix|>def f(x):\n    <|fim_suffix|>\n<|fim_middle|>"


def data(response: Response) -> list:
    """Parse every event as a client that skips comments does; anything else on a line is a fault."""
    events = []
    for block in response.body.decode().split("\n\n"):
        for line in block.splitlines():
            assert line.startswith(("data: ", "event: ", ":")), line
            if line.startswith("data: ") and line != "data: [DONE]":
                events.append(json.loads(line[6:]))
    return events


# --- editors


def test_llama_vim_warms_the_ring_context_and_asks(say):
    client = say("return x<|file_sep|>more")
    body = {
        "id_slot": 0, "input_prefix": "def f(x):\n", "input_suffix": "\n", "prompt": "    ", "n_predict": 0,
        "input_extra": [{"filename": "a.py", "text": "x = 1\n", "time": [1, 2]}],
        "n_indent": 4, "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"], "stream": False,
        "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1, "response_fields": [""],
    }  # fmt: skip
    warm = client.post("/infill", body | {"temperature": 0.0, "samplers": [], "t_max_prompt_ms": 1})
    assert warm.status == 200 and warm.json == {}
    fields = [
        "content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms", "timings/prompt_per_second",
        "timings/predicted_n", "timings/predicted_ms", "timings/predicted_per_token_ms",
        "timings/predicted_per_second", "truncated", "tokens_cached",
    ]  # fmt: skip
    body |= {"n_predict": 128, "t_max_predict_ms": 250, "response_fields": fields, "stop": []}
    answer = client.post("/infill", body)
    # The plugin looks for this before it reads JSON.
    assert b'"content":"' in answer.body
    assert set(answer.json) == set(fields) and answer.json["content"] == "return x"


def test_tabby_reads_llama_cpp_objects(say):
    client = say("return x<|endoftext|>")
    body = {
        "seed": 12345, "prompt": FIM, "n_predict": 64, "temperature": 0.1, "stream": True, "penalty_last_n": 0,
        "presence_penalty": 0.0,
    }  # fmt: skip
    events = data(client.post("/completion", body))
    assert all(isinstance(e["content"], str) and isinstance(e["stop"], bool) for e in events)
    assert "".join(e["content"] for e in events) == "return x" and [e["stop"] for e in events].count(True) == 1


def test_tabby_reads_openai_chunks_without_looking(say):
    client = say("return x<|endoftext|>")
    body = {
        "model": "qwen", "prompt": "def f(x):\n    ", "suffix": "\n", "max_tokens": 64, "temperature": 0.1,
        "stream": True, "presence_penalty": 0.0,
    }  # fmt: skip
    response = client.post("/completions", body)
    # Any event that is of another form panics the task.
    assert all(isinstance(e["choices"][0]["text"], str) for e in data(response))
    assert "".join(e["choices"][0]["text"] for e in data(response)) == "return x"
    assert response.body.endswith(b"data: [DONE]\n\n")
    health = client.get("/v1/models", authorization="Bearer x")
    assert health.status == 200


CONTINUE_STOPS = [
    "<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8", "```", "\ndef", "\nclass", "\n\n\n",
    "\nif __name__", "\nimport ", "\nfrom ",
]  # fmt: skip


@pytest.mark.parametrize(
    "said", ["return x<|fim_middle|>", "return x\ndef g", "return x<|endoftext|>", "return x\n\n\n#"]
)
def test_continue_shows_neither_markers_nor_the_next_function(say, said: str):
    body = {
        "model": "qwen2.5-coder", "prompt": FIM, "max_tokens": 256, "temperature": 0.01, "stop": CONTINUE_STOPS,
        "stream": True, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0,
    }  # fmt: skip
    events = data(say(said, 2).post("/v1/completions", body))
    assert "".join(c["text"] for e in events for c in e["choices"]) == "return x"


def test_a_keystroke_drops_the_request_before_it(say):
    client = say("word " * 20, 1)

    async def type_on() -> list[Response]:
        tasks = []
        for typed in "def f":
            gone = asyncio.Event()
            body = {"prompt": f"{FIM}{typed}", "max_tokens": 200, "stop": CONTINUE_STOPS, "stream": True}
            tasks.append((gone, asyncio.ensure_future(client.call("POST", "/v1/completions", body, gone=gone))))
            await asyncio.sleep(0.01)
            if typed != "f" or len(tasks) < 5:
                gone.set()
        return [await task for _, task in tasks]

    *dropped, last = client.run(type_on())
    assert not any(response.is_complete for response in dropped)
    assert last.body.endswith(b"data: [DONE]\n\n")
    assert [r["finish_reason"] for r in client.service.receipts][-1] == "stop"


# --- agents

SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "The absolute path"},
        "text": {"type": "string"},
        "n": {"type": "integer"},
        "edits": {
            "type": "array",
            "items": {"type": "object", "properties": {"old": {"type": "string"}}},
            "minItems": 1,
        },
    },
    "required": ["path"],
    "additionalProperties": False,
}
CLAUDE_HEADERS = {
    "anthropic_version": "2023-06-01",
    "anthropic_beta": "claude-code-20250219,interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14",
    "anthropic_dangerous_direct_browser_access": "true",
    "authorization": "Bearer none",
    "user_agent": "claude-cli/2.0.0 (external, cli)",
    "x_app": "cli",
    "x_stainless_lang": "js",
    "x_stainless_retry_count": "0",
}


def claude_body(**fields) -> dict:
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    return {
        "model": "claude-sonnet-4-5",
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.0.0; cch=fa690;"},
            {"type": "text", "text": "You are a coding agent.", **ephemeral},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>\nx\n</system-reminder>"},
                                         {"type": "text", "text": "fix it", **ephemeral}]},
        ],
        "tools": [{"name": "write", "description": "Writes.", "input_schema": SCHEMA}],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    } | fields  # fmt: skip


def test_a_claude_code_like_agent_goes_through_a_turn_with_a_tool(say):
    client = say(f"hmm</think>Well.{CALL}")
    response = client.post("/v1/messages?beta=true", claude_body(), **CLAUDE_HEADERS)
    assert response.status == 200, response.body
    events = response.named_events
    names = [name for name, _ in events if name != "ping"]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    start = events[0][1]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["input_tokens"] > 0
    blocks: dict[int, dict] = {}
    for name, event in events:
        if name == "content_block_start":
            assert event["index"] == len(blocks)
            blocks[event["index"]] = event["content_block"] | {"json": ""}
        elif name == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            block["json"] += delta.get("partial_json", "")
            block["text"] = block.get("text", "") + delta.get("text", "")
    assert [block["type"] for block in blocks.values()] == ["thinking", "text", "tool_use"]
    assert json.loads(blocks[2]["json"]) == ARGUMENTS
    last = events[-2][1]
    assert last["delta"]["stop_reason"] == "tool_use" and last["usage"]["output_tokens"] > 0
    assert {"cache_read_input_tokens", "cache_creation_input_tokens"} <= set(last["usage"])
    # The result goes back, with a note of how much room is left in the middle of the conversation.
    messages = claude_body()["messages"] + [
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hmm", "signature": ""},
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "id": blocks[2]["id"], "name": "write", "input": ARGUMENTS},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": blocks[2]["id"], "content": "done", "is_error": False,
             "cache_control": {"type": "ephemeral"}},
        ]},
        {"role": "system", "content": "Token usage: 10000/200000; 190000 remaining"},
        {"role": "user", "content": "go on"},
    ]  # fmt: skip
    second = client.post("/v1/messages?beta=true", claude_body(messages=messages), **CLAUDE_HEADERS)
    assert second.status == 200 and second.named_events[-1][0] == "message_stop"
    body = claude_body(messages=messages)
    for key in ("max_tokens", "stream", "temperature", "metadata"):
        body.pop(key)
    counted = client.post("/v1/messages/count_tokens?beta=true", body, **CLAUDE_HEADERS)
    assert counted.status == 200 and counted.json["input_tokens"] > start["usage"]["input_tokens"]


def test_a_title_is_asked_for_without_tools_or_thinking(say):
    body = claude_body(tools=[], thinking={"type": "disabled"}, max_tokens=512, temperature=0)
    assert say("Fix it").post("/v1/messages?beta=true", body, **CLAUDE_HEADERS).status == 200


CODEX_TOOLS = [
    {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": {
        "type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}},
        "required": ["command"], "additionalProperties": False}},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {
        "type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'}},
    {"type": "web_search", "external_web_access": False},
    {"type": "namespace", "name": "mcp__files", "description": "", "tools": []},
    {"type": "local_shell"},
]  # fmt: skip


def codex_body(items: list[dict], **fields) -> dict:
    return {
        "model": "gpt-5-codex",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
            *items,
        ],
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-abcd",
        "text": {"verbosity": "medium"},
    } | fields


def test_a_codex_like_agent_patches_a_file_and_goes_on(say):
    patch = "*** Begin Patch\n+x\n*** End Patch"
    call = json.dumps({"name": "apply_patch", "arguments": {"input": patch}})
    client = say(f"plan</think>On it.\n<tool_call>\n{call}\n</tool_call>\n<tool_call>\n{call}\n</tool_call>")
    headers = {"originator": "codex_cli_rs", "session_id": "0199", "accept": "text/event-stream"}
    response = client.post("/v1/responses", codex_body([]), **headers)
    assert response.status == 200, response.body
    events = response.named_events
    kinds = [name for name, _ in events]
    assert {
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    } <= set(kinds)  # fmt: skip
    output = events[-1][1]["response"]["output"]
    # One call, as was asked for.
    assert [item["type"] for item in output] == ["reasoning", "message", "custom_tool_call"]
    assert output[2]["input"] == patch and output[2]["name"] == "apply_patch"
    assert output == [event["item"] for name, event in events if name == "response.output_item.done"]
    warnings = " ".join(events[-1][1]["response"]["warnings"])
    assert all(word in warnings for word in ("web_search", "mcp__files", "local_shell"))
    back = [
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {key: value for key, value in output[1].items() if key not in ("id", "status")},
        {"type": "custom_tool_call", "call_id": output[2]["call_id"], "name": "apply_patch", "input": patch},
        {"type": "custom_tool_call_output", "call_id": output[2]["call_id"], "output": '{"output": "Success."}'},
        {"type": "function_call", "call_id": "c2", "name": "shell", "arguments": '{"command": ["ls"]}'},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "a.py"}]},
    ]
    again = client.post("/v1/responses", codex_body(back), **headers)
    assert again.status == 200 and again.named_events[-1][0] == "response.completed"
    usage = again.named_events[-1][1]["response"]["usage"]
    assert usage["input_tokens"] > events[-1][1]["response"]["usage"]["input_tokens"]


# --- benchmarks


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        # vLLM bench serve, guidellm, evalscope perf, aiperf.
        ("/v1/completions", {"prompt": "x", "temperature": 0.0, "repetition_penalty": 1.0, "logprobs": None,
                             "ignore_eos": True, "max_tokens": 5}),
        ("/v1/chat/completions", {"max_completion_tokens": 5, "temperature": 0.0, "ignore_eos": True, "stop": None}),
        ("/v1/chat/completions", {"max_tokens": 5, "min_tokens": 5, "n": 1, "seed": 0, "top_k": 1}),
        ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 5, "min_tokens": 5, "seed": 0}),
    ],
)  # fmt: skip
def test_benchmarks_count_tokens_in_the_last_event(say, path: str, fields: dict):
    options = {"include_usage": True, "continuous_usage_stats": True}
    messages = {} if "prompt" in fields else {"messages": [{"role": "user", "content": "hi", "name": "me"}]}
    client = say("a" * 30, 1)
    response = client.post(path, messages | fields | {"stream": True, "stream_options": options}, x_request_id="r1")
    assert response.status == 200, response.body
    events = data(response)
    assert events[-1]["usage"]["completion_tokens"] == 5 and events[-1]["choices"] == []
    # One event for each step: acceptance is read from their number.
    assert len(events) == 6
