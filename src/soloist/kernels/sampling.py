"""Sampling operators: counter-based random numbers, the law a request samples from, drawing from it, log probabilities.

Parameters are device scalars and shapes are fixed, so that a captured step serves every request; only references read
them on the host. What is a plain composition of PyTorch's own operators runs as such on a GPU too. N is the vocabulary
that may be drawn: callers cut the padding rows of a model's head off before.

    uniform        u = Philox4x32-10(key = seed, counter = (position, stream))
    penalize       z_v <- z_v / r if z_v > 0 else z_v * r    for v in prompt or output
                   z_v <- z_v - frequency * count_v - presence * [count_v > 0]
    target_probs   p = softmax(z / temperature), cut below the top-k, top-p and min-p thresholds, renormalised
    draw           the first v with cdf_v > u * cdf_N
    likeliest      argmax z
    top_logprobs   log p_v = z_v - logsumexp(z)
"""

from enum import IntEnum

import torch

from soloist.kernels.check import expect, use_reference
from soloist.kernels.launch import HAS_TRITON

if HAS_TRITON:
    from soloist.kernels import sampling_triton

# Most alternatives reported beside each token; the width of the log probability buffers.
MAX_TOP_LOGPROBS = 20

_WORD = 0xFFFFFFFF
# Random123's constants for 32-bit words: the first of each pair belongs to counter word 2 and to key word 0.
_ROUND_MULTIPLIERS = (0xCD9E8D57, 0xD2511F53)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# Likeliest tokens looked at first when a nucleus is searched; most nuclei are smaller.
_HEAD_SIZE = 256


class Stream(IntEnum):
    """Independent sequences of random numbers of one seed."""

    # The token at a position, when it is drawn from the target or from a residual.
    SAMPLE = 0
    # Whether a draft token is accepted; numbered by `draft_counter`.
    ACCEPT = 1
    # Tokens a drafter draws; numbered by `draft_counter`.
    DRAFT = 2


def draft_counter(context_len: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Number draft rows so that no two proposals share a random number: (rows) int64.

    A position is drafted again when an earlier proposal was cut before it. Block verification looks at the whole
    proposal, so a number that has decided one cut must not decide the next.

    Args:
        context_len: () integer, committed tokens before the step.
        rows: rows of the step, 0..15.
    """
    return context_len * 16 + rows.long()


def uniform_ref(seed: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """Philox4x32-10 in int64 arithmetic, which wraps as unsigned multiplication does.

    Only the low 32 bits of `odd` and of the keys mean anything; `even` is cut to them, as it is multiplied.
    """
    word = torch.tensor(_WORD, device=seed.device)
    shift = torch.tensor(32, device=seed.device)
    multipliers = torch.tensor(_ROUND_MULTIPLIERS, device=seed.device).view(2, 1)
    steps = torch.tensor(_KEY_STEPS, device=seed.device)
    keys = torch.stack([seed, seed >> shift]) + steps * torch.arange(10, device=seed.device)[:, None]  # (10, 2)
    even = torch.stack([torch.full_like(positions, stream), positions & word])  # (2, T): counter words 2 and 0
    odd = torch.stack([positions >> shift, torch.zeros_like(positions)])  # (2, T): counter words 1 and 3
    for key in keys.unsqueeze(-1).unbind():
        products = even * multipliers
        even = ((products >> shift ^ odd ^ key) & word).flip(0)
        odd = products
    # 23 bits and a half: exact in fp32, never 0, never 1.
    return ((even[1] >> 9).float() + 0.5) * 2.0**-23


def uniform(seed: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """Give the uniform random number of each position: a function of (seed, position, stream) and of nothing else.

    The bits are word 0 of `tl.philox(seed, position, position >> 32, stream, 0)` on 32-bit words.

    Args:
        seed: () int64.
        positions: (T,) int64.
        stream: of `Stream`.

    Returns:
        (T,) fp32, in (0, 1), multiples of 2**-24.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011), Philox4x32-10.
    """
    expect(seed, "", torch.int64, {}, name="seed")
    expect(positions, "T", torch.int64, {}, name="positions")
    if use_reference(positions):
        return uniform_ref(seed, positions, stream)
    return sampling_triton.uniform(seed, positions, stream)


def penalize_ref(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Count per row, then penalise."""
    T, N = logits.shape
    counts = output_counts.float().expand(T, N).clone()  # (T, N)
    # Draft t stands before rows t+1 and later.
    is_before = torch.ones(T, T - 1, device=logits.device).tril(-1)  # (T, T-1)
    counts.scatter_add_(1, draft_tokens.expand(T, T - 1), is_before)
    is_used = counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(is_used | prompt_mask, repeated, logits)
    return logits - frequency * counts - presence * is_used


