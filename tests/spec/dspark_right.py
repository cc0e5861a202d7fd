"""A draft that is right by design, and a target that it reads: nothing is trained, every weight is written down.

The target says a text of tokens (class, member). Members count up, so the anchor alone tells those of a block; classes
are random, and the residual stream of some layers tells them a few tokens ahead, as a plan. The draft has one head that
reads the plan at one distance, and for each slot one that reads the anchor at the slot's. So it is right only if the
layers, the positions and the slots are those it was made for.
"""

import math
from typing import Any

import torch

from soloist.kernels.rotary import RotaryTable
from soloist.models.cache import Cache, StepKind
from soloist.models.causal_lm import CausalLM, HiddenCapture, ModelConfig
from soloist.models.layers import DenseConfig
from soloist.models.loader import LoadingSource, Placement
from soloist.models.weights import Init, Part
from soloist.spec.dspark_config import DSparkConfig
from soloist.spec.dspark_model import DSparkModel

NUM_CLASSES, NUM_MEMBERS, BLOCK = 7, 5, 4
MASK = NUM_CLASSES * NUM_MEMBERS
N = MASK + 1
# The dimensions of the residual stream.
ONE = 0
MEMBER_IN = slice(1, 1 + NUM_MEMBERS)
PLAN_IN = slice(MEMBER_IN.stop, MEMBER_IN.stop + NUM_CLASSES)
CLASS_OUT = slice(PLAN_IN.stop, PLAN_IN.stop + NUM_CLASSES)
MEMBER_OUT = slice(CLASS_OUT.stop, CLASS_OUT.stop + NUM_MEMBERS)
D = MEMBER_OUT.stop
K, THETA = 16, 50.0
# Layers whose stream holds the plan, and how far behind a slot the plan for its token stands.
PLANNING, DEPTH, DISTANCE = (2, 4), 7, BLOCK + 1


def make_text(length: int, seed: int = 0) -> list[int]:
    classes = torch.randint(NUM_CLASSES, (length,), generator=torch.Generator().manual_seed(seed))
    return (classes * NUM_MEMBERS + torch.arange(length) % NUM_MEMBERS).tolist()


