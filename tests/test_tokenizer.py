import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, processors

from soloist.errors import CheckpointError, UnsupportedError, UsageError
from soloist.tokenizer import Detokenizer, StopMatcher, Tokenizer
from soloist.vocabulary import gguf_vocabulary
from tests.tiny_vocabulary import FILES, SPECIAL, USER_DEFINED, make_backend, make_folder, make_metadata, model_file

TEXTS = (
    "Why is the sky blue?",
    "  Café naïve façade, Ünïcödé, ẞtraße — “quotes”…",
    "👩‍👩‍👧‍👦 🎉 emoji 🇩🇪 and 🤷🏽‍♀️",
    "你好，世界！こんにちは 안녕하세요 한국어 ไทย العربية हिन्दी",
    "def f(x):\n\treturn x  # comment\n\n\n    if a >= b: pass\r\n}",
    "   spaces   \n \n\t",
    "I'll don't WE'RE it'S 'tis",
    "\u200b\ufeff\u00a0x<tool_call>y</tool_call>",
    "<|endoftext|><|im_end|>",
)


def from_metadata(**changes) -> Tokenizer:
    return Tokenizer(gguf_vocabulary(make_metadata(**{f"ggml.{k}": v for k, v in changes.items()}), "tiny.gguf"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(make_folder(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    return make_backend()


def stream(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()], detokenizer


# Encoding


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_text_survives_encoding_and_decoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*SPECIAL, *USER_DEFINED, "<|", "im_end|>", "<", " ", "dog", "\n", "é"])).map("".join))
def test_text_never_becomes_a_special_token_unless_asked(tokenizer, text):
    ids = tokenizer.encode(text)
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*SPECIAL, *USER_DEFINED, "<|", "im_end|>", "x", " ", "\n", "é"])).map("".join))
def test_asked_for_special_tokens_are_those_of_the_library(tokenizer, backend, text):
    assert tokenizer.encode(text, allow_special=True) == backend.encode(text).ids


def test_special_tokens_swallow_white_space_where_the_file_says_so(tmp_path):
    backend = make_backend(special=())
    backend.add_special_tokens(
        [
            AddedToken("<|r|>", rstrip=True, normalized=False),
            AddedToken("<|l|>", lstrip=True, normalized=False),
            AddedToken("word", single_word=True, normalized=False),
            AddedToken("<|r|>r", normalized=False),
        ]
    )
    ours = Tokenizer.load(make_folder(tmp_path, backend, tokenizer_config={}))
    for text in ("a <|r|> \n b", "a \n <|l|> b", "sword word words word", "<|r|>r <|r|>", "<|r|>"):
        assert ours.encode(text, allow_special=True) == backend.encode(text).ids, text


def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(UsageError, match=r"character 2 is a lone surrogate"):
        tokenizer.encode("ab\udc80")


def test_settings_of_a_training_run_do_not_cut_or_fill_text(tmp_path):
    backend = make_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    tokenizer = Tokenizer.load(make_folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("x y z " * 20)) == "x y z " * 20
    assert len(tokenizer.encode("x")) == 1


# BOS


def bos_backend() -> tokenizers.Tokenizer:
    backend = make_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", backend.token_to_id("<|bos|>"))]
    )
    return backend


