"""Conversations over HTTP: what was read is not read again, and answers are those of a cold run."""

from pathlib import Path

import pytest

from soloist.llm import LLM
from soloist.prefix import PrefixStore
from tests.server.client import Client
from tests.tiny_model import write_tiny_model

FAMILIES = ("llama", "bailing_moe_v3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_tiny_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def start(serve, folder: Path, *, keeps: bool = True, context: int = 1000, **settings) -> Client:
    llm = LLM(folder, dtype="float32", num_threads=1, max_context_len=context)
    llm.engine.prefixes = PrefixStore(host_bytes=1 << 28) if keeps else None
    return serve(llm, **settings)


def say(client: Client, messages: list[dict], **fields) -> dict:
    body = {"messages": messages, "max_tokens": 8, "ignore_eos": True, "temperature": 0} | fields
    response = client.post("/v1/chat/completions", body)
    assert response.status == 200, response.body
    return response.json


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_conversation_is_read_once(serve, folders, family: str):
    client, cold = start(serve, folders[family]), start(serve, folders[family], keeps=False)
    messages = [{"role": "system", "content": "the lazy dog jumps over " * 60}, {"role": "user", "content": "hi"}]
    for turn in range(3):
        answer, plain = say(client, messages), say(cold, messages)
        assert answer["choices"][0]["message"] == plain["choices"][0]["message"]
        if turn:
            num_prompt, num_kept = answer["usage"]["prompt_tokens"], cached(answer)
            # Whatever the template does to the last answer, the turns before it were kept.
            assert num_prompt - num_kept < 60 and num_kept > 0.8 * num_prompt
            assert answer["timings"]["cache_n"] == num_kept
        assert cached(plain) == 0
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"and {turn}?"}]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_percent_of_four_thousand_tokens_are_read_again_at_most(serve, tmp_path, family: str):
    folder = write_tiny_model(tmp_path, family, max_position_embeddings=6000)
    client, cold = start(serve, folder, context=5000), start(serve, folder, keeps=False, context=5000)
    messages = [{"role": "system", "content": "the lazy dog jumps over " * 780}]
    num_prompt = 0
    for turn in range(4):
        messages.append({"role": "user", "content": f"{turn}: " + "the quick brown fox jumps over it " * 12})
        answer = say(client, messages)
        reread, known = answer["timings"]["prompt_n"], num_prompt
        num_prompt = answer["usage"]["prompt_tokens"]
        if turn:
            # What the turn added must be read; of what was there before, almost nothing is.
            assert reread - (num_prompt - known) < 0.02 * known, (reread, num_prompt, known)
        messages.append(answer["choices"][0]["message"])
    assert known > 4000
    assert answer["choices"] == say(cold, messages[:-1])["choices"]


@pytest.mark.parametrize("family", FAMILIES)
def test_regenerate_and_edit_return_to_kept_turns(serve, folders, family: str):
    client, cold = start(serve, folders[family]), start(serve, folders[family], keeps=False)
    head = [{"role": "system", "content": "over the lazy dog " * 40}]
    for text in ("first question", "first question", "another question", "first question"):
        messages = [*head, {"role": "user", "content": text}]
        answer = say(client, messages)
        assert answer["choices"] == say(cold, messages)["choices"]
    assert cached(answer) > 150


def test_the_reason_of_a_miss_names_the_text(serve, folders):
    client = start(serve, folders["llama"])
    say(client, [{"role": "user", "content": "the fox is cch=fa690 and jumps over the lazy dog"}])
    answer = say(client, [{"role": "user", "content": "the fox is cch=1b2c3 and jumps over the lazy dog"}])
    reason = answer["receipt"]["prefix"]
    assert "leaves the nearest kept conversation at token" in reason and "kept" in reason
    assert "fa690" in reason and "1b2c3" in reason
    assert client.get("/props").json["receipts"][-1]["prefix"] == reason
    assert client.get("/props").json["prefix_cache"]["num_lookups"] == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_an_agents_changing_header_keeps_the_prefix(serve, folders, family: str):
    # Field report 85.
    client = start(serve, folders[family])
    usages = []
    for cch in ("fa690", "1b2c3"):
        line = f"x-anthropic-billing-header: cc_version=2.0; cch={cch};"
        system = [{"type": "text", "text": line}, {"type": "text", "text": "the quick brown fox " * 60}]
        body = {"system": system, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        usages.append(client.post("/v1/messages", body).json["usage"])
    assert usages[0]["cache_read_input_tokens"] == 0
    assert usages[1]["cache_read_input_tokens"] > 250 and usages[1]["input_tokens"] < 40


def test_a_scored_prompt_is_read_whole(serve, folders):
    client = start(serve, folders["llama"])
    body = {"prompt": "the quick brown fox", "echo": True, "logprobs": 1, "max_tokens": 1}
    first, second = (client.post("/v1/completions", body).json for _ in range(2))
    assert first["choices"] == second["choices"] and cached(second) == 0


def test_what_is_kept_can_be_forgotten(serve, folders):
    client = start(serve, folders["llama"])
    messages = [{"role": "user", "content": "the lazy dog"}]
    say(client, messages)
    assert cached(say(client, messages)) > 0
    assert client.post("/reset_prefix_cache").status == 200
    assert cached(say(client, messages)) == 0
