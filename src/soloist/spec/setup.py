"""What a drafter is made from, whichever it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from soloist.errors import UsageError
from soloist.kernels.allreduce import ALONE, TensorParallel
from soloist.models.causal_lm import CausalLM
from soloist.models.loader import WeightsDtype
from soloist.runtime.buffers import MAX_WIDTH

DraftLayers = Literal["sharded", "replicated"]


@dataclass(frozen=True, kw_only=True)
class DrafterSetup:
    """The target and the wishes around it.

    Raises:
        UsageError: a width that no step has.
    """

    target: CausalLM
    # Where the target's checkpoint is. None: its weights are random, and so are those of a drafter that shares it.
    target_path: Path | None = None
    # Where the draft's own checkpoint is: a folder or a GGUF file. None: it has none.
    draft_path: Path | None = None
    # Most tokens of a request.
    max_context_len: int
    # Ids that may be drawn.
    num_tokens: int
    # Most rows of a step, the pending token included: 2..16. None: what suits the drafter.
    max_width: int | None = None
    # How the draft's linear maps are held, as in `load_model`. None: what suits the machine.
    weights_dtype: WeightsDtype | None = None
    # Of random weights.
    seed: int = 0
    # Whether ranks share the layers of a DSpark draft or an MTP layer as they share the target's, or each holds all of
    # them and exchanges nothing inside. Tables and heads over the vocabulary are shared in both forms.
    draft_layers: DraftLayers = "sharded"

    def __post_init__(self) -> None:
        if self.max_width is not None and not 2 <= self.max_width <= MAX_WIDTH:
            raise UsageError(
                f"a draft width of {self.max_width} rows; allowed: 2 to {MAX_WIDTH}, the pending token and its drafts"
            )

    @property
    def layer_group(self) -> TensorParallel:
        """The ranks that share the draft's layers: the target's, or a group of one."""
        return ALONE if self.draft_layers == "replicated" else self.target.group

    def max_drafts(self, default: int) -> int:
        """Give the drafts of a step: those that were wished for, or `default`."""
        return default if self.max_width is None else self.max_width - 1
