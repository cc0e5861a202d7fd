"""What one layer of Kimi Delta Attention is given and keeps; `kernels/kda.py` has the equations and the letters."""

from typing import NamedTuple

import torch


class KdaRows(NamedTuple):
    """Raw projections of T tokens, of one dtype; rows may be strided."""

    # (T, C): [q k v], C = H*(K+K+V), head by head within each.
    qkv: torch.Tensor
    # (T, H*K): of the decay.
    f: torch.Tensor
    # (T, H*V): of the output.
    gate: torch.Tensor
    # (T, H): write strength.
    b: torch.Tensor


class KdaWeights(NamedTuple):
    """Weights of a layer."""

    # (C, 4): taps, oldest input first; the rows' dtype, in a prompt and on a CPU also fp32.
    conv_w: torch.Tensor
    # (H) fp32.
    A_log: torch.Tensor
    # (H*K) fp32.
    dt_bias: torch.Tensor
    # (V): of the output norm; the rows' dtype, in a prompt and on a CPU also fp32.
    o_norm: torch.Tensor
    # Of the output norm.
    eps: float
    # Of the log decay, below 0; None selects the softplus law.
    lower_bound: float | None

    @property
    def num_heads(self) -> int:
        """H."""
        return self.A_log.shape[0]


class KdaCache(NamedTuple):
    """What a layer carries from step to step. The commit takes all layers at once, on a first axis L."""

    # (H, V, K) fp32, K contiguous.
    state: torch.Tensor
    # (3, C): the last three raw rows, oldest first, in the rows' dtype.
    conv: torch.Tensor


class KdaKept(NamedTuple):
    """What a verification keeps for its commit, T_max rows; all layers at once on a first axis L."""

    # (T_max, H, K) fp32: normalised keys.
    k: torch.Tensor
    # (T_max, H, V) fp32: new values.
    u: torch.Tensor
    # (T_max, H, K) fp32: log decays, not cumulated.
    g: torch.Tensor
    # (T_max, C): raw rows in the rows' dtype.
    conv: torch.Tensor
