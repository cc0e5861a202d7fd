"""Ling-3.0 and Kimi-Linear once more, in fp64, token by token, written from the published formulas alone.

Shares no code with `soloist`: a checkpoint's tensors by name go in, logits of every position come out.
"""

import math
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, limit: float = 0.0) -> Tensor:
    g, u = silu(gate @ x), up @ x
    if limit:
        g, u = torch.minimum(g, torch.tensor(limit)), u.clamp(-limit, limit)
    return down @ (g * u)


def kda(w: Tensors, at: str, h: Tensor, heads: int, eps: float, lower_bound: float | None) -> Tensor:
    T = len(h)
    streams = {}
    for name in "qkv":
        raw = h @ w[f"{at}{name}_proj.weight"].T
        padded = torch.cat([torch.zeros(3, raw.shape[1]), raw])
        taps = w[f"{at}{name}_conv1d.weight"][:, 0]
        convolved = torch.stack([sum(taps[:, j] * padded[t + j] for j in range(4)) for t in range(T)])
        streams[name] = silu(convolved).view(T, heads, -1)
    q, k, v = streams["q"], streams["k"], streams["v"]
    q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(q.shape[-1])
    k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()

    def gate(name: str) -> Tensor:
        if f"{at}{name}_proj.weight" in w:
            return h @ w[f"{at}{name}_proj.weight"].T
        return h @ w[f"{at}{name}_a_proj.weight"].T @ w[f"{at}{name}_b_proj.weight"].T

    rate = w[f"{at}A_log"].flatten().exp()
    f = (gate("f") + w[f"{at}dt_bias"]).view(T, heads, -1)
    if lower_bound is None:
        decay = (-rate[:, None] * (1 + f.exp()).log()).exp()
    else:
        decay = (lower_bound * sigmoid(rate[:, None] * f)).exp()
    beta = sigmoid(h @ w[f"{at}b_proj.weight"].T)
    o_gate = sigmoid(gate("g")).view(T, heads, -1)

    out = torch.zeros(T, heads, v.shape[-1])
    for n in range(heads):
        S = torch.zeros(k.shape[-1], v.shape[-1])
        for t in range(T):
            S = decay[t, n][:, None] * S
            u = beta[t, n] * (v[t, n] - S.T @ k[t, n])
            S = S + torch.outer(k[t, n], u)
            out[t, n] = S.T @ q[t, n]
    out = rms(out, w[f"{at}o_norm.weight"], eps) * o_gate
    return out.flatten(1) @ w[f"{at}o_proj.weight"].T


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """As the publisher does it: even dims first, then odd dims, then rotate halves."""
    P = x.shape[-1]
    x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    angle = position * theta ** (-torch.arange(0, P, 2) / P)
    cos, sin = angle.cos().repeat(2), angle.sin().repeat(2)
    halves = torch.cat([-x[..., P // 2 :], x[..., : P // 2]], dim=-1)
    return x * cos + halves * sin


def mla(w: Tensors, at: str, h: Tensor, config: dict[str, Any], output: str, theta: float | None) -> Tensor:
    T, H, R = len(h), config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    if f"{at}q_proj.weight" in w:
        q = h @ w[f"{at}q_proj.weight"].T
    else:
        q = rms(h @ w[f"{at}q_a_proj.weight"].T, w[f"{at}q_a_layernorm.weight"], 1e-6) @ w[f"{at}q_b_proj.weight"].T
    q = q.view(T, H, nope + rope).clone()
    latent = h @ w[f"{at}kv_a_proj_with_mqa.weight"].T
    k_rope = latent[:, R:].clone()
    if theta is not None:
        for t in range(T):
            q[t, :, nope:] = rotate(q[t, :, nope:], t, theta)
            k_rope[t] = rotate(k_rope[t], t, theta)
    kv = rms(latent[:, :R], w[f"{at}kv_a_layernorm.weight"], 1e-6) @ w[f"{at}kv_b_proj.weight"].T
    kv = kv.view(T, H, -1)
    k, v = kv[..., :nope], kv[..., nope:]
    gates = sigmoid(h @ w[f"{at}g_proj.weight"].T) if f"{at}g_proj.weight" in w else torch.ones(T, H)
    out = torch.zeros(T, H, v.shape[-1])
    for t in range(T):
        for n in range(H):
            keys = torch.cat([k[: t + 1, n], k_rope[: t + 1]], dim=-1)
            weights = (keys @ q[t, n] / math.sqrt(nope + rope)).softmax(0)
            out[t, n] = gates[t, n] * (weights @ v[: t + 1, n])
    return out.flatten(1) @ w[f"{at}{output}.weight"].T


def route(logits: Tensor, bias: Tensor, top_k: int, groups: int, kept: int, scale: float) -> dict[int, float]:
    """Experts of one token and their weights."""
    scores = sigmoid(logits)
    biased = (scores + bias).tolist()
    size = len(biased) // groups
    strength = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    best = sorted(range(groups), key=lambda g: -strength[g])[:kept]
    allowed = [e for e in range(len(biased)) if e // size in best]
    chosen = sorted(allowed, key=lambda e: -biased[e])[:top_k]
    total = sum(scores[e].item() for e in chosen) + 1e-20
    return {e: scores[e].item() / total * scale for e in chosen}


def experts(
    w: Tensors,
    at: str,
    h: Tensor,
    router: tuple[int, int, int, float],
    bias: str,
    maps: str,
    limits: tuple[float, float],
) -> Tensor:
    rows = []
    gate, up, down = maps.split()
    for x in h:
        y = torch.zeros_like(x)
        for e, weight in route(w[f"{at}gate.weight"] @ x, w[f"{at}gate.{bias}"], *router).items():
            expert = (w[f"{at}experts.{e}.{name}.weight"] for name in (gate, up, down))
            y = y + weight * swiglu(x, *expert, limits[0])
        shared = (w[f"{at}shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
        rows.append(y + swiglu(x, *shared, limits[1]))
    return torch.stack(rows)


def _dense(w: Tensors, at: str, h: Tensor) -> Tensor:
    maps = [w[f"{at}{name}_proj.weight"] for name in ("gate", "up", "down")]
    return torch.stack([swiglu(x, *maps) for x in h])


def _ling_layer(w: Tensors, config: dict[str, Any], i: int, x: Tensor) -> Tensor:
    at, eps, L, group = f"model.layers.{i}.", 1e-6, config["num_hidden_layers"], config["layer_group_size"]
    h = rms(x, w[f"{at}input_layernorm.weight"], eps)
    if (i + 1) % group == 0 or i >= L // group * group:
        theta = None if config["use_mla_nope"] else config["rope_theta"]
        x = x + mla(w, f"{at}attention.", h, config, "dense", theta)
    else:
        x = x + kda(w, f"{at}attention.", h, config["num_attention_heads"], eps, config["kda_lower_bound"])
    h = rms(x, w[f"{at}post_attention_layernorm.weight"], eps)
    if i < config["first_k_dense_replace"]:
        return x + _dense(w, f"{at}mlp.", h)
    router = tuple(config[k] for k in ("num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor"))
    lists = (config.get(f"{kind}_swiglu_limit_list") or [] for kind in ("expert", "share_expert"))
    limits = tuple(limit[i] if i < len(limit) else 0.0 for limit in lists)
    return x + experts(w, f"{at}mlp.", h, router, "expert_bias", "gate_proj up_proj down_proj", limits)


def _kimi_layer(w: Tensors, config: dict[str, Any], i: int, x: Tensor) -> Tensor:
    at, eps, linear = f"model.layers.{i}.", config["rms_norm_eps"], config["linear_attn_config"]
    h = rms(x, w[f"{at}input_layernorm.weight"], eps)
    if i + 1 in linear["full_attn_layers"]:
        x = x + mla(w, f"{at}self_attn.", h, config, "o_proj", None)
    else:
        x = x + kda(w, f"{at}self_attn.", h, linear["num_heads"], eps, None)
    h = rms(x, w[f"{at}post_attention_layernorm.weight"], eps)
    if i < config["first_k_dense_replace"]:
        return x + _dense(w, f"{at}mlp.", h)
    router = (config["num_experts_per_token"], 1, 1, config["routed_scaling_factor"])
    return x + experts(w, f"{at}block_sparse_moe.", h, router, "e_score_correction_bias", "w1 w3 w2", (0.0, 0.0))


def run(config: dict[str, Any], tensors: Tensors, input_ids: Tensor) -> dict[str, Tensor]:
    """Run a prompt (T,); give `residuals` (L+1, T, D) from the embedding on, `hidden` (T, D) behind the final norm, and
    `logits` (T, N), all fp64."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    is_ling = config["architectures"] == ["BailingMoeV3ForCausalLM"]
    layer, eps = (_ling_layer, 1e-6) if is_ling else (_kimi_layer, config["rms_norm_eps"])
    embedding = "model.word_embeddings.weight" if is_ling else "model.embed_tokens.weight"
    torch.set_default_dtype(torch.float64)
    try:
        residuals = [w[embedding][input_ids]]
        for i in range(config["num_hidden_layers"]):
            residuals.append(layer(w, config, i, residuals[-1]))
    finally:
        torch.set_default_dtype(torch.float32)
    hidden = rms(residuals[-1], w["model.norm.weight"], eps)
    return {"residuals": torch.stack(residuals), "hidden": hidden, "logits": hidden @ w["lm_head.weight"].T}


def run_mtp(config: dict[str, Any], tensors: Tensors, hidden: Tensor, next_ids: Tensor) -> dict[str, Tensor]:
    """Run the MTP layer from position 0: hidden (T, D) of the target, next_ids (T,) one position to the right."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    i = config["num_hidden_layers"]
    at = f"model.layers.{i}."
    torch.set_default_dtype(torch.float64)
    try:
        e = rms(w["model.word_embeddings.weight"][next_ids], w[f"{at}enorm.weight"], 1e-6)
        p = rms(hidden, w[f"{at}hnorm.weight"], 1e-6)
        x = torch.cat([e, p], dim=-1) @ w[f"{at}eh_proj.weight"].T
        h = rms(_ling_layer(w, config, i, x), w[f"{at}final_layernorm.weight"], 1e-6)
    finally:
        torch.set_default_dtype(torch.float32)
    return {"hidden": h, "logits": h @ w["lm_head.weight"].T}
