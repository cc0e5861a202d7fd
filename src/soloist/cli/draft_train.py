"""`soloist draft train`: a draft for one's own model."""

import json
import math
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from soloist.cli import options
from soloist.cli.answer import load, place
from soloist.cli.terminal import Bar, print_dim
from soloist.errors import UsageError

if TYPE_CHECKING:
    from soloist.llm import LLM
    from soloist.train.prompts import Reader
    from soloist.train.responses import Source
    from soloist.train.trainer import Figures

Data = Annotated[
    Path | None,
    typer.Option("--data", help="Prompts: a .jsonl file, or a folder of source files.", metavar="PATH"),
]
Temperatures = Annotated[
    str, typer.Option("--temperatures", help="Of the answers, with commas; prompts take turns.", metavar="T,T")
]
NumTokens = Annotated[int, typer.Option("-n", "--tokens", help="Longest answer.", metavar="N", min=1)]


def read_numbers(text: str, what: str) -> list[float]:
    """Read numbers with commas between them.

    Raises:
        UsageError: that is not what they are, or one is below 0.
    """
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise UsageError(f"{what} is {text!r}; allowed: numbers of at least 0 with commas between, as 0,0.7,1")
    return numbers


def make_reader(llm: "LLM") -> "Reader":
    """Make what turns text into token ids, as the model reads it when it serves."""
    from soloist.train.prompts import Reader

    if llm.tokenizer is None:
        raise UsageError("this model came without a tokenizer: prompts cannot be read for it")
    render = None if llm.chat_template is None else lambda messages: llm.render(messages).ids
    return Reader(encode=llm.encode, render=render)


