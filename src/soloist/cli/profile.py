"""`soloist profile`: what a PyTorch program's GPU waits for, file and line."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soloist.cli.options import Debug, Json
from soloist.errors import UsageError

if TYPE_CHECKING:
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
    command's, unless it is 0 and a condition of --fail-on holds. The report goes to stderr, with --json to stdout.
    """
    from soloist.profiler.analysis import analyse
    from soloist.profiler.budget import missed, parse_budgets
    from soloist.profiler.command import find_program, run_program
    from soloist.profiler.kineto import load_trace, save_trace
    from soloist.profiler.ranks import compare_ranks
    from soloist.profiler.report import as_json as report_json
    from soloist.profiler.report import in_words, ranks_in_words
    from soloist.profiler.timeline import as_html

    budgets = parse_budgets(fail_on) if fail_on else ()
    exit_code = 0
    traces: list[Trace] = []
    if is_trace:
        if not words:
            raise UsageError("--trace wants files, as in soloist profile --trace rank0.json rank1.json")
        traces = [load_trace(Path(word)) for word in words]
    else:
        run = run_program(find_program(words or []), after_s=after)
        exit_code = run.exit_code
        if run.trace is None or not run.trace.works:
            print("soloist: the program used no GPU in this process: there is nothing to wait for", file=sys.stderr)
            return exit_code
        traces = [run.trace]
    analyses = [analyse(trace, max_steps=steps) for trace in traces]
    ranks = compare_ranks(traces, analyses) if len(traces) > 1 else None
    if save is not None:
        if len(traces) > 1 and "{rank}" not in str(save):
            raise UsageError(f"--save {save} is one file for {len(traces)} traces; put {{rank}} into its name")
        for trace in traces:
            save_trace(trace, Path(str(save).replace("{rank}", str(trace.rank or 0))))
    if html is not None:
        # Of several ranks, the one that is late is the one to look at.
        shown = max(range(len(traces)), key=lambda i: ranks is not None and ranks.ranks[i].rank == ranks.late_rank)
        html.write_text(as_html(traces[shown], analyses[shown]), encoding="utf-8")
    if as_json:
        print(json.dumps(report_json(analyses, ranks)))
    else:
        for analysis in analyses:
            print(f"{analysis.name}: {in_words(analysis)}\n", file=sys.stderr)
        if ranks is not None:
            print(ranks_in_words(ranks, analyses), file=sys.stderr)
    complaints = missed(budgets, analyses)
    for complaint in complaints:
        print(f"soloist: {complaint}", file=sys.stderr)
    return exit_code or (EXIT_MISSED if complaints else 0)
