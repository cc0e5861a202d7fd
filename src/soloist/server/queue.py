"""One engine, one stream: requests wait in line, one at a time is worked on, and each can be cancelled at any moment.

Owns the thread that works. It knows nothing of models: a job is an iterator, and what it yields is handed to the event
loop that submitted it.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from soloist.server.failures import BusyError


class NeverBegun(Exception):
    """A job was cancelled while it waited in line."""


class Job:
    """One piece of work in the line; made by `WorkQueue.submit`.

    Args:
        queue: in whose line it is.
        work: gives the items; it is begun, and run, on the working thread.
        stop: asks running work to end soon; called from any thread.
        key: a newer job with the same key cancels this one. None: nothing does.
    """

    def __init__(
        self, queue: "WorkQueue", work: Callable[[], Iterator[Any]], stop: Callable[[], None], key: str | None
    ) -> None:
        self.key = key
        self._queue = queue
        self._work = work
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        # What the work has given and the reader has not taken; the reader waits for the future.
        self._items: deque[Any] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self.submitted_s = time.perf_counter()
        self.started_s: float | None = None
        self.is_cancelled = False
        # Whether a newer job with the same key is why.
        self.is_replaced = False

    @property
    def waited_s(self) -> float:
        """Time in line."""
        return (self.started_s or time.perf_counter()) - self.submitted_s

    def cancel(self) -> None:
        """End the work within one step, wherever it is; may be called from any thread, and more than once."""
        self.is_cancelled = True
        self._stop()
        if self._queue.leave(self):
            self.put(_End(NeverBegun()))

    def put(self, item: Any) -> None:
        """Hand something over to the waiting client; from the working thread."""
        self._queue.note_progress()
        # The loop is gone when the server is: nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, item)

    def _deliver(self, item: Any) -> None:
        self._items.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def items(self, *, silence_s: float | None = None) -> AsyncIterator[Any]:
        """Give what the work yields, in order, and raise what it raised.

        Args:
            silence_s: give None whenever nothing came for so long, by the wall clock. None: wait in silence.
        """
        while True:
            if not self._items:
                # Cheaper than asyncio's queue with a timeout, which makes a task for every item.
                self._arrival = self._loop.create_future()
                timer = None if silence_s is None else self._loop.call_later(silence_s, self._wake)
                try:
                    await self._arrival
                finally:
                    if timer is not None:
                        timer.cancel()
                if not self._items:
                    yield None
                continue
            item = self._items.popleft()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item

    def run(self) -> None:
        """Do the work; on the working thread."""
        self.started_s = time.perf_counter()
        error: BaseException | None = None
        try:
            for item in self._work():
                self.put(item)
        # The thread outlives whatever one request does; the client is told.
        except Exception as caught:  # noqa: BLE001
            error = caught
        self.put(_End(error))


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class WorkQueue:
    """The line of jobs and the thread that works them off, in order of arrival.

    Args:
        max_waiting: jobs that may wait behind the running one.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        # When the running job last got on.
        self._progress_s = time.monotonic()
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="soloist-engine", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        """0 or 1."""
        return int(self._running is not None)

    def note_progress(self) -> None:
        """Say that the running job gets on; from the working thread."""
        self._progress_s = time.monotonic()

    @property
    def silent_s(self) -> float:
        """For how long the running job has not got on; 0 where nothing runs."""
        return time.monotonic() - self._progress_s if self._running is not None else 0.0

    @property
    def num_waiting(self) -> int:
        """Jobs in line."""
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        """Whether the working thread runs."""
        return self._thread.is_alive() and not self._is_closed

    def submit(
        self, work: Callable[[], Iterator[Any]], stop: Callable[[], None] = lambda: None, *, key: str | None = None
    ) -> Job:
        """Put work in line; from the event loop that will read its items.

        Raises:
            BusyError: too many jobs wait already.
        """
        job = Job(self, work, stop, key)
        with self._changed:
            replaced = [other for other in (self._running, *self._waiting) if other and key and other.key == key]
            if self.num_running + len(self._waiting) - len(replaced) > self._max_waiting:
                raise BusyError(f"{len(self._waiting)} requests are waiting already; try again later")
            self._waiting.append(job)
            self._changed.notify_all()
        for other in replaced:
            other.is_replaced = True
            other.cancel()
        return job

    def leave(self, job: Job) -> bool:
        """Take a job out of the line; says whether it was there."""
        with self._changed:
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
            return True

    def close(self) -> None:
        """Cancel everything and end the thread."""
        with self._changed:
            self._is_closed = True
            jobs = [job for job in (self._running, *self._waiting) if job]
            self._changed.notify_all()
        for job in jobs:
            job.cancel()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                self.note_progress()
                self._running = self._waiting.popleft()
            try:
                self._running.run()
            finally:
                self._running = None
