"""Ctrl-C while an answer streams: the first asks the answer to stop, the second leaves at once."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupt:
    """While entered, Ctrl-C calls `on_press` instead of raising; a second press raises `KeyboardInterrupt`.

    Args:
        on_press: called from the signal handler.
    """

    def __init__(self, on_press: Callable[[], None]) -> None:
        self._on_press = on_press
        self._previous: Any = None
        self._was_pressed = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _press(self, _signal_number: int, _frame: FrameType | None) -> None:
        if self._was_pressed:
            raise KeyboardInterrupt
        self._was_pressed = True
        self._on_press()
