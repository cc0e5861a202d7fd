"""What one layer of multi-head latent attention is given; `kernels/mla.py` has the equations and the letters."""

from typing import NamedTuple

import torch


class MlaRows(NamedTuple):
    """Raw projections of T tokens, of one dtype; rows may be strided."""

    # (T, H*(Kn+P)): per head Kn dims without, then P with rotary.
    q: torch.Tensor
    # (T, R+P): raw latent, then the raw shared key.
    kv: torch.Tensor
    # (T, H): before its sigmoid, or None.
    gate: torch.Tensor | None


class MlaWeights(NamedTuple):
    """Weights and sizes of a layer."""

    # (R): of the latent's norm; the rows' dtype or fp32.
    kv_norm: torch.Tensor
    # Of that norm.
    eps: float
    # (H*(Kn+V), R): per head Kn key rows, then V value rows.
    w_kv_b: torch.Tensor
    # H.
    num_heads: int
    # V.
    v_head_dim: int
    # Of the scores, (Kn+P)^-0.5 times what YaRN adds.
    scale: float

    @property
    def latent_rank(self) -> int:
        """R."""
        return self.kv_norm.shape[0]
