"""Ranks: the processes that share one model, how they start, keep in step, and end together.

Rank 0 is this process; it starts the others and talks to the world. Every rank runs the same requests by the same
engine on its part of the model, and decides from tensors that all ranks have alike. What only the host of rank 0 knows
(a request, a cancel, a stop string) it says in words on a pipe: a request before it begins, and a word before every
chunk of a prompt and every step that is waited for. A rank that has no word to read sleeps.

A rank that ends brings the others down: rank 0 raises `RankLostError`, or ends its process where it hangs in an
exchange that will never end.
"""

import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from soloist.config import disable_multicast, disable_nccl_watchdog
from soloist.errors import CheckpointError, RankLostError, SoloistError, UnsupportedError, UsageError
from soloist.kernels.allreduce import TensorParallel
from soloist.kernels.mailboxes import make_mailboxes
from soloist.models import open_model, read_config
from soloist.models.loader import NUM_RANKS

# How long rank 0 may take to notice by itself that a rank is lost; with the time to see it, below 5 s.
_GRACE_S = 3.0
# A GPU's collective gives up after this: ranks may take so much longer than each other to compile a kernel.
_EXCHANGE_S = 60.0
_LOST_EXIT_CODE = 1
# Between two looks of a rank at whether rank 0 lives.
_PARENT_POLL_S = 0.5

_Choice = TypeVar("_Choice")


class Ranks:
    """The words between ranks; this one is alone and keeps them to itself."""

    group = TensorParallel()

    def lead(self, request: dict[str, Any]) -> None:
        """Have the other ranks begin the same request; from rank 0."""

    def agree(self, choice: _Choice) -> _Choice:
        """Give rank 0's choice, in the same place of the same work on every rank."""
        return choice

    def rest(self) -> None:
        """Hear that the request is over."""

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
    if device.type == "cuda":
        disable_multicast()
        disable_nccl_watchdog()
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", init_method=method, rank=rank, world_size=size, device_id=device)
    else:
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
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
        raise UsageError(f"tensor_parallel_size is {size}, and PyTorch sees {torch.cuda.device_count()} CUDA devices")
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


