"""The forward pass of soloist-nano as it is trained: `soloist.train.packed` with shapes that never change.

One pack holds a fixed number of tokens, so that what lies between the recurrence and the attention compiles once and
runs without the host. Differs from `packed` in how, not in what: every expert is computed for every token, which at
this size costs less than to gather; the recurrence is fla-core's kernel and attention PyTorch's packed one. On a CPU
attention is that of `soloist.train`, and so is the recurrence wherever it is asked for.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from soloist.kernels.kda import L2_EPS
from soloist.kernels.moe import RouterSettings
from soloist.models.bailing_moe_v3 import BailingMoeV3ForCausalLM, BailingMoeV3MTP
from soloist.models.feed_forward import DenseFeedForward, FeedForward, MixtureOfExperts
from soloist.models.mixers import LATENT_NORM_EPS, KDASettings, KimiDeltaAttention, LatentAttention, MLASettings
from soloist.train import operators as op
from soloist.train.documents import Documents
from soloist.train.kda import kda, log_decay, short_conv

try:
    from fla.ops.kda import chunk_kda
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    chunk_kda = varlen_attn = None


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Documents one behind the other, on the device; T is the same for every pack."""

    # (T,) int64.
    input_ids: Tensor
    # (T,) int64: place in the document.
    positions: Tensor
    # (n+1,) int32: where documents begin, and T.
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    # Most tokens of a document, of any pack.
    max_len: int


def limit_tuning(num_configs: int) -> None:
    """Have fla-core try only so many launch settings of each kernel: trying all takes longer than a short run."""
    from triton.runtime.autotuner import Autotuner

    for tuner in [thing for thing in gc.get_objects() if isinstance(thing, Autotuner)]:
        tuner.configs = tuner.configs[:num_configs]


def rows_of(pack: Pack) -> Documents:
    """Describe a pack to the operators of `soloist.train`."""
    return Documents(pack.cu_seqlens_cpu.diff().tolist(), pack.input_ids.device)


