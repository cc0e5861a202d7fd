"""`soloist bench`: how fast this machine answers, against its floor and against other engines."""

import json
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soloist.cli import options
from soloist.cli.answer import load, place
from soloist.cli.terminal import print_dim
from soloist.errors import UsageError

if TYPE_CHECKING:
    from soloist.bench.workloads import Workload
    from soloist.llm import LLM
    from soloist.models.causal_lm import CausalLM, ModelConfig
    from soloist.roofline import Footprint
    from soloist.runtime.graph import Execution

_PLAIN = "plain decoding"
_ALONE = "one alone"
# What `--draft` is where nothing drafts.
_OFF = "off"
# Room beside the weights.
_ROOM = 1.2
# With the first of them, those that are not typed are off.
_SWITCH = "A switch of a GPU's steps."
# What can be typed beside the options that do something else than to measure, by the names of the parameters.
_ALWAYS = {"as_json", "debug"}
_OF_FLOOR = {"gpus", "bandwidth", "all_reduce_us", "draft_gb", "experts"}
_ALLOWED = {
    "compare": {"chart"} | _ALWAYS,
    "floor": {"model", "context", "device"} | _OF_FLOOR | _ALWAYS,
}
# What needs another option.
_NEEDED = {
    "floor": _OF_FLOOR,
    "draft": {"draft_width", "draft_weights_dtype", "adaptive_width", "simulate_acceptance"},
    "against": {"against_model", "against_key"},
}


