"""The `soloist` command: what is typed becomes a call, what is raised becomes one line and an exit code.

Commands import the engine inside, so that `soloist --help` need not wait for torch.
"""

import os
import signal
import sys
import traceback
from types import FrameType
from typing import Annotated

import typer
from typer.main import get_command

from soloist import __version__
from soloist.cli.bench import bench
from soloist.cli.chat import chat
from soloist.cli.doctor import doctor
from soloist.cli.draft import draft_app
from soloist.cli.models import models_app
from soloist.cli.profile import profile
from soloist.cli.run import run
from soloist.cli.serve import serve
from soloist.config import Environment
from soloist.errors import SoloistError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

app = typer.Typer(
    name="soloist",
    help="An LLM inference engine for one listener.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(chat)
app.command()(serve)
app.add_typer(models_app, name="models")
app.command()(bench)
app.add_typer(draft_app, name="draft")
app.command()(profile)
app.command()(doctor)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"soloist {__version__}")
        raise typer.Exit


@app.callback()
def _soloist(
    version: Annotated[
        bool,
        typer.Option("-V", "--version", help="Print the version and leave.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def _complain(message: str) -> None:
    """Write one line to stderr, whatever line breaks `message` brings."""
    line = " ".join(message.split())
    print(f"soloist: {line}", file=sys.stderr)


def _usage(error: typer.TyperException) -> str:
    """Say what is wrong with the words typed; typer's checks of numbers do not repeat them, but their cause does."""
    errors = getattr(error.__cause__, "errors", None)
    given = f" (given: {errors()[0]['input']!r})" if errors else ""
    return error.format_message() + given


def _terminate(_signal_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(EXIT_TERMINATED)


def _abandon_stdout() -> None:
    """Let what is still to be written vanish, so that the interpreter does not fail to write it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(args: list[str] | None = None) -> int:
    """Run one command line and give its exit code; no traceback reaches the user unless asked for.

    Args:
        args: the words after `soloist`; by default those of this process.
    """
    args = (sys.argv[1:] if args is None else args) or ["--help"]
    is_debugging = "--debug" in args or Environment.read().debug
    signal.signal(signal.SIGTERM, _terminate)
    # Answers may hold characters that the terminal cannot show, and file names bytes that are no text.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        # Not `app()`: it has opinions of its own on Ctrl-C and on readers that leave.
        command = get_command(app)
        with command.make_context("soloist", args) as context:
            code = command.invoke(context)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.Exit as done:
        return done.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has what it wanted, as `head` does.
        _abandon_stdout()
        return 0
    except (SoloistError, typer.TyperException, OSError) as error:
        if isinstance(error, OSError):
            _abandon_stdout()
        if is_debugging:
            traceback.print_exc()
        _complain(_usage(error) if isinstance(error, typer.TyperException) else str(error))
        return getattr(error, "exit_code", EXIT_FAILED)
    # The one place that may catch everything: a fault of ours is reported, not dumped.
    except Exception as error:  # noqa: BLE001
        if is_debugging:
            traceback.print_exc()
        _complain(
            f"internal error, {type(error).__name__}: {error}. This is a fault of Soloist; "
            "the same command with --debug shows where"
        )
        return EXIT_FAILED