def test_bos_is_added_where_the_checkpoint_asks_for_it_and_never_doubled(tmp_path):
    config = {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|im_end|>"}
    tokenizer = Tokenizer.load(make_folder(tmp_path, bos_backend(), tokenizer_config=config))
    bos = tokenizer.bos_id
    assert tokenizer.encode("dog") == [i for i in tokenizer.encode("dog", add_bos=True) if i != bos]
    assert tokenizer.encode("dog", add_bos=True)[0] == bos
    assert tokenizer.encode("<|bos|>dog", add_bos=True, allow_special=True).count(bos) == 1
    # The user's own words are not a BOS.
    assert tokenizer.encode("<|bos|>", add_bos=True).count(bos) == 1
    assert tokenizer.encode("", add_bos=True) == [bos]


def test_a_config_that_wants_no_bos_wins_over_the_vocabulary(tmp_path):
    config = {"bos_token": "<|bos|>", "add_bos_token": False}
    tokenizer = Tokenizer.load(make_folder(tmp_path, bos_backend(), tokenizer_config=config))
    assert tokenizer.encode("dog", add_bos=True) == tokenizer.encode("dog")


def test_bos_wanted_but_not_named_is_an_error_at_load(tmp_path):
    with pytest.raises(CheckpointError, match="no BOS token is named"):
        Tokenizer.load(make_folder(tmp_path, tokenizer_config={"add_bos_token": True}))
    with pytest.raises(CheckpointError, match="no BOS token is named"):
        from_metadata(add_bos_token=True, bos_token_id=None)


# Ends, named tokens, FIM


def test_stop_ids_are_the_union_of_what_every_file_says(tmp_path):
    backend = make_backend(special=("<|im_end|>", "<|endoftext|>", "<|own|>", "<|bos|>"))
    a, b = backend.token_to_id("the"), backend.token_to_id("dog") or backend.token_to_id("he")
    folder = make_folder(
        tmp_path,
        backend,
        generation_config={"eos_token_id": [a]},
        config={"eos_token_id": b},
        tokenizer_config={"eos_token": "<|own|>"},
    )
    named = [backend.token_to_id(text) for text in ("<|own|>", "<|im_end|>", "<|endoftext|>")]
    assert Tokenizer.load(folder).stop_ids == tuple(sorted({a, b, *named}))


@pytest.mark.parametrize("given", ["2", [1, "x"], True, 10**6, [-1]])
def test_an_end_id_that_is_none_is_an_error_at_load(tmp_path, given):
    with pytest.raises(CheckpointError, match="eos_token_id"):
        Tokenizer.load(make_folder(tmp_path, generation_config={"eos_token_id": given}))


def test_added_tokens_that_look_like_tags_are_special_and_others_are_vocabulary(tmp_path):
    backend = make_backend(user_defined=("<role>", "   ", "<3 words>"))
    tokenizer = Tokenizer.load(make_folder(tmp_path, backend))
    role, spaces, words = (backend.token_to_id(text) for text in ("<role>", "   ", "<3 words>"))
    ids = tokenizer.encode("<role>   <3 words>")
    assert ids[-2:] == [spaces, words]
    assert role not in ids
    assert tokenizer.encode("<role>   ", allow_special=True) == [role, spaces]
    assert tokenizer.decode([role, spaces, words]) == "<role>   <3 words>"


def test_a_token_that_only_a_config_calls_special_is_special(tmp_path):
    backend = make_backend(user_defined=("fill up",))
    pad_id = backend.token_to_id("fill up")
    assert pad_id in Tokenizer.load(make_folder(tmp_path, backend)).encode("fill up")
    tokenizer = Tokenizer.load(make_folder(tmp_path, backend, tokenizer_config={"pad_token": "fill up"}))
    assert pad_id not in tokenizer.encode("fill up")
    assert tokenizer.encode("fill up", allow_special=True) == [pad_id]
    assert tokenizer.decode([pad_id]) == ""


def test_special_tokens_are_no_text_but_the_marks_of_an_answer_are(tokenizer):
    ids = tokenizer.encode("<|bos|><think>dog<tool_call><|im_end|>", allow_special=True)
    assert tokenizer.decode(ids) == "<think>dog<tool_call>"
    assert tokenizer.decode(ids, show_special=True) == "<|bos|><think>dog<tool_call><|im_end|>"


def test_rows_beyond_the_vocabulary_are_no_text(tokenizer):
    assert tokenizer.decode([tokenizer.num_tokens, tokenizer.num_tokens + 99, 10**7]) == ""


def test_a_tokenizer_of_another_model_is_refused(tokenizer):
    tokenizer.check_vocab_size(tokenizer.num_tokens)
    tokenizer.check_vocab_size(tokenizer.num_tokens + 271)
    with pytest.raises(CheckpointError, match="another model"):
        tokenizer.check_vocab_size(tokenizer.num_tokens - 1)


@pytest.mark.parametrize(
    "names",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"),
        ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<fim-pad>"),
        ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>", "<repo_name>"),
        ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
    ],
)
def test_fill_in_the_middle_is_found_by_the_names_of_its_tokens(tmp_path, names):
    backend = make_backend(special=names)
    tokenizer = Tokenizer.load(make_folder(tmp_path, backend, tokenizer_config={}))
    prefix_id, suffix_id, middle_id, end_id = (backend.token_to_id(name) for name in names)
    assert tokenizer.fim is not None
    # A user's text that spells a marker stays text.
    ids = tokenizer.encode_infill(f"a{names[2]}", "b")
    expected = [prefix_id, *tokenizer.encode(f"a{names[2]}"), suffix_id, *tokenizer.encode("b"), middle_id]
    assert ids == expected
    assert ids.count(middle_id) == 1
    assert tokenizer.fim.end_ids == tuple(sorted((prefix_id, suffix_id, middle_id, end_id)))
    assert set(tokenizer.fim.stop_strings) == set(names)