class PlanningTarget(CausalLM):
    """Says a text, as long as it is given that text.

    Args:
        text: all it will ever say.
        lead: added to the places that its plan speaks of; a draft in place needs a plan for the token before.
    """

    architecture = "Planning"

    def __init__(self, text: list[int], lead: int = 1) -> None:
        self.config = ModelConfig(
            vocab_size=N,
            hidden_size=D,
            num_hidden_layers=DEPTH,
            max_position_embeddings=len(text) - 32,
            eos_token_ids=(),
        )
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.text, self.lead = torch.tensor(text), lead
        self.embed_tokens = torch.zeros(N, D)
        self.embed_tokens[:, ONE] = 1
        self.embed_tokens[:MASK, MEMBER_IN] = torch.eye(NUM_MEMBERS).repeat(NUM_CLASSES, 1)
        self.lm_head = torch.zeros(N, D)
        self.lm_head[:MASK, CLASS_OUT] = torch.eye(NUM_CLASSES).repeat_interleave(NUM_MEMBERS, 0)
        self.lm_head[:MASK, MEMBER_OUT] = torch.eye(NUM_MEMBERS).repeat(NUM_CLASSES, 1)

    def make_cache(self, max_context_len: int, max_width: int = 16) -> Cache:
        return Cache(max_context_len=max_context_len, max_width=max_width, device=self.device)

    def stream(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Give the residual stream behind a layer; other layers than the planning ones plan for other places."""
        ahead = DISTANCE + self.lead + (0 if layer in PLANNING else 3 + layer)
        x = torch.zeros(len(positions), D)
        x[:, ONE] = 1
        classes = self.text[(positions + ahead).clamp(max=len(self.text) - 1)] // NUM_MEMBERS
        x[torch.arange(len(positions)), PLAN_IN.start + classes] = 1
        return x

    def forward(
        self,
        input_ids: torch.Tensor,
        cache: Cache,
        kind: StepKind,
        *,
        width: torch.Tensor | None = None,
        capture: HiddenCapture | None = None,
    ) -> torch.Tensor:
        positions = int(cache.context_len) + torch.arange(len(input_ids))
        if capture is not None:
            for layer in capture.layers:
                capture.keep(layer, self.stream(layer, positions))
        hidden = torch.zeros(len(input_ids), D)
        hidden[:, 0], hidden[:, 1] = positions, input_ids
        return hidden

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        positions, input_ids = hidden[:, :2].long().unbind(1)
        said = self.text[(positions + 1).clamp(max=len(self.text) - 1)]
        # Behind a wrong token comes another one.
        said = torch.where(
            self.text[positions.clamp(max=len(self.text) - 1)] == input_ids, said, (input_ids + 1) % MASK
        )
        return torch.zeros(len(said), N).scatter(1, said[:, None], 9.0)


class DictSource(LoadingSource):
    """Gives tensors from a dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(Placement(device=torch.device("cpu"), dtype=torch.float32))
        self.tensors = tensors

    def _fill(self, part: Part, destination: torch.Tensor, init: Init) -> int:
        destination.copy_(self.tensors[part.name].view(part.shape))
        return 0


def right_config(**overrides: Any) -> DSparkConfig:
    heads = 1 + BLOCK
    transformer = DenseConfig(
        vocab_size=N,
        hidden_size=D,
        num_hidden_layers=1,
        max_position_embeddings=1024,
        eos_token_ids=(),
        intermediate_size=3,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=K,
        rms_norm_eps=1e-6,
        rope_theta=THETA,
        rope_scaling=None,
        tie_word_embeddings=False,
    )
    fields = {
        "transformer": transformer,
        "draft_vocab_size": N,
        "block_size": BLOCK,
        "slot0_predicts": True,
        "mask_token_id": MASK,
        "target_layer_ids": PLANNING,
        "num_target_layers": DEPTH,
        "layer_windows": (None,),
        "layer_is_causal": (False,),
        "markov_head_type": None,
        "markov_rank": 0,
        "confidence_input": None,
    }
    return DSparkConfig(**(fields | overrides))


def _peak(distance: int) -> torch.Tensor:
    """Give the query that meets a key of ones best at a distance: (K)."""
    angles = distance * THETA ** (-2 * torch.arange(K // 2) / K)
    return torch.cat([angles.cos(), -angles.sin()])


def right_tensors(*, lead: int = 1, plan_distance: int = DISTANCE, has_markov: bool = False) -> dict[str, torch.Tensor]:
    """Write the weights.

    Args:
        lead: tokens from a slot's position to the one it predicts: 1 from the anchor, 0 in place.
        plan_distance: where the plan is looked for.
        has_markov: whether members come from the token before, by a Markov head, instead of from the anchor.
    """
    heads = 1 + BLOCK
    q, k, v = (torch.zeros(heads, K, D) for _ in range(3))
    o = torch.zeros(D, heads, K)
    k[:, : K // 2, ONE] = 1
    q[0, :, ONE] = _peak(plan_distance)
    v[0, :NUM_CLASSES, PLAN_IN] = torch.eye(NUM_CLASSES)
    o[CLASS_OUT, 0, :NUM_CLASSES] = torch.eye(NUM_CLASSES)
    for slot in range(BLOCK):
        q[1 + slot, :, ONE] = _peak(slot)
        if not has_markov:
            v[1 + slot, :NUM_MEMBERS, MEMBER_IN] = torch.eye(NUM_MEMBERS)
            o[MEMBER_OUT, 1 + slot, :NUM_MEMBERS] = torch.eye(NUM_MEMBERS).roll(slot + lead, 0)
    fc = torch.zeros(D, 2, D)
    fc[ONE, 0, ONE] = 1
    # Half of the plan from each layer: one of them alone is drowned by the other's.
    fc[PLAN_IN, :, PLAN_IN] = torch.eye(NUM_CLASSES)[:, None].expand(-1, 2, -1) / 2
    tensors = {
        "fc.weight": fc,
        "hidden_norm.weight": torch.ones(D),
        "norm.weight": torch.ones(D),
        "layers.0.input_layernorm.weight": torch.ones(D),
        "layers.0.post_attention_layernorm.weight": torch.ones(D),
        "layers.0.self_attn.q_proj.weight": q,
        "layers.0.self_attn.k_proj.weight": k,
        "layers.0.self_attn.v_proj.weight": v,
        "layers.0.self_attn.o_proj.weight": o,
        # Sharp enough to look at one row only.
        "layers.0.self_attn.q_norm.weight": torch.full((K,), 8.0),
        "layers.0.self_attn.k_norm.weight": torch.full((K,), 8.0),
        "layers.0.mlp.gate_proj.weight": torch.zeros(3, D),
        "layers.0.mlp.up_proj.weight": torch.zeros(3, D),
        "layers.0.mlp.down_proj.weight": torch.zeros(D, 3),
    }
    if has_markov:
        members = torch.eye(NUM_MEMBERS).repeat(NUM_CLASSES, 1)
        tensors["markov_head.markov_w1.weight"] = torch.cat([members, torch.zeros(1, NUM_MEMBERS)])
        tensors["markov_head.markov_w2.weight"] = 4 * torch.cat([members.roll(-1, 1), torch.zeros(1, NUM_MEMBERS)])
    return tensors


def right_model(
    target: PlanningTarget, config: DSparkConfig, tensors: dict[str, torch.Tensor], max_positions: int = 288
) -> DSparkModel:
    return DSparkModel(
        config, DictSource(tensors), max_positions, embed_tokens=target.embed_tokens, lm_head=target.lm_head
    )


def angle(table: RotaryTable, position: int) -> float:
    """Give the angle of the fastest pair at a position, modulo a turn."""
    return math.atan2(float(table.sin[position, 0]), float(table.cos[position, 0]))
