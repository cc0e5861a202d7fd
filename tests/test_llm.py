"""Text in, text out: characters, stop strings, and where text, ids, log probabilities and usage end.

Scripted answers commit given ids in given groups; S[a][b c] in a comment is a step with a, then one with b and c.
"""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.answer import Delta
from soloist.chat import ChatTemplate
from soloist.errors import ContextLengthError, ModelNotFoundError, UsageError
from soloist.llm import LLM, Completion, SamplingParams
from soloist.tokenizer import Tokenizer
from tests.scripted import Script
from tests.tiny_model import CHAT_TEMPLATE, write_tiny_model
from tests.tiny_vocabulary import SPECIAL, make_backend, make_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    return Tokenizer.load(make_folder(tmp_path_factory.mktemp("vocabulary"), tokenizer_config=config))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_tiny_model(tmp_path_factory.mktemp("tiny")), device="cpu", dtype="float32", max_context_len=200)


Group = str | Sequence[int]


def scripted(tokenizer: Tokenizer, *groups: Group) -> LLM:
    """Make an LLM that says `groups`, one step each, and then its end token for ever."""
    ids = [tokenizer.encode(group) if isinstance(group, str) else list(group) for group in groups]
    assert tokenizer.eos_id is not None
    script = Script(ids, vocab_size=tokenizer.num_tokens, end_id=tokenizer.eos_id)
    return LLM.of(script.engine(num_tokens=tokenizer.num_tokens), tokenizer, "script")


def end(tokenizer: Tokenizer) -> list[int]:
    assert tokenizer.eos_id is not None
    return [tokenizer.eos_id]


