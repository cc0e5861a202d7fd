"""Feed-forward blocks of the hybrid models: the dense SwiGLU and the mixture of experts.

Owns the weights of one block with the norm before it and the residual around it. Routing and the experts' arithmetic
are in `kernels`; which layer has which block, and what the tensors are called, is the architecture's.
"""

from dataclasses import dataclass

import torch

from soloist.errors import UnsupportedError
from soloist.kernels.allreduce import all_reduce_add, linear_all_reduce
from soloist.kernels.linear import norm_swiglu
from soloist.kernels.moe import RouterSettings, moe
from soloist.models.weights import Part, Weight, WeightSource, columns, rows


def _post_norm(weights: WeightSource, layer: str, hidden_size: int) -> torch.Tensor:
    """Read the norm between the mixer and the feed-forward block: (D)."""
    return weights.tensor(Part(name=f"{layer}post_attention_layernorm.weight", shape=(hidden_size,)))


class DenseFeedForward:
    """One dense block: `x + down(silu(gate(h)) * up(h))` with `h = rms_norm(x)`.

    Args:
        weights: the source.
        layer: prefix of the decoder layer's tensors, with its dot.
        hidden_size: D.
        intermediate_size: F.
        eps: of the norm.
    """

    def __init__(
        self, weights: WeightSource, layer: str, *, hidden_size: int, intermediate_size: int, eps: float
    ) -> None:
        D, F = hidden_size, intermediate_size
        self.eps, self.group = eps, weights.group
        self.norm = _post_norm(weights, layer, D)
        self.gate_up = weights.linear(
            Part(name=f"{layer}mlp.gate_proj.weight", shape=(F, D), split=rows(F)),
            Part(name=f"{layer}mlp.up_proj.weight", shape=(F, D), split=rows(F)),
        )
        self.down = weights.linear(Part(name=f"{layer}mlp.down_proj.weight", shape=(D, F), split=columns(F)))

    def __call__(self, x: torch.Tensor, width: torch.Tensor | None) -> torch.Tensor:
        """Transform each row of the residual stream (T, D) and add the result; `width` is not used."""
        h = norm_swiglu(x, self.norm, self.eps, self.gate_up)  # (T, F)
        return linear_all_reduce(h, self.down, x, self.group)


@dataclass(frozen=True, kw_only=True)
class MoESettings:
    """What the mixture-of-experts blocks of one model have in common."""

    hidden_size: int
    num_experts: int
    # F of one routed expert.
    intermediate_size: int
    # F of the shared expert; None: there is none.
    shared_intermediate_size: int | None
    router: RouterSettings
    # Prefix of the block's tensors within the layer, with its dot.
    module: str
    # Name of the fp32 bias that takes part in choosing experts, behind `gate.`.
    expert_bias: str
    # Names of an expert's maps: gate, up, down.
    expert_maps: tuple[str, str, str]
    # Of the norm before the block.
    eps: float

    def __post_init__(self) -> None:
        kept = self.router.topk_group * (self.num_experts // self.router.n_group)
        if kept < self.router.num_experts_per_tok:
            raise UnsupportedError(
                f"config.json: a token takes {self.router.num_experts_per_tok} experts of {kept}, those of"
                f" {self.router.topk_group} of {self.router.n_group} groups"
            )


class MixtureOfExperts:
    """One sparse block: `x + routed(h) + shared(h)` with `h = rms_norm(x)`.

    Args:
        weights: the source.
        layer: prefix of the decoder layer's tensors, with its dot.
        settings: sizes and names.
        limit: of the routed experts' clamped SwiGLU; None: not clamped.
        shared_limit: the same for the shared expert.
    """

    def __init__(
        self,
        weights: WeightSource,
        layer: str,
        settings: MoESettings,
        *,
        limit: float | None = None,
        shared_limit: float | None = None,
    ) -> None:
        s, at = settings, layer + settings.module
        D, E, F = s.hidden_size, s.num_experts, s.intermediate_size
        self.settings, self.limit, self.shared_limit, self.group = s, limit, shared_limit, weights.group
        self.norm = _post_norm(weights, layer, D)
        # Never packed: a near-tie decided otherwise sends a token to another expert.
        self.router = weights.tensor(Part(name=f"{at}gate.weight", shape=(E, D)), init="normal")
        bias = Part(name=f"{at}gate.{s.expert_bias}", shape=(E,))
        self.expert_bias = weights.tensor(bias, dtype=torch.float32, init="zeros")

        gate, up, down = (f"{at}experts.{{e}}.{name}.weight" for name in s.expert_maps)
        # Every rank has a slice of every expert: whichever are chosen, the ranks read as much.
        parts = (Part(name=name, shape=(F, D), split=rows(F)) for name in (gate, up))
        self.gate_up = weights.experts(*parts, num_experts=E)  # (E, 2F, D)
        # With inputs as rows in memory, what a step reads at a time is as long on any number of ranks.
        down_part = Part(name=down, shape=(D, F), split=columns(F))
        self.down = weights.experts(down_part, num_experts=E, is_transposed=True)  # (E, D, F)

        self.shared_gate_up, self.shared_down = None, None
        if s.shared_intermediate_size is not None:
            Fs, shared = s.shared_intermediate_size, f"{at}shared_experts."
            # Read as experts, of which there is one: like them it is dense and its rows are [gate up].
            parts = (Part(name=f"{shared}{n}_proj.weight", shape=(Fs, D), split=rows(Fs)) for n in ("gate", "up"))
            self.shared_gate_up = weights.experts(*parts, num_experts=1)[0]
            shared_down = Part(name=f"{shared}down_proj.weight", shape=(D, Fs), split=columns(Fs))
            self.shared_down = weights.experts(shared_down, num_experts=1, is_transposed=True)[0]
        # What is read behind the block: the model's to say.
        self.next_weight: Weight | None = None

    def __call__(self, x: torch.Tensor, width: torch.Tensor | None) -> torch.Tensor:
        """Transform each row of the residual stream (T, D) and add the result; rows at or past `width` are padding."""
        is_alone = self.group.size == 1
        y = moe(
            x,
            self.norm,
            self.settings.eps,
            self.router,
            self.expert_bias,
            self.gate_up,
            self.down,
            self.shared_gate_up,
            self.shared_down,
            self.settings.router,
            limit=self.limit,
            shared_limit=self.shared_limit,
            width=width,
            adds_residual=is_alone,
            next_weight=self.next_weight,
        )
        return y if is_alone else all_reduce_add(y, x, self.group)


FeedForward = DenseFeedForward | MixtureOfExperts
