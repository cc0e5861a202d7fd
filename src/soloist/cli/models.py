"""`soloist models`: the built-in names, and what a model's step must move."""

import json
from typing import Annotated, Any

import typer

from soloist.cli.options import Debug, Json

models_app = typer.Typer(help="What is available, and what it costs to read.", rich_markup_mode=None)


@models_app.callback(invoke_without_command=True)
def models(ctx: typer.Context, as_json: Json = False, debug: Debug = False) -> None:
    """List the built-in models and drafts and where they are on this machine; `describe` gives one model's figures."""
    if ctx.invoked_subcommand is not None:
        return
    from soloist.hub import BUILT_IN, BUILT_IN_DRAFTS, DEFAULT_MODEL, local_path

    rows = [
        {
            "name": name,
            "hub_id": built_in.hub_id,
            "is_default": name == DEFAULT_MODEL,
            "is_draft": name in BUILT_IN_DRAFTS,
            "draft": built_in.draft,
            "path": str(path) if (path := local_path(name)) else None,
        }
        for name, built_in in (BUILT_IN | BUILT_IN_DRAFTS).items()
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    name_width, hub_width = (max(len(str(row[key])) for row in rows) for key in ("name", "hub_id"))
    for row in rows:
        where = row["path"] or "not on this machine"
        remark = "  (default)" if row["is_default"] else "  (a draft)" if row["is_draft"] else ""
        typer.echo(f"{row['name']:<{name_width}}  {row['hub_id'] or 'built in':<{hub_width}}  {where}{remark}")


@models_app.command()
def describe(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id or built-in name.", metavar="MODEL")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Count a model's parameters and the bytes its steps move, from its config alone, in bfloat16."""
    from soloist.hub import find_model
    from soloist.models import find_model_class, open_model, read_config
    from soloist.models.footprint import model_footprint

    files = find_model(model, with_weights=False)
    config = files.config
    if config is None:
        assert files.path is not None
        config = read_config(open_model(files.path))
    model_class = find_model_class(config)
    figures = model_footprint(model_class, model_class.config_class.from_dict(config)).describe()
    description = {"name": files.name, "architecture": model_class.architecture, "dtype": "bfloat16"} | figures
    typer.echo(json.dumps(description) if as_json else _describe_in_words(description))


def _describe_in_words(description: dict[str, Any]) -> str:
    """Lay the figures out for reading: counts with separators, bytes in MB and GB."""
    parts = dict(description["weight_bytes"])
    total = parts.pop("total")
    lines = [
        f"{description['name']}, {description['architecture']}, weights in {description['dtype']}",
        "",
        f"parameters       {description['parameters']:,}",
        f"weights          {_size(total)}",
        *(f"  {part:<28} {_size(num_bytes)}" for part, num_bytes in parts.items() if num_bytes),
        f"read per token   {_size(description['bytes_per_token'])}",
        f"recurrent state  {_size(description['state_bytes'] + description['conv_state_bytes'])}",
        f"context          {description['kv_bytes_per_position']:,} bytes per position",
        "",
        "width   bytes moved   distinct experts per layer"
        if description["distinct_experts_by_width"]
        else "width   bytes moved",
    ]
    for width, num_bytes in description["bytes_by_width"].items():
        experts = description["distinct_experts_by_width"].get(width, "")
        lines.append(f"{width:>5}   {_size(num_bytes):>11}   {experts}".rstrip())
    return "\n".join(lines)


def _size(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"
