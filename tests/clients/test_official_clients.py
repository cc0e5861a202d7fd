"""The official clients of OpenAI and Anthropic, over a socket. Run by `make test-clients`."""

import contextlib
import json

import pytest

from tests.clients.served import served
from tests.server.client import TOOLS_TEMPLATE, make_tokenizer, scripted_llm
from tests.server.test_protocols import CALL
from tests.server.test_tool_calls import ARGUMENTS, TOOLS

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    special = ("<|bos|>", "<|im_end|>", "<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), TOOLS_TEMPLATE, special=special, user_defined=())


@pytest.fixture
def act(tokenizer):
    with contextlib.ExitStack() as stack:

        def start(text: str, **settings) -> str:
            ids = tokenizer.encode(text)
            llm = scripted_llm(tokenizer, [ids[i : i + 4] for i in range(0, len(ids), 4)])
            return stack.enter_context(served(llm, **settings))[0]

        yield start


def test_openai_chats_streams_and_calls(act):
    client = openai.OpenAI(base_url=f"{act('Well. ' + CALL, api_key='k')}/v1", api_key="k", max_retries=0)
    plain = client.chat.completions.create(model="gpt-4o", messages=HI, tools=TOOLS)
    (call,) = plain.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS and plain.choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(
        model="x", messages=HI, tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.delta"} <= kinds
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    assert final.usage.completion_tokens == plain.usage.completion_tokens


def test_openai_completes_scores_and_lists(act):
    client = openai.OpenAI(base_url=f"{act('one two three')}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    answer = client.completions.create(model="x", prompt="hi", max_tokens=50, logprobs=2, echo=True)
    assert answer.choices[0].text == "hione two three" and answer.choices[0].logprobs.token_logprobs[0] is None
    parts = client.completions.create(model="x", prompt="hi", max_tokens=50, stream=True)
    assert "".join(part.choices[0].text for part in parts) == "one two three"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="x", prompt="hi", max_tokens=10**6)
    assert refused.value.code == "context_length_exceeded"


def test_openai_responses(act):
    client = openai.OpenAI(base_url=f"{act('Well.')}/v1", api_key="none", max_retries=0)
    assert client.responses.create(model="x", input="hi").output_text == "Well."
    with client.responses.stream(model="x", input="hi") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "Well."
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_anthropic_messages_and_counts(act):
    client = anthropic.Anthropic(base_url=act("Well. " + CALL), api_key="none", max_retries=0)
    tools = [{"name": "write", "input_schema": TOOLS[0]["function"]["parameters"]}]
    fields = {"model": "claude-x", "max_tokens": 300, "messages": HI, "tools": tools}
    whole = client.messages.create(**fields)
    assert [block.type for block in whole.content] == ["text", "tool_use"] and whole.content[1].input == ARGUMENTS
    with client.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    assert final.content[1].input == ARGUMENTS and final.stop_reason == whole.stop_reason == "tool_use"
    counted = client.messages.count_tokens(model="x", messages=HI, tools=tools).input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="x", max_tokens=5, messages=[{"role": "assistant", "content": "x"}])
