"""The same prompts for every engine, another variant for every repeat."""

import json
from pathlib import Path

import pytest

from soloist.bench.workloads import NAMES, draw_run, make_workload
from soloist.errors import UsageError

RUN = 271828


def count(text: str) -> int:
    """A tokenizer of four characters a token."""
    return -(-len(text) // 4)


def make(name: str, input_tokens: int | None = None):
    return make_workload(name, input_tokens=input_tokens, output_tokens=16, count_tokens=count, run=RUN)


@pytest.mark.parametrize("num_tokens", [10, 128, 1000, 8192])
def test_the_looping_prompt_is_as_long_as_asked_for_and_repeats_itself(num_tokens: int):
    (prompt,) = make("looping", num_tokens).repeat(0)
    assert num_tokens - 3 <= count(prompt.text) <= num_tokens + 2
    assert not prompt.is_chat
    if num_tokens >= 1000:
        assert prompt.text.count("lighthouse while the street lamps") >= num_tokens // 130


def test_a_model_without_tokenizer_counts_words():
    workload = make_workload("looping", input_tokens=50, output_tokens=4, count_tokens=None, run=RUN)
    assert len(workload.repeat(0)[0].text.split()) == 50


def test_no_repeat_begins_as_another_one_and_all_are_equally_long():
    workload = make("looping", 200)
    texts = [workload.repeat(i)[0].text for i in range(25)]
    assert len({tuple(text.split()[:2]) for text in texts}) == 25
    assert len({text.split()[0] for text in texts[:10]}) == 10
    assert max(map(count, texts)) - min(map(count, texts)) <= 2


def test_another_run_begins_otherwise_so_that_no_server_has_read_its_prompts():
    runs = [draw_run() for _ in range(20)]
    assert len(set(runs)) > 15 and all(len(str(run + 99_999)) == 6 for run in runs)
    texts = [
        make_workload("chat", input_tokens=None, output_tokens=16, count_tokens=count, run=run).repeat(1)[0].text
        for run in (123456, 123457)
    ]
    assert texts[0].startswith("Second 123456. Why is") and texts[1].startswith("Second 123457. Why is")


def test_code_begins_as_code():
    assert make("code").repeat(0)[0].text.startswith(f"# First {RUN}.\nimport heapq\n")


@pytest.mark.parametrize("name", NAMES)
def test_every_workload_has_prompts_and_asks_for_as_much_as_told(name: str):
    workload = make(name)
    assert workload.prompts and workload.max_tokens == 16
    # What a model says behind its end is mostly repetition, which looks good for drafts.
    assert workload.ignore_eos == (name == "looping")
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
