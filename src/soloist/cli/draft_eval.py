"""`soloist draft eval`: what a draft is worth, its model card, its confidences."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soloist.cli import options
from soloist.cli.draft_train import Data, NumTokens, load_dense, make_reader, read_numbers
from soloist.cli.terminal import Bar, print_dim
from soloist.errors import UsageError

if TYPE_CHECKING:
    from soloist.llm import LLM
    from soloist.train.evaluate import Evaluation

EVALUATION_NAME, CHECK_NAME, CARD_NAME, RECORD_NAME = (
    "evaluation.json", "draft-check.json", "README.md", "training.json",
)  # fmt: skip


def evaluate(
    model: options.Model = None,
    draft: options.Draft = None,
    data: Data = None,
    num_prompts: Annotated[int, typer.Option("--prompts", help="Most prompts.", metavar="N", min=1)] = 64,
    num_tokens: NumTokens = 256,
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="Each prompt is answered at each.", metavar="T,T")
    ] = "0,0.7,1",
    draft_width: options.DraftWidth = None,
    distinct: Annotated[
        float | None,
        typer.Option("--distinct", help="Leave out answers with fewer distinct runs of four tokens.", metavar="X"),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit the temperatures of the confidences and keep them in config.json.")
    ] = False,
    licence: Annotated[
        str, typer.Option("--licence", help="Of the draft's weights, for the card.", metavar="NAME")
    ] = "other",
    seed: Annotated[int, typer.Option("--seed", help="Of the draws.", metavar="N")] = 0,
    threads: options.Threads = None,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Measure how many tokens a step commits with a draft, by answering prompts that it was not trained on.

    Without --data they are those that `draft train` held out. Figures go to evaluation.json beside the draft; a model
    card to README.md, if `soloist draft check` has passed on these weights.
    """
    if draft is None:
        raise UsageError("--draft says which draft to evaluate")
    mix = read_numbers(temperatures, "--temperatures")
    llm = load_dense(model, device=device, dtype=dtype, threads=threads, draft=draft, draft_width=draft_width)
    from soloist.hub import find_model
    from soloist.spec import DRAFTERS
    from soloist.train.evaluate import evaluate as measure
    from soloist.train.evaluate import table

    folder = None if draft in DRAFTERS else find_model(draft).path
    prompts = _prompts(llm, data, folder, num_prompts, num_tokens, seed)
    with Bar("answering") as bar:
        found = measure(
            llm.engine,
            prompts,
            model=llm.name,
            draft=draft if folder is None else folder.name,
            temperatures=mix,
            max_tokens=num_tokens,
            seed=seed,
            min_distinct_ratio=distinct,
            on_progress=bar,
        )
    result: dict[str, Any] = found.to_json()
    if calibrate:
        result["calibration"] = _calibrate(llm, prompts, folder, mix, num_tokens, seed)
    if folder is not None and folder.is_dir():
        (folder / EVALUATION_NAME).write_text(json.dumps(result, indent=1) + "\n")
        command = f"soloist draft eval -m {llm.name} --draft {folder.name} --prompts {num_prompts} -n {num_tokens}"
        command += f" --temperatures {temperatures} --seed {seed}"
        more = {"--data": data and data.name, "--draft-width": draft_width, "--distinct": distinct}
        command += "".join(f" {option} {value}" for option, value in more.items() if value is not None)
        _write_card(found, folder, licence, command)
    print(json.dumps(result) if as_json else table(found))
    return 0


def _prompts(
    llm: "LLM", data: Path | None, folder: Path | None, num_prompts: int, num_tokens: int, seed: int
) -> list[list[int]]:
    """Read the prompts: of a file, or those that training held out."""
    from soloist.train.prompts import read_prompts
    from soloist.train.run import HELD_OUT_NAME

    limit = llm.max_context_len - num_tokens
    if data is not None:
        return read_prompts(data, make_reader(llm), limit=num_prompts, max_prompt_tokens=limit, seed=seed)
    path = None if folder is None else folder / HELD_OUT_NAME
    if path is None or not path.is_file():
        raise UsageError("--data says what to answer; this draft has no held-out prompts beside it")
    prompts: list[list[int]] = [json.loads(line)["ids"] for line in path.read_text().splitlines()]
    return [prompt for prompt in prompts if len(prompt) <= limit][:num_prompts]


def _calibrate(
    llm: "LLM", prompts: list[list[int]], folder: Path | None, mix: list[float], num_tokens: int, seed: int
) -> dict[str, Any]:
    """Fit the temperatures of a draft's confidences, and keep them in its config."""
    from dataclasses import asdict

    from soloist.train.calibration import calibrate

    if folder is None or not folder.is_dir():
        raise UsageError("--calibrate writes to the draft's config.json: this draft has none")
    with Bar("calibrating") as bar:
        found = calibrate(llm.engine, prompts, temperatures=mix, max_tokens=num_tokens, seed=seed, on_progress=bar)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"confidence_temperatures": list(found.temperatures)}
    path.write_text(json.dumps(config, indent=2) + "\n")
    before, after = (sum(errors) / len(errors) for errors in (found.error_before, found.error_after))
    print_dim(f"confidences were {before:.1%} off and are {after:.1%} off, over {found.num_blocks} blocks")
    return asdict(found)


def _write_card(evaluation: "Evaluation", folder: Path, licence: str, command: str) -> None:
    """Write the card, if the draft was checked since its weights were written."""
    from soloist.train.evaluate import model_card

    check = folder / CHECK_NAME
    weights = max(file.stat().st_mtime for file in folder.glob("*.safetensors"))
    is_checked = check.is_file() and json.loads(check.read_text())["passed"] and check.stat().st_mtime >= weights
    if not is_checked:
        print_dim("no model card: `soloist draft check` has not passed on these weights")
        return
    record_path = folder / RECORD_NAME
    record = json.loads(record_path.read_text()) if record_path.is_file() else {}
    card = model_card(
        evaluation,
        licence=licence,
        data=record.get("data", "Not recorded."),
        mix=record.get("texts_by_temperature"),
        training=record.get("settings"),
        command=command,
    )
    (folder / CARD_NAME).write_text(card)
    print_dim(f"card: {folder / CARD_NAME}")
