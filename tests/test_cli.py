"""The command line: bad input gets one clear line and the right exit code; only answers go to stdout."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from soloist.cli import main
from tests.tiny_model import write_tiny_model

SOLOIST = Path(sys.executable).parent / "soloist"
# A vocabulary of another model: ids beyond the tiny model's embedding.
NUM_EXTRA_TOKENS = 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _own_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> Iterator[None]:
    """No test reads or writes the user's cache or the network, and none leaves a signal handler behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("SOLOIST_DEBUG", raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Give the command these bytes on stdin."""

    def fill(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return fill


def complaint(capsys: pytest.CaptureFixture[str], words: list[str], exit_code: int) -> str:
    """Run a command that must fail, and give its one line on stderr."""
    assert main(words) == exit_code
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("soloist: ") and "Traceback" not in err
    return lines[0].removeprefix("soloist: ")


# --- what works


def test_an_answer_goes_to_stdout_and_one_speed_line_to_stderr(tiny: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["run", "-m", str(tiny), "hello", "-n", "5", "--ignore-eos"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    (line,) = err.splitlines()
    for word in ("prompt tokens", "TTFT", "TPOT", "tok/s", "GB/s", "length"):
        assert word in line


def test_json_is_one_object_whose_figures_agree(tiny: Path, capsys: pytest.CaptureFixture[str]):
    words = ["run", "-m", str(tiny), "hello", "--max-tokens", "6", "--ignore-eos", "--json"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert err == ""
    assert answer["completion_tokens"] == len(answer["token_ids"]) == 6
    assert answer["finish_reason"] == "length"
    assert answer["prompt_tokens"] > 5
    assert answer["tpot_ms"] > 0 and answer["ttft_s"] > 0
    assert answer["decode_tok_per_s"] == pytest.approx(1000 / answer["tpot_ms"])
    main([*words[:-1]])
    assert capsys.readouterr().out == answer["text"] + ("" if answer["text"].endswith("\n") else "\n")


def test_a_prompt_comes_from_stdin_where_none_is_given(
    tiny: Path, capsys: pytest.CaptureFixture[str], pipe: Callable[[bytes], None]
):
    words = ["-m", str(tiny), "-n", "4", "--ignore-eos", "--json"]
    pipe("héllo 🎉\n".encode())
    assert main(["run", *words]) == 0
    piped = json.loads(capsys.readouterr().out)
    assert main(["run", "héllo 🎉", *words]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == piped["token_ids"]


def test_raw_continues_the_text_without_a_template(tiny: Path, capsys: pytest.CaptureFixture[str]):
    lengths = []
    for words in ([], ["--raw"]):
        assert main(["run", "-m", str(tiny), "abc", "-n", "1", "--json", *words]) == 0
        lengths.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert lengths[1] <= 3 < lengths[0]


def test_the_same_seed_gives_the_same_text_and_another_seed_another(tiny: Path, capsys: pytest.CaptureFixture[str]):
    answers = []
    for seed in ("7", "7", "8"):
        words = ["run", "-m", str(tiny), "hi", "-n", "12", "--temp", "1.5", "--ignore-eos", "--seed", seed, "--json"]
        assert main(words) == 0
        answers.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert answers[0] == answers[1] != answers[2]


def test_a_draft_changes_the_speed_line_and_nothing_else(tiny: Path, capsys: pytest.CaptureFixture[str]):
    answers = []
    for words in ([], ["--draft", "ngram", "--draft-width", "4"]):
        prompt = "one two three one two three one two"
        assert main(["run", "-m", str(tiny), prompt, "-n", "24", "--ignore-eos", "--dtype", "float32", *words]) == 0
        answers.append(capsys.readouterr())
    assert answers[0].out == answers[1].out
    assert "tokens per step" in answers[1].err and "tokens per step" not in answers[0].err


def test_random_weights_answer_without_a_checkpoint(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for path in tiny.iterdir():
        if ".safetensors" not in path.name:
            shutil.copy(path, tmp_path)
    assert main(["run", "-m", str(tmp_path), "--weights", "random", "hi", "-n", "2", "--ignore-eos", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["completion_tokens"] == 2


def test_describe_gives_the_published_size_of_ling_flash(capsys: pytest.CaptureFixture[str]):
    assert main(["models", "describe", "ling-3.0-flash", "--json"]) == 0
    description = json.loads(capsys.readouterr().out)
    assert description["parameters"] == 124_414_211_552
    parts = dict(description["weight_bytes"])
    assert parts.pop("total") == sum(parts.values()) == pytest.approx(2 * 124_414_211_552, rel=1e-4)
    # 5.1 B parameters are read per token, in bfloat16.
    assert description["bytes_per_token"] == pytest.approx(10.2e9, rel=0.01)
    assert description["state_bytes"] == 35 * 32 * 128 * 128 * 4
    assert description["distinct_experts_by_width"]["16"] == pytest.approx(114, abs=0.2)


def test_models_lists_every_built_in_name(capsys: pytest.CaptureFixture[str]):
    assert main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"ling-3.0-flash", "ling-3.0-tiny", "kimi-linear-48b-a3b"} <= {row["name"] for row in rows}
    assert [row["name"] for row in rows if row["is_default"]] == ["smollm2-135m-instruct"]
    assert main(["models"]) == 0
    assert capsys.readouterr().out.count("\n") == len(rows)


def test_doctor_says_what_the_machine_is(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--json"]) == 0
    machine = json.loads(capsys.readouterr().out)
    assert machine["bandwidth_gb_per_s"] > 0 and machine["memory_gib"] >= machine["free_memory_gib"] > 0
    assert machine["capabilities"]["answers on the CPU"].startswith("yes")
    assert main(["doctor"]) == 0
    assert "GB/s" in capsys.readouterr().out


def test_help_and_version_do_not_wait_for_torch():
    code = (
        "import sys, soloist.cli\n"
        "assert soloist.cli.main(['run', '--help']) == soloist.cli.main(['--version']) == soloist.cli.main([]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--temperature" in done.stdout


# --- bad input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--temprature", "1", "x"], "--temperature"),
        (["run", "--max-token", "3", "x"], "--max-tokens"),
        (["rum", "x"], "run"),
        (["run", "--top-k", "many", "x"], "many"),
        (["models", "describe"], "MODEL"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_nearest(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert said in complaint(capsys, words, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--temperature", "-0.5"], ("temperature", "-0.5")),
        (["--top-p", "0"], ("top_p", "above 0")),
        (["--min-p", "1.5"], ("min_p", "1.5")),
        (["--top-k", "0"], ("top_k", "at least 1")),
        (["--max-tokens", "-3"], ("max_tokens", "-3")),
        (["--repetition-penalty", "0"], ("repetition_penalty", "0.01")),
        ([f"--stop={i}" for i in range(65)], ("65", "64")),
        (["--stop", ""], ("stop",)),
        (["--context", "0"], ("context",)),
        (["--context", "1"], ("context",)),
        (["--context", "1000000"], ("1000000",)),
        (["--threads", "0"], ("threads",)),
        (["--device", "tpu"], ("tpu",)),
        (["--weights", "none"], ("random",)),
        (["--weights-dtype", "int3"], ("int3", "int4")),
        (["--draft", "magic"], ("magic",)),
        (["--draft-width", "4"], ("draft",)),
        (["--adaptive-width"], ("draft",)),
    ],
)
def test_a_bad_option_says_what_was_given_and_what_is_allowed(
    words: list[str], said: tuple[str, ...], tiny: Path, capsys: pytest.CaptureFixture[str]
):
    line = complaint(capsys, ["run", "-m", str(tiny), "hello", *words], 2)
    assert all(word in line for word in said), line


def test_a_missing_model_names_the_nearest(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(tiny, tmp_path / "llama-tiny")
    line = complaint(capsys, ["run", "-m", str(tmp_path / "llama-tny"), "x"], 2)
    assert "llama-tiny" in line
    assert "smollm2-135m-instruct" in complaint(capsys, ["run", "-m", "smollm2-135m-instrct", "x"], 2)


@pytest.mark.parametrize("prompt", ["", " "[:0]])
def test_an_empty_prompt_is_refused(prompt: str, tiny: Path, capsys: pytest.CaptureFixture[str]):
    assert "empty" in complaint(capsys, ["run", "-m", str(tiny), prompt], 2)
    assert "empty" in complaint(capsys, ["run", "-m", str(tiny), "--raw", prompt], 2)


def test_an_empty_pipe_is_an_empty_prompt(
    tiny: Path, capsys: pytest.CaptureFixture[str], pipe: Callable[[bytes], None]
):
    pipe(b"")
    assert "empty" in complaint(capsys, ["run", "-m", str(tiny)], 2)


def test_bytes_that_are_not_utf8_are_refused_with_their_place(
    tiny: Path, capsys: pytest.CaptureFixture[str], pipe: Callable[[bytes], None]
):
    pipe(b"caf\xe9 au lait")
    line = complaint(capsys, ["run", "-m", str(tiny)], 2)
    assert "UTF-8" in line and "0xe9" in line and "3" in line
    # As the shell hands over an argument that is not UTF-8.
    assert "UTF-8" in complaint(capsys, ["run", "-m", str(tiny), "caf\udce9"], 2)


def test_a_prompt_longer_than_the_context_gives_both_numbers(tiny: Path, capsys: pytest.CaptureFixture[str]):
    line = complaint(capsys, ["run", "-m", str(tiny), "x y " * 40, "--context", "32"], 2)
    assert "32" in line and len(re.findall(r"\d+", line)) >= 2


def test_a_damaged_checkpoint_is_a_failure_that_names_the_file(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = shutil.copytree(tiny, tmp_path / "broken")
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert shard.name in complaint(capsys, ["run", "-m", str(folder), "x"], 1)
    shard.unlink()
    assert shard.name in complaint(capsys, ["run", "-m", str(folder), "x"], 1)


def test_a_vocabulary_of_another_model_is_refused(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = shutil.copytree(tiny, tmp_path / "mixed")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    first = max(tokenizer["model"]["vocab"].values()) + 100
    tokenizer["model"]["vocab"] |= {f"extra{i}": first + i for i in range(NUM_EXTRA_TOKENS)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["run", "-m", str(folder), "x"]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert "token" in line and "Traceback" not in line


def test_another_architecture_is_refused_by_name(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = shutil.copytree(tiny, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    line = complaint(capsys, ["run", "-m", str(folder), "x"], 2)
    assert "GPT2LMHeadModel" in line and "LlamaForCausalLM" in line
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    assert main(["run", "-m", str(folder), "x"]) in (1, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_a_model_without_a_chat_template_points_to_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_tiny_model(tmp_path, chat_template=None)
    assert "--raw" in complaint(capsys, ["run", "-m", str(folder), "x"], 2)
    assert main(["run", "-m", str(folder), "x", "--raw", "-n", "1"]) == 0


def test_fill_in_the_middle_wants_a_model_with_its_tokens_and_files(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text("def f(x):\n")
    after.write_text("    return y\n")
    words = ["run", "-m", str(tiny), "--prefix", str(before)]
    assert "fill" in complaint(capsys, [*words, "--suffix", str(after)], 2)
    assert "--suffix" in complaint(capsys, words, 2)
    assert "nowhere.py" in complaint(capsys, [*words, "--suffix", str(tmp_path / "nowhere.py")], 2)
    assert "--prefix" in complaint(capsys, [*words, "--suffix", str(after), "and a prompt"], 2)


def test_a_fault_of_ours_is_one_line_and_a_traceback_on_request(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def fail(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("soloist.hub.find_model", fail)
    words = ["models", "describe", "ling-3.0-tiny"]
    line = complaint(capsys, words, 1)
    assert "planted" in line and "--debug" in line
    assert main([*words, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("SOLOIST_DEBUG", "1")
    assert main(words) == 1
    assert "Traceback" in capsys.readouterr().err


# --- pipes and signals


def start(tiny: Path, *words: str) -> "subprocess.Popen[bytes]":
    command = [str(SOLOIST), "run", "-m", str(tiny), "hello", "--ignore-eos", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_ctrl_c_ends_the_answer_with_its_figures(tiny: Path):
    process = start(tiny, "--context", "1024")
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    (line,) = err.decode().splitlines()
    assert "cancelled" in line


def test_sigterm_ends_with_143_and_without_a_word(tiny: Path):
    process = start(tiny, "--context", "1024")
    assert process.stdout is not None
    process.stdout.read(1)
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143, err
    assert b"Traceback" not in err


def test_a_reader_that_leaves_ends_the_answer_quietly(tiny: Path):
    process = start(tiny, "--context", "1024")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(timeout=30), err) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_one_line(tiny: Path):
    with open("/dev/full", "wb") as full:
        command = [str(SOLOIST), "run", "-m", str(tiny), "hello", "-n", "3"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1
    assert done.stderr.decode().splitlines()[-1].startswith("soloist: ") and b"Traceback" not in done.stderr


# --- chat


def talk(pipe: Callable[[bytes], None], tiny: Path, *lines: str) -> int:
    pipe("".join(f"{line}\n" for line in lines).encode())
    return main(["chat", "-m", str(tiny), "-n", "3"])


def test_a_conversation_can_be_kept_changed_and_read_back(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], pipe: Callable[[bytes], None]
):
    kept = tmp_path / "talk.json"
    code = talk(
        pipe,
        tiny,
        "hello",
        "/system Be brief.",
        "/set temperature 0.5",
        '"""two',
        'lines"""',
        "/stats",
        f"/save {kept}",
        "/clear",
        f"/load {kept}",
        "/bye",
        "never read",
    )
    out = capsys.readouterr().out
    assert code == 0
    assert "tokens of context in use" in out and "4 messages read" in out
    messages = json.loads(kept.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[0]["content"] == "Be brief." and messages[3]["content"] == "two\nlines"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/sytem x", "/system"),
        ("/set temprature 1", "temperature"),
        ("/set temperature -1", "temperature"),
        ("/load nowhere.json", "nowhere.json"),
        ("/save", "file name"),
        ('"""unfinished', "close it"),
    ],
)
def test_a_bad_command_in_a_pipe_ends_the_chat_with_one_line(
    line: str, said: str, tiny: Path, capsys: pytest.CaptureFixture[str], pipe: Callable[[bytes], None]
):
    assert talk(pipe, tiny, line) in (1, 2)
    out, err = capsys.readouterr()
    assert out == "" and said in err and len(err.splitlines()) == 1


def test_a_file_that_holds_no_conversation_is_refused(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], pipe: Callable[[bytes], None]
):
    for content in ("nothing", "{}", '{"messages": [{"role": "assistant", "content": "I begin"}]}'):
        path = tmp_path / "talk.json"
        path.write_text(content)
        assert talk(pipe, tiny, f"/load {path}") == 2
        assert "conversation" in capsys.readouterr().err