def test_a_model_without_fim_tokens_says_so(tokenizer):
    assert tokenizer.fim is None
    with pytest.raises(UsageError, match="no fill-in-the-middle tokens"):
        tokenizer.encode_infill("a", "b")


# Files


def test_a_vocabulary_that_is_not_byte_level_is_refused_by_name(tmp_path):
    backend = make_backend()
    backend.decoder = decoders.Metaspace()
    with pytest.raises(UnsupportedError, match="decoder Metaspace"):
        Tokenizer.load(make_folder(tmp_path, backend))


def test_a_folder_without_or_with_a_damaged_tokenizer_names_the_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file$"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(CheckpointError, match=r"no such file; tokenizer\.model cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(tmp_path)
    make_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list"):
        Tokenizer.load(tmp_path)


def test_a_named_token_outside_the_vocabulary_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"eos_token is '<none>', which is not in the vocabulary"):
        Tokenizer.load(make_folder(tmp_path, tokenizer_config={"eos_token": "<none>"}))


def test_chat_templates_are_found_in_every_place_and_files_win(tmp_path):
    assert Tokenizer.load(make_folder(tmp_path)).chat_templates == {}
    make_folder(tmp_path, tokenizer_config={"chat_template": "plain"})
    assert Tokenizer.load(tmp_path).chat_templates == {"default": "plain"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    make_folder(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.load(tmp_path).chat_templates == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("é")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("c")
    assert Tokenizer.load(tmp_path).chat_templates == {"default": "é", "tool_use": "b", "rag": "c"}


# GGUF


def test_a_gguf_vocabulary_knows_its_padding_rows():
    tokenizer = from_metadata()
    assert tokenizer.num_tokens == len(make_metadata()["tokenizer.ggml.tokens"]) - 3
    assert tokenizer.decode([tokenizer.num_tokens]) == ""
    assert tokenizer.token_id("[PAD0]") is None
    assert tokenizer.eos_id in tokenizer.stop_ids


def test_gguf_turn_ends_and_templates_are_read():
    metadata = make_metadata(**{"ggml.eot_token_id": 7, "ggml.eom_token_id": 9})
    metadata |= {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = Tokenizer(gguf_vocabulary(metadata, "tiny.gguf"))
    assert {7, 9} <= set(tokenizer.stop_ids)
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}


@pytest.mark.parametrize(
    ("changes", "kind", "complaint"),
    [
        ({"pre": "tekken"}, UnsupportedError, "tokenizer.ggml.pre is 'tekken'; supported: llama-bpe"),
        ({"pre": None}, UnsupportedError, "tokenizer.ggml.pre is None"),
        ({"model": "llama"}, UnsupportedError, "not SentencePiece"),
        ({"tokens": None}, CheckpointError, "no tokenizer.ggml.tokens"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1], "merges": []}, CheckpointError, "token 'a' is in the"),
        ({"token_type": [1, 1]}, CheckpointError, "2 token types"),
        ({"merges": ["t he he"]}, CheckpointError, "tokens and merges do not fit"),
        ({"merges": ["the"]}, CheckpointError, "tokens and merges do not fit"),
        ({"bos_token_id": 10**6}, CheckpointError, "bos_token_id is 1000000, but the vocabulary has"),
    ],
)
def test_a_gguf_vocabulary_at_fault_is_refused(changes, kind, complaint):
    with pytest.raises(kind, match=complaint):
        from_metadata(**changes)