def train(
    model: options.Model = None,
    data: Data = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the draft.", metavar="DIR")] = None,
    num_prompts: Annotated[
        int, typer.Option("--prompts", help="Most prompts to have answered.", metavar="N", min=2)
    ] = 20000,
    num_tokens: NumTokens = 512,
    temperatures: Temperatures = "0,0.7,1",
    source: Annotated[
        Literal["own", "transformers"], typer.Option("--source", help="Who generates the answers.")
    ] = "own",
    url: Annotated[
        str | None,
        typer.Option("--url", help="Server that answers instead, up to /v1; it serves this model.", metavar="URL"),
    ] = None,
    url_model: Annotated[
        str | None, typer.Option("--url-model", help="Name of the model there. Default: --model.", metavar="NAME")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Prompts answered at once.", metavar="N", min=1)] = 256,
    block: Annotated[int, typer.Option("--block", help="Tokens of a proposal, 1 to 15.", metavar="B")] = 8,
    layers: Annotated[int, typer.Option("--layers", help="Layers of the draft.", metavar="N")] = 3,
    markov_rank: Annotated[int, typer.Option("--markov-rank", help="Rank of the Markov head.", metavar="N")] = 256,
    mask_token: Annotated[
        int | None,
        typer.Option("--mask-token", help="Id for empty slots. Default: the last, often unused.", metavar="ID"),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Steps of the optimiser.", metavar="N", show_default="2000")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", help="Take the steps that fit into this time, instead.", metavar="S", min=1),
    ] = None,
    save_every: Annotated[
        int, typer.Option("--save-every", help="Steps between two checkpoints to go on from.", metavar="N")
    ] = 200,
    texts_per_step: Annotated[
        int, typer.Option("--texts-per-step", help="Texts of a step, over all GPUs.", metavar="N")
    ] = 32,
    anchors: Annotated[
        int, typer.Option("--anchors", help="Places of a text that a step drafts from.", metavar="N")
    ] = 64,
    learning_rate: Annotated[float, typer.Option("--lr", help="Highest learning rate.", metavar="X")] = 5e-3,
    optimizer: Annotated[
        Literal["adamw", "muon"], typer.Option("--optimizer", help="Of the draft's maps; the rest has AdamW.")
    ] = "muon",
    ce_weight: Annotated[float, typer.Option("--ce-weight", help="Cross-entropy to the text.", metavar="X")] = 0.1,
    l1_weight: Annotated[float, typer.Option("--l1-weight", help="Distance of the laws.", metavar="X")] = 0.9,
    confidence_weight: Annotated[
        float, typer.Option("--confidence-weight", help="Confidence head.", metavar="X")
    ] = 1.0,
    length_weight: Annotated[
        float, typer.Option("--length-weight", help="Acceptance length, at the end of training.", metavar="X")
    ] = 1.0,
    min_temperature: Annotated[
        float | None,
        typer.Option(
            "--min-temperature",
            help="Compare the laws at a text's own temperature, but at least at this: 0.5 favours greedy use.",
            metavar="T",
        ),
    ] = None,
    store_gb: Annotated[
        float | None,
        typer.Option("--store-states", help="Keep hidden states on disk, in at most so many GB.", metavar="GB"),
    ] = None,
    heads: Annotated[
        bool, typer.Option("--heads/--no-heads", help="Repeat the model's embedding and head in the draft.")
    ] = True,
    is_compiled: Annotated[
        bool, typer.Option("--compile", help="Fuse the loss: half a minute first, then faster steps.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same draft.", metavar="N")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="A few steps on a few prompts, then load the draft: two minutes.")
    ] = False,
    threads: options.Threads = None,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Train a DSpark draft on a model's own answers; go on if the folder holds a run that was stopped.

    Under torchrun the texts of a step are shared among the processes.
    """
    if data is None or out is None:
        raise UsageError("--data says what to train on, --out where the draft goes")
    if steps is not None and seconds is not None:
        raise UsageError("--steps and --seconds are two ways to say the same: give one")
    if dry_run and seconds is not None:
        raise UsageError("--dry-run takes a few steps, whatever --seconds says: leave one out")
    import torch.distributed as dist

    from soloist.train.plan import bytes_ratio
    from soloist.train.prompts import check_data, read_prompts
    from soloist.train.run import DRY_NAME, DRY_PROMPTS, DRY_TOKENS, Progress, dry, train_draft, try_draft
    from soloist.train.settings import DraftShape, ObjectiveSettings, TrainSettings

    device = place(device, threads=threads, dtype=dtype)
    settings = TrainSettings(
        shape=DraftShape(block_size=block, num_hidden_layers=layers, markov_rank=markov_rank, mask_token_id=mask_token),
        objective=ObjectiveSettings(
            ce_weight=ce_weight,
            l1_weight=l1_weight,
            confidence_weight=confidence_weight,
            length_weight=length_weight,
            min_temperature=min_temperature,
        ),
        num_steps=TrainSettings.num_steps if steps is None else steps,
        checkpoint_every=save_every,
        is_compiled=is_compiled,
        documents_per_step=texts_per_step,
        anchors_per_document=anchors,
        learning_rate=learning_rate,
        optimizer=optimizer,
        compute_dtype="fp32" if _is_fp32(dtype, device) else "bf16",
        seed=seed,
        stores_heads=heads,
    )
    if dry_run:
        settings = dry(settings)
        num_prompts, num_tokens = min(num_prompts, DRY_PROMPTS), min(num_tokens, DRY_TOKENS)
    mix = read_numbers(temperatures, "--temperatures")
    if url is None and url_model is not None:
        raise UsageError(f"--url-model {url_model} names a model behind --url, which is not given")
    if url is not None and source == "transformers":
        raise UsageError("--url and --source transformers both say who answers: give one")
    check_data(data)
    _join_processes(device)
    folder = out
    if dry_run:
        # What it leaves would be taken for a run to go on with. The other processes wait for the first one's answers.
        folder = out / DRY_NAME
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    llm = load_dense(model, device=device, dtype=dtype, threads=threads)
    target = llm.engine.runner.model
    limit = target.config.max_position_embeddings - num_tokens
    prompts = read_prompts(data, make_reader(llm), limit=num_prompts, max_prompt_tokens=limit, seed=seed)
    answering = _make_source(llm, model, source, url, url_model, num_tokens=num_tokens, batch=batch)
    ratio = bytes_ratio(target, settings.shape.config_for(target.config))
    with Bar("answering") as bar:
        clock = _Clock(num_prompts=len(prompts))

        def on_answer(done: int, total: int) -> None:
            clock.hear(done)
            bar(done, total)

        def on_step(figures: "Figures", num_steps: int, tok_per_s: float) -> None:
            length = figures.acceptance_length
            bar.retitle(f"training: {length:.2f} tokens a step, {length * ratio:.2f} times as fast predicted")
            bar(figures.step, num_steps)

        outcome = train_draft(
            target,
            prompts,
            answering,
            settings,
            folder,
            temperatures=mix,
            num_tokens=llm.engine.runner.buffers.num_tokens,
            data=f"{len(prompts)} prompts from {data.name}",
            store_budget_bytes=None if store_gb is None else int(store_gb * 1e9),
            seconds=seconds,
            progress=Progress(on_answer=on_answer, on_plan=lambda plan: print_dim(plan.describe()), on_step=on_step),
        )
    if dist.is_initialized():
        is_first = dist.get_rank() == 0
        dist.destroy_process_group()
        if not is_first:
            return 0
    found = outcome.figures
    result: dict[str, Any] = {"draft": str(out), "num_texts": outcome.num_texts, "held_out": vars(found)}
    if dry_run:
        result["tokens_per_step"] = try_draft(target, folder, prompts[0], llm.engine.runner.buffers.num_tokens)
        shutil.rmtree(folder)
    if as_json:
        print(json.dumps(result))
        return 0
    print(
        f"{out}: {found.acceptance_length:.2f} tokens a step predicted on held-out texts"
        f" ({found.greedy_acceptance_length:.2f} greedy)"
    )
    if dry_run:
        print("dry run: the draft loads and drafts; trained for this long it is worth nothing")
    else:
        print_dim(f"next: soloist draft check --draft {out}, then soloist draft eval --draft {out}")
    return 0


class _Clock:
    """Says once, behind the first batch of answers, how long all of them will take."""

    def __init__(self, num_prompts: int) -> None:
        self._num_prompts = num_prompts
        self._start_s = time.perf_counter()
        # Answers that were there before, and whether it was said.
        self._first: int | None = None
        self._has_spoken = False

    def hear(self, done: int) -> None:
        from soloist.train.plan import in_words

        if self._first is None:
            self._first = done
        if self._first < done < self._num_prompts and not self._has_spoken:
            self._has_spoken = True
            seconds = (time.perf_counter() - self._start_s) / (done - self._first) * (self._num_prompts - done)
            print_dim(f"{self._num_prompts - done} more answers take about {in_words(seconds)}")


def _join_processes(device: str) -> None:
    """Meet the other processes if `torchrun` started several, each with a GPU of its own or none.

    Raises:
        UsageError: there are fewer GPUs.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_torchelastic_launched():
        return
    is_gpu = device.startswith("cuda")
    if is_gpu:
        rank, num_gpus = dist.get_node_local_rank(), torch.cuda.device_count()
        if rank >= num_gpus:
            raise UsageError(f"process {rank} has no GPU, there are {num_gpus}: start fewer, or give --device cpu")
        torch.cuda.set_device(rank)
    # The others wait while the first one has prompts answered.
    dist.init_process_group("nccl" if is_gpu else "gloo", timeout=timedelta(hours=24))