def penalize(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Apply the three penalties; row t counts the drafts before it as output.

    Repetition looks at prompt and output, as in transformers; presence and frequency at the output only, as in OpenAI's
    API.

    Args:
        logits: (T, N) fp32.
        draft_tokens: (T-1,) int64.
        prompt_mask: (N) bool, ids the prompt holds.
        output_counts: (N) int32, how often the answer so far holds each id, the pending token included.
        repetition: () fp32, above 0; 1 changes nothing.
        presence: () fp32; 0 changes nothing.
        frequency: () fp32; 0 changes nothing.

    Returns:
        (T, N) fp32.

    Source: repetition from CTRL (arXiv 1909.05858, section 4.1), presence and frequency from OpenAI's API reference.
    """
    dims: dict[str, int] = {}
    expect(logits, "T N", torch.float32, dims, name="logits")
    expect(draft_tokens, f"{dims['T'] - 1}", torch.int64, dims, name="draft_tokens")
    expect(prompt_mask, "N", torch.bool, dims, name="prompt_mask")
    expect(output_counts, "N", torch.int32, dims, name="output_counts")
    return penalize_ref(logits, draft_tokens, prompt_mask, output_counts, repetition, presence, frequency)


def _head_threshold(probs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Give the least probability that top-k, then top-p within what it kept, let pass: (T, 1)."""
    N = probs.shape[-1]
    size = top_k if top_k < N else min(_HEAD_SIZE, N)
    while True:
        head = probs.topk(size).values  # (T, size), falling
        mass = head.cumsum(-1)  # (T, size)
        if size in (top_k, N) or bool((mass[:, -1] >= top_p).all()):
            break
        size = min(8 * size, N)
    if top_p >= 1:
        return head[:, -1:]
    total = mass[:, -1:] if top_k < N else 1.0
    # A token stays if those before it do not reach the nucleus; the first always does.
    num_kept = (mass - head < top_p * total).sum(-1, keepdim=True).clamp_min(1)  # (T, 1)
    return head.gather(-1, num_kept - 1)


def target_probs_ref(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Softmax, threshold, renormalise."""
    # The shift first: a tiny temperature then gives -inf, never inf - inf.
    probs = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)  # (T, N)
    k, p = min(int(top_k), logits.shape[-1]), float(top_p)
    has_head = k < logits.shape[-1] or p < 1
    if not has_head and float(min_p) == 0:
        return probs
    threshold = min_p * probs.amax(-1, keepdim=True)  # (T, 1)
    if has_head:
        threshold = torch.maximum(threshold, _head_threshold(probs, k, p))
    probs = torch.where(probs >= threshold, probs, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def target_probs_sorted(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The same law from a full sort: parameters stay on the device and shapes fixed, so a captured step can run it."""
    probs = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)  # (T, N)
    falling = probs.sort(-1, descending=True).values
    is_in_top_k = torch.arange(probs.shape[-1], device=probs.device) < top_k  # (N)
    head = falling * is_in_top_k
    mass = head.cumsum(-1)  # (T, N)
    # As in the reference, a token stays if those before it do not reach the nucleus; the first always does.
    is_kept = is_in_top_k & ((mass - head < top_p * mass[:, -1:]) | (top_p >= 1))
    num_kept = is_kept.sum(-1, keepdim=True).clamp_min(1)  # (T, 1)
    threshold = torch.maximum(min_p * falling[:, :1], falling.gather(-1, num_kept - 1))
    probs = torch.where(probs >= threshold, probs, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def target_probs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    has_filters: bool = True,
) -> torch.Tensor:
    """Give the law a request samples from: temperature, then top-k, then top-p within what top-k kept, and min-p.

    Every filter keeps the tokens from a probability upwards, so tokens as likely as the last one kept are kept as well,
    and the law does not depend on the order of ids.

    Args:
        logits: (T, N) fp32.
        temperature: () fp32, above 0.
        top_k: () int32, at least 1; N or more keeps all.
        top_p: () fp32 in (0, 1]; 1 keeps all.
        min_p: () fp32 in [0, 1), relative to the likeliest token; 0 keeps all.
        has_filters: False where the three keep all, which the host knows: a GPU then need not sort.

    Returns:
        (T, N) fp32; each row sums to 1.

    Source: top-p from arXiv 1904.09751, section 3.1; min-p from arXiv 2407.01082.
    """
    expect(logits, "T N", torch.float32, {}, name="logits")
    for name, scalar in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        expect(scalar, "", torch.float32, {}, name=name)
    expect(top_k, "", torch.int32, {}, name="top_k")
    if not has_filters:
        return ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    form = target_probs_ref if use_reference(logits) else target_probs_sorted
    return form(logits, temperature, top_k, top_p, min_p)


def draw_ref(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Invert the cumulated law."""
    cdf = probs.cumsum(-1)  # (T, N)
    tokens = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True)  # (T, 1)
    # Only a law that is not finite leaves the vocabulary; its step is refused later, but its id must be one.
    return tokens.squeeze(-1).clamp_max(probs.shape[-1] - 1)


def draw(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one token a row by inverting the cumulated law; a token of probability 0 is never drawn.

    Args:
        probs: (T, N) fp32, not negative; rows need not sum to 1.
        uniforms: (T,) fp32 in (0, 1).

    Returns:
        (T,) int64.
    """
    dims: dict[str, int] = {}
    expect(probs, "T N", (torch.float32, torch.float64), dims, name="probs")
    expect(uniforms, "T", probs.dtype, dims, name="uniforms")
    if use_reference(probs):
        return draw_ref(probs, uniforms)
    return sampling_triton.draw(probs, uniforms)


def likeliest_ref(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Argmax and its value: a NaN anywhere in a row is the row's maximum."""
    tokens = logits.argmax(-1)
    return tokens, logits.gather(-1, tokens[:, None]).squeeze(-1)


def likeliest(logits: torch.Tensor, *, first_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the likeliest token of each row, the lowest id of equals, and its logit.

    Args:
        logits: (T, N) fp32.
        first_id: what the first column stands for.

    Returns:
        (T,) int64 tokens and (T,) fp32 logits. A logit is not finite exactly if its row holds a NaN or +inf, or nothing
        but -inf, so it also says whether the row can be trusted.
    """
    expect(logits, "T N", torch.float32, {}, name="logits")
    if not use_reference(logits):
        return sampling_triton.likeliest(logits, first_id)
    tokens, highest = likeliest_ref(logits)
    return (tokens + first_id if first_id else tokens), highest


def top_logprobs_ref(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise what is reported, not the whole row."""
    normaliser = logits.logsumexp(-1, keepdim=True)  # (T, 1)
    top = logits.topk(min(MAX_TOP_LOGPROBS, logits.shape[-1]))
    chosen = logits.gather(-1, tokens[:, None]) - normaliser
    return chosen.squeeze(-1), top.indices, top.values - normaliser


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give the log probability of one token a row, and the likeliest tokens with theirs.

    Args:
        logits: (T, N) fp32.
        tokens: (T,) int64.

    Returns:
        (T,) fp32 of `tokens`; (T, M) int64 and (T, M) fp32 of the M = min(20, N) likeliest, falling.
    """
    dims: dict[str, int] = {}
    expect(logits, "T N", torch.float32, dims, name="logits")
    expect(tokens, "T", torch.int64, dims, name="tokens")
    return top_logprobs_ref(logits, tokens)
