"""DSpark's draft network: a few decoder layers that read the target's hidden states, a Markov head, a confidence head.

Owns the weights and the passes over context and block. The round around them (when to inject, what to draw, how many
to verify) is `dspark`'s.

With s the position of the pending token x_s, the anchor, and R_l the target's residual stream behind layer l:

    C_j  = rms_norm(fc [R_l1[j] .. R_lm[j]], hidden_norm)                          context, j < s
    K, V = rotary_j(rms_norm(W_k C_j, k_norm)), W_v C_j                            for each draft layer, no other norm
    z    = embedding [x_s, MASK, .. MASK], B slots at positions s .. s+B-1
    z    = decoder layers (attention to context and block, SwiGLU);  h = rms_norm(z, norm)
    l_k  = lm_head h_k + bias_k;   c_k = sigmoid(w [h_k e_k] + b),   e_k = W1[token before slot k's]

    bias: vanilla  W2 e_k
          gated    W2 (sigmoid(G [h_k e_k] + g) * e_k)
          rnn      W2 tanh(o),  [a, b, o] = J [S_{k-1} e_k h_k] + j,
                   S_k = sigmoid(a) S_{k-1} + (1 - sigmoid(a)) tanh(b)

Source: DSpark (arXiv 2607.05147), section 3.1; DeepSpec (MIT).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from soloist.kernels.allreduce import TensorParallel, embed, linear_all_reduce
from soloist.kernels.draft_attention import append_context, draft_attention
from soloist.kernels.linear import linear, norm_linear
from soloist.kernels.norm import rms_norm
from soloist.kernels.packed import PackedWeight
from soloist.kernels.rotary import RotaryTable, make_rotary_table
from soloist.kernels.sampling import likeliest
from soloist.models.feed_forward import DenseFeedForward
from soloist.models.head import pick_likeliest, whole_logits
from soloist.models.layers import GroupedQueryAttention
from soloist.models.weights import Part, Weight, WeightSource, kv_rows, token_rows
from soloist.spec.dspark_config import DSparkConfig


@dataclass(frozen=True, kw_only=True)
class DraftContext:
    """Keys and values that the target's hidden states gave, for all layers of a draft. Any length can be cut off."""

    # (L, G, S, K), the target's dtype; keys after rotary. Rows behind the context are scratch of the block.
    k: torch.Tensor
    # (L, G, S, K).
    v: torch.Tensor


class DraftLayer:
    """One decoder layer of the draft: block attention, then SwiGLU.

    Args:
        weights: the source.
        index: of the layer.
        config: of the draft.
    """

    def __init__(self, weights: WeightSource, index: int, config: DSparkConfig) -> None:
        transformer, prefix = config.transformer, f"layers.{index}."
        # Only its weights are used: a block attends otherwise than a decoder.
        self.attention = GroupedQueryAttention(weights, prefix, transformer, has_qkv_bias=False, has_qk_norm=True)
        self.feed_forward = DenseFeedForward(
            weights,
            prefix,
            hidden_size=transformer.hidden_size,
            intermediate_size=transformer.intermediate_size,
            eps=transformer.rms_norm_eps,
        )
        self.window, self.is_causal = config.layer_windows[index], config.layer_is_causal[index]

    def __call__(
        self,
        x: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context_len: torch.Tensor,
        rotary: RotaryTable,
    ) -> torch.Tensor:
        """Transform the block's residual stream (B, D) with this layer's context (G, S, K)."""
        a = self.attention
        assert a.q_norm is not None and a.k_norm is not None
        qkv = norm_linear(x, a.norm, a.eps, a.qkv_proj)  # (B, (H+2G)*K)
        heads = draft_attention(
            qkv,
            k_cache,
            v_cache,
            context_len,
            rotary.cos,
            rotary.sin,
            num_heads=a.num_heads,
            q_norm=a.q_norm,
            k_norm=a.k_norm,
            eps=a.eps,
            window=self.window,
            is_causal=self.is_causal,
        )  # (B, H*K)
        return self.feed_forward(linear_all_reduce(heads, a.o_proj, x, a.group), None)


