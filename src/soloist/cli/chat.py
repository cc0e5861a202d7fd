"""`soloist chat`: a conversation in the terminal, or line by line from a pipe."""

import contextlib
import dataclasses
import difflib
import json
import readline
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soloist.cli import options
from soloist.cli.answer import checked_text, load, make_params, show_answer, speed_line, write_text
from soloist.cli.terminal import print_dim
from soloist.config import Environment
from soloist.errors import SoloistError, UsageError

if TYPE_CHECKING:
    from soloist.answer import Completion
    from soloist.llm import LLM
    from soloist.sampling_params import SamplingParams

HELP = """\
/system [TEXT]      show or set the system message; it takes effect with the next answer
/set [NAME VALUE]   show or set how tokens are chosen, as in /set temperature 0.7
/stats              what the last answer took, and how full the context is
/clear              forget the conversation, keep the system message
/save FILE          write the conversation to a file
/load FILE          read one back
/bye                leave; so do Ctrl-D, and Ctrl-C twice
\"\"\"                 begins and ends a message of several lines
Ctrl-C              stops the answer"""
QUOTES = '"""'
MAX_HISTORY_LINES = 1000
# Memory for states of earlier turns.
KEPT_BYTES = 1 << 30


class Conversation:
    """What has been said so far, and the commands that change it."""

    def __init__(self, llm: "LLM", params: "SamplingParams", system: str | None) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        # Turns in the form of chat templates, without the system message.
        self.turns: list[dict[str, str]] = []
        self.last: Completion | None = None
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/system": self._system,
            "/set": self._set,
            "/stats": self._stats,
            "/clear": self._clear,
            "/save": self._save,
            "/load": self._load,
        }

    @property
    def messages(self) -> list[dict[str, str]]:
        """The whole conversation as the template wants it."""
        head = [{"role": "system", "content": self.system}] if self.system is not None else []
        return head + self.turns

    def say(self, text: str) -> None:
        """Answer `text`. A turn that fails leaves the conversation as it was; a stopped one keeps what was said."""
        turn = {"role": "user", "content": text}
        self.turns.append(turn)
        try:
            self.last = show_answer(
                lambda on_prefill: self.llm.stream_chat(self.messages, self.params, on_prefill=on_prefill), write_text
            )
        except SoloistError:
            self.turns.remove(turn)
            raise
        self.turns.append({"role": "assistant", "content": self.last.text})
        print(flush=True)

    def command(self, line: str) -> None:
        """Carry out a line that begins with a slash.

        Raises:
            UsageError: there is no such command, or its argument is wrong.
        """
        name, _, argument = line.partition(" ")
        if name not in self.commands:
            known = [*self.commands, "/bye"]
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"no command {name}; {hint}")
        self.commands[name](argument.strip())

    def _help(self, _argument: str) -> None:
        print(HELP)

    def _system(self, text: str) -> None:
        if text:
            self.system = text
        else:
            print(self.system if self.system is not None else "no system message")

    def _set(self, argument: str) -> None:
        fields = {field.name: getattr(self.params, field.name) for field in dataclasses.fields(self.params)}
        if not argument:
            print("\n".join(f"{name} {value!r}" for name, value in fields.items()))
            return
        name, _, word = argument.partition(" ")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(fields)}"
            raise UsageError(f"no parameter {name}; {hint}")
        self.params = dataclasses.replace(self.params, **{name: _parse_value(word.strip())})

    def _stats(self, _argument: str) -> None:
        if self.last is None:
            print("no answer yet")
            return
        print(speed_line(self.llm, self.last))
        stats = self.last.stats
        print(f"{stats.prompt_tokens + stats.completion_tokens} of {self.llm.max_context_len} tokens of context in use")

    def _clear(self, _argument: str) -> None:
        self.turns.clear()
        self.last = None

    def _save(self, name: str) -> None:
        path = _path(name, "/save")
        path.write_text(json.dumps({"messages": self.messages}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{len(self.turns)} messages written to {path}")

    def _load(self, name: str) -> None:
        path = _path(name, "/load")
        messages = _read_messages(path)
        has_system = bool(messages) and messages[0]["role"] == "system"
        self.system = messages[0]["content"] if has_system else None
        self.turns = messages[has_system:]
        self.last = None
        print(f"{len(self.turns)} messages read from {path}")


def _path(name: str, command: str) -> Path:
    if not name:
        raise UsageError(f"{command} wants a file name, as in {command} talk.json")
    return Path(name).expanduser()


def _parse_value(word: str) -> Any:
    """Read a parameter's value: JSON where it is JSON, `none` for None, text otherwise."""
    if word.lower() in ("none", "off", ""):
        return None
    try:
        return json.loads(word)
    except ValueError:
        return word


def _read_messages(path: Path) -> list[dict[str, str]]:
    """Read a conversation that `/save` wrote.

    Raises:
        UsageError: the file holds something else.
    """
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
        roles = [message["role"] for message in messages]
        is_text = all(
            set(message) == {"role", "content"} and isinstance(message["content"], str) for message in messages
        )
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} holds no conversation; /save writes one") from None
    expected = ["user" if i % 2 == 0 else "assistant" for i in range(len(roles) - (roles[:1] == ["system"]))]
    if not is_text or roles[len(roles) - len(expected) :] != expected:
        raise UsageError(f"{path} holds no conversation of a user and an assistant in turn")
    return [dict(message) for message in messages]


def _read_turns(is_interactive: bool) -> Iterator[tuple[str, bool]]:
    """Yield what is typed, and whether it is one line; ends at Ctrl-D, at Ctrl-C twice or at the end of a pipe."""
    lines: list[str] | None = None
    was_interrupted = False
    while True:
        prompt = (">>> " if lines is None else "... ") if is_interactive else ""
        try:
            line = checked_text(input(prompt), "the message")
        except UnicodeDecodeError as error:
            raise UsageError(f"stdin is not UTF-8: {error}") from None
        except EOFError:
            break
        except KeyboardInterrupt:
            if was_interrupted:
                raise
            was_interrupted = True
            lines = None
            print("\n(Ctrl-C again leaves, so do Ctrl-D and /bye)")
            continue
        was_interrupted = False
        if lines is None and line.lstrip().startswith(QUOTES):
            line = line.lstrip().removeprefix(QUOTES)
            lines = []
        if lines is None:
            yield line.strip(), True
        elif line.rstrip().endswith(QUOTES):
            yield "\n".join([*lines, line.rstrip().removesuffix(QUOTES)]).strip("\n"), False
            lines = None
        else:
            lines.append(line)
    if lines:
        raise UsageError(f"a message began with {QUOTES} and did not end; close it with {QUOTES}")
    if is_interactive:
        print()


def chat(
    model: options.Model = None,
    system: options.System = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = None,
    stop: options.Stop = None,
    context: options.Context = None,
    threads: options.Threads = None,
    device: options.Device = "auto",
    tensor_parallel_size: options.TensorParallelSize = 1,
    weights: options.Weights = "file",
    weights_dtype: options.WeightsDtype = None,
    dtype: options.Dtype = None,
    draft: options.Draft = None,
    draft_width: options.DraftWidth = None,
    draft_weights_dtype: options.DraftWeightsDtype = None,
    adaptive_width: options.AdaptiveWidth = False,
    debug: options.Debug = False,
) -> None:
    """Converse with a model; /help lists the commands. From a pipe, every line is a message."""
    params = make_params(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=stop,
    )
    llm = load(
        model,
        context=context,
        threads=threads,
        device=device,
        tensor_parallel_size=tensor_parallel_size,
        weights=weights,
        weights_dtype=weights_dtype,
        dtype=dtype,
        draft=draft,
        draft_width=draft_width,
        draft_weights_dtype=draft_weights_dtype,
        adaptive_width=adaptive_width,
    )
    from soloist.prefix import PrefixStore

    # A conversation is read once, and goes on where it ended.
    llm.engine.prefixes = PrefixStore(host_bytes=KEPT_BYTES)
    is_interactive = sys.stdin.isatty()
    history = Environment.read().cache_dir / "chat-history"
    if is_interactive:
        print_dim(f"{llm.name}; /help lists the commands, /bye leaves")
        if history.exists():
            readline.read_history_file(history)
        readline.set_history_length(MAX_HISTORY_LINES)
    conversation = Conversation(llm, params, system)
    try:
        for text, is_line in _read_turns(is_interactive):
            if text == "/bye":
                break
            if not text:
                continue
            try:
                if is_line and text.startswith("/"):
                    conversation.command(text)
                else:
                    conversation.say(text)
            except (SoloistError, OSError) as error:
                if not is_interactive:
                    raise
                print_dim(f"soloist: {error}")
    finally:
        if is_interactive:
            # A home that cannot be written loses the history, nothing else.
            with contextlib.suppress(OSError):
                history.parent.mkdir(parents=True, exist_ok=True)
                readline.write_history_file(history)
