"""DSpark once more, naively: from the specification's formulas, on a dict of tensors, all at once, no cache, fp64.

Shares no code with the package. Names are DeepSpec's.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and conventions of a draft."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    theta: float
    block_size: int
    mask_token_id: int
    markov: str | None
    windows: tuple[int | None, ...] = ()
    causal: tuple[bool, ...] = ()


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(heads: torch.Tensor, first: int, theta: float) -> torch.Tensor:
    """Rotate heads (n, heads, K) that stand at `first` and behind, half-split."""
    n, _, K = heads.shape
    positions = torch.arange(first, first + n, dtype=torch.float64)[:, None]
    angles = positions * theta ** (-2 * torch.arange(K // 2, dtype=torch.float64) / K)  # (n, K/2)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = heads[..., : K // 2], heads[..., K // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


class Reference:
    def __init__(self, shape: Shape, tensors: dict[str, torch.Tensor]) -> None:
        self.shape = shape
        self.w = {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """Fuse captured hidden states (n, layers, D): (n, D)."""
        return norm(features.double().flatten(1) @ self.w["fc.weight"].T, self.w["hidden_norm.weight"], self.shape.eps)

    def keys_values(self, layer: int, rows: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Project rows (n, D) that stand at `first` and behind: keys and values (n, G, K)."""
        s, at = self.shape, f"layers.{layer}.self_attn."
        k = (rows @ self.w[at + "k_proj.weight"].T).view(-1, s.num_kv_heads, s.head_dim)
        v = (rows @ self.w[at + "v_proj.weight"].T).view(-1, s.num_kv_heads, s.head_dim)
        return rotate(norm(k, self.w[at + "k_norm.weight"], s.eps), first, s.theta), v

    def block(self, features: torch.Tensor, anchor_token: int) -> torch.Tensor:
        """Run the block behind the tokens whose hidden states (s, layers, D) are given: (B, D) after the final norm."""
        s, w = self.shape, self.w
        start = features.shape[0]
        ids = [anchor_token] + [s.mask_token_id] * (s.block_size - 1)
        z = w["embed_tokens.weight"][ids]
        fused = self.context(features)
        for layer in range(s.num_layers):
            at = f"layers.{layer}."
            u = norm(z, w[at + "input_layernorm.weight"], s.eps)
            ck, cv = self.keys_values(layer, fused, 0)
            bk, bv = self.keys_values(layer, u, start)
            keys, values = torch.cat([ck, bk]), torch.cat([cv, bv])
            q = (u @ w[at + "self_attn.q_proj.weight"].T).view(-1, s.num_heads, s.head_dim)
            q = rotate(norm(q, w[at + "self_attn.q_norm.weight"], s.eps), start, s.theta)
            out = torch.zeros_like(q)
            for t in range(s.block_size):
                for h in range(s.num_heads):
                    g = h // (s.num_heads // s.num_kv_heads)
                    here = start + t
                    scores = keys[:, g] @ q[t, h] / math.sqrt(s.head_dim)
                    for j in range(len(scores)) if s.causal else ():
                        hidden = s.causal and s.causal[layer] and j > here
                        far = s.windows and s.windows[layer] is not None and abs(j - here) >= s.windows[layer]
                        if hidden or far:
                            scores[j] = -math.inf
                    out[t, h] = scores.softmax(0) @ values[:, g]
            z = z + out.flatten(1) @ w[at + "self_attn.o_proj.weight"].T
            n = norm(z, w[at + "post_attention_layernorm.weight"], s.eps)
            gate, up = n @ w[at + "mlp.gate_proj.weight"].T, n @ w[at + "mlp.up_proj.weight"].T
            z = z + (silu(gate) * up) @ w[at + "mlp.down_proj.weight"].T
        return norm(z, w["norm.weight"], s.eps)

    def biases(self, before: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Markov biases of slots (n, D) whose tokens before them are known, as in training: (n, N)."""
        w, kind = self.w, self.shape.markov
        e = w["markov_head.markov_w1.weight"][before]
        w2 = w["markov_head.markov_w2.weight"]
        if kind == "vanilla":
            return e @ w2.T
        if kind == "gated":
            features = torch.cat([hidden, e], -1)
            g = torch.sigmoid(features @ w["markov_head.gate_proj.weight"].T + w["markov_head.gate_proj.bias"])
            return (g * e) @ w2.T
        state, rows = torch.zeros_like(e[0]), []
        for slot in range(len(before)):
            features = torch.cat([state, e[slot], hidden[slot]])
            joint = w["markov_head.joint_proj.weight"] @ features + w["markov_head.joint_proj.bias"]
            a, b, o = joint.chunk(3)
            state = torch.sigmoid(a) * state + (1 - torch.sigmoid(a)) * torch.tanh(b)
            rows.append(w2 @ torch.tanh(o))
        return torch.stack(rows)

    def logits(self, hidden: torch.Tensor, anchor_token: int, drafted: list[int]) -> torch.Tensor:
        """Logits of the slots that predict (n, D), given the tokens drafted before each: (n, N)."""
        base = hidden @ self.w["lm_head.weight"].T
        if self.shape.markov is None:
            return base
        return base + self.biases([anchor_token, *drafted][: len(hidden)], hidden)

    def walk(self, hidden: torch.Tensor, anchor_token: int) -> list[int]:
        """Draft greedily, token by token."""
        drafted: list[int] = []
        for slot in range(len(hidden)):
            drafted.append(int(self.logits(hidden[: slot + 1], anchor_token, drafted)[slot].argmax()))
        return drafted

    def confidence(self, hidden: torch.Tensor, anchor_token: int, drafted: list[int]) -> torch.Tensor:
        weight = self.w["confidence_head.proj.weight"][0]
        if len(weight) > hidden.shape[1]:
            before = [anchor_token, *drafted][: len(hidden)]
            hidden = torch.cat([hidden, self.w["markov_head.markov_w1.weight"][before]], -1)
        return torch.sigmoid(hidden @ weight + self.w["confidence_head.proj.bias"])
