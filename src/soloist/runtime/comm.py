"""Ranks: the processes that share one model, how they meet, keep in step, and end together.

Rank 0 is this process; it starts the others and talks to the world. Every rank runs the same requests by the same
engine on its part of the model, and decides from tensors that all ranks have alike. What only the host of rank 0 knows
(a request, a cancel, a stop string) it says in words on a pipe: a request before it begins, and a word before every
chunk of a prompt and every step that is waited for. A rank that has no word to read sleeps.

Ranks meet before they exchange anything that could hang or be wrong: each says what it holds, or the error that kept it
from coming, and all go on together. A rank that ends or stops brings the others down: rank 0 raises `RankLostError`, or
ends its process where it hangs in an exchange that will never end (`rank_processes`).
"""

import contextlib
import itertools
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist

from soloist.config import disable_multicast, disable_nccl_watchdog
from soloist.errors import CheckpointError, RankLostError, SoloistError, UnsupportedError, UsageError
from soloist.kernels.allreduce import TensorParallel
from soloist.kernels.mailboxes import make_mailboxes
from soloist.models import open_model, read_config
from soloist.models.loader import NUM_RANKS
from soloist.runtime.rank_processes import BEAT_S, RankProcesses, end_exchanges

# A GPU's collective gives up after this: ranks may take so much longer than each other to capture a step.
_EXCHANGE_S = 60.0
# A CPU's, and the wait for all to join: rank 0 may be stopped at its terminal for a while.
_JOINED_S = 600.0
_ORPHANED_EXIT_CODE = 1

_Choice = TypeVar("_Choice")


class Ranks:
    """The words between ranks; this one is alone and keeps them to itself."""

    group = TensorParallel()

    def lead(self, request: dict[str, Any]) -> None:
        """Have the other ranks begin the same request; from rank 0."""

    def agree(self, choice: _Choice) -> _Choice:
        """Give rank 0's choice, in the same place of the same work on every rank."""
        return choice

    def meet(self, identity: dict[str, object]) -> None:
        """Wait until every rank has come to this place, in the same order of meetings on every rank.

        Args:
            identity: what all ranks must hold alike, by name.

        Raises:
            CheckpointError: a rank holds something else.
            SoloistError: what another rank raised on its way here.
        """

    def at_work(self) -> AbstractContextManager[None]:
        """Say that this rank may wait for the others inside the block."""
        return contextlib.nullcontext()

    @property
    def loss(self) -> SoloistError | None:
        """Why the ranks cannot be used any more; None: they can."""
        return None

    def check(self) -> None:
        """See whether every rank is there.

        Raises:
            RankLostError: one is not.
        """
        if self.group.mailboxes is not None:
            self.group.mailboxes.check()

    def fail(self, error: BaseException) -> None:
        """Hear that a request broke off where the other ranks cannot know it.

        Raises:
            RankLostError: because a rank was lost.
        """


def _join(rank: int, size: int, method: str, device: torch.device) -> TensorParallel:
    """Join the other ranks; the mailboxes of GPUs come with the size of the model's rows, see `connect_gpus`."""
    meeting: dict[str, Any]
    meeting = {"init_method": method, "rank": rank, "world_size": size, "timeout": timedelta(seconds=_JOINED_S)}
    if device.type == "cuda":
        disable_multicast()
        disable_nccl_watchdog()
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **meeting)
    else:
        dist.init_process_group("gloo", **meeting)
    return TensorParallel(rank=rank, size=size, process_group=dist.group.WORLD)


def connect_gpus(ranks: Ranks, model: Path | dict[str, Any], device: torch.device) -> None:
    """Add what a GPU's steps exchange rows through to the ranks' group; every rank calls it. A CPU's need nothing.

    Args:
        ranks: of this process.
        model: where the model is, or its config.
        device: of this rank.
    """
    group = ranks.group
    if group.process_group is None or device.type != "cuda":
        return
    config = model if isinstance(model, dict) else read_config(open_model(model))
    mailboxes = make_mailboxes(
        group.process_group, hidden_size=config["hidden_size"], device=device, timeout_s=_EXCHANGE_S
    )
    ranks.group = replace(group, mailboxes=mailboxes)


