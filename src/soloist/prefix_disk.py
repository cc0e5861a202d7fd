"""States of conversations as files, for a later process; within a budget, the least recently used leave first.

A file belongs to one model on one form of cache, which its folder's name says, and holds the token ids whole: a state
is used for exactly these. Files are safetensors; one that is damaged is deleted and counts as missing. Writing is done
by a thread of its own, and a file appears whole or not at all.
"""

import contextlib
import hashlib
import logging
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import soloist
from soloist.models.cache import Cache, Snapshot

logger = logging.getLogger("soloist.prefix")

_SUFFIX = ".safetensors"
_IDS = "token_ids"
# Of each file of a checkpoint, so much of its head and of its tail is looked at.
_PROBE_BYTES = 1 << 16
# What a state would add to one that is written already must be worth the writing: so many tokens, and such a share.
_MIN_NEW_TOKENS, _MIN_NEW_SHARE = 64, 0.05
# States that wait for the writing thread; more are not written.
_MAX_PENDING = 4


def model_fingerprint(checkpoint: Path, cache: Cache) -> str:
    """Name what a state depends on: the checkpoint's files, the form of the cache, this version.

    Args:
        checkpoint: a folder, or a file.
        cache: of the model, empty.
    """
    digest = hashlib.sha256(soloist.__version__.encode())
    assert int(cache.context_len) == 0
    for name, t in sorted(cache.snapshot().tensors.items()):
        digest.update(f"{name} {t.dtype} {list(t.shape)}\n".encode())
    files = [checkpoint] if checkpoint.is_file() else sorted(p for p in checkpoint.iterdir() if p.is_file())
    for path in files:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_PROBE_BYTES))
            file.seek(max(0, stat.st_size - _PROBE_BYTES))
            digest.update(file.read(_PROBE_BYTES))
    return digest.hexdigest()


@dataclass(kw_only=True, eq=False)
class DiskEntry:
    """One state in a file."""

    path: Path
    token_ids: list[int]
    num_bytes: int