class _Others:
    """The processes of the other ranks, and a thread for each that waits for its end."""

    def __init__(self, size: int, program: str) -> None:
        self.size, self.lost = size, ""
        # What the exchanges of this rank go through, once there is something.
        self.group = TensorParallel()
        # Whether this rank may be in an exchange with another, and whether it has ended them.
        self.busy, self.closing = threading.Event(), threading.Event()
        # -P: what lies in the folder that was called from is not imported, as it is not here. A session of their own: a
        # terminal's Ctrl-C is rank 0's to answer.
        command, pipe = [sys.executable, "-P", "-c", program], subprocess.PIPE
        self.processes = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) for _ in range(1, size)
        ]
        for rank in range(1, size):
            threading.Thread(target=self._watch, args=(rank,), daemon=True).start()

    def send(self, rank: int, message: object) -> None:
        if self.lost:
            self.raise_lost()
        stream = self.processes[rank - 1].stdin
        assert stream is not None
        try:
            pickle.dump(message, stream)
            stream.flush()
        except OSError:
            self.raise_lost()

    def receive(self, rank: int) -> Any:
        stream = self.processes[rank - 1].stdout
        assert stream is not None
        try:
            return pickle.load(stream)
        except (EOFError, OSError, pickle.UnpicklingError):
            self.raise_lost()

    def raise_lost(self) -> NoReturn:
        self.wait_for_loss()
        raise RankLostError(self.lost or "a rank does not answer any more; load the model again")

    def wait_for_loss(self) -> None:
        """Wait a little: a rank's end and what it does to an exchange are not seen in this order."""
        deadline_s = time.monotonic() + 1.0
        while not self.lost and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def close(self) -> None:
        """End them, and their pipes."""
        self.closing.set()
        self._kill()
        for process in self.processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()

    def _watch(self, rank: int) -> None:
        """Wait for one rank's end, in a thread."""
        code = self.processes[rank - 1].wait()
        if self.closing.is_set() or self.lost:
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self.lost = f"rank {rank} of {self.size} {how}, and the model is lost with it: load it again"
        self._kill()
        if self.group.mailboxes is not None:
            # Steps that wait for it on the GPU end, with what is no number, and so do NCCL's sums. In a thread: what
            # ends them may wait as well.
            with torch.cuda.stream(torch.cuda.Stream(self.group.mailboxes.has_failed.device)):
                self.group.mailboxes.has_failed.fill_(1)
            assert self.group.process_group is not None
            threading.Thread(target=self.group.process_group.abort, daemon=True).start()
        # Rank 0 says so itself if it gets out of the exchange it is in.
        is_busy = self.busy.is_set() and not self.closing.wait(_GRACE_S) and self.busy.is_set()
        if is_busy or not self.closing.is_set():
            print(f"soloist: {self.lost}", file=sys.stderr, flush=True)
        if is_busy:
            # An exchange with a rank that is gone does not end, and nothing else can break it off.
            os._exit(_LOST_EXIT_CODE)


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
        self._others = others = _Others(size, program)
        # Where ranks of a CPU meet; a folder of this machine, so that no port is open.
        self._meeting = tempfile.TemporaryDirectory(prefix="soloist-ranks-")
        # Also where this object is only forgotten, and at this process's end.
        self._end = weakref.finalize(self, others.close)
        self._leave = weakref.finalize(self, _leave, others)
        # NCCL may wait for ranks that are gone, and the driver ends with the process.
        self._leave.atexit = device.type != "cuda"
        try:
            for rank in range(1, size):
                others.receive(rank)
            # NCCL's threads look at the store until the process ends, when a folder may be gone already.
            method = _free_address() if device.type == "cuda" else f"file://{self._meeting.name}/ranks"
            for rank in range(1, size):
                others.send(rank, (rank, size, method, device, arguments))
            others.busy.set()
            self.group = _join(0, size, method, rank_device(device, 0))
        except BaseException:
            self.close()
            raise

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
        return [process.pid for process in self._others.processes]

    def wait_until_loaded(self, identity: dict[str, int]) -> None:
        """Wait for the other ranks to have loaded the model, and compare what all ranks must hold alike.

        Args:
            identity: a number for each tensor that every rank holds whole, and for the config.

        Raises:
            CheckpointError: a rank has loaded something else.
            SoloistError: what a rank raised while it loaded.
            RankLostError: a rank has ended.
        """
        for rank in range(1, self._others.size):
            answer = self._others.receive(rank)
            if isinstance(answer, SoloistError):
                raise answer
            other = [name for name in identity | answer if identity.get(name) != answer.get(name)]
            if other:
                raise CheckpointError(
                    f"rank {rank} has loaded another model than rank 0: {len(other)} of the {len(identity)} things that"
                    f" all ranks hold differ, such as {other[0]}; give every rank the same files"
                )
        self._others.busy.clear()

    def lead(self, request: dict[str, Any]) -> None:
        self._others.busy.set()
        for rank in range(1, self._others.size):
            self._others.send(rank, request)

    def agree(self, choice: _Choice) -> _Choice:
        for rank in range(1, self._others.size):
            self._others.send(rank, choice)
        return choice

    def rest(self) -> None:
        self._others.busy.clear()

    def check(self) -> None:
        if self._others.lost:
            self._others.raise_lost()
        super().check()

    def fail(self, error: BaseException) -> None:
        if isinstance(error, RuntimeError | RankLostError):
            self._others.wait_for_loss()
        was_lost = self._others.lost
        self.close()
        if was_lost and not isinstance(error, RankLostError):
            raise RankLostError(was_lost) from error

    def close(self) -> None:
        """End the other ranks; the engine cannot be used any more."""
        self._others.busy.clear()
        if self._others.lost and self.group.mailboxes is not None:
            # NCCL may wait for a rank that is gone.
            self._leave.detach()
        self._others.lost = self._others.lost or "the ranks of this model were ended; load it again"
        self._leave()
        self._end()
        self._meeting.cleanup()


def _free_address() -> str:
    """Choose where ranks of GPUs meet: a port that is free now, of this machine only."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def _leave(others: _Others) -> None:
    """Forget the ranks, so that others can be started."""
    others.closing.set()
    if dist.is_initialized():
        dist.destroy_process_group()


class Follower(Ranks):
    """The side of any other rank, in a process that `Leader` started."""

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # What others print must not get between the messages.
        self._output: IO[bytes] = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        self.say("started")
        rank, size, method, device, self.arguments = self._receive()
        self.device = rank_device(device, rank)
        self.group = _join(rank, size, method, self.device)

    def say(self, message: object) -> None:
        """Answer rank 0: what was loaded, or the error that kept it from being."""
        pickle.dump(message, self._output)
        self._output.flush()

    def _receive(self) -> Any:
        try:
            return pickle.load(sys.stdin.buffer)
        except EOFError:
            # Rank 0 has ended.
            sys.exit(0)

    def next_request(self) -> dict[str, Any]:
        """Sleep until rank 0 begins a request."""
        request: dict[str, Any] = self._receive()
        return request

    def agree(self, choice: _Choice) -> _Choice:
        agreed: _Choice = self._receive()
        return agreed


def _end_with(parent: int) -> None:
    """End this process when its parent has, whatever it waits for."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(_LOST_EXIT_CODE)