def rank_device(device: torch.device, rank: int) -> torch.device:
    """Give the device of a rank: every GPU has one rank, a CPU all of them."""
    return torch.device("cuda", rank) if device.type == "cuda" else device


def check_tensor_parallel_size(size: int, device: torch.device) -> None:
    """Refuse a number of ranks that this machine does not have.

    Raises:
        UsageError: the message says what is allowed.
        UnsupportedError: its GPUs cannot reach each other.
    """
    if size not in NUM_RANKS:
        raise UsageError(f"tensor_parallel_size is {size}; allowed: {', '.join(map(str, NUM_RANKS))}")
    if size == 1 or device.type != "cuda":
        return
    if str(device) != "cuda":
        raise UsageError(
            f"device is {str(device)!r} and tensor_parallel_size {size}: ranks take the GPUs 0 to {size - 1}; say cuda,"
            " and choose others by CUDA_VISIBLE_DEVICES"
        )
    if size > torch.cuda.device_count():
        raise UsageError(
            f"tensor_parallel_size is {size}, and PyTorch sees {torch.cuda.device_count()} CUDA devices; ranks of a CPU"
            " take device cpu"
        )
    if strangers := find_strangers(size):
        raise UnsupportedError(
            f"tensor_parallel_size is {size}, and GPUs {strangers[0][0]} and {strangers[0][1]} cannot read each other's"
            " memory: take GPUs that are linked, by CUDA_VISIBLE_DEVICES, or one"
        )


def find_strangers(num_gpus: int) -> tuple[tuple[int, int], ...]:
    """List the pairs among the first GPUs that cannot read each other's memory."""
    can_reach = torch.cuda.can_device_access_peer
    pairs = itertools.combinations(range(num_gpus), 2)
    return tuple((a, b) for a, b in pairs if not (can_reach(a, b) and can_reach(b, a)))


class Leader(Ranks):
    """Rank 0's side: starts the other ranks and leads them.

    Args:
        size: ranks, this one included.
        device: of the model; rank r of GPUs has GPU r.
        program: what Python runs as another rank: it makes a `Follower`.
        arguments: what `Follower.arguments` gives there; pickled.

    Raises:
        UsageError: this process is one of several ranks already.
        RankLostError: a rank did not start.
    """

    def __init__(self, size: int, device: torch.device, program: str, arguments: object) -> None:
        if dist.is_initialized():
            raise UsageError(
                "this process has other ranks already, and can share one model at a time with others: let go of that"
                " one first"
            )
        self._others = others = RankProcesses(size, program)
        self._folder = contextlib.ExitStack()
        # Also where this object is only forgotten, and at this process's end.
        self._end = weakref.finalize(self, others.close)
        self._leave = weakref.finalize(self, _leave, others)
        try:
            for rank in range(1, size):
                others.receive(rank)
            method = _free_address() if device.type == "cuda" else self._meeting_place()
            others.send((size, method, device, arguments))
            with others.at_work():
                self.group = _join(0, size, method, rank_device(device, 0))
        except BaseException:
            self.close()
            raise

    def _meeting_place(self) -> str:
        """Make the folder where ranks of a CPU meet, so that no port is open.

        Not before they have started: a process that is killed in between would leave it. Not for GPUs: NCCL's threads
        look at the store until the process ends, when a folder may be gone already.
        """
        folder = self._folder.enter_context(tempfile.TemporaryDirectory(prefix="soloist-ranks-"))
        return f"file://{folder}/ranks"

    @property
    def group(self) -> TensorParallel:
        """The ranks, as this one sees them."""
        return self._others.group

    @group.setter
    def group(self, group: TensorParallel) -> None:
        self._others.group = group

    @property
    def process_ids(self) -> list[int]:
        """Of the other ranks."""
        return self._others.process_ids

    def meet(self, identity: dict[str, object]) -> None:
        for rank in range(1, self.group.size):
            answer = self._others.receive(rank)
            other = [name for name in identity | answer if identity.get(name) != answer.get(name)]
            if other:
                raise CheckpointError(
                    f"rank {rank} has loaded another model than rank 0: {len(other)} of the {len(identity)} things that"
                    f" all ranks hold differ, such as {other[0]}; give every rank the same files"
                )
        # All have joined.
        self._folder.close()
        self._others.send("go on")

    def at_work(self) -> AbstractContextManager[None]:
        return self._others.at_work()

    @property
    def loss(self) -> SoloistError | None:
        return self._others.loss

    def lead(self, request: dict[str, Any]) -> None:
        self._others.send(request)

    def agree(self, choice: _Choice) -> _Choice:
        self._others.send(choice)
        return choice

    def check(self) -> None:
        if self._others.loss is not None:
            self._others.raise_lost()
        super().check()

    def fail(self, error: BaseException) -> None:
        if isinstance(error, RuntimeError | RankLostError):
            self._others.wait_for_loss()
        loss = self._others.loss
        self.close()
        if loss is not None and not isinstance(error, SoloistError):
            raise loss from error

    def close(self) -> None:
        """End the other ranks; the engine cannot be used any more."""
        if self._others.loss is not None and self.group.mailboxes is not None:
            # NCCL is being ended already.
            self._leave.detach()
        self._others.loss = self._others.loss or RankLostError("the ranks of this model were ended; load it again")
        self._leave()
        self._end()
        self._folder.close()