class DiskPrefixes:
    """The files of one model; `close` it, or what is being written is lost.

    Args:
        folder: of all models; only its owner may read it.
        fingerprint: see `model_fingerprint`.
        max_bytes: of all files in `folder`.
    """

    def __init__(self, folder: Path, fingerprint: str, max_bytes: int) -> None:
        self._root, self._folder, self._max_bytes = folder, folder / fingerprint[:32], max_bytes
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._lock = threading.Lock()
        self._entries: list[DiskEntry] = []
        for path in self._folder.glob("*.tmp"):
            # What a process that was killed left behind.
            if not _is_running(int(path.name.split(".")[1])):
                path.unlink(missing_ok=True)
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if (entry := _read_entry(path)) is not None:
                self._entries.append(entry)
        # Times that everything was deleted; what was on its way then is not kept.
        self._num_clears = 0
        self._pending: queue.Queue[tuple[list[int], Snapshot, bool, int] | None] = queue.Queue(_MAX_PENDING)
        self._thread = threading.Thread(target=self._run, name="soloist-prefix-disk", daemon=True)
        self._thread.start()

    @property
    def entries(self) -> list[DiskEntry]:
        """What is there now; from any thread."""
        with self._lock:
            return list(self._entries)

    @property
    def num_bytes(self) -> int:
        """Size of this model's files."""
        return sum(entry.num_bytes for entry in self.entries)

    def is_worth(self, token_ids: Sequence[int], *, can_cut: bool) -> bool:
        """Say whether a state of these tokens adds enough to what is written; `can_cut` as in `put`."""
        least = max(_MIN_NEW_TOKENS, _MIN_NEW_SHARE * len(token_ids))
        longest = 0
        for entry in self.entries:
            num_held = len(entry.token_ids)
            if entry.token_ids == list(token_ids[:num_held]):
                longest = max(longest, num_held)
            elif can_cut and num_held > len(token_ids) and entry.token_ids[: len(token_ids)] == list(token_ids):
                return False
        return len(token_ids) - longest >= least

    def put(self, token_ids: Sequence[int], snapshot: Snapshot, *, can_cut: bool) -> None:
        """Have a state written; left out if the disk does not keep up.

        Args:
            token_ids: whose state it is.
            snapshot: on the host; not changed afterwards.
            can_cut: it stands for every beginning of its tokens, so shorter ones need no file of their own.
        """
        with contextlib.suppress(queue.Full):
            self._pending.put_nowait((list(token_ids), snapshot, can_cut, self._num_clears))

    def load(self, entry: DiskEntry) -> Snapshot | None:
        """Read a state; None if its file has gone or is damaged."""
        try:
            with safe_open(entry.path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys() if name != _IDS}  # noqa: SIM118
                is_same = file.get_tensor(_IDS).tolist() == entry.token_ids
            # The age by which files leave.
            os.utime(entry.path)
        except (OSError, SafetensorError) as error:
            logger.warning("a kept state cannot be read and is dropped: %s", error)
            is_same = False
        if not is_same:
            self._drop(entry)
            return None
        return Snapshot(context_len=len(entry.token_ids), tensors=tensors)

    def clear(self) -> None:
        """Delete this model's files."""
        with self._lock:
            self._num_clears += 1
        for entry in self.entries:
            self._drop(entry)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._pending.put(None)
        self._thread.join()

    def _drop(self, entry: DiskEntry) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._entries.remove(entry)
        with contextlib.suppress(OSError):
            entry.path.unlink()

    def _run(self) -> None:
        while (item := self._pending.get()) is not None:
            try:
                self._write(*item)
            except (OSError, SafetensorError) as error:
                logger.warning("a state could not be written: %s", error)

    def _write(self, token_ids: list[int], snapshot: Snapshot, can_cut: bool, num_clears: int) -> None:
        ids = torch.tensor(token_ids, dtype=torch.int32)  # (S,)
        num_bytes = snapshot.num_bytes + ids.nbytes
        if num_bytes > self._max_bytes:
            return
        name = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:32]
        path, unfinished = self._folder / f"{name}{_SUFFIX}", self._folder / f"{name}.{os.getpid()}.tmp"
        try:
            save_file({**{n: t.contiguous() for n, t in snapshot.tensors.items()}, _IDS: ids}, unfinished)
            with unfinished.open("rb+") as file:
                os.fsync(file.fileno())
            unfinished.chmod(0o600)
            entry = DiskEntry(path=path, token_ids=token_ids, num_bytes=unfinished.stat().st_size)
            with self._lock:
                if num_clears != self._num_clears:
                    return
                unfinished.replace(path)
                self._entries.append(entry)
        finally:
            unfinished.unlink(missing_ok=True)
        self._drop_replaced(entry, can_cut)
        self._make_room()

    def _drop_replaced(self, entry: DiskEntry, can_cut: bool) -> None:
        """Delete the files for which a new one stands too."""
        for old in self.entries:
            if old is entry:
                continue
            if old.path == entry.path:
                with self._lock:
                    self._entries.remove(old)
            elif can_cut and old.token_ids == entry.token_ids[: len(old.token_ids)]:
                self._drop(old)

    def _make_room(self) -> None:
        """Delete the oldest files of any model until the rest fits."""
        files = []
        for path in self._root.glob("*/*"):
            with contextlib.suppress(OSError):
                files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        excess = sum(size for _, size, _ in files) - self._max_bytes
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            excess -= size
            known = next((entry for entry in self.entries if entry.path == path), None)
            if known is not None:
                self._drop(known)
            else:
                path.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _read_entry(path: Path) -> DiskEntry | None:
    """Read which tokens a file is of; a damaged file is deleted."""
    try:
        with safe_open(path, "pt") as file:
            token_ids = file.get_tensor(_IDS).tolist()
        return DiskEntry(path=path, token_ids=token_ids, num_bytes=path.stat().st_size)
    except (OSError, SafetensorError) as error:
        logger.warning("a kept state cannot be read and is deleted: %s", error)
        path.unlink(missing_ok=True)
        return None
