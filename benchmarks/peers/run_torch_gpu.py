"""Times greedy decoding of a Qwen2 model as a competent PyTorch user writes it: static cache, one-token step, no waits.

Usage: run_torch_gpu.py CONFIG.json FORM CONTEXT_LEN NEW_TOKENS [DEVICE]; prints one JSON line. FORM is one of FORMS:
the step as it is; compiled by `torch.compile(mode="reduce-overhead")`; the same with every key and value head copied
for each of its queries, as was done before `enable_gqa`, because PyTorch has more kernels for that; the same with
`flex_attention`, which stops at the context's end where a mask reads the whole cache. Weights are random, prefill is
left out of the time.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

REPEATS = 3
# What each is called.
FORMS = {
    "eager": "eager",
    "sdpa": "torch.compile(reduce-overhead), sdpa with enable_gqa",
    "repeat": "torch.compile(reduce-overhead), sdpa of repeated heads",
    "flex": "torch.compile(reduce-overhead), flex",
}


class Attention(nn.Module):
    """Grouped-query attention over a cache of fixed size."""

    def __init__(self, config: dict, size: int, form: str) -> None:
        super().__init__()
        self.form = form
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["hidden_size"] // self.heads
        self.qkv = nn.Linear(config["hidden_size"], (self.heads + 2 * self.kv_heads) * self.head_dim)
        self.out = nn.Linear(config["hidden_size"], config["hidden_size"], bias=False)
        shape = (1, self.kv_heads, size, self.head_dim)
        self.register_buffer("k_cache", torch.zeros(shape))
        self.register_buffer("v_cache", torch.zeros(shape))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, mask) -> Tensor:
        sizes = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (
            part.view(1, -1, part.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2)
            for part in self.qkv(x).split(sizes, dim=-1)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self.k_cache[:, :, position] = k
        self.v_cache[:, :, position] = v
        if self.form == "flex":
            y = flex_attention(q, self.k_cache, self.v_cache, block_mask=mask, enable_gqa=True)
        elif self.form == "repeat":
            groups = self.heads // self.kv_heads
            keys, values = (cache.repeat_interleave(groups, dim=1) for cache in (self.k_cache, self.v_cache))
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        else:
            y = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(1, -1, self.heads * self.head_dim))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: dict, size: int, form: str) -> None:
        super().__init__()
        D, width = config["hidden_size"], config["intermediate_size"]
        self.norm_1, self.norm_2 = (nn.RMSNorm(D, eps=config["rms_norm_eps"]) for _ in range(2))
        self.attention = Attention(config, size, form)
        self.gate, self.up = (nn.Linear(D, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, D, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, mask) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin, position, mask)
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """The decoder, with a tied output head."""

    def __init__(self, config: dict, size: int, form: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, size, form) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        powers = torch.arange(0, head_dim, 2).float() / head_dim
        angles = torch.outer(torch.arange(size).float(), config["rope_theta"] ** -powers).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("mask", torch.tril(torch.ones(size, size, dtype=torch.bool)) if form != "flex" else None)

    def forward(self, ids: Tensor, position: Tensor, mask=None) -> Tensor:
        """Give the likeliest token behind the last one: (1, 1)."""
        if self.mask is not None:
            mask = self.mask[position][None, None]
        x, cos, sin = self.embed(ids), self.cos[position], self.sin[position]
        for layer in self.layers:
            x = layer(x, cos, sin, position, mask)
        logits = F.linear(self.norm(x[:, -1:]), self.embed.weight)
        return logits.argmax(-1)


def main() -> None:
    config, form = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    context_len, num_new = int(sys.argv[3]), int(sys.argv[4])
    device = sys.argv[5] if len(sys.argv) > 5 else "cuda"
    size = -(-(context_len + num_new + 1) // 128) * 128
    with torch.device(device):
        model = Model(config, size, form)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.02)
    rotary = (model.cos.bfloat16(), model.sin.bfloat16())
    model = model.to(torch.bfloat16).eval()
    model.cos, model.sin = rotary

    blocks = None
    if form == "flex":
        blocks = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, size, size, device=device)

    def step(ids: Tensor, position: Tensor) -> Tensor:
        mask = None
        if form == "flex":
            # The row of blocks that this position has, and its offset within it.
            mask = blocks[:, :, position // blocks.BLOCK_SIZE[0]]
            mask.mask_mod = lambda b, h, q, k: q + position[0] >= k
            mask.seq_lengths = (1, size)
        return model(ids, position, mask)

    decode = step if form == "eager" else torch.compile(step, mode="reduce-overhead", fullgraph=True)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    started_s = time.perf_counter()
    tpot_ms = []
    with torch.no_grad():
        for _ in range(REPEATS + 1):
            # The context is whatever lies in the cache: a step takes as long.
            ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
            position = torch.full((1,), context_len, dtype=torch.int64, device=device)
            for i in range(num_new):
                if i == 8:
                    wait()
                    begin_s = time.perf_counter()
                ids = decode(ids, position).clone()
                position = position + 1
            wait()
            tpot_ms.append(1e3 * (time.perf_counter() - begin_s) / (num_new - 8))
            if len(tpot_ms) == 1:
                warm_up_s = time.perf_counter() - started_s
    result = {
        "name": f"PyTorch, {FORMS[form]}",
        "version": torch.__version__,
        "tpot_ms_median": statistics.median(tpot_ms[1:]),
        "tpot_ms_range": [min(tpot_ms[1:]), max(tpot_ms[1:])],
        "warm_up_s": warm_up_s,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