class MarkovHead:
    """The bias that a drafted token puts on the logits of the next slot; this one depends on the token alone.

    Args:
        weights: the source.
        config: of a draft with such a head. M below is its rank.
    """

    def __init__(self, weights: WeightSource, config: DSparkConfig) -> None:
        M, N = config.markov_rank, config.draft_vocab_size
        table = Part(name="markov_head.markov_w1.weight", shape=(config.transformer.vocab_size, M))
        self.w1 = weights.embedding(table)
        # Of the same tokens as a rank's part of the output head.
        self.w2 = weights.linear(Part(name="markov_head.markov_w2.weight", shape=(N, M), split=token_rows(N)))
        # (1, M) fp32: what a block begins with.
        self.start = torch.zeros(1, M, device=weights.device)

    @property
    def weights(self) -> list[Weight]:
        """What a step applies."""
        return [self.w2]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look tokens (n,) up: (n, M)."""
        return F.embedding(tokens, self.w1)

    def mix(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give what the bias of one slot is made from, by W2.

        Args:
            embedded: (1, M) of the token before the slot's.
            hidden: (1, D) of the slot.
            state: (1, M) fp32, `start` or what the slot before gave.

        Returns:
            (1, M), the dtype of `embedded`, and the state for the next slot.
        """
        return embedded, state

    def step(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the bias of one slot, (1, N) fp32 of this rank's tokens, and the state for the next; else as `mix`."""
        mixed, state = self.mix(embedded, hidden, state)
        return linear(mixed, self.w2, out_dtype=torch.float32), state


class GatedMarkovHead(MarkovHead):
    """A Markov head whose embedding is gated by the slot's hidden state."""

    def __init__(self, weights: WeightSource, config: DSparkConfig) -> None:
        super().__init__(weights, config)
        D, M = config.transformer.hidden_size, config.markov_rank
        self.gate_proj = weights.linear(Part(name="markov_head.gate_proj.weight", shape=(M, D + M)))
        self.gate_bias = weights.tensor(Part(name="markov_head.gate_proj.bias", shape=(M,)), init="bias")

    @property
    def weights(self) -> list[Weight]:
        return [self.w2, self.gate_proj]

    def mix(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.cat([hidden, embedded], dim=-1)  # (1, D+M)
        gate = linear(features, self.gate_proj, self.gate_bias, out_dtype=torch.float32).sigmoid()
        return (gate * embedded).to(embedded.dtype), state


class RecurrentMarkovHead(MarkovHead):
    """A Markov head with a state that runs through the block."""

    def __init__(self, weights: WeightSource, config: DSparkConfig) -> None:
        super().__init__(weights, config)
        D, M = config.transformer.hidden_size, config.markov_rank
        self.joint_proj = weights.linear(Part(name="markov_head.joint_proj.weight", shape=(3 * M, 2 * M + D)))
        self.joint_bias = weights.tensor(Part(name="markov_head.joint_proj.bias", shape=(3 * M,)), init="bias")

    @property
    def weights(self) -> list[Weight]:
        return [self.w2, self.joint_proj]

    def mix(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.cat([state.to(embedded.dtype), embedded, hidden], dim=-1)  # (1, 2M+D)
        joint = linear(features, self.joint_proj, self.joint_bias, out_dtype=torch.float32)
        keep, candidate, output = joint.chunk(3, dim=-1)  # (1, M) each
        state = torch.lerp(candidate.tanh(), state, keep.sigmoid())
        # The output comes from the same projection, not from the new state.
        return output.tanh().to(embedded.dtype), state


MARKOV_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}


class ConfidenceHead:
    """Estimates the probability that a draft is accepted, given that those before it are. Held in fp32.

    Args:
        weights: the source.
        config: of a draft with such a head.
    """

    def __init__(self, weights: WeightSource, config: DSparkConfig) -> None:
        self.has_markov = config.confidence_input == "hidden_and_markov"
        size = config.transformer.hidden_size + (config.markov_rank if self.has_markov else 0)
        f32 = torch.float32
        self.weight = weights.tensor(
            Part(name="confidence_head.proj.weight", shape=(1, size)), dtype=f32, init="normal"
        )
        self.bias = weights.tensor(Part(name="confidence_head.proj.bias", shape=(1,)), dtype=f32, init="zeros")
        # (drafts,) fp32: what the logit of each slot is divided by. None: the head is not calibrated.
        self.temperatures = None
        if config.confidence_temperatures is not None:
            self.temperatures = torch.tensor(config.confidence_temperatures, device=weights.device)

    def __call__(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """Give (n,) fp32 in [0, 1] for the first slots that predict.

        Args:
            hidden: (n, D) of these slots.
            embedded: (n, M) Markov embeddings of the tokens before them; None if the head does not look at them.
        """
        features = hidden.float()
        if self.has_markov:
            assert embedded is not None
            features = torch.cat([features, embedded.float()], dim=-1)  # (n, D+M)
        logits = torch.addmv(self.bias, features, self.weight[0])
        return (logits if self.temperatures is None else logits / self.temperatures[: logits.shape[0]]).sigmoid()


def _held_bytes(weight: Weight) -> int:
    """Bytes of a weight in memory."""
    return weight.num_bytes if isinstance(weight, PackedWeight) else weight.numel() * weight.element_size()


class DSparkModel:
    """The draft network.

    Args:
        config: what it is.
        weights: the source, of the ranks that share the layers; names are DeepSpec's.
        max_positions: rows of the context and its scratch.
        embed_tokens: the target's, to share it. None: the checkpoint's own.
        lm_head: the target's, to share it. None: the checkpoint's own.
        target_ids: (draft_vocab_size,) int64, the token that each row of the head stands for. None: its own number.
        vocabulary_group: the ranks that share embedding and heads, the target's. None: those that share the layers.
    """

    def __init__(
        self,
        config: DSparkConfig,
        weights: WeightSource,
        max_positions: int,
        *,
        embed_tokens: torch.Tensor | None = None,
        lm_head: Weight | None = None,
        target_ids: torch.Tensor | None = None,
        vocabulary_group: TensorParallel | None = None,
    ) -> None:
        self.config, self.target_ids, self.max_positions = config, target_ids, max_positions
        self.dtype, self.device = weights.dtype, weights.device
        self.layer_group, self.group = weights.group, vocabulary_group or weights.group
        t = config.transformer
        D, L, G, K = t.hidden_size, t.num_hidden_layers, t.num_key_value_heads, t.head_dim
        with weights.shared_by(self.group):
            if embed_tokens is None:
                embed_tokens = weights.embedding(embedding_part(config))
            if lm_head is None:
                lm_head = weights.linear(head_part(config))
            self.markov = MARKOV_HEADS[config.markov_head_type](weights, config) if config.markov_head_type else None
        self.embed_tokens, self.lm_head = embed_tokens, lm_head
        self.fc = weights.linear(Part(name="fc.weight", shape=(D, len(config.target_layer_ids) * D)))
        self.hidden_norm = weights.tensor(Part(name="hidden_norm.weight", shape=(D,)))
        self.layers = [DraftLayer(weights, index, config) for index in range(L)]
        # Read once more: one product then gives every layer's context.
        self.context_kv = weights.linear(
            *(
                Part(name=f"layers.{index}.self_attn.{name}_proj.weight", shape=(G * K, D), split=kv_rows(G))
                for index in range(L)
                for name in "kv"
            )
        )
        self.k_norms = torch.empty(L, K, dtype=self.dtype, device=self.device)
        for index, layer in enumerate(self.layers):
            assert layer.attention.k_norm is not None
            self.k_norms[index].copy_(layer.attention.k_norm)
        self.norm = weights.tensor(Part(name="norm.weight", shape=(D,)))
        self.confidence = ConfidenceHead(weights, config) if config.confidence_input else None
        self.rotary = make_rotary_table(K, t.rope_theta, max_positions, t.rope_scaling, device=self.device)

    def make_context(self) -> DraftContext:
        """Allocate an empty context of `max_positions` rows."""
        t = self.config.transformer
        shape = (t.num_hidden_layers, self.layer_group.share(t.num_key_value_heads), self.max_positions, t.head_dim)
        k, v = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))  # (L, G, S, K) each
        return DraftContext(k=k, v=v)

    def read_context(self, captured: torch.Tensor, context: DraftContext, context_len: torch.Tensor) -> None:
        """Store T tokens in rows context_len and behind, from the target's hidden states (T, layers, D)."""
        x = linear(captured.flatten(1), self.fc)  # (T, D)
        eps = self.config.transformer.rms_norm_eps
        kv = norm_linear(x, self.hidden_norm, eps, self.context_kv)  # (T, L*2*G*K)
        rotary = self.rotary
        append_context(kv, self.k_norms, eps, context.k, context.v, context_len, rotary.cos, rotary.sin)

    def run_block(
        self,
        block_ids: torch.Tensor,
        context: DraftContext,
        context_len: torch.Tensor,
        rotary: RotaryTable | None = None,
    ) -> torch.Tensor:
        """Run the block behind the first `context_len` rows of the context.

        Args:
            block_ids: (B,) int64, the anchor and the mask tokens.
            context: its scratch rows are written in place.
            context_len: () int32, the anchor's position.
            rotary: angles of the block's positions, for the self-test. None: the model's own.

        Returns:
            (B, D) behind the final norm, always finite: a broken draft must not break the answer.
        """
        x = embed(block_ids, self.embed_tokens, self.group)  # (B, D)
        for layer, k_cache, v_cache in zip(self.layers, context.k.unbind(), context.v.unbind(), strict=True):
            x = layer(x, k_cache, v_cache, context_len, rotary or self.rotary)
        return torch.nan_to_num(rms_norm(x, self.norm, self.config.transformer.rms_norm_eps), 0.0, 0.0, 0.0)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the output head to `run_block`'s hidden states (n, D): (n, draft_vocab_size) fp32, without the bias.

        Of several ranks each has the logits of its own tokens; `over_target_ids` puts them together.
        """
        return linear(hidden, self.lm_head, out_dtype=torch.float32)

    def read_bytes(self, context_len: int, num_drafts: int) -> int:
        """Count the bytes that a round reads: weights, once each time they are applied, and the context."""
        t = self.config.transformer
        weights = [self.fc, self.context_kv, self.lm_head]
        for layer in self.layers:
            weights += [layer.attention.qkv_proj, layer.attention.o_proj]
            weights += [layer.feed_forward.gate_up, layer.feed_forward.down]
        if self.markov is not None:
            weights += self.markov.weights * num_drafts
        num_heads = self.layer_group.share(t.num_key_value_heads)
        row_bytes = 2 * t.num_hidden_layers * num_heads * t.head_dim * self.dtype.itemsize
        return sum(map(_held_bytes, weights)) + context_len * row_bytes

    def over_target_ids(self, logits: torch.Tensor) -> torch.Tensor:
        """Spread the ranks' logits (n, draft_vocab_size) over the target's vocabulary (n, N): the rest is -inf."""
        logits = whole_logits(logits, self.config.draft_vocab_size, self.group)
        if self.target_ids is None:
            return logits
        spread = logits.new_full((logits.shape[0], self.config.transformer.vocab_size), float("-inf"))
        return spread.index_copy_(1, self.target_ids, logits)

    def whole_logits(self, logits: torch.Tensor, mixed: torch.Tensor | None) -> torch.Tensor:
        """Give the logits over the target's vocabulary (n, N) of slots, with the bias of the Markov head.

        Args:
            logits: `compute_logits` of the slots.
            mixed: (n, M) what the bias is made from. None: there is no Markov head.
        """
        if mixed is not None and self.markov is not None:
            logits = logits + linear(mixed, self.markov.w2, out_dtype=torch.float32)
        return self.over_target_ids(logits)

    def pick_likeliest(self, logits: torch.Tensor, mixed: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
        """Give the likeliest of the first `num_tokens` tokens, (n,) int64; else as `whole_logits`."""
        if self.target_ids is not None or mixed is None or self.markov is None:
            return likeliest(self.whole_logits(logits, mixed)[:, :num_tokens])[0]
        return pick_likeliest(mixed, None, 0.0, self.markov.w2, num_tokens, self.group, logits=logits)[0]


def embedding_part(config: DSparkConfig) -> Part:
    """Name the token embedding of a draft that has its own."""
    t = config.transformer
    return Part(name="embed_tokens.weight", shape=(t.vocab_size, t.hidden_size), split=token_rows(t.vocab_size))


def head_part(config: DSparkConfig) -> Part:
    """Name the output head of a draft that has its own."""
    N = config.draft_vocab_size
    return Part(name="lm_head.weight", shape=(N, config.transformer.hidden_size), split=token_rows(N))
