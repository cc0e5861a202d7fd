"""Answers of a model of `soloist.models` to many prompts at once: what a draft is trained on.

Owns the state of a batch of sequences. All of them stand at the same position: a step feeds each its next token, of the
prompt as long as there is one and drawn behind it. So nothing is padded or masked, and prompts need no pass of their
own. Sequences that have ended are dropped as soon as they are half of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from soloist.errors import ContextLengthError, UnsupportedError
from soloist.kernels.kda import L2_EPS
from soloist.models.causal_lm import CausalLM
from soloist.models.hybrid import HybridCausalLM
from soloist.models.layers import DenseCausalLM, GroupedQueryAttention
from soloist.models.mixers import LATENT_NORM_EPS, KimiDeltaAttention, LatentAttention
from soloist.train import operators as op
from soloist.train.batches import Text
from soloist.train.kda import log_decay
from soloist.train.packed import dense, feed_forward_packed, final_norm_packed

# Steps between two looks at who has ended, each of which waits for the device.
STEPS_PER_LOOK = 16


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to answer it."""

    prompt_ids: tuple[int, ...]
    # 0: greedy.
    temperature: float


class _Rows:
    """What a layer keeps of `n` sequences: tensors whose first axis is the sequence."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def keep(self, rows: torch.Tensor) -> None:
        self.tensors = {name: t.index_select(0, rows) for name, t in self.tensors.items()}


def _make_rows(mixer: object, n: int, S: int, dtype: torch.dtype, device: torch.device) -> _Rows:
    """Allocate the state of one layer for `n` sequences of at most `S` tokens."""

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(n, *shape, dtype=dtype, device=device)

    if isinstance(mixer, KimiDeltaAttention):
        H, K = mixer.settings.num_heads, mixer.settings.head_dim
        return _Rows({"state": zeros(H, K, K, dtype=torch.float32), "conv": zeros(3, 3 * H * K)})
    if isinstance(mixer, LatentAttention):
        return _Rows({"latent": zeros(S, mixer.settings.kv_lora_rank + mixer.settings.qk_rope_head_dim)})
    assert isinstance(mixer, GroupedQueryAttention)
    K = mixer.o_proj.shape[1] // mixer.num_heads
    return _Rows({"k": zeros(S, mixer.num_kv_heads, K), "v": zeros(S, mixer.num_kv_heads, K)})


def _step_kda(layer: KimiDeltaAttention, x: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """Advance KDA by a token (n, D) of each sequence."""
    s = layer.settings
    n, H = x.shape[0], s.num_heads
    projected = op.linear(op.rms_norm(x, layer.norm, s.eps), dense(layer.in_proj))
    qkv, f, gate, b = projected.split(layer.in_sizes, dim=-1)
    if layer.f_b_proj is not None and layer.g_b_proj is not None:
        f, gate = op.linear(f, dense(layer.f_b_proj)), op.linear(gate, dense(layer.g_b_proj))
    window = torch.cat([rows.tensors["conv"], qkv[:, None]], dim=1)  # (n, 4, C)
    rows.tensors["conv"] = window[:, 1:]
    mixed = F.silu((window.float() * layer.conv.float().mT).sum(1)).to(x.dtype).float()  # (n, C)
    q, k, v = mixed.view(n, 3, H, -1).unbind(1)  # (n, H, K) each
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + L2_EPS) for y in (q, k))
    g = log_decay(f, layer.A_log, layer.dt_bias, H, s.lower_bound)  # (n, H, K)
    state = rows.tensors["state"].mul_(g.exp()[:, :, None])  # (n, H, V, K)
    u = b.float().sigmoid()[..., None] * (v - (state @ k[..., None])[..., 0])  # (n, H, V)
    state.addcmul_(u[..., None], k[:, :, None])
    o = (state @ q[..., None])[..., 0] * q.shape[-1] ** -0.5  # (n, H, V)
    normed = op.rms_norm(o.to(x.dtype).float(), layer.o_norm.float(), s.eps)
    out = (normed * gate.float().view(n, H, -1).sigmoid()).to(x.dtype).flatten(1)
    return x + op.linear(out, dense(layer.o_proj))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate all rows (n, .., P) by one position's angles (P/2)."""
    n = x.shape[0]
    return op.apply_rotary(x, cos.expand(n, -1), sin.expand(n, -1), interleaved)


