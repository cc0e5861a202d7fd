"""`soloist serve`: the HTTP server."""

import dataclasses
import logging
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soloist.cli import options
from soloist.cli.answer import load, make_params, place
from soloist.cli.terminal import print_dim
from soloist.config import Environment
from soloist.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from soloist.llm import LLM
    from soloist.server.listen import Application

GIB = 1 << 30


def serve(
    model_name: Annotated[
        str | None, typer.Argument(help="The model, as with --model.", metavar="MODEL", show_default=False)
    ] = None,
    model: options.Model = None,
    host: Annotated[str, typer.Option("--host", help="Where to listen; off loopback a key is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes any free port.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="What clients must send. Or: SOLOIST_API_KEY.", metavar="KEY")
    ] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Serve the network without a key.")] = False,
    alias: Annotated[
        str | None, typer.Option("--alias", "--served-model-name", help="The model's name in answers.", metavar="NAME")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse requests that name another model.")] = False,
    cors_origins: Annotated[
        list[str] | None,
        typer.Option("--cors-origins", help="A web page that may call this server; repeat.", metavar="URL"),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option("--allowed-hosts", help="A name under which it may be reached; repeat.", metavar="NAME"),
    ] = None,
    prefix_memory: Annotated[
        float, typer.Option("--prefix-memory", help="Host memory for kept conversations.", metavar="GIB", min=0)
    ] = 4.0,
    prefix_device_memory: Annotated[
        float, typer.Option("--prefix-device-memory", help="GPU memory for them, besides.", metavar="GIB", min=0)
    ] = 0.0,
    prefix_disk: Annotated[
        float,
        typer.Option("--prefix-disk", help="Files for them, for the next start.", metavar="GIB", min=0),
    ] = 0.0,
    keep_billing_line: Annotated[
        bool, typer.Option("--keep-billing-line", help="Leave in the line that coding agents change in every prompt.")
    ] = False,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
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
    traces: Annotated[
        bool, typer.Option("--traces", help="Send a span per request to an OpenTelemetry collector; see OTEL_*.")
    ] = False,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas", help="Serve so many copies of the model on a Ray cluster, or on this machine.", min=1
        ),
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Serve a model over HTTP, in the protocols of OpenAI, Anthropic and llama.cpp; a page is at /.

    Sampling options are what requests get that do not say.
    """
    begin_s = time.perf_counter()
    try:
        from soloist.server import listen
    except ImportError as error:
        raise UnsupportedError(f"serving needs {error.name}: pip install 'soloist[server]'") from None
    from soloist.doctor import known_bandwidth
    from soloist.server.settings import ServerSettings

    if model_name is not None and model is not None:
        raise UsageError("the model was given twice: as MODEL and with --model")
    defaults = make_params(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    # What can be refused is refused before the weights are read.
    settings = ServerSettings(
        host=host,
        api_key=api_key if api_key is not None else Environment.read().api_key,
        is_open=no_auth,
        cors_origins=tuple(cors_origins or ()),
        allowed_hosts=tuple(allowed_hosts or ()),
        is_strict=strict,
        strips_billing_line=not keep_billing_line,
        sends_traces=traces,
        defaults=defaults,
    )
    make_llm = partial(
        load_to_serve,
        model_name or model,
        prefix_bytes=round(prefix_memory * GIB),
        prefix_device_bytes=round(prefix_device_memory * GIB),
        prefix_disk_bytes=round(prefix_disk * GIB),
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
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    with listen.bind(host, port) as listener:
        app: Application
        if replicas is None:
            from soloist.server.app import App

            llm = make_llm()
            bandwidth = known_bandwidth(llm.engine.runner.model.device, Environment.read().cache_dir)
            app = App(llm, dataclasses.replace(settings, model_name=alias or llm.name, bandwidth_gb_per_s=bandwidth))
            name = app.service.settings.model_name
        else:
            from soloist.hub import find_model
            from soloist.server.replicas.fleet import Fleet, import_ray

            import_ray()
            # Here rather than in a replica, which is given a GPU or none.
            placed = place(
                device,
                tensor_parallel_size=tensor_parallel_size,
                threads=threads,
                weights_dtype=weights_dtype,
                dtype=dtype,
                draft_weights_dtype=draft_weights_dtype,
            )
            num_gpus = tensor_parallel_size if placed.startswith("cuda") else 0
            if placed != device:
                _check_gpus(num_gpus, replicas)
            name = alias or find_model(model_name or model, with_weights=weights == "file").name
            app = Fleet(
                partial(make_llm, device=placed),
                dataclasses.replace(settings, model_name=name),
                num_replicas=replicas,
                num_cpus=threads or 1,
                num_gpus=num_gpus,
            )

        def on_ready(url: str) -> None:
            took_s = time.perf_counter() - begin_s
            print_dim(f"{name} is ready after {took_s:.1f} s: {url}/v1, page at {url}/, Ctrl-C ends it")

        listen.run(app, listener, on_ready)


def _check_gpus(num_gpus: int, num_replicas: int) -> None:
    """Refuse more replicas than have GPUs here, where nobody said that there are others.

    Raises:
        UsageError: there are fewer GPUs.
    """
    import torch

    if num_gpus * num_replicas > torch.cuda.device_count():
        raise UsageError(
            f"{num_replicas} replicas of {num_gpus} GPUs each are more than this machine has: start fewer, or give"
            " --device cpu, or --device cuda for a cluster's"
        )


def load_to_serve(
    model: str | None, *, prefix_bytes: int, prefix_device_bytes: int, prefix_disk_bytes: int = 0, **loading: Any
) -> "LLM":
    """Load a model that keeps what earlier requests have read.

    Args:
        model: its name or path.
        prefix_bytes: host memory for what is kept.
        prefix_device_bytes: memory of the model's device for it, besides.
        prefix_disk_bytes: files for it. 0: none.
        loading: see `load`.

    Raises:
        UsageError: there shall be files, and this model's states cannot be written.
    """
    from soloist.hub import find_model
    from soloist.prefix import PrefixStore
    from soloist.prefix_disk import DiskPrefixes, model_fingerprint

    llm = load(model, **loading)
    engine, disk = llm.engine, None
    if prefix_disk_bytes:
        path = find_model(model).path if loading["weights"] == "file" else None
        if path is None or engine.drafter.snapshot() is not None or engine.ranks.group.size > 1:
            raise UsageError(
                "--prefix-disk: files need weights from files, one rank, and a drafter without a state of its own"
            )
        engine.runner.cache.reset()
        fingerprint = model_fingerprint(path, engine.runner.cache)
        disk = DiskPrefixes(Environment.read().cache_dir / "prefixes", fingerprint, prefix_disk_bytes)
    engine.prefixes = PrefixStore(host_bytes=prefix_bytes, device_bytes=prefix_device_bytes, disk=disk)
    return llm
