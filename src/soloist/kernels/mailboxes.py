"""Mailboxes that the ranks of one host have in each other's memory, and how packets go through them.

Owns the memory, and the protocol that `allreduce_cuda`'s kernels follow: the data are their own flag, and nobody waits
at a barrier. A rank stores packets of 16 bytes into the memory of every peer, and reads its own memory until the
peers' packets are there.

**The flag.** An empty mailbox is full of the word 0xffffffff, and no packet holds that word: where data do, which are
two bf16 NaNs or an fp32 NaN, 0x7fff7fff is sent and used instead, which is NaN as well. Every word of 4 bytes is looked
at, so packets may come in any order and in parts.

**Generations.** Every row of either collective is a channel of its own with three mailboxes per peer, used in turn; the
turn is counted in device memory, so that a captured graph needs no host. Use k of a channel reads mailbox k mod 3 and
empties that of use k-1, which is the one that peers fill in their use k+2. This is safe:

* What use k empties has been read to its end: the launch of use k waits for the end of use k-1.
* A peer begins use k+2 after the end of its use k+1, which had to read what this rank sent in use k+1, which it sent
  after the end of its use k. Each is a launch that waits for the one before, and all these stores meet in this rank's
  L2 cache, so the peer's packet comes to an empty mailbox.
* Two generations would not do: a peer in use k+1 may fill what this rank, in use k, has yet to empty.

This takes what a step has: one stream per rank, in which all ranks launch the same collectives, with the same T and D,
in the same order. A rank that waits too long for a peer says so in host memory and ends, with NaN for what never came.

NVLink multicast is not used: PyTorch is kept from setting it up before memory is allocated.

Source: the LL protocol of NCCL and the Lamport kernels of TensorRT-LLM (Apache-2.0) for the idea of data as a flag.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from soloist.config import disable_multicast
from soloist.errors import RankLostError

WORLD_SIZES = (2, 4, 8)
# Most rows of a collective.
MAX_ROWS = 16
# A row is as many packets of 8 elements as a program has threads.
MAX_HIDDEN_SIZE = 8192
GENERATIONS = 3
# Of a mailbox without a packet: 0xffffffff.
EMPTY = -1


@dataclass(frozen=True, kw_only=True)
class Mailboxes:
    """What one rank has of the mailboxes of all; `make_mailboxes` makes them."""

    rank: int
    # Most rows of a collective, and the widest row.
    max_tokens: int
    hidden_size: int
    # How long a rank waits for another.
    timeout_s: float
    # Per rank (words,) int32, at first -1: the own ones, and those of the peers as seen from here.
    buffers: tuple[torch.Tensor, ...]
    # (2, max_tokens) int32: the generation that is next for each row, of sums and of argmax.
    turns: torch.Tensor
    # () int32, on a GPU in pinned host memory, so that the host can write it whatever the device does: 1 once this rank
    # or its host has given up. Later collectives then wait a millisecond each.
    has_failed: torch.Tensor
    # () int32, on a GPU in pinned host memory, which kernels write: 0, or 1 + the rank that did not come.
    error: torch.Tensor
    # Keeps the peers' memory mapped.
    handle: Any = None

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.buffers)

    def check(self) -> None:
        """See whether every peer has come so far; reads host memory only, so it may be called at any time.

        Raises:
            RankLostError: a collective ended without a peer; what it and later ones gave holds NaN.
        """
        if code := int(self.error):
            raise RankLostError(
                f"rank {self.rank} waited {self.timeout_s:g} s for rank {code - 1} in vain; start all ranks anew"
            )


def num_words(world_size: int, *, max_tokens: int, hidden_size: int) -> int:
    """Count the int32 words of one rank's mailboxes."""
    return GENERATIONS * max_tokens * world_size * (hidden_size // 8 + 1) * 4


def view_mailboxes(
    buffers: tuple[torch.Tensor, ...],
    *,
    rank: int,
    max_tokens: int,
    hidden_size: int,
    timeout_s: float,
    handle: Any = None,
) -> Mailboxes:
    """Take one rank's view of buffers of `num_words` words, all of them -1."""
    device = buffers[rank].device
    is_gpu = device.type == "cuda"
    return Mailboxes(
        rank=rank,
        max_tokens=max_tokens,
        hidden_size=hidden_size,
        timeout_s=timeout_s,
        buffers=buffers,
        turns=torch.zeros(2, max_tokens, dtype=torch.int32, device=device),
        has_failed=torch.zeros((), dtype=torch.int32, pin_memory=is_gpu),
        error=torch.zeros((), dtype=torch.int32, pin_memory=is_gpu),
        handle=handle,
    )


def make_mailboxes(
    process_group: dist.ProcessGroup,
    *,
    hidden_size: int,
    device: torch.device,
    max_tokens: int = MAX_ROWS,
    timeout_s: float = 4.0,
) -> Mailboxes:
    """Allocate mailboxes that all ranks of a group reach; every rank calls this, and no other at the same time.

    Args:
        process_group: of 2, 4 or 8 ranks of one host, a GPU each, linked by NVLink.
        hidden_size: of the widest rows, a multiple of 8 up to 8192.
        device: this rank's GPU, which is the current one.
        max_tokens: most rows of a collective, up to 16.
        timeout_s: how long a kernel waits for a peer. Ranks need not launch at the same time, but within this.
    """
    world_size, rank = process_group.size(), process_group.rank()
    assert world_size in WORLD_SIZES and 0 < max_tokens <= MAX_ROWS, (world_size, max_tokens)
    assert hidden_size % 8 == 0 and hidden_size <= MAX_HIDDEN_SIZE, hidden_size
    disable_multicast()
    size = num_words(world_size, max_tokens=max_tokens, hidden_size=hidden_size)
    own = symm_mem.empty(size, dtype=torch.int32, device=device)
    own.fill_(EMPTY)
    handle = symm_mem.rendezvous(own, process_group.group_name)
    buffers = tuple(own if p == rank else handle.get_buffer(p, (size,), torch.int32) for p in range(world_size))
    assert handle.get_buffer(rank, (size,), torch.int32).data_ptr() == own.data_ptr()
    # Nobody sends before all are empty.
    torch.cuda.synchronize(device)
    dist.barrier(process_group)
    return view_mailboxes(
        buffers, rank=rank, max_tokens=max_tokens, hidden_size=hidden_size, timeout_s=timeout_s, handle=handle
    )
