"""What one rank of a tensor-parallel test runs: every case given on the command line, its answers as JSON on stdout.

`python -m tests.rank_program RANK SIZE FOLDER CASES`: CASES is JSON, a list of [family, drafter, draft layers]; the
checkpoints are in FOLDER, which the ranks also meet in.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from soloist.kernels.allreduce import ALONE, TensorParallel
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.runtime.buffers import StepBuffers
from soloist.spec.drafter import Drafter
from soloist.spec.setup import DraftLayers
from tests.spec.drafters import DRAFTERS, Setting, answer, make_engine, prompt_of, write_small

# Family, drafter, and how ranks hold its layers.
Case = tuple[str, str | None, DraftLayers]

MAX_DRAFTS = 3
MAX_TOKENS = 12
# The ranks share every head and width; 2 ranks have fewer key/value heads than ranks in qwen3, 4 in qwen2.
OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"num_key_value_heads": 1},
    "bailing_moe_v3": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "kimi_linear": {
        "linear_attn_config": {
            "full_attn_layers": [3],
            "head_dim": 12,
            "kda_layers": [1, 2],
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        }
    },
}


def write_checkpoints(folder: Path, families: set[str]) -> None:
    """Write the targets, and the drafts that the drafters would write."""
    for family in families:
        write_small(folder / family, family, **OVERRIDES[family])


def load(folder: Path, family: str, group: TensorParallel) -> CausalLM:
    return load_model(folder / family, dtype=torch.float32, group=group)


def note_proposals(drafter: Drafter) -> list[list[int]]:
    """Give the list that the drafts of every step are put into from now on."""
    proposals: list[list[int]] = []
    propose = drafter.propose

    def propose_and_note(buffers: StepBuffers, context_len: torch.Tensor) -> None:
        propose(buffers, context_len)
        proposals.append(buffers.input_ids[1 : int(buffers.width)].tolist())

    drafter.propose = propose_and_note  # type: ignore[method-assign]
    return proposals


def run_case(target: CausalLM, folder: Path, scratch: Path, case: Case) -> dict[str, Any]:
    """Answer greedily and with random numbers."""
    family, drafter_name, draft_layers = case
    drafter = None
    proposals: list[list[int]] = []
    if drafter_name is not None:
        setting = Setting(
            target=target,
            path=folder / family,
            scratch=scratch,
            max_drafts=MAX_DRAFTS,
            is_fixed_shape=False,
            draft_layers=draft_layers,
        )
        drafter = DRAFTERS[drafter_name][0](setting)
        proposals = note_proposals(drafter)
    engine = make_engine(target, drafter)
    # Repeats itself, so that a look-up finds something.
    prompt = prompt_of(5, target.config.vocab_size, seed=1) * 2
    greedy = answer(engine, prompt, max_tokens=MAX_TOKENS)
    sampled = answer(engine, prompt, max_tokens=MAX_TOKENS // 2, temperature=0.7, seed=11)
    if drafter is not None:
        return {"greedy": greedy, "sampled": sampled, "proposals": proposals}
    # So few tokens may be drawn that the last rank holds none of them.
    few = make_engine(target, num_tokens=target.config.vocab_size // 4)
    prompt = [token % few.runner.buffers.num_tokens for token in prompt]
    return {"greedy": greedy, "sampled": sampled, "few": answer(few, prompt, max_tokens=4)}


def run_cases(folder: Path, scratch: Path, cases: list[Case], group: TensorParallel) -> list[Any]:
    """Run cases in order; each family's target is loaded once."""
    targets = {family: load(folder, family, group) for family in sorted({family for family, _, _ in cases})}
    return [run_case(targets[case[0]], folder, scratch, case) for case in cases]


def run_alone(folder: Path, scratch: Path, cases: list[Case]) -> list[Any]:
    """Run the cases on one rank, in this process."""
    return run_cases(folder, scratch, cases, ALONE)


def run_on_ranks(num_ranks: int, folder: Path, cases: list[Case]) -> list[list[Any]]:
    """Run the cases on ranks, a process each; give what every rank answered."""
    words = [str(num_ranks), str(folder), json.dumps(cases)]
    processes = [
        subprocess.Popen([sys.executable, "-m", "tests.rank_program", str(rank), *words], stdout=subprocess.PIPE)
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * num_ranks
    return [json.loads(output) for output in outputs]


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{size}", rank=rank, world_size=size)
    group = TensorParallel(rank=rank, size=size, process_group=dist.group.WORLD)
    # Drafts that a case writes are each rank's own.
    print(json.dumps(run_cases(folder, folder / f"scratch-{size}-{rank}", json.loads(sys.argv[4]), group)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
