"""Parts of `kernels.py`: linear maps, and attention to a cache of keys and values, as the engine runs them.

Every call of a captured chain reads other weights, more than 200 MB in all, so nothing comes out of the L2.
"""

import torch
import torch.nn.functional as F

import chains
from chains import rand, time_chain
from dense_maps import PROBLEMS, Weights
from kernel_rows import CONTEXT_LEN, WIDTHS, KernelRows, error
from soloist.kernels.attention import attention

# Of Qwen2.5-1.5B.
QWEN, NUM_HEADS, NUM_GROUPS, HEAD_DIM, NUM_LAYERS = "qwen2.5-1.5b", 12, 2, 128, 28
# Whose sizes a map has, by the first word of its name.
SHAPES = {"qwen": QWEN, "ling": "flash-tp1"}


class AttentionInputs:
    """Caches of many layers and one step's rows, at Qwen2.5-1.5B's sizes."""

    def __init__(self, T: int, num_layers: int, *, context_len: int, room: int) -> None:
        H, G, K, S = NUM_HEADS, NUM_GROUPS, HEAD_DIM, context_len + room
        shape = (num_layers, G, S, K)
        self.k, self.v, self.qkv = rand(*shape), rand(*shape), rand(T, (H + 2 * G) * K)
        # No rotation.
        self.cos, self.sin = (torch.full((S, K // 2), x, device=chains.DEVICE) for x in (1.0, 0.0))
        self.context_len = torch.tensor(context_len, dtype=torch.int32, device=chains.DEVICE)

    def attend(self, layer: int, T: int) -> torch.Tensor:
        """Run one layer's attention as the engine does."""
        cache = (self.k[layer], self.v[layer], self.context_len, self.cos, self.sin)
        return attention(self.qkv[:T], *cache, num_heads=NUM_HEADS, num_kv_heads=NUM_GROUPS)

    def reference(self, T: int) -> torch.Tensor:
        """Plain attention in fp32 of layer 0."""
        H, G, K = NUM_HEADS, NUM_GROUPS, HEAD_DIM
        n = int(self.context_len)
        q, k, v = self.qkv[:T].float().view(T, -1, K).split((H, G, G), dim=1)
        keys = torch.cat([self.k[0, :, :n].float(), k.transpose(0, 1)], 1).repeat_interleave(H // G, 0)
        values = torch.cat([self.v[0, :, :n].float(), v.transpose(0, 1)], 1).repeat_interleave(H // G, 0)
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) * K**-0.5
        scores.masked_fill_(torch.ones(T, n + T, dtype=torch.bool, device=scores.device).triu(n + 1), -torch.inf)
        return (scores.softmax(-1) @ values).transpose(0, 1).reshape(T, -1)


def bench_linear(rows: KernelRows) -> None:
    """Every linear map at every width, output heads with their argmax among them, and cuBLAS beside it."""
    for p in PROBLEMS:
        weights = Weights(p)
        reference = weights.reference(max(WIDTHS))
        model, name = p.name.split()
        for T in WIDTHS:
            rows.check(p.name, T, weights.error(T, None, reference))
            more = {}
            if T in (min(WIDTHS), max(WIDTHS)):
                x = weights.x[:T]
                cublas = [lambda w=w: F.linear(x, w) for w in weights.copies]  # type: ignore[misc]
                more["cublas_us"] = round(time_chain(cublas * 4 if len(cublas) < 4 else cublas)[0], 2)
            operator = "head" if p.kind == "argmax" else f"linear {name}"
            rows.add(SHAPES[model], operator, T, time_chain(weights.calls(T, None)), p.weight_bytes, **more)
        # Before the next one's are made.
        del weights, reference


def bench_attention(rows: KernelRows) -> None:
    """A step's attention at every width, and a prompt's with PyTorch's beside it."""
    H, G, K = NUM_HEADS, NUM_GROUPS, HEAD_DIM
    inputs = AttentionInputs(max(WIDTHS), NUM_LAYERS, context_len=CONTEXT_LEN, room=256)
    for T in WIDTHS:
        reference = inputs.reference(T)
        rows.check("attention", T, error(inputs.attend(0, T), reference))
        us = time_chain([lambda i=i: inputs.attend(i, T) for i in range(NUM_LAYERS)])  # type: ignore[misc]
        rows.add(QWEN, "attention", T, us, 4 * G * K * (CONTEXT_LEN + T))
    T = CONTEXT_LEN
    prompt = AttentionInputs(T, 1, context_len=0, room=T)
    q, k, v = prompt.qkv.view(T, -1, K).transpose(0, 1)[None].split((H, G, G), dim=1)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    rows.check("attention of a prompt", T, error(prompt.attend(0, T).view(T, H, K).transpose(0, 1), expected[0]))
    theirs, _ = time_chain([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)])
    us = time_chain([lambda: prompt.attend(0, T)])
    # Two products of half of all pairs: that is what it takes, not the bytes.
    more = {"pytorch_us": round(theirs, 2), "tflop_per_s": round(2 * T * T * H * K / us[0] / 1e6)}
    rows.add(QWEN, "attention of a prompt", T, us, 4 * T * (H + G) * K, **more)
