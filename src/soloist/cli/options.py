"""Options that several commands share, under the names people type without reading."""

from typing import Annotated, Literal

import typer

Model = Annotated[
    str | None,
    typer.Option(
        "-m", "--model", help="Folder, .gguf file, hub id (org/name[@revision]) or built-in name.", metavar="MODEL"
    ),
]
System = Annotated[str | None, typer.Option("--system", help="System message.", metavar="TEXT")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", "--temp", help="0 takes the likeliest token every time.", metavar="X")
]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep the K likeliest tokens.", metavar="K")]
TopP = Annotated[
    float | None, typer.Option("--top-p", help="Keep the likeliest tokens up to this probability.", metavar="P")
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", help="Keep tokens at least this likely relative to the likeliest.", metavar="P"),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option("--repetition-penalty", "--repeat-penalty", help="Above 1 discourages repetition.", metavar="X"),
]
PresencePenalty = Annotated[
    float | None, typer.Option("--presence-penalty", help="Subtracted once from tokens already used.", metavar="X")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option("--frequency-penalty", help="Subtracted for every use of a token.", metavar="X")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same text.", metavar="N")]
MaxTokens = Annotated[
    int | None,
    typer.Option("-n", "--max-tokens", help="Longest answer, in tokens. Default: what the context holds.", metavar="N"),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End the answer before this text; repeat for several.", metavar="TEXT"),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the model's end token.")]

Context = Annotated[
    int | None,
    typer.Option(
        "-c", "--context", "--ctx-size", "--max-model-len", help="Tokens of context to make room for.", metavar="N"
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("-t", "--threads", help="Threads of a CPU, which auto then takes. Default: measured.", metavar="N"),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help="cpu, cuda, or auto (the default): a GPU if there is one that the kernels run on, else the CPU.",
        metavar="DEVICE",
    ),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size", "--tp", help="Processes, or GPUs, that share the model: 1, 2, 4 or 8.", metavar="N"
    ),
]
Weights = Annotated[
    Literal["file", "random"], typer.Option("--weights", help="`random` runs a config without its checkpoint.")
]
WeightsDtype = Annotated[
    str | None,
    typer.Option(
        "--weights-dtype",
        help="How weights are held: fp32, bf16, fp16, int8 or int4; what it rounds is shown.",
        metavar="DTYPE",
    ),
]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32"] | None,
    typer.Option("--dtype", help="Of activations and caches. Default: bfloat16."),
]
Draft = Annotated[
    str | None, typer.Option("--draft", help="ngram, mtp, or a draft's checkpoint: as --model.", metavar="DRAFT")
]
DraftWidth = Annotated[
    int | None,
    typer.Option("--draft-width", help="Rows of a step: the pending token and its drafts, 2 to 16.", metavar="N"),
]
DraftWeightsDtype = Annotated[
    str | None, typer.Option("--draft-weights-dtype", help="--weights-dtype of the draft.", metavar="DTYPE")
]
AdaptiveWidth = Annotated[
    bool, typer.Option("--adaptive-width", help="As many drafts as pay; measures once what steps cost here.")
]
SimulateAcceptance = Annotated[
    float | None,
    typer.Option("--simulate-acceptance", help="Commit A tokens a step, whatever the model says.", metavar="A"),
]

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of text.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
