"""The DSpark network as a trainer runs it: all blocks of all documents at once, each as inference would see it.

Owns the parameters, by DeepSpec's names, and the pass over many anchors; equations are in `spec.dspark_model`. A block
sees the context before its anchor and itself, nothing else, so a pass equals as many passes of inference.

Source: DSpark (arXiv 2607.05147), section 3.1; DeepSpec (MIT).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from soloist.errors import UnsupportedError
from soloist.kernels.rotary import make_rotary_table
from soloist.spec.dspark_config import DSparkConfig
from soloist.train import operators as op
from soloist.train.documents import Documents

# Standard deviation that maps and tables start with.
INIT_STD = 0.02


class _Scale(nn.Module):
    """Weight of a norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def _linear(inputs: int, outputs: int, *, has_bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=has_bias)


class _Attention(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        t = config.transformer
        D, H, G, K = t.hidden_size, t.num_attention_heads, t.num_key_value_heads, t.head_dim
        self.q_proj, self.k_proj, self.v_proj = _linear(D, H * K), _linear(D, G * K), _linear(D, G * K)
        self.o_proj = _linear(H * K, D)
        self.q_norm, self.k_norm = _Scale(K), _Scale(K)


class _SwiGLU(nn.Module):
    def __init__(self, D: int, F: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = _linear(D, F), _linear(D, F), _linear(F, D)


class _Layer(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        t = config.transformer
        self.input_layernorm, self.post_attention_layernorm = _Scale(t.hidden_size), _Scale(t.hidden_size)
        self.self_attn = _Attention(config)
        self.mlp = _SwiGLU(t.hidden_size, t.intermediate_size)


class _MarkovHead(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        D, M = config.transformer.hidden_size, config.markov_rank
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.transformer.vocab_size, M)
        self.markov_w2 = _linear(M, config.draft_vocab_size)
        if self.kind == "gated":
            self.gate_proj = _linear(D + M, M, has_bias=True)
        elif self.kind == "rnn":
            self.joint_proj = _linear(2 * M + D, 3 * M, has_bias=True)

    def inputs(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Give what W2 is applied to, for blocks (n, B, M) of tokens before each slot and (n, B, D) hidden states."""
        if self.kind == "gated":
            gate = op.linear(torch.cat([hidden, embedded], dim=-1), self.gate_proj.weight, self.gate_proj.bias)
            return (op.widen(gate).sigmoid() * op.widen(embedded)).to(embedded.dtype)
        if self.kind == "rnn":
            state = op.widen(torch.zeros_like(embedded[:, 0]))  # (n, M)
            outputs = []
            for e, h in zip(embedded.unbind(1), hidden.unbind(1), strict=True):
                features = torch.cat([state.to(e.dtype), e, h], dim=-1)
                joint = op.widen(op.linear(features, self.joint_proj.weight, self.joint_proj.bias))
                keep, candidate, output = joint.chunk(3, dim=-1)
                state = torch.lerp(candidate.tanh(), state, keep.sigmoid())
                outputs.append(output.tanh().to(e.dtype))
            return torch.stack(outputs, dim=1)
        return embedded


class _Confidence(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.has_markov = config.confidence_input == "hidden_and_markov"
        self.proj = _linear(config.transformer.hidden_size + self.has_markov * config.markov_rank, 1, has_bias=True)


class DraftNetwork(nn.Module):
    """The trainable part of a draft; embedding and output head are the target's and stay as they are.

    Args:
        config: of a draft whose slot 0 predicts and whose layers see everything.
        embed_tokens: (N, D) the target's.
        seed: of the first weights.
        final_norm: (D) the target's final norm, which the draft's begins as: the head is made for rows of its size, and
            ones would take thousands of steps to get there. None: ones.

    Raises:
        UnsupportedError: the config asks for windows, causal blocks, a reduced vocabulary or the other slot convention.
    """

    def __init__(
        self, config: DSparkConfig, embed_tokens: torch.Tensor, seed: int = 0, final_norm: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        t = config.transformer
        is_plain = not any(config.layer_windows) and not any(config.layer_is_causal)
        if not is_plain or not config.slot0_predicts or config.draft_vocab_size != t.vocab_size:
            raise UnsupportedError(
                "drafts are trained with full attention inside a block, the whole vocabulary and a slot 0 that predicts"
            )
        self.config = config
        self.fc = _linear(len(config.target_layer_ids) * t.hidden_size, t.hidden_size)
        self.hidden_norm = _Scale(t.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(t.num_hidden_layers))
        self.norm = _Scale(t.hidden_size)
        self.markov_head = _MarkovHead(config) if config.markov_head_type else None
        self.confidence_head = _Confidence(config) if config.confidence_input else None
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, 0.0, INIT_STD, generator=generator)
            elif parameter.shape != (t.hidden_size,) and parameter.shape != (t.head_dim,):
                nn.init.zeros_(parameter)
        self.to(embed_tokens.device)
        if final_norm is not None:
            with torch.no_grad():
                self.norm.weight.copy_(final_norm)
        self.embed_tokens = embed_tokens
        device = embed_tokens.device
        table = make_rotary_table(t.head_dim, t.rope_theta, t.max_position_embeddings, t.rope_scaling, device=device)
        self.cos, self.sin = table.cos, table.sin

    def forward(
        self,
        captured: torch.Tensor,
        documents: Documents,
        anchor_ids: torch.Tensor,
        anchors: torch.Tensor,
        previous_ids: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Run every block.

        Args:
            captured: (T, layers, D) the target's residual streams.
            documents: of these T rows.
            anchor_ids: (n, A) int64, for each document the tokens that blocks begin with.
            anchors: (n, A) int64, their positions; a block sees the rows before.
            previous_ids: (n, A, B) int64, the token before each slot's, as the text has it.

        Returns:
            (n*A*B, D) behind the final norm; (n*A*B, M) what W2 is applied to, None without a Markov head; (n*A*B)
            fp32 confidences before their sigmoid, None without a confidence head.
        """
        config, t = self.config, self.config.transformer
        eps, B = t.rms_norm_eps, config.block_size
        n, A = anchors.shape
        dtype = captured.dtype
        context = op.rms_norm(op.linear(captured.flatten(1), self.fc.weight), self.hidden_norm.weight, eps)  # (T, D)
        block_ids = torch.full((n, A, B), config.mask_token_id, device=anchors.device)
        block_ids[..., 0] = anchor_ids
        x = F.embedding(block_ids.flatten(), self.embed_tokens).to(dtype)  # (n*A*B, D)
        positions = anchors[..., None] + torch.arange(B, device=anchors.device)  # (n, A, B)
        attend = self._make_attention(documents, anchors, positions)
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            a, m = layer.self_attn, layer.mlp
            h = op.rms_norm(x, layer.input_layernorm.weight, eps)
            x = x + op.linear(attend(a, h, context), a.o_proj.weight)
            h = op.rms_norm(x, layer.post_attention_layernorm.weight, eps)
            gate_up = torch.cat([m.gate_proj.weight, m.up_proj.weight])
            x = x + op.linear(op.swiglu(op.linear(h, gate_up)), m.down_proj.weight)
        hidden = op.rms_norm(x, self.norm.weight, eps)
        embedded = inputs = confidences = None
        if self.markov_head is not None:
            embedded = F.embedding(previous_ids.flatten(), self.markov_head.markov_w1.weight).to(dtype)
            inputs = self.markov_head.inputs(embedded.view(n * A, B, -1), hidden.view(n * A, B, -1)).flatten(0, 1)
        if self.confidence_head is not None:
            features = op.widen(hidden)
            if self.confidence_head.has_markov:
                assert embedded is not None
                features = torch.cat([features, op.widen(embedded)], dim=-1)
            proj = self.confidence_head.proj
            confidences = op.linear(features, proj.weight, proj.bias)[:, 0]
        return hidden, inputs, confidences

    def _make_attention(
        self, documents: Documents, anchors: torch.Tensor, positions: torch.Tensor
    ) -> Callable[[_Attention, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Prepare what all layers share (angles, masks) and give the attention of one layer.

        It takes the layer's weights, the blocks' normalised rows (n*A*B, D) and the context (T, D), and gives
        (n*A*B, H*K).
        """
        t, B = self.config.transformer, self.config.block_size
        H, G, K, eps = t.num_attention_heads, t.num_key_value_heads, t.head_dim, t.rms_norm_eps
        n, A = anchors.shape
        # A block at a document's end may reach behind the last position there is; those slots count for nothing.
        positions = positions.flatten().clamp(max=self.cos.shape[0] - 1)
        block_angles = self.cos[positions], self.sin[positions]
        context_angles = self.cos[documents.positions], self.sin[documents.positions]
        groups, _ = documents.padded()
        masks = [_mask(anchors[group.documents], group.rows.shape[1], B) for group in groups]
        order = torch.cat([group.documents for group in groups]).argsort()

        def keys(a: _Attention, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
            both = op.linear(x, torch.cat([a.k_proj.weight, a.v_proj.weight])).unflatten(-1, (2 * G, K))
            k = op.apply_rotary(op.rms_norm(both[:, :G], a.k_norm.weight, eps), *angles, interleaved=False)
            return [k, both[:, G:]]

        def attend(a: _Attention, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
            q = op.linear(x, a.q_proj.weight).unflatten(-1, (H, K))
            q = op.apply_rotary(op.rms_norm(q, a.q_norm.weight, eps), *block_angles, interleaved=False)
            q, k, v = (y.view(n, A * B, -1, K) for y in (q, *keys(a, x, block_angles)))
            far_k, far_v = keys(a, context, context_angles)  # (T, G, K) each
            outs = []
            for group, mask in zip(groups, masks, strict=True):
                own_q, own_k, own_v = (y.index_select(0, group.documents) for y in (q, k, v))  # (g, A*B, ., K)
                all_k = torch.cat([group.gather(far_k), own_k], dim=1).transpose(1, 2)  # (g, G, S+A*B, K)
                all_v = torch.cat([group.gather(far_v), own_v], dim=1).transpose(1, 2)
                if H != G:
                    # Fast kernels with a mask know no groups of heads.
                    all_k, all_v = (y.repeat_interleave(H // G, dim=1) for y in (all_k, all_v))
                out = F.scaled_dot_product_attention(own_q.transpose(1, 2), all_k, all_v, attn_mask=mask)
                outs.append(out.transpose(1, 2))  # (g, A*B, H, K)
            return torch.cat(outs).index_select(0, order).flatten(0, 1).flatten(1)

        return attend


def _mask(anchors: torch.Tensor, num_context: int, block_size: int) -> torch.Tensor:
    """Say what the slots of each document see, of its context and of all its blocks: (n, 1, A*B, S + A*B) bool."""
    n, A = anchors.shape
    is_before = torch.arange(num_context, device=anchors.device) < anchors[..., None]  # (n, A, S)
    is_own = torch.eye(A, dtype=torch.bool, device=anchors.device).repeat_interleave(block_size, dim=1)  # (A, A*B)
    seen = torch.cat([is_before, is_own.expand(n, -1, -1)], dim=-1)  # (n, A, S + A*B)
    return seen.repeat_interleave(block_size, dim=1)[:, None]
