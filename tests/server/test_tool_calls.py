"""Tool calls and reasoning: the same events however the text is cut, the same calls streamed or not."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.errors import UsageError
from soloist.server.reply_text import Reasoning, SplitText, TextSplitter
from soloist.server.tool_calls import (
    JsonParser,
    Text,
    XmlArgumentsParser,
    XmlParametersParser,
    parser_class,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
]
VALUE = '他说 "你好" \\ 世界\n第二行 </arg> <tool 😀'
ARGUMENTS = {"path": "a b.txt", "text": VALUE, "n": 12345678901234567890}
JSON_CALL = json.dumps({"name": "write", "arguments": ARGUMENTS}, ensure_ascii=False)
ANSWERS = {
    JsonParser: f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    XmlArgumentsParser: "<tool_call>write\n"
    + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in ARGUMENTS.items())
    + "</tool_call>",
    XmlParametersParser: "<tool_call>\n<function=write>\n"
    + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in ARGUMENTS.items())
    + "</function>\n</tool_call>",
}
PARSERS = list(ANSWERS)
MARKS = [
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "{", "}", '"', "<function=f>", "x",
    "<parameter=p>", "</parameter>", "name", "\n", " ", "\\", '{"name": "f", "arguments": {',
]  # fmt: skip


def split(parser, text: str, cuts: list[int]) -> SplitText:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    machine = parser(TOOLS)
    pieces = [p for a, b in itertools.pairwise(bounds) for p in machine.push(text[a:b])]
    return SplitText.of([*pieces, *machine.finish()])


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 16, 1000])
def test_any_step_size_gives_the_same_call(parser, size: int):
    # Field reports 19, 22 and 25.
    text = f"Let me see. {ANSWERS[parser]}\n{ANSWERS[parser]} Done."
    found = split(parser, text, list(range(0, len(text), size)))
    assert [name for name, _ in found.calls] == ["write", "write"]
    for _, arguments in found.calls:
        assert json.loads(arguments) == ARGUMENTS
    assert found.content == "Let me see. \n Done."


@settings(max_examples=60, deadline=None)
@given(
    parser=st.sampled_from(PARSERS),
    text=st.lists(
        st.sampled_from([*ANSWERS.values(), *MARKS]),
        max_size=9,
    ).map("".join),
    cuts=st.lists(st.integers(0, 500), max_size=8),
)
def test_any_text_is_parsed_alike_however_it_is_cut(parser, text: str, cuts: list[int]):
    whole = split(parser, text, [])
    assert split(parser, text, cuts) == whole
    assert split(parser, text, list(range(len(text)))) == whole


@pytest.mark.parametrize("parser", PARSERS)
def test_arguments_stream_before_the_call_is_over(parser):
    machine = parser(TOOLS)
    pieces = [p for char in ANSWERS[parser] for p in machine.push(char)]
    assert len(pieces) > 20


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("text", ["no call at all", "a < b", "<tool_cal", "<tool_call", "<tool_call>?</tool_call> x"])
def test_what_is_no_call_stays_text(parser, text: str):
    # Field report 103: tools are there, the model answers in prose.
    assert split(parser, text, list(range(len(text)))) == SplitText(content=text, calls=[])


@pytest.mark.parametrize("parser", [XmlArgumentsParser, XmlParametersParser])
def test_a_call_cut_off_by_the_limit_still_has_valid_arguments(parser):
    text = ANSWERS[parser]
    for end in range(text.index("path") + 12, len(text)):
        for _, arguments in split(parser, text[:end], []).calls:
            assert isinstance(json.loads(arguments), dict)


def test_a_call_without_arguments_or_line_break():
    for text in ("<tool_call>now</tool_call>", "<tool_call>now\n</tool_call>"):
        assert split(XmlArgumentsParser, text, [3, 12]).calls == [("now", "{}")]
    assert split(JsonParser, '<tool_call>{"name": "now"}</tool_call>', []).calls == [("now", "{}")]
    assert split(JsonParser, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [9]).calls == [
        ("f", '{"a": 1}')
    ]


def test_the_parser_is_found_in_the_template():
    assert parser_class("... <tool_call>{name} <arg_key>k</arg_key>") is XmlArgumentsParser
    assert parser_class("<tool_call> <function=f> <parameter=p>") is XmlParametersParser
    assert parser_class('<tool_call> {"name": ...}') is JsonParser
    with pytest.raises(UsageError, match="in a form that is not read here"):
        parser_class("[TOOL_CALLS]")


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_reasoning_content_and_calls_are_told_apart(size: int):
    text = f"I think <tool\nso</think>Now.{ANSWERS[JsonParser]}"
    splitter = TextSplitter(opens_reasoning=True, tool_parser=JsonParser(TOOLS))
    pieces = [p for i in range(0, len(text), size) for p in splitter.push(text[i : i + size])]
    found = SplitText.of([*pieces, *splitter.finish()])
    assert (found.reasoning, found.content) == ("I think <tool\nso", "Now.")
    assert json.loads(found.calls[0][1]) == ARGUMENTS


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_a_call_ends_reasoning_that_was_never_closed(size: int):
    text = f"hmm{ANSWERS[XmlArgumentsParser]}after</think>"
    splitter = TextSplitter(opens_reasoning=True, tool_parser=XmlArgumentsParser(TOOLS))
    pieces = [p for i in range(0, len(text), size) for p in splitter.push(text[i : i + size])]
    found = SplitText.of([*pieces, *splitter.finish()])
    assert found.reasoning == "hmm" and found.content == "after</think>" and len(found.calls) == 1


@pytest.mark.parametrize(
    ("text", "opens", "expected"),
    [
        ("<thi", False, SplitText(content="<thi", calls=[])),
        ("<think>abc", False, SplitText(reasoning="abc", calls=[])),
        ("abc</thi", True, SplitText(reasoning="abc</thi", calls=[])),
        ("abc<tool_c", True, SplitText(reasoning="abc<tool_c", calls=[])),
    ],
)
def test_marks_cut_off_at_the_end_are_not_lost(text: str, opens: bool, expected: SplitText):
    # Field report 43.
    for parser in (None, JsonParser(TOOLS)):
        splitter = TextSplitter(opens_reasoning=opens, tool_parser=parser)
        found = SplitText.of([*(p for char in text for p in splitter.push(char)), *splitter.finish()])
        assert found == expected


def test_raw_text_has_no_reasoning():
    splitter = TextSplitter(opens_reasoning=False, splits_reasoning=False)
    assert splitter.push("<think>x") == [Text("<think>x")]
    assert Reasoning("a") != Text("a")
