"""Answers of a given form: legal at every token, the same with a draft and without, and closed where it cannot be."""

import json

import pytest
import torch

from soloist.engine import Engine
from soloist.llm import LLM
from soloist.runtime.runner import ModelRunner
from soloist.server.structured import GrammarError, Grammars
from soloist.spec.drafter import Drafter
from soloist.tokenizer import Tokenizer
from tests.scripted import TableModel
from tests.server.client import Client, make_tokenizer, scripted_llm

ASK = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def form(schema: dict) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


class Fixed(Drafter):
    """Proposes the same tokens every time."""

    name = "fixed"

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids, self.max_drafts = token_ids, len(token_ids)

    def propose(self, buffers, context_len) -> None:
        buffers.width.fill_(1 + self.max_drafts)
        buffers.input_ids[1:] = torch.tensor(self.token_ids)


def noisy_llm(tokenizer: Tokenizer, drafter: Drafter | None = None) -> LLM:
    """Make a model that would say anything."""

    def logits(positions: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        seeds = (positions * 1009 + input_ids * 31).tolist()
        rows = [torch.randn(N, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.stack(rows)

    N = tokenizer.num_tokens
    runner = ModelRunner(TableModel(N, logits), max_width=1 + (drafter.max_drafts if drafter else 0))
    return LLM.of(Engine(runner, drafter, eos_token_ids=(tokenizer.eos_id,)), tokenizer, "noisy")


def said(client: Client, **fields) -> dict:
    return client.post("/v1/chat/completions", ASK | {"max_tokens": 120} | fields).json["choices"][0]


@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_would_say_anything_says_the_schema(serve, tokenizer, seed: int):
    choice = said(serve(noisy_llm(tokenizer)), temperature=1.0, seed=seed, **form(SCHEMA))
    answer = json.loads(choice["message"]["content"])
    assert set(answer) == {"name", "n"} and 0 <= answer["n"] <= 99 and len(answer["name"]) <= 6
    assert choice["finish_reason"] == "stop"


def test_any_object_will_do_where_only_json_is_asked_for(serve, tokenizer):
    client = serve(scripted_llm(tokenizer, ["Sure! ", '{"a": [1, true]}', " Bye."]))
    choice = said(client, response_format={"type": "json_object"}, max_tokens=40)
    assert choice["message"]["content"].lstrip().startswith("{")


@pytest.mark.parametrize("drafts", ['{"name": "a', "```json\n{", "}\n\nThat is all.", ' {"n'])
def test_a_draft_changes_nothing_but_the_speed(serve, tokenizer, drafts: str):
    # Field report 67: the draft is cut at its first illegal token, before it is verified.
    ids = tokenizer.encode(drafts)
    plain, drafted = serve(noisy_llm(tokenizer)), serve(noisy_llm(tokenizer, Fixed(ids)))
    for fields in ({}, {"temperature": 0.8, "seed": 5}):
        assert said(drafted, **fields, **form(SCHEMA)) == said(plain, **fields, **form(SCHEMA))


def test_what_is_behind_the_end_of_the_grammar_is_cut(serve, tokenizer):
    # Field report 70: complete in the middle of a step of many tokens.
    client = serve(scripted_llm(tokenizer, ["{", '"n": 12}', [tokenizer.eos_id, *tokenizer.encode(" and more")]]))
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema["additionalProperties"] = False
    choice = said(client, **form(schema))
    assert choice["message"]["content"] == '{"n": 12}' and choice["finish_reason"] == "stop"
    client = serve(scripted_llm(tokenizer, ['{"n": 12}```\n']))
    assert said(client, **form(schema))["message"]["content"] == '{"n": 12}'


def test_reasoning_is_free_and_the_form_begins_behind_it(serve, tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    tokenizer = make_tokenizer(tmp_path, template)
    client = serve(scripted_llm(tokenizer, ["let me", ' see {"no"</thi', 'nk>{"n', '": 1}']))
    choice = said(client, **form({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}))
    assert choice["message"]["reasoning_content"] == 'let me see {"no"'
    assert json.loads(choice["message"]["content"]) == {"n": 1}


def test_white_space_is_bounded(serve, tokenizer):
    # Field report 100: a model that prefers white space everywhere.
    client = serve(scripted_llm(tokenizer, ["{", *[" "] * 200]))
    space = tokenizer.encode(" ")[0]
    choice = said(client, max_tokens=100, logit_bias={str(space): 5}, **form(SCHEMA))
    assert "  " * 15 not in choice["message"]["content"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"type": "object", "properties": {"a": {"$ref": "#/none"}}},
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"$ref": "#"},
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(serve, tokenizer, schema: dict):
    response = serve(noisy_llm(tokenizer)).post("/v1/chat/completions", ASK | form(schema))
    assert response.status == 400 and "schema" in response.json["error"]["message"]


def test_an_answer_does_not_end_in_a_dead_end_of_its_schema(serve, tokenizer):
    # Behind `{"a":` nothing is possible; the library would let the answer end there.
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/loop"}},
        "required": ["a"],
        "$defs": {"loop": {"$ref": "#/$defs/loop"}},
    }
    response = serve(noisy_llm(tokenizer)).post("/v1/chat/completions", ASK | form(schema))
    assert response.status >= 400 and "the answer is not complete" in response.json["error"]["message"]


def test_a_damaged_pattern_is_explained(serve, tokenizer):
    schema = {"type": "string", "pattern": "(a+"}
    response = serve(noisy_llm(tokenizer)).post("/v1/chat/completions", ASK | form(schema))
    assert "unclosed group" in response.json["error"]["message"]


def test_parameters_that_would_break_the_form_are_refused(serve, tokenizer):
    client = serve(noisy_llm(tokenizer))
    assert client.post("/v1/chat/completions", ASK | {"ignore_eos": True} | form(SCHEMA)).status == 400


def test_a_grammar_that_fails_costs_one_request(serve, tokenizer, monkeypatch):
    # Field report 103.
    client = serve(noisy_llm(tokenizer))

    def fail(*_):
        raise GrammarError("no way on")

    with monkeypatch.context() as patch:
        patch.setattr("soloist.server.structured.GrammarConstraint.allowed", fail)
        response = client.post("/v1/chat/completions", ASK | form(SCHEMA))
        assert response.status == 500 and "no way on" in response.json["error"]["message"]
    assert said(client, **form(SCHEMA))["finish_reason"] == "stop"


def test_every_protocol_with_a_form_keeps_it(serve, tokenizer):
    client = serve(noisy_llm(tokenizer))
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    answer = client.post("/v1/responses", {"input": "hi", "text": text, "max_output_tokens": 120}).json
    assert "n" in json.loads(answer["output"][0]["content"][0]["text"])
    answer = client.post("/completion", {"prompt": "x", "json_schema": SCHEMA, "n_predict": 120}).json
    assert "n" in json.loads(answer["content"])


def test_masks_agree_with_what_may_be_drafted(tokenizer):
    grammars = Grammars(tokenizer, tokenizer.num_tokens, (tokenizer.eos_id,))
    ids = tokenizer.encode('{"name": "ab", "n": 7}')
    constraint = grammars.schema_constraint(SCHEMA, opens_reasoning=False)
    assert constraint.num_legal(ids) == len(ids)
    rows = constraint.allowed(ids)
    assert rows.shape == (len(ids) + 1, tokenizer.num_tokens)
    assert all(rows[i, token] for i, token in enumerate(ids))
    assert rows[-1].nonzero().flatten().tolist() == [tokenizer.eos_id] or rows[-1, tokenizer.eos_id]
    # Asking moved nothing.
    assert torch.equal(constraint.allowed([])[0], rows[0])
    constraint.advance(ids[:3])
    assert torch.equal(constraint.allowed(ids[3:5]), rows[3:6])