def test_families_treat_text_as_their_training_did():
    def pieces(tokenizer, text):
        return [tokenizer.decode([i]) for i in tokenizer.encode(text)]

    # CORPUS makes "12" and "1234" merge wherever digits are not cut apart.
    assert pieces(from_metadata(pre="llama-bpe"), "1234")[0] != "1"
    for single_digits in ("qwen2", "smollm"):
        assert pieces(from_metadata(pre=single_digits), "1234") == list("1234")
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    qwen, smollm = from_metadata(pre="qwen2"), from_metadata(pre="smollm")
    assert qwen.encode(decomposed) == qwen.encode(composed)
    assert smollm.encode(decomposed) != smollm.encode(composed)


def test_llama_prompts_begin_with_bos_unless_the_file_says_no():
    for add_bos_token, expected in ((None, True), (False, False), (True, True)):
        assert from_metadata(pre="llama-bpe", add_bos_token=add_bos_token).adds_bos is expected
    assert not from_metadata(pre="llama-bpe", add_bos_token=None, bos_token_id=None).adds_bos
    assert not from_metadata(pre="qwen2", add_bos_token=None).adds_bos


@pytest.mark.parametrize("name", FILES)
def test_ids_of_real_files_equal_those_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    path = model_file(name)
    ours = Tokenizer.load(path)
    if "qwen" in name:
        # transformers forgets the normal form when it reads a GGUF file, but not in the model's own class.
        state = json.loads(ours._backend.to_str())["model"]
        merges = [tuple(merge) for merge in state["merges"]]
        theirs = transformers.Qwen2Tokenizer(vocab=state["vocab"], merges=merges)
        theirs.add_special_tokens({"additional_special_tokens": list(ours.special_texts)})
        theirs.add_tokens(["<tool_call>", "</tool_call>"])
        texts = (*TEXTS, "decomposed cafe\u0301", "١٢٣ ½ ²³ Ⅷ 12345 3.14159")
    else:
        theirs = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=name)
        # It also forgets that digits stand alone; those of ASCII were never merged, so they agree all the same.
        texts = (*TEXTS, "12345 3.14159 in 2024")
    for text in texts:
        ids = ours.encode(text)
        if "tool_call" not in text:
            assert ids == theirs.encode(text, add_special_tokens=False, split_special_tokens=True), text
        assert ours.encode(text, allow_special=True) == theirs.encode(text, add_special_tokens=False), text
        assert "".join(stream(ours, ids)[0]) == ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize(
    ("name", "num_tokens", "stop_ids"), [(FILES[0], 49152, (0, 2)), (FILES[1], 151665, (151643, 151645))]
)
def test_real_files_know_their_ends_and_padding(name, num_tokens, stop_ids):
    tokenizer = Tokenizer.load(model_file(name))
    assert (tokenizer.num_tokens, tokenizer.stop_ids, tokenizer.adds_bos) == (num_tokens, stop_ids, False)
    assert (tokenizer.fim is not None) is ("coder" in name)


# Streaming


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_streamed_text_equals_decoding_at_once_for_any_ids(tokenizer, backend, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.num_tokens + 2), max_size=40))
    texts, _ = stream(tokenizer, ids)
    assert "".join(texts) == tokenizer.decode(ids)
    visible = [i for i in ids if i < tokenizer.num_tokens and i not in tokenizer.special_ids]
    assert tokenizer.decode(visible) == backend.decode(visible)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.sampled_from("aé안녕그리고👩\u200d🎉\n ")))
def test_no_delta_of_valid_text_holds_half_a_character(tokenizer, text):
    texts, _ = stream(tokenizer, tokenizer.encode(text))
    assert "\ufffd" not in "".join(texts)
    assert "".join(texts) == text


def test_syllables_split_over_tokens_arrive_whole(tokenizer):
    text = "".join(chr(0xAC00 + 37 * i) for i in range(300))
    ids = tokenizer.encode(text)
    assert len(ids) > 600
    texts, _ = stream(tokenizer, ids)
    assert [t for t in texts if t] == list(text)


