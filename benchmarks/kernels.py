"""Time every operator of a step on one GPU by width against its floor, once it equals its reference.

`PYTHONPATH=src python benchmarks/kernels.py [--operators NAMES] [--shapes NAMES] [--out FOLDER]` writes
`FOLDER/kernels.json`, anew with each part; the folder is that of this kind of machine unless another is named. Whole
steps are measured by `decode_gpu.py`, exchanges between GPUs by `allreduce_gpu.py`. fla-core, where installed, is the
peer of KDA.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

import kernels_dense
import kernels_hybrid
import kernels_small
from kernel_rows import KernelRows
from soloist.bench.results import commit

# What has one set of sizes, and what has those of every chosen shape. The peer comes last: it tries many launch
# settings of its own, which takes long.
PARTS: dict[str, Callable[[KernelRows], None]] = {
    "linear": kernels_dense.bench_linear,
    "attention": kernels_dense.bench_attention,
    "norm": kernels_small.bench_norm,
    "router": kernels_small.bench_router,
    "sampling": kernels_small.bench_sampling,
    "draft": kernels_small.bench_draft_attention,
    "lookup": kernels_small.bench_lookup,
    "step_end": kernels_small.bench_step_end,
}
PARTS_BY_SHAPE: dict[str, Callable[[kernels_hybrid.Shape, KernelRows], None]] = {
    "moe": kernels_hybrid.bench_moe,
    "kda": kernels_hybrid.bench_kda,
    "mla": kernels_hybrid.bench_mla,
    "fla": kernels_hybrid.bench_fla,
}


def names_of(*known: str) -> Callable[[str], list[str]]:
    """Give what reads a list of names with commas between, and refuses one that is not known."""

    def names(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; known are {', '.join(known)}")
        return given

    return names


def measure(rows: KernelRows, operators: list[str], shapes: list[kernels_hybrid.Shape]) -> None:
    """Measure parts one after the other; the file holds all of them that are done."""
    if "fla" in operators and not kernels_hybrid.HAS_FLA:
        rows.not_measured["fla"] = "fla-core is not installed: nothing to compare KDA with"
        print(rows.not_measured["fla"])
    for name in (*PARTS, *PARTS_BY_SHAPE):
        if name not in operators or name in rows.not_measured:
            continue
        started_s = time.perf_counter()
        if name in PARTS:
            PARTS[name](rows)
        else:
            for i, shape in enumerate(shapes):
                # The peer knows nothing of a layer but its heads.
                if name != "fla" or all(shape.H != other.H for other in shapes[:i]):
                    PARTS_BY_SHAPE[name](shape, rows)
        rows.measure_bandwidth()
        rows.write()
        print(f"{name}: {time.perf_counter() - started_s:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="default: the folder of this kind of machine")
    parser.add_argument("--commit", default=commit(), help="where git is not there to ask")
    shapes = {shape.name: shape for shape in kernels_hybrid.SHAPES}
    parser.add_argument("--shapes", type=names_of(*shapes), default="flash-tp1,flash-tp2,tiny", help="of moe, kda, mla")
    operators = (*PARTS, *PARTS_BY_SHAPE)
    parser.add_argument("--operators", type=names_of(*operators), default=",".join(operators))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = KernelRows(torch.device("cuda"), arguments.out, arguments.commit)
    print(f"read bandwidth {rows.bandwidth:.0f} GB/s")
    measure(rows, arguments.operators, [shape for name, shape in shapes.items() if name in arguments.shapes])
    print(json.dumps({"case": "kernels", "bandwidth_gb_per_s": round(rows.bandwidth), "rows": len(rows.rows)}))


if __name__ == "__main__":
    main()
