"""Two ranks that add up a tensor in every step and read the result; one of them is busy on its host besides.

Words: rank, file through which the ranks meet, rank that is late, number of steps.
"""

import json
import sys

import torch
import torch.distributed as dist

PAGE = list(range(10_000))


def main(rank: int, store: str, late_rank: int, num_steps: int) -> None:
    """Take steps: products, a sum over ranks, a read."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    weight = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(num_steps):
        x = hidden
        for _ in range(4):
            x = (x @ weight) / 48
        row = x[0].float()
        if rank == late_rank:
            json.dumps(PAGE)  # late
        dist.all_reduce(row)
        row.argmax().item()  # read
    dist.destroy_process_group()


main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
