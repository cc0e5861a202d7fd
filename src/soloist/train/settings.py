"""What a training run is asked to do. Owns the checks of these wishes.

The defaults are DeepSpec's where it has one, but for the optimiser: with Muon short runs learn more in a step.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from soloist.errors import UsageError
from soloist.models.causal_lm import ModelConfig
from soloist.spec.dspark_config import ConfidenceInput, DSparkConfig, MarkovType, random_config


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """The draft network."""

    # B, tokens of a proposal.
    block_size: int = 8
    num_hidden_layers: int = 3
    markov_head_type: MarkovType | None = "vanilla"
    markov_rank: int = 256
    has_confidence_head: bool = True
    # None: five, spread over the depth.
    target_layer_ids: tuple[int, ...] | None = None
    # F. None: the target's dense one.
    intermediate_size: int | None = None
    # Row of the target's embedding for the slots behind the anchor. None: the last one, which many vocabularies leave
    # unused.
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        _require(1 <= self.block_size <= 15, f"block_size is {self.block_size}; allowed: 1 to 15")
        _require(self.num_hidden_layers >= 1, f"num_hidden_layers is {self.num_hidden_layers}; allowed: at least 1")
        _require(self.markov_rank >= 1, f"markov_rank is {self.markov_rank}; allowed: at least 1")

    def config_for(self, target: ModelConfig) -> DSparkConfig:
        """Describe the draft of this shape for a target.

        Raises:
            UnsupportedError: layers or the mask token do not fit the target.
        """
        confidence: ConfidenceInput = "hidden_and_markov" if self.markov_head_type else "hidden"
        config = random_config(
            target,
            block_size=self.block_size,
            num_hidden_layers=self.num_hidden_layers,
            markov_head_type=self.markov_head_type,
            markov_rank=self.markov_rank,
            confidence_input=confidence if self.has_confidence_head else None,
            target_layer_ids=self.target_layer_ids,
        )
        fields = asdict_shallow(config)
        transformer = asdict_shallow(config.transformer)
        if self.intermediate_size is not None:
            transformer["intermediate_size"] = self.intermediate_size
        if self.mask_token_id is not None:
            fields["mask_token_id"] = self.mask_token_id
        # States are captured as they leave a layer.
        fields["is_last_layer_raw"] = config.target_layer_ids[-1] == target.num_hidden_layers - 1
        config = DSparkConfig(**(fields | {"transformer": type(config.transformer)(**transformer)}))
        config.check_target(target)
        return config


def asdict_shallow(thing: Any) -> dict[str, Any]:
    """Give the fields of a dataclass as they are."""
    return {name: getattr(thing, name) for name in thing.__dataclass_fields__}


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """Weights of the loss; the terms are in `objective`."""

    # Of the cross-entropy to the text.
    ce_weight: float = 0.1
    # Of the L1 distance between the laws.
    l1_weight: float = 0.9
    # Of the confidence head's cross-entropy.
    confidence_weight: float = 1.0
    # Of the acceptance-length term, once it is on.
    length_weight: float = 1.0
    # Share of the steps, the last ones, in which it is on; CE and L1 are then off.
    length_share: float = 0.2
    # Slot k counts exp(-k / decay_gamma) in CE, L1 and confidence. None: half the block.
    decay_gamma: float | None = None
    # An acceptance a counts as (1 - f) a + f in the weights of the length term, so that late slots learn too.
    length_floor: float = 0.3
    # Laws are compared at the temperature that the text was drawn at, but at least at this. None: at 1.
    min_temperature: float | None = None

    def __post_init__(self) -> None:
        weights = (self.ce_weight, self.l1_weight, self.confidence_weight, self.length_weight)
        are_weights = all(math.isfinite(weight) and weight >= 0 for weight in weights) and any(weights)
        _require(are_weights, f"weights of the loss are {weights}; allowed: 0 and more, not all 0")
        _require(0 <= self.length_share <= 1, f"length_share is {self.length_share}; allowed: 0 to 1")
        _require(0 <= self.length_floor < 1, f"length_floor is {self.length_floor}; allowed: 0 to below 1")
        _require(self.decay_gamma is None or self.decay_gamma > 0, f"decay_gamma is {self.decay_gamma}; allowed: > 0")
        _require(
            self.min_temperature is None or 0 < self.min_temperature <= 1,
            f"min_temperature is {self.min_temperature}; allowed: above 0, to 1",
        )


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One run of the trainer."""

    shape: DraftShape = DraftShape()
    objective: ObjectiveSettings = ObjectiveSettings()
    num_steps: int = 2000
    # Over all processes.
    documents_per_step: int = 32
    # Blocks drawn from a document in a step; fewer where its answer is short.
    anchors_per_document: int = 64
    learning_rate: float = 5e-3
    # Of the maps of layers and of the hidden states; the rest has AdamW. Both take the same rate.
    optimizer: Literal["adamw", "muon"] = "muon"
    # Share of the steps in which the rate rises to its height; then it falls as a cosine to 0.
    warmup_share: float = 0.04
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    # Held out of training to measure on.
    held_out_share: float = 0.05
    # Rows whose logits over the vocabulary are held at once, several times over. None: half a GB of fp32.
    loss_rows: int | None = None
    # Whether the loss is fused by `torch.compile`: half a minute first, then steps over large vocabularies take less.
    is_compiled: bool = False
    # Whether texts and states stay on the device and steps are of one shape, on a GPU CUDA graphs: for small targets,
    # whose operations a GPU runs faster than a processor launches them. Texts are padded to the longest.
    is_recorded: bool = False
    # Of activations: "bf16" or "fp32". Parameters are fp32.
    compute_dtype: str = "bf16"
    seed: int = 0
    log_every: int = 10
    checkpoint_every: int = 200
    # Whether the checkpoint repeats the target's embedding and output head, as DeepSpec's do.
    stores_heads: bool = True

    def __post_init__(self) -> None:
        counts = ("num_steps", "documents_per_step", "anchors_per_document", "log_every", "checkpoint_every")
        for name in counts:
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; allowed: at least 1")
        _require(self.loss_rows is None or self.loss_rows >= 1, f"loss_rows is {self.loss_rows}; allowed: at least 1")
        for name in ("learning_rate", "max_grad_norm"):
            _require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; allowed: above 0")
        _require(self.weight_decay >= 0, f"weight_decay is {self.weight_decay}; allowed: 0 and more")
        _require(0 <= self.warmup_share < 1, f"warmup_share is {self.warmup_share}; allowed: 0 to below 1")
        _require(0 < self.held_out_share < 1, f"held_out_share is {self.held_out_share}; allowed: between 0 and 1")
        _require(self.optimizer in ("adamw", "muon"), f"optimizer is {self.optimizer!r}; adamw or muon")
        _require(self.compute_dtype in ("bf16", "fp32"), f"compute_dtype is {self.compute_dtype!r}; bf16 or fp32")

    def to_json(self) -> dict[str, Any]:
        """Give everything as one object."""
        return asdict(self)
