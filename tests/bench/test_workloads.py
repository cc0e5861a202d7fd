"""The same prompts for every engine, another variant for every repeat."""

import json
from pathlib import Path

import pytest

from soloist.bench.workloads import NAMES, make_workload
from soloist.errors import UsageError


def count(text: str) -> int:
    """A tokenizer of four characters a token."""
    return -(-len(text) // 4)


def make(name: str, input_tokens: int | None = None):
    return make_workload(name, input_tokens=input_tokens, output_tokens=16, count_tokens=count)


@pytest.mark.parametrize("num_tokens", [10, 128, 1000, 8192])
def test_the_looping_prompt_is_as_long_as_asked_for_and_repeats_itself(num_tokens: int):
    (prompt,) = make("looping", num_tokens).prompts
    assert num_tokens - 6 <= count(prompt.variant(0).text) <= num_tokens + 2
    assert not prompt.is_chat
    if num_tokens >= 1000:
        assert prompt.text.count("lighthouse while the street lamps") >= num_tokens // 130


def test_a_model_without_tokenizer_counts_words():
    workload = make_workload("looping", input_tokens=50, output_tokens=4, count_tokens=None)
    assert len(workload.prompts[0].text.split()) == 48


def test_variants_differ_from_the_first_word_and_are_equally_long():
    (prompt,) = make("looping", 200).prompts
    texts = [prompt.variant(i).text for i in range(6)]
    assert len({text.split()[0] for text in texts}) == 6
    assert max(map(count, texts)) - min(map(count, texts)) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_every_workload_has_prompts_and_asks_for_as_much_as_told(name: str):
    workload = make(name)
    assert workload.prompts and workload.max_tokens == 16 and workload.ignore_eos
    assert all(prompt.is_chat == (name in ("chat", "edit")) for prompt in workload.prompts)


def test_a_file_is_a_workload(tmp_path: Path):
    text = tmp_path / "prompt.txt"
    text.write_text("Once upon a time")
    assert [p.text for p in make(str(text)).prompts] == ["Once upon a time"]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps({"prompt": "a"}) + "\n\n" + json.dumps({"message": "b"}) + "\n")
    workload = make(str(lines))
    assert [(p.text, p.is_chat) for p in workload.prompts] == [("a", False), ("b", True)]
    assert workload.name == "prompts.jsonl"


@pytest.mark.parametrize("content", ["{}", "[1]", "not json", '{"prompt"'])
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match="allowed are UTF-8 text"):
        make(str(path))


def test_unknown_names_and_lengths_that_mean_nothing_are_refused():
    with pytest.raises(UsageError, match="looping, code, chat, edit"):
        make("loping")
    with pytest.raises(UsageError, match="--input-tokens is for"):
        make("chat", 100)