def _is_fp32(dtype: str | None, device: str) -> bool:
    return dtype == "float32" or (dtype is None and device == "cpu")


def load_dense(model: str | None, *, device: str, dtype: Any, threads: int | None, **wishes: Any) -> "LLM":
    """Load a model whose weights can be computed with as they are; in fp32 on a CPU unless told otherwise."""
    device = place(device, threads=threads, dtype=dtype)
    is_fp32 = _is_fp32(dtype, device)
    return load(
        model,
        context=None,
        threads=threads,
        device=device,
        weights="file",
        weights_dtype="fp32" if is_fp32 else "fp16" if dtype == "float16" else "bf16",
        dtype="float32" if is_fp32 else dtype,
        **{"draft": "off"} | wishes,
    )


def _make_source(
    llm: "LLM",
    model: str | None,
    kind: str,
    url: str | None,
    url_model: str | None,
    *,
    num_tokens: int,
    batch: int,
) -> "Source":
    """Choose who answers."""
    from soloist.hub import find_model
    from soloist.train.responses import OwnSource, RemoteSource, load_transformers_source

    engine = llm.engine
    if url is not None:
        if llm.tokenizer is None or (url_model or model) is None:
            raise UsageError("--url needs a model with a tokenizer, and --url-model or --model for its name there")
        tokenizer = llm.tokenizer
        return RemoteSource(
            url=url,
            model=str(url_model or model),
            max_new_tokens=num_tokens,
            decode=lambda ids: tokenizer.decode(ids, show_special=True),
            encode=llm.encode,
            batch_size=batch,
        )
    if kind == "transformers":
        path = find_model(model).path
        assert path is not None
        target = engine.runner.model
        return load_transformers_source(
            path, target.device, target.dtype, num_tokens, engine.eos_token_ids, batch_size=batch
        )
    return OwnSource(
        model=engine.runner.model,
        max_new_tokens=num_tokens,
        num_tokens=engine.runner.buffers.num_tokens,
        eos_token_ids=engine.eos_token_ids,
        batch_size=batch,
    )
