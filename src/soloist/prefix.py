"""Reuse of what earlier requests have read: the state in the cache, and copies of states that left it.

A state is used again for an exact prefix of token ids only, and only at a position where every layer's state exists:
rows of attention can be cut back to any length, a recurrent state and a drafter's cannot. What is in the cache after a
request costs nothing to keep; it is copied when a request comes that would overwrite it. All calls are made by whoever
holds the engine.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from soloist.models.cache import Cache, Snapshot
from soloist.prefix_disk import DiskPrefixes
from soloist.spec.drafter import Drafter

# A state that fewer tokens than this would bring back is not worth a copy.
MIN_WORTH_TOKENS = 16
# Tokens of the kept conversation shown where a prompt leaves it.
_SHOWN_TOKENS = 12


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """How much of a prompt was in the cache or the store, and why it was not more."""

    # Tokens of the prompt that were not read again.
    num_tokens: int
    # In words, for a log.
    reason: str
    # Tokens the prompt has in common with the kept conversation that it follows furthest.
    num_common: int = 0
    # What that conversation goes on with; empty: the prompt contains it whole, or there is none.
    kept_ids: tuple[int, ...] = ()


@dataclass(kw_only=True)
class _Entry:
    token_ids: list[int]
    snapshot: Snapshot
    # None: the drafter has no state.
    drafter: object
    is_on_device: bool
    last_used: int


@dataclass(frozen=True, kw_only=True)
class PrefixCounts:
    """What the store has seen and holds."""

    num_lookups: int
    num_lookup_tokens: int
    num_reused_tokens: int
    num_entries: int
    device_bytes: int
    host_bytes: int
    # Of files.
    num_files: int
    disk_bytes: int


@dataclass(kw_only=True)
class PrefixStore:
    """Keeps states of several conversations, the least recently used leave first.

    Args:
        device_bytes: memory for copies on the model's device; what has no room there moves to the host. On a CPU it is
            not used.
        host_bytes: memory for copies on the host. 0 with 0 of the device's: only the state in the cache is used again.
        disk: files for a later process. None: what is kept ends with this one. The state of a drafter is not written:
            such states are kept in memory only.
    """

    device_bytes: int = 0
    host_bytes: int = 0
    disk: DiskPrefixes | None = None
    # Tokens of which the cache holds the state of some first ones: its own length says how many.
    _live_ids: list[int] = field(default_factory=list, init=False)
    _entries: list[_Entry] = field(default_factory=list, init=False)
    _clock: "itertools.count[int]" = field(default_factory=itertools.count, init=False)
    _num_lookups: int = field(default=0, init=False)
    _num_lookup_tokens: int = field(default=0, init=False)
    _num_reused_tokens: int = field(default=0, init=False)

    @property
    def counts(self) -> PrefixCounts:
        """What the store has seen and holds; may be read from any thread."""
        entries = list(self._entries)
        return PrefixCounts(
            num_lookups=self._num_lookups,
            num_lookup_tokens=self._num_lookup_tokens,
            num_reused_tokens=self._num_reused_tokens,
            num_entries=len(entries),
            device_bytes=sum(entry.snapshot.num_bytes for entry in entries if entry.is_on_device),
            host_bytes=sum(entry.snapshot.num_bytes for entry in entries if not entry.is_on_device),
            num_files=0 if self.disk is None else len(self.disk.entries),
            disk_bytes=0 if self.disk is None else self.disk.num_bytes,
        )

    def clear(self) -> None:
        """Forget everything, the state in the cache and files too."""
        self._live_ids = []
        self._entries.clear()
        if self.disk is not None:
            self.disk.clear()

    def forget_live(self) -> None:
        """Forget the state in the cache."""
        self._live_ids = []

    def begin(self, prompt_ids: Sequence[int], cache: Cache, drafter: Drafter) -> tuple[Reuse, "Restore"]:
        """Find the longest usable state for a prompt, and copy the cache's own before it is overwritten.

        Args:
            prompt_ids: the whole prompt. Its last token is pending and never part of a state.
            cache: of the target.
            drafter: before its `begin`.

        Returns:
            What was found, and what sets cache and drafter to it: to be called after the drafter's `begin`.
        """
        wanted = list(prompt_ids[:-1])
        drafter_state = drafter.snapshot()
        can_cut = cache.can_rollback and drafter_state is None
        live = self._take_live(cache, can_cut)
        if drafter_state is not None and not drafter.is_following:
            # The request went on without the drafter: what the cache holds has no state of it.
            live = []
        num_common = _common(live, wanted)
        best, best_len = None, _usable(num_common, len(live), can_cut)
        nearest, live_len = live, best_len
        for entry in self._entries:
            common = _common(entry.token_ids, wanted)
            if common > num_common:
                num_common, nearest = common, entry.token_ids
            if (usable := _usable(common, len(entry.token_ids), can_cut)) > best_len:
                best, best_len = entry, usable
        if self.disk is not None and drafter_state is None:
            found = self._from_disk(wanted, best_len + MIN_WORTH_TOKENS, can_cut)
            if found is not None:
                best, best_len = found, _usable(_common(found.token_ids, wanted), len(found.token_ids), can_cut)
                if best_len > num_common:
                    num_common, nearest = best_len, found.token_ids
        # What the request will overwrite is kept, if it is more than what the prompt shares with it.
        if len(live) - (live_len if best is None else 0) >= MIN_WORTH_TOKENS:
            self._add(live, cache, drafter_state, can_cut)
        if best is not None:
            best.last_used = next(self._clock)
        self._num_lookups += 1
        self._num_lookup_tokens += len(prompt_ids)
        self._num_reused_tokens += best_len
        reuse = Reuse(
            num_tokens=best_len,
            reason=_reason(best_len, num_common, len(nearest), len(wanted), bool(live or self._entries)),
            num_common=num_common,
            kept_ids=tuple(nearest[num_common : num_common + _SHOWN_TOKENS]) if num_common < len(wanted) else (),
        )
        return reuse, Restore(cache, drafter, best, drafter_state, best_len, is_exact=not can_cut)

    def end(self, token_ids: list[int], cache: Cache, drafter: Drafter) -> None:
        """Say of which tokens the cache holds the first ones, once a request has ended well; a file gets them too."""
        self._live_ids = token_ids
        can_cut = cache.can_rollback
        if self.disk is None or drafter.snapshot() is not None or not self.disk.is_worth(token_ids, can_cut=can_cut):
            return
        live = self._live_ids = self._take_live(cache, can_cut)
        if self.disk.is_worth(live, can_cut=can_cut):
            self.disk.put(live, cache.snapshot().to("cpu"), can_cut=can_cut)

    def _from_disk(self, wanted: list[int], least: int, can_cut: bool) -> _Entry | None:
        """Read the longest state in files that is usable for a prompt, if it has at least so many tokens of it."""
        assert self.disk is not None
        lengths = [
            (_usable(_common(e.token_ids, wanted), len(e.token_ids), can_cut), e) for e in self.disk.entries
        ]  # fmt: skip
        for num_usable, entry in sorted(lengths, key=lambda pair: -pair[0]):
            if num_usable < least:
                return None
            snapshot = self.disk.load(entry)
            if snapshot is not None:
                return _Entry(
                    token_ids=entry.token_ids,
                    snapshot=snapshot,
                    drafter=None,
                    is_on_device=False,
                    last_used=next(self._clock),
                )
        return None

    def keep(self, token_ids: Sequence[int], cache: Cache, drafter: Drafter) -> None:
        """Copy the state of `token_ids`, which the cache holds now: a place to which later prompts may return."""
        drafter_state = drafter.snapshot()
        self._add(list(token_ids), cache, drafter_state, can_cut=False)
        if self.disk is not None and drafter_state is None and self.disk.is_worth(token_ids, can_cut=False):
            self.disk.put(token_ids, cache.snapshot().to("cpu"), can_cut=False)

    def _take_live(self, cache: Cache, can_cut: bool) -> list[int]:
        """Give the tokens whose state the cache holds, and forget them: the request may fail halfway."""
        num_held, live = int(cache.context_len), self._live_ids
        self._live_ids = []
        if num_held > len(live):
            # Steps that were enqueued ahead may have gone beyond what the host saw, and a drafter's state with them.
            if not can_cut:
                return []
            cache.rollback(len(live))
        return live[:num_held]

    def _add(self, token_ids: list[int], cache: Cache, drafter_state: object, can_cut: bool) -> None:
        for entry in self._entries:
            common = _common(entry.token_ids, token_ids)
            if common == len(token_ids) and (can_cut or len(entry.token_ids) == common):
                entry.last_used = next(self._clock)
                return
        if can_cut:
            # One that goes on where they end can be cut back to each of them.
            self._entries = [e for e in self._entries if _common(e.token_ids, token_ids) < len(e.token_ids)]
        device = cache.context_len.device
        snapshot = cache.snapshot()
        fits_device = device.type != "cpu" and snapshot.num_bytes <= self.device_bytes
        if not fits_device and snapshot.num_bytes > self.host_bytes:
            return
        self._entries.append(
            _Entry(
                token_ids=token_ids,
                snapshot=snapshot if fits_device else snapshot.to("cpu"),
                drafter=drafter_state,
                is_on_device=fits_device,
                last_used=next(self._clock),
            )
        )
        self._make_room()

    def _make_room(self) -> None:
        """Move the oldest copies from the device to the host, and drop the oldest from there."""
        by_age = sorted(self._entries, key=lambda entry: entry.last_used)
        for entry in by_age:
            if self.counts.device_bytes <= self.device_bytes:
                break
            if entry.is_on_device:
                entry.snapshot, entry.is_on_device = entry.snapshot.to("cpu"), False
        for entry in by_age:
            if self.counts.host_bytes <= self.host_bytes:
                break
            if not entry.is_on_device:
                self._entries.remove(entry)


@dataclass(frozen=True)
class Restore:
    """Sets cache and drafter to the state that a prompt begins with."""

    cache: Cache
    drafter: Drafter
    # None: the state is in the cache already.
    entry: _Entry | None
    drafter_state: object
    num_tokens: int
    # No state can be cut back, so there is a reason to keep several along a prompt.
    is_exact: bool

    def __call__(self) -> None:
        """Do it; after `Drafter.begin`, before the rest of the prompt is read."""
        if self.num_tokens == 0:
            self.cache.reset()
            return
        state = self.drafter_state
        if self.entry is not None:
            self.cache.restore(self.entry.snapshot)
            state = self.entry.drafter
        if self.cache.can_rollback:
            self.cache.rollback(self.num_tokens)
        if state is None:
            self.drafter.skip(self.num_tokens)
        else:
            self.drafter.restore(state)


def _common(first: list[int], second: list[int]) -> int:
    """Count the leading tokens that two sequences share; by halving, as slices are compared in C."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _usable(num_common: int, num_held: int, can_cut: bool) -> int:
    return num_common if can_cut or num_common == num_held else 0


def _reason(num_reused: int, num_common: int, num_nearest: int, num_wanted: int, is_any: bool) -> str:
    if num_wanted == 0:
        return "the prompt is one token, and the last one is always read"
    if num_reused == num_wanted:
        return "all of the prompt was kept"
    if not is_any:
        return "no conversation is kept yet"
    if num_common == num_nearest:
        return "the prompt goes on where a kept conversation ends"
    where = f"the prompt leaves the nearest kept conversation at token {num_common}"
    if num_reused < num_common:
        return f"{where}; the nearest earlier state that is kept is at token {num_reused}"
    return where
