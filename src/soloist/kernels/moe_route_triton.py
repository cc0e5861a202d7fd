"""A prompt's choice of experts on a GPU, a program a token; the equation and its reference are `route_ref` of `moe`.

The reference sorts all scores of a token, to have the lowest of equals first; here the best is taken as often as a
token takes experts. A step chooses within the launch that runs its experts, `moe_step_cuda`.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    experts_ptr,
    weights_ptr,
    scale,
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    A: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    MEMBERS_PADDED: tl.constexpr,
    A_PADDED: tl.constexpr,
):
    """experts (T, A) int32, the best first, and weights (T, A). Grid: (T,). logits (T, E) fp32; bias (E) fp32."""
    MEMBERS: tl.constexpr = E // GROUPS
    token = tl.program_id(0).to(tl.int64)
    i_g = tl.arange(0, GROUPS_PADDED)
    i_m = tl.arange(0, MEMBERS_PADDED)
    i_e = i_g[:, None] * MEMBERS + i_m[None, :]
    m_e = (i_g < GROUPS)[:, None] & (i_m < MEMBERS)[None, :]
    b_score = tl.sigmoid(tl.load(logits_ptr + token * E + i_e, mask=m_e, other=0.0))  # (groups, members)
    b_biased = tl.where(m_e, b_score + tl.load(bias_ptr + i_e, mask=m_e, other=0.0), float("-inf"))
    if GROUPS > 1:
        # A group's score is the sum of its best two.
        b_group = tl.max(b_biased, axis=1)  # (groups,)
        if MEMBERS > 1:
            best = tl.min(tl.where(b_biased == b_group[:, None], i_m[None, :], MEMBERS_PADDED), axis=1)
            b_others = tl.where(i_m[None, :] == best[:, None], float("-inf"), b_biased)
            b_group += tl.max(b_others, axis=1)
        b_group = tl.where(i_g < GROUPS, b_group, float("-inf"))
        m_kept = i_g < 0
        for _ in tl.static_range(KEPT):
            group = tl.min(tl.where(b_group == tl.max(b_group, axis=0), i_g, GROUPS_PADDED), axis=0)
            m_kept = m_kept | (i_g == group)
            b_group = tl.where(i_g == group, float("-inf"), b_group)
        b_biased = tl.where(m_kept[:, None], b_biased, float("-inf"))
    i_a = tl.arange(0, A_PADDED)
    b_chosen = tl.zeros((A_PADDED,), dtype=tl.int32)
    b_weight = tl.zeros((A_PADDED,), dtype=tl.float32)
    for a in tl.static_range(A):
        best_score = tl.max(tl.max(b_biased, axis=1), axis=0)
        expert = tl.min(tl.min(tl.where(b_biased == best_score, i_e, E), axis=1), axis=0)
        score = tl.sum(tl.sum(tl.where((i_e == expert) & m_e, b_score, 0.0), axis=1), axis=0)
        b_biased = tl.where(i_e == expert, float("-inf"), b_biased)
        # Where scores are no numbers any expert that there is will do.
        b_chosen = tl.where(i_a == a, tl.minimum(expert, E - 1), b_chosen)
        b_weight = tl.where(i_a == a, score, b_weight)
    b_weight = b_weight / (tl.sum(b_weight, axis=0) + 1e-20) * scale
    tl.store(experts_ptr + token * A + i_a, b_chosen, mask=i_a < A)
    tl.store(weights_ptr + token * A + i_a, b_weight, mask=i_a < A)


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    num_experts_per_tok: int,
    n_group: int,
    topk_group: int,
    routed_scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts and their weights: (T, A) int32 and fp32; arguments as `route_ref` has them."""
    T, E = logits.shape
    A = num_experts_per_tok
    experts = torch.empty((T, A), dtype=torch.int32, device=logits.device)
    weights = torch.empty((T, A), dtype=torch.float32, device=logits.device)
    route_kernel[(T,)](
        logits,
        bias,
        experts,
        weights,
        routed_scaling_factor,
        E=E,
        GROUPS=n_group,
        KEPT=topk_group,
        A=A,
        GROUPS_PADDED=triton.next_power_of_2(n_group),
        MEMBERS_PADDED=triton.next_power_of_2(E // n_group),
        A_PADDED=triton.next_power_of_2(A),
        num_warps=1,
    )
    return experts, weights