def test_an_answer_that_ends_inside_a_character_ends_with_one_replacement(tokenizer):
    ids = tokenizer.encode("a😀")
    texts, detokenizer = stream(tokenizer, ids[:-2])
    assert "".join(texts) == "a\ufffd"
    assert texts[-1] == "\ufffd"
    assert detokenizer.text_ends[-1] == 2
    assert detokenizer.finish() == ""


def test_nothing_at_all_is_no_text(tokenizer):
    assert stream(tokenizer, [])[0] == [""]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_it_is_known_which_token_ends_a_piece_of_text(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.num_tokens - 1), max_size=30))
    texts, detokenizer = stream(tokenizer, ids)
    text = "".join(texts)
    for num_chars in range(len(text) + 1):
        num_tokens = detokenizer.num_tokens_at(num_chars)
        assert num_tokens == 0 if num_chars == 0 else detokenizer.text_ends[num_tokens - 1] >= num_chars
        assert num_tokens < 2 or detokenizer.text_ends[num_tokens - 2] < num_chars


# Stop strings


def first_stop(stops: list[str], text: str) -> tuple[str, str | None]:
    """Say what `StopMatcher` shall find, by trying every place."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def feed_all(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    shown = [matcher.feed(piece)[0] for piece in pieces]
    return "".join([*shown, matcher.flush()]), matcher.matched


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=6),
    st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
)
def test_stop_strings_are_found_alike_however_text_is_cut(stops, pieces):
    matcher = StopMatcher(stops)
    text, matched = feed_all(matcher, pieces)
    assert (text, matched) == first_stop(stops, "".join(pieces))
    assert matcher.num_chars == len(text)
    assert feed_all(StopMatcher(stops), list("".join(pieces))) == (text, matched)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=5),
    st.text(alphabet="abc", max_size=20),
)
def test_no_more_is_held_back_than_may_become_a_stop_string(stops, text):
    matcher = StopMatcher(stops)
    shown = ""
    for i, char in enumerate(text):
        safe, matched = matcher.feed(char)
        shown += safe
        if matched:
            break
        held = text[: i + 1].removeprefix(shown)
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        endings = [text[i + 1 - n : i + 1] for n in range(1, i + 2)]
        assert held == max((e for e in endings if e in beginnings), key=len, default="")


def test_a_partial_stop_string_is_delivered_at_the_end():
    assert feed_all(StopMatcher(["TRE\nAAAA"]), ["UNO", "DUE", "TRE"]) == ("UNODUETRE", None)


def test_a_stop_string_over_two_tokens_is_never_delivered():
    assert feed_all(StopMatcher(["TREX"]), ["TRE", "X"]) == ("", "TREX")
    matcher = StopMatcher(["TREX"])
    assert matcher.feed("TRE") == ("", None)
    assert matcher.feed("X") == ("", "TREX")
    assert matcher.feed("more") == ("", "TREX")
    assert matcher.flush() == ""


def test_sixty_four_long_stop_strings_work():
    stops = [f"{i:02d}" + "x" * 500 for i in range(64)]
    text = "".join(stop[:-1] for stop in stops) + stops[40]
    # "63" and its x are held until the next stop string begins.
    assert feed_all(StopMatcher(stops), [text, "after"]) == ("".join(stop[:-1] for stop in stops), stops[40])


def test_text_ids_and_stop_string_end_at_the_same_token(tokenizer):
    ids = [*tokenizer.encode("the dog"), *tokenizer.encode("END"), *tokenizer.encode(" fox")]
    detokenizer, matcher = Detokenizer(tokenizer), StopMatcher(["END"])
    shown = "".join(matcher.feed(detokenizer.push(i))[0] for i in ids)
    assert shown == "the dog"
    assert detokenizer.num_tokens_at(matcher.num_chars) == len(tokenizer.encode("the dog"))


def test_no_stop_strings_hold_nothing_back():
    assert StopMatcher([]).feed("text") == ("text", None)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UsageError, match="empty"):
        StopMatcher(["a", ""])