def _step_mla(layer: LatentAttention, x: torch.Tensor, rows: _Rows, model: HybridCausalLM, t: int) -> torch.Tensor:
    """Attend from position `t` with a token (n, D) of each sequence, to the latents themselves."""
    s = layer.settings
    H, R, P, V = s.num_heads, s.kv_lora_rank, s.qk_rope_head_dim, s.v_head_dim
    projected = op.linear(op.rms_norm(x, layer.norm, s.eps), dense(layer.in_proj))
    q, kv, *gate = projected.split(layer.in_sizes, dim=-1)
    if layer.q_a_norm is not None and layer.q_b_proj is not None:
        q = op.linear(op.rms_norm(q, layer.q_a_norm, LATENT_NORM_EPS), dense(layer.q_b_proj))
    q_n, q_r = q.unflatten(-1, (H, -1)).tensor_split([s.qk_nope_head_dim], dim=-1)  # (n, H, Kn), (n, H, P)
    c, k_r = kv.split([R, P], dim=-1)
    if model.rotary is not None:
        angles = model.rotary.cos[t], model.rotary.sin[t]
        q_r, k_r = (_rotate(y, *angles, interleaved=True) for y in (q_r, k_r))
    latent = rows.tensors["latent"]  # (n, S, R+P)
    latent[:, t] = torch.cat([op.rms_norm(c, layer.kv_a_norm, LATENT_NORM_EPS), k_r], dim=-1)
    w_uk, w_uv = layer.kv_b_proj.to(x.dtype).view(H, -1, R).split([s.qk_nope_head_dim, V], dim=1)
    queries = torch.cat([torch.einsum("nhk,hkr->nhr", q_n, w_uk), q_r], dim=-1)  # (n, H, R+P)
    seen = latent[:, : t + 1]
    scores = (queries @ seen.mT).float() * s.scale  # (n, H, t+1)
    z = scores.softmax(-1).to(x.dtype) @ seen[..., :R]  # (n, H, R)
    a = torch.einsum("nhr,hvr->nhv", z, w_uv)
    if gate:
        a = (a * gate[0].float().sigmoid()[..., None]).to(x.dtype)
    return x + op.linear(a.flatten(1), dense(layer.o_proj))


