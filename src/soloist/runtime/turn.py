"""Whose turn a GPU is: the engines of one process step there one after the other, whatever their threads and streams.

Kernels of a step tell each other what is done by counters that a device has once (`kernels.launch.arrival_counters`),
and the programs of its experts wait until all of them are there. Two steps at once would add up wrongly, or wait for
ever. Processes of their own need no such care: a GPU runs one of them at a time, unless its driver is told to mix them.
"""

import threading
from functools import cache

import torch


class Turn:
    """The right to step on a device, of one holder at a time.

    Args:
        device: where; on a CPU steps share nothing, and a turn is an engine's own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        # Where the last holder's work ends; None: there was none.
        self._ended: torch.cuda.Event | None = None

    def take(self) -> bool:
        """Take the turn; False: somebody has it. What is enqueued from now on runs behind what the last holder did."""
        if not self._lock.acquire(blocking=False):
            return False
        if self._ended is not None:
            torch.cuda.current_stream(self.device).wait_event(self._ended)
        return True

    def give_back(self) -> None:
        """Let others have it, from the stream on which the holder stepped; waits for nothing."""
        try:
            if self.device.type == "cuda":
                self._ended = torch.cuda.current_stream(self.device).record_event()
        finally:
            self._lock.release()


_MAKING = threading.Lock()


@cache
def _shared_turn(device: torch.device) -> Turn:
    return Turn(device)


def turn_of(device: torch.device) -> Turn:
    """Give the turn that all engines of a GPU share, by its number; of a CPU every engine has its own."""
    if device.type != "cuda":
        return Turn(device)
    # A cache alone may make two of them where two threads ask at once.
    with _MAKING:
        return _shared_turn(device)
