"""Mixture of experts: sigmoid router with groups and a selection bias, clamped SwiGLU experts, shared expert, residual.

Equations, per token, h = rms_norm(x):

    s    = sigmoid(router_weight h)                                          (E)
    r    = s + expert_bias                          selects only
    kept = the topk_group groups of experts with the largest (sum of their two largest r)
    A    = the num_experts_per_tok experts of kept groups with the largest r
    w_e  = routed_scaling_factor * s_e / (sum_A s + 1e-20)
    out  = x + shared(h) + sum_A w_e expert_e(h)

    expert(h) = down a,  [gate, up] = gate_up h
    a         = min(silu(gate), limit) * clamp(up, -limit, limit)            without limit: silu(gate) * up

Among equals the lowest group, then the lowest expert wins. Rounding: h and a to the model's dtype, as inputs of
products; the router's logits and everything behind a are fp32, summed from x over the shared expert to the chosen
experts in ascending order, and rounded once. A GPU's step sums in an order of its own (`moe_step_cuda.py`), and its
router takes x * norm_weight, rounded, and scales the sum.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from soloist.errors import UnsupportedError
from soloist.kernels.check import FLOATS, expect, use_reference
from soloist.kernels.launch import HAS_TRITON, has_fused_experts
from soloist.kernels.linear import linear, norm_linear, norm_swiglu
from soloist.kernels.norm import rms_norm, rms_norm_ref

if HAS_TRITON:
    from soloist.kernels import moe_grouped_triton, moe_route_triton, moe_step_cuda


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """How many experts a token takes, from how many groups, and the weight they share."""

    # Experts a token goes through (A).
    num_experts_per_tok: int
    # Equal contiguous groups the experts are cut into; 1 turns group selection off.
    n_group: int
    # Groups a token may choose from, 1..n_group.
    topk_group: int
    # The sum of a token's expert weights.
    routed_scaling_factor: float

    def __post_init__(self) -> None:
        if not 1 <= self.topk_group <= self.n_group:
            raise UnsupportedError(f"topk_group is {self.topk_group}; allowed are 1..n_group = 1..{self.n_group}")
        if self.num_experts_per_tok < 1:
            raise UnsupportedError(f"num_experts_per_tok is {self.num_experts_per_tok}; allowed are 1 and more")


def _top(x: torch.Tensor, count: int) -> torch.Tensor:
    """Give the places of the `count` largest of the last axis, the lowest place first among equals (topk does not)."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def route_ref(logits: torch.Tensor, bias: torch.Tensor, settings: RouterSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts and their weights; the module's docstring has the equations.

    Args:
        logits: (T, E) fp32.
        bias: (E) fp32, added for the selection only.
        settings: E is divisible by its n_group, and the kept groups hold at least num_experts_per_tok experts.

    Returns:
        Experts (T, A) int64, best r first, and their weights (T, A) fp32.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2; losing groups masked with -inf as in Ling's own code.
    """
    T, E = logits.shape
    scores = torch.sigmoid(logits)  # (T, E)
    biased = scores + bias
    if settings.n_group > 1:
        groups = biased.view(T, settings.n_group, E // settings.n_group)  # (T, n_group, E / n_group)
        group_scores = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)  # (T, n_group)
        is_lost = torch.ones_like(group_scores, dtype=torch.bool)
        is_lost.scatter_(1, _top(group_scores, settings.topk_group), False)
        # Not 0: a biased score may be negative, and an expert of a losing group would win.
        biased = groups.masked_fill(is_lost[..., None], -torch.inf).view(T, E)
    experts = _top(biased, settings.num_experts_per_tok)  # (T, A)
    weights = scores.gather(1, experts)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * settings.routed_scaling_factor
    return experts, weights


def _feed_forward(h: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, limit: float | None) -> torch.Tensor:
    """One expert: (T, D) to (T, D) fp32."""
    gate, up = (h.float() @ gate_up.float().T).chunk(2, dim=1)  # (T, F) each
    a = F.silu(gate)
    if limit is not None:
        # After the SiLU: before it, a saturated gate would give silu(limit) < limit.
        a, up = a.clamp(max=limit), up.clamp(-limit, limit)
    return (a * up).to(h.dtype).float() @ down.float().T


def moe_ref(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router_weight: torch.Tensor,
    expert_bias: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate_up: torch.Tensor | None,
    shared_down: torch.Tensor | None,
    settings: RouterSettings,
    *,
    limit: float | None = None,
    shared_limit: float | None = None,
    width: torch.Tensor | None = None,
    adds_residual: bool = True,
) -> torch.Tensor:
    """Run the experts one by one, each on the rows that chose it; reads the routing (and `width`) on the host."""
    num_rows = x.shape[0] if width is None else int(width)
    h = rms_norm_ref(x[:num_rows], norm_weight, eps)
    out = x.clone() if adds_residual else torch.zeros_like(x)
    y = out[:num_rows].float()
    if shared_gate_up is not None and shared_down is not None:
        y += _feed_forward(h, shared_gate_up, shared_down, shared_limit)
    experts, weights = route_ref(h.float() @ router_weight.float().T, expert_bias, settings)
    for expert in experts.unique().tolist():
        row, slot = torch.where(experts == expert)
        y[row] += weights[row, slot, None] * _feed_forward(h[row], gate_up[expert], down[expert], limit)
    out[:num_rows] = y
    return out


def moe(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router_weight: torch.Tensor,
    expert_bias: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate_up: torch.Tensor | None,
    shared_down: torch.Tensor | None,
    settings: RouterSettings,
    *,
    limit: float | None = None,
    shared_limit: float | None = None,
    width: torch.Tensor | None = None,
    adds_residual: bool = True,
    next_weight: object = None,
) -> torch.Tensor:
    """Add the routed and the shared experts to the residual stream. The module's docstring has the equations.

    Args:
        x: (T, D) residual stream.
        norm_weight: (D) of the norm before the experts.
        eps: of that norm.
        router_weight: (E, D) any float dtype; products are summed in fp32.
        expert_bias: (E) fp32.
        gate_up: (E, 2F, D) x's dtype: gate rows, then up rows.
        down: (E, D, F) x's dtype; on a GPU an expert's inputs are the rows in memory, a contiguous (E, F, D).
        shared_gate_up: (2Fs, D) x's dtype, or None without a shared expert; Fs may differ from F.
        shared_down: (D, Fs) x's dtype, which lies like `down`, or None.
        settings: the router's.
        limit: of the routed experts' SwiGLU, above 0; None: no clamp.
        shared_limit: likewise of the shared expert's.
        width: () int32 on the device. Rows at or past it come back unchanged and touch no expert. None: all rows count.
        adds_residual: False leaves x out of the sum, for ranks that hold a part of every expert each.
        next_weight: what the next launch reads; a GPU reads some of it ahead (`read_ahead.py`). None: not known.

    Returns:
        (T, D) in x's dtype.

    Source: DeepSeek-V3, arXiv 2412.19437, equations 12 to 16; the clamp as Ling-3.0 was trained, after the SiLU.
    """
    dims: dict[str, int] = {}
    expect(x, "T D", FLOATS, dims, name="x")
    expect(norm_weight, "D", (x.dtype, torch.float32), dims, name="norm_weight")
    expect(router_weight, "E D", FLOATS, dims, name="router_weight")
    expect(expert_bias, "E", torch.float32, dims, name="expert_bias")
    expect(down, "E D F", x.dtype, dims, name="down")
    expect(gate_up, f"E {2 * dims['F']} D", x.dtype, dims, name="gate_up")
    assert (shared_gate_up is None) == (shared_down is None), "a shared expert has both maps"
    if shared_gate_up is not None and shared_down is not None:
        expect(shared_down, "D Fs", x.dtype, dims, name="shared_down")
        expect(shared_gate_up, f"{2 * dims['Fs']} D", x.dtype, dims, name="shared_gate_up")
    if width is not None:
        expect(width, "", torch.int32, dims, name="width")
    assert all(bound is None or bound > 0 for bound in (limit, shared_limit)), "no clamp is None, not 0"
    assert dims["E"] % settings.n_group == 0, f"{dims['E']} experts in {settings.n_group} groups"
    layer = (x, norm_weight, eps, router_weight, expert_bias, gate_up, down, shared_gate_up, shared_down, settings)
    if use_reference(x):
        return moe_ref(*layer, limit=limit, shared_limit=shared_limit, width=width, adds_residual=adds_residual)
    if not has_fused_experts() or not moe_step_cuda.can_run(x, down, shared_down, settings):
        return _moe_prompt(*layer, limit=limit, shared_limit=shared_limit, width=width, adds_residual=adds_residual)
    logits = None
    if not moe_step_cuda.takes_router(x, router_weight):
        logits = norm_linear(x, norm_weight, eps, router_weight, out_dtype=torch.float32)
    return moe_step_cuda.run_experts(
        *layer,
        limit=limit,
        shared_limit=shared_limit,
        width=width,
        adds_residual=adds_residual,
        next_weight=next_weight,
        logits=logits,
    )


def _moe_prompt(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router_weight: torch.Tensor,
    expert_bias: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate_up: torch.Tensor | None,
    shared_down: torch.Tensor | None,
    settings: RouterSettings,
    *,
    limit: float | None,
    shared_limit: float | None,
    width: torch.Tensor | None,
    adds_residual: bool,
) -> torch.Tensor:
    """Run a prompt's rows on a GPU: grouped products for the routed experts, dense ones for the shared expert."""
    h = rms_norm(x, norm_weight, eps)
    logits = linear(h, router_weight, out_dtype=torch.float32)
    chosen = moe_route_triton.route(logits, expert_bias, **asdict(settings))
    shared = None
    if shared_gate_up is not None and shared_down is not None:
        a = norm_swiglu(x, norm_weight, eps, shared_gate_up, limit=shared_limit)
        shared = linear(a, shared_down, out_dtype=torch.float32)  # (T, D)
    residual = x.contiguous() if adds_residual else None
    return moe_grouped_triton.run_experts(
        h, *chosen, gate_up, down, limit, residual=residual, shared=shared, width=width
    )