def bench(
    words: typer.Context,
    model: options.Model = None,
    workload: Annotated[
        str,
        typer.Option("--workload", help="looping, code, chat, edit, or a file of prompts.", metavar="NAME"),
    ] = "looping",
    input_tokens: Annotated[
        int | None,
        typer.Option("--input-tokens", help="Prompt of looping. Default: 8192; 128 on a CPU.", metavar="N", min=1),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option("--output-tokens", help="Of each answer. Default: 1024; 64 on a CPU.", metavar="N", min=2),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Of every prompt, behind a cold one.", metavar="N", min=1)
    ] = 3,
    draft: options.Draft = None,
    draft_width: options.DraftWidth = None,
    draft_weights_dtype: options.DraftWeightsDtype = None,
    adaptive_width: options.AdaptiveWidth = False,
    simulate_acceptance: options.SimulateAcceptance = None,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="On a GPU: add the switches of its steps one by one, and measure each.")
    ] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Replay a captured step. " + _SWITCH)] = False,
    run_ahead: Annotated[
        int | None,
        typer.Option("--run-ahead", help="Steps enqueued before one is read. " + _SWITCH, metavar="N", min=0),
    ] = None,
    pdl: Annotated[bool, typer.Option("--pdl", help="Kernels begin as the last one ends. " + _SWITCH)] = False,
    fused_moe: Annotated[
        bool, typer.Option("--fused-moe", help="Experts of a step in a few launches of their own. " + _SWITCH)
    ] = False,
    bf16_head: Annotated[
        bool, typer.Option("--bf16-head", help="Output head as the model is held, not in fp32. " + _SWITCH)
    ] = False,
    device_loop: Annotated[
        bool, typer.Option("--device-loop", help="The GPU begins its steps by itself. " + _SWITCH)
    ] = False,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    weights: options.Weights = "file",
    weights_dtype: options.WeightsDtype = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    context: options.Context = None,
    threads: options.Threads = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="Send the same prompts to this OpenAI-compatible server.", metavar="URL"),
    ] = None,
    against_model: Annotated[
        str | None,
        typer.Option("--against-model", help="What to ask it for. Default: the first it lists.", metavar="NAME"),
    ] = None,
    against_key: Annotated[
        str | None,
        typer.Option(
            "--against-key",
            help="API key of that server. Or: OPENAI_API_KEY.",
            metavar="KEY",
            envvar="OPENAI_API_KEY",
        ),
    ] = None,
    floor: Annotated[
        bool, typer.Option("--floor", help="Price the model's steps instead, from its config alone.")
    ] = False,
    gpus: Annotated[int, typer.Option("--gpus", help="With --floor: GPUs that share it.", metavar="N", min=1)] = 1,
    bandwidth: Annotated[
        float | None,
        typer.Option("--bandwidth", help="With --floor: GB/s of one GPU. Default: measured.", metavar="X", min=0.001),
    ] = None,
    all_reduce_us: Annotated[
        float, typer.Option("--all-reduce-us", help="With --floor: time of one exchange.", metavar="X", min=0.0)
    ] = 0.0,
    draft_gb: Annotated[
        float,
        typer.Option("--draft-gb", help="With --floor: read per step and GPU to draft.", metavar="X", min=0.0),
    ] = 0.0,
    experts: Annotated[
        Path | None,
        typer.Option(
            "--experts",
            help="With --floor: a result file of benchmarks/decode_gpu.py, with experts by width.",
            metavar="FILE",
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", help="Put two result files beside each other instead.", metavar="A B"),
    ] = None,
    chart: Annotated[
        Path | None, typer.Option("--chart", help="Draw the ladder as SVG; with --compare, of B.", metavar="FILE")
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure time to the first token, time per token, acceptance and the share of the floor that is reached.

    With --draft, plain decoding is measured first, as the rung below; --adaptive-width is a rung of its own. Several
    that share a model are held to one, if it fits there. Nothing that was read before is used again. A GPU's steps have
    all their switches on, but --device-loop; with one of them typed, only those that are.
    """
    _refuse_idle_options(words)
    if draft == _OFF:
        draft = None
    if chart is not None:
        # Before anything is measured, that would be lost.
        _check_writable(chart)
    if compare is not None:
        _compare(compare, chart, as_json=as_json)
        return
    if floor:
        _floor(model, gpus, bandwidth, context, all_reduce_us, draft_gb, experts, device, as_json=as_json)
        return

    from soloist.bench.chart import ladder_svg
    from soloist.bench.ladder import RungSettings
    from soloist.bench.ladder import ladder as make_ladder
    from soloist.bench.local import Rung, measure_ladder
    from soloist.bench.remote import Server, measure_remote
    from soloist.bench.report import against_in_words, bars_of, in_words, make_result

    # Before anything is loaded: a server that is not there should not cost a measurement.
    server = None if against is None else Server(against, model=against_model, api_key=against_key)
    made: list[Workload] = []

    switches = {
        "has_pdl": pdl,
        "has_fused_moe": fused_moe,
        "has_bf16_head": bf16_head,
        "has_device_loop": device_loop,
    }
    if ladder and (graph or any(switches.values())):
        raise UsageError("--ladder adds the switches itself: beside it only --run-ahead says how far")
    execution = None if ladder else _execution(is_captured=graph, run_ahead=run_ahead, **switches)
    # One for every rung.
    device = place(
        device,
        tensor_parallel_size=tensor_parallel_size,
        threads=threads,
        weights_dtype=weights_dtype,
        dtype=dtype,
        draft_weights_dtype=draft_weights_dtype,
    )
    if (ladder or execution is not None) and not device.startswith("cuda"):
        raise UsageError("--ladder and the switches are of a GPU's steps, and these would run on the CPU")

    def load_with(rung: RungSettings) -> "LLM":
        has_draft = rung.has_draft
        return load(
            model,
            context=context,
            threads=threads,
            device=device,
            weights=weights,
            weights_dtype=weights_dtype,
            dtype=dtype,
            draft=draft if has_draft else _OFF,
            draft_width=draft_width if has_draft else None,
            draft_weights_dtype=draft_weights_dtype if has_draft else None,
            adaptive_width=rung.is_adaptive,
            simulate_acceptance=simulate_acceptance if has_draft else None,
            execution=rung.execution,
            tensor_parallel_size=rung.num_ranks,
        )

    def make(llm: "LLM") -> "Workload":
        if not made:
            made.append(_make_workload(llm, workload, input_tokens, output_tokens))
        return made[0]

    if ladder:
        settings = make_ladder(
            has_experts=_footprint(model)[1].num_experts > 0,
            run_ahead=2 if run_ahead is None else run_ahead,
            draft=draft,
            is_adaptive=adaptive_width,
            num_ranks=tensor_parallel_size,
        )
    else:
        make_settings = partial(RungSettings, execution=execution, num_ranks=tensor_parallel_size)
        settings = [make_settings(switch="" if draft is None else _PLAIN)]
        if tensor_parallel_size > 1:
            settings = [make_settings(switch=f"--tensor-parallel-size {tensor_parallel_size}")]
            if _fits_alone(model, device):
                settings.insert(0, RungSettings(switch=_ALONE, execution=execution))
        if draft is not None:
            settings.append(make_settings(switch=f"--draft {draft}", has_draft=True))
        if adaptive_width:
            settings.append(make_settings(switch="--adaptive-width", has_draft=True, is_adaptive=True))
    rungs = [Rung(name=rung.switch, load=partial(load_with, rung)) for rung in settings]
    measurements = measure_ladder(rungs, make, repeats=repeats)
    remote = None if server is None else measure_remote(server, made[0], repeats=repeats)
    result = make_result(
        made[0],
        measurements,
        case=f"{measurements[-1].model}-{made[0].name}",
        command=shlex.join(["soloist", *sys.argv[1:]]),
        weights="real" if weights == "file" else "random",
        weights_dtype=weights_dtype,
        remote=remote,
    ).to_json()
    text = in_words(made[0], measurements)
    if remote is not None:
        text += "\n\n" + against_in_words(measurements[-1], remote)
    if as_json:
        print_dim(text)
        print(json.dumps(result, ensure_ascii=False))
    else:
        print(text)
    if chart is not None:
        chart.write_text(ladder_svg(f"{result['model']}, {made[0].name}", bars_of(result)), encoding="utf-8")


def _refuse_idle_options(words: typer.Context) -> None:
    """Refuse what was typed and would do nothing.

    Raises:
        UsageError: it names what was typed, and what it goes with.
    """
    names = {param.name: next(name for name in param.opts if name.startswith("--")) for param in words.command.params}
    # Not what the environment holds, as a key for every server.
    typed = [name for name in names if getattr(words.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    for mode, allowed in _ALLOWED.items():
        if mode in typed and (idle := [names[name] for name in typed if name not in {mode} | allowed]):
            can = ", ".join(names[name] for name in names if name in allowed)
            raise UsageError(f"{names[mode]} takes no {', '.join(idle)}; it takes {can}")
    is_off = words.params["draft"] == _OFF
    for needed, options_of in _NEEDED.items():
        has_needed = needed in typed and not (needed == "draft" and is_off)
        if not has_needed and (idle := [names[name] for name in typed if name in options_of]):
            but = f", which is {_OFF}" if needed in typed else ""
            raise UsageError(f"{' and '.join(idle)} need{'s' * (len(idle) == 1)} {names[needed]}{but}")


def _check_writable(chart: Path) -> None:
    """Refuse a file that could not be written.

    Raises:
        UsageError: its folder is not there or takes none, or it is to be another picture than an SVG.
    """
    if chart.suffix != ".svg":
        raise UsageError(f"--chart {chart}: charts are SVG, so the name must end in .svg")
    folder = chart.absolute().parent
    if chart.is_dir() or not folder.is_dir() or not os.access(chart if chart.exists() else folder, os.W_OK):
        raise UsageError(f"--chart {chart} cannot be written: give a file in a folder that is there")


def _make_workload(llm: "LLM", name: str, input_tokens: int | None, output_tokens: int | None) -> "Workload":
    from soloist.bench import workloads

    is_cpu = llm.engine.runner.model.device.type == "cpu"
    if input_tokens is None and name == "looping":
        input_tokens = workloads.CPU_INPUT_TOKENS if is_cpu else workloads.INPUT_TOKENS
    tokenizer = llm.tokenizer
    return workloads.make_workload(
        name,
        input_tokens=input_tokens,
        output_tokens=output_tokens or (workloads.CPU_OUTPUT_TOKENS if is_cpu else workloads.OUTPUT_TOKENS),
        count_tokens=None if tokenizer is None else lambda text: len(llm.encode(text)),
        run=workloads.draw_run(),
    )


def _floor(
    model: str | None,
    gpus: int,
    bandwidth: float | None,
    context: int | None,
    all_reduce_us: float,
    draft_gb: float,
    experts: Path | None,
    device: str,
    *,
    as_json: bool,
) -> None:
    """Price a model from its config."""
    from soloist.bench import floor
    from soloist.bench.results import device_name
    from soloist.loading import AUTO, choose_device
    from soloist.roofline import measure_bandwidth

    name, footprint = _footprint(model)
    measured = choose_device(place(device)).device
    if bandwidth is not None and device != AUTO:
        raise UsageError("--device says whose bandwidth is measured: leave it out where --bandwidth gives one")
    if all_reduce_us and gpus == 1:
        raise UsageError("--all-reduce-us is the time of an exchange between GPUs: add --gpus, 2 or more")
    experts_of, distinct_experts = (None, {}) if experts is None else floor.read_distinct_experts(experts)
    settings = floor.FloorSettings(
        num_gpus=gpus,
        bandwidth_gb_per_s=bandwidth or measure_bandwidth(measured),
        measured_on=device_name(measured) if bandwidth is None else None,
        context_len=8192 if context is None else context,
        all_reduce_us=all_reduce_us,
        draft_bytes=draft_gb * 1e9,
        distinct_experts=distinct_experts,
        experts_of=experts_of,
        refusal=_why_refused(model, gpus),
    )
    table = floor.price(name, footprint, settings)
    print(json.dumps(floor.as_json(table)) if as_json else floor.in_words(table))


def _why_refused(model: str | None, gpus: int) -> str | None:
    """Say why so many GPUs do not share a model here; None: they do."""
    from soloist.errors import UnsupportedError
    from soloist.models.loader import NUM_RANKS, check_num_ranks

    if gpus not in NUM_RANKS:
        return f"{gpus} GPUs; allowed are {', '.join(map(str, NUM_RANKS))}"
    _, model_class, config = _read(model)
    try:
        check_num_ranks(model_class, config, gpus)
    except UnsupportedError as error:
        return str(error)
    return None


def _footprint(model: str | None) -> "tuple[str, Footprint]":
    """Give a model's name, and its parts, from its config."""
    from soloist.models.footprint import model_footprint

    name, model_class, config = _read(model)
    return name, model_footprint(model_class, config)


def _read(model: str | None) -> "tuple[str, type[CausalLM], ModelConfig]":
    """Give a model's name, architecture and config, without its weights."""
    from soloist.hub import find_model
    from soloist.models import find_model_class, open_model, read_config

    files = find_model(model, with_weights=False)
    config = files.config
    if config is None:
        assert files.path is not None
        config = read_config(open_model(files.path))
    model_class = find_model_class(config)
    return files.name, model_class, model_class.config_class.from_dict(config)


def _fits_alone(model: str | None, device: str) -> bool:
    """Say whether a model has room where one rank would hold it whole."""
    import torch

    from soloist.models.memory import free_bytes

    return _ROOM * _footprint(model)[1].weight_bytes < free_bytes(torch.device(device))


def _execution(*, is_captured: bool, run_ahead: int | None, **switches: bool) -> "Execution | None":
    """Give the form of a step that was typed; None: no switch was."""
    from soloist.runtime.graph import Execution

    if not is_captured and run_ahead is None and not any(switches.values()):
        return None
    return Execution(is_captured=is_captured, run_ahead=run_ahead or 0, **switches)


def _compare(paths: tuple[Path, Path], chart: Path | None, *, as_json: bool) -> None:
    """Put two result files beside each other."""
    from soloist.bench.chart import ladder_svg
    from soloist.bench.report import bars_of, compare_in_words, compared, read_result

    first, second = (read_result(path) for path in paths)
    picture = None if chart is None else ladder_svg(f"{second['case']}, {second['device']}", bars_of(second))
    print(json.dumps(compared(first, second)) if as_json else compare_in_words(first, second))
    if chart is not None and picture is not None:
        chart.write_text(picture, encoding="utf-8")