def kda_inputs(
    x: Tensor, norm: Tensor, in_proj: Tensor, conv: Tensor, A_log: Tensor, dt_bias: Tensor, positions: Tensor,
    sizes: list[int], s: KDASettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Project and mix: q, k, v (T, H, K), g (T, H, K) fp32, beta (T, H) fp32, output gate (T, H*V)."""
    H = s.num_heads
    qkv, f, gate, b = op.linear(op.rms_norm(x, norm, s.eps), in_proj).split(sizes, dim=-1)
    mixed = short_conv(qkv, conv, SimpleNamespace(positions=positions))
    q, k, v = (part.unflatten(-1, (H, -1)) for part in mixed.chunk(3, dim=-1))
    q, k = (_l2_norm(part) for part in (q, k))
    return q, k, v, log_decay(f, A_log, dt_bias, H, s.lower_bound), b.float().sigmoid(), gate


def _l2_norm(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)


def kda_output(x: Tensor, o: Tensor, gate: Tensor, o_norm: Tensor, o_proj: Tensor, eps: float) -> Tensor:
    """Norm and gate what the recurrence reads (T, H, V), project it, add it to x."""
    normed = op.rms_norm(o.float(), o_norm, eps) * gate.float().unflatten(-1, o.shape[1:]).sigmoid()
    return x + op.linear(normed.to(x.dtype).flatten(1), o_proj)


def mla_inputs(
    x: Tensor, norm: Tensor, in_proj: Tensor, kv_a_norm: Tensor, kv_b_proj: Tensor, cos: Tensor, sin: Tensor,
    positions: Tensor, sizes: list[int], s: MLASettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Project and rotate: q, k, v (T, H, .) and the heads' gates (T, H)."""
    H, Kn, P = s.num_heads, s.qk_nope_head_dim, s.qk_rope_head_dim
    q, kv, gate = op.linear(op.rms_norm(x, norm, s.eps), in_proj).split(sizes, dim=-1)
    q_n, q_r = q.unflatten(-1, (H, -1)).split([Kn, P], dim=-1)
    c, k_r = kv.split([s.kv_lora_rank, P], dim=-1)
    cos, sin = cos[positions], sin[positions]
    q_r, k_r = (op.apply_rotary(part, cos, sin, interleaved=True) for part in (q_r, k_r[:, None]))
    expanded = op.linear(op.rms_norm(c, kv_a_norm, LATENT_NORM_EPS), kv_b_proj).unflatten(-1, (H, -1))
    k_n, v = expanded.split([Kn, s.v_head_dim], dim=-1)
    k = torch.cat([k_n, k_r.expand(-1, H, -1)], dim=-1)
    return torch.cat([q_n, q_r], dim=-1), k, v.contiguous(), gate


def mla_output(x: Tensor, a: Tensor, gate: Tensor, o_proj: Tensor) -> Tensor:
    """Gate each head (T, H, V), project, add to x."""
    return x + op.linear((a * gate.float().sigmoid()[..., None]).to(x.dtype).flatten(1), o_proj)


def is_among_largest(x: Tensor, count: int) -> Tensor:
    """Say which entries are among the `count` largest of the last axis, the earlier one first among equals.

    All pairs are compared: for so few entries that fuses into one pass, and a sort does not.
    """
    places = torch.arange(x.shape[-1], device=x.device)
    one, other = x[..., :, None], x[..., None, :]
    is_ahead = (other > one) | ((other == one) & (places < places[:, None]))
    return is_ahead.sum(-1) < count


def route(logits: Tensor, bias: Tensor, s: RouterSettings) -> Tensor:
    """Give every expert's weight for every token, (T, E) fp32, zero where it was not chosen; as `route_ref`."""
    scores = logits.sigmoid()
    biased = (scores + bias).detach().unflatten(-1, (s.n_group, -1))  # (T, n_group, E / n_group)
    group_scores = (biased * is_among_largest(biased, 2)).sum(-1)
    is_kept = is_among_largest(group_scores, s.topk_group)
    biased = biased.masked_fill(~is_kept[..., None], -torch.inf).flatten(1)
    weights = scores * is_among_largest(biased, s.num_experts_per_tok)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * s.routed_scaling_factor


def experts(
    x: Tensor, norm: Tensor, router: Tensor, bias: Tensor, gate_up: Tensor, down: Tensor, shared_gate_up: Tensor,
    shared_down: Tensor, eps: float, s: RouterSettings, limit: float | None, shared_limit: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add the shared and the chosen experts to x; give also how many tokens chose each, (E) fp32."""
    E, F2, D = gate_up.shape
    h = op.rms_norm(x, norm, eps)
    weights = route(h.float() @ router.float().T, bias, s)  # (T, E)
    inside = op.swiglu(op.linear(h, gate_up.view(E * F2, D)).unflatten(-1, (E, F2)), limit)  # (T, E, F)
    inside = (inside.float() * weights[..., None]).to(x.dtype).flatten(1)  # (T, E*F)
    y = op.linear(inside, down.transpose(0, 1).reshape(D, -1))
    y = y + op.linear(op.swiglu(op.linear(h, shared_gate_up), shared_limit), shared_down)
    return x + y, (weights.detach() > 0).sum(0, dtype=torch.float32)


def dense(x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float) -> Tensor:
    """Add a dense block to x."""
    return x + op.linear(op.swiglu(op.linear(op.rms_norm(x, norm, eps), gate_up)), down)


def mtp_input(e: Tensor, hidden: Tensor, enorm: Tensor, hnorm: Tensor, eh_proj: Tensor, eps: float) -> Tensor:
    """Join embedding and hidden state into the residual stream of the MTP layer."""
    return op.linear(torch.cat([op.rms_norm(e, enorm, eps), op.rms_norm(hidden, hnorm, eps)], dim=-1), eh_proj)


def token_losses(hidden: Tensor, lm_head: Tensor, labels: Tensor) -> Tensor:
    """Give the negative log likelihood of each label, (T) fp32; 0 where the label is -100."""
    return F.cross_entropy(op.linear(hidden, lm_head).float(), labels, reduction="none", ignore_index=-100)


class Forward:
    """Runs the decoder and its MTP layer over packs.

    Args:
        model: weights in fp32, on the device.
        mtp: its MTP layer.
        compiles: whether the parts are compiled; False on a CPU.
        has_kernel: whether the recurrence is fla-core's kernel; otherwise it is the plain form, several times slower.
    """

    def __init__(
        self, model: BailingMoeV3ForCausalLM, mtp: BailingMoeV3MTP, *, compiles: bool, has_kernel: bool
    ) -> None:
        self.model, self.mtp = model, mtp
        self.is_on_gpu, self.has_kernel = model.device.type == "cuda", has_kernel
        self._rows: tuple[Pack, Documents] | None = None

        def compiled(function: Callable) -> Callable:
            return torch.compile(function, dynamic=False) if compiles else function

        self.kda_inputs, self.kda_output = compiled(kda_inputs), compiled(kda_output)
        self.mla_inputs, self.mla_output = compiled(mla_inputs), compiled(mla_output)
        self.experts, self.dense, self.mtp_input = compiled(experts), compiled(dense), compiled(mtp_input)
        self.rms_norm, self.token_losses = compiled(op.rms_norm), compiled(token_losses)

    def hidden(self, pack: Pack, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Run the decoder.

        Returns:
            (T, D) hidden states behind the final norm, and the experts' token counts (E) of each layer that has any.
        """
        model = self.model
        x = F.embedding(pack.input_ids, model.embed_tokens).to(dtype)  # (T, D)
        counts: list[Tensor] = []
        for mixer, block in zip(model.mixers, model.feed_forwards, strict=True):
            x = self._mix(mixer, x, pack)
            x = self._feed_forward(block, x, counts)
        return self.rms_norm(x, model.norm, model.config.rms_norm_eps), counts

    def mtp_hidden(self, hidden: Tensor, next_ids: Tensor, pack: Pack) -> tuple[Tensor, list[Tensor]]:
        """Run the MTP layer on hidden states (T, D) and the tokens right of them: its own (T, D), and counts."""
        mtp, eps = self.mtp, self.mtp.config.rms_norm_eps
        e = F.embedding(next_ids, self.model.embed_tokens).to(hidden.dtype)
        x = self.mtp_input(e, hidden, mtp.enorm, mtp.hnorm, mtp.eh_proj, eps)
        counts: list[Tensor] = []
        x = self._feed_forward(mtp.feed_forward, self._mix(mtp.mixer, x, pack), counts)
        return self.rms_norm(x, mtp.final_layernorm, eps), counts

    def _mix(self, mixer: KimiDeltaAttention | LatentAttention, x: Tensor, pack: Pack) -> Tensor:
        s = mixer.settings
        if isinstance(mixer, LatentAttention):
            tables = self.model.rotary.cos, self.model.rotary.sin
            weights = mixer.norm, mixer.in_proj, mixer.kv_a_norm, mixer.kv_b_proj
            q, k, v, gate = self.mla_inputs(x, *weights, *tables, pack.positions, mixer.in_sizes, s)
            return self.mla_output(x, self._attend(q, k, v, pack, s.scale), gate, mixer.o_proj)
        weights = mixer.norm, mixer.in_proj, mixer.conv, mixer.A_log, mixer.dt_bias
        if not self.has_kernel:
            qkv, f, gate, b = op.linear(op.rms_norm(x, mixer.norm, s.eps), mixer.in_proj).split(mixer.in_sizes, dim=-1)
            laws = mixer.conv, mixer.A_log, mixer.dt_bias, mixer.o_norm, s.eps
            sizes = {"num_heads": s.num_heads, "lower_bound": s.lower_bound}
            return x + op.linear(kda(qkv, f, gate, b, *laws, self._documents(pack), **sizes), mixer.o_proj)
        q, k, v, g, beta, gate = self.kda_inputs(x, *weights, pack.positions, mixer.in_sizes, s)
        o, _ = chunk_kda(
            *(part[None] for part in (q, k, v, g, beta)),
            safe_gate=True,
            lower_bound=s.lower_bound,
            cu_seqlens=pack.cu_seqlens,
            cu_seqlens_cpu=pack.cu_seqlens_cpu,
        )
        return self.kda_output(x, o[0], gate, mixer.o_norm, mixer.o_proj, s.eps)

    def _documents(self, pack: Pack) -> Documents:
        """Give what is known of a pack to the operators of `soloist.train`, and keep it for the next layer."""
        if self._rows is None or self._rows[0] is not pack:
            self._rows = pack, rows_of(pack)
        return self._rows[1]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float) -> Tensor:
        if not self.is_on_gpu:
            return op.attend(q, k, v, self._documents(pack), scale)
        bounds = pack.cu_seqlens, pack.cu_seqlens, pack.max_len, pack.max_len
        return varlen_attn(q, k, v, *bounds, window_size=(-1, 0), scale=scale)

    def _feed_forward(self, block: FeedForward, x: Tensor, counts: list[Tensor]) -> Tensor:
        if isinstance(block, DenseFeedForward):
            return self.dense(x, block.norm, block.gate_up, block.down, block.eps)
        assert isinstance(block, MixtureOfExperts)
        maps = block.gate_up, block.down, block.shared_gate_up, block.shared_down
        laws = block.settings.eps, block.settings.router, block.limit, block.shared_limit
        x, count = self.experts(x, block.norm, block.router, block.expert_bias, *maps, *laws)
        counts.append(count)
        return x
