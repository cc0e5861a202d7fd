"""The state of one sequence: attention rows, latents and recurrent states, for all layers of one model.

Owns the only words that move state: `commit`, `rollback`, `snapshot`, `restore`, `reset`. Row 0 of a step is the
pending token (emitted, in no cache yet), rows 1..T-1 are drafts; a commit keeps the first `num_rows` rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch

from soloist.errors import UnsupportedError
from soloist.kernels.kda import kda_commit
from soloist.kernels.kda_inputs import KdaCache, KdaKept


class StepKind(Enum):
    """How a forward pass treats the recurrent state."""

    # Any number of rows; every row is part of the sequence; state is written.
    PREFILL = "prefill"
    # One row, part of the sequence; state is written.
    DECODE = "decode"
    # 1..max_width rows of which some will be committed later; recurrent state is frozen.
    VERIFY = "verify"


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of the grouped-query attention layers. Can roll back to any earlier length."""

    # (L, G, S, K), the model's dtype; keys after rotary.
    k: torch.Tensor
    # (L, G, S, V), the model's dtype.
    v: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class LatentCache:
    """Latents of the MLA layers, shared by all heads. Can roll back to any earlier length."""

    # (L, S, R+P), the model's dtype: normalised latent, then the rotated shared key.
    latent: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class RecurrentState:
    """State of the KDA layers. It cannot be truncated: only committed forward, or restored from a snapshot."""

    # (L, H, V, K) fp32, K contiguous.
    state: torch.Tensor
    # (L, 3, C) the model's dtype: last three raw inputs of the short convolution, oldest first; C = H*(K+K+V), [q k v].
    conv: torch.Tensor
    # What a verify step leaves for its commit, T_max = max_width rows:
    # (L, T_max, H, K) fp32: normalised keys.
    verify_k: torch.Tensor
    # (L, T_max, H, V) fp32: new values u of the recurrence.
    verify_u: torch.Tensor
    # (L, T_max, H, K) fp32: log decay g, not cumulated.
    verify_g: torch.Tensor
    # (L, T_max, C) the model's dtype: raw convolution inputs.
    verify_conv: torch.Tensor

    @property
    def kept(self) -> KdaKept:
        """What a verify step leaves, of all layers."""
        return KdaKept(self.verify_k, self.verify_u, self.verify_g, self.verify_conv)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy of a cache at one context length, on the device it was taken on or wherever `to` moved it."""

    context_len: int
    # Copies of the rows [0, context_len) of each attention tensor and of the whole recurrent tensors, by field name.
    tensors: dict[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Memory the copies take, in bytes."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def to(self, device: torch.device | str) -> "Snapshot":
        """Copy the snapshot to another device."""
        return Snapshot(context_len=self.context_len, tensors={k: t.to(device) for k, t in self.tensors.items()})


class Cache:
    """All state of one sequence of one model, allocated once."""

    def __init__(
        self,
        *,
        max_context_len: int,
        max_width: int,
        device: torch.device,
        kv: KVCache | None = None,
        latent: LatentCache | None = None,
        recurrent: RecurrentState | None = None,
    ) -> None:
        self.max_context_len = max_context_len
        self.max_width = max_width
        self.kv = kv
        self.latent = latent
        self.recurrent = recurrent
        # () int32 on the device: tokens in the cache.
        self.context_len = torch.zeros((), dtype=torch.int32, device=device)
        # The same number on the host, inside `known_len`; None: whoever needs it there asks the device.
        self.host_len: int | None = None

    @contextmanager
    def known_len(self, context_len: int) -> Iterator[None]:
        """Say what `context_len` is, for passes inside the block that would have to wait for the device to tell."""
        self.host_len = context_len
        try:
            yield
        finally:
            self.host_len = None

    @property
    def can_rollback(self) -> bool:
        """Whether `rollback` works: a cache with recurrent state cannot be truncated."""
        return self.recurrent is None

    def reset(self) -> None:
        """Forget the sequence."""
        self.context_len.zero_()
        if self.recurrent is not None:
            self.recurrent.state.zero_()
            self.recurrent.conv.zero_()

    def commit(self, num_rows: torch.Tensor | int, kind: StepKind) -> None:
        """Advance the sequence by the first `num_rows` rows of the last forward pass, which was of this `kind`.

        Args:
            num_rows: () int32 on the device, or an int; for PREFILL and DECODE it is the number of rows of the pass.
            kind: after VERIFY the recurrent state of every layer is advanced, in one launch; after the others it
                already is.
        """
        if kind is StepKind.VERIFY and self.recurrent is not None:
            if isinstance(num_rows, int):
                num_rows = torch.tensor(num_rows, dtype=torch.int32, device=self.context_len.device)
            cache = KdaCache(self.recurrent.state, self.recurrent.conv)
            kda_commit(cache, self.recurrent.kept, num_rows)
        self.context_len += num_rows

    def rollback(self, context_len: int) -> None:
        """Cut the sequence back to `context_len` tokens.

        Raises:
            UnsupportedError: the cache holds recurrent state; use `snapshot` and `restore`.
        """
        if not self.can_rollback:
            raise UnsupportedError("a recurrent state cannot be rolled back: take a snapshot before, and restore it")
        assert 0 <= context_len <= int(self.context_len)
        self.context_len.fill_(context_len)

    def _row_tensors(self) -> dict[str, torch.Tensor]:
        """Attention tensors by name, each with the cached positions on its second-to-last axis."""
        tensors: dict[str, torch.Tensor] = {}
        if self.kv is not None:
            tensors |= {"k": self.kv.k, "v": self.kv.v}
        if self.latent is not None:
            tensors["latent"] = self.latent.latent
        return tensors

    def _state_tensors(self) -> dict[str, torch.Tensor]:
        """Recurrent tensors by name."""
        return {} if self.recurrent is None else {"state": self.recurrent.state, "conv": self.recurrent.conv}

    def snapshot(self) -> Snapshot:
        """Copy the sequence's state; reads `context_len` from the device, so never call it inside a decode loop."""
        context_len = int(self.context_len)
        tensors = {name: t[..., :context_len, :].clone() for name, t in self._row_tensors().items()}
        tensors |= {name: t.clone() for name, t in self._state_tensors().items()}
        return Snapshot(context_len=context_len, tensors=tensors)

    def restore(self, snapshot: Snapshot) -> None:
        """Set the sequence to a snapshot taken from a cache of the same model."""
        assert snapshot.context_len <= self.max_context_len
        for name, t in self._row_tensors().items():
            t[..., : snapshot.context_len, :].copy_(snapshot.tensors[name])
        for name, t in self._state_tensors().items():
            t.copy_(snapshot.tensors[name])
        self.context_len.fill_(snapshot.context_len)
