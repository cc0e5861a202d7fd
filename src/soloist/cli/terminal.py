"""What is shown beside an answer, all of it on stderr: dim lines, and bars while something takes long."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

# What is over sooner needs no bar.
_PATIENCE_S = 0.5


def print_dim(text: str) -> None:
    """Write a line to stderr, dim where that is a terminal and NO_COLOR is not set."""
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(text, style="dim")


class Bar:
    """A progress bar that shows itself after half a second, on a terminal only, and leaves no trace.

    Call it with (done, total); use it as a context. Once full it is gone, and another one may show itself.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._start_s = time.perf_counter()
        self._progress: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        if done >= total:
            self._stop()
            return
        if self._progress is None:
            if not sys.stderr.isatty() or time.perf_counter() - self._start_s < _PATIENCE_S:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.start()
            self._progress.add_task(self._title, total=total)
        self._progress.update(self._progress.task_ids[0], completed=done, total=total)

    def retitle(self, title: str) -> None:
        """Say something else before the bar from now on."""
        self._title = title
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=title)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
