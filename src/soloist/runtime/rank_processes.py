"""The processes of the other ranks, as rank 0 sees them: their words, their signs of life, and their end.

Owns the pipes, and the threads that hear them. What is lost is said once: by whoever rank 0 raises it to, or here where
rank 0 hangs in an exchange that will never end.
"""

import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from soloist.errors import RankLostError, SoloistError
from soloist.kernels.allreduce import TensorParallel

# How long rank 0 may take to get out of an exchange by itself once a rank is lost; with the time to see it, below 5 s.
_GRACE_S = 3.0
# A rank gives a sign of life this often, and is lost when none has come for so long: it was stopped, or hangs. Long,
# since a library may keep its other threads waiting.
BEAT_S = 0.5
_SILENT_S = 60.0
# Ranks that live, and do not get on with a step or a chunk for so long, wait for each other in vain.
_STALLED_S = 600.0
_INTERRUPTED_EXIT_CODE = 130


class RankProcesses:
    """Starts ranks 1 and up, hears them, and ends them.

    Args:
        size: ranks, rank 0 included.
        program: what Python runs as another rank, whose number is its argument.
    """

    def __init__(self, size: int, program: str) -> None:
        self.size = size
        # Why they cannot be used any more; None: they can.
        self.loss: SoloistError | None = None
        # What the exchanges of this rank go through, once there is something.
        self.group = TensorParallel()
        # What this rank does that may be an exchange with another, a new object each time; None: nothing.
        self._work: object | None = None
        self._num_sent, self._is_closing = 0, threading.Event()
        self._said: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
        # Looks of `_watch` since a rank was heard; of those that have been.
        self._silence: dict[int, int] = {}
        self._reasons: dict[int, str] = {}
        # -P: what lies in the folder that was called from is not imported, as it is not here. A session of their own: a
        # terminal's Ctrl-C is rank 0's to answer.
        command, pipe = [sys.executable, "-P", "-c", program], subprocess.PIPE
        self._processes = [
            subprocess.Popen([*command, str(rank)], stdin=pipe, stdout=pipe, start_new_session=True)
            for rank in range(1, size)
        ]
        self._threads: list[threading.Thread] = []
        for rank in range(1, size):
            self._start(self._hear, rank)
        self._start(self._watch)
        self._keyboard = self._listen_to_keyboard()

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do something beside what this rank does."""
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    @property
    def process_ids(self) -> list[int]:
        """Of ranks 1 and up."""
        return [process.pid for process in self._processes]

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Say that this rank may be in an exchange with the others inside the block."""
        before, self._work = self._work, object()
        try:
            yield
        finally:
            self._work = before

    def send(self, message: object) -> None:
        """Say something to every rank.

        Raises:
            SoloistError: a rank is lost.
        """
        if self.loss is not None:
            self.raise_lost()
        self._num_sent += 1
        for process in self._processes:
            assert process.stdin is not None
            try:
                pickle.dump(message, process.stdin)
                process.stdin.flush()
            except OSError:
                self.raise_lost()

    def receive(self, rank: int) -> Any:
        """Wait for what a rank says.

        Raises:
            SoloistError: it is lost; if it said why, its own error.
        """
        message = self._said[rank].get()
        if message is None:
            self._said[rank].put(None)
            self.raise_lost()
        return message

    def raise_lost(self) -> NoReturn:
        """Raise what was lost."""
        self.wait_for_loss()
        raise self.loss or RankLostError("a rank does not answer any more; load the model again")

    def wait_for_loss(self) -> None:
        """Wait a little: a rank's end and what it does to an exchange are not seen in this order."""
        deadline_s = time.monotonic() + 1.0
        while self.loss is None and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def begin_to_close(self) -> None:
        """Say that what ends from now on is no loss."""
        self._is_closing.set()

    def close(self) -> None:
        """End them."""
        self.begin_to_close()
        self._kill()
        for process in self._processes:
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        if self._keyboard is not None and threading.current_thread() is threading.main_thread():
            listening = signal.set_wakeup_fd(-1)
            if listening != self._keyboard.fileno():
                signal.set_wakeup_fd(listening)
            self._keyboard.close()
            self._keyboard = None
        # None of them may be under way when the interpreter ends; but one that hears nothing must not hold it up.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=1)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _hear(self, rank: int) -> None:
        """Take what one rank says until its end, in a thread."""
        process, error = self._processes[rank - 1], None
        assert process.stdout is not None
        with process.stdout, contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            while error is None:
                message = pickle.load(process.stdout)
                self._silence[rank] = 0
                if isinstance(message, SoloistError):
                    error = message
                elif message is not None:
                    self._said[rank].put(message)
        if error is None:
            # Its pipe ends before it does.
            code = process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            how = self._reasons.get(rank, how)
            error = RankLostError(f"rank {rank} of {self.size} {how}, and the model is lost with it: load it again")
        self._lose(error)
        self._said[rank].put(None)

    def _lose(self, error: SoloistError) -> None:
        """End what is left of the ranks, and rank 0 where it hangs."""
        if self._is_closing.is_set() or self.loss is not None:
            return
        self.loss = error
        self._kill()
        if self.group.mailboxes is not None:
            self._start(end_exchanges, self.group)
        self._start(self._end_if_stuck, error)

    def _end_if_stuck(self, error: SoloistError) -> None:
        """End this process if it is still in an exchange, which nothing else can break off."""
        if not self._is_closing.wait(_GRACE_S) and self._work is not None:
            print(f"soloist: {error}", file=sys.stderr, flush=True)
            os._exit(error.exit_code)

    def _watch(self) -> None:
        """End ranks that give no sign of life or do not get on, in a thread.

        Counted in looks, not by the clock: this process may have been stopped itself.
        """
        last: tuple[object | None, int] = (None, 0)
        stalled = 0
        while self.loss is None and not self._is_closing.wait(BEAT_S):
            now = (self._work, self._num_sent)
            stalled = stalled + 1 if self._work is not None and now == last else 0
            last = now
            for rank, process in enumerate(self._processes, 1):
                if rank in self._silence:
                    self._silence[rank] += 1
                if self._silence.get(rank, 0) * BEAT_S > _SILENT_S:
                    self._reasons[rank] = f"has given no sign of life for {_SILENT_S:g} s"
                elif stalled * BEAT_S > _STALLED_S:
                    self._reasons[rank] = f"and rank 0 have waited for each other for {_STALLED_S:g} s"
                else:
                    continue
                process.kill()

    def _listen_to_keyboard(self) -> socket.socket | None:
        """Have a second Ctrl-C within one exchange end this process: no Python runs in its main thread until then."""
        if threading.current_thread() is not threading.main_thread():
            return None
        ears, mouth = socket.socketpair()
        mouth.setblocking(False)
        before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        if before != -1:
            # Somebody else listens, who can do as much.
            signal.set_wakeup_fd(before)
            return None
        self._start(self._answer_keyboard, ears)
        return mouth

    def _answer_keyboard(self, ears: socket.socket) -> None:
        """Count presses within one piece of work, in a thread."""
        pressed_in = None
        with ears:
            while number := ears.recv(1):
                work = self._work
                if number[0] != signal.SIGINT or work is None:
                    continue
                if work is not pressed_in:
                    pressed_in = work
                elif not self._is_closing.wait(_GRACE_S) and self._work is work:
                    self._kill()
                    os._exit(_INTERRUPTED_EXIT_CODE)


def end_exchanges(group: TensorParallel) -> None:
    """End a GPU's exchanges with ranks that are gone: what waits in a step goes on with what is no number.

    The group cannot be used any more.
    """
    if group.mailboxes is not None:
        group.mailboxes.has_failed.fill_(1)
    if group.process_group is not None:
        # A prompt's sums. A device in error runs none, and says so here.
        with contextlib.suppress(RuntimeError):
            group.process_group.abort()
