"""`soloist draft`: proof of what a draft does not change; training and evaluation are in files of their own."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soloist.cli import options
from soloist.cli.answer import load
from soloist.cli.draft_eval import evaluate
from soloist.cli.draft_train import train
from soloist.cli.terminal import Bar, print_dim
from soloist.errors import UsageError

if TYPE_CHECKING:
    from soloist.draft_check import Report
    from soloist.models.causal_lm import CausalLM

EXIT_FAILED = 1

draft_app = typer.Typer(
    help="Drafts: train one, measure it, prove that it changes nothing.", no_args_is_help=True, rich_markup_mode=None
)
draft_app.command()(train)
draft_app.command("eval")(evaluate)


@draft_app.command()
def check(
    model: options.Model = None,
    draft: options.Draft = None,
    draft_width: options.DraftWidth = None,
    draft_weights_dtype: options.DraftWeightsDtype = None,
    num_prompts: Annotated[
        int, typer.Option("--prompts", help="Prompts that are answered with and without it.", metavar="N", min=1)
    ] = 8,
    num_tokens: Annotated[int, typer.Option("--tokens", help="Of every answer.", metavar="N", min=2)] = 64,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where the report goes. Default: beside the draft's checkpoint.", metavar="FILE"),
    ] = None,
    context: options.Context = None,
    threads: options.Threads = None,
    device: options.Device = "auto",
    weights: options.Weights = "file",
    weights_dtype: options.WeightsDtype = None,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Answer prompts with and without a draft and compare: tokens, their law, log probabilities, the state left behind.

    Exit code 1 if the draft changes an answer. Drafts without a checkpoint and built-in ones need --out for a report.
    """
    if draft is None:
        raise UsageError("--draft says which draft to check")
    llm = load(
        model,
        context=context,
        threads=threads,
        device=device,
        weights=weights,
        weights_dtype=weights_dtype,
        dtype=dtype,
        draft=draft,
        draft_width=draft_width,
        draft_weights_dtype=draft_weights_dtype,
    )
    from soloist.draft_check import PROMPTS, check_draft
    from soloist.hub import find_model
    from soloist.models import load_model

    path = out or _beside(draft)

    def load_reference() -> "CausalLM":
        import torch

        source = find_model(model, with_weights=weights == "file")
        reference = source.path or source.config
        assert reference is not None
        # On the CPU, where operators are their plain references.
        return load_model(reference, dtype=torch.float32, weights=weights)

    # Behind the last one they come again, with a number before them.
    texts = [f"{i}. " * (i >= len(PROMPTS)) + PROMPTS[i % len(PROMPTS)] for i in range(num_prompts)]
    if llm.tokenizer is None:
        prompts = [[ord(c) % llm.engine.runner.buffers.num_tokens for c in text] for text in texts]
    else:
        prompts = [llm.encode(text) for text in texts]
    with Bar("answering") as bar:
        report = check_draft(
            llm.engine,
            prompts,
            model=llm.name,
            max_tokens=num_tokens,
            load_reference=load_reference,
            on_progress=bar,
        )
    found = report.to_json()
    if as_json:
        print(json.dumps(found))
    else:
        print(_in_words(report))
    if path is not None:
        try:
            path.write_text(json.dumps(found, indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"the report cannot be written to {path} ({error.strerror}): give --out") from None
        if not as_json:
            print_dim(f"report: {path}")
    return 0 if report.passed else EXIT_FAILED


def _beside(draft: str) -> Path | None:
    """Give the place beside a draft's checkpoint; None: it has none, or comes with the package."""
    from soloist.hub import BUILT_IN_DRAFTS, find_model
    from soloist.spec import DRAFTERS

    if draft in DRAFTERS or draft in BUILT_IN_DRAFTS:
        return None
    path = find_model(draft).path
    assert path is not None
    return path / "draft-check.json" if path.is_dir() else path.with_suffix(".draft-check.json")


def _in_words(report: "Report") -> str:
    lines = [
        f"{report.drafter} for {report.model} in {report.dtype}, {report.width} rows a step:"
        f" {report.acceptance_length:.2f} tokens a step"
    ]
    lines += [f"  {'ok  ' if check.passed else 'FAIL'}  {check.name:<9} {check.summary}" for check in report.checks]
    return "\n".join(lines)