def _step_attention(
    layer: GroupedQueryAttention, x: torch.Tensor, rows: _Rows, model: DenseCausalLM, t: int
) -> torch.Tensor:
    """Attend from position `t` with a token (n, D) of each sequence."""
    H, G = layer.num_heads, layer.num_kv_heads
    qkv = op.linear(op.rms_norm(x, layer.norm, layer.eps), dense(layer.qkv_proj), layer.qkv_bias)
    qk, v = qkv.unflatten(-1, (H + 2 * G, -1)).split([H + G, G], dim=1)  # (n, H+G, K), (n, G, K)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = qk.split([H, G], dim=1)
        qk = torch.cat([op.rms_norm(q, layer.q_norm, layer.eps), op.rms_norm(k, layer.k_norm, layer.eps)], dim=1)
    q, k = _rotate(qk, model.rotary.cos[t], model.rotary.sin[t], interleaved=False).split([H, G], dim=1)
    rows.tensors["k"][:, t], rows.tensors["v"][:, t] = k, v
    keys, values = (rows.tensors[name][:, : t + 1].transpose(1, 2) for name in "kv")  # (n, G, t+1, K)
    # The heads of a group are further rows of one query, so that no key is copied.
    out = F.scaled_dot_product_attention(q.unflatten(1, (G, H // G)), keys, values)  # (n, G, H/G, K)
    return x + op.linear(out.flatten(1), dense(layer.o_proj))


class _Sequences:
    """A batch of sequences of one model."""

    def __init__(self, model: CausalLM, n: int, max_len: int, dtype: torch.dtype) -> None:
        if not isinstance(model, HybridCausalLM | DenseCausalLM):
            raise UnsupportedError(f"{model.architecture} has no batched form")
        self.model, self.dtype = model, dtype
        mixers = model.mixers if isinstance(model, HybridCausalLM) else [mixer for mixer, _ in model.layers]
        self._rows = [_make_rows(mixer, n, max_len, dtype, model.device) for mixer in mixers]

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all sequences but `rows` (m,)."""
        for layer in self._rows:
            layer.keep(rows)

    def step(self, tokens: torch.Tensor, t: int) -> torch.Tensor:
        """Put tokens (n,) at position `t`; give the residual stream (n, D)."""
        model = self.model
        x = F.embedding(tokens, model.embed_tokens).to(self.dtype)  # (n, D)
        if isinstance(model, HybridCausalLM):
            layers = zip(model.mixers, model.feed_forwards, self._rows, strict=True)
            for index, (mixer, feed_forward, rows) in enumerate(layers):
                if isinstance(mixer, KimiDeltaAttention):
                    x = _step_kda(mixer, x, rows)
                else:
                    x = _step_mla(mixer, x, rows, model, t)
                x = feed_forward_packed(feed_forward, x, index, None)
            return x
        assert isinstance(model, DenseCausalLM)
        for index, ((attention, mlp), rows) in enumerate(zip(model.layers, self._rows, strict=True)):
            x = feed_forward_packed(mlp, _step_attention(attention, x, rows, model, t), index, None)
        return x


@torch.no_grad()
@op.changing_shapes()
def generate(
    model: CausalLM,
    requests: Sequence[Request],
    *,
    max_new_tokens: int,
    num_tokens: int,
    eos_token_ids: Sequence[int],
    seed: int,
    dtype: torch.dtype | None = None,
) -> list[Text]:
    """Answer a batch of prompts.

    Args:
        model: dense or hybrid, dense weights.
        requests: prompts of about the same length are best together.
        max_new_tokens: of each answer.
        num_tokens: ids that may be drawn.
        eos_token_ids: end an answer, and are part of it.
        seed: of the draws.
        dtype: of activations. None: the model's.

    Returns:
        The texts, in the order of the requests.

    Raises:
        ContextLengthError: a prompt with its answer is longer than the model allows.
        UnsupportedError: the architecture has no batched form.
    """
    device, limit = model.device, model.config.max_position_embeddings
    lengths = [len(request.prompt_ids) for request in requests]
    max_len = max(lengths) + max_new_tokens
    if max_len > limit:
        raise ContextLengthError(
            f"a prompt of {max(lengths)} tokens and an answer of {max_new_tokens}; the model has {limit} positions"
        )
    sequences = _Sequences(model, len(requests), max_len, dtype or model.dtype)
    prompts = [[*request.prompt_ids] + [0] * (max_len - n) for request, n in zip(requests, lengths, strict=True)]
    ids = torch.tensor(prompts, device=device)  # (n, S)
    num_prompt = torch.tensor(lengths, device=device)
    # Where each text ends; at first where it must.
    ends = num_prompt + max_new_tokens
    temperature = torch.tensor([request.temperature for request in requests], device=device)
    eos = torch.tensor(list(eos_token_ids), dtype=torch.int64, device=device)
    alive = torch.arange(len(requests), device=device)
    generator = torch.Generator(device).manual_seed(seed)
    # All rows, padding too: products of an odd number of them are slow.
    head = dense(model.lm_head).to(sequences.dtype)
    hot = temperature.nonzero()[:, 0]
    for t in range(max_len - 1):
        hidden = sequences.step(ids[alive, t], t)  # (n, D)
        if t + 1 >= min(lengths):
            logits = F.linear(final_norm_packed(model, hidden), head)[:, :num_tokens].float()  # (n, N)
            drawn = _draw(logits, temperature[alive], hot, generator)
            is_answer = (t + 1 >= num_prompt[alive]) & (t + 1 < ends[alive])
            ids[alive, t + 1] = torch.where(is_answer, drawn, ids[alive, t + 1])
            is_last = is_answer & torch.isin(drawn, eos)
            ends[alive] = torch.where(is_last, t + 2, ends[alive])
        if (t + 1) % STEPS_PER_LOOK == 0:
            goes_on = (ends[alive] > t + 2).nonzero()[:, 0]
            if len(goes_on) == 0:
                break
            if 2 * len(goes_on) <= len(alive):
                alive = alive[goes_on]
                sequences.keep(goes_on)
                hot = temperature[alive].nonzero()[:, 0]
    rows = zip(requests, ids.tolist(), ends.tolist(), strict=True)
    return [
        Text(token_ids=tuple(row[:end]), num_prompt=len(request.prompt_ids), temperature=request.temperature)
        for request, row, end in rows
    ]


def _draw(
    logits: torch.Tensor, temperature: torch.Tensor, hot: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Draw a token from each row of logits (n, N) at its temperature (n,); 0 takes the likeliest: (n,).

    Args:
        logits: (n, N).
        temperature: (n,).
        hot: (m,) int64, the rows whose temperature is not 0.
        generator: of the draws.
    """
    drawn = logits.argmax(-1)
    if len(hot):
        own = logits.index_select(0, hot)  # (m, N)
        noise = torch.empty_like(own).exponential_(generator=generator).log_().neg_()
        # Adding Gumbel noise and taking the largest draws from the softmax.
        drawn[hot] = (own + noise * temperature[hot, None]).argmax(-1)
    return drawn
