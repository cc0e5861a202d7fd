"""What a DSpark or DFlash draft is, whichever layout its checkpoint has: the one descriptor, and its fit to a target.

Reading the layouts is `dspark_checkpoint`'s.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

from soloist.errors import UnsupportedError
from soloist.kernels.check import HEAD_SIZES
from soloist.models.causal_lm import ModelConfig
from soloist.models.hybrid import HybridConfig
from soloist.models.layers import DenseConfig

MarkovType = Literal["vanilla", "gated", "rnn"]
ConfidenceInput = Literal["hidden", "hidden_and_markov"]


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """The sizes and conventions of one draft."""

    # The draft's own layers. `vocab_size` is the target's: of the embedding and of the token before a slot.
    transformer: DenseConfig
    # N of the output head and of the Markov bias.
    draft_vocab_size: int
    # B, slots of a block.
    block_size: int
    # True (DSpark): slot k predicts the token at s+k+1. False (DFlash): the one at s+k, and slot 0 nothing.
    slot0_predicts: bool
    # Row of the embedding for the slots behind the anchor.
    mask_token_id: int
    # Target layers, 0-based, whose output is read; -1: the embedding. Strictly increasing.
    target_layer_ids: tuple[int, ...]
    # Depth of the target that the draft was trained for. None: the checkpoint does not say.
    num_target_layers: int | None
    # For each draft layer: rows nearer than this are seen, None: all.
    layer_windows: tuple[int | None, ...]
    # For each draft layer: whether a slot sees no later slot.
    layer_is_causal: tuple[bool, ...]
    # None: slots do not depend on the tokens drafted before them.
    markov_head_type: MarkovType | None
    # Size of the Markov embedding; 0 without such a head.
    markov_rank: int
    # What the confidence head looks at. None: there is none.
    confidence_input: ConfidenceInput | None
    # What the confidence's logit of each slot that predicts is divided by. None: it is not calibrated.
    confidence_temperatures: tuple[float, ...] | None = None
    # Whether the target's last layer was recorded before the final norm. Our trainer's way; others' drafts do not say.
    is_last_layer_raw: bool = False

    def __post_init__(self) -> None:
        L, ids = self.transformer.num_hidden_layers, self.target_layer_ids
        if self.num_drafts < 1:
            raise UnsupportedError(f"config.json: block_size is {self.block_size}, which leaves nothing to draft")
        if not ids or ids[0] < -1 or any(a >= b for a, b in itertools.pairwise(ids)):
            raise UnsupportedError(
                f"config.json: target_layer_ids is {list(ids)}; allowed: layers from -1 on, each higher than the last"
            )
        if not 0 <= self.mask_token_id < self.transformer.vocab_size:
            raise UnsupportedError(
                f"config.json: mask_token_id is {self.mask_token_id}; the embedding has rows 0 to"
                f" {self.transformer.vocab_size - 1}"
            )
        if not 0 < self.draft_vocab_size <= self.transformer.vocab_size:
            raise UnsupportedError(
                f"config.json: draft_vocab_size is {self.draft_vocab_size}; allowed: 1 to vocab_size,"
                f" {self.transformer.vocab_size}"
            )
        if (self.markov_head_type is None) != (self.markov_rank == 0):
            raise UnsupportedError(
                f"config.json: markov_rank is {self.markov_rank} and markov_head_type {self.markov_head_type!r}"
            )
        if self.confidence_input == "hidden_and_markov" and self.markov_head_type is None:
            raise UnsupportedError("config.json: confidence_head_with_markov is true, but there is no Markov head")
        temperatures = self.confidence_temperatures
        if temperatures is not None and (
            self.confidence_input is None or len(temperatures) != self.num_drafts or min(temperatures) <= 0
        ):
            raise UnsupportedError(
                f"config.json: confidence_temperatures is {list(temperatures)}; allowed with a confidence head:"
                f" {self.num_drafts} numbers above 0, one for each draft"
            )
        if len(self.layer_windows) != L or len(self.layer_is_causal) != L:
            raise UnsupportedError(f"config.json: layer_types has {len(self.layer_windows)} entries for {L} layers")

    @property
    def first_slot(self) -> int:
        """The first slot that predicts."""
        return 0 if self.slot0_predicts else 1

    @property
    def num_drafts(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - self.first_slot

    def check_target(self, target: ModelConfig) -> None:
        """Refuse a target that the draft was not made for.

        Raises:
            UnsupportedError: sizes, vocabulary or layers do not fit.
        """
        own = self.transformer
        pairs = {
            "hidden_size": (own.hidden_size, target.hidden_size),
            "vocab_size": (own.vocab_size, target.vocab_size),
            "num_target_layers": (self.num_target_layers or target.num_hidden_layers, target.num_hidden_layers),
        }
        for key, (wanted, given) in pairs.items():
            if wanted != given:
                raise UnsupportedError(
                    f"the draft is for another model: its {key} is {wanted}, the target's {given}; take the draft that"
                    " was trained for this target"
                )
        last = target.num_hidden_layers - 1
        if self.target_layer_ids[-1] >= last + self.is_last_layer_raw:
            raise UnsupportedError(
                f"the draft reads target layers {list(self.target_layer_ids)}; allowed are layers below the last,"
                f" {last}, whose output some trainers record before the final norm and some behind it"
            )


def spread_layers(num_target_layers: int, num_layers: int = 5) -> tuple[int, ...]:
    """Choose target layers to read as DFlash's trainer does, from 1 to the third last; of a small target all it has."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    if num_target_layers < num_layers + 3:
        return tuple(range(max(num_target_layers - 1 - num_layers, 0), num_target_layers - 1))
    return tuple(round(1 + i * (num_target_layers - 4) / (num_layers - 1)) for i in range(num_layers))