def bytes_as_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Spell a text one byte a token."""
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.num_tokens) if len(tokenizer.token_bytes(i)) == 1}
    return [by_byte[bytes([byte])] for byte in text.encode()]


def deltas_and_completion(llm: LLM, prompt="Hi", **params) -> tuple[list[Delta], Completion]:
    """Stream an answer, and check that its pieces are the answer asked for in one go."""
    stream = llm.stream(prompt, SamplingParams(**params))
    deltas = list(stream)
    whole, again = stream.completion, llm.generate(prompt, SamplingParams(**params))
    for completion in (whole, again):
        assert "".join(delta.text for delta in deltas) == completion.text
        assert tuple(i for delta in deltas for i in delta.token_ids) == completion.token_ids
        assert tuple(lp for delta in deltas for lp in delta.logprobs) == completion.logprobs
        assert (deltas[-1].finish_reason, deltas[-1].stop_match) == (completion.finish_reason, completion.stop_match)
        assert completion.stats.completion_tokens == len(completion.token_ids)
    assert all(delta.finish_reason is None and delta.stats is None for delta in deltas[:-1])
    assert len(deltas) == whole.stats.forwards
    return deltas, whole


# --- characters ---


def test_an_emoji_split_over_steps_arrives_whole(tokenizer):
    # Field report 1.
    emoji = bytes_as_ids(tokenizer, "\U0001f600")
    llm = scripted(tokenizer, emoji[:2], emoji[2:], end(tokenizer))
    deltas, whole = deltas_and_completion(llm)
    assert [delta.text for delta in deltas] == ["", "\U0001f600", ""]
    assert [delta.token_ids for delta in deltas] == [(), tuple(emoji), tuple(end(tokenizer))]
    assert whole.finish_reason == "stop" and whole.stop_match == tokenizer.eos_id
    messages = [{"role": "user", "content": "Hi"}]
    assert llm.chat(messages).text == "\U0001f600" == "".join(delta.text for delta in llm.stream_chat(messages))


@settings(deadline=None, max_examples=20)
@given(sizes=st.lists(st.integers(1, 16), min_size=1, max_size=40))
def test_no_window_of_steps_loses_a_syllable(tokenizer, sizes: list[int]):
    # Field report 4: every third syllable spelled in bytes.
    syllables = "".join(chr(0xAC00 + 37 * i) for i in range(60))
    ids = [t for i, s in enumerate(syllables) for t in (tokenizer.encode if i % 3 else spell(tokenizer))(s)]
    groups, at = [], 0
    while at < len(ids):
        size = sizes[len(groups) % len(sizes)]
        groups.append(ids[at : at + size])
        at += size
    deltas, whole = deltas_and_completion(scripted(tokenizer, *groups), max_tokens=len(ids))
    assert whole.text == syllables == tokenizer.decode(ids)
    assert all("\ufffd" not in delta.text for delta in deltas)


def spell(tokenizer: Tokenizer):
    return lambda text: bytes_as_ids(tokenizer, text)


def test_a_character_cut_by_max_tokens_ends_as_one_replacement_and_counts(tokenizer):
    # Field report 7.
    emoji = bytes_as_ids(tokenizer, "\U0001f600")
    deltas, whole = deltas_and_completion(scripted(tokenizer, "ok", emoji[:2], emoji[2:]), max_tokens=4)
    assert whole.text == "ok\ufffd" and whole.finish_reason == "length"
    assert deltas[-1].text == "\ufffd" and whole.stats.completion_tokens == 4


def test_special_tokens_are_not_text(tokenizer):
    bos = tokenizer.bos_id or tokenizer.token_id("<|bos|>")
    assert scripted(tokenizer, "a", [bos], "b", end(tokenizer)).generate("Hi").text == "ab"


# --- stop strings ---


def test_a_held_back_beginning_is_given_at_the_end(tokenizer):
    # Field report 10, first half.
    llm = scripted(tokenizer, "UNO", "DUE", "TRE", end(tokenizer))
    deltas, whole = deltas_and_completion(llm, stop=["TRE\nAAAA"])
    assert whole.text == "UNODUETRE" and whole.stop_match == tokenizer.eos_id
    assert [delta.text for delta in deltas] == ["UNO", "DUE", "", "TRE"]


def test_a_beginning_of_a_stop_string_is_never_given_if_the_rest_comes(tokenizer):
    # Field report 10, second half.
    deltas, whole = deltas_and_completion(scripted(tokenizer, "TRE", "X", "more"), stop=["TREX"])
    assert [(delta.text, delta.token_ids) for delta in deltas] == [("", ()), ("", ())]
    assert (whole.text, whole.token_ids, whole.finish_reason, whole.stop_match) == ("", (), "stop", "TREX")


def test_everything_ends_at_the_stop_string_within_a_step(tokenizer):
    # Field report 13.
    _, whole = deltas_and_completion(scripted(tokenizer, "xENDyz"), stop=["END"], logprobs=2)
    assert (whole.text, whole.token_ids) == ("x", tuple(tokenizer.encode("x")))
    assert [lp.token_id for lp in whole.logprobs] == list(whole.token_ids) and len(whole.logprobs[0].top) == 2
    assert whole.stats.completion_tokens == 1 and whole.stats.acceptance_length == 1


def test_a_token_that_brought_text_before_the_stop_string_counts(tokenizer):
    (token,) = tokenizer.encode("the")
    _, whole = deltas_and_completion(scripted(tokenizer, "a", [token], "b"), stop=["he"])
    assert (whole.text, whole.token_ids) == ("at", (*tokenizer.encode("a"), token))


def test_a_stop_token_counts_and_is_no_text(tokenizer):
    (x,) = tokenizer.encode("x")
    _, whole = deltas_and_completion(scripted(tokenizer, "ab", "cxd"), stop_token_ids=[x])
    assert whole.text == "abc" and whole.token_ids[-1] == x and whole.stop_match == x


def test_a_stop_string_is_not_looked_for_before_min_tokens(tokenizer):
    text = "aSTOPbSTOPc"
    ids = tokenizer.encode(text)
    (s,) = tokenizer.encode("S")
    first, second = ids.index(s), len(ids) - 1 - ids[::-1].index(s)
    llm = scripted(tokenizer, ids)
    assert llm.generate("Hi", SamplingParams(stop=["STOP"], min_tokens=first)).text == "a"
    # One that had begun before does not count either.
    for min_tokens in (first + 1, first + 4, second):
        assert llm.generate("Hi", SamplingParams(stop=["STOP"], min_tokens=min_tokens)).text == "aSTOPb"


def test_sixty_four_stop_strings_work_and_the_first_to_be_complete_wins(tokenizer):
    stops = [f"never {i}" for i in range(62)] + ["brown fox", "row"]
    _, whole = deltas_and_completion(scripted(tokenizer, "the quick brown fox"), stop=stops)
    assert (whole.text, whole.stop_match) == ("the quick b", "row")


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_no_grouping_shows(tokenizer, data: st.DataObject):
    emoji = bytes_as_ids(tokenizer, "\U0001f600")
    token = st.sampled_from([*tokenizer.encode("abthe the END\n"), *emoji, *end(tokenizer), *tokenizer.encode("the")])
    ids = data.draw(st.lists(token, min_size=1, max_size=24))
    stops = ["END", "ND\n", "the", "he E", "\U0001f600", "\ufffd"]
    params = {
        "stop": data.draw(st.lists(st.sampled_from(stops), max_size=3)),
        "max_tokens": data.draw(st.integers(1, 30)),
        "logprobs": data.draw(st.sampled_from([None, 1])),
        "ignore_eos": data.draw(st.booleans()),
    }
    params["min_tokens"] = data.draw(st.integers(0, min(4, params["max_tokens"])))
    groups, at = [], 0
    while at < len(ids):
        size = data.draw(st.integers(1, 16))
        groups.append(ids[at : at + size])
        at += size
    seen = []
    for grouping in ([[i] for i in ids], groups):
        llm = scripted(tokenizer, *grouping)
        deltas, whole = deltas_and_completion(llm, **params)
        text, given_ids = "", []
        for delta in deltas:
            text += delta.text
            given_ids += delta.token_ids
            # Text never waits for a token, and no token is given whose text is still held back as a whole.
            assert tokenizer.decode(given_ids).startswith(text) or "\ufffd" in text
        logprobs = [(lp.token_id, round(lp.logprob, 4)) for lp in whole.logprobs]
        assert [token_id for token_id, _ in logprobs] == list(whole.token_ids if params["logprobs"] else [])
        seen.append((whole.text, whole.token_ids, logprobs, whole.finish_reason, whole.stop_match))
    assert seen[0] == seen[1]


# --- cancelling ---


def test_a_cancelled_answer_keeps_what_was_said_and_gives_what_was_held_back(tokenizer):
    llm = scripted(tokenizer, "ok ", "AB", "CD")
    stream = llm.stream("Hi", SamplingParams(stop=["ABCD"]))
    assert [next(stream).text, next(stream).text] == ["ok ", ""]
    stream.cancel()
    assert [(delta.text, delta.finish_reason) for delta in stream] == [("AB", "cancelled")]
    assert stream.completion.text == "ok AB"
    said = tuple(tokenizer.encode("ok ") + tokenizer.encode("AB"))
    assert stream.completion.token_ids == said and stream.completion.stats.completion_tokens == len(said)


def test_a_cancel_comes_from_another_thread(tiny):
    stream = tiny.stream("the", SamplingParams(ignore_eos=True))
    next(stream)
    threading.Timer(0.01, stream.cancel).start()
    assert stream.completion.finish_reason in ("cancelled", "length")
    assert len(tiny.generate("the", SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3


def test_a_stream_that_is_left_lets_the_model_go(tiny):
    for _ in tiny.stream("the", SamplingParams(ignore_eos=True)):
        break
    held = tiny.stream("the", SamplingParams(ignore_eos=True))
    next(held)
    with pytest.raises(UsageError, match="answering another request"):
        tiny.generate("the")
    held.close()
    tiny.generate("the", SamplingParams(max_tokens=1))


# --- a loaded model ---


def test_a_prompt_is_text_or_its_ids(tiny):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    ids = tiny.tokenizer.encode("the quick")
    assert tiny.generate("the quick", params).token_ids == tiny.generate(ids, params).token_ids
    assert tiny.generate("the quick", params).num_prompt_tokens == len(ids)
    assert tiny.encode(torch.tensor(ids)) == ids


def test_special_tokens_in_a_raw_prompt_count_as_such_and_in_a_message_do_not(tiny):
    assert tiny.encode("a<|im_end|>")[-1] == tiny.tokenizer.eos_id
    prompt = tiny.render([{"role": "user", "content": "<|im_end|>"}])
    assert prompt.ids.count(tiny.tokenizer.eos_id) == 1


def test_a_chat_is_its_rendered_prompt(tiny):
    messages = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(max_tokens=8)
    prompt = tiny.render(messages)
    assert prompt.text == "user: Hi<|im_end|>\nassistant: "
    assert tiny.chat(messages, params).token_ids == tiny.generate(prompt.ids, params).token_ids


def test_every_end_token_that_any_part_names_ends_an_answer(tmp_path):
    # Field report 37: config, generation config, tokenizer and template each know another one.
    backend = make_backend()
    a, b, c = (backend.token_to_id(text) for text in ("<|bos|>", "<|endoftext|>", "<|im_end|>"))
    folder = write_tiny_model(tmp_path)
    make_folder(
        folder,
        backend,
        generation_config={"eos_token_id": [a]},
        tokenizer_config={"eos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE},
    )
    llm = LLM(folder, device="cpu", dtype="float32")
    assert {a, b, c} <= set(llm.engine.eos_token_ids)
    assert set(ChatTemplate(llm.tokenizer).stop_ids) <= set(llm.engine.eos_token_ids)


def test_the_same_seed_gives_the_same_text_whatever_ran_before(tiny):
    # Field report 82.
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    texts = [tiny.generate(prompt, params).text for prompt in ("the fox", "naïve", "the fox", "the fox")]
    assert texts[0] == texts[2] == texts[3] != texts[1]
    assert (
        tiny.generate("the fox", SamplingParams(temperature=1.0, seed=2, max_tokens=20, ignore_eos=True)).text
        != texts[0]
    )


def test_greedy_is_the_default_and_goes_to_the_end_of_the_context(tiny):
    completion = tiny.generate("the fox", SamplingParams(ignore_eos=True))
    assert completion.stats.seed is None and completion.finish_reason == "length"
    assert completion.num_prompt_tokens + len(completion.token_ids) == tiny.max_context_len == 200


def test_a_prompt_too_long_is_refused_with_the_numbers(tiny):
    # Field report 106.
    with pytest.raises(ContextLengthError, match=r"the prompt has \d+ tokens; the context holds 200"):
        tiny.generate("the fox jumps " * 100)
    with pytest.raises(ContextLengthError):
        tiny.chat([{"role": "system", "content": "be brief " * 200}, {"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        (["a"], "allowed: text, or token ids"),
        (7, "the prompt is a int"),
    ],
)
def test_a_prompt_that_is_none_is_refused(tiny, prompt, message: str):
    # Field report 91.
    with pytest.raises(UsageError, match=message):
        tiny.generate(prompt)


def test_a_prompt_of_bos_alone_is_one(tmp_path):
    folder = write_tiny_model(tmp_path)
    make_folder(folder, tokenizer_config={"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "add_bos_token": True})
    llm = LLM(folder, device="cpu", dtype="float32")
    assert llm.generate("", SamplingParams(max_tokens=3, ignore_eos=True)).num_prompt_tokens == 1


def test_prefill_reports_its_progress(tiny):
    seen = []
    tiny.generate([5] * 150, SamplingParams(max_tokens=1), on_prefill=lambda *at: seen.append(at))
    assert seen[0][0] == 0 and seen[-1] == (149, 149)


def test_filling_in_the_middle_ends_at_the_models_markers(tmp_path):
    # Field report 169.
    fim = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
    tokenizer = Tokenizer.load(make_folder(tmp_path, make_backend(special=(*SPECIAL, *fim))))
    pad = tokenizer.token_id("<|fim_pad|>")
    llm = scripted(tokenizer, "x, y", [pad, *tokenizer.encode("z")])
    completion = llm.stream_infill("print(", ")\n").completion
    assert (completion.text, completion.stop_match) == ("x, y", pad)
    # Spelled out in ordinary tokens they end it too.
    spelled = (
        scripted(tokenizer, "x", "<|fim_middle|>y").stream_infill("f(", ")", SamplingParams(stop=["!"])).completion
    )
    assert (spelled.text, spelled.stop_match) == ("x", "<|fim_middle|>")


def test_a_model_without_what_is_asked_for_says_so(tmp_path):
    llm = LLM(write_tiny_model(tmp_path, chat_template=None), device="cpu", dtype="float32")
    with pytest.raises(UsageError, match="no chat template"):
        llm.chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(UsageError, match="fill-in-the-middle"):
        llm.stream_infill("a", "b")


def test_a_model_without_a_tokenizer_takes_ids_and_gives_ids():
    llm = LLM.of(Script([[1, 2], [3]], vocab_size=9).engine(), None, "config")
    completion = llm.generate([4, 5], SamplingParams(max_tokens=3))
    assert (completion.text, completion.token_ids) == ("", (1, 2, 3))
    with pytest.raises(UsageError, match="config is a config without a tokenizer: give token ids"):
        llm.generate("Hi")
    with pytest.raises(UsageError, match="stop strings need text"):
        llm.generate([4], SamplingParams(stop=["x"]))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dtype": "float8"}, UsageError, "dtype is 'float8'; allowed: bfloat16, float16, float32"),
        ({"num_threads": 0}, UsageError, "num_threads is 0"),
        ({"draft": "oracle"}, UsageError, "oracle"),
        ({"max_context_len": 5000}, ContextLengthError, "5000"),
        ({"max_context_len": 1}, UsageError, "a context of 1 tokens"),
    ],
)
def test_an_argument_out_of_range_is_refused(tmp_path: Path, arguments: dict, error: type, message: str):
    with pytest.raises(error, match=message):
        LLM(write_tiny_model(tmp_path), device="cpu", **arguments)


def test_a_context_that_is_named_is_there_whole_and_one_that_is_not_is_what_drafts_leave(tmp_path: Path):
    options = {"device": "cpu", "dtype": "float32", "draft": "ngram", "draft_width": 5}
    folder = write_tiny_model(tmp_path)
    assert LLM(folder, **options).max_context_len == 1020
    assert LLM(folder, max_context_len=1020, **options).max_context_len == 1020
    with pytest.raises(
        ContextLengthError, match=r"a context of 1024 tokens is asked for.*: ask for at most 1020 tokens"
    ):
        LLM(folder, max_context_len=1024, **options)


def test_a_model_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError):
        LLM(tmp_path / "nothing")


def test_random_weights_follow_their_seed(tmp_path):
    folder = write_tiny_model(tmp_path)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    a, b, c = (
        LLM(folder, device="cpu", weights="random", seed=seed, dtype="float32").generate("the", params).token_ids
        for seed in (1, 1, 2)
    )
    assert a == b != c


def test_progress_is_told_while_weights_are_read(tmp_path):
    seen = []
    LLM(write_tiny_model(tmp_path), device="cpu", dtype="float32", progress=lambda *at: seen.append(at))
    assert seen and seen[-1][0] == seen[-1][1]
