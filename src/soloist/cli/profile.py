"""`soloist profile`: what a PyTorch program's GPU waits for, file and line."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soloist.cli.options import Debug, Json
from soloist.errors import UsageError

if TYPE_CHECKING:
    from soloist.profiler.budget import Budget
    from soloist.profiler.trace import Trace

EXIT_MISSED = 4


def profile(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="The program, behind --; with --trace, the files.", metavar="-- COMMAND", show_default=False
        ),
    ] = None,
    is_trace: Annotated[
        bool,
        typer.Option("--trace", help="Look at recorded Chrome traces of torch.profiler instead; one file per rank."),
    ] = False,
    steps: Annotated[int, typer.Option("--steps", help="Look at the last N steps.", metavar="N", min=1)] = 64,
    after: Annotated[
        float,
        typer.Option("--after", help="Seconds of using the GPU to let pass before recording.", metavar="S", min=0.0),
    ] = 0.0,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a timeline as one HTML page.", metavar="FILE")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            help="Keep the trace, small and without names of this machine; {rank} in the name stands for the rank.",
            metavar="FILE",
        ),
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on", help='Leave with exit code 4 if one of these holds: "syncs>0,idle>5%".', metavar="CONDITIONS"
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Run a Python program and say what its GPU waits for: blocking reads, bubbles, launch lead, kernels.

    The program runs in this process, unchanged: soloist profile -- python decode.py. Its exit code becomes this
    command's, unless it is 0 and a condition of --fail-on holds, or could not be checked because nothing was recorded.
    The report goes to stderr, with --json to stdout.
    """
    from soloist.profiler.analysis import analyse
    from soloist.profiler.budget import missed, parse_budgets
    from soloist.profiler.command import find_program, run_program
    from soloist.profiler.kineto import load_trace, save_trace
    from soloist.profiler.ranks import compare_ranks
    from soloist.profiler.report import as_json as report_json
    from soloist.profiler.report import in_words, ranks_in_words
    from soloist.profiler.timeline import as_html

    budgets = () if fail_on is None else parse_budgets(fail_on)
    exit_code = 0
    traces: list[Trace] = []
    # A program may run for long before there is something to write.
    for option, path in (("--html", html), ("--save", save)):
        if path is not None:
            _expect_writable(option, path)
    if is_trace:
        if not words:
            raise UsageError("--trace wants files, as in soloist profile --trace rank0.json rank1.json")
        if after:
            raise UsageError("--after is for programs: what --trace looks at is recorded already")
        if save is not None and len(words) > 1 and "{rank}" not in str(save):
            raise UsageError(f"--save {save} is one file for {len(words)} traces; put {{rank}} into its name")
        traces = [load_trace(Path(word)) for word in words]
    else:
        run = run_program(find_program(words or []), after_s=after)
        exit_code = run.exit_code
        if run.trace is None:
            missed_code = _nothing_recorded(run.why_none, as_json, budgets, (html, save))
            return exit_code or missed_code
        traces = [run.trace]
    analyses = [analyse(trace, max_steps=steps) for trace in traces]
    ranks = compare_ranks(traces, analyses) if len(traces) > 1 else None
    if as_json:
        print(json.dumps(report_json(analyses, ranks)))
    else:
        for analysis in analyses:
            print(f"{analysis.name}: {in_words(analysis, is_alone=ranks is None)}\n", file=sys.stderr)
        if ranks is not None:
            print(ranks_in_words(ranks, analyses), file=sys.stderr)
    if save is not None:
        for i, trace in enumerate(traces):
            # Ranks that their traces do not name are numbered as given, as in the report.
            save_trace(trace, Path(str(save).replace("{rank}", str(i if trace.rank is None else trace.rank))))
    if html is not None:
        html.write_text(as_html(traces, analyses, ranks), encoding="utf-8")
    complaints = missed(budgets, analyses)
    for complaint in complaints:
        print(f"soloist: {complaint}", file=sys.stderr)
    return exit_code or (EXIT_MISSED if complaints else 0)


def _expect_writable(option: str, path: Path) -> None:
    """Raise `UsageError` if a file cannot be written."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written: give a file in a folder that is there")


def _nothing_recorded(why: str, as_json: bool, budgets: Sequence["Budget"], paths: Sequence[Path | None]) -> int:
    """Say that there is nothing to report; gives the exit code: what was not measured meets no condition."""
    if as_json:
        from soloist.profiler.report import as_json as report_json

        print(json.dumps(report_json([])))
    files = [str(path) for path in paths if path is not None]
    unwritten = f"; not written: {', '.join(files)}" if files else ""
    print(f"soloist: nothing was recorded: {why}{unwritten}", file=sys.stderr)
    if budgets:
        print("soloist: --fail-on cannot be checked, which counts as missed", file=sys.stderr)
    return EXIT_MISSED if budgets else 0