def random_config(
    target: ModelConfig,
    *,
    block_size: int = 8,
    num_hidden_layers: int = 5,
    num_attention_heads: int | None = None,
    markov_head_type: MarkovType | None = "vanilla",
    markov_rank: int = 256,
    confidence_input: ConfidenceInput | None = "hidden_and_markov",
    target_layer_ids: tuple[int, ...] | None = None,
) -> DSparkConfig:
    """Describe a draft of the published shape for a target, to be filled with random weights.

    Args:
        target: a dense config, or a hybrid one; heads, head size and F are the target's, of the KDA layers in a hybrid.
            Where attention takes no heads of their size on a GPU, the next larger one that it takes, or the largest.
        block_size: B.
        num_hidden_layers: of the draft.
        num_attention_heads: H and G. None: the target's.
        markov_head_type: None: no Markov head.
        markov_rank: of the Markov head.
        confidence_input: None: no confidence head.
        target_layer_ids: None: five, spread as DFlash's trainer spreads them.
    """
    assert isinstance(target, DenseConfig | HybridConfig), f"a {type(target).__name__} does not say what heads it has"
    if isinstance(target, DenseConfig):
        heads, kv_heads, head_dim = target.num_attention_heads, target.num_key_value_heads, target.head_dim
    else:
        heads, kv_heads = target.kda.num_heads, target.kda.num_heads
        # The layers of the target take sizes that attention does not.
        head_dim = next((size for size in HEAD_SIZES if size >= target.kda.head_dim), HEAD_SIZES[-1])
    if num_attention_heads is not None:
        heads = kv_heads = num_attention_heads
    transformer = DenseConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=num_hidden_layers,
        max_position_embeddings=target.max_position_embeddings,
        eos_token_ids=(),
        intermediate_size=target.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=1e6,
        rope_scaling=None,
        tie_word_embeddings=False,
    )
    return DSparkConfig(
        transformer=transformer,
        draft_vocab_size=target.vocab_size,
        block_size=block_size,
        slot0_predicts=True,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=target_layer_ids or spread_layers(target.num_hidden_layers),
        num_target_layers=target.num_hidden_layers,
        layer_windows=(None,) * num_hidden_layers,
        layer_is_causal=(False,) * num_hidden_layers,
        markov_head_type=markov_head_type,
        markov_rank=markov_rank if markov_head_type else 0,
        confidence_input=confidence_input,
    )