def _free_address() -> str:
    """Choose where ranks of GPUs meet: a port that is free now, of this machine only."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def _leave(others: RankProcesses) -> None:
    """Forget the ranks, so that others can be started."""
    others.begin_to_close()
    if dist.is_initialized():
        if dist.get_backend() == "nccl":
            # It would finish what is under way, with ranks that are gone.
            end_exchanges(others.group)
        dist.destroy_process_group()


class Follower(Ranks):
    """The side of any other rank, in a process that `Leader` started."""

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # What others print must not get between the messages.
        self._output: IO[bytes] = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._is_speaking = threading.Lock()
        threading.Thread(target=self._live, args=(os.getppid(),), daemon=True).start()
        self.say("started")
        size, method, device, self.arguments = self._receive()
        rank = int(sys.argv[1])
        self.device = rank_device(device, rank)
        self.group = _join(rank, size, method, self.device)

    def say(self, message: object) -> None:
        """Say something to rank 0: what this rank holds, or the error that keeps it from going on."""
        try:
            with self._is_speaking:
                pickle.dump(message, self._output)
                self._output.flush()
        except OSError:
            # Rank 0 has ended, while this one was being started too, when `_live` does not see it.
            os._exit(_ORPHANED_EXIT_CODE)

    def _receive(self) -> Any:
        try:
            return pickle.load(sys.stdin.buffer)
        except EOFError:
            # Rank 0 has ended.
            sys.exit(0)

    def meet(self, identity: dict[str, object]) -> None:
        self.say(identity)
        self._receive()

    def next_request(self) -> dict[str, Any]:
        """Sleep until rank 0 begins a request."""
        request: dict[str, Any] = self._receive()
        return request

    def agree(self, choice: _Choice) -> _Choice:
        agreed: _Choice = self._receive()
        return agreed

    def wait_for_end(self) -> None:
        """Give rank 0's end, of which an exchange may hear first, the time to end this process."""
        time.sleep(4 * BEAT_S)

    def _live(self, parent: int) -> None:
        """Give signs of life, and end this process when rank 0 has, whatever it waits for; in a thread."""
        while os.getppid() == parent:
            self.say(None)
            time.sleep(BEAT_S)
        os._exit(_ORPHANED_EXIT_CODE)
